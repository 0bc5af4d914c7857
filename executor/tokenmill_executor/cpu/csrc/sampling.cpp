// Chooses tokens from rows of logits, with the rules of sampling/draw.py, which is its reference: a token is kept if its scaled logit
// reaches a threshold, kept tokens are summed up in the order of their ids, in float64, and the sum is inverted by a uniform number.
//
// A row is read twice at most: once for its largest logits, once for the sum of exponentials. Nothing is sorted: the largest logit of
// every 16 says where the few candidates are, and their threshold is found by bisection. A row's token does not hang on other rows,
// on threads or on the instruction set: sums have one order everywhere.
#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "arena.h"
#include "kernels.h"

namespace tokenmill {

// As cpu/library.py has it, field by field. Temperature 0 is greedy; top_k 0, top_p 1 and min_p 0 are off; `top` counts the most
// likely tokens whose log probabilities are asked for, -1 asks for none at all, the token's own neither.
struct SampleRow {
    const float* logits;
    double uniform;
    float temperature, top_p, min_p;
    int32_t top_k, top;
    // Filled in. Where `largest` is not finite the others mean nothing.
    int32_t token;
    float largest, logprob;
};
static_assert(sizeof(SampleRow) == 48);

namespace {

constexpr int kChunk = 256;  // logits that are summed up before the sum is kept
constexpr int kGroups = 16;  // of a chunk: lane l of each of its vectors
constexpr float kFarthest = 86;  // beyond it a weight is 0
constexpr float kInfinity = std::numeric_limits<float>::infinity();

int chunks_of(int n) { return (n + kChunk - 1) / kChunk; }

// A thread's own arrays. Candidates are the tokens that may be kept, in the order of their ids.
struct Scratch {
    float* maxima;     // of each group
    float* distances;  // of group maxima or candidates: how far below the largest, so never negative
    float* weights;    // exponentials of candidates
    int32_t* ids;      // of candidates
    double* sums;      // of the exponentials of each chunk

    Scratch(Arena& arena, int vocab)
        : maxima(arena.take<float>(chunks_of(vocab) * kGroups)),
          distances(arena.take<float>(chunks_of(vocab) * kChunk + kLanes)),
          weights(arena.take<float>(chunks_of(vocab) * kChunk)),
          ids(arena.take<int32_t>(chunks_of(vocab) * kChunk + kLanes)),
          sums(arena.take<double>(chunks_of(vocab))) {}
};

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

// Each group's largest. Returns the row's: not a number if there is one.
float find_maxima(const Logits& x, float* maxima) {
    float buffer[kChunk];
    Floats top = splat(-kInfinity);
    uint32_t strange = 0;
    for (int c = 0; c < x.chunks(); c++) {
        const float* const p = x.chunk(c, buffer);
        Floats of_groups = load(p);
        TM_EACH(i, kChunk / kLanes) {
            const Floats here = load(p + i * kLanes);
            of_groups = max(of_groups, here);
            strange |= not_numbers(here);
        }
        store(maxima + c * kGroups, of_groups);
        top = max(top, of_groups);
    }
    return strange ? std::numeric_limits<float>::quiet_NaN() : largest(top);
}

// The first place of the row's largest.
int find_largest(const Logits& x, const float* maxima, float largest) {
    int c = 0;
    while (c + 1 < x.chunks() && !at_least(load(maxima + c * kGroups), splat(largest))) c++;
    const float* const end = x.values + x.n;
    return int(std::find(x.values + c * kChunk, end, largest) - x.values) % x.n;  // 0 in a row of no numbers
}

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

double sum_of(const float* weights) {
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
double sum_chunks(const Weights& weights, double* sums) {
    float buffer[kChunk];
    double total = 0;
    for (int c = 0; c < weights.chunks(); c++) total += sums[c] = sum_of(weights.chunk(c, buffer));
    return total;
}

// The first place at which the cumulative weights exceed uniform * total, which is below the total; so never one of weight 0.
template <typename Weights>
int invert(const Weights& weights, const double* sums, double total, double uniform) {
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

// The least of the distances from `low` to `high` that is enough; `high` where none is. The bits of floats >= 0 have their order;
// without the last sixteen the distance is up to a hundredth too long, and found in half the passes.
template <int kUnusedBits = 0, typename IsEnough>
float reach(float low, float high, const IsEnough& is_enough) {
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

Amount within(float distance, const Candidates& all) {
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
float reach_of_count(const float* distances, int n, int k) {
    return reach<kUnusedBits>(0, kInfinity, [=](float distance) {
        int count = 0;
        for (int i = 0; i < n; i += kLanes) count += std::popcount(at_least(splat(distance), load(distances + i)));
        return count >= k;
    });
}

// Those farther than `low` and up to `high`, copied to where there is room for 16 more.
Candidates between(float low, float high, const Candidates& all, float* distances, float* weights) {
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
float reach_of_mass(const Candidates& all, double enough) {
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

// A distance within which there are at least k tokens: k groups have one there.
float reach_of_groups(const Logits& x, float largest, int k, const Scratch& s) {
    const int groups = x.chunks() * kGroups;
    if (k > groups) return kInfinity;
    for (int i = 0; i < groups; i += kLanes) store(s.distances + i, sub(splat(largest), load(s.maxima + i)));
    return reach_of_count<16>(s.distances, groups, k);
}

// Tokens within a distance, and those that rounding may bring there; with their distances, filled up to whole chunks with infinity.
int gather(const Logits& x, float largest, float distance, const Scratch& s) {
    const Floats least = splat(largest - (distance * 1.000002f + std::numeric_limits<float>::min() + std::abs(largest) * 1e-6f));
    float buffer[kChunk];
    int n = 0;
    for (int c = 0; c < x.chunks(); c++) {
        if (!at_least(load(s.maxima + c * kGroups), least)) continue;
        const float* const p = x.chunk(c, buffer);
        for (int i = 0; i < kChunk; i += kLanes) {
            const Floats here = load(p + i);
            const uint32_t lanes = at_least(here, least);
            pack(add(lane_numbers(), splat_int(uint32_t(c * kChunk + i))), lanes, s.ids + n);
            n += pack(sub(splat(largest), here), lanes, s.distances + n);
        }
    }
    n = std::min(n, x.n);  // with all of them came what fills up the last chunk
    std::fill(s.distances + n, s.distances + chunks_of(n) * kChunk, kInfinity);
    return n;
}

// How far below the largest a token may lie that truncation keeps, unscaled; generous. `total` is of all exponentials.
float reach_of_truncation(const SampleRow& row, const Logits& x, double total, const Scratch& s) {
    if (row.top_k > 0) return reach_of_groups(x, row.largest, row.top_k, s);
    float distance = row.min_p > 0 ? -std::log(row.min_p) : kInfinity;
    // All tokens together that have less than this weight do not hold what top-p leaves out.
    if (row.top_p < 1) distance = std::min(distance, -float(std::log(0.5 * (1 - double(row.top_p)) * total / x.n)));
    return distance * row.temperature;
}

// The threshold as a distance, of `n` candidates with distances and weights; `total` as above, used without top-k.
float threshold(const SampleRow& row, int n, double total, const Scratch& s) {
    const int padded = chunks_of(n) * kChunk;
    const float within_k = row.top_k > 0 ? reach_of_count(s.distances, padded, row.top_k) : kInfinity;
    float within_p = kInfinity;
    if (row.top_p < 1) {
        const auto all_of_k = [&] {
            double mass = 0;
            for (int i = 0; i < n; i++) mass += s.distances[i] <= within_k ? double(s.weights[i]) : 0;
            return mass;
        };
        within_p = reach_of_mass({s.distances, s.weights, padded}, double(row.top_p) * (row.top_k > 0 ? all_of_k() : total));
    }
    return std::min({within_k, within_p, row.min_p > 0 ? -std::log(row.min_p) : kInfinity});
}

// Gathers the tokens within a distance, unscaled, with scaled distances and weights. Returns how many there are.
int weigh_candidates(const SampleRow& row, const Logits& x, float distance, const Scratch& s) {
    const int n = gather(x, row.largest, distance, s);
    for (int i = 0; i < chunks_of(n) * kChunk; i += kLanes) {
        const Floats scaled = div(load(s.distances + i), splat(row.temperature));
        store(s.distances + i, scaled);
        store(s.weights + i, weight(scaled));
    }
    return n;
}

int draw_candidate(const SampleRow& row, int n, float within, const Scratch& s) {
    for (int i = 0; i < chunks_of(n) * kChunk; i += kLanes)
        store(s.weights + i, zero_below(load(s.weights + i), splat(within), load(s.distances + i)));
    const StoredWeights weights{s.weights, n};
    const double total = sum_chunks(weights, s.sums);
    return s.ids[invert(weights, s.sums, total, row.uniform)];
}

int draw_truncated(const SampleRow& row, const Logits& x, const Scratch& s) {
    const bool needs_total = row.top_p < 1 && row.top_k <= 0;
    const double total = needs_total ? sum_chunks(RowWeights{x, row.largest, row.temperature}, s.sums) : 0;
    const float most = reach_of_truncation(row, x, total, s);
    // What suffices for top-p in any case is far more than what mostly does.
    for (const int count : {128, 1024, 3000, x.n + kChunk}) {
        const float distance = needs_total ? std::min(most, reach_of_groups(x, row.largest, count, s)) : most;
        const int n = weigh_candidates(row, x, distance, s);
        const float within = threshold(row, n, total, s);
        if (within <= distance / row.temperature || distance == most) return draw_candidate(row, n, within, s);
    }
    __builtin_unreachable();
}

int draw(const SampleRow& row, const Logits& x, const Scratch& s) {
    if (row.top_k > 0 || row.top_p < 1 || row.min_p > 0) return draw_truncated(row, x, s);
    const RowWeights weights{x, row.largest, row.temperature};
    const double total = sum_chunks(weights, s.sums);
    return invert(weights, s.sums, total, row.uniform);
}

// Of the token, and of the most likely ones, the lower id first where they tie.
void tell_logprobs(SampleRow& row, const Logits& x, const Scratch& s, int32_t* top_tokens, float* top_logprobs) {
    const double total = std::log(sum_chunks(RowWeights{x, row.largest, 1.0f}, s.sums));
    const auto logprob = [&](int token) { return float(double(x.values[token]) - double(row.largest) - total); };
    row.logprob = logprob(row.token);
    const int count = std::min(row.top, x.n);
    if (count <= 0) return;
    const int n = gather(x, row.largest, reach_of_groups(x, row.largest, count, s), s);
    std::partial_sort(s.ids, s.ids + count, s.ids + n, [&](int a, int b) {
        return x.values[a] != x.values[b] ? x.values[a] > x.values[b] : a < b;
    });
    std::copy_n(s.ids, count, top_tokens);
    std::transform(s.ids, s.ids + count, top_logprobs, logprob);
}

void choose(SampleRow& row, int vocab, const Scratch& s, int32_t* top_tokens, float* top_logprobs) {
    const Logits x{row.logits, vocab};
    row.largest = find_maxima(x, s.maxima);
    row.token = find_largest(x, s.maxima, row.largest);
    if (!std::isfinite(row.largest)) return;
    if (row.temperature > 0) row.token = draw(row, x, s);
    if (row.top >= 0) tell_logprobs(row, x, s, top_tokens, top_logprobs);
}

}  // namespace
}  // namespace tokenmill

#pragma GCC visibility push(default)
extern "C" {

size_t tm_sample_workspace_bytes(int vocab, int threads) {
    tokenmill::Arena arena{nullptr};
    for (int i = 0; i < threads; i++) tokenmill::Scratch(arena, vocab);
    return arena.used;
}

// `top_tokens` and `top_logprobs` are [count, top_stride]; `workspace` as large as tm_sample_workspace_bytes says.
void tm_sample(tokenmill::SampleRow* rows, int count, int vocab, int top_stride, int32_t* top_tokens, float* top_logprobs,
               int threads, void* workspace) {
    using namespace tokenmill;
    const size_t bytes = tm_sample_workspace_bytes(vocab, 1);
    Team team(threads);
    team.each(count, [&](int i, int worker) {
        Arena arena{(char*)workspace + worker * bytes};
        choose(rows[i], vocab, Scratch(arena, vocab), top_tokens + int64_t(i) * top_stride, top_logprobs + int64_t(i) * top_stride);
    });
}

}  // extern "C"
#pragma GCC visibility pop
