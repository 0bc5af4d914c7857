// The register tile that GEMM and attention share: R rows times C vectors of 16 columns, summed over pairs of depth.
#pragma once

#include "vec.h"

namespace tokenmill {

template <int R, int C>
struct Tile {
    Floats at[R][C];

    TM_INLINE void clear(Tile& t) {
        TM_EACH(r, R)
            TM_EACH(c, C) t.at[r][c] = zeros();
    }
};

// Into the L2 cache, which takes in about twice as much at once as L1 where the hardware does not guess what comes next.
TM_INLINE void prefetch_l2(const void* p) { _mm_prefetch((const char*)p, _MM_HINT_T1); }

// One step of depth: each row's pair, broadcast, times each column vector.
template <int R, int C>
TM_INLINE void tile_step(Tile<R, C>& t, const Pair* a, int64_t stride, const Ints (&b)[C]) {
    TM_EACH(r, R) {
        const Ints broadcast = splat_int(a[r * stride]);
        TM_EACH(c, C) t.at[r][c] = dot_pairs(t.at[r][c], broadcast, b[c]);
    }
}

// Calls f.template run<R>(first row) for a tile of R <= M rows, or for as few such tiles as cover some rows, about equally many each.
template <int M, typename F>
TM_INLINE void run_tile(F& f, int rows, int first) {
    if constexpr (M == 1) {
        f.template run<1>(first);
    } else {
        if (rows >= M)
            f.template run<M>(first);
        else
            run_tile<M - 1>(f, rows, first);
    }
}
// Rows in as few parts of at most `most` as cover them, about equally many each: the first ones have one more where some must.
struct Split {
    int parts, least, more;

    Split(int rows, int most) : parts((rows + most - 1) / most), least(rows / parts), more(rows % parts) {}
    // The first row of a part; of the one behind the last, the number of rows.
    int begin(int part) const { return least * part + (part < more ? part : more); }
};
template <int M, typename F>
TM_INLINE void for_row_tiles(F& f, int begin, int end) {
    const Split tiles(end - begin, M);
    for (int i = 0; i < tiles.parts; i++) run_tile<M>(f, tiles.begin(i + 1) - tiles.begin(i), begin + tiles.begin(i));
}

}  // namespace tokenmill
