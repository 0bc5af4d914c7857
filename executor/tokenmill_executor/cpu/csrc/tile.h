// The register tile that GEMM and attention share: R rows times C vectors of 16 columns.
#pragma once

#include "factors.h"

namespace tokenmill {

template <int R, int C>
TM_INLINE void clear(Floats (&tile)[R][C]) {
    TM_EACH(r, R)
        TM_EACH(c, C) tile[r][c] = zeros();
}
template <int R, int C>
TM_INLINE void fill(Ints (&tile)[R][C], int32_t x) {
    TM_EACH(r, R)
        TM_EACH(c, C) tile[r][c] = splat_int(uint32_t(x));
}

// Into the L2 cache, which takes in about twice as much at once as L1 where the hardware does not guess what comes next.
TM_INLINE void prefetch_l2(const void* p) { _mm_prefetch((const char*)p, _MM_HINT_T1); }

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
