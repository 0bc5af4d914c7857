// What attention does with one tile of keys, for both kinds of cache: the scores of some rows, and their sums of values.
#pragma once

#include <algorithm>

#include "kernels.h"
#include "tile.h"

namespace tokenmill {

constexpr int kTileBlocks = 6;
constexpr int kTileKeys = kTileBlocks * kBlock;
constexpr int kMaxRows = 64;  // rows (queries x heads of a group) of an item

// Work memory of one thread.
struct alignas(64) Scratch {
    Factor q[kMaxRows * kMaxHeadDim];
    float out[kMaxRows * kMaxHeadDim];
    float scores[8 * kTileKeys];
    Factor p[8 * kTileKeys];
    // In int8: the digits of each q and p, a row's after one another, with what a unit of the last one is worth.
    QuadFactor q_codes[kMaxRows * kDigits * kMaxHeadDim];
    QuadFactor p_codes[8 * kDigits * kTileKeys];
    int32_t q_offsets[kMaxRows * kDigits];
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
    static constexpr int score_vectors(int rows) { return std::clamp(kAccumulators / rows, 1, kTileBlocks); }
    static constexpr int value_vectors(int rows) { return rows <= 6 ? std::min(score_vectors(rows), 4) : std::min(score_vectors(rows), 2); }

    TM_INLINE void prepare_query(Scratch&, int, int) {}

    template <int R, int C>
    TM_INLINE void scores(const KeyTile& t, Scratch& s, int row, int head_dim, int first) {
        Floats tile[R][C];
        clear(tile);
        const Factor* a = s.q + row * head_dim;
        for (int d = 0; d < head_dim / 2; d++) {
            Ints k[C];
            TM_EACH(c, C) {
                k[c] = load_ints((const Pair*)t.k[first + c] + d * kBlock);
                prefetch_l2((const Pair*)t.v[first + c] + d * kBlock);
            }
            pair_step(tile, a + 2 * d, head_dim, k);
        }
        TM_EACH(r, R)
            TM_EACH(c, C) store(s.scores + r * kTileKeys + (first + c) * kBlock, tile[r][c]);
    }

    // Leaves one block of a row's probabilities as `values` takes them.
    TM_INLINE void put_probability(Scratch& s, int r, int block, Floats x) { store_factors(s.p + r * kTileKeys + block * kBlock, x); }
    TM_INLINE void finish_probabilities(const KeyTile&, Scratch&, int) {}

    // Scales what there is of C vectors of the sums, from `dim`, by `alpha` and adds P V.
    template <int R, int C>
    TM_INLINE void values(const KeyTile& t, Scratch& s, int row, int head_dim, const float* alpha, int dim) {
        float* const out = s.out + row * head_dim + dim;
        Floats tile[R][C];
        TM_EACH(r, R)
            TM_EACH(c, C) tile[r][c] = mul(load(out + r * head_dim + c * kLanes), splat(alpha[r]));
        const Factor* a = s.p;
        for (int block = 0; block < t.blocks; block++, a += kBlock) {
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
                pair_step(tile, a + 2 * i, kTileKeys, x);
            }
            if (keys < kBlock && keys % 2) {
                // The other half of the last pair is left from another sequence and may not be a number.
                Ints x[C];
                TM_EACH(c, C) x[c] = low_halves(load_ints(v + c * kLanes));
                pair_step(tile, a + 2 * pairs, kTileKeys, x);
            }
        }
        TM_EACH(r, R)
            TM_EACH(c, C) store(out + r * head_dim + c * kLanes, tile[r][c]);
    }
};

// K + 128 as unsigned bytes [head_dim / 4][16 positions][4], V as signed bytes [positions / 4][head_dim][4], each followed by a
// float scale for each position. Products are of integers: q and p become ones of 15 bits or 16, so only K's and V's own rounding
// is lost. What a freed block holds is a number whatever it is, so probabilities of 0 hide it.
struct Int8Cache {
    static constexpr int score_vectors(int rows) { return std::clamp(kAccumulators / (kDigits * rows), 1, kTileBlocks); }
    static constexpr int value_vectors(int rows) { return score_vectors(rows); }

    // q = unit * code
    TM_INLINE void prepare_query(Scratch& s, int row, int head_dim) {
        const Factor* q = s.q + row * head_dim;
        QuadFactor* const codes = s.q_codes + row * kDigits * head_dim;
        Floats top = zeros(), poison = zeros();
        for (int d = 0; d < head_dim; d += kLanes) {
            top = max(abs(load_factors(q + d)), top);
            poison = fma(load_factors(q + d), zeros(), poison);
        }
        const float most = largest(top);
        const Floats inverse = splat(most > 0 ? kMostSigned / most : 0);
        for (int d = 0; d < head_dim; d += kLanes) store_signed(codes + d, head_dim, mul(load_factors(q + d), inverse));
        // Of K + 128.
        TM_EACH(i, kDigits) {
            int32_t sum = 0;
            for (int d = 0; d < head_dim; d++) sum += codes[i * head_dim + d];
            s.q_offsets[kDigits * row + i] = -128 * sum;
        }
        s.q_units[row] = most / kMostSigned + sum(poison);  // the integers cannot say "not a number"
    }

    template <int R, int C>
    TM_INLINE void scores(const KeyTile& t, Scratch& s, int row, int head_dim, int first) {
        const QuadFactor* a = s.q_codes + row * kDigits * head_dim;
        Ints tile[kDigits * R][C];
        TM_EACH(r, kDigits * R)
            TM_EACH(c, C) tile[r][c] = splat_int(uint32_t(s.q_offsets[kDigits * row + r]));
        for (int d = 0; d < head_dim / 4; d++) {
            Ints k[C];
            TM_EACH(c, C) {
                k[c] = load_ints((const Quad*)t.k[first + c] + d * kBlock);
                prefetch_l2((const Quad*)t.v[first + c] + d * kBlock);
            }
            quad_step<kUnsigned>(tile, a + 4 * d, head_dim, k);
        }
        TM_EACH(c, C) {
            const Floats k_scales = load(t.k_scales[first + c]);
            TM_EACH(r, R) {
                const Floats units = signed_value(tile[kDigits * r][c], tile[kDigits * r + kDigits - 1][c]);
                store(s.scores + r * kTileKeys + (first + c) * kBlock, mul(units, mul(k_scales, splat(s.q_units[row + r]))));
            }
        }
    }

    TM_INLINE void put_probability(Scratch& s, int r, int block, Floats x) { store(s.scores + r * kTileKeys + block * kBlock, x); }

    // p times V's scale = unit * code
    TM_INLINE void finish_probabilities(const KeyTile& t, Scratch& s, int r) {
        float* const p = s.scores + r * kTileKeys;
        QuadFactor* const codes = s.p_codes + r * kDigits * kTileKeys;
        Floats top = zeros(), poison = zeros();
        for (int c = 0; c < t.blocks; c++) {
            // Scales beyond the last key may be anything.
            const Floats scaled = mul(load(p + c * kBlock), load(t.v_scales[c]));
            const Floats x = keep_between(scaled, t.first + c * kBlock, 0, t.end, zeros());
            top = max(x, top);
            poison = fma(x, zeros(), poison);
            store(p + c * kBlock, x);
        }
        const float most = largest(top);
        const Floats inverse = splat(most > 0 ? kMostUnsigned / most : 0);
        for (int c = 0; c < t.blocks; c++) store_unsigned(codes + c * kBlock, kTileKeys, mul(load(p + c * kBlock), inverse));
        s.p_units[r] = most / kMostUnsigned + sum(poison);
    }

    template <int R, int C>
    TM_INLINE void values(const KeyTile& t, Scratch& s, int row, int head_dim, const float* alpha, int dim) {
        const QuadFactor* a = s.p_codes;
        Ints tile[kDigits * R][C];
        fill(tile, 0);
        for (int block = 0; block < t.blocks; block++, a += kBlock) {
            const Quad* v = (const Quad*)t.v[block] + dim;
            const Quad* next = (const Quad*)t.next_k[block] + dim;
            for (int i = 0; i < kBlock / 4; i++, v += head_dim, next += head_dim) {
                Ints x[C];
                TM_EACH(c, C) {
                    x[c] = load_ints(v + c * kLanes);
                    prefetch_l2(next + c * kLanes);
                }
                quad_step<kSigned>(tile, a + 4 * i, kTileKeys, x);
            }
        }
        float* const out = s.out + row * head_dim + dim;
        TM_EACH(r, R)
            TM_EACH(c, C) {
                const Floats units = unsigned_value(tile[kDigits * r][c], tile[kDigits * r + kDigits - 1][c]);
                const Floats before = mul(load(out + r * head_dim + c * kLanes), splat(alpha[r]));
                store(out + r * head_dim + c * kLanes, fma(units, splat(s.p_units[r]), before));
            }
    }
};

}  // namespace tokenmill
