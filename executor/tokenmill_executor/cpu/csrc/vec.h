// Sixteen lanes of float32 and what the kernels need on them, on AVX512 (with BF16, VNNI) and on AVX2.
//
// `Pair` is two bfloat16 in one 32-bit lane, `Quad` four int8. Kernels are written against these functions and those of factors.h
// only, so that the same sources compile for both instruction sets. Numbers are what the instructions give: bfloat16 products are
// summed in float32.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace tokenmill {

using bf16 = uint16_t;
using Pair = uint32_t;
using Quad = uint32_t;

constexpr int kLanes = 16;

#define TM_INLINE static inline __attribute__((always_inline))
// A short loop, unrolled whole: only then do arrays of vectors stay in registers.
#define TM_EACH(i, count) _Pragma("GCC unroll 16") for (int i = 0; i < (count); i++)

TM_INLINE float to_float(bf16 x) {
    uint32_t bits = uint32_t(x) << 16;
    float y;
    std::memcpy(&y, &bits, 4);
    return y;
}

// As a float: the largest of 16 bfloat16 without a sign. What is not a number has the largest bits.
TM_INLINE float largest_bf16(__m256i magnitudes) {
    const __m128i eight = _mm_max_epu16(_mm256_castsi256_si128(magnitudes), _mm256_extracti128_si256(magnitudes, 1));
    return to_float(bf16(~_mm_cvtsi128_si32(_mm_minpos_epu16(_mm_xor_si128(eight, _mm_set1_epi16(-1))))));
}

#if defined(__AVX512BF16__) && defined(__AVX512VNNI__)

constexpr int kRegisters = 32;  // of 16 lanes of 32 bits

using Floats = __m512;
using Ints = __m512i;

TM_INLINE Floats zeros() { return _mm512_setzero_ps(); }
TM_INLINE Floats splat(float x) { return _mm512_set1_ps(x); }
TM_INLINE Floats load(const float* p) { return _mm512_loadu_ps(p); }
TM_INLINE void store(float* p, Floats x) { _mm512_storeu_ps(p, x); }
TM_INLINE Floats add(Floats a, Floats b) { return _mm512_add_ps(a, b); }
TM_INLINE Floats sub(Floats a, Floats b) { return _mm512_sub_ps(a, b); }
TM_INLINE Floats mul(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
TM_INLINE Floats div(Floats a, Floats b) { return _mm512_div_ps(a, b); }
TM_INLINE Floats fma(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
// The second operand where the first is not a number, so max(x, bound) drops NaN and max(bound, x) keeps it.
TM_INLINE Floats max(Floats a, Floats b) { return _mm512_max_ps(a, b); }
TM_INLINE Floats abs(Floats a) { return _mm512_abs_ps(a); }
TM_INLINE float sum(Floats a) { return _mm512_reduce_add_ps(a); }
TM_INLINE float largest(Floats a) { return _mm512_reduce_max_ps(a); }

TM_INLINE Ints load_ints(const void* p) { return _mm512_loadu_si512(p); }
TM_INLINE void store_ints(void* p, Ints x) { _mm512_storeu_si512(p, x); }
TM_INLINE Ints splat_int(uint32_t x) { return _mm512_set1_epi32(int(x)); }
TM_INLINE Floats to_floats(Ints a) { return _mm512_cvtepi32_ps(a); }
TM_INLINE Ints low_halves(Ints a) { return _mm512_and_si512(a, _mm512_set1_epi32(0xffff)); }
TM_INLINE Ints low_nibbles(Ints a) { return _mm512_and_si512(a, _mm512_set1_epi8(15)); }
TM_INLINE Ints high_nibbles(Ints a) { return low_nibbles(_mm512_srli_epi32(a, 4)); }
// The sum of the first eight lanes and that of the last eight.
TM_INLINE void sum_halves(Ints a, int32_t* to) {
    a = _mm512_add_epi32(a, _mm512_shuffle_epi32(a, _MM_PERM_BADC));
    a = _mm512_add_epi32(a, _mm512_shuffle_epi32(a, _MM_PERM_CDAB));
    a = _mm512_add_epi32(a, _mm512_permutex_epi64(a, 0x4e));
    to[0] = _mm512_cvtsi512_si32(a);
    to[1] = _mm256_cvtsi256_si32(_mm512_extracti64x4_epi64(a, 1));
}
// From IEEE half precision.
TM_INLINE Floats load_half_precision(const uint16_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }

// acc + the products of two bfloat16 pairs a lane.
TM_INLINE Floats dot_pairs(Floats acc, Ints a, Ints b) { return _mm512_dpbf16_ps(acc, (__m512bh)a, (__m512bh)b); }
// acc + the products of four unsigned bytes of a and four signed ones of b a lane. Written in assembly because the compiler
// otherwise spills the accumulators.
TM_INLINE Ints dot_quads(Ints acc, Ints a, Ints b) {
    asm("vpdpbusd %2, %1, %0" : "+v"(acc) : "v"(a), "v"(b));
    return acc;
}

TM_INLINE void store_bf16(bf16* p, Floats x) { _mm256_storeu_si256((__m256i*)p, (__m256i)_mm512_cvtneps_pbh(x)); }
TM_INLINE Floats load_bf16(const bf16* p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16));
}
TM_INLINE void store_int8(int8_t* p, Floats x) { _mm_storeu_si128((__m128i*)p, _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(x))); }
// Of 64 bfloat16; not a number if one of them is.
TM_INLINE float largest_magnitude(const bf16* p) {
    const Ints without_sign = _mm512_set1_epi16(0x7fff);
    const Ints low = _mm512_and_si512(load_ints(p), without_sign), high = _mm512_and_si512(load_ints(p + 32), without_sign);
    const Ints most = _mm512_max_epu16(low, high);
    return largest_bf16(_mm256_max_epu16(_mm512_castsi512_si256(most), _mm512_extracti64x4_epi64(most, 1)));
}
// Sixty-four floats as int8, in order.
TM_INLINE Ints to_int8(const Floats (&x)[4]) {
    const Ints low = _mm512_packs_epi32(_mm512_cvtps_epi32(x[0]), _mm512_cvtps_epi32(x[1]));
    const Ints high = _mm512_packs_epi32(_mm512_cvtps_epi32(x[2]), _mm512_cvtps_epi32(x[3]));
    const Ints by_quarter = _mm512_set_epi32(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0);
    return _mm512_permutexvar_epi32(by_quarter, _mm512_packs_epi16(low, high));
}
TM_INLINE void store_uint8(uint8_t* p, Floats x) { _mm_storeu_si128((__m128i*)p, _mm512_cvtusepi32_epi8(_mm512_cvtps_epi32(x))); }
TM_INLINE Floats to_whole(Floats x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
TM_INLINE Floats to_floor(Floats x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC); }

// The lanes with an even and with an odd number of a and b together.
TM_INLINE Floats evens(Floats a, Floats b) {
    const Ints index = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
    return _mm512_permutex2var_ps(a, index, b);
}
TM_INLINE Floats odds(Floats a, Floats b) {
    const Ints index = _mm512_set_epi32(31, 29, 27, 25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1);
    return _mm512_permutex2var_ps(a, index, b);
}

// x in lanes whose number + first lies in [begin, end), else `other`.
TM_INLINE Floats keep_between(Floats x, int first, int begin, int end, Floats other) {
    const Ints lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    const Ints number = _mm512_add_epi32(lanes, _mm512_set1_epi32(first));
    const __mmask16 keep =
        _mm512_cmpge_epi32_mask(number, _mm512_set1_epi32(begin)) & _mm512_cmplt_epi32_mask(number, _mm512_set1_epi32(end));
    return _mm512_mask_blend_ps(keep, other, x);
}

// Bits of the lanes in which a >= b, and of those that are not numbers.
TM_INLINE uint32_t at_least(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_GE_OQ); }
TM_INLINE uint32_t not_numbers(Floats a) { return _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q); }
// a in lanes in which x >= bound, else 0.
TM_INLINE Floats zero_below(Floats a, Floats x, Floats bound) { return _mm512_maskz_mov_ps(__mmask16(at_least(x, bound)), a); }
// x * 2^whole for -126 <= whole <= 127.
TM_INLINE Floats times_power(Floats x, Floats whole) { return _mm512_scalef_ps(x, whole); }

// Stores the lanes whose bits are set one after the other and returns how many. Sixteen places are written.
TM_INLINE int pack(Floats a, uint32_t lanes, float* to) {
    _mm512_storeu_ps(to, _mm512_maskz_compress_ps(__mmask16(lanes), a));
    return __builtin_popcount(lanes);
}
TM_INLINE int pack(Ints a, uint32_t lanes, int32_t* to) {
    _mm512_storeu_si512(to, _mm512_maskz_compress_epi32(__mmask16(lanes), a));
    return __builtin_popcount(lanes);
}
// 0 to 15, and the sums of two.
TM_INLINE Ints lane_numbers() { return _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0); }
TM_INLINE Ints add(Ints a, Ints b) { return _mm512_add_epi32(a, b); }

// Sixteen float64, to sum up floats in; `store` writes them in the order of the lanes.
struct Doubles {
    __m512d low, high;
};
TM_INLINE Doubles zero_doubles() { return {_mm512_setzero_pd(), _mm512_setzero_pd()}; }
TM_INLINE Doubles add(Doubles a, Floats b) {
    return {_mm512_add_pd(a.low, _mm512_cvtps_pd(_mm512_castps512_ps256(b))),
            _mm512_add_pd(a.high, _mm512_cvtps_pd(_mm512_extractf32x8_ps(b, 1)))};
}
TM_INLINE void store(double* p, Doubles a) {
    _mm512_storeu_pd(p, a.low);
    _mm512_storeu_pd(p + 8, a.high);
}

// 2^x for x <= 127; 0 far below; not a number stays so. Relative error 2e-7.
TM_INLINE Floats exp2(Floats x) {
    const Floats whole = to_whole(x);
    const Floats part = sub(x, whole);
    Floats y = splat(1.33335581e-3f);
    y = fma(y, part, splat(9.61812911e-3f));
    y = fma(y, part, splat(5.55041087e-2f));
    y = fma(y, part, splat(2.40226507e-1f));
    y = fma(y, part, splat(6.93147182e-1f));
    y = fma(y, part, splat(1.0f));
    return _mm512_scalef_ps(y, whole);
}

#else

constexpr int kRegisters = 8;  // pairs of them

struct Floats {
    __m256 low, high;
};
struct Ints {
    __m256i low, high;
};

TM_INLINE Floats zeros() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
TM_INLINE Floats splat(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
TM_INLINE Floats load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
TM_INLINE void store(float* p, Floats x) {
    _mm256_storeu_ps(p, x.low);
    _mm256_storeu_ps(p + 8, x.high);
}
TM_INLINE Floats add(Floats a, Floats b) { return {_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)}; }
TM_INLINE Floats sub(Floats a, Floats b) { return {_mm256_sub_ps(a.low, b.low), _mm256_sub_ps(a.high, b.high)}; }
TM_INLINE Floats mul(Floats a, Floats b) { return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)}; }
TM_INLINE Floats div(Floats a, Floats b) { return {_mm256_div_ps(a.low, b.low), _mm256_div_ps(a.high, b.high)}; }
TM_INLINE Floats fma(Floats a, Floats b, Floats c) {
    return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
}
TM_INLINE Floats max(Floats a, Floats b) { return {_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)}; }
TM_INLINE Floats abs(Floats a) {
    const __m256 sign = _mm256_set1_ps(-0.0f);
    return {_mm256_andnot_ps(sign, a.low), _mm256_andnot_ps(sign, a.high)};
}
TM_INLINE float sum(Floats a) {
    const __m256 s = _mm256_add_ps(a.low, a.high);
    __m128 t = _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
    t = _mm_add_ps(t, _mm_movehl_ps(t, t));
    return _mm_cvtss_f32(_mm_add_ss(t, _mm_movehdup_ps(t)));
}
TM_INLINE float largest(Floats a) {
    const __m256 s = _mm256_max_ps(a.low, a.high);
    __m128 t = _mm_max_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
    t = _mm_max_ps(t, _mm_movehl_ps(t, t));
    return _mm_cvtss_f32(_mm_max_ss(t, _mm_movehdup_ps(t)));
}

TM_INLINE Ints load_ints(const void* p) {
    return {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)p + 1)};
}
TM_INLINE void store_ints(void* p, Ints x) {
    _mm256_storeu_si256((__m256i*)p, x.low);
    _mm256_storeu_si256((__m256i*)p + 1, x.high);
}
TM_INLINE Ints splat_int(uint32_t x) { return {_mm256_set1_epi32(int(x)), _mm256_set1_epi32(int(x))}; }
TM_INLINE Floats to_floats(Ints a) { return {_mm256_cvtepi32_ps(a.low), _mm256_cvtepi32_ps(a.high)}; }
TM_INLINE Ints low_halves(Ints a) {
    const __m256i mask = _mm256_set1_epi32(0xffff);
    return {_mm256_and_si256(a.low, mask), _mm256_and_si256(a.high, mask)};
}
TM_INLINE Ints low_nibbles(Ints a) {
    const __m256i mask = _mm256_set1_epi8(15);
    return {_mm256_and_si256(a.low, mask), _mm256_and_si256(a.high, mask)};
}
TM_INLINE Ints high_nibbles(Ints a) { return low_nibbles({_mm256_srli_epi32(a.low, 4), _mm256_srli_epi32(a.high, 4)}); }
TM_INLINE int32_t sum_half(__m256i a) {
    __m128i s = _mm_add_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
    s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(s, _mm_shuffle_epi32(s, 0xb1)));
}
TM_INLINE void sum_halves(Ints a, int32_t* to) {
    to[0] = sum_half(a.low);
    to[1] = sum_half(a.high);
}
TM_INLINE Floats load_half_precision(const uint16_t* p) {
    return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)), _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(p + 8)))};
}

// To nearest, ties to even; not a number keeps its quiet bit.
TM_INLINE __m256i round_bf16(__m256 x) {
    const __m256i bits = _mm256_castps_si256(x);
    const __m256i bias =
        _mm256_add_epi32(_mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1)), _mm256_set1_epi32(0x7fff));
    const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, bias), 16);
    const __m256i quiet = _mm256_or_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(0x40));
    return _mm256_blendv_epi8(rounded, quiet, _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q)));
}
TM_INLINE void store_bf16(bf16* p, Floats x) {
    const __m256i packed = _mm256_packus_epi32(round_bf16(x.low), round_bf16(x.high));
    _mm256_storeu_si256((__m256i*)p, _mm256_permute4x64_epi64(packed, 0xd8));
}
TM_INLINE Floats load_bf16(const bf16* p) {
    const __m256i low = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p));
    const __m256i high = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)(p + 8)));
    return {_mm256_castsi256_ps(_mm256_slli_epi32(low, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(high, 16))};
}
TM_INLINE void store_int8(int8_t* p, Floats x) {
    const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(_mm256_cvtps_epi32(x.low), _mm256_cvtps_epi32(x.high)), 0xd8);
    _mm_storeu_si128((__m128i*)p, _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
}
TM_INLINE float largest_magnitude(const bf16* p) {
    __m256i most = _mm256_setzero_si256();
    TM_EACH(i, 4) {
        const __m256i bits = _mm256_loadu_si256((const __m256i*)(p + i * kLanes));
        most = _mm256_max_epu16(most, _mm256_and_si256(bits, _mm256_set1_epi16(0x7fff)));
    }
    return largest_bf16(most);
}
TM_INLINE __m256i to_int8_half(Floats a, Floats b) {
    const __m256i low = _mm256_packs_epi32(_mm256_cvtps_epi32(a.low), _mm256_cvtps_epi32(a.high));
    const __m256i high = _mm256_packs_epi32(_mm256_cvtps_epi32(b.low), _mm256_cvtps_epi32(b.high));
    return _mm256_permutevar8x32_epi32(_mm256_packs_epi16(low, high), _mm256_set_epi32(7, 3, 6, 2, 5, 1, 4, 0));
}
TM_INLINE Ints to_int8(const Floats (&x)[4]) { return {to_int8_half(x[0], x[1]), to_int8_half(x[2], x[3])}; }
TM_INLINE Floats to_whole(Floats x) {
    constexpr int nearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    return {_mm256_round_ps(x.low, nearest), _mm256_round_ps(x.high, nearest)};
}

TM_INLINE __m256 in_order(__m256 a) { return _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(a), 0xd8)); }
TM_INLINE Floats evens(Floats a, Floats b) {
    return {in_order(_mm256_shuffle_ps(a.low, a.high, 0x88)), in_order(_mm256_shuffle_ps(b.low, b.high, 0x88))};
}
TM_INLINE Floats odds(Floats a, Floats b) {
    return {in_order(_mm256_shuffle_ps(a.low, a.high, 0xdd)), in_order(_mm256_shuffle_ps(b.low, b.high, 0xdd))};
}

TM_INLINE __m256 keep_half(__m256 x, int first, int begin, int end, __m256 other) {
    const __m256i number = _mm256_add_epi32(_mm256_set_epi32(7, 6, 5, 4, 3, 2, 1, 0), _mm256_set1_epi32(first));
    const __m256i below = _mm256_cmpgt_epi32(_mm256_set1_epi32(begin), number);
    const __m256i keep = _mm256_andnot_si256(below, _mm256_cmpgt_epi32(_mm256_set1_epi32(end), number));
    return _mm256_blendv_ps(other, x, _mm256_castsi256_ps(keep));
}
TM_INLINE Floats keep_between(Floats x, int first, int begin, int end, Floats other) {
    return {keep_half(x.low, first, begin, end, other.low), keep_half(x.high, first + 8, begin, end, other.high)};
}

TM_INLINE uint32_t at_least(Floats a, Floats b) {
    const int low = _mm256_movemask_ps(_mm256_cmp_ps(a.low, b.low, _CMP_GE_OQ));
    return uint32_t(low | _mm256_movemask_ps(_mm256_cmp_ps(a.high, b.high, _CMP_GE_OQ)) << 8);
}
TM_INLINE uint32_t not_numbers(Floats a) {
    const int low = _mm256_movemask_ps(_mm256_cmp_ps(a.low, a.low, _CMP_UNORD_Q));
    return uint32_t(low | _mm256_movemask_ps(_mm256_cmp_ps(a.high, a.high, _CMP_UNORD_Q)) << 8);
}
TM_INLINE Floats zero_below(Floats a, Floats x, Floats bound) {
    return {_mm256_and_ps(a.low, _mm256_cmp_ps(x.low, bound.low, _CMP_GE_OQ)),
            _mm256_and_ps(a.high, _mm256_cmp_ps(x.high, bound.high, _CMP_GE_OQ))};
}
TM_INLINE __m256 power_of_two(__m256 whole) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(whole), _mm256_set1_epi32(127)), 23));
}
TM_INLINE Floats times_power(Floats x, Floats whole) {
    return {_mm256_mul_ps(x.low, power_of_two(whole.low)), _mm256_mul_ps(x.high, power_of_two(whole.high))};
}

// For each eight bits the numbers of those that are set, in order.
struct Orders {
    uint64_t of[256];
    constexpr Orders() : of() {
        for (int bits = 0; bits < 256; bits++)
            for (int lane = 7; lane >= 0; lane--)
                if (bits >> lane & 1) of[bits] = of[bits] << 8 | uint64_t(lane);
    }
};
constexpr Orders kOrders;
TM_INLINE __m256i pack_half(__m256i a, uint32_t lanes) {
    return _mm256_permutevar8x32_epi32(a, _mm256_cvtepu8_epi32(_mm_cvtsi64_si128(int64_t(kOrders.of[lanes]))));
}
TM_INLINE int pack(Ints a, uint32_t lanes, int32_t* to) {
    const int low = __builtin_popcount(lanes & 255);
    _mm256_storeu_si256((__m256i*)to, pack_half(a.low, lanes & 255));
    _mm256_storeu_si256((__m256i*)(to + low), pack_half(a.high, lanes >> 8));
    return low + __builtin_popcount(lanes >> 8);
}
TM_INLINE int pack(Floats a, uint32_t lanes, float* to) {
    return pack(Ints{_mm256_castps_si256(a.low), _mm256_castps_si256(a.high)}, lanes, (int32_t*)to);
}
TM_INLINE Ints lane_numbers() { return {_mm256_set_epi32(7, 6, 5, 4, 3, 2, 1, 0), _mm256_set_epi32(15, 14, 13, 12, 11, 10, 9, 8)}; }
TM_INLINE Ints add(Ints a, Ints b) { return {_mm256_add_epi32(a.low, b.low), _mm256_add_epi32(a.high, b.high)}; }

struct Doubles {
    __m256d quarters[4];
};
TM_INLINE Doubles zero_doubles() { return {{_mm256_setzero_pd(), _mm256_setzero_pd(), _mm256_setzero_pd(), _mm256_setzero_pd()}}; }
TM_INLINE __m256d add_four(__m256d a, __m128 b) { return _mm256_add_pd(a, _mm256_cvtps_pd(b)); }
TM_INLINE Doubles add(Doubles a, Floats b) {
    return {{add_four(a.quarters[0], _mm256_castps256_ps128(b.low)), add_four(a.quarters[1], _mm256_extractf128_ps(b.low, 1)),
             add_four(a.quarters[2], _mm256_castps256_ps128(b.high)), add_four(a.quarters[3], _mm256_extractf128_ps(b.high, 1))}};
}
TM_INLINE void store(double* p, Doubles a) {
    TM_EACH(i, 4) _mm256_storeu_pd(p + 4 * i, a.quarters[i]);
}

TM_INLINE __m256 exp2_half(__m256 x) {
    x = _mm256_max_ps(_mm256_set1_ps(-126.0f), x);  // in this order NaN stays
    const __m256 whole = _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m256 part = _mm256_sub_ps(x, whole);
    __m256 y = _mm256_set1_ps(1.33335581e-3f);
    y = _mm256_fmadd_ps(y, part, _mm256_set1_ps(9.61812911e-3f));
    y = _mm256_fmadd_ps(y, part, _mm256_set1_ps(5.55041087e-2f));
    y = _mm256_fmadd_ps(y, part, _mm256_set1_ps(2.40226507e-1f));
    y = _mm256_fmadd_ps(y, part, _mm256_set1_ps(6.93147182e-1f));
    y = _mm256_fmadd_ps(y, part, _mm256_set1_ps(1.0f));
    const __m256i power = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(whole), _mm256_set1_epi32(127)), 23);
    return _mm256_mul_ps(y, _mm256_castsi256_ps(power));
}
TM_INLINE Floats exp2(Floats x) { return {exp2_half(x.low), exp2_half(x.high)}; }

#endif

// In one order on every processor.
TM_INLINE double sum(Doubles a) {
    double lanes[kLanes];
    store(lanes, a);
    for (int half = kLanes / 2; half; half /= 2) TM_EACH(i, half) lanes[i] += lanes[half + i];
    return lanes[0];
}

// x * sigmoid(x)
TM_INLINE Floats silu(Floats x) {
    // The bound keeps 2^-x finite: silu(-88) is 0 to the last bit that matters.
    const Floats minus_x_log2e = mul(max(splat(-88.0f), x), splat(-1.44269504f));
    return div(x, add(splat(1.0f), exp2(minus_x_log2e)));
}

TM_INLINE void prefetch(const void* p) { _mm_prefetch((const char*)p, _MM_HINT_T0); }

}  // namespace tokenmill
