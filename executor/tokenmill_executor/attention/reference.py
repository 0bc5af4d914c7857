"""Paged attention in plain torch, for any device: gathers a sequence's blocks, then scaled dot-product attention.

Readable and right before fast. Decodes of like length are attended together; a chunk of several tokens by itself, a long one behind
much context in pieces, so that memory stays bounded. Of a layer with a window only the blocks that it sees are gathered.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own usage

from tokenmill_executor.attention.backend import AttentionBatch, CacheShape, PagedBackend
from tokenmill_executor.attention.cache import PagedHeads
from tokenmill_executor.runner import Int32Array
from tokenmill_executor.upload import upload

_Rows = np.ndarray[tuple[int], np.dtype[np.int64]]
# Decodes gathered at once: on a CPU so many that what was gathered still lies in its caches when it is read (measured: 2,048
# positions take 70 ms for 32 decodes of 512 where all at once take 110); elsewhere the fewest calls.
_POSITIONS_AT_ONCE = {"cpu": 2048.0}
# Scores (queries times heads of a group times keys) of one call: what a mask, and what is made of it, takes memory for.
_SCORES_AT_ONCE = 1 << 24


@dataclass(frozen=True, slots=True)
class _View:
    """What the layers of one group see of a piece: blocks and which of their positions.

    - tables: [sequences, blocks].
    - keys: [sequences, blocks * block_size], the position that each key has.
    """

    tables: torch.Tensor
    keys: torch.Tensor


@dataclass(slots=True)
class _Piece:
    """Sequences attended in one call: either consecutive queries of one sequence, or decodes (one query each).

    - rows: indices of its queries into the flat batch, [sequences * queries].
    - sequences: their places in the batch, [sequences].
    - positions: [sequences, queries] int32, of the queries; `last` is that of each sequence's last one, on the host.
    - whole: no other piece has queries of these sequences, so that its masks are few, and kept.
    """

    rows: torch.Tensor
    sequences: _Rows
    positions: torch.Tensor
    last: _Rows
    whole: bool
    views: dict[int, _View] = field(default_factory=dict)
    masks: dict[int, torch.Tensor] = field(default_factory=dict)


class ReferenceAttention(PagedBackend):
    """K and V of each place in a group."""

    def __init__(self, shape: CacheShape) -> None:
        super().__init__(shape)
        self._layout = shape.layout
        self._pieces: list[_Piece] = []
        self._slots = torch.empty((0, 0), dtype=torch.int64)
        self._block_tables = np.zeros((0, 0, 0), dtype=np.int32)

    def prepare(self, batch: AttentionBatch) -> None:
        self._slots = batch.slots_on_device
        self._block_tables = batch.block_tables
        counts = np.diff(batch.query_starts)
        self._pieces = [piece for row in np.flatnonzero(counts > 1).tolist() for piece in self._chunk(batch, row)]
        most = _POSITIONS_AT_ONCE.get(self._shape.device.type, math.inf)
        decodes = _alike(np.flatnonzero(counts == 1), batch.context_lens, most)
        self._pieces += [self._piece(batch, rows, 0, 1, whole=True) for rows in decodes]

    def write_kv(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        group, place = self._layout.places[layer]
        self._keys[place].write(self._slots[group], key)
        self._values[place].write(self._slots[group], value)

    def attend(self, layer: int, query: torch.Tensor) -> torch.Tensor:
        if len(self._pieces) == 1 and len(self._pieces[0].sequences) == 1:
            return self._attend(layer, query, self._pieces[0])  # one sequence: its rows are the batch
        out = torch.empty_like(query)
        for piece in self._pieces:
            out.index_copy_(0, piece.rows, self._attend(layer, query.index_select(0, piece.rows), piece))
        return out

    def _attend(self, layer: int, query: torch.Tensor, piece: _Piece) -> torch.Tensor:
        """[sequences * queries, num_heads, head_dim] → the same."""
        shape, (sequences, queries) = self._shape, piece.positions.shape
        group, place = self._layout.places[layer]
        view = self._view(piece, group)
        # The query heads that share a KV head become more queries of it, so that K and V are not repeated.
        shared = shape.num_heads // shape.num_kv_heads
        heads = query.view(sequences, queries, shape.num_kv_heads, shared, shape.head_dim).permute(0, 2, 3, 1, 4)
        out = F.scaled_dot_product_attention(
            heads.reshape(sequences, shape.num_kv_heads, shared * queries, shape.head_dim),
            self._gather(self._keys[place], view),
            self._gather(self._values[place], view),
            attn_mask=self._mask(piece, group, view),
            scale=shape.scale,
        )
        return out.view(heads.shape).permute(0, 3, 1, 2, 4).reshape(query.shape)

    def _gather(self, heads: PagedHeads, view: _View) -> torch.Tensor:
        """[sequences, num_kv_heads, keys, head_dim]."""
        sequences = view.tables.shape[0]
        blocks = heads.gather(view.tables.flatten(), self._shape.dtype)
        return blocks.view(sequences, -1, self._shape.num_kv_heads, self._shape.head_dim).transpose(1, 2)

    def _chunk(self, batch: AttentionBatch, sequence: int) -> Iterator[_Piece]:
        """The queries of one sequence, so many at once as memory is bounded for."""
        count = int(batch.query_starts[sequence + 1] - batch.query_starts[sequence])
        shared = self._shape.num_heads // self._shape.num_kv_heads
        at_once = max(1, _SCORES_AT_ONCE // (shared * int(batch.context_lens[sequence])))
        for first in range(0, count, at_once):
            yield self._piece(batch, np.array([sequence]), first, min(count - first, at_once), whole=count <= at_once)

    def _piece(self, batch: AttentionBatch, sequences: _Rows, first: int, queries: int, *, whole: bool) -> _Piece:
        """Of each sequence so many queries from its `first` on."""
        device, starts = self._shape.device, batch.query_starts
        steps = first + np.arange(queries)
        rows = starts[sequences].astype(np.int64)[:, None] + steps
        before = batch.context_lens[sequences].astype(np.int64) - (starts[sequences + 1] - starts[sequences])
        positions = before[:, None] + steps
        return _Piece(
            rows=upload(rows.reshape(-1), device),
            sequences=sequences,
            positions=upload(positions.astype(np.int32), device),
            last=positions[:, -1],
            whole=whole,
        )

    def _view(self, piece: _Piece, group: int) -> _View:
        """Made once for the layers of a group: the sinks' blocks, then those from the first query's window to the last query."""
        if group not in piece.views:
            size, kind, tables = self._block_size, self._layout.groups[group], self._block_tables[group]
            sinks = kind.sink_blocks(size)
            ends = piece.last // size + 1
            firsts = np.array([kind.first_needed(last + 1 - piece.positions.shape[1], size) for last in piece.last.tolist()])
            firsts = np.maximum(firsts, sinks)
            places = np.arange(max(1, (np.minimum(sinks, ends) + np.maximum(ends - firsts, 0)).max()))
            blocks = np.where(places < sinks, places, places - sinks + firsts[:, None])
            # A shorter table is filled up with a block of its own, so that what happens to other sequences cannot reach it.
            own = np.where(blocks < ends[:, None], blocks, ends[:, None] - 1)
            keys = (blocks[:, :, None] * size + np.arange(size)).reshape(len(blocks), -1).astype(np.int32)
            device = self._shape.device
            piece.views[group] = _View(
                upload(tables[piece.sequences[:, None], own].astype(np.int64), device),
                upload(keys, device),
            )
        return piece.views[group]

    def _mask(self, piece: _Piece, group: int, view: _View) -> torch.Tensor:
        """[sequences, 1, shared * queries, keys], True where a query may look."""
        mask = piece.masks.get(group)
        if mask is None:
            kind, shared = self._layout.groups[group], self._shape.num_heads // self._shape.num_kv_heads
            distance = piece.positions[:, :, None] - view.keys[:, None]
            seen = distance >= 0
            if kind.sliding_window is not None:
                seen &= (distance < kind.sliding_window) | (view.keys < kind.sinks)[:, None]
            mask = seen.repeat(1, shared, 1)[:, None]
            if piece.whole:
                piece.masks[group] = mask
        return mask


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
