// The embeddings of a step's tokens: rows of their own table, or, where the head has the same weights, a column of its panels each.
// A column's lanes lie a line or more apart, which costs a step nothing that can be measured; a table beside it cost a seventh of
// all weights of a small model.
#include <cstring>

#include "kernels.h"

namespace tokenmill {
namespace {

void from_table(const bf16* row, int n, float* to) {
    for (int i = 0; i < n; i++) to[i] = to_float(row[i]);
}

// Lanes of 32 bits of one column: [depth / values in a lane], kPanel lanes apart.
const uint32_t* column_of(const Matrix& m, int column, int lanes) {
    return (const uint32_t*)m.data + int64_t(column / kPanel) * lanes * kPanel + column % kPanel;
}

void from_bf16_panel(const Matrix& m, int column, float* to) {
    const int lanes = m.depth / 2;
    const uint32_t* const from = column_of(m, column, lanes);
    for (int i = 0; i < lanes; i++) {
        bf16 values[2];
        std::memcpy(values, from + int64_t(i) * kPanel, sizeof values);
        for (int j = 0; j < 2; j++) to[2 * i + j] = to_float(values[j]);
    }
}

void from_int8_panel(const Matrix& m, int column, float* to) {
    const int lanes = m.depth / 4;
    const uint32_t* const from = column_of(m, column, lanes);
    const float scale = m.scales[column];
    for (int i = 0; i < lanes; i++) {
        uint8_t codes[4];
        std::memcpy(codes, from + int64_t(i) * kPanel, sizeof codes);
        for (int j = 0; j < 4; j++) to[4 * i + j] = float(codes[j] - 128) * scale;
    }
}

}  // namespace

void embed(Team& team, const Model& m, const Batch& b, float* hidden) {
    team.each(b.tokens, [&m, tokens = b.token_ids, hidden](int row, int) {
        const int token = tokens[row];
        float* const to = hidden + int64_t(row) * m.hidden;
        if (m.embeddings)
            from_table(m.embeddings + int64_t(token) * m.hidden, m.hidden, to);
        else if (m.head.kind == kInt8)
            from_int8_panel(m.head, token, to);
        else
            from_bf16_panel(m.head, token, to);
    });
}

}  // namespace tokenmill
