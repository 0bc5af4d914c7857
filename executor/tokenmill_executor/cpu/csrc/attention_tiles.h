// What attention does with one tile of keys, for both kinds of cache: the scores of some rows, and their sums of values.
#pragma once

#include "kernels.h"
#include "tile.h"

namespace tokenmill {

constexpr int kTileBlocks = 6;
constexpr int kTileKeys = kTileBlocks * kBlock;
constexpr int kMaxRows = 64;  // rows (queries x heads of a group) of an item

// Work memory of one thread.
struct alignas(64) Scratch {
    bf16 q[kMaxRows * kMaxHeadDim];
    float out[kMaxRows * kMaxHeadDim];
    float scores[8 * kTileKeys];
    bf16 p[8 * kTileKeys];
    // In int8: each q and p as two bytes, high and low rows by turns, with what a unit of the low one is worth.
    int8_t q_codes[kMaxRows * 2 * kMaxHeadDim];
    uint8_t p_codes[8 * 2 * kTileKeys];
    int32_t q_offsets[kMaxRows * 2];
    float q_units[kMaxRows], p_units[8];
    float top[kMaxRows];                // of a row's scores, which lack the softmax's scale
    float totals[kMaxRows * kLanes];  // of its exponentials, in each lane
    int position[kMaxRows];
};

// Up to six blocks of keys. `first` is the position of the first key; keys at `end` and beyond do not exist yet.
struct KeyTile {
    int blocks, first, end;
    const uint8_t* k[kTileBlocks];
    const uint8_t* v[kTileBlocks];
    const uint8_t* next_k[kTileBlocks];
    const float* k_scales[kTileBlocks];  // null in bf16
    const float* v_scales[kTileBlocks];
};

// One product of a register tile takes C vectors; the next takes the rest.
template <typename Cache, int R, int C = Cache::score_vectors(R)>
TM_INLINE void all_scores(const KeyTile& t, Scratch& s, int row, int head_dim, int first = 0) {
    if constexpr (C > 0) {
        for (; first + C <= t.blocks; first += C) Cache::template scores<R, C>(t, s, row, head_dim, first);
        all_scores<Cache, R, C - 1>(t, s, row, head_dim, first);
    }
}
template <typename Cache, int R, int C = Cache::value_vectors(R)>
TM_INLINE void all_values(const KeyTile& t, Scratch& s, int row, int head_dim, const float* alpha, int dim = 0) {
    if constexpr (C > 0) {
        for (; dim + C * kLanes <= head_dim; dim += C * kLanes) Cache::template values<R, C>(t, s, row, head_dim, alpha, dim);
        all_values<Cache, R, C - 1>(t, s, row, head_dim, alpha, dim);
    }
}

// K as [head_dim / 2][16 positions][2], V as [positions / 2][head_dim][2].
struct Bf16Cache {
    static constexpr int score_vectors(int rows) { return rows <= 4 ? 6 : rows <= 6 ? 4 : 3; }
    static constexpr int value_vectors(int rows) { return rows <= 6 ? 4 : 2; }

    TM_INLINE void prepare_query(Scratch&, int, int) {}

    template <int R, int C>
    TM_INLINE void scores(const KeyTile& t, Scratch& s, int row, int head_dim, int first) {
        const int pairs = head_dim / 2;
        Tile<R, C> tile;
        Tile<R, C>::clear(tile);
        const Pair* a = (const Pair*)(s.q + row * head_dim);
        for (int d = 0; d < pairs; d++) {
            Ints k[C];
            TM_EACH(c, C) {
                k[c] = load_ints((const Pair*)t.k[first + c] + d * kBlock);
                prefetch_l2((const Pair*)t.v[first + c] + d * kBlock);
            }
            tile_step(tile, a + d, pairs, k);
        }
        TM_EACH(r, R)
            TM_EACH(c, C) store(s.scores + r * kTileKeys + (first + c) * kBlock, tile.at[r][c]);
    }

    // Leaves one block of a row's probabilities as `values` takes them.
    TM_INLINE void put_probability(Scratch& s, int r, int block, Floats x) { store_bf16(s.p + r * kTileKeys + block * kBlock, x); }
    TM_INLINE void finish_probabilities(const KeyTile&, Scratch&, int) {}

    // Scales what there is of C vectors of the sums, from `dim`, by `alpha` and adds P V.
    template <int R, int C>
    TM_INLINE void values(const KeyTile& t, Scratch& s, int row, int head_dim, const float* alpha, int dim) {
        float* const out = s.out + row * head_dim + dim;
        Tile<R, C> tile;
        TM_EACH(r, R)
            TM_EACH(c, C) tile.at[r][c] = mul(load(out + r * head_dim + c * kLanes), splat(alpha[r]));
        const Pair* a = (const Pair*)s.p;
        for (int block = 0; block < t.blocks; block++, a += kBlock / 2) {
            const int keys = t.end - t.first - block * kBlock;
            const int pairs = keys >= kBlock ? kBlock / 2 : keys / 2;
            const Pair* v = (const Pair*)t.v[block] + dim;
            const Pair* next = (const Pair*)t.next_k[block] + dim;
            for (int i = 0; i < pairs; i++, v += head_dim, next += head_dim) {
                Ints x[C];
                TM_EACH(c, C) {
                    x[c] = load_ints(v + c * kLanes);
                    prefetch_l2(next + c * kLanes);
                }
                tile_step(tile, a + i, kTileKeys / 2, x);
            }
            if (keys < kBlock && keys % 2) {
                // The other half of the last pair is left from another sequence and may not be a number.
                Ints x[C];
                TM_EACH(c, C) x[c] = low_halves(load_ints(v + c * kLanes));
                tile_step(tile, a + pairs, kTileKeys / 2, x);
            }
        }
        TM_EACH(r, R)
            TM_EACH(c, C) store(out + r * head_dim + c * kLanes, tile.at[r][c]);
    }
};

// K + 128 as unsigned bytes [head_dim / 4][16 positions][4], V as signed bytes [positions / 4][head_dim][4], each followed by a
// float scale for each position. Nothing is widened: q and p become two bytes each, so that only K's and V's own rounding is lost.
// What a freed block holds is a number whatever it is, so probabilities of 0 hide it.
struct Int8Cache {
    static constexpr int kBase = 128, kUnsignedBase = 255;
    static constexpr int score_vectors(int rows) { return rows <= 2 ? 6 : rows <= 3 ? 4 : rows <= 4 ? 3 : rows <= 6 ? 2 : 1; }
    static constexpr int value_vectors(int rows) { return score_vectors(rows); }

    // q = unit * (128 * high + low)
    TM_INLINE void prepare_query(Scratch& s, int row, int head_dim) {
        const bf16* q = s.q + row * head_dim;
        int8_t* const high = s.q_codes + row * 2 * head_dim;
        int8_t* const low = high + head_dim;
        Floats top = zeros(), poison = zeros();
        for (int d = 0; d < head_dim; d += kLanes) {
            top = max(abs(load_bf16(q + d)), top);
            poison = fma(load_bf16(q + d), zeros(), poison);
        }
        const float most = largest(top);
        const Floats inverse = splat(most > 0 ? 127 * kBase / most : 0);
        for (int d = 0; d < head_dim; d += kLanes) {
            const Floats x = mul(load_bf16(q + d), inverse);
            const Floats tall = to_whole(mul(x, splat(1.0f / kBase)));
            store_int8(high + d, tall);
            store_int8(low + d, fma(tall, splat(-kBase), x));
        }
        int32_t high_sum = 0, low_sum = 0;
        for (int d = 0; d < head_dim; d++) {
            high_sum += high[d];
            low_sum += low[d];
        }
        s.q_offsets[2 * row] = -128 * high_sum;
        s.q_offsets[2 * row + 1] = -128 * low_sum;
        s.q_units[row] = most / (127 * kBase) + sum(poison);  // the integers cannot say "not a number"
    }

    template <int R, int C>
    TM_INLINE void scores(const KeyTile& t, Scratch& s, int row, int head_dim, int first) {
        const int quads = head_dim / 4;
        const Quad* a = (const Quad*)(s.q_codes + row * 2 * head_dim);
        Ints tile[2 * R][C];
        TM_EACH(r, 2 * R)
            TM_EACH(c, C) tile[r][c] = splat_int(uint32_t(s.q_offsets[2 * row + r]));
        for (int d = 0; d < quads; d++) {
            Ints k[C];
            TM_EACH(c, C) {
                k[c] = load_ints((const Quad*)t.k[first + c] + d * kBlock);
                prefetch_l2((const Quad*)t.v[first + c] + d * kBlock);
            }
            TM_EACH(r, 2 * R) {
                const Ints broadcast = splat_int(a[r * quads + d]);
                TM_EACH(c, C) tile[r][c] = dot_quads(tile[r][c], k[c], broadcast);
            }
        }
        TM_EACH(c, C) {
            const Floats k_scales = load(t.k_scales[first + c]);
            TM_EACH(r, R) {
                const Floats units = fma(to_floats(tile[2 * r][c]), splat(kBase), to_floats(tile[2 * r + 1][c]));
                store(s.scores + r * kTileKeys + (first + c) * kBlock, mul(units, mul(k_scales, splat(s.q_units[row + r]))));
            }
        }
    }

    TM_INLINE void put_probability(Scratch& s, int r, int block, Floats x) { store(s.scores + r * kTileKeys + block * kBlock, x); }

    // p times V's scale = unit * (255 * high + low)
    TM_INLINE void finish_probabilities(const KeyTile& t, Scratch& s, int r) {
        float* const p = s.scores + r * kTileKeys;
        uint8_t* const high = s.p_codes + r * 2 * kTileKeys;
        uint8_t* const low = high + kTileKeys;
        Floats top = zeros();
        for (int c = 0; c < t.blocks; c++) {
            // Scales beyond the last key may be anything.
            const Floats scaled = mul(load(p + c * kBlock), load(t.v_scales[c]));
            const Floats x = keep_between(scaled, t.first + c * kBlock, 0, t.end, zeros());
            top = max(x, top);
            store(p + c * kBlock, x);
        }
        const float most = largest(top);
        const Floats inverse = splat(most > 0 ? kUnsignedBase * kUnsignedBase / most : 0);
        for (int c = 0; c < t.blocks; c++) {
            const Floats x = mul(load(p + c * kBlock), inverse);
            const Floats tall = to_floor(mul(x, splat(1.0f / kUnsignedBase)));
            store_uint8(high + c * kBlock, tall);
            store_uint8(low + c * kBlock, fma(tall, splat(-kUnsignedBase), x));
        }
        s.p_units[r] = most / (kUnsignedBase * kUnsignedBase);
    }

    template <int R, int C>
    TM_INLINE void values(const KeyTile& t, Scratch& s, int row, int head_dim, const float* alpha, int dim) {
        const Quad* a = (const Quad*)s.p_codes;
        Ints tile[2 * R][C];
        TM_EACH(r, 2 * R)
            TM_EACH(c, C) tile[r][c] = splat_int(0);
        for (int block = 0; block < t.blocks; block++, a += kBlock / 4) {
            const Quad* v = (const Quad*)t.v[block] + dim;
            const Quad* next = (const Quad*)t.next_k[block] + dim;
            for (int i = 0; i < kBlock / 4; i++, v += head_dim, next += head_dim) {
                Ints x[C];
                TM_EACH(c, C) {
                    x[c] = load_ints(v + c * kLanes);
                    prefetch_l2(next + c * kLanes);
                }
                TM_EACH(r, 2 * R) {
                    const Ints broadcast = splat_int(a[r * kTileKeys / 4 + i]);
                    TM_EACH(c, C) tile[r][c] = dot_quads(tile[r][c], broadcast, x[c]);
                }
            }
        }
        float* const out = s.out + row * head_dim + dim;
        TM_EACH(r, R)
            TM_EACH(c, C) {
                const Floats units = fma(to_floats(tile[2 * r][c]), splat(kUnsignedBase), to_floats(tile[2 * r + 1][c]));
                const Floats before = mul(load(out + r * head_dim + c * kLanes), splat(alpha[r]));
                store(out + r * head_dim + c * kLanes, fma(units, splat(s.p_units[r]), before));
            }
    }
};

}  // namespace tokenmill
