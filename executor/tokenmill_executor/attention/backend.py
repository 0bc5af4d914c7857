"""The port of paged attention: what a model asks of the K and V cache, so that other kernels slot in.

A backend owns the cache of all layers and its layout. Must not know: weights, sampling, sequences beyond the flat batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import torch

from tokenmill_executor.attention.cache import PagedHeads
from tokenmill_executor.attention.layout import CacheLayout, cache_layout
from tokenmill_executor.attention.quantization import KvFormat, kv_format
from tokenmill_executor.model.config import ModelConfig
from tokenmill_executor.runner import Batch, Int32Array
from tokenmill_executor.upload import upload


@dataclass(frozen=True, slots=True)
class CacheShape:
    """What a cache is made for.

    `windows` has for each layer how many positions a query sees, its own among them (None: all). Past a window it sees the first
    `sinks` positions too (Xiao et al., "Efficient Streaming Language Models with Attention Sinks", ICLR 2024; positions are
    those in the text). `scale` multiplies the scores, by default 1 / sqrt(head_dim). `dtype` is that of queries and outputs, and of
    the cache too if `kv_cache_dtype` is "auto".
    """

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    windows: tuple[int | None, ...]
    dtype: torch.dtype
    device: torch.device
    sinks: int = 0
    attention_scale: float | None = None
    kv_cache_dtype: str = "auto"

    @classmethod
    def of(cls, config: ModelConfig, dtype: torch.dtype, device: torch.device, kv_cache_dtype: str = "auto") -> CacheShape:
        return cls(
            config.num_layers,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            config.windows,
            dtype,
            device,
            config.sinks,
            config.attention_scale,
            kv_cache_dtype,
        )

    @property
    def scale(self) -> float:
        return float(self.head_dim**-0.5) if self.attention_scale is None else self.attention_scale

    @property
    def kv_format(self) -> KvFormat:
        return kv_format(self.kv_cache_dtype, self.dtype)

    @property
    def layout(self) -> CacheLayout:
        return cache_layout(self.windows, self.sinks)

    def block_bytes(self, block_size: int) -> int:
        """K and V of a group's layers for one block."""
        return 2 * self.layout.layers_per_group * self.num_kv_heads * self.kv_format.head_bytes(self.head_dim) * block_size

    def make_cache(self, num_blocks: int, block_size: int) -> list[PagedHeads]:
        """For each place of a group, K or V of all blocks."""
        sizes = (num_blocks, block_size, self.num_kv_heads, self.head_dim)
        return [PagedHeads(*sizes, self.kv_format, self.device) for _ in range(self.layout.layers_per_group)]


class PagedBackend:
    """What backends over `PagedHeads` share: K and V of each place of a group."""

    def __init__(self, shape: CacheShape) -> None:
        self._shape = shape
        self._block_size = 0
        self._keys: list[PagedHeads] = []
        self._values: list[PagedHeads] = []

    def allocate(self, num_blocks: int, block_size: int) -> None:
        """Makes the cache, dropping an earlier one."""
        self._block_size = block_size
        self._keys, self._values = [], []  # an earlier cache is freed before a new one is made
        self._keys = self._shape.make_cache(num_blocks, block_size)
        self._values = self._shape.make_cache(num_blocks, block_size)

    def storage(self) -> list[torch.Tensor]:
        """[num_blocks, ...] each."""
        return [tensor for heads in (*self._keys, *self._values) for tensor in heads.storage()]

    def erase(self, slots: torch.Tensor) -> None:
        """See `AttentionBackend.erase`."""
        for heads in (*self._keys, *self._values):
            heads.erase(slots)


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """The parts of `Batch` that attention needs, as it has them: on the host, int32. `slots_on_device` is [G, T] int64."""

    query_starts: Int32Array
    context_lens: Int32Array
    block_tables: Int32Array
    slots_on_device: torch.Tensor

    @classmethod
    def of(cls, batch: Batch, device: torch.device) -> AttentionBatch:
        return cls(batch.query_starts, batch.context_lens, batch.block_tables, upload(batch.slots.astype(np.int64), device))


@dataclass(frozen=True, slots=True)
class DecodeInputs:
    """One token of each of N sequences, on the device, int32: what a captured graph reads, so at addresses that stay.

    `slots` are [G, N], `block_tables` [G, N, B]. A row of padding has slot -1 and context length 0. `rows` counts from 0 to N - 1,
    `query_starts` to N; `firsts` are all 0.
    """

    slots: torch.Tensor
    context_lens: torch.Tensor
    block_tables: torch.Tensor
    rows: torch.Tensor
    firsts: torch.Tensor
    query_starts: torch.Tensor


class AttentionBackend(Protocol):
    """Call `prepare` once a step, then for each layer `write_kv` before `attend`."""

    def allocate(self, num_blocks: int, block_size: int) -> None:
        """Makes the cache, dropping an earlier one."""

    def storage(self) -> list[torch.Tensor]:
        """The tensors of the cache, [num_blocks, ...] each and contiguous: all that a block holds is in its rows."""

    def prepare(self, batch: AttentionBatch) -> None:
        """Does what all layers of this step share. The step before may still run, those before that one are over."""

    def write_kv(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Stores K and V, each [T, num_kv_heads, head_dim], of the step's tokens."""

    def attend(self, layer: int, query: torch.Tensor) -> torch.Tensor:
        """[T, num_heads, head_dim] → the same shape. A token sees its sequence up to itself, or the layer's window of that."""

    def erase(self, slots: torch.Tensor) -> None:
        """Zeroes K and V in these slots of all groups, [n] int64: they are not numbers.

        Else they would poison whoever gets their block next, since a masked key's weight of zero times NaN is NaN.
        """


@runtime_checkable
class DecodeBackend(AttentionBackend, Protocol):
    """One whose decodes can be captured in a graph: after `prepare_decode`, launches depend on nothing that the host knows."""

    def decode_splits(self, num_sequences: int, max_context: int) -> int:
        """How the positions of such decodes are best split: part of what a graph is captured for."""

    def all_decode_splits(self, num_sequences: int, max_context: int) -> list[int]:
        """What `decode_splits` gives for contexts up to that, rising."""

    def chunk_contexts(self, max_context: int) -> list[int]:
        """Lengths of context up to that, behind which chunks have a way of their own to be split: all ways there are."""

    def prepare_decode(self, inputs: DecodeInputs, splits: int) -> None:
        """In place of `prepare`, for any contents of `inputs`."""
