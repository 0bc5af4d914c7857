"""Triton kernels of paged attention: writing K and V to their slots, attending over block tables, joining what splits found.

One kernel attends for decodes and for prefill chunks. A program owns a tile: some consecutive queries of one sequence, times the
query heads that share one KV head, so each K and V is loaded once for all of them; and a split, a share of the positions that the
tile sees, so that few long sequences still fill the device. Sources: FlashAttention-2 (Dao 2023), Flash-Decoding (Dao et al. 2023),
and the unified kernel of vLLM's Triton backend.

Every load is masked to what the sequence has written, so what lies elsewhere in the cache, numbers or not, is never seen.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# ruff: noqa: N803

from __future__ import annotations

import triton
import triton.language as tl

# Views into one upload, aligned by chance: without this each chance would be compiled anew, in the midst of serving.
_INDICES = ["block_tables", "query_starts", "context_lens", "tile_sequences", "tile_firsts"]


@triton.jit
def write_kv_kernel(
    key,  # [T, num_kv_heads, head_dim], heads side by side
    value,
    keys,  # the cache of one layer, [num_slots, num_kv_heads, head_dim]
    values,
    slots,  # [T]; a negative one is nobody's, and nothing is written
    key_stride,
    value_stride,
    ROW: tl.constexpr,  # num_kv_heads * head_dim
    ROW_PADDED: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    if slot >= 0:
        places = tl.arange(0, ROW_PADDED)
        mask = places < ROW
        tl.store(keys + slot * ROW + places, tl.load(key + token * key_stride + places, mask=mask), mask=mask)
        tl.store(values + slot * ROW + places, tl.load(value + token * value_stride + places, mask=mask), mask=mask)


@triton.jit(do_not_specialize=["table_stride"], do_not_specialize_on_alignment=_INDICES)
def attend_kernel(
    out,  # [T, num_heads, head_dim]
    partial_out,  # [T, num_heads, splits, head_dim] float32: sums not yet divided; unused without splits
    partial_max,  # [T, num_heads, splits] float32: largest score, in powers of two; -inf where a split saw nothing
    partial_sum,  # [T, num_heads, splits] float32: sum of weights
    query,  # [T, num_heads, head_dim], heads side by side
    keys,  # the cache of one layer, [num_slots, num_kv_heads, head_dim]
    values,
    block_tables,  # [S, table_stride]
    query_starts,  # [S + 1]
    context_lens,  # [S]
    tile_sequences,  # [tiles]: whose queries a tile holds
    tile_firsts,  # [tiles]: the first of them, counted within the sequence's own
    scale,  # of scores, times log2(e): weights are powers of two
    query_stride,
    table_stride,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # query heads that share a KV head
    HEAD_DIM: tl.constexpr,
    HEAD_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,  # positions a query sees, its own among them; 0: all
    SINKS: tl.constexpr,  # first positions that a query with a window sees too
    QUERIES: tl.constexpr,  # of a tile
    ROWS: tl.constexpr,  # QUERIES * GROUP, padded
    TILE: tl.constexpr,  # positions looked at together
    SPLIT: tl.constexpr,
):
    sequence = tl.load(tile_sequences + tl.program_id(0))
    first = tl.load(tile_firsts + tl.program_id(0))
    kv_head = tl.program_id(1)
    start = tl.load(query_starts + sequence)
    count = tl.load(query_starts + sequence + 1) - start
    context = tl.load(context_lens + sequence)

    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, HEAD_PADDED)
    index = first + rows // GROUP
    real = (rows < QUERIES * GROUP) & (index < count)
    position = context - count + index
    token_head = (start + index).to(tl.int64) * (NUM_KV_HEADS * GROUP) + kv_head * GROUP + rows % GROUP
    query_row = (start + index).to(tl.int64) * query_stride + (kv_head * GROUP + rows % GROUP) * HEAD_DIM
    has_dim = dims < HEAD_DIM
    queries = tl.load(query + query_row[:, None] + dims[None, :], mask=real[:, None] & has_dim[None, :], other=0.0)

    # The positions that any query of the tile sees, closed up where those between sinks and window are left out, and this split's
    # share of them.
    end = tl.minimum(context, context - count + first + QUERIES)
    begin = 0
    window_begin = 0
    left_out = 0
    sink_end: tl.constexpr = (SINKS + TILE - 1) // TILE * TILE
    if WINDOW > 0:
        window_begin = tl.maximum(context - count + first - WINDOW + 1, 0)
        left_out = tl.maximum(window_begin // TILE * TILE - sink_end, 0)
        end -= left_out
    if SPLIT:
        share = tl.cdiv(tl.cdiv(tl.maximum(end, 0), tl.num_programs(2)), TILE) * TILE
        begin = tl.program_id(2) * share
        end = tl.minimum(begin + share, end)

    largest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, HEAD_PADDED], tl.float32)
    table = block_tables + sequence.to(tl.int64) * table_stride
    for tile in range(begin, end, TILE):
        place = tile + tl.arange(0, TILE)
        written = place < end
        if WINDOW > 0:
            place += tl.where(tile >= sink_end, left_out, 0)
            # Blocks before the window have been given back, and may hold anything.
            written = written & ((place >= window_begin) | (place < SINKS))
        block = tl.load(table + place // BLOCK_SIZE, mask=written, other=0).to(tl.int64)
        offset = ((block * BLOCK_SIZE + place % BLOCK_SIZE) * NUM_KV_HEADS + kv_head) * HEAD_DIM
        k = tl.load(keys + offset[None, :] + dims[:, None], mask=written[None, :] & has_dim[:, None], other=0.0)
        scores = tl.dot(queries, k, input_precision="ieee") * scale
        seen = written[None, :] & (place[None, :] <= position[:, None])
        if WINDOW > 0:
            seen = seen & ((position[:, None] - place[None, :] < WINDOW) | (place[None, :] < SINKS))
        scores = tl.where(seen, scores, float("-inf"))
        grown = tl.maximum(largest, tl.max(scores, 1))
        # A row that has seen nothing yet has no largest, and -inf less -inf is no number.
        base = tl.where(grown == float("-inf"), 0.0, grown)
        weights = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(largest - base)
        total = total * shrink + tl.sum(weights, 1)
        v = tl.load(values + offset[:, None] + dims[None, :], mask=written[:, None] & has_dim[None, :], other=0.0)
        sums = tl.dot(weights.to(v.dtype), v, sums * shrink[:, None], input_precision="ieee")
        largest = grown

    mask = real[:, None] & has_dim[None, :]
    if SPLIT:
        place = token_head * tl.num_programs(2) + tl.program_id(2)
        tl.store(partial_out + place[:, None] * HEAD_DIM + dims[None, :], sums, mask=mask)
        tl.store(partial_max + place, largest, mask=real)
        tl.store(partial_sum + place, total, mask=real)
    else:
        # Padding has no context and sees nothing.
        sums = sums / tl.where(total == 0.0, 1.0, total)[:, None]
        tl.store(out + token_head[:, None] * HEAD_DIM + dims[None, :], sums.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize_on_alignment=_INDICES)
def join_splits_kernel(
    out,
    partial_out,
    partial_max,
    partial_sum,
    query_starts,
    tile_sequences,
    tile_firsts,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PADDED: tl.constexpr,
    QUERIES: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """A program for each query of each tile, and head: weighs the splits by how their largest scores compare."""
    sequence = tl.load(tile_sequences + tl.program_id(0) // QUERIES)
    index = tl.load(tile_firsts + tl.program_id(0) // QUERIES) + tl.program_id(0) % QUERIES
    start = tl.load(query_starts + sequence)
    if index < tl.load(query_starts + sequence + 1) - start:
        token_head = (start + index).to(tl.int64) * NUM_HEADS + tl.program_id(1)
        place = token_head * SPLITS + tl.arange(0, SPLITS)
        dims = tl.arange(0, HEAD_PADDED)
        largest = tl.load(partial_max + place)
        total = tl.load(partial_sum + place)
        top = tl.max(largest, 0)
        weights = tl.exp2(largest - tl.where(top == float("-inf"), 0.0, top))
        mask = (total != 0.0)[:, None] & (dims < HEAD_DIM)[None, :]
        sums = tl.load(partial_out + place[:, None] * HEAD_DIM + dims[None, :], mask=mask, other=0.0)
        whole = tl.sum(weights * total, 0)
        result = tl.sum(sums * weights[:, None], 0) / tl.where(whole == 0.0, 1.0, whole)
        tl.store(out + token_head * HEAD_DIM + dims, result.to(out.dtype.element_ty), mask=dims < HEAD_DIM)
