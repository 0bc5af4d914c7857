// What attention over an int8 cache loses beside the cache's own rounding: no more than q and p lose with 15 bits. K and V here are
// integers times scales, which the cache holds exactly. Prints the relative errors of scores and of sums of values.
#include "attention_tiles.h"

#include <cmath>
#include <cstdio>
#include <random>

using namespace tokenmill;

constexpr int kRows = 3, kBlocks = 2, kKeys = kBlocks * kBlock, kDim = 64;

static Scratch scratch;
alignas(64) static uint8_t k_codes[kBlocks][kBlock * kDim];
alignas(64) static int8_t v_codes[kBlocks][kBlock * kDim];
alignas(64) static float k_scales[kKeys], v_scales[kKeys];

struct Error {
    double lost = 0, all = 0;
    void add(double found, double exact) { lost += (found - exact) * (found - exact), all += exact * exact; }
    double relative() const { return std::sqrt(lost / all); }
};

int main() {
    std::mt19937 generator(1);
    std::uniform_real_distribution<float> one(-1, 1), scale(0.01f, 0.02f), halvings(0, 8);
    std::uniform_int_distribution<int> code(-127, 127);

    static int k[kKeys][kDim], v[kKeys][kDim];
    for (int i = 0; i < kKeys; i++) {
        k_scales[i] = scale(generator), v_scales[i] = scale(generator);
        for (int d = 0; d < kDim; d++) {
            k[i][d] = code(generator), v[i][d] = code(generator);
            k_codes[i / kBlock][(d / 4 * kBlock + i % kBlock) * 4 + d % 4] = uint8_t(k[i][d] + 128);
            v_codes[i / kBlock][(i % kBlock / 4 * kDim + d) * 4 + i % 4] = int8_t(v[i][d]);
        }
    }
    KeyTile tile{};
    tile.blocks = kBlocks, tile.first = 0, tile.end = kKeys;
    for (int c = 0; c < kBlocks; c++) {
        tile.k[c] = tile.next_k[c] = k_codes[c], tile.v[c] = (const uint8_t*)v_codes[c];
        tile.k_scales[c] = k_scales + c * kBlock, tile.v_scales[c] = v_scales + c * kBlock;
    }

    static bf16 q[kRows][kDim];
    for (int r = 0; r < kRows; r++) {
        for (int d = 0; d < kDim; d += kLanes) {
            float values[kLanes];
            for (float& value : values) value = one(generator);
            store_bf16(q[r] + d, load(values));
        }
        copy_factors(q[r], kDim, scratch.q + r * kDim);
        Int8Cache::prepare_query(scratch, r, kDim);
    }
    all_scores<Int8Cache, kRows>(tile, scratch, 0, kDim);
    Error scores;
    for (int r = 0; r < kRows; r++)
        for (int i = 0; i < kKeys; i++) {
            double exact = 0;
            for (int d = 0; d < kDim; d++) exact += double(to_float(q[r][d])) * k[i][d] * k_scales[i];
            scores.add(scratch.scores[r * kTileKeys + i], exact);
        }

    static float p[kRows][kKeys];
    for (int r = 0; r < kRows; r++) {
        for (float& probability : p[r]) probability = std::exp2(-halvings(generator));
        for (int c = 0; c < kBlocks; c++) Int8Cache::put_probability(scratch, r, c, load(p[r] + c * kBlock));
        Int8Cache::finish_probabilities(tile, scratch, r);
    }
    const float alpha[kRows] = {};
    all_values<Int8Cache, kRows>(tile, scratch, 0, kDim, alpha);
    Error values;
    for (int r = 0; r < kRows; r++)
        for (int d = 0; d < kDim; d++) {
            double exact = 0;
            for (int i = 0; i < kKeys; i++) exact += double(p[r][i]) * v[i][d] * v_scales[i];
            values.add(scratch.out[r * kDim + d], exact);
        }

    std::printf("%g %g\n", scores.relative(), values.relative());
}
