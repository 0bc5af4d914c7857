// One forward step of a Llama-family decoder as one call: the C interface that cpu/library.py binds.
#include <algorithm>
#include <functional>

#include "arena.h"
#include "kernels.h"

namespace tokenmill {
namespace {

// The arrays of a step, laid out in the caller's memory.
struct Workspace {
    float* hidden;
    float* qkv;
    bf16* q;
    Activations normed;     // [tokens, hidden]
    Activations attended;   // [tokens, heads * head_dim]
    Activations activated;  // [tokens, intermediate]
    AttentionItem* items;  // twice as many as there can be
    int64_t most_items;
    Partials partials;
    void* scratch;  // of attention
    size_t bytes;
};

Activations take_activations(Arena& arena, int64_t rows, int64_t depth) {
    return {arena.take<bf16>(rows * depth), arena.take<char>(int64_t(factor_bytes(rows * depth))), arena.take<float>(rows * depth / kGroup),
            arena.take<int32_t>(rows * depth / kInt4Group)};
}

// Partial results of decodes' splits, when contexts are so much longer; an item is one of these or at least one token.
int64_t most_partials(const Batch& b, int ahead = 0) {
    int64_t count = 0;
    for (int s = 0; s < b.sequences; s++) count += attention_splits(b.context_lens[s] + ahead);
    return count;
}

Workspace lay_out(const Model& m, const Batch& b, void* memory, int ahead = 0) {
    Arena arena{(char*)memory};
    const int64_t tokens = b.tokens, q_width = int64_t(m.heads) * m.head_dim;
    const int64_t partials = most_partials(b, ahead);
    Workspace w;
    w.hidden = arena.take<float>(tokens * m.hidden);
    w.qkv = arena.take<float>(tokens * (q_width + 2 * int64_t(m.kv_heads) * m.head_dim));
    w.q = arena.take<bf16>(tokens * q_width);
    w.normed = take_activations(arena, tokens, m.hidden);
    w.attended = take_activations(arena, tokens, q_width);
    w.activated = take_activations(arena, tokens, m.intermediate);
    w.most_items = tokens + partials;
    w.items = arena.take<AttentionItem>(2 * w.most_items);
    w.partials = {arena.take<float>(partials * q_width), arena.take<float>(partials * m.heads)};
    w.scratch = arena.take<char>(int64_t(attention_scratch_bytes(m.threads)));
    w.bytes = arena.used;
    return w;
}

struct Items {
    const AttentionItem* list;
    int count;
    bool split;  // any of them
};

Items make_items(const Model& m, const Batch& b, bool split, AttentionItem* list) {
    const int count = attention_items(m, b, split, list);
    return {list, count, std::any_of(list, list + count, [](const AttentionItem& item) { return item.splits > 1; })};
}

Batch of_group(Batch b, int64_t group) {
    b.slots += group * b.tokens;
    b.block_tables += group * b.sequences * b.table_width;
    return b;
}

// The first half of a layer, up to what its attention gives.
void attend(Team& team, const Model& m, const Layer& layer, const Batch& whole, const Workspace& w, const Items& items) {
    const Batch b = of_group(whole, layer.group);
    const int64_t q_width = int64_t(m.heads) * m.head_dim;
    norm_rows(team, m, w.hidden, b.tokens, layer.input_norm, layer.qkv, w.normed);
    gemm(team, layer.qkv, w.normed, b.tokens, {Store::kFloats, w.qkv, nullptr, q_width + 2 * int64_t(m.kv_heads) * m.head_dim});
    rotate_and_cache(team, m, layer, b, w.qkv, w.q);
    attention(team, m, layer, b, w.q, items.list, items.count, w.partials, w.scratch, w.attended.values);
    if (items.split) merge_partials(team, m, items.list, items.count, w.partials, w.attended.values);
}

// The second half, of the first `rows` rows.
void finish(Team& team, const Model& m, const Layer& layer, int rows, const Workspace& w) {
    prepare_rows(team, layer.o, rows, w.attended);
    gemm(team, layer.o, w.attended, rows, {Store::kAdd, w.hidden, nullptr, m.hidden});
    norm_rows(team, m, w.hidden, rows, layer.post_norm, layer.gate_up, w.normed);
    gemm(team, layer.gate_up, w.normed, rows, {Store::kSiluMul, nullptr, w.activated.values, m.intermediate});
    prepare_rows(team, layer.down, rows, w.activated);
    gemm(team, layer.down, w.activated, rows, {Store::kAdd, w.hidden, nullptr, m.hidden});
}

// After the last attention nobody looks at the rows that do not sample any more: the others move to the front.
void keep_samples(Team& team, const Model& m, const Batch& b, const Workspace& w) {
    team.each(1, [&m, &b, &w](int, int) {
        const int64_t q_width = int64_t(m.heads) * m.head_dim;
        for (int64_t i = 0; i < b.samples; i++) {
            const int64_t row = b.rows[i];
            if (row == i) continue;
            std::copy_n(w.hidden + row * m.hidden, m.hidden, w.hidden + i * m.hidden);
            std::copy_n(w.attended.values + row * q_width, q_width, w.attended.values + i * q_width);
        }
    });
}

bool all_between(const int32_t* x, int64_t n, int begin, int end) {
    return std::all_of(x, x + n, [=](int32_t i) { return i >= begin && i < end; });
}

}  // namespace

// Whether every index that a kernel follows stays inside its array.
const char* check(const Model& m, const Batch& b, int ahead) {
    if (b.tokens <= 0 || b.sequences <= 0) return "a batch needs at least one token of one sequence";
    if (!all_between(b.token_ids, b.tokens, 0, m.vocab)) return "a token id lies outside the vocabulary";
    if (!all_between(b.positions, b.tokens, 0, m.max_positions - ahead)) return "a position lies beyond the model's longest context";
    for (int i = 0; i < m.num_layers; i++)
        if (m.layers[i].group >= b.groups) return "the batch lacks a group of blocks";
    if (!all_between(b.slots, int64_t(b.groups) * b.tokens, 0, m.num_blocks * kBlock)) return "a slot lies outside the KV cache";
    if (!all_between(b.block_tables, int64_t(b.groups) * b.sequences * b.table_width, 0, m.num_blocks))
        return "a block table names a block outside the KV cache";
    if (b.query_starts[0] != 0 || b.query_starts[b.sequences] != b.tokens) return "query_starts do not cover the tokens";
    for (int s = 0; s < b.sequences; s++) {
        const int begin = b.query_starts[s], end = b.query_starts[s + 1], context = b.context_lens[s];
        if (begin >= end) return "a sequence has no token in the batch";
        if (context + int64_t(ahead) > int64_t(b.table_width) * kBlock) return "a context is longer than its block table";
        for (int i = begin; i < end; i++)
            if (b.positions[i] != context - end + i) return "positions do not end with the context";
    }
    if (!all_between(b.rows, b.samples, 0, b.tokens)) return "a sample row lies outside the batch";
    if (std::adjacent_find(b.rows, b.rows + b.samples, std::greater_equal<>()) != b.rows + b.samples)
        return "sample rows do not ascend";
    return nullptr;
}

size_t step_bytes(const Model& m, const Batch& b, int ahead) { return lay_out(m, b, nullptr, ahead).bytes; }

void step(const Model& m, const Batch& b, void* workspace, float* logits) {
    const Workspace w = lay_out(m, b, workspace);
    const Guarded guarded{workspace, w.bytes};
    // Layers with a window see too few keys to split.
    const Items whole = make_items(m, b, true, w.items), windowed = make_items(m, b, false, w.items + w.most_items);
    Team team(m.threads);
    embed(team, m, b, w.hidden);
    for (int i = 0; i < m.num_layers; i++) {
        const bool last = i == m.num_layers - 1;
        attend(team, m, m.layers[i], b, w, m.layers[i].window ? windowed : whole);
        if (last) keep_samples(team, m, b, w);
        if (!last || b.samples) finish(team, m, m.layers[i], last ? b.samples : b.tokens, w);
    }
    if (b.samples) {
        norm_rows(team, m, w.hidden, b.samples, m.final_norm, m.head, w.normed);
        gemm(team, m.head, w.normed, b.samples, {Store::kFloats, logits, nullptr, m.vocab});
    }
    team.run();
}

}  // namespace tokenmill

// Only these names leave the library.
#pragma GCC visibility push(default)
extern "C" {

// For steps up to `ahead` behind the batch's.
const char* tm_check(const tokenmill::Model* m, const tokenmill::Batch* b, int ahead) { return tokenmill::check(*m, *b, ahead); }

size_t tm_workspace_bytes(const tokenmill::Model* m, const tokenmill::Batch* b, int ahead) { return tokenmill::step_bytes(*m, *b, ahead); }

// Columns of a weight panel: Python packs it.
int tm_panel_columns() { return tokenmill::kPanel; }

size_t tm_kv_head_bytes(int kv_kind, int head_dim) { return tokenmill::kv_head_bytes(kv_kind, head_dim); }

// A batch that tm_check passes; `workspace` as large as tm_workspace_bytes says; logits [samples, vocab].
void tm_step(const tokenmill::Model* m, const tokenmill::Batch* b, void* workspace, float* logits) {
    tokenmill::step(*m, *b, workspace, logits);
}

// One matrix product by itself, for the tests.
void tm_gemm(const tokenmill::Matrix* weight, const uint16_t* in, int rows, int store, float* floats, uint16_t* halves, int threads,
             void* workspace) {
    using namespace tokenmill;
    Arena arena{(char*)workspace};
    const Activations a = take_activations(arena, rows, weight->depth);
    const Guarded guarded{workspace, arena.used};
    std::copy_n(in, int64_t(rows) * weight->depth, a.values);
    const int width = Store(store) == Store::kSiluMul ? weight->columns / 2 : weight->columns;
    Team team(threads);
    prepare_rows(team, *weight, rows, a);
    gemm(team, *weight, a, rows, {Store(store), floats, halves, width});
    team.run();
}

}  // extern "C"
#pragma GCC visibility pop
