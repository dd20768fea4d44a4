#include "matmul.h"

int64_t panels_of(int64_t n) { return (n + PANEL - 1) / PANEL; }

int64_t packed_size(int64_t k, int64_t n) { return panels_of(n) * PANEL * k; }

void pack(float *to, const float *b, int64_t stride, int64_t k, int64_t n) {
    for (int64_t i = 0; i < k; i++, b += stride, to += PANEL) {
        int64_t column = 0;
        for (; column + PANEL <= n; column += PANEL) memcpy(to + column * k, b + column, PANEL * sizeof(float));
        for (int64_t j = 0; column < n && j < PANEL; j++) to[column * k + j] = column + j < n ? b[column + j] : 0.0f;
    }
}

void pack_transposed(float *to, const float *b, int64_t k, int64_t n, int64_t panel, int64_t end) {
    for (; panel < end; panel++) {
        float *restrict out = to + panel * PANEL * k;
        const float *restrict from = b + panel * PANEL * k;
        int64_t width = MIN(PANEL, n - panel * PANEL);
        if (width < PANEL) memset(out, 0, PANEL * k * sizeof(float));
        for (int64_t first = 0; first < k; first += LANES) /* whole cache lines of b */
            for (int64_t j = 0; j < width; j++)
                for (int64_t i = first; i < MIN(first + LANES, k); i++) out[i * PANEL + j] = from[j * k + i];
    }
}

INLINE void tile(int rows, float *out, int64_t out_stride, const float *a, int64_t a_row, int64_t a_k, const float *b,
                 int64_t k, int add) {
    vec sums[MAX_ROWS][2];
#pragma GCC unroll 16
    for (int row = 0; row < rows; row++)
        for (int v = 0; v < 2; v++)
            sums[row][v] = add ? (vec)((unaligned_vec *)(out + row * out_stride))[v] : BROADCAST(0.0f);
    /* Pointers to every third row: the processor adds one or two strides to them. */
    const float *thirds[4] = {a, a + 3 * a_row, a + 6 * a_row, a + 9 * a_row};
    for (int64_t i = 0; i < k; i++, b += PANEL) {
        vec left = ((const vec *)b)[0], right = ((const vec *)b)[1];
#pragma GCC unroll 16
        for (int row = 0; row < rows; row++) {
            vec factor = BROADCAST(thirds[row / 3][row % 3 * a_row]);
            sums[row][0] = FMA(left, factor, sums[row][0]);
            sums[row][1] = FMA(right, factor, sums[row][1]);
        }
#pragma GCC unroll 4
        for (int third = 0; third < (rows + 2) / 3; third++) thirds[third] += a_k;
    }
#pragma GCC unroll 16
    for (int row = 0; row < rows; row++)
        for (int v = 0; v < 2; v++) ((unaligned_vec *)(out + row * out_stride))[v] = (unaligned_vec)sums[row][v];
}

/* Rows that fit into registers, and one panel. */
static void matmul_panel(float *out, int64_t out_stride, const float *a, int64_t a_row, int64_t a_k, const float *panel,
                         int64_t rows, int64_t width, int64_t k, int add) {
    if (width >= PANEL) {
        WITH_ROWS(rows, tile, out, out_stride, a, a_row, a_k, panel, k, add)
        return;
    }
    float edge[MAX_ROWS * PANEL];
    for (int64_t r = 0; add && r < rows; r++) memcpy(edge + r * PANEL, out + r * out_stride, width * sizeof(float));
    WITH_ROWS(rows, tile, edge, PANEL, a, a_row, a_k, panel, k, add)
    for (int64_t r = 0; r < rows; r++) memcpy(out + r * out_stride, edge + r * PANEL, width * sizeof(float));
}

void matmul(float *out, int64_t out_stride, const float *a, int64_t a_row, int64_t a_k, const float *packed, int64_t m,
            int64_t n, int64_t k, int add) {
    int64_t tiles = (m + MAX_ROWS - 1) / MAX_ROWS;
    for (int64_t column = 0; column < n; column += PANEL, packed += PANEL * k)
        for (int64_t t = 0; t < tiles; t++) {
            int64_t first = m * t / tiles, rows = m * (t + 1) / tiles - first;
            matmul_panel(out + first * out_stride + column, out_stride, a + first * a_row, a_row, a_k, packed, rows,
                         n - column, k, add);
        }
}
