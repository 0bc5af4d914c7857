"""Paged attention on the CPU: the C++ kernels against the bytes they must read, beside gathering for torch's attention.

    python -m benchmarks.attention [--rounds 8] [--threads 2] [--no-torch]

30 layers of 9 query and 3 KV heads of 64, as SmolLM2-135M has; `32 × 512` are 32 decodes with 512 tokens of context each, in blocks
that lie anywhere. The kernels run a whole step, so their attention is what a step of a model with next to no other work takes
longer than at a context of one token. Torch gathers each layer's K and V and calls scaled_dot_product_attention. The bound is the
time to read the K and V seen, at the rate at which all threads together read memory in the same run. Ways and steps take turns in
each round; figures are the least of the rounds. Writes its tables to benchmarks/results/.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from tokenmill_executor.attention.backend import AttentionBatch, CacheShape
from tokenmill_executor.attention.reference import ReferenceAttention
from tokenmill_executor.cpu.library import BLOCK_SIZE
from tokenmill_executor.cpu.model import CpuModel
from tokenmill_executor.model.config import ModelConfig
from tokenmill_executor.runner import Batch

from benchmarks.tables import keep, today
from tests.unit.cpu.small_models import make_batch, random_tensors, random_tokens, scattered_tables, small_config

CPU = torch.device("cpu")
SHAPE: dict[str, Any] = {"num_layers": 30, "num_heads": 9, "num_kv_heads": 3, "head_dim": 64}
TINY: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 64, "vocab_size": 64}
NUM_BLOCKS = 1152
STEPS = {"1 × 128": (1, 128), "8 × 128": (8, 128), "32 × 128": (32, 128), "32 × 512": (32, 512), "2 × 8192": (2, 8192)}
WINDOW_STEP = (2, 8192)
WINDOWS = (256, 512, 1024, 2048, 4096, None)
Times = dict[tuple[str, str], float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--no-torch", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    works = _kernel_works(arguments.threads) | ({} if arguments.no_torch else _torch_works())
    times_ms, rate = _measure(works, arguments.rounds)
    report = _report(times_ms, rate, arguments.threads)
    keep("attention", report)


def _config(window: int | None = None) -> ModelConfig:
    return small_config(**SHAPE, **TINY, windows=(window,) * 30, max_position_embeddings=8192)


def _batch(sequences: int, context: int) -> Batch:
    tables = scattered_tables(sequences, context, num_blocks=NUM_BLOCKS)
    return make_batch([(random_tokens(_config(), context, row), 1, tables[row]) for row in range(sequences)])


def _kernel_works(threads: int) -> dict[tuple[str, str], Callable[[], Any]]:
    """Whole steps, those of one token of context among them, by way and step."""
    works: dict[tuple[str, str], Callable[[], Any]] = {}
    tensors = random_tensors(_config())
    kinds: dict[str, tuple[str, int | None]] = {"C++ bfloat16": ("auto", None), "C++ int8": ("int8", None)}
    kinds |= {f"window {window}": ("auto", window) for window in WINDOWS if window}
    for way, (kv_cache_dtype, window) in kinds.items():
        model = CpuModel(_config(window), tensors, max_model_len=8192, threads=threads, kv_cache_dtype=kv_cache_dtype)
        model.allocate(NUM_BLOCKS, BLOCK_SIZE)
        steps = STEPS if window is None else {"2 × 8192": WINDOW_STEP}
        for name, (sequences, context) in steps.items():
            works[way, name] = partial(model.forward, _batch(sequences, context))
            works[way, f"{name}, rest"] = partial(model.forward, _batch(sequences, 1))
    return works


def _torch_works() -> dict[tuple[str, str], Callable[[], Any]]:
    shape = CacheShape.of(_config(), torch.bfloat16, CPU)
    backend = ReferenceAttention(shape)
    backend.allocate(NUM_BLOCKS, BLOCK_SIZE)

    def attend(batch: AttentionBatch, query: torch.Tensor) -> None:
        backend.prepare(batch)
        for layer in range(shape.num_layers):
            backend.attend(layer, query)

    batches = {name: AttentionBatch.of(_batch(*step), CPU) for name, step in STEPS.items()}
    queries = {name: torch.randn(step[0], 9, 64).bfloat16() for name, step in STEPS.items()}
    return {("torch bfloat16", name): partial(attend, batches[name], queries[name]) for name in STEPS}


@torch.inference_mode()
def _measure(works: Mapping[tuple[str, str], Callable[[], Any]], rounds: int) -> tuple[Times, float]:
    """Least milliseconds of each, and bytes a second that all threads read together."""
    times_ms, rate = dict.fromkeys(works, float("inf")), 0.0
    memory = torch.ones(1 << 27)
    for _ in range(rounds):
        rate = max(rate, memory.nbytes / _seconds(memory.sum))
        for key, work in works.items():
            times_ms[key] = min(times_ms[key], 1e3 * _seconds(work))
    return times_ms, rate


def _seconds(work: Callable[[], Any]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _attention_ms(times_ms: Times, way: str, step: str) -> float:
    return times_ms[way, step] - times_ms.get((way, f"{step}, rest"), 0.0)


def _bound_ms(sequences: int, positions: int, kv_cache_dtype: str, rate: float) -> float:
    shape = CacheShape.of(_config(), torch.bfloat16, CPU, kv_cache_dtype)
    return 1e3 * sequences * positions * shape.block_bytes(1) / rate


def _report(times_ms: Times, rate: float, threads: int) -> str:
    ways = [way for way in ("C++ bfloat16", "C++ int8", "torch bfloat16") if (way, "8 × 128") in times_ms]
    rows = {way: [_attention_ms(times_ms, way, step) for step in STEPS] for way in ways}
    for kv_cache_dtype in ("bfloat16", "int8"):
        rows[f"bound of the memory, {kv_cache_dtype}"] = [_bound_ms(*step, kv_cache_dtype, rate) for step in STEPS.values()]
    shares = [bound / taken for bound, taken in zip(rows["bound of the memory, bfloat16"], rows["C++ bfloat16"], strict=True)]
    windows = [(window, f"window {window}" if window else "C++ bfloat16") for window in WINDOWS]
    lines = [
        f"# Paged attention on the CPU, {today()}",
        "",
        f"`python -m benchmarks.attention --threads {threads}`, torch {torch.__version__}, load {os.getloadavg()[0]:.1f} at the "
        f"end; memory read at {rate / 1e9:.1f} GB/s. Milliseconds of all 30 layers' decodes, least of the rounds.",
        "",
        "| | " + " | ".join(STEPS) + " |",
        "|---" * (len(STEPS) + 1) + "|",
        *(f"| {name} | " + " | ".join(f"{taken:.1f}" for taken in values) + " |" for name, values in rows.items()),
        "| C++ bfloat16, share of its bound | " + " | ".join(f"{share:.0%}" for share in shares) + " |",
        "",
        "## A sliding window: 2 decodes behind 8,192 tokens each, bfloat16",
        "",
        "| window | ms | bound ms |",
        "|---|---|---|",
    ]
    for window, way in windows:
        taken, bound = _attention_ms(times_ms, way, "2 × 8192"), _bound_ms(2, window or 8192, "bfloat16", rate)
        lines.append(f"| {window or 'none'} | {taken:.1f} | {bound:.1f} |")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    main()
