// Chooses tokens from rows of logits, with the rules of sampling/draw.py, which is its reference: a token is kept if its scaled
// logit reaches a threshold, kept tokens are summed up in the order of their ids, and the sum is inverted by a uniform number.
//
// A row is read twice at most: once for its largest logits, once for the sum of exponentials. Nothing is sorted: the largest logit
// of every 16 says where the few candidates are, and their threshold is found by bisection. A row's token does not hang on other
// rows, on threads or on the instruction set.
#include <algorithm>
#include <cmath>

#include "arena.h"
#include "kernels.h"
#include "reach.h"
#include "weights.h"

namespace tokenmill {

namespace {

// A thread's own arrays. Candidates are the tokens that may be kept, in the order of their ids.
struct Scratch {
    float* maxima;     // of each group
    float* distances;  // of group maxima or candidates: how far below the largest, so never negative
    float* weights;    // exponentials of candidates
    int32_t* ids;      // of candidates
    double* sums;      // of the exponentials of each chunk

    Scratch(Arena& arena, int vocab)
        : maxima(arena.take<float>(chunks_of(vocab) * kGroups)),
          distances(arena.take<float>(chunks_of(vocab) * kChunk)),
          weights(arena.take<float>(chunks_of(vocab) * kChunk)),
          ids(arena.take<int32_t>(chunks_of(vocab) * kChunk)),
          sums(arena.take<double>(chunks_of(vocab))) {}
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
    for (const int count : {128, 1024, 3000}) {
        const float distance = needs_total ? reach_of_groups(x, row.largest, count, s) : kInfinity;
        if (distance >= most) break;
        const int n = weigh_candidates(row, x, distance, s);
        const float within = threshold(row, n, total, s);
        if (within <= distance / row.temperature) return draw_candidate(row, n, within, s);
    }
    const int n = weigh_candidates(row, x, most, s);
    return draw_candidate(row, n, threshold(row, n, total, s), s);
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

size_t sample_bytes(int vocab, int threads) {
    Arena arena{nullptr};
    for (int i = 0; i < threads; i++) Scratch(arena, vocab);
    return arena.used;
}

// `top_tokens` and `top_logprobs` are [count, top_stride].
void sample(SampleRow* rows, int count, int vocab, int top_stride, int32_t* top_tokens, float* top_logprobs, int threads, void* workspace) {
    const size_t bytes = sample_bytes(vocab, 1);
    const Guarded guarded{workspace, threads * bytes};
    Team team(threads);
    team.each(count, [=](int i, int worker) {
        Arena arena{(char*)workspace + worker * bytes};
        choose(rows[i], vocab, Scratch(arena, vocab), top_tokens + int64_t(i) * top_stride, top_logprobs + int64_t(i) * top_stride);
    });
    team.run();
}

}  // namespace tokenmill

#pragma GCC visibility push(default)
extern "C" {

size_t tm_sample_workspace_bytes(int vocab, int threads) { return tokenmill::sample_bytes(vocab, threads); }

// `workspace` as large as tm_sample_workspace_bytes says.
void tm_sample(tokenmill::SampleRow* rows, int count, int vocab, int top_stride, int32_t* top_tokens, float* top_logprobs,
               int threads, void* workspace) {
    tokenmill::sample(rows, count, vocab, top_stride, top_tokens, top_logprobs, threads, workspace);
}

}  // extern "C"
#pragma GCC visibility pop
