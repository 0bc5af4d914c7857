"""Serves batches of all kinds as on CUDA but for the launches themselves, and prints which kernels service alone would compile.

Is run by `test_compiles.py`, with Triton's interpreter off: Triton's own code decides what has to be compiled, for tensors of a CPU
that are aligned as a GPU's are. Nothing is compiled nor run, so numbers mean nothing. Knows how Triton keeps what it has compiled.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import triton
from tokenmill_executor.attention import triton_backend
from tokenmill_executor.interrupt import Interrupt
from tokenmill_executor.model.config import config_from_hf
from tokenmill_executor.model.cuda import cuda_model
from tokenmill_executor.runner import Batch, SamplingInput, SamplingParams
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from benchmarks.gpu.shapes import make_runner
from tests.fakes.models import TINY_SIZES, random_model

CPU = torch.device("cpu")
MAX_MODEL_LEN, BLOCK_SIZE, MAX_NUM_SEQS = 20_000, 16, 24
PARAMS = (
    SamplingParams(99, seed=1, temperature=0.0),
    SamplingParams(99, seed=3, temperature=0.9, top_p=0.8, min_p=0.01, top_k=7),
    SamplingParams(99, seed=3, logprobs=2),
)
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("llama", {}, {}),
    "qwen3-int8": ("qwen3", {}, {"kv_cache_dtype": "int8"}),
    "gemma3": ("gemma3_text", {"sliding_window": 100, "layer_types": ["sliding_attention", "full_attention"]}, {}),
}


class Hopper:
    """A driver as Triton asks it."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def watch(wanted: set[tuple[str, str]]) -> None:
    """Adds each kernel that would be compiled, with what it would be compiled for."""

    def compile_not(self: Any, key: str, signature: Any, device: Any, constexprs: Any, options: Any, attrs: Any, _: Any) -> None:
        wanted.add((self.__name__, f"{signature} {constexprs} {attrs} {options}"))

    JITFunction._do_compile = compile_not
    triton.runtime.driver.set_active(Hopper())
    triton_backend._count_processors = lambda _: 132  # type: ignore[assignment]
    # What no kernel writes is to be numbers.
    torch.empty = torch.zeros  # type: ignore[assignment]
    torch.empty_like = torch.zeros_like
    torch.Tensor.new_empty = torch.Tensor.new_zeros  # type: ignore[method-assign]


def batch_of(rows: Sequence[tuple[int, int]], groups: int) -> Batch:
    """Of so many tokens at the end of such contexts; all sample."""
    counts = [count for count, _ in rows]
    contexts = np.array([context for _, context in rows], dtype=np.int32)
    samples = [SamplingInput(row, [0], 1, PARAMS[row % len(PARAMS)]) for row in range(len(rows))]
    return Batch(
        token_ids=np.zeros(sum(counts), dtype=np.int32),
        positions=np.concatenate([np.arange(context - count, context) for count, context in rows]).astype(np.int32),
        slots=np.zeros((groups, sum(counts)), dtype=np.int32),
        query_starts=np.concatenate([[0], np.cumsum(counts)]).astype(np.int32),
        context_lens=contexts,
        block_tables=np.zeros((groups, len(rows), -(-int(contexts.max()) // BLOCK_SIZE) + 1), dtype=np.int32),
        sample_rows=np.arange(len(rows), dtype=np.int32),
        samples=samples,
    )


def serve(name: str, wanted: set[tuple[str, str]]) -> None:
    """Prints how many kernels the start compiles, and each that it does not."""
    family, changes, settings = CASES[name]
    model = random_model(family, **TINY_SIZES, max_position_embeddings=MAX_MODEL_LEN, **changes)
    config = config_from_hf(model.config.to_dict())
    # As for graphs, which have to be compiled for the same: a capture runs what it captures first.
    settings = {**settings, "enforce_eager": True}
    decoder = cuda_model(config, model.state_dict(), torch.bfloat16, CPU, MAX_MODEL_LEN, MAX_NUM_SEQS, **settings)
    runner = make_runner(decoder, torch.bfloat16, CPU)
    wanted.clear()
    runner.allocate(8, BLOCK_SIZE)
    at_start = set(wanted)
    groups, generator = len(decoder.block_groups), np.random.default_rng(0)
    for step in range(90):
        contexts = np.exp(generator.uniform(np.log(8), np.log(MAX_MODEL_LEN - 8), generator.integers(1, MAX_NUM_SEQS + 4))).astype(
            int
        )
        counts = generator.integers(1, np.minimum(contexts, (2, 80, 5000)[step % 3]) + 1)
        if step % 5 == 0:
            runner.step(batch_of([(int(count), int(context)) for count, context in zip(counts, contexts, strict=True)], groups))
        else:
            decodes = batch_of([(1, int(context)) for context in contexts], groups)
            greedy = [SamplingInput(row, [0], 1, PARAMS[row % 2]) for row in range(len(contexts))]
            decodes.samples[:] = greedy if step % 2 else decodes.samples
            runner.steps(decodes, 1 + step % 3, Interrupt())
    print("at start:", name, len(at_start))
    for kernel, given in sorted(wanted - at_start):
        print("late:", name, kernel, given)


def main() -> None:
    wanted: set[tuple[str, str]] = set()
    watch(wanted)
    for name in sys.argv[1:] or CASES:
        serve(name, wanted)


if __name__ == "__main__":
    main()
