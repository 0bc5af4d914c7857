"""Milliseconds of one decoder step on the CPU: the C++ kernels beside the torch path and beside what the memory allows.

    python -m benchmarks.cpu_step [--rounds 20] [--threads 2] [--no-torch]

The model has the shape of SmolLM2-135M and random weights; the KV cache is paged in blocks that lie anywhere. `8 × 128` is eight
sequences that decode with 128 tokens of context; the last column is a prefill chunk. Each figure is the least of its rounds, the
ways take turns in each round, and the memory's rate is measured in the same run: other work on the machine disturbs all alike. The
bound is the time to read the weights and the context's K and V once. Writes its table to benchmarks/results/.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from typing import Any

import torch
from tokenmill_executor.cpu.library import BLOCK_SIZE
from tokenmill_executor.cpu.model import CpuModel
from tokenmill_executor.model.config import ModelConfig
from tokenmill_executor.model.decoder import Decoder
from tokenmill_executor.runner import Batch

from benchmarks.tables import keep, processor, today
from tests.unit.cpu.small_models import make_batch, random_tensors, random_tokens, scattered_tables, small_config

NUM_BLOCKS = 1152
MAX_MODEL_LEN = 2048
SMOLLM2: dict[str, Any] = {
    "hidden_size": 576,
    "num_layers": 30,
    "num_heads": 9,
    "num_kv_heads": 3,
    "head_dim": 64,
    "intermediate_size": 1536,
    "vocab_size": 49_152,
    "tie_word_embeddings": True,
}
# (sequences, context after the step, new tokens of each)
STEPS = {
    "1 × 128": (1, 128, 1),
    "8 × 128": (8, 128, 1),
    "32 × 128": (32, 128, 1),
    "32 × 512": (32, 512, 1),
    "512 after 512": (1, 1024, 512),
}
WAYS: dict[str, dict[str, Any]] = {
    "C++ bfloat16": {},
    "C++ bfloat16, KV int8": {"kv_cache_dtype": "int8"},
    "C++ int8": {"quantization": "int8"},
    "C++ int8, KV int8": {"quantization": "int8", "kv_cache_dtype": "int8"},
    "C++ int4": {"quantization": "int4"},
}
Forward = Callable[[Batch], torch.Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--no-torch", action="store_true", help="without the torch path, which takes most of the time")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    config = small_config(**SMOLLM2)
    ways = _ways(config, arguments.threads, with_torch=not arguments.no_torch)
    batches = {name: _batch(config, *step) for name, step in STEPS.items()}
    times_ms, rate = _measure(ways, batches, arguments.rounds)
    table = _table(config, times_ms, rate, arguments.threads)
    keep("cpu-step", table)


def _ways(config: ModelConfig, threads: int, with_torch: bool) -> dict[str, Forward]:
    tensors = random_tensors(config)
    models: dict[str, CpuModel | Decoder] = {
        name: CpuModel(config, tensors, max_model_len=MAX_MODEL_LEN, threads=threads, **settings) for name, settings in WAYS.items()
    }
    if with_torch:
        models["torch bfloat16"] = Decoder(config, tensors, torch.bfloat16, torch.device("cpu"), MAX_MODEL_LEN)
    for model in models.values():
        model.allocate(NUM_BLOCKS, BLOCK_SIZE)
    return {name: model.forward for name, model in models.items()}


def _batch(config: ModelConfig, sequences: int, context: int, new: int) -> Batch:
    tables = scattered_tables(sequences, context, num_blocks=NUM_BLOCKS)
    return make_batch([(random_tokens(config, context, row), new, tables[row]) for row in range(sequences)])


@torch.inference_mode()
def _measure(ways: dict[str, Forward], batches: dict[str, Batch], rounds: int) -> tuple[dict[str, list[float]], float]:
    """Least milliseconds of each way and step, and bytes a second that all threads read together."""
    times_ms = {way: [float("inf")] * len(batches) for way in ways}
    rate = 0.0
    memory = torch.ones(1 << 27)
    for round_number in range(rounds + 1):
        rate = max(rate, memory.nbytes / _seconds(memory.sum))
        for index, batch in enumerate(batches.values()):
            if len(batch.token_ids) > 64 and round_number % 4:
                continue  # a chunk takes long, and varies less
            for way, forward in ways.items():
                elapsed_ms = 1e3 * _seconds(lambda forward=forward, batch=batch: forward(batch))  # type: ignore[misc]
                if round_number:
                    times_ms[way][index] = min(times_ms[way][index], elapsed_ms)
    return times_ms, rate


def _seconds(work: Callable[[], Any]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _bound_ms(config: ModelConfig, sequences: int, context: int, rate: float, weight_bytes: float, kv_bytes: float) -> float:
    attention = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim + config.num_heads * config.head_dim
    layer = config.hidden_size * (attention + 3 * config.intermediate_size)
    weights = weight_bytes * (config.num_layers * layer + config.vocab_size * config.hidden_size)
    cache = kv_bytes * 2 * config.num_layers * config.num_kv_heads * config.head_dim * sequences * context
    return 1e3 * (weights + cache) / rate


def _table(config: ModelConfig, times_ms: dict[str, list[float]], rate: float, threads: int) -> str:
    bounds = {
        name: [_bound_ms(config, sequences, context, rate, *widths) for sequences, context, _ in STEPS.values()]
        for name, widths in {
            "bound of the memory, bfloat16": (2, 2),
            "bound of the memory, int8": (1, 1 + 4 / config.head_dim),
        }.items()
    }
    rows = [
        f"| {name} | " + " | ".join(f"{time_ms:.1f}" for time_ms in times) + " |" for name, times in (times_ms | bounds).items()
    ]
    return "\n".join(
        (
            f"# A step on the CPU, {today()}",
            "",
            f"`python -m benchmarks.cpu_step`, {threads} threads ({processor()}), torch {torch.__version__}, load "
            f"{os.getloadavg()[0]:.1f} at the end; memory read at {rate / 1e9:.1f} GB/s. Milliseconds, least of the rounds.",
            "",
            "| | " + " | ".join(STEPS) + " |",
            "|---" * (len(STEPS) + 1) + "|",
            *rows,
            "",
        )
    )


if __name__ == "__main__":
    main()
