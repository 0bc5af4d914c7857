// One step of depth of each product in registers, and how the side that is broadcast lies in memory for it.
//
// The other side, weights or cached keys and values, is the same on every processor: a lane of 32 bits has two bfloat16 or four bytes
// of its column. AVX512 multiplies lanes with lanes. AVX2 takes them apart, once for all rows of a tile, and wants the broadcast side
// taken apart already: bfloat16 as float32, bytes as 16 bits. Bytes that meet four-bit codes stay bytes: products fit 16 bits.
#pragma once

#include <type_traits>

#include "vec.h"

namespace tokenmill {

constexpr int kAccumulators = kRegisters * 3 / 4;  // vectors of sums that a tile keeps in registers
enum Bytes { kSigned, kUnsigned };

#if defined(__AVX512BF16__) && defined(__AVX512VNNI__)

using Factor = bf16;
using QuadFactor = int8_t;

TM_INLINE void store_factors(Factor* to, Floats x) { store_bf16(to, x); }
TM_INLINE Floats load_factors(const Factor* from) { return load_bf16(from); }
TM_INLINE void copy_factors(const bf16* from, int n, Factor* to) { std::memcpy(to, from, n * sizeof(bf16)); }
TM_INLINE void store_quad_factors(QuadFactor* to, Ints codes) { store_ints(to, codes); }

// sums += the products of two bfloat16 a lane with those at a, a + stride, … of each row.
template <int R, int C>
TM_INLINE void pair_step(Floats (&sums)[R][C], const Factor* a, int64_t stride, const Ints (&b)[C]) {
    TM_EACH(r, R) {
        const Ints broadcast = splat_int(*(const Pair*)(a + r * stride));
        TM_EACH(c, C) sums[r][c] = dot_pairs(sums[r][c], broadcast, b[c]);
    }
}

// The same of four bytes a lane. Where those of `b` are signed, those at `a` are not.
template <Bytes kind, int R, int C>
TM_INLINE void quad_step(Ints (&sums)[R][C], const QuadFactor* a, int64_t stride, const Ints (&b)[C]) {
    TM_EACH(r, R) {
        const Ints broadcast = splat_int(*(const Quad*)(a + r * stride));
        TM_EACH(c, C)
            sums[r][c] = kind == kSigned ? dot_quads(sums[r][c], broadcast, b[c]) : dot_quads(sums[r][c], b[c], broadcast);
    }
}

// Sums of products with four bits, of up to eight quads.
TM_INLINE Ints add_nibbles(Ints sums, Ints nibbles, Ints codes) { return dot_quads(sums, nibbles, codes); }
TM_INLINE Ints sum_nibbles(Ints sums) { return sums; }

// Of 64 bytes, by quads.
TM_INLINE Ints sum_quads(Ints codes) { return dot_quads(splat_int(0), splat_int(0x01010101), codes); }

// A number of about 15 bits as factors: as two digits, each a row of its own.
constexpr int kDigits = 2;
constexpr int kMostSigned = 127 * 128, kMostUnsigned = 255 * 255;
TM_INLINE void store_signed(QuadFactor* to, int64_t stride, Floats x) {
    const Floats high = to_whole(mul(x, splat(1.0f / 128)));
    store_int8(to, high);
    store_int8(to + stride, fma(high, splat(-128), x));
}
TM_INLINE void store_unsigned(QuadFactor* to, int64_t stride, Floats x) {
    const Floats high = to_floor(mul(x, splat(1.0f / 255)));
    store_uint8((uint8_t*)to, high);
    store_uint8((uint8_t*)to + stride, fma(high, splat(-255), x));
}
TM_INLINE Floats signed_value(Ints high, Ints low) { return fma(to_floats(high), splat(128), to_floats(low)); }
TM_INLINE Floats unsigned_value(Ints high, Ints low) { return fma(to_floats(high), splat(255), to_floats(low)); }

#else

using Factor = float;
using QuadFactor = int16_t;  // of a quad the first, the third, the second and the fourth

TM_INLINE void store_factors(Factor* to, Floats x) { store(to, x); }
TM_INLINE Floats load_factors(const Factor* from) { return load(from); }
TM_INLINE void copy_factors(const bf16* from, int n, Factor* to) {
    int i = 0;
    for (; i + kLanes <= n; i += kLanes) store(to + i, load_bf16(from + i));
    for (; i < n; i++) to[i] = to_float(from[i]);
}
TM_INLINE __m256i by_parity(__m256i quads) { return _mm256_shufflelo_epi16(_mm256_shufflehi_epi16(quads, 0xd8), 0xd8); }
TM_INLINE void store_quad_factors(QuadFactor* to, Ints codes) {
    const __m128i quarters[4] = {_mm256_castsi256_si128(codes.low), _mm256_extracti128_si256(codes.low, 1),
                                 _mm256_castsi256_si128(codes.high), _mm256_extracti128_si256(codes.high, 1)};
    TM_EACH(i, 4) _mm256_storeu_si256((__m256i*)(to + i * kLanes), by_parity(_mm256_cvtepi8_epi16(quarters[i])));
}

TM_INLINE __m256 low_pairs(__m256i x) { return _mm256_castsi256_ps(_mm256_slli_epi32(x, 16)); }
TM_INLINE __m256 high_pairs(__m256i x) { return _mm256_castsi256_ps(_mm256_and_si256(x, _mm256_set1_epi32(int(0xffff0000)))); }

template <int R, int C>
TM_INLINE void pair_step(Floats (&sums)[R][C], const Factor* a, int64_t stride, const Ints (&b)[C]) {
    TM_EACH(odd, 2) {
        Floats columns[C];
        TM_EACH(c, C)
            columns[c] = odd ? Floats{high_pairs(b[c].low), high_pairs(b[c].high)} : Floats{low_pairs(b[c].low), low_pairs(b[c].high)};
        TM_EACH(r, R) {
            const Floats broadcast = splat(a[r * stride + odd]);
            TM_EACH(c, C) sums[r][c] = fma(broadcast, columns[c], sums[r][c]);
        }
    }
}

TM_INLINE Ints even_bytes(Ints x) {
    const __m256i mask = _mm256_set1_epi16(0xff);
    return {_mm256_and_si256(x.low, mask), _mm256_and_si256(x.high, mask)};
}
TM_INLINE Ints odd_bytes(Ints x) { return {_mm256_srli_epi16(x.low, 8), _mm256_srli_epi16(x.high, 8)}; }
TM_INLINE Ints odd_signed_bytes(Ints x) { return {_mm256_srai_epi16(x.low, 8), _mm256_srai_epi16(x.high, 8)}; }
TM_INLINE Ints even_signed_bytes(Ints x) { return odd_signed_bytes({_mm256_slli_epi16(x.low, 8), _mm256_slli_epi16(x.high, 8)}); }
// Added up in this order: the compiler otherwise adds products to one another first, and has no registers for them.
TM_INLINE Ints in_turn(Ints sums) {
    asm("" : "+x"(sums.low), "+x"(sums.high));
    return sums;
}
TM_INLINE Ints add_products(Ints sums, Ints a, Ints b) {
    return in_turn({_mm256_add_epi32(sums.low, _mm256_madd_epi16(a.low, b.low)),
                    _mm256_add_epi32(sums.high, _mm256_madd_epi16(a.high, b.high))});
}

// Of two bytes a lane, taken apart.
template <int R, int C>
TM_INLINE void half_step(Ints (&sums)[R][C], const QuadFactor* a, int64_t stride, const Ints (&columns)[C]) {
    TM_EACH(r, R) {
        const Ints broadcast = splat_int(*(const Pair*)(a + r * stride));
        TM_EACH(c, C) sums[r][c] = add_products(sums[r][c], columns[c], broadcast);
    }
}
template <Bytes kind, int R, int C>
TM_INLINE void quad_step(Ints (&sums)[R][C], const QuadFactor* a, int64_t stride, const Ints (&b)[C]) {
    Ints columns[C];
    TM_EACH(c, C) columns[c] = kind == kSigned ? even_signed_bytes(b[c]) : even_bytes(b[c]);
    half_step(sums, a, stride, columns);
    TM_EACH(c, C) columns[c] = kind == kSigned ? odd_signed_bytes(b[c]) : odd_bytes(b[c]);
    half_step(sums, a + 2, stride, columns);
}

// In 16 bits: eight quads, of which two products each are added up, come to 8 * 2 * 15 * 127 at most.
TM_INLINE Ints add_nibbles(Ints sums, Ints nibbles, Ints codes) {
    return in_turn({_mm256_add_epi16(sums.low, _mm256_maddubs_epi16(nibbles.low, codes.low)),
                    _mm256_add_epi16(sums.high, _mm256_maddubs_epi16(nibbles.high, codes.high))});
}
TM_INLINE Ints sum_nibbles(Ints sums) {
    const __m256i ones = _mm256_set1_epi16(1);
    return {_mm256_madd_epi16(sums.low, ones), _mm256_madd_epi16(sums.high, ones)};
}

TM_INLINE Ints sum_quads(Ints codes) { return sum_nibbles(add_nibbles(splat_int(0), splat_int(0x01010101), codes)); }

constexpr int kDigits = 1;
constexpr int kMostSigned = 127 * 128, kMostUnsigned = 32767;
TM_INLINE void store_signed(QuadFactor* to, int64_t, Floats x) {
    const __m256i words = _mm256_packs_epi32(_mm256_cvtps_epi32(x.low), _mm256_cvtps_epi32(x.high));
    _mm256_storeu_si256((__m256i*)to, by_parity(_mm256_permute4x64_epi64(words, 0xd8)));
}
TM_INLINE void store_unsigned(QuadFactor* to, int64_t stride, Floats x) { store_signed(to, stride, x); }
TM_INLINE Floats signed_value(Ints all, Ints) { return to_floats(all); }
TM_INLINE Floats unsigned_value(Ints all, Ints) { return to_floats(all); }

#endif

// Whether rows of bfloat16 are factors as they are.
constexpr bool kBf16IsFactor = std::is_same_v<Factor, bf16>;

}  // namespace tokenmill
