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

// Calls f.template run<R>(first row) for as few tiles of at most M rows as cover them, about equally many each.
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
template <int M, typename F>
TM_INLINE void for_row_tiles(F& f, int begin, int end) {
    for (int tiles = (end - begin + M - 1) / M; tiles > 0; tiles--) {
        const int rows = (end - begin + tiles - 1) / tiles;
        run_tile<M>(f, rows, begin);
        begin += rows;
    }
}

}  // namespace tokenmill
