"""Paged attention in plain torch, for any device: gathers a sequence's blocks, then scaled dot-product attention.

Readable and right before fast. Decodes of like length are attended together; a chunk of several tokens by itself.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own usage

from tokenmill_executor.attention.backend import AttentionBatch, CacheShape
from tokenmill_executor.runner import Int32Array

_Rows = np.ndarray[tuple[int], np.dtype[np.int64]]
# Decodes gathered at once: on a CPU so many that what was gathered still lies in its caches when it is read (measured: 2,048
# positions take 70 ms for 32 decodes of 512 where all at once take 110); elsewhere the fewest calls.
_POSITIONS_AT_ONCE = {"cpu": 2048.0}


@dataclass(slots=True)
class _Group:
    """Sequences attended in one call: either one chunk (one sequence) or decodes (one query each).

    - rows: indices of its queries into the flat batch, [sequences * queries].
    - tables: [sequences, blocks], all blocks up to the longest context.
    - positions: [sequences, queries], of the queries.
    """

    rows: torch.Tensor
    tables: torch.Tensor
    positions: torch.Tensor
    masks: dict[int | None, torch.Tensor] = field(default_factory=dict)

    def mask(self, window: int | None, block_size: int, shared: int) -> torch.Tensor:
        """[sequences, 1, shared * queries, keys], True where a query may look. Made once for each kind of layer."""
        if window not in self.masks:
            keys = torch.arange(self.tables.shape[1] * block_size, device=self.tables.device)
            distance = self.positions[:, :, None] - keys
            seen = distance >= 0
            if window is not None:
                seen &= distance < window
            self.masks[window] = seen.repeat(1, shared, 1)[:, None]
        return self.masks[window]


class ReferenceAttention:
    """K and V are [layer][num_blocks, block_size, num_kv_heads, head_dim]."""

    def __init__(self, shape: CacheShape) -> None:
        self._shape = shape
        self._block_size = 0
        self._keys: list[torch.Tensor] = []
        self._values: list[torch.Tensor] = []
        self._groups: list[_Group] = []
        self._slots = torch.empty(0, dtype=torch.int64)

    def allocate(self, num_blocks: int, block_size: int) -> None:
        shape = self._shape
        self._block_size = block_size
        self._keys, self._values = [], []  # an earlier cache is freed before a new one is made
        size = (num_blocks, block_size, shape.num_kv_heads, shape.head_dim)
        # Zeros, not garbage, for the reason given at `AttentionBackend.erase`.
        self._keys = [torch.zeros(size, dtype=shape.dtype, device=shape.device) for _ in range(shape.num_layers)]
        self._values = [torch.zeros(size, dtype=shape.dtype, device=shape.device) for _ in range(shape.num_layers)]

    def prepare(self, batch: AttentionBatch) -> None:
        self._slots = batch.slots_on_device
        counts = np.diff(batch.query_starts)
        self._groups = [self._group(batch, np.array([row])) for row in np.flatnonzero(counts > 1)]
        most = _POSITIONS_AT_ONCE.get(self._shape.device.type, math.inf)
        self._groups += [self._group(batch, rows) for rows in _alike(np.flatnonzero(counts == 1), batch.context_lens, most)]

    def write_kv(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        self._keys[layer].flatten(0, 1).index_copy_(0, self._slots, key)
        self._values[layer].flatten(0, 1).index_copy_(0, self._slots, value)

    def erase(self, rows: torch.Tensor) -> None:
        slots = self._slots[rows]
        for cache in (*self._keys, *self._values):
            cache.flatten(0, 1).index_fill_(0, slots, 0.0)

    def attend(self, layer: int, query: torch.Tensor) -> torch.Tensor:
        if len(self._groups) == 1 and self._groups[0].tables.shape[0] == 1:
            return self._attend(layer, query, self._groups[0])  # one sequence: its rows are the batch
        out = torch.empty_like(query)
        for group in self._groups:
            out.index_copy_(0, group.rows, self._attend(layer, query.index_select(0, group.rows), group))
        return out

    def _attend(self, layer: int, query: torch.Tensor, group: _Group) -> torch.Tensor:
        """[sequences * queries, num_heads, head_dim] → the same."""
        shape, (sequences, queries) = self._shape, group.positions.shape
        # The query heads that share a KV head become more queries of it, so that K and V are not repeated.
        shared = shape.num_heads // shape.num_kv_heads
        heads = query.view(sequences, queries, shape.num_kv_heads, shared, shape.head_dim).permute(0, 2, 3, 1, 4)
        out = F.scaled_dot_product_attention(
            heads.reshape(sequences, shape.num_kv_heads, shared * queries, shape.head_dim),
            self._gather(self._keys[layer], group),
            self._gather(self._values[layer], group),
            attn_mask=group.mask(shape.windows[layer], self._block_size, shared),
            scale=shape.scale,
        )
        return out.view(heads.shape).permute(0, 3, 1, 2, 4).reshape(query.shape)

    def _gather(self, cache: torch.Tensor, group: _Group) -> torch.Tensor:
        """[sequences, num_kv_heads, keys, head_dim]."""
        sequences = group.tables.shape[0]
        blocks = cache.index_select(0, group.tables.flatten())
        return blocks.view(sequences, -1, self._shape.num_kv_heads, self._shape.head_dim).transpose(1, 2)

    def _group(self, batch: AttentionBatch, sequences: _Rows) -> _Group:
        """Of sequences with equally many queries, longest context last."""
        device = self._shape.device
        contexts = batch.context_lens[sequences].astype(np.int64)
        queries = int(batch.query_starts[sequences[0] + 1] - batch.query_starts[sequences[0]])
        steps = np.arange(queries)
        rows = batch.query_starts[sequences].astype(np.int64)[:, None] + steps
        num_blocks = -(-contexts // self._block_size)
        tables = batch.block_tables[sequences, : num_blocks.max()].astype(np.int64)
        # A shorter table is filled up with a block of its own, so that what happens to other sequences cannot reach it.
        tables = np.where(np.arange(tables.shape[1]) < num_blocks[:, None], tables, tables[:, :1])
        return _Group(
            rows=torch.from_numpy(rows.reshape(-1)).to(device),
            tables=torch.from_numpy(tables).to(device),
            positions=torch.from_numpy(contexts[:, None] - queries + steps).to(device),
        )


def _alike(decodes: _Rows, context_lens: Int32Array, most_positions: float) -> list[_Rows]:
    """Parts whose longest context is at most twice the shortest, so that padding at most doubles the work, and within a size."""
    decodes = decodes[np.argsort(context_lens[decodes], kind="stable")]
    lengths = context_lens[decodes]
    parts, start = [], 0
    for end in range(1, len(decodes) + 1):
        last = end == len(decodes)
        if last or lengths[end] > 2 * lengths[start] or lengths[end] * (end + 1 - start) > most_positions:
            parts.append(decodes[start:end])
            start = end
    return parts
