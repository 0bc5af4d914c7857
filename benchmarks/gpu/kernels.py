"""Single kernels against the device's bounds, on the shapes of the model: what to look at when a step is far from its own."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own usage
from tokenmill_executor.attention.backend import AttentionBatch, CacheShape
from tokenmill_executor.attention.triton_backend import CHUNK, DECODE, Tiling, TritonAttention
from tokenmill_executor.model.config import ModelConfig
from tokenmill_executor.model.cuda import cuda_draws
from tokenmill_executor.runner import SamplingInput, SamplingParams

from benchmarks.gpu.shapes import BLOCK_SIZE, DRAWN, Scale
from benchmarks.gpu.speed import Bounds, wait
from benchmarks.gpu.table import Table
from tests.fakes.batches import Blocks

# Beyond any cache: weights are taken in turn from copies of so many bytes together.
_WORKING_SET = 256 << 20


def products(scale: Scale, dtype: torch.dtype, device: torch.device, bounds: Bounds) -> Table:
    """The decode step's matrix products: how near each is to reading its weights at the copy rate, or to the matrix rate."""
    table = Table("Matrix products of a decode step", ("product", "sequences", "µs", "bound µs", "share of the bound"))
    working_set = _WORKING_SET if device.type == "cuda" else 1
    for name, (rows, columns) in _shapes(scale.config).items():
        size_bytes = rows * columns * dtype.itemsize
        count = max(2, working_set // size_bytes)
        weights = [torch.empty((rows, columns), dtype=dtype, device=device).normal_() for _ in range(count)]
        for batch in scale.decode_batches:
            given = torch.empty((batch, columns), dtype=dtype, device=device).normal_()
            taken_s = _mean_s([lambda weight=weight, given=given: F.linear(given, weight) for weight in weights], device)  # type: ignore[misc]
            bound_s = max(size_bytes / bounds.copy_rate, 2 * rows * columns * batch / bounds.matrix_rate)
            table.rows.append((name, batch, 1e6 * taken_s, 1e6 * bound_s, bound_s / taken_s))
    return table


def _shapes(config: ModelConfig) -> dict[str, tuple[int, int]]:
    query, hidden = config.num_heads * config.head_dim, config.hidden_size
    return {
        "qkv": (query + 2 * config.num_kv_heads * config.head_dim, hidden),
        "output": (hidden, query),
        "gate and up": (2 * config.intermediate_size, hidden),
        "down": (hidden, config.intermediate_size),
        "head": (config.vocab_size, hidden),
    }


def tilings(scale: Scale, dtype: torch.dtype, device: torch.device, bounds: Bounds) -> Table:
    """The attention kernels of one layer under other tilings than those chosen in `triton_backend.py`."""
    table = Table("Attention of one layer by tiling", ("step", "rows, tile, warps, stages", "µs", "bound µs", "share of the bound"))
    chosen = DECODE[dtype.itemsize], CHUNK[dtype.itemsize]
    others = (_DECODES, _CHUNKS) if device.type == "cuda" else ((), ())
    config = scale.config
    batch = scale.profiled_batches[-1]  # a small one's K and V would stay in the device's cache
    read = 2 * batch * scale.context * config.num_kv_heads * config.head_dim * dtype.itemsize
    for tiling in (chosen[0], *others[0]):
        taken_s = _attend_s(scale, dtype, device, (batch, scale.context, 1), tiling, chosen[1])
        table.rows.append(_row(f"{batch} decodes", tiling, taken_s, read / bounds.copy_rate))
    tokens = max(scale.chunks) // 2
    operations = 4 * config.num_heads * config.head_dim * tokens * tokens / 2
    for tiling in (chosen[1], *others[1]):
        taken_s = _attend_s(scale, dtype, device, (1, tokens, tokens), chosen[0], tiling)
        table.rows.append(_row(f"chunk of {tokens}", tiling, taken_s, operations / bounds.matrix_rate))
    return table


def caches(scale: Scale, dtype: torch.dtype, device: torch.device, bounds: Bounds) -> Table:
    """Decodes of one layer by what the KV cache holds: fewer bytes to read, and the time they take."""
    table = Table("Attention of one layer by cache", ("cache", "µs", "bound µs", "share of the bound"))
    config, batch = replace(scale.config, num_layers=1, windows=(None,)), scale.profiled_batches[-1]
    for cache in ("auto", "int8", "int4", "fp8"):
        read = batch * scale.context * CacheShape.of(config, dtype, device, cache).block_bytes(1)
        chosen = DECODE[dtype.itemsize], CHUNK[dtype.itemsize]
        taken_s, bound_s = _attend_s(scale, dtype, device, (batch, scale.context, 1), *chosen, cache), read / bounds.copy_rate
        table.rows.append((cache, 1e6 * taken_s, 1e6 * bound_s, bound_s / taken_s))
    return table


def draws(scale: Scale, device: torch.device) -> Table:
    """What drawing the tokens of a step takes beside its forward pass."""
    table = Table("Drawing the tokens of a step", ("parameters", "sequences", "µs"))
    for name, params in DRAWN.items():
        for batch in scale.profiled_batches:
            samples = [SamplingInput(row, [1], 1, SamplingParams(1, seed=row, **params)) for row in range(batch)]
            made, logits = (
                cuda_draws("auto")(samples, 1, device),
                torch.empty((batch, scale.config.vocab_size), device=device).normal_(),
            )
            maxima, greedy = logits.max(dim=-1)
            job = partial(made.draw, 0, logits, maxima, greedy)
            table.rows.append((name, batch, 1e6 * _mean_s([job] * (20 if device.type == "cuda" else 1), device)))
    return table


# Beside the chosen ones.
_DECODES = (Tiling(16, 32, 4, 5), Tiling(16, 64, 4, 5), Tiling(16, 128, 4, 3), Tiling(16, 64, 2, 3))
_CHUNKS = (Tiling(128, 64, 8, 3), Tiling(128, 128, 8, 3), Tiling(64, 64, 4, 3), Tiling(64, 64, 4, 5))


def _attend_s(
    scale: Scale,
    dtype: torch.dtype,
    device: torch.device,
    step: tuple[int, int, int],
    decode: Tiling,
    chunk: Tiling,
    cache: str = "auto",
) -> float:
    """`step`: sequences, tokens of context, tokens of each in the step."""
    sequences, context, tokens = step
    config = replace(scale.config, num_layers=1, windows=(None,))
    processors = None if device.type == "cuda" else 4
    backend = TritonAttention(CacheShape.of(config, dtype, device, cache), processors, decode, chunk)
    num_blocks = sequences * -(-context // BLOCK_SIZE)
    backend.allocate(num_blocks, BLOCK_SIZE)
    blocks = Blocks(num_blocks, BLOCK_SIZE)
    tracks = [blocks.track([5] * context) for _ in range(sequences)]
    for track in tracks:
        track.computed = context - tokens
    backend.prepare(AttentionBatch.of(blocks.batch([(track, tokens) for track in tracks]), device))
    query = torch.empty((sequences * tokens, config.num_heads, config.head_dim), dtype=dtype, device=device).normal_()
    return _mean_s([lambda: backend.attend(0, query)] * (20 if device.type == "cuda" else 1), device)


def _row(step: str, tiling: Tiling, taken_s: float, bound_s: float) -> tuple[str, str, float, float, float]:
    name = f"{tiling.rows}, {tiling.tile}, {tiling.num_warps}, {tiling.num_stages}"
    return step, name, 1e6 * taken_s, 1e6 * bound_s, bound_s / taken_s


def _mean_s(jobs: Sequence[Callable[[], object]], device: torch.device) -> float:
    """Of the jobs in a row: on CUDA replayed from a graph, so that launching them is not what is measured."""
    if device.type != "cuda":
        started_s = time.perf_counter()
        for job in jobs:
            job()
        return (time.perf_counter() - started_s) / len(jobs)
    for job in jobs[:2]:
        job()
    wait(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for job in jobs:
            job()
    graph.replay()
    wait(device)
    started_s = time.perf_counter()
    for _ in range(5):
        graph.replay()
    wait(device)
    return (time.perf_counter() - started_s) / (5 * len(jobs))
