// Activations times weight panels, bfloat16, int8 or int4, with the epilogue in registers.
//
// A panel is as many columns as tiles of several rows have registers for, and stays in the cache while row tiles pass over it; with
// few rows the weights are read once from memory, which is what decoding costs. A tile that is alone fetches a little ahead; of
// several, each fetches another part of the next panel, so that reading memory and computing overlap.
#include <algorithm>

#include "kernels.h"
#include "tile.h"

namespace tokenmill {
namespace {

constexpr int kRowsAtOnce = 128;  // rows that pass over a panel before the next one is read
constexpr int kAhead = 1024;      // bytes to fetch ahead in a panel that is passed over once
// Lines that a tile fetches at each step of depth, of as many as a panel has vectors; the hardware does the rest.
constexpr int kFetches = kVectors > 1 ? 2 : 1;

TM_INLINE void fetch(const void* read, int64_t ahead) {
    TM_EACH(i, kFetches) prefetch_l2((const char*)read + ahead + i * kLine);
}

// Writes the first `columns` of a row's results of a panel, which begin at column `first`.
TM_INLINE void store_floats(float* to, const Floats (&x)[kVectors], int columns, bool add_to) {
    if (columns == kPanel) {
        TM_EACH(c, kVectors) store(to + c * kLanes, add_to ? add(load(to + c * kLanes), x[c]) : x[c]);
        return;
    }
    float all[kPanel];
    TM_EACH(c, kVectors) store(all + c * kLanes, x[c]);
    for (int i = 0; i < columns; i++) to[i] = add_to ? to[i] + all[i] : all[i];
}

TM_INLINE void store_silu_mul(bf16* to, const Floats (&x)[kVectors], int columns) {
    bf16 all[(kVectors + 1) / 2 * kLanes];
    bf16* const whole = columns == kPanel ? to : all;
    TM_EACH(pair, kVectors / 2) {
        const Floats &a = x[2 * pair], &b = x[2 * pair + 1];
        store_bf16(whole + pair * kLanes, mul(silu(evens(a, b)), odds(a, b)));
    }
    const Floats& single = x[kVectors - 1];
    bf16 last[kLanes];
    store_bf16(last, mul(silu(evens(single, single)), odds(single, single)));
    std::memcpy(whole + kVectors / 2 * kLanes, last, kLanes / 2 * sizeof(bf16));
    if (whole == all) std::memcpy(to, all, columns / 2 * sizeof(bf16));
}

// What a tile's rows will be written to comes into the cache while they are computed.
TM_INLINE void prefetch_outputs(const Output& out, int rows, int row, int panel) {
    for (int r = row; r < row + rows; r++) {
        if (out.store == Store::kSiluMul) {
            prefetch(out.halves + r * out.stride + panel * kPanel / 2);
        } else {
            TM_EACH(c, kVectors) prefetch(out.floats + r * out.stride + panel * kPanel + c * kLanes);
        }
    }
}

TM_INLINE void finish_row(const Matrix& w, const Output& out, int row, int panel, Floats (&x)[kVectors]) {
    const int first = panel * kPanel;
    const int columns = w.columns - first < kPanel ? w.columns - first : kPanel;
    if (w.bias) {
        TM_EACH(c, kVectors) x[c] = add(x[c], load(w.bias + first + c * kLanes));
    }
    if (out.store == Store::kSiluMul)
        store_silu_mul(out.halves + row * out.stride + first / 2, x, columns);
    else
        store_floats(out.floats + row * out.stride + first, x, columns, out.store == Store::kAdd);
}

// What the kinds of panels share. A kind's `multiply` fills in R rows of results.
template <typename Kind>
struct Panel {
    const Matrix& w;
    const Activations& in;
    const Output& out;
    const Gate& gate;
    int panel;
    int64_t ahead;  // bytes from what is read to what is fetched; other tiles fetch other lines

    template <int R>
    void run(int row) {
        prefetch_outputs(out, R, row, panel);
        Floats found[R][kVectors];
        clear(found);
        Kind::multiply(*this, row, found);
        if (!gate.pass()) return;
        TM_EACH(r, R) finish_row(w, out, row + r, panel, found[r]);
    }
};

template <typename T>
TM_INLINE void load_columns(const T* from, Ints (&columns)[kVectors]) {
    TM_EACH(c, kVectors) columns[c] = load_ints(from + c * kLanes);
}

struct Bf16 {
    static constexpr int kMaxRows = kVectors > 1 ? 8 : 6;
    static int64_t bytes(const Matrix& w) { return int64_t(w.depth) * kPanel * sizeof(bf16); }

    template <int R>
    TM_INLINE void multiply(const Panel<Bf16>& p, int row, Floats (&sums)[R][kVectors]) {
        const int depth = p.w.depth;
        const Factor* a = factors_of(p.in) + int64_t(row) * depth;
        const Pair* b = (const Pair*)p.w.data + int64_t(p.panel) * (depth / 2) * kPanel;
        for (int k = 0; k < depth; k += 2, b += kPanel) {
            Ints columns[kVectors];
            load_columns(b, columns);
            fetch(b, p.ahead);
            pair_step(sums, a + k, depth, columns);
        }
    }

    TM_INLINE const Factor* factors_of(const Activations& in) {
        return kBf16IsFactor ? (const Factor*)in.values : (const Factor*)in.factors;
    }
};

struct Int8 {
    static constexpr int kMaxRows = 5;
    static int64_t bytes(const Matrix& w) { return int64_t(w.depth) * kPanel; }

    template <int R>
    TM_INLINE void multiply(const Panel<Int8>& p, int row, Floats (&t)[R][kVectors]) {
        const int depth = p.w.depth, groups = depth / kGroup;
        const QuadFactor* a = (const QuadFactor*)p.in.factors + int64_t(row) * depth;
        const Quad* b = (const Quad*)p.w.data + int64_t(p.panel) * (depth / 4) * kPanel;
        const float* scales = p.in.scales + int64_t(row) * groups;
        const int32_t* halves = p.in.sums + int64_t(row) * groups * 2;
        for (int g = 0; g < groups; g++, a += kGroup, b += kGroup / 4 * kPanel) {
            Ints sums[R][kVectors];
            TM_EACH(r, R) {
                const int32_t* const half = halves + 2 * (r * groups + g);
                TM_EACH(c, kVectors) sums[r][c] = splat_int(uint32_t(-128 * (half[0] + half[1])));
            }
            _Pragma("GCC unroll 2") for (int k = 0; k < kGroup / 4; k++) {
                Ints columns[kVectors];
                load_columns(b + k * kPanel, columns);
                fetch(b + k * kPanel, p.ahead);
                quad_step<kUnsigned>(sums, a + 4 * k, depth, columns);
            }
            TM_EACH(r, R) {
                const Floats scale = splat(scales[r * groups + g]);
                TM_EACH(c, kVectors) t[r][c] = fma(to_floats(sums[r][c]), scale, t[r][c]);
            }
        }
        const float* const columns = p.w.scales + p.panel * kPanel;
        TM_EACH(r, R)
            TM_EACH(c, kVectors) t[r][c] = mul(t[r][c], load(columns + c * kLanes));
    }
};

struct Int4 {
    static constexpr int kMaxRows = 4;
    static int64_t bytes(const Matrix& w) { return w.depth / kInt4Group * int64_t(sizeof(Int4Group)); }

    template <int R>
    TM_INLINE void multiply(const Panel<Int4>& p, int row, Floats (&t)[R][kVectors]) {
        const int quads = p.w.depth / 4, groups = p.w.depth / kInt4Group;
        const Quad* a = (const Quad*)p.in.factors + int64_t(row) * quads;
        const Int4Group* group = (const Int4Group*)p.w.data + int64_t(p.panel) * groups;
        const float* scales = p.in.scales + int64_t(row) * (groups / 2);
        const int32_t* halves = p.in.sums + int64_t(row) * groups;
        for (int g = 0; g < groups; g++, a += kInt4Group / 4, group++) {
            Ints sums[R][kVectors];
            fill(sums, 0);
            TM_EACH(k, 4) {
                Ints codes[kVectors];
                load_columns(group->codes[k], codes);
                fetch(group->codes[k], p.ahead);
                TM_EACH(r, R) {
                    const Ints shallow = splat_int(a[r * quads + k]), deep = splat_int(a[r * quads + k + 4]);
                    TM_EACH(c, kVectors) {
                        sums[r][c] = add_nibbles(sums[r][c], low_nibbles(codes[c]), shallow);
                        sums[r][c] = add_nibbles(sums[r][c], high_nibbles(codes[c]), deep);
                    }
                }
            }
            TM_EACH(r, R) {
                const float scale = scales[r * (groups / 2) + g / 2];
                const Floats factor = splat(scale), total = splat(scale * float(halves[r * groups + g]));
                TM_EACH(c, kVectors) {
                    const int at = c * kLanes;
                    t[r][c] = fma(load_half_precision(group->minima + at), total, t[r][c]);
                    t[r][c] = fma(mul(load_half_precision(group->scales + at), factor), to_floats(sum_nibbles(sums[r][c])), t[r][c]);
                }
            }
        }
    }
};

// A task is a tile; those of a panel and a stretch of rows are neighbours, mostly of one thread.
template <typename Kind>
void multiply(Team& team, const Matrix& w, const Activations& in, int rows, const Output& out) {
    const int panels = (w.columns + kPanel - 1) / kPanel;
    const Split stretches(rows, kRowsAtOnce);
    // Of the longest stretch; where one has a row less, its last tile has.
    const Split tiles(stretches.begin(1), Kind::kMaxRows);
    team.each_restartable(panels * stretches.parts * tiles.parts, [&w, in, out, panels, stretches, tiles](int task, int, const Gate& gate) {
        const int tile = task % tiles.parts, panel = task / tiles.parts % panels, stretch = task / tiles.parts / panels;
        const int first = stretches.begin(stretch), end = stretches.begin(stretch + 1);
        const int row = first + tiles.begin(tile);
        const int64_t ahead = tiles.parts > 1 ? Kind::bytes(w) + tile * kFetches * kLine : kAhead;
        Panel<Kind> all{w, in, out, gate, panel, ahead};
        run_tile<Kind::kMaxRows>(all, std::min(end, first + tiles.begin(tile + 1)) - row, row);
    });
}

void quantize_row(const bf16* from, const Matrix& next, int row, const Activations& to) {
    const int groups = next.depth / kGroup;
    const int64_t first = int64_t(row) * next.depth;
    for (int g = 0; g < groups; g++, from += kGroup) {
        const float most = largest_magnitude(from);
        // Integers cannot say "not a number" or "infinite": the scale has to, so that the logits are not a number either.
        const float scale = most / 127 + 0 * most;
        const Floats inverse = splat(scale > 0 ? 1 / scale : 0);
        Floats x[kGroup / kLanes];
        TM_EACH(i, kGroup / kLanes) x[i] = mul(load_bf16(from + i * kLanes), inverse);
        const Ints codes = to_int8(x);
        if (next.kind == kInt8)
            store_quad_factors((QuadFactor*)to.factors + first + g * kGroup, codes);
        else
            store_ints((int8_t*)to.factors + first + g * kGroup, codes);
        to.scales[int64_t(row) * groups + g] = scale;
        // A group is one vector of bytes.
        sum_halves(sum_quads(codes), to.sums + 2 * (int64_t(row) * groups + g));
    }
}

}  // namespace

void gemm(Team& team, const Matrix& w, const Activations& in, int rows, const Output& out) {
    if (w.kind == kInt8)
        multiply<Int8>(team, w, in, rows, out);
    else if (w.kind == kInt4)
        multiply<Int4>(team, w, in, rows, out);
    else
        multiply<Bf16>(team, w, in, rows, out);
}

size_t factor_bytes(int64_t activations) { return size_t(activations) * std::max(kBf16IsFactor ? 0 : sizeof(Factor), sizeof(QuadFactor)); }

void prepare_row(const Matrix& next, int row, const Activations& both) {
    const bf16* const from = both.values + int64_t(row) * next.depth;
    if (next.kind != kBf16)
        quantize_row(from, next, row, both);
    else if (!kBf16IsFactor)
        copy_factors(from, next.depth, (Factor*)both.factors + int64_t(row) * next.depth);
}

void prepare_rows(Team& team, const Matrix& next, int rows, const Activations& both) {
    if (next.kind == kBf16 && kBf16IsFactor) return;
    team.each(rows, [&next, both](int row, int) { prepare_row(next, row, both); });
}

}  // namespace tokenmill
