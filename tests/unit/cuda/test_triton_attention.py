"""Triton's attention against the reference, on random shapes and mixed batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tokenmill_executor.attention.backend import AttentionBatch, CacheShape
from tokenmill_executor.attention.reference import ReferenceAttention
from tokenmill_executor.attention.triton_backend import Tiling, TritonAttention
from torch.utils._python_dispatch import TorchDispatchMode

from tests.fakes.batches import Blocks, Track

CPU = torch.device("cpu")
NUM_BLOCKS, BLOCK_SIZE = 128, 4
# Query heads, KV heads, head size, windows of two layers: groups of 1 to 8, sizes that need padding.
SHAPES = [
    (6, 2, 64, (None, 7)),
    (9, 3, 80, (5, None)),
    (4, 4, 96, (20, 1)),
    (8, 1, 128, (None, 33)),
]
# Largest error, absolute and relative. The interpreter multiplies no bfloat16 matrices; float16 takes the same way.
TOLERANCES = {torch.float32: 1e-5, torch.float16: 4e-3}


class Pair:
    """Both backends, fed alike. `poison` are rows of the next steps whose K and V are that number throughout."""

    def __init__(self, shape: CacheShape, num_processors: int = 4, tolerance: float | None = None, **tilings: Tiling) -> None:
        self.shape = shape
        self.tolerance = TOLERANCES[shape.dtype] if tolerance is None else tolerance
        self.poison: dict[int, float] = {}
        self.last = torch.empty(0)
        self.reference = ReferenceAttention(shape)
        self.triton = TritonAttention(shape, num_processors, **tilings)
        self.blocks = Blocks(NUM_BLOCKS, BLOCK_SIZE, groups=len(shape.layout.groups))
        self.generator = torch.Generator().manual_seed(0)
        for backend in (self.reference, self.triton):
            backend.allocate(NUM_BLOCKS, BLOCK_SIZE)

    def tracks(self, *lengths: int) -> list[Track]:
        return [self.blocks.track([1] * length) for length in lengths]

    def step(self, *advances: tuple[Track, int]) -> None:
        """Runs a batch through both, and compares what every layer gives."""
        batch = AttentionBatch.of(self.blocks.batch(advances), CPU)
        query, key, value = self.heads(int(batch.query_starts[-1]))
        self.reference.prepare(batch)
        self.triton.prepare(batch)
        for row, number in self.poison.items():
            key[row], value[row] = number, number
        for layer in range(self.shape.num_layers):
            for backend in (self.reference, self.triton):
                backend.write_kv(layer, key, value)
            got, expected = self.triton.attend(layer, query), self.reference.attend(layer, query)
            torch.testing.assert_close(got, expected, rtol=self.tolerance, atol=self.tolerance, equal_nan=True)
            self.last = got

    def heads(self, tokens: int) -> Sequence[torch.Tensor]:
        """Query, key and value as views of one tensor, as the fused projection gives them."""
        shape = self.shape
        sizes = [shape.num_heads, shape.num_kv_heads, shape.num_kv_heads]
        fused = torch.randn(tokens, sum(sizes), shape.head_dim, generator=self.generator)
        if shape.kv_cache_dtype == "bfloat16":
            fused = fused.bfloat16()  # nothing is left to round, which the interpreter does otherwise than devices
        return torch.split(fused.to(shape.dtype), sizes, dim=1)


def cache_shape(heads: int, kv_heads: int, head_dim: int, windows: tuple[int | None, ...], dtype: torch.dtype) -> CacheShape:
    return CacheShape(len(windows), heads, kv_heads, head_dim, windows, dtype, CPU)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("sizes", SHAPES, ids=lambda sizes: f"{sizes[0]}x{sizes[1]}x{sizes[2]}")
def test_chunks_decodes_and_their_mixtures_equal_the_reference(
    sizes: tuple[int, int, int, tuple[int | None, ...]], dtype: torch.dtype
) -> None:
    pair = Pair(cache_shape(*sizes, dtype))
    long, short, late, single = pair.tracks(40, 9, 70, 1)
    pair.step((long, 17), (short, 9), (late, 33))
    pair.step((long, 1), (late, 36), (single, 1))
    pair.step((long, 1), (late, 1))


def test_splits_join_to_the_whole() -> None:
    """From one to as many parts as there are tiles and more, over contexts of one position and of many."""
    for num_processors, splits in ((1, 1), (2, 2), (16, 16)):
        pair = Pair(
            cache_shape(2, 2, 64, (20,), torch.float32), num_processors, decode=Tiling(16, 16, 4, 3), chunk=Tiling(64, 64, 4, 2)
        )
        tracks = pair.tracks(75, 2)
        pair.step(*zip(tracks, (74, 1), strict=True))
        assert pair.triton.decode_splits(2, 75) == splits
        pair.step(*((track, 1) for track in tracks))


def test_a_short_chunk_behind_a_long_context_is_split_too() -> None:
    pair = Pair(cache_shape(2, 1, 64, (None,), torch.float32), num_processors=16, chunk=Tiling(64, 16, 4, 2))
    (track,) = pair.tracks(135)
    assert pair.triton._chunk_splits(1, 135) == 2
    pair.step((track, 130))
    pair.step((track, 5))


class Allocations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the numbers that tensors made with `torch.empty` have."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self.numbers += made.numel() if func is torch.ops.aten.empty.memory_format else 0
        return made


def test_parts_take_memory_for_the_queries_that_are_split_and_not_for_the_batch() -> None:
    """A decode in many parts beside a long chunk: with room for all tokens in as many it would be gigabytes in service."""
    pair = Pair(cache_shape(2, 1, 64, (None,), torch.float32), num_processors=16)
    long, decode = pair.tracks(100, 20)
    pair.step((decode, 19))
    pair.step((long, 100), (decode, 1))
    assert (splits := pair.triton.decode_splits(1, 20)) == 32
    with Allocations() as made:
        pair.triton.attend(0, torch.zeros(101, 2, 64))
    assert made.numbers == 101 * 2 * 64 + 2 * splits * 64 + 2 * splits


def test_splits_follow_batch_and_context() -> None:
    backend = TritonAttention(cache_shape(32, 8, 128, (None,), torch.float16), num_processors=132)
    assert [backend.decode_splits(batch, 512) for batch in (1, 4, 16, 64, 256)] == [32, 16, 4, 1, 1]
    assert [backend.decode_splits(256, context) for context in (4096, 8192, 16384, 1 << 20)] == [1, 2, 4, 32]


@pytest.mark.parametrize("sinks", [1, 4, 18, 60])
def test_sinks_are_seen_past_a_window(sinks: int) -> None:
    """With and without splits, by decodes and chunks, of tiles smaller and larger than what lies between sinks and window."""
    shape = replace(cache_shape(6, 2, 64, (20, None), torch.float32), sinks=sinks)
    for num_processors in (1, 16):
        pair = Pair(shape, num_processors, decode=Tiling(16, 16, 4, 3), chunk=Tiling(64, 16, 4, 2))
        long, short = pair.tracks(110, 9)
        pair.step((long, 70), (short, 7))
        pair.step((long, 38), (short, 1))
        pair.step((long, 1), (short, 1))


def test_what_lies_in_other_blocks_is_never_seen() -> None:
    """Not even numbers that are none, before and behind a sequence's own positions."""
    pair = Pair(cache_shape(6, 2, 64, (None, 3), torch.float32))
    for cache in pair.triton.storage():
        cache.fill_(torch.nan)
    long, short = pair.tracks(30, 6)
    pair.step((long, 28), (short, 5))
    pair.step((long, 1), (short, 1))


def test_erase_makes_zeros_of_some_slots() -> None:
    pair = Pair(cache_shape(6, 2, 64, (None,), torch.float32))
    (track,) = pair.tracks(10)
    pair.step((track, 10))
    (slots,) = pair.triton._ready().slots
    pair.triton.erase(slots[[3, 4]])
    stored = pair.triton._keys[0].codes.flatten(0, 1)[slots]
    assert stored.abs().sum(dim=(1, 2)).eq(0).tolist() == [row in (3, 4) for row in range(10)]


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
def test_a_cache_of_more_numbers_than_int32_counts_is_written_and_read_at_its_end(
    monkeypatch: pytest.MonkeyPatch, kv_cache_dtype: str
) -> None:
    """As of a small model on a large device. Memory that nobody touches costs nothing, so the cache is not zeroed here."""
    shape = replace(cache_shape(2, 1, 16, (None,), torch.float16), kv_cache_dtype=kv_cache_dtype)
    num_blocks, length = (1 << 31) // (16 * 16) + 4, 40
    backend, small = TritonAttention(shape, num_processors=4), TritonAttention(shape, num_processors=4)
    with monkeypatch.context() as patched:
        patched.setattr(torch, "zeros", torch.empty)
        backend.allocate(num_blocks, 16)
    small.allocate(8, 16)
    heads = torch.randn(3, length, 2, 16, generator=torch.Generator().manual_seed(0)).half()
    found = []
    for attention, first in ((small, 0), (backend, num_blocks - 4)):
        table = np.array([[range(first + 1, first + 4)]], dtype=np.int32)
        for count in (length - 1, 1):
            start = 0 if count > 1 else length - 1
            positions = np.arange(start, start + count)
            slots = torch.from_numpy(table[0, 0, positions // 16] * np.int64(16) + positions % 16)[None]
            attention.prepare(
                AttentionBatch(np.array([0, count], dtype=np.int32), np.array([start + count], dtype=np.int32), table, slots)
            )
            attention.write_kv(0, heads[0, positions, :1], heads[1, positions, :1])
            found.append(attention.attend(0, heads[2, positions]))
    assert torch.equal(found[0], found[2])
    assert torch.equal(found[1], found[3])
    assert found[0].abs().amax() > 0.1
