"""Triton kernels of paged attention: writing K and V to their slots, attending over block tables, joining what splits found.

One kernel attends for decodes and for prefill chunks. A program owns a tile: some consecutive queries of one sequence, times the
query heads that share one KV head, so each K and V is loaded once for all of them; and a split, a share of the positions that the
tile sees, so that few long sequences still fill the device. Sources: FlashAttention-2 (Dao 2023), Flash-Decoding (Dao et al. 2023),
and the unified kernel of vLLM's Triton backend.

Of a quantised cache (`quantization.py`) the codes are multiplied as they are: they are exact in any float type, and the scales of a
tile's keys go into its scores, those of its values into its weights, one product a position and not one a number.

Every load is masked to what the sequence has written, so what lies elsewhere in the cache, numbers or not, is never seen.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# ruff: noqa: N803

from __future__ import annotations

import triton
import triton.language as tl

# Views into one upload, aligned by chance: without this each chance would be compiled anew, in the midst of serving.
_INDICES = ["block_tables", "query_starts", "context_lens", "tile_sequences", "tile_firsts"]


@triton.jit(do_not_specialize_on_alignment=["slots"])
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


@triton.jit(do_not_specialize_on_alignment=["slots"])
def quantize_kv_kernel(
    key,  # [T, num_kv_heads, head_dim], heads side by side
    value,
    keys,  # the cache of one layer, [num_slots, num_kv_heads, HEAD_DIM // PACKED]
    values,
    key_scales,  # [num_slots, num_kv_heads] float32
    value_scales,
    slots,  # [T]; a negative one is nobody's, and nothing is written
    key_stride,
    value_stride,
    HEAD_DIM: tl.constexpr,
    WIDTH_PADDED: tl.constexpr,  # HEAD_DIM // PACKED, padded
    PACKED: tl.constexpr,  # codes in an element of the cache
    LARGEST: tl.constexpr,  # the code of a head's number of greatest magnitude
):
    """A program for each token and KV head."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    slot = tl.load(slots + token).to(tl.int64)
    if slot >= 0:
        place = slot * tl.num_programs(1) + head
        key += token * key_stride + head * HEAD_DIM
        value += token * value_stride + head * HEAD_DIM
        _quantize(key, keys, key_scales, place, HEAD_DIM, WIDTH_PADDED, PACKED, LARGEST)
        _quantize(value, values, value_scales, place, HEAD_DIM, WIDTH_PADDED, PACKED, LARGEST)


@triton.jit
def _quantize(
    numbers,
    codes,
    scales,
    place,
    HEAD_DIM: tl.constexpr,
    WIDTH_PADDED: tl.constexpr,
    PACKED: tl.constexpr,
    LARGEST: tl.constexpr,
):
    width: tl.constexpr = HEAD_DIM // PACKED
    at = tl.arange(0, WIDTH_PADDED)
    mask = at < width
    first = tl.load(numbers + at, mask=mask, other=0.0).to(tl.float32)
    high, low = tl.max(first, 0), tl.min(first, 0)
    # Not a number if one of them is none, which a maximum passes over: the scale has to tell.
    poison = tl.sum(first * 0.0, 0)
    if PACKED == 2:
        second = tl.load(numbers + width + at, mask=mask, other=0.0).to(tl.float32)
        high, low = tl.maximum(high, tl.max(second, 0)), tl.minimum(low, tl.min(second, 0))
        poison += tl.sum(second * 0.0, 0)
        extreme = tl.where(high >= -low, high, low) + poison
    else:
        extreme = tl.maximum(high, -low) + poison
    tl.store(scales + place, extreme / LARGEST)
    some = tl.abs(extreme) > 1e-30  # quantization.LEAST; no number is not more either
    inverse = tl.where(some, LARGEST / extreme, 0.0)
    first = tl.where(some, first * inverse, 0.0)
    if PACKED == 2:
        second = tl.where(some, second * inverse, 0.0)
        # Of -8 to 7, plus 8; what was rounded down is a whole number, so the conversion cuts nothing off.
        ones = tl.minimum(tl.maximum(tl.floor(first + 8.5), 0.0), 15.0).to(tl.int32)
        others = tl.minimum(tl.maximum(tl.floor(second + 8.5), 0.0), 15.0).to(tl.int32)
        tl.store(codes + place * width + at, (ones | (others << 4)).to(tl.uint8), mask=mask)
    elif codes.dtype.element_ty == tl.int8:
        tl.store(codes + place * width + at, tl.floor(first + 0.5).to(tl.int8), mask=mask)
    else:
        tl.store(codes + place * width + at, _round_to_e4m3(first).to(codes.dtype.element_ty), mask=mask)


@triton.jit
def _round_to_e4m3(numbers):
    """To what float8_e4m3 has, so that the conversion is exact: Triton's interpreter does not round in it as devices do."""
    bits = numbers.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)
    return tl.where(tl.abs(numbers) < 0.015625, tl.floor(numbers * 512.0 + 0.5) / 512.0, normal)


@triton.jit
def _load_heads(cache, places, dims, mask, HEAD_DIM: tl.constexpr, PACKED: tl.constexpr):
    """Numbers, or codes, of `dims` at `places`, counted in heads; the shapes of the two are broadcast."""
    width: tl.constexpr = HEAD_DIM // PACKED
    if PACKED == 1:
        heads = tl.load(cache + places * width + dims, mask=mask, other=0.0)
    else:
        # Each byte is loaded for both of its codes: from memory it comes once.
        packed = tl.load(cache + places * width + dims % width, mask=mask, other=0).to(tl.int32)
        heads = ((packed >> (dims // width * 4)) & 15) - 8
    return heads


@triton.jit(do_not_specialize=["table_stride"], do_not_specialize_on_alignment=_INDICES)
def attend_kernel(
    out,  # [T, num_heads, head_dim]
    partial_out,  # [tiles * QUERIES, num_heads, splits, head_dim] float32: sums not yet divided; unused without splits
    partial_max,  # [tiles * QUERIES, num_heads, splits] float32: largest score, in powers of two; -inf where a split saw nothing
    partial_sum,  # [tiles * QUERIES, num_heads, splits] float32: sum of weights
    query,  # [T, num_heads, head_dim], heads side by side
    keys,  # the cache of one layer, [num_slots, num_kv_heads, HEAD_DIM // PACKED]
    values,
    key_scales,  # [num_slots, num_kv_heads] float32; None where the cache has numbers and not codes
    value_scales,
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
    PACKED: tl.constexpr,  # codes in an element of the cache
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
    query_head = kv_head * GROUP + rows % GROUP
    query_row = (start + index).to(tl.int64) * query_stride + query_head * HEAD_DIM
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
        head = (block * BLOCK_SIZE + place % BLOCK_SIZE) * NUM_KV_HEADS + kv_head
        k = _load_heads(keys, head[None, :], dims[:, None], written[None, :] & has_dim[:, None], HEAD_DIM, PACKED)
        scores = tl.dot(queries, k.to(queries.dtype), input_precision="ieee") * scale
        if key_scales is not None:
            scores *= tl.load(key_scales + head, mask=written, other=0.0)[None, :]
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
        if value_scales is not None:
            weights *= tl.load(value_scales + head, mask=written, other=0.0)[None, :]
        v = _load_heads(values, head[:, None], dims[None, :], written[:, None] & has_dim[None, :], HEAD_DIM, PACKED)
        sums = tl.dot(weights.to(queries.dtype), v.to(queries.dtype), sums * shrink[:, None], input_precision="ieee")
        largest = grown

    mask = real[:, None] & has_dim[None, :]
    if SPLIT:
        # Of the launch's own queries and not of all tokens, of which there may be a thousand times as many.
        query_of_launch = tl.program_id(0).to(tl.int64) * QUERIES + rows // GROUP
        place = (query_of_launch * (NUM_KV_HEADS * GROUP) + query_head) * tl.num_programs(2) + tl.program_id(2)
        tl.store(partial_out + place[:, None] * HEAD_DIM + dims[None, :], sums, mask=mask)
        tl.store(partial_max + place, largest, mask=real)
        tl.store(partial_sum + place, total, mask=real)
    else:
        # Padding has no context and sees nothing.
        sums = sums / tl.where(total == 0.0, 1.0, total)[:, None]
        token_head = (start + index).to(tl.int64) * (NUM_KV_HEADS * GROUP) + query_head
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
        place = (tl.program_id(0).to(tl.int64) * NUM_HEADS + tl.program_id(1)) * SPLITS + tl.arange(0, SPLITS)
        dims = tl.arange(0, HEAD_PADDED)
        largest = tl.load(partial_max + place)
        total = tl.load(partial_sum + place)
        top = tl.max(largest, 0)
        weights = tl.exp2(largest - tl.where(top == float("-inf"), 0.0, top))
        mask = (total != 0.0)[:, None] & (dims < HEAD_DIM)[None, :]
        sums = tl.load(partial_out + place[:, None] * HEAD_DIM + dims[None, :], mask=mask, other=0.0)
        whole = tl.sum(weights * total, 0)
        result = tl.sum(sums * weights[:, None], 0) / tl.where(whole == 0.0, 1.0, whole)
        token_head = (start + index).to(tl.int64) * NUM_HEADS + tl.program_id(1)
        tl.store(out + token_head * HEAD_DIM + dims, result.to(out.dtype.element_ty), mask=dims < HEAD_DIM)
