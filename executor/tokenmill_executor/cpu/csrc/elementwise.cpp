// The small operations of a layer: RMSNorm, rotary embedding and the write of K and V into their blocks.
#include <cmath>

#include "kernels.h"

namespace tokenmill {
namespace {

// 1 / sqrt(mean of squares + eps); Zhang and Sennrich, 2019.
TM_INLINE float inverse_rms(const float* x, int n, float eps) {
    Floats squares = zeros();
    int i = 0;
    for (; i + kLanes <= n; i += kLanes) squares = fma(load(x + i), load(x + i), squares);
    float total = sum(squares);
    for (; i < n; i++) total += x[i] * x[i];
    return 1 / std::sqrt(total / n + eps);
}

TM_INLINE bf16 round_one(float x) {
    float all[kLanes] = {x};
    bf16 halves[kLanes];
    store_bf16(halves, load(all));
    return halves[0];
}

void norm_row(const float* x, const float* weight, int n, float eps, bf16* to) {
    const float scale = inverse_rms(x, n, eps);
    int i = 0;
    for (; i + kLanes <= n; i += kLanes) store_bf16(to + i, mul(mul(load(x + i), splat(scale)), load(weight + i)));
    for (; i < n; i++) to[i] = round_one(x[i] * scale * weight[i]);
}

// In place: the optional norm of a head, then its rotation; halves as in GPT-NeoX (Su et al., 2021).
void norm_and_rotate(float* x, const Model& m, const float* weight, int position) {
    const int half = m.head_dim / 2;
    const float* cos = m.cos + int64_t(position) * half;
    const float* sin = m.sin + int64_t(position) * half;
    if (weight) {
        const float scale = inverse_rms(x, m.head_dim, m.norm_eps);
        for (int i = 0; i < m.head_dim; i++) x[i] *= scale * weight[i];
    }
    int i = 0;
    for (; i + kLanes <= half; i += kLanes) {
        const Floats a = load(x + i), b = load(x + half + i), c = load(cos + i), s = load(sin + i);
        store(x + i, sub(mul(a, c), mul(b, s)));
        store(x + half + i, fma(b, c, mul(a, s)));
    }
    for (; i < half; i++) {
        const float a = x[i], b = x[half + i];
        x[i] = a * cos[i] - b * sin[i];
        x[half + i] = b * cos[i] + a * sin[i];
    }
}

void round_head(const float* x, int n, bf16* to) {
    for (int i = 0; i < n; i += kLanes) store_bf16(to + i, load(x + i));
}

// K of one position and head into [head_dim / N][16 positions][N], N to a 32-bit lane.
template <int N, typename T>
TM_INLINE void scatter_k(const T* x, int head_dim, int offset, T* block) {
    for (int i = 0; i < head_dim; i += N) std::memcpy(block + i * kBlock + N * offset, x + i, sizeof(Pair));
}

// V into [16 positions / N][head_dim][N]. Another thread may be writing the lane's other positions: no wider store than an element.
template <int N, typename T>
TM_INLINE void scatter_v(const T* x, int head_dim, int offset, T* block) {
    T* to = block + offset / N * N * head_dim + offset % N;
    for (int i = 0; i < head_dim; i++) to[N * i] = x[i];
}

void quantize_head(const float* x, int n, int8_t* to, float* scale) {
    Floats top = zeros(), poison = zeros();
    for (int i = 0; i < n; i += kLanes) {
        top = max(abs(load(x + i)), top);
        poison = fma(load(x + i), zeros(), poison);
    }
    *scale = largest(top) / 127 + sum(poison);  // the integers cannot say "not a number"
    const Floats inverse = splat(*scale > 0 ? 1 / *scale : 0);
    for (int i = 0; i < n; i += kLanes) store_int8(to + i, mul(load(x + i), inverse));
}

void cache_bf16(const float* k, const float* v, int n, int offset, bf16* k_block, bf16* v_block) {
    bf16 halves[kMaxHeadDim];
    round_head(k, n, halves);
    scatter_k<2>(halves, n, offset, k_block);
    round_head(v, n, halves);
    scatter_v<2>(halves, n, offset, v_block);
}

void cache_int8(const float* k, const float* v, int n, int offset, uint8_t* k_block, uint8_t* v_block) {
    int8_t codes[kMaxHeadDim];
    const size_t scales = size_t(kBlock) * n;
    quantize_head(k, n, codes, (float*)(k_block + scales) + offset);
    for (int i = 0; i < n; i++) codes[i] = int8_t(codes[i] ^ 0x80);  // + 128
    scatter_k<4>(codes, n, offset, (int8_t*)k_block);
    quantize_head(v, n, codes, (float*)(v_block + scales) + offset);
    scatter_v<4>(codes, n, offset, (int8_t*)v_block);
}

void cache_head(const Model& m, const float* k, const float* v, int slot, int head, const Layer& layer) {
    const size_t at = (size_t(slot / kBlock) * m.kv_heads + head) * kv_head_bytes(m.kv_kind, m.head_dim);
    uint8_t* const k_block = layer.k_cache + at;
    uint8_t* const v_block = layer.v_cache + at;
    if (m.kv_kind == kKvInt8)
        cache_int8(k, v, m.head_dim, slot % kBlock, k_block, v_block);
    else
        cache_bf16(k, v, m.head_dim, slot % kBlock, (bf16*)k_block, (bf16*)v_block);
}

// Blocks lie anywhere: the lines that a row's K and V go to come into the cache while it is rotated.
void prefetch_head(const Model& m, int slot, int head, const Layer& layer) {
    const size_t bytes = kv_head_bytes(m.kv_kind, m.head_dim), at = (size_t(slot / kBlock) * m.kv_heads + head) * bytes;
    const size_t k_bytes = size_t(kBlock) * m.head_dim * (m.kv_kind == kKvInt8 ? 1 : sizeof(bf16));
    const int together = m.kv_kind == kKvInt8 ? 4 : 2;  // positions that share V's lines
    const size_t v_bytes = k_bytes / kBlock * together, v_offset = slot % kBlock / together * v_bytes;
    for (size_t i = 0; i < k_bytes; i += kLine) prefetch(layer.k_cache + at + i);
    for (size_t i = 0; i < v_bytes; i += kLine) prefetch(layer.v_cache + at + v_offset + i);
}

}  // namespace

void norm_rows(Team& team, const Model& m, const float* from, int rows, const float* weight, const Matrix& next,
               const Activations& to) {
    team.each(rows, [&m, from, weight, &next, to](int row, int) {
        norm_row(from + int64_t(row) * m.hidden, weight, m.hidden, m.norm_eps, to.values + int64_t(row) * m.hidden);
        prepare_row(next, row, to);
    });
}

void rotate_and_cache(Team& team, const Model& m, const Layer& layer, const Batch& b, float* qkv, bf16* q) {
    const int64_t q_width = int64_t(m.heads) * m.head_dim, kv_width = int64_t(m.kv_heads) * m.head_dim;
    team.each(b.tokens, [&m, &layer, b, qkv, q, q_width, kv_width](int row, int) {
        float* const queries = qkv + row * (q_width + 2 * kv_width);
        float* const keys = queries + q_width;
        for (int head = 0; head < m.kv_heads; head++) prefetch_head(m, b.slots[row], head, layer);
        for (int head = 0; head < m.heads; head++) {
            float* const x = queries + head * m.head_dim;
            norm_and_rotate(x, m, layer.q_norm, b.positions[row]);
            round_head(x, m.head_dim, q + row * q_width + head * m.head_dim);
        }
        for (int head = 0; head < m.kv_heads; head++) {
            float* const x = keys + head * m.head_dim;
            norm_and_rotate(x, m, layer.k_norm, b.positions[row]);
            cache_head(m, x, x + kv_width, b.slots[row], head, layer);
        }
    });
}

}  // namespace tokenmill
