// How far below a row's largest logit one has to go for so many tokens or so much of their weight: by bisection, nothing is sorted.
// Distances are floats >= 0.
#pragma once

#include <bit>

#include "weights.h"

namespace tokenmill {

// The least of the distances from `low` to `high` that is enough; `high` where none is. The bits of floats >= 0 have their order;
// without the last sixteen the distance is up to a hundredth too long, and found in half the passes.
template <int kUnusedBits = 0, typename IsEnough>
static inline float reach(float low, float high, const IsEnough& is_enough) {
    const auto distance = [](uint32_t bits) { return std::bit_cast<float>(bits << kUnusedBits); };
    uint32_t least = std::bit_cast<uint32_t>(low) >> kUnusedBits, most = std::bit_cast<uint32_t>(high) >> kUnusedBits;
    while (least < most) {
        const uint32_t middle = (least + most) / 2;
        if (is_enough(distance(middle)))
            most = middle;
        else
            least = middle + 1;
    }
    return distance(least);
}

// Distances and their weights; n is a multiple of 16.
struct Candidates {
    const float* distances;
    const float* weights;
    int n;
};

struct Amount {
    int count;
    double mass;
};

static inline Amount within(float distance, const Candidates& all) {
    int count = 0;
    Doubles mass = zero_doubles();
    for (int i = 0; i < all.n; i += kLanes) {
        const Floats here = load(all.distances + i);
        count += std::popcount(at_least(splat(distance), here));
        mass = add(mass, zero_below(load(all.weights + i), splat(distance), here));
    }
    return {count, sum(mass)};
}

// The distance of the k-th nearest of n, a multiple of 16.
template <int kUnusedBits = 0>
static inline float reach_of_count(const float* distances, int n, int k) {
    return reach<kUnusedBits>(0, kInfinity, [=](float distance) {
        int count = 0;
        for (int i = 0; i < n; i += kLanes) count += std::popcount(at_least(splat(distance), load(distances + i)));
        return count >= k;
    });
}

// Those farther than `low` and up to `high`, copied to where there is room for 16 more.
static inline Candidates between(float low, float high, const Candidates& all, float* distances, float* weights) {
    int n = 0;
    for (int i = 0; i < all.n; i += kLanes) {
        const Floats here = load(all.distances + i);
        const uint32_t lanes = at_least(splat(high), here) & ~at_least(splat(low), here);
        pack(load(all.weights + i), lanes, weights + n);
        n += pack(here, lanes, distances + n);
    }
    store(distances + n, splat(kInfinity));
    store(weights + n, zeros());
    return {distances, weights, (n + kLanes - 1) / kLanes * kLanes};
}

// The least distance within which the weights amount to `enough`. Passes over all of them only narrow it down to a few.
static inline float reach_of_mass(const Candidates& all, double enough) {
    constexpr int kFew = 256, kMostPasses = 16;
    float low = 0, high = kFarthest;
    Amount at_low = within(low, all), at_high = within(high, all);
    if (at_high.mass < enough) return kInfinity;
    if (at_low.mass >= enough) return low;
    for (int i = 0; i < kMostPasses && at_high.count - at_low.count > kFew; i++) {
        const float middle = (low + high) / 2;
        const Amount here = within(middle, all);
        const bool is_enough = here.mass >= enough;
        (is_enough ? high : low) = middle;
        (is_enough ? at_high : at_low) = here;
    }
    // So many that tie, nearly.
    if (at_high.count - at_low.count > kFew) return reach(low, high, [&](float d) { return within(d, all).mass >= enough; });
    float distances[kFew + kLanes], weights[kFew + kLanes];
    const Candidates few = between(low, high, all, distances, weights);
    return reach(low, high, [&](float d) { return at_low.mass + within(d, few).mass >= enough; });
}

}  // namespace tokenmill
