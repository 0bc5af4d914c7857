// Causal attention over paged K and V for decodes, prefill chunks and any mix of them.
//
// An item is a stretch of a sequence's queries against a stretch of its keys, for one KV head: the query heads that share it are
// further rows. Keys pass in tiles of six blocks under an online softmax (Milakov and Gimelshein, 2018; tiled as in
// FlashAttention-2, Dao, 2023). A tile's V is fetched ahead while Q K^T runs, and K of the next tile or of the next item while P V
// runs: blocks lie anywhere, and the hardware does not guess them. A decode's long context is split and merged after (Dao et al.,
// Flash-Decoding, 2023), by its length alone: a sequence's numbers are the same to the last bit whatever else is in the batch.
#include <algorithm>
#include <cmath>

#include "attention_tiles.h"

namespace tokenmill {
namespace {

constexpr int kRegisterRows = 6;   // rows of a register tile
constexpr int kAloneRows = kAccumulators < 8 ? kRegisterRows : 8;  // of one when these are all that there are
constexpr int kSplitKeys = 256;    // about as many keys a split
constexpr float kLowest = -1e30f;  // finite, so that differences of it are numbers

struct Head {
    const Model& m;
    const Layer& layer;
    const Batch& b;
    const AttentionItem& item;
    int kv_head, group;

    size_t block_at(int index) const {
        const int block = b.block_tables[int64_t(item.sequence) * b.table_width + index];
        return (size_t(block) * m.kv_heads + kv_head) * kv_head_bytes(m.kv_kind, m.head_dim);
    }
    // Block number `c` of the item's keys, or the last one.
    const uint8_t* keys_at(int c) const {
        return layer.k_cache + block_at(std::min(item.begin_key / kBlock + c, (item.end_key - 1) / kBlock));
    }
};

// Hides what a row's query must not see: later positions and those that its window has left behind. Returns the largest score that
// is left, or `top` where that is larger.
TM_INLINE float mask_row(const Model& m, const Layer& layer, const KeyTile& t, int position, float* scores, float top) {
    const Floats hidden = splat(-INFINITY);
    const int begin = layer.window ? position - layer.window + 1 : 0;
    const bool sees_all = t.first >= begin && t.first + t.blocks * kBlock <= position + 1;
    Floats most = splat(top);
    for (int c = 0; c < t.blocks; c++) {
        Floats x = load(scores + c * kBlock);
        const int first = t.first + c * kBlock;
        if (!sees_all) {
            const Floats all = x;
            x = keep_between(all, first, begin, position + 1, hidden);
            if (first < begin) x = max(x, keep_between(all, first, 0, std::min(m.sinks, begin), hidden));
            store(scores + c * kBlock, x);
        }
        most = max(x, most);
    }
    return largest(most);
}

// 2^(scale * (score - top)) of a row, as `values` takes it; returns the sum of each lane.
template <typename Cache>
TM_INLINE Floats soften_row(const KeyTile& t, Scratch& s, int r, float scale, float top) {
    float* const scores = s.scores + r * kTileKeys;
    const Floats shift = splat(-scale * top);
    Floats sums = zeros();
    for (int c = 0; c < t.blocks; c++) {
        const Floats x = exp2(fma(load(scores + c * kBlock), splat(scale), shift));
        sums = add(sums, x);
        Cache::put_probability(s, r, c, x);
    }
    Cache::finish_probabilities(t, s, r);
    return sums;
}

float score_scale(const Model& m) { return m.attention_scale * kLog2e; }

// The online softmax, in powers of 2, between the two products of a tile of keys.
template <typename Cache>
struct RowTiles {
    const Head& head;
    const KeyTile& t;
    Scratch& s;

    template <int R>
    void run(int row) const {
        const int head_dim = head.m.head_dim;
        const float scale = score_scale(head.m);
        float alpha[kLanes] = {};  // what scales the sums so far
        all_scores<Cache, R>(t, s, row, head_dim);
        for (int r = 0; r < R; r++) {
            float& top = s.top[row + r];
            const float before = top;
            top = mask_row(head.m, head.layer, t, s.position[row + r], s.scores + r * kTileKeys, before);
            alpha[r] = scale * (before - top);
        }
        store(alpha, exp2(load(alpha)));
        for (int r = 0; r < R; r++) {
            float* const totals = s.totals + (row + r) * kLanes;
            store(totals, fma(load(totals), splat(alpha[r]), soften_row<Cache>(t, s, r, scale, s.top[row + r])));
        }
        all_values<Cache, R>(t, s, row, head_dim, alpha);
    }
};

template <typename Cache>
void gather_queries(const Head& h, const bf16* q, Scratch& s) {
    const int head_dim = h.m.head_dim;
    for (int token = 0, row = 0; token < h.item.tokens; token++)
        for (int head = 0; head < h.group; head++, row++) {
            const int64_t from = (int64_t(h.item.first_token + token) * h.m.heads + h.kv_head * h.group + head) * head_dim;
            copy_factors(q + from, head_dim, s.q + row * head_dim);
            std::memset(s.out + row * head_dim, 0, head_dim * sizeof(float));
            s.top[row] = kLowest;
            store(s.totals + row * kLanes, zeros());
            Cache::prepare_query(s, row, head_dim);
            s.position[row] = h.b.positions[h.item.first_token + token];
        }
}

void point_at_blocks(const Head& h, const Head& next_head, int first_block, int end_block, KeyTile& t) {
    for (int c = 0; c < t.blocks; c++) {
        const int next = first_block + t.blocks + c;
        t.k[c] = h.layer.k_cache + h.block_at(first_block + c);
        t.v[c] = h.layer.v_cache + h.block_at(first_block + c);
        t.next_k[c] = next < end_block ? h.layer.k_cache + h.block_at(next) : next_head.keys_at(next - end_block);
        // Where int8 has them; bfloat16 does not look.
        t.k_scales[c] = (const float*)(t.k[c] + size_t(kBlock) * h.m.head_dim);
        t.v_scales[c] = (const float*)(t.v[c] + size_t(kBlock) * h.m.head_dim);
    }
}

template <typename Cache>
void visit_keys(const Head& h, const Head& next, int begin_key, int end_key, int rows, Scratch& s) {
    const int end_block = (end_key + kBlock - 1) / kBlock;
    int blocks;
    for (int block = begin_key / kBlock; block < end_block; block += blocks) {
        blocks = end_block - block < kTileBlocks ? end_block - block : kTileBlocks;
        KeyTile t;
        t.blocks = blocks;
        t.first = block * kBlock;
        t.end = end_key;
        point_at_blocks(h, next, block, end_block, t);
        const RowTiles<Cache> tiles{h, t, s};
        if (rows <= kAloneRows)
            run_tile<kAloneRows>(tiles, rows, 0);
        else
            for_row_tiles<kRegisterRows>(tiles, 0, rows);
    }
}

void finish_rows(const Head& h, const Partials& partials, bf16* out, Scratch& s) {
    const int head_dim = h.m.head_dim;
    for (int token = 0, row = 0; token < h.item.tokens; token++)
        for (int g = 0; g < h.group; g++, row++) {
            const float total = sum(load(s.totals + row * kLanes));
            const Floats inverse = splat(1 / total);
            const int head = h.kv_head * h.group + g;
            const float* from = s.out + row * head_dim;
            if (h.item.splits == 1) {
                bf16* to = out + (int64_t(h.item.first_token + token) * h.m.heads + head) * head_dim;
                for (int d = 0; d < head_dim; d += kLanes) store_bf16(to + d, mul(load(from + d), inverse));
            } else {
                const int64_t at = int64_t(h.item.split + token) * h.m.heads + head;
                for (int d = 0; d < head_dim; d += kLanes) store(partials.values + at * head_dim + d, mul(load(from + d), inverse));
                partials.weights[at] = score_scale(h.m) * s.top[row] + std::log2(total);
            }
        }
}

template <typename Cache>
void attend(const Head& h, const Head& next, const bf16* q, Scratch& s) {
    const int rows = h.item.tokens * h.group;
    gather_queries<Cache>(h, q, s);
    // With a window the first keys are visited for the sinks, then those in reach of the first query.
    const int window_begin = h.layer.window ? h.b.positions[h.item.first_token] - h.layer.window + 1 : 0;
    const int begin = window_begin > h.item.begin_key ? window_begin / kBlock * kBlock : h.item.begin_key;
    const int sinks = h.item.begin_key == 0 && begin > 0 ? (h.m.sinks < begin ? h.m.sinks : begin) : 0;
    if (sinks) visit_keys<Cache>(h, next, 0, (sinks + kBlock - 1) / kBlock * kBlock, rows, s);
    if (begin < h.item.end_key) visit_keys<Cache>(h, next, begin, h.item.end_key, rows, s);
}

}  // namespace

size_t attention_scratch_bytes(int threads) { return sizeof(Scratch) * threads; }

int attention_splits(int keys) { return keys < 2 * kSplitKeys ? 1 : keys / kSplitKeys; }

int attention_items(const Model& m, const Batch& b, bool split, AttentionItem* items) {
    const int tile = kMaxRows / (m.heads / m.kv_heads);
    int count = 0, partial_rows = 0;
    for (int s = 0; s < b.sequences; s++) {
        for (int token = b.query_starts[s]; token < b.query_starts[s + 1]; token += tile) {
            const int left = b.query_starts[s + 1] - token;
            const int tokens = left < tile ? left : tile;
            const int keys = b.positions[token + tokens - 1] + 1, blocks = (keys + kBlock - 1) / kBlock;
            const int splits = split && left == 1 && token == b.query_starts[s] ? attention_splits(keys) : 1;
            for (int i = 0; i < splits; i++) {
                const int end = i + 1 < splits ? blocks * (i + 1) / splits * kBlock : keys;
                items[count++] = {s, token, tokens, blocks * i / splits * kBlock, end, partial_rows + i, splits};
            }
            if (splits > 1) partial_rows += splits;
        }
    }
    return count;
}

void attention(Team& team, const Model& m, const Layer& layer, const Batch& b, const bf16* q, const AttentionItem* items,
               int num_items, const Partials& partials, void* scratch, bf16* out) {
    const int tasks = num_items * m.kv_heads, group = m.heads / m.kv_heads;
    const auto attend_head = [=, &m, &layer](int task, int worker, const Gate& gate) {
        const auto head_of = [&](int number) { return Head{m, layer, b, items[number / m.kv_heads], number % m.kv_heads, group}; };
        Scratch& mine = ((Scratch*)scratch)[worker];
        const Head head = head_of(task), next = head_of(std::min(task + 1, tasks - 1));
        if (m.kv_kind == kKvInt8)
            attend<Int8Cache>(head, next, q, mine);
        else
            attend<Bf16Cache>(head, next, q, mine);
        if (gate.pass()) finish_rows(head, partials, out, mine);
    };
    // Prompts' items take too unequal times to tell a long one from a thread that is stopped.
    if (b.tokens == b.sequences)
        team.each_restartable(tasks, attend_head);
    else
        team.each(tasks, [attend_head](int task, int worker) { attend_head(task, worker, Gate()); });
}

void merge_partials(Team& team, const Model& m, const AttentionItem* items, int num_items, const Partials& partials, bf16* out) {
    team.each(num_items * m.heads, [=, &m](int task, int) {
        const AttentionItem& item = items[task / m.heads];
        const int head = task % m.heads;
        // The first item of its splits merges them.
        if (item.splits == 1 || item.begin_key != 0) return;
        const float* weights = partials.weights + int64_t(item.split) * m.heads + head;
        float top = kLowest, total = 0;
        for (int i = 0; i < item.splits; i++) top = std::fmax(top, weights[i * m.heads]);
        for (int i = 0; i < item.splits; i++) total += std::exp2(weights[i * m.heads] - top);
        for (int d = 0; d < m.head_dim; d += kLanes) {
            Floats merged = zeros();
            for (int i = 0; i < item.splits; i++) {
                const float* from = partials.values + (int64_t(item.split + i) * m.heads + head) * m.head_dim + d;
                merged = fma(load(from), splat(std::exp2(weights[i * m.heads] - top) / total), merged);
            }
            store_bf16(out + (int64_t(item.first_token) * m.heads + head) * m.head_dim + d, merged);
        }
    });
}

}  // namespace tokenmill
