// Activations times weight panels, bfloat16, int8 or int4, with the epilogue in registers.
//
// A panel of 48 columns is three vectors wide and stays in the L2 cache while row tiles pass over it; with few rows the weights are
// read once from memory, which is what decoding costs. A tile that is alone fetches a little ahead; of several, each fetches
// another part of the next panel, so that reading memory and computing overlap.
#include <algorithm>

#include "kernels.h"
#include "tile.h"

namespace tokenmill {
namespace {

constexpr int kVectors = kPanel / kLanes;
constexpr int kRowsAtOnce = 128;  // rows that pass over a panel before the next one is read
constexpr int kAhead = 1024;      // bytes to fetch ahead in a panel that is passed over once
constexpr int kFetches = 2;       // lines that a tile fetches at each step of depth; with one alone the hardware does the rest

TM_INLINE void fetch(const void* read, int64_t ahead) {
    TM_EACH(i, kFetches) prefetch_l2((const char*)read + ahead + i * kLine);
}

// Writes the first `columns` of a row's 48 results that begin at column `first`.
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
    bf16 all[2 * kLanes];
    bf16* const whole = columns == kPanel ? to : all;
    store_bf16(whole, mul(silu(evens(x[0], x[1])), odds(x[0], x[1])));
    bf16 last[kLanes];
    store_bf16(last, mul(silu(evens(x[2], x[2])), odds(x[2], x[2])));
    std::memcpy(whole + kLanes, last, kLanes / 2 * sizeof(bf16));
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

struct Bf16Panel {
    static constexpr int kMaxRows = 8;
    const Matrix& w;
    const Activations& in;
    const Output& out;
    const Gate& gate;
    int panel;
    int64_t ahead;  // bytes from what is read to what is fetched; the next tile fetches other lines

    static int64_t bytes(const Matrix& w) { return int64_t(w.depth) * kPanel * sizeof(bf16); }

    template <int R>
    void run(int row) {
        prefetch_outputs(out, R, row, panel);
        const int pairs = w.depth / 2;
        const Pair* a = (const Pair*)in.values + int64_t(row) * pairs;
        const Pair* b = (const Pair*)w.data + int64_t(panel) * pairs * kPanel;
        Tile<R, kVectors> t;
        Tile<R, kVectors>::clear(t);
        for (int k = 0; k < pairs; k++, b += kPanel) {
            const Ints columns[kVectors] = {load_ints(b), load_ints(b + 16), load_ints(b + 32)};
            fetch(b, ahead);
            tile_step(t, a + k, pairs, columns);
        }
        if (!gate.pass()) return;
        TM_EACH(r, R) finish_row(w, out, row + r, panel, t.at[r]);
        ahead += kFetches * kLine;
    }
};

struct Int8Panel {
    static constexpr int kMaxRows = 5;
    const Matrix& w;
    const Activations& in;
    const Output& out;
    const Gate& gate;
    int panel;
    int64_t ahead;  // bytes from what is read to what is fetched; the next tile fetches other lines

    static int64_t bytes(const Matrix& w) { return int64_t(w.depth) * kPanel; }

    template <int R>
    void run(int row) {
        prefetch_outputs(out, R, row, panel);
        const int quads = w.depth / 4, groups = w.depth / kGroup;
        const Quad* a = (const Quad*)in.quantized + int64_t(row) * quads;
        const Quad* b = (const Quad*)w.data + int64_t(panel) * quads * kPanel;
        const float* scales = in.scales + int64_t(row) * groups;
        const int32_t* halves = in.sums + int64_t(row) * groups * 2;
        Tile<R, kVectors> t;
        Tile<R, kVectors>::clear(t);
        for (int g = 0; g < groups; g++, a += kGroup / 4, b += kGroup / 4 * kPanel) {
            Ints sums[R][kVectors];
            TM_EACH(r, R) {
                const int32_t* const half = halves + 2 * (r * groups + g);
                TM_EACH(c, kVectors) sums[r][c] = splat_int(uint32_t(-128 * (half[0] + half[1])));
            }
            _Pragma("GCC unroll 2") for (int k = 0; k < kGroup / 4; k++) {
                const Quad* bk = b + k * kPanel;
                const Ints columns[kVectors] = {load_ints(bk), load_ints(bk + 16), load_ints(bk + 32)};
                fetch(bk, ahead);
                TM_EACH(r, R) {
                    const Ints broadcast = splat_int(a[r * quads + k]);
                    TM_EACH(c, kVectors) sums[r][c] = dot_quads(sums[r][c], columns[c], broadcast);
                }
            }
            TM_EACH(r, R) {
                const Floats scale = splat(scales[r * groups + g]);
                TM_EACH(c, kVectors) t.at[r][c] = fma(to_floats(sums[r][c]), scale, t.at[r][c]);
            }
        }
        if (!gate.pass()) return;
        TM_EACH(r, R) {
            TM_EACH(c, kVectors) t.at[r][c] = mul(t.at[r][c], load(w.scales + panel * kPanel + c * kLanes));
            finish_row(w, out, row + r, panel, t.at[r]);
        }
        ahead += kFetches * kLine;
    }
};

struct Int4Panel {
    static constexpr int kMaxRows = 4;
    const Matrix& w;
    const Activations& in;
    const Output& out;
    const Gate& gate;
    int panel;
    int64_t ahead;  // bytes from what is read to what is fetched; the next tile fetches other lines

    static int64_t bytes(const Matrix& w) { return w.depth / kInt4Group * int64_t(sizeof(Int4Group)); }

    template <int R>
    void run(int row) {
        prefetch_outputs(out, R, row, panel);
        const int quads = w.depth / 4, groups = w.depth / kInt4Group;
        const Quad* a = (const Quad*)in.quantized + int64_t(row) * quads;
        const Int4Group* group = (const Int4Group*)w.data + int64_t(panel) * groups;
        const float* scales = in.scales + int64_t(row) * (groups / 2);
        const int32_t* halves = in.sums + int64_t(row) * groups;
        Tile<R, kVectors> t;
        Tile<R, kVectors>::clear(t);
        for (int g = 0; g < groups; g++, a += kInt4Group / 4, group++) {
            Ints sums[R][kVectors];
            TM_EACH(r, R)
                TM_EACH(c, kVectors) sums[r][c] = splat_int(0);
            TM_EACH(k, 4) {
                fetch(group->codes[k], ahead);
                const Ints codes[kVectors] = {load_ints(group->codes[k]), load_ints(group->codes[k] + 16), load_ints(group->codes[k] + 32)};
                TM_EACH(r, R) {
                    const Ints shallow = splat_int(a[r * quads + k]), deep = splat_int(a[r * quads + k + 4]);
                    TM_EACH(c, kVectors) {
                        sums[r][c] = dot_quads(sums[r][c], low_nibbles(codes[c]), shallow);
                        sums[r][c] = dot_quads(sums[r][c], high_nibbles(codes[c]), deep);
                    }
                }
            }
            TM_EACH(r, R) {
                const float scale = scales[r * (groups / 2) + g / 2];
                const Floats factor = splat(scale), total = splat(scale * float(halves[r * groups + g]));
                TM_EACH(c, kVectors) {
                    t.at[r][c] = fma(load_half_precision(group->minima + c * kLanes), total, t.at[r][c]);
                    t.at[r][c] = fma(mul(load_half_precision(group->scales + c * kLanes), factor), to_floats(sums[r][c]), t.at[r][c]);
                }
            }
        }
        if (!gate.pass()) return;
        TM_EACH(r, R) finish_row(w, out, row + r, panel, t.at[r]);
        ahead += kFetches * kLine;
    }
};

// A task is a tile; those of a panel and a stretch of rows are neighbours, mostly of one thread.
template <typename Panel>
void multiply(Team& team, const Matrix& w, const Activations& in, int rows, const Output& out) {
    const int panels = (w.columns + kPanel - 1) / kPanel;
    const Split stretches(rows, kRowsAtOnce);
    // Of the longest stretch; where one has a row less, its last tile has.
    const Split tiles(stretches.begin(1), Panel::kMaxRows);
    team.each_restartable(panels * stretches.parts * tiles.parts, [&w, in, out, panels, stretches, tiles](int task, int, const Gate& gate) {
        const int tile = task % tiles.parts, panel = task / tiles.parts % panels, stretch = task / tiles.parts / panels;
        const int first = stretches.begin(stretch), end = stretches.begin(stretch + 1);
        const int row = first + tiles.begin(tile);
        const int64_t ahead = tiles.parts > 1 ? Panel::bytes(w) + tile * kFetches * kLine : kAhead;
        Panel all{w, in, out, gate, panel, ahead};
        run_tile<Panel::kMaxRows>(all, std::min(end, first + tiles.begin(tile + 1)) - row, row);
    });
}

}  // namespace

void gemm(Team& team, const Matrix& w, const Activations& in, int rows, const Output& out) {
    if (w.kind == kInt8)
        multiply<Int8Panel>(team, w, in, rows, out);
    else if (w.kind == kInt4)
        multiply<Int4Panel>(team, w, in, rows, out);
    else
        multiply<Bf16Panel>(team, w, in, rows, out);
}

void quantize_row(const bf16* from, int depth, int row, const Activations& to) {
    const int groups = depth / kGroup;
    int8_t* q = to.quantized + int64_t(row) * depth;
    for (int g = 0; g < groups; g++, from += kGroup, q += kGroup) {
        const float most = largest_magnitude(from);
        // Integers cannot say "not a number" or "infinite": the scale has to, so that the logits are not a number either.
        const float scale = most / 127 + 0 * most;
        const Floats inverse = splat(scale > 0 ? 1 / scale : 0);
        Floats x[kGroup / kLanes];
        TM_EACH(i, kGroup / kLanes) x[i] = mul(load_bf16(from + i * kLanes), inverse);
        const Ints codes = to_int8(x);
        store_ints(q, codes);
        // A group is one vector of bytes: its dot product with ones has its sums.
        const Ints sums = dot_quads(splat_int(0), splat_int(0x01010101), codes);
        to.scales[int64_t(row) * groups + g] = scale;
        sum_halves(sums, to.sums + 2 * (int64_t(row) * groups + g));
    }
}

void quantize_rows(Team& team, const Matrix& next, int rows, const Activations& both) {
    if (next.kind == kBf16) return;
    team.each(rows, [depth = next.depth, both](int row, int) { quantize_row(both.values + int64_t(row) * depth, depth, row, both); });
}

}  // namespace tokenmill
