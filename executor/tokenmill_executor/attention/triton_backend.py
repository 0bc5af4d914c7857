"""Paged attention in Triton, for CUDA devices: plans the launches of a step, from tilings chosen for Hopper.

Must not know: weights, sampling. Decodes can also be prepared from device memory alone, which is what a captured graph needs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
import triton

from tokenmill_executor.attention.backend import AttentionBatch, CacheShape, DecodeInputs, PagedBackend
from tokenmill_executor.attention.triton_kernels import attend_kernel, join_splits_kernel, quantize_kv_kernel, write_kv_kernel
from tokenmill_executor.runner import Int32Array
from tokenmill_executor.upload import upload


@dataclass(frozen=True, slots=True)
class Tiling:
    """How one kind of tile is computed: rows are queries times heads of a group, `tile` is positions looked at together."""

    rows: int
    tile: int
    num_warps: int
    num_stages: int


# By bytes of an element. Decodes stream the cache: the least rows that tl.dot takes, and small enough that four programs share a
# multiprocessor and hide memory's latency from each other. Chunks multiply: 128 rows are the wgmma of two warp groups, held in
# registers without spilling, one program a multiprocessor, so with a tile more in flight; a block's number is loaded before its
# tile, which takes stages too. float32 is for comparisons, and right before fast.
DECODE: Mapping[int, Tiling] = {2: Tiling(16, 64, 4, 3), 4: Tiling(16, 32, 4, 3)}
CHUNK: Mapping[int, Tiling] = {2: Tiling(128, 64, 8, 5), 4: Tiling(32, 32, 4, 2)}
# Programs wanted for each multiprocessor: some run at once, and more even out sequences of unlike length.
_PROGRAMS_PER_PROCESSOR = 4
_MOST_SPLITS = 32
# Positions that one program walks through at most before a split is added, whatever the batch.
_POSITIONS_PER_SPLIT = 4096


@dataclass(frozen=True, slots=True)
class _Launch:
    """Tiles of one kind, on the device: see `attend_kernel`. `splits` is a power of two."""

    sequences: torch.Tensor
    firsts: torch.Tensor
    queries: int
    tiling: Tiling
    splits: int


@dataclass(frozen=True, slots=True)
class _Step:
    """What all layers of a step share, on the device; slots and block tables for each group of layers."""

    slots: torch.Tensor
    query_starts: torch.Tensor
    context_lens: torch.Tensor
    block_tables: torch.Tensor
    launches: tuple[_Launch, ...]


class TritonAttention(PagedBackend):
    """K and V of each place in a group.

    `num_processors` is that of the device's multiprocessors, by default as the device says.
    """

    def __init__(
        self,
        shape: CacheShape,
        num_processors: int | None = None,
        decode: Tiling | None = None,
        chunk: Tiling | None = None,
    ) -> None:
        super().__init__(shape)
        self._layout = shape.layout
        self._format = shape.kv_format
        self._group = shape.num_heads // shape.num_kv_heads
        self._head_padded = max(16, triton.next_power_of_2(shape.head_dim))
        self._decode = decode or DECODE[shape.dtype.itemsize]
        self._chunk = chunk or CHUNK[shape.dtype.itemsize]
        self._programs_wanted = _PROGRAMS_PER_PROCESSOR * (num_processors or _count_processors(shape.device))
        self._step: _Step | None = None

    def decode_splits(self, num_sequences: int, max_context: int) -> int:
        """Into how many parts, a power of two, each sequence's positions are split."""
        to_fill = self._programs_wanted / (num_sequences * self._shape.num_kv_heads)
        return min(_MOST_SPLITS, _power_of_two(max(to_fill, math.ceil(max_context / _POSITIONS_PER_SPLIT))))

    def all_decode_splits(self, num_sequences: int, max_context: int) -> list[int]:
        """See `DecodeBackend`: the powers of two between those of the shortest and the longest context."""
        least, most = self.decode_splits(num_sequences, 1), self.decode_splits(num_sequences, max_context)
        return [1 << power for power in range(least.bit_length() - 1, most.bit_length())]

    def chunk_contexts(self, max_context: int) -> list[int]:
        """See `DecodeBackend`. Of chunks that are one tile, which are split the most."""
        doubled = (1 << power for power in range(1, max_context.bit_length()))
        return list({self._chunk_splits(1, context): context for context in doubled}.values())

    def prepare_decode(self, inputs: DecodeInputs, splits: int) -> None:
        launch = _Launch(inputs.rows, inputs.firsts, 1, self._decode, splits)
        self._step = _Step(inputs.slots, inputs.query_starts, inputs.context_lens, inputs.block_tables, (launch,))

    def prepare(self, batch: AttentionBatch) -> None:
        """Uploads all that the launches need in one piece."""
        counts = np.diff(batch.query_starts)
        decodes = np.flatnonzero(counts == 1).astype(np.int32)
        queries = max(1, self._chunk.rows // self._group)
        sequences, firsts = _chunk_tiles(counts, queries)
        parts = [
            batch.query_starts,
            batch.context_lens,
            batch.block_tables.reshape(-1),
            decodes,
            np.zeros_like(decodes),
            sequences,
            firsts,
        ]
        whole = upload(np.concatenate(parts, dtype=np.int32), self._shape.device)
        starts, contexts, tables, decodes_up, zeros, sequences_up, firsts_up = torch.split(whole, [len(part) for part in parts])
        launches = []
        if len(decodes):
            splits = self.decode_splits(len(decodes), int(batch.context_lens[decodes].max()))
            launches.append(_Launch(decodes_up, zeros, 1, self._decode, splits))
        if len(sequences):
            splits = self._chunk_splits(len(sequences), int(batch.context_lens[sequences].max()))
            launches.append(_Launch(sequences_up, firsts_up, queries, self._chunk, splits))
        self._step = _Step(batch.slots_on_device, starts, contexts, tables.view(batch.block_tables.shape), tuple(launches))

    def write_kv(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        shape, step = self._shape, self._ready()
        group, place = self._layout.places[layer]
        keys, values, strides = self._keys[place], self._values[place], (_row_stride(key), _row_stride(value))
        if self._format.largest is None:
            row = shape.num_kv_heads * shape.head_dim
            write_kv_kernel[(len(key),)](
                key, value, keys.codes, values.codes, step.slots[group], *strides, ROW=row, ROW_PADDED=triton.next_power_of_2(row)
            )
            return
        quantize_kv_kernel[(len(key), shape.num_kv_heads)](
            key,
            value,
            keys.codes,
            values.codes,
            keys.scales,
            values.scales,
            step.slots[group],
            *strides,
            HEAD_DIM=shape.head_dim,
            WIDTH_PADDED=triton.next_power_of_2(self._format.width(shape.head_dim)),
            PACKED=self._format.packed,
            LARGEST=self._format.largest,
            num_warps=1,
        )

    def attend(self, layer: int, query: torch.Tensor) -> torch.Tensor:
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        for launch in self._ready().launches:
            self._attend(layer, query, out, launch)
        return out

    def _attend(self, layer: int, query: torch.Tensor, out: torch.Tensor, launch: _Launch) -> None:
        shape, step, tiling = self._shape, self._ready(), launch.tiling
        splits = launch.splits
        group, place = self._layout.places[layer]
        window = shape.windows[layer] or 0
        parts = len(launch.sequences) * launch.queries * shape.num_heads * splits if splits > 1 else 0
        partial_out = torch.empty(parts * shape.head_dim, dtype=torch.float32, device=query.device)
        partial_max = torch.empty(parts, dtype=torch.float32, device=query.device)
        partial_sum = torch.empty_like(partial_max)
        attend_kernel[(len(launch.sequences), shape.num_kv_heads, splits)](
            out,
            partial_out,
            partial_max,
            partial_sum,
            query,
            self._keys[place].codes,
            self._values[place].codes,
            self._keys[place].scales,
            self._values[place].scales,
            step.block_tables[group],
            step.query_starts,
            step.context_lens,
            launch.sequences,
            launch.firsts,
            shape.scale * math.log2(math.e),
            _row_stride(query),
            step.block_tables.stride(1),
            NUM_KV_HEADS=shape.num_kv_heads,
            GROUP=self._group,
            HEAD_DIM=shape.head_dim,
            HEAD_PADDED=self._head_padded,
            PACKED=self._format.packed,
            BLOCK_SIZE=self._block_size,
            WINDOW=window,
            SINKS=shape.sinks if window else 0,
            QUERIES=launch.queries,
            ROWS=max(tiling.rows, triton.next_power_of_2(launch.queries * self._group)),
            TILE=tiling.tile,
            SPLIT=splits > 1,
            num_warps=tiling.num_warps,
            num_stages=tiling.num_stages,
        )
        if splits > 1:
            join_splits_kernel[(len(launch.sequences) * launch.queries, shape.num_heads)](
                out,
                partial_out,
                partial_max,
                partial_sum,
                step.query_starts,
                launch.sequences,
                launch.firsts,
                NUM_HEADS=shape.num_heads,
                HEAD_DIM=shape.head_dim,
                HEAD_PADDED=self._head_padded,
                QUERIES=launch.queries,
                SPLITS=splits,
                num_warps=2,
            )

    def _chunk_splits(self, tiles: int, max_context: int) -> int:
        """Few tiles with much behind them, such as a short last chunk of a long prompt, leave most of the device idle."""
        to_fill = self._programs_wanted / (_PROGRAMS_PER_PROCESSOR * tiles * self._shape.num_kv_heads)
        useful = max_context / (4 * self._chunk.tile)
        return min(_MOST_SPLITS, _power_of_two(min(to_fill, useful)))

    def _ready(self) -> _Step:
        assert self._step is not None, "prepare comes first"
        return self._step


def _chunk_tiles(counts: Int32Array, queries: int) -> tuple[Int32Array, Int32Array]:
    """Of the sequences with several queries: each tile's sequence and first query."""
    chunks = np.flatnonzero(counts > 1).astype(np.int32)
    tiles = -(-counts[chunks] // queries)
    sequences = np.repeat(chunks, tiles)
    before = np.cumsum(tiles) - tiles
    firsts = (np.arange(len(sequences), dtype=np.int32) - np.repeat(before, tiles)) * queries
    return sequences, firsts.astype(np.int32)


def _power_of_two(least: float) -> int:
    """The largest not above `least`, and 1 at least."""
    return 1 << max(0, math.floor(math.log2(max(1.0, least))))


def _row_stride(heads: torch.Tensor) -> int:
    assert heads.stride()[1:] == (heads.shape[2], 1), "the heads of a token lie side by side"
    return heads.stride(0)


def _count_processors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
