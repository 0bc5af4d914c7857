"""Loads the compiled kernels and repeats their records (csrc/kernels.h) for ctypes, field by field.

Must not know: torch, models, files.
"""

from __future__ import annotations

import ctypes
from collections.abc import Collection, Mapping, Sequence
from ctypes import POINTER, PYFUNCTYPE, c_char_p, c_double, c_float, c_int, c_int32, c_size_t, c_void_p
from functools import cache
from pathlib import Path

import numpy as np

from tokenmill_executor.cpu.build import INSTRUCTION_SETS, library_path
from tokenmill_executor.runner import Batch

BLOCK_SIZE = 16
GROUP_SIZE = 64
INT4_GROUP_SIZE = 32
MAX_HEAD_DIM = 256
MAX_GROUP_HEADS = 64  # query heads that share a KV head: rows of an attention item
MATRIX_KINDS = {"bfloat16": 0, "int8": 1, "int4": 2}
KV_KINDS = {"bfloat16": 0, "int8": 1}
STORE_FLOATS, STORE_ADD, STORE_SILU_MUL = range(3)

REQUIRED_FLAGS = {
    "avx512": {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_bf16", "avx512_vnni"},
    "avx2": {"avx2", "fma", "f16c"},
}


class Matrix(ctypes.Structure):
    _fields_ = (
        ("data", c_void_p),
        ("scales", c_void_p),
        ("bias", c_void_p),
        ("columns", c_int32),
        ("depth", c_int32),
        ("kind", c_int32),
        ("unused", c_int32),
    )


class Layer(ctypes.Structure):
    _fields_ = (
        ("qkv", Matrix),
        ("o", Matrix),
        ("gate_up", Matrix),
        ("down", Matrix),
        ("input_norm", c_void_p),
        ("post_norm", c_void_p),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("k_cache", c_void_p),
        ("v_cache", c_void_p),
        ("window", c_int32),
        ("group", c_int32),
    )


class Model(ctypes.Structure):
    _fields_ = (
        *((name, c_int32) for name in ("hidden", "intermediate", "vocab", "num_layers")),
        *((name, c_int32) for name in ("heads", "kv_heads", "head_dim", "max_positions")),
        *((name, c_int32) for name in ("num_blocks", "kv_kind", "sinks", "threads")),
        ("norm_eps", c_float),
        ("attention_scale", c_float),
        ("embeddings", c_void_p),
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("final_norm", c_void_p),
        ("layers", POINTER(Layer)),
        ("head", Matrix),
    )


_BATCH_ARRAYS = ("token_ids", "positions", "slots", "query_starts", "context_lens", "block_tables")


class BatchRecord(ctypes.Structure):
    """`arrays` keeps alive what the pointers point at."""

    _fields_ = (
        *((name, c_int32) for name in ("tokens", "sequences", "table_width", "samples", "groups", "unused")),
        *((name, c_void_p) for name in (*_BATCH_ARRAYS, "rows")),
    )
    arrays: list[np.ndarray]


def batch_record(batch: Batch) -> BatchRecord:
    """The batch as the kernels read it; its arrays made int32 and contiguous where they are not."""
    arrays = [np.ascontiguousarray(getattr(batch, name), np.int32) for name in _BATCH_ARRAYS]
    query_starts, block_tables = arrays[3], arrays[5]
    if np.any((batch.sample_rows < 0) | (batch.sample_rows >= len(query_starts) - 1)):
        raise ValueError("a row of the batch to sample is not one of its sequences")
    arrays.append(np.ascontiguousarray(query_starts[1:][batch.sample_rows] - 1, np.int32))
    tokens, (groups, sequences, width) = len(arrays[0]), block_tables.shape
    if len(query_starts) != sequences + 1 or len(arrays[4]) != sequences or len(arrays[1]) != tokens:
        raise ValueError("the arrays of the batch do not have the same number of tokens or sequences")
    if arrays[2].shape != (groups, tokens):
        raise ValueError("the slots of the batch are not those of its tokens in each group of blocks")
    record = BatchRecord(tokens, sequences, width, len(arrays[6]), groups, 0, *(array.ctypes.data for array in arrays))
    record.arrays = arrays
    return record


class Decodes(ctypes.Structure):
    """`arrays` keeps alive what the pointers point at. Most steps, and what each asks for; see csrc/decode.cpp."""

    _fields_ = (
        ("most", c_int32),
        ("unused", c_int32),
        *((name, c_void_p) for name in ("rows", "columns", "end_starts", "ends", "questions")),
        ("forward_s", c_double),
        ("sample_s", c_double),
    )
    arrays: list[np.ndarray]


def decodes_record(rows: np.ndarray, ends: Sequence[Collection[int]], groups: int, questions: int) -> Decodes:
    """`rows`, [steps, sequences] of SAMPLE_ROW, is filled in by the kernels. `ends` has the tokens that end each sequence, and
    `questions` is the address of an `Interrupt`."""
    steps, sequences = rows.shape
    starts = np.zeros(sequences + 1, np.int32)
    np.cumsum([len(tokens) for tokens in ends], out=starts[1:])
    flat = np.array([token for tokens in ends for token in tokens], np.int32)
    columns = np.empty((3 + groups, sequences), np.int32)
    record = Decodes(steps, 0, rows.ctypes.data, columns.ctypes.data, starts.ctypes.data, flat.ctypes.data, questions, 0.0, 0.0)
    record.arrays = [rows, columns, starts, flat]
    return record


# A row of logits to choose a token from: a pointer to it, what is asked for, and what is filled in.
SAMPLE_ROW = np.dtype(
    [
        ("logits", np.uint64),
        ("uniform", np.float64),
        *((name, np.float32) for name in ("temperature", "top_p", "min_p")),
        *((name, np.int32) for name in ("top_k", "top")),
        ("token", np.int32),
        *((name, np.float32) for name in ("largest", "logprob")),
    ]
)


def first_processor(cpuinfo: str = "/proc/cpuinfo") -> dict[str, str]:
    """What Linux tells of it, by Linux' names; empty where that cannot be read."""
    try:
        told = Path(cpuinfo).read_text(encoding="utf-8").partition("\n\n")[0]
    except OSError:
        return {}
    return {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in told.splitlines())}


def processor_flags(processor: Mapping[str, str] | None = None) -> frozenset[str]:
    """What it can do, in Linux' words; without one, the first."""
    return frozenset((first_processor() if processor is None else processor).get("flags", "").split())


def best_instruction_set(flags: frozenset[str]) -> str | None:
    return next((name for name in INSTRUCTION_SETS if flags >= REQUIRED_FLAGS[name]), None)


@cache
def load(instruction_set: str) -> ctypes.CDLL:
    """The kernels for one instruction set. Raises OSError where they are not built or cannot be loaded."""
    library = ctypes.CDLL(str(library_path(instruction_set)))
    # These keep the interpreter: they are short, and a thread that was given it between two steps would make the next one wait.
    looked_at = (POINTER(Model), POINTER(BatchRecord), c_int)
    vars(library)["tm_check"] = PYFUNCTYPE(c_char_p, *looked_at)(("tm_check", library))
    vars(library)["tm_workspace_bytes"] = PYFUNCTYPE(c_size_t, *looked_at)(("tm_workspace_bytes", library))
    library.tm_panel_columns.argtypes = []
    library.tm_panel_columns.restype = c_int
    library.tm_kv_head_bytes.argtypes = [c_int, c_int]
    library.tm_kv_head_bytes.restype = c_size_t
    library.tm_step.argtypes = [POINTER(Model), POINTER(BatchRecord), c_void_p, c_void_p]
    library.tm_step.restype = None
    library.tm_decode.argtypes = [POINTER(Model), POINTER(BatchRecord), POINTER(Decodes), c_void_p, c_void_p, c_void_p]
    library.tm_decode.restype = c_int
    library.tm_gemm.argtypes = [POINTER(Matrix), c_void_p, c_int, c_int, c_void_p, c_void_p, c_int, c_void_p]
    library.tm_gemm.restype = None
    library.tm_sample_workspace_bytes.argtypes = [c_int, c_int]
    library.tm_sample_workspace_bytes.restype = c_size_t
    library.tm_sample.argtypes = [c_void_p, c_int, c_int, c_int, c_void_p, c_void_p, c_int, c_void_p]
    library.tm_sample.restype = None
    return library
