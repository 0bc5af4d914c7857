// Decode steps one after another without coming back to Python: what a step samples is what the next one computes.
#include <algorithm>
#include <chrono>
#include <cmath>

#include "kernels.h"

namespace tokenmill {

// As cpu/library.py has it, field by field. S is the number of sequences.
struct Decodes {
    int32_t most;       // steps
    int32_t unused;
    SampleRow* rows;    // [most, S], what is asked for in each step
    int32_t* columns;   // [3 + groups, S], where the later steps' tokens, positions, contexts and slots are put
    const int32_t* end_starts;  // [S + 1]; tokens that end sequence s are ends[end_starts[s]] to, not with, ends[end_starts[s + 1]]
    const int32_t* ends;
    const int64_t* questions;  // two counts that another thread adds to and this one; where they differ no further step begins
    double forward_s, sample_s;  // filled in, of all steps
};

namespace {

using Clock = std::chrono::steady_clock;
double seconds(Clock::time_point from, Clock::time_point to) { return std::chrono::duration<double>(to - from).count(); }

// The batch of the step that follows `b`, whose arrays are put into `columns`; `rows` are those of `b`.
Batch following(Batch b, const SampleRow* rows, int32_t* columns) {
    const int count = b.sequences;
    int32_t *const tokens = columns, *const positions = tokens + count, *const contexts = positions + count, *const slots = contexts + count;
    for (int s = 0; s < count; s++) {
        tokens[s] = rows[s].token;
        positions[s] = b.context_lens[s];
        contexts[s] = b.context_lens[s] + 1;
    }
    for (int64_t i = 0; i < int64_t(b.groups) * count; i++) {
        const int position = positions[i % count];
        slots[i] = b.block_tables[i * b.table_width + position / kBlock] * kBlock + position % kBlock;
    }
    b.token_ids = tokens;
    b.positions = positions;
    b.context_lens = contexts;
    b.slots = slots;
    return b;
}

// Whether a sequence of a step has ended, or cannot be sampled.
bool any_over(const Decodes& d, const SampleRow* rows, int count) {
    for (int s = 0; s < count; s++) {
        const int32_t *const begin = d.ends + d.end_starts[s], *const end = d.ends + d.end_starts[s + 1];
        if (!std::isfinite(rows[s].largest) || std::find(begin, end, rows[s].token) != end) return true;
    }
    return false;
}

bool is_asked(const int64_t* questions) {
    return __atomic_load_n(questions, __ATOMIC_RELAXED) != __atomic_load_n(questions + 1, __ATOMIC_RELAXED);
}

}  // namespace

int decode(const Model& m, Batch b, Decodes& d, void* workspace, float* logits, void* sample_workspace) {
    for (int taken = 1;; taken++) {
        SampleRow* const rows = d.rows + int64_t(taken - 1) * b.sequences;
        const auto started = Clock::now();
        step(m, b, workspace, logits);
        const auto computed = Clock::now();
        sample(rows, b.sequences, m.vocab, 0, nullptr, nullptr, m.threads, sample_workspace);
        d.forward_s += seconds(started, computed);
        d.sample_s += seconds(computed, Clock::now());
        if (taken == d.most || any_over(d, rows, b.sequences) || is_asked(d.questions)) return taken;
        b = following(b, rows, d.columns);
    }
}

}  // namespace tokenmill

#pragma GCC visibility push(default)
extern "C" {

// A batch of decodes that all sample, which tm_check passes for `most - 1` steps ahead; memory as for the last of them. Returns how many
// steps were taken: at the last one a sequence has ended or cannot be sampled, or a question was asked, unless it is the `most`.
int tm_decode(const tokenmill::Model* m, const tokenmill::Batch* b, tokenmill::Decodes* d, void* workspace, float* logits,
              void* sample_workspace) {
    return tokenmill::decode(*m, *b, *d, workspace, logits, sample_workspace);
}

}  // extern "C"
#pragma GCC visibility pop
