// What the kernels and the step share: the records that Python fills in (cpu/library.py repeats them field by field) and the
// kernels.
//
// A function that takes a Team gives it one job, to be done when the team runs; the others are for one thread. References of a job are
// to what outlives the step's run, anything else it has by value.
// Nothing here allocates or checks: tm_step has checked the batch, and Python the shapes.
#pragma once

#include <cstddef>
#include <cstdint>

#include "pool.h"
#include "vec.h"

namespace tokenmill {

constexpr int kBlock = 16;        // positions in a KV block: as many as lanes
constexpr int kVectors = kRegisters < 32 ? 1 : 3;  // of 16 columns, in a weight panel: what tiles of several rows have registers for
constexpr int kPanel = kVectors * kLanes;
constexpr int kGroup = 64;        // activations that share a scale when they are int8
constexpr int kInt4Group = 32;    // weights of a column that share a scale and a minimum when they are int4
constexpr int kMaxHeadDim = 256;  // of stack buffers
constexpr float kLog2e = 1.44269504f;
constexpr int kLine = 64;  // bytes of a cache line

enum MatrixKind : int32_t { kBf16 = 0, kInt8 = 1, kInt4 = 2 };
enum KvKind : int32_t { kKvBf16 = 0, kKvInt8 = 1 };

// A weight [columns, depth] in panels of N = kPanel columns, zeros beyond the last: bf16 [panel][depth / 2][N][2], or int8 + 128 as
// unsigned bytes [panel][depth / 4][N][4]. `scales` (int8) and `bias` (or null) have one float a column, padded to whole panels.
// int4 is [panel][depth / 32] of Int4Group, a weight being its column's scale * code + minimum.
struct Matrix {
    const void* data;
    const float* scales;
    const float* bias;
    int32_t columns;
    int32_t depth;
    int32_t kind;
    int32_t unused;
};

struct Int4Group {
    uint16_t scales[kPanel], minima[kPanel];  // half precision
    uint32_t codes[4][kPanel];                // depths 4 k to 4 k + 3 in the low halves of row k's bytes, those 16 deeper in the high ones
};

struct Layer {
    Matrix qkv, o, gate_up, down;  // the columns of gate and up alternate
    const float* input_norm;
    const float* post_norm;
    const float* q_norm;  // or null, with k_norm
    const float* k_norm;
    uint8_t* k_cache;
    uint8_t* v_cache;
    int32_t window;  // positions a query sees, its own among them; 0 is all
    int32_t group;   // of blocks: whose slots and block tables it has
};

// q and k heads are head_dim wide. cos and sin are [max_positions, head_dim / 2].
struct Model {
    int32_t hidden, intermediate, vocab, num_layers;
    int32_t heads, kv_heads, head_dim, max_positions;
    int32_t num_blocks, kv_kind, sinks, threads;  // sinks: first positions that every window sees too
    float norm_eps, attention_scale;
    const bf16* embeddings;  // [vocab, hidden], or null: the head's own weights, bf16 or int8
    const float* cos;
    const float* sin;
    const float* final_norm;
    const Layer* layers;
    Matrix head;
};

// As runner.Batch; `rows` are the samples' rows among the tokens, in order. Slots and block tables are those of `groups` groups, one
// after the other; the kernels see those of one.
struct Batch {
    int32_t tokens, sequences, table_width, samples, groups, unused;
    const int32_t* token_ids;
    const int32_t* positions;
    const int32_t* slots;
    const int32_t* query_starts;
    const int32_t* context_lens;
    const int32_t* block_tables;
    const int32_t* rows;
};

// A row of logits to choose a token from, as cpu/library.py has it, field by field. Temperature 0 is greedy; top_k 0, top_p 1 and min_p 0
// are off; `top` counts the most likely tokens whose log probabilities are asked for, -1 asks for none at all, the token's own neither.
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

// Rows that a matrix is multiplied with: bfloat16, and what `prepare_row` makes of them for one matrix's kind, the factors of
// factors.h. For integer weights these are int8 with a scale for each group of 64; `sums` are those of each half of a group, which
// undo the int8 weights' + 128 and carry the int4 weights' minima.
struct Activations {
    bf16* values;
    void* factors;
    float* scales;
    int32_t* sums;
};

// What becomes of a product: float rows, float rows added to, or silu of even columns times odd ones as bfloat16.
enum class Store { kFloats, kAdd, kSiluMul };
struct Output {
    Store store;
    float* floats;
    bf16* halves;
    int64_t stride;
};

// Bytes of K, and as many of V, of one block and one KV head: the values, and in int8 a float scale for each position.
static inline size_t kv_head_bytes(int kv_kind, int head_dim) {
    return kv_kind == kKvInt8 ? size_t(kBlock) * head_dim + kBlock * sizeof(float) : size_t(kBlock) * head_dim * sizeof(bf16);
}

// A stretch of one sequence's queries against a stretch of its keys. With more than one split, `split` numbers the partial results.
struct AttentionItem {
    int32_t sequence, first_token, tokens, begin_key, end_key, split, splits;
};
struct Partials {
    float* values;   // [split][heads][head_dim], normalised
    float* weights;  // [split][heads]: log2 of the sum of exponentials
};

void gemm(Team& team, const Matrix& weight, const Activations& in, int rows, const Output& out);
void prepare_row(const Matrix& next, int row, const Activations& both);
void prepare_rows(Team& team, const Matrix& next, int rows, const Activations& both);
size_t factor_bytes(int64_t activations);  // for weights of any kind

void embed(Team& team, const Model& m, const Batch& b, float* hidden);
void norm_rows(Team& team, const Model& m, const float* from, int rows, const float* weight, const Matrix& next,
               const Activations& to);
void rotate_and_cache(Team& team, const Model& m, const Layer& layer, const Batch& b, float* qkv, bf16* q);

// The items of a step, for layers that split decodes or not; returns how many.
int attention_items(const Model& m, const Batch& b, bool split, AttentionItem* items);
int attention_splits(int keys);  // of a decode; not fewer for more keys
void attention(Team& team, const Model& m, const Layer& layer, const Batch& b, const bf16* q, const AttentionItem* items,
               int num_items, const Partials& partials, void* scratch, bf16* out);
size_t attention_scratch_bytes(int threads);
void merge_partials(Team& team, const Model& m, const AttentionItem* items, int num_items, const Partials& partials, bf16* out);

size_t step_bytes(const Model& m, const Batch& b, int ahead);  // of workspace, for contexts that are so much longer
void step(const Model& m, const Batch& b, void* workspace, float* logits);
const char* check(const Model& m, const Batch& b, int ahead);  // null, or what is wrong, then or so many steps later

size_t sample_bytes(int vocab, int threads);
void sample(SampleRow* rows, int count, int vocab, int top_stride, int32_t* top_tokens, float* top_logprobs, int threads, void* workspace);

}  // namespace tokenmill
