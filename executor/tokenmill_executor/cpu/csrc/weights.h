// A row of logits as weights, the exponentials of distances below its largest: summed up in chunks of 256, and inverted by a
// uniform number. Sums are of float64, in one order on every processor.
#pragma once

#include <algorithm>
#include <limits>

#include "kernels.h"

namespace tokenmill {

constexpr int kChunk = 256;      // logits that are summed up before the sum is kept
constexpr int kGroups = 16;      // of a chunk: lane l of each of its vectors
constexpr float kFarthest = 86;  // beyond it a weight is 0
constexpr float kInfinity = std::numeric_limits<float>::infinity();

static inline int chunks_of(int n) { return (n + kChunk - 1) / kChunk; }

// [n] logits, read in chunks; the last one is filled up with -inf in `buffer`.
struct Logits {
    const float* values;
    int n;

    int chunks() const { return chunks_of(n); }
    const float* chunk(int c, float* buffer) const {
        const float* const here = values + c * kChunk;
        const int count = n - c * kChunk;
        if (count >= kChunk) return here;
        std::fill(std::copy_n(here, count, buffer), buffer + kChunk, -kInfinity);
        return buffer;
    }
};

// e^-x for x >= 0, within two units of the last place; 0 where it would be below 2^-125. (Cephes' polynomial.)
TM_INLINE Floats weight(Floats distance) {
    const Floats lowest = splat(-kFarthest), x = sub(zeros(), distance), bounded = max(x, lowest);
    const Floats whole = to_whole(mul(bounded, splat(kLog2e)));
    const Floats part = fma(whole, splat(2.12194440e-4f), fma(whole, splat(-0.693359375f), bounded));
    Floats y = splat(1.9875691500e-4f);
    y = fma(y, part, splat(1.3981999507e-3f));
    y = fma(y, part, splat(8.3334519073e-3f));
    y = fma(y, part, splat(4.1665795894e-2f));
    y = fma(y, part, splat(1.6666665459e-1f));
    y = fma(y, part, splat(5.0000001201e-1f));
    y = fma(y, mul(part, part), add(part, splat(1.0f)));
    return zero_below(times_power(y, whole), x, lowest);
}

static inline double sum_of(const float* weights) {
    Doubles even = zero_doubles(), odd = zero_doubles();
    for (int i = 0; i < kChunk; i += 2 * kLanes) {
        even = add(even, load(weights + i));
        odd = add(odd, load(weights + i + kLanes));
    }
    return sum(even) + sum(odd);
}

// The scaled exponentials of a row, a chunk at a time.
struct RowWeights {
    Logits logits;
    float largest, temperature;

    int chunks() const { return logits.chunks(); }
    const float* chunk(int c, float* buffer) const {
        const float* const p = logits.chunk(c, buffer);
        for (int i = 0; i < kChunk; i += kLanes)
            store(buffer + i, weight(div(sub(splat(largest), load(p + i)), splat(temperature))));
        return buffer;
    }
};

// Weights that are there already, filled up to whole chunks.
struct StoredWeights {
    const float* values;
    int n;

    int chunks() const { return chunks_of(n); }
    const float* chunk(int c, float*) const { return values + c * kChunk; }
};

template <typename Weights>
static inline double sum_chunks(const Weights& weights, double* sums) {
    float buffer[kChunk];
    double total = 0;
    for (int c = 0; c < weights.chunks(); c++) total += sums[c] = sum_of(weights.chunk(c, buffer));
    return total;
}

// The first place at which the cumulative weights exceed uniform * total, which is below the total; so never one of weight 0.
template <typename Weights>
static inline int invert(const Weights& weights, const double* sums, double total, double uniform) {
    const double target = uniform * total;
    double cumulative = 0;
    int c = 0;
    while (c + 1 < weights.chunks() && cumulative + sums[c] <= target) cumulative += sums[c++];
    float buffer[kChunk];
    const float* const here = weights.chunk(c, buffer);
    int place = 0;
    for (int i = 0; i < kChunk; i++) {
        cumulative += double(here[i]);
        if (here[i] > 0) place = i;  // the last one, should rounding leave the target beyond the chunk
        if (cumulative > target) break;
    }
    return c * kChunk + place;
}

}  // namespace tokenmill
