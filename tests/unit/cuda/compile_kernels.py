"""Compiles each kernel for Hopper as an 8B Llama in bfloat16 would have it, and prints a line for each: what a GPU would run.

Is run by `test_compiles.py`, with Triton's interpreter off. Knows the kernels' arguments, and how Triton is called without a GPU.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import triton
from tokenmill_executor.attention.quantization import FP8, INT4, INT8, KvFormat
from tokenmill_executor.attention.triton_backend import CHUNK, DECODE, Tiling
from tokenmill_executor.attention.triton_kernels import attend_kernel, join_splits_kernel, quantize_kv_kernel, write_kv_kernel
from tokenmill_executor.model.triton_ops import rms_norm_kernel, rotate_kernel, silu_mul_kernel
from tokenmill_executor.sampling.triton_draws import BLOCK, NUM_WARPS, draw_kernel
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

HOPPER = GPUTarget("cuda", 90, 32)
INTEGERS = dict.fromkeys(("block_tables", "query_starts", "context_lens", "tile_sequences", "tile_firsts", "slots"), "*i32")
WIDE = dict.fromkeys(("partial_out", "partial_max", "partial_sum"), "*fp32")
ROWS = {"tokens": "*i64", "greedy": "*i64", "maxima": "*fp32", "logits": "*fp32", "packed": "*fp64", "uniform": "*fp64"}
NUMBERS = {"scale": "fp32", "eps": "fp32", **dict.fromkeys(("table_stride", "size", "logits_stride"), "i32")}
NUMBERS |= dict.fromkeys(("query_stride", "key_stride", "value_stride", "row_stride"), "i32")
UNALIGNED = ("scale", "eps", "table_stride", "uniform")
CODES = {"int8": (INT8, "*i8"), "int4": (INT4, "*u8"), "fp8": (FP8, "*fp8e4nv")}
SCALES = ("key_scales", "value_scales")
HEADS: dict[str, Any] = {"HEAD_DIM": 128, "HEAD_PADDED": 128}


def compile_kernel(name: str, kernel: Any, constants: Mapping[str, Any], codes: str = "*bf16", **options: int) -> None:
    types = {**INTEGERS, **WIDE, **ROWS, **NUMBERS, "keys": codes, "values": codes, **dict.fromkeys(SCALES, "*fp32")}
    signature = {argument: "constexpr" if argument in constants else types.get(argument, "*bf16") for argument in kernel.arg_names}
    # As at run time: pointers and strides are multiples of 16, but for those that are said not to be.
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, argument in enumerate(kernel.arg_names)
        if argument not in (*constants, *INTEGERS, *UNALIGNED)
    }
    compiled = triton.compile(ASTSource(kernel, signature, dict(constants), aligned), target=HOPPER, options=options)
    code = compiled.asm["ptx"]
    instructions = [word for word in ("wgmma", "mma.sync", "cp.async") if word in code]
    print(name, f"stack={stack_bytes(compiled.asm['cubin'])}", f"shared={compiled.metadata.shared}", *instructions)


def stack_bytes(binary: bytes) -> int:
    """Of one thread: what finds no register is spilled there."""
    cuobjdump = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        command = [str(cuobjdump), "--dump-resource-usage", file.name]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return sum(int(number) for number in re.findall(r"STACK:(\d+)", told))


def attend(
    name: str,
    tiling: Tiling,
    queries: int,
    split: bool,
    window: int = 0,
    sinks: int = 0,
    kind: KvFormat | None = None,
    codes: str = "*bf16",
) -> None:
    constants = {"NUM_KV_HEADS": 8, "GROUP": 4, "BLOCK_SIZE": 16, "QUERIES": queries, "SPLIT": split, **HEADS}
    constants |= {"PACKED": 1, **dict.fromkeys(SCALES)} if kind is None else {"PACKED": kind.packed}
    constants |= {"WINDOW": window, "SINKS": sinks}
    constants |= {"ROWS": tiling.rows, "TILE": tiling.tile}
    compile_kernel(name, attend_kernel, constants, codes, num_warps=tiling.num_warps, num_stages=tiling.num_stages)


def main() -> None:
    attend("decode", DECODE[2], 1, split=True)
    attend("chunk", CHUNK[2], CHUNK[2].rows // 4, split=False)
    attend("window-decode", DECODE[2], 1, split=True, window=4096, sinks=4)
    attend("window-chunk", CHUNK[2], CHUNK[2].rows // 4, split=False, window=4096, sinks=4)
    for format_name, (kind, codes) in CODES.items():
        attend(f"{format_name}-decode", DECODE[2], 1, split=True, kind=kind, codes=codes)
        constants = {"HEAD_DIM": 128, "WIDTH_PADDED": kind.width(128), "PACKED": kind.packed, "LARGEST": kind.largest}
        compile_kernel(f"{format_name}-write", quantize_kv_kernel, constants, codes, num_warps=1)
    attend("int4-chunk", CHUNK[2], CHUNK[2].rows // 4, split=False, kind=INT4, codes="*u8")
    compile_kernel("join", join_splits_kernel, {"NUM_HEADS": 32, "QUERIES": 1, "SPLITS": 32, **HEADS}, num_warps=2)
    compile_kernel("write", write_kv_kernel, {"ROW": 1024, "ROW_PADDED": 1024})
    compile_kernel("norm", rms_norm_kernel, {"HEADS": 1, "SIZE": 4096, "SIZE_PADDED": 4096, "ADD": True}, num_warps=8)
    compile_kernel("rotate", rotate_kernel, {"NUM_HEADS": 32, "HALF": 64, "HALF_PADDED": 64}, num_warps=1)
    compile_kernel("silu", silu_mul_kernel, {"BLOCK": 1024})
    compile_kernel("draw", draw_kernel, {"VOCAB_SIZE": 128_256, "BLOCK": BLOCK}, num_warps=NUM_WARPS)


if __name__ == "__main__":
    main()
