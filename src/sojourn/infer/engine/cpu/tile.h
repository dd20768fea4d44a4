/* Sums in registers: the one loop in which matrices and attention are computed, in fp32.

A row's result depends on that row alone, to the last bit: not on the other rows of the batch, not on how a prompt is
split into steps, not on the number of threads. Each output of a matrix is one chain of fused multiply-adds, k upwards
from 0; attention is computed in chunks of positions that start at multiples of CHUNK, merged in order. How rows and
columns are grouped into registers, caches and threads changes none of these sums. */

#include "registers.h"

#define PANEL (2 * WIDTH)
#define CHUNK 256         /* positions whose scores are computed at once */

typedef uint32_t word_vec __attribute__((vector_size(4 * WIDTH), may_alias));

/* What is read later, and will be in a cache then: `step` bytes for each k. */
typedef struct {
    const char *at;
    int64_t step;
} Prefetch;

enum { FP32, BF16, INT8 };
static const int BYTES[] = {4, 2, 1};

/* sums[row][v] += x[row][k] * w[k][v] for k from 0 to n. Inlined with constant `rows`, `vectors` and `kind`, so that
the sums stay in registers. `second` is for fp32 weights, which take two cache lines for each k. */
INLINE void multiply_add(int rows, int vectors, int kind, vec (*sums)[2], const float *x, int64_t x_stride,
                         const char *w, int64_t w_stride, int64_t n, Prefetch first, Prefetch second) {
    for (int64_t k = 0; k < n; k++, w += w_stride, first.at += first.step, second.at += second.step) {
        vec weights[2];
        __builtin_prefetch(first.at);
        if (kind == FP32) __builtin_prefetch(second.at);
        if (kind == BF16) {
            word_vec pairs = *(const word_vec *)w;
            weights[0] = (vec)(pairs << 16);
            weights[1] = (vec)(pairs & 0xffff0000u);
        } else
            for (int v = 0; v < vectors; v++)
                weights[v] = kind == FP32 ? ((const vec *)w)[v] : LOAD_INT8((const int8_t *)w + v * WIDTH);
#pragma GCC unroll 16
        for (int row = 0; row < rows; row++) {
            vec factor = BROADCAST(x[row * x_stride + k]);
            for (int v = 0; v < vectors; v++) sums[row][v] = FMA(weights[v], factor, sums[row][v]);
        }
    }
}

static inline void norm_row(const float *restrict x, const float *restrict weight, float *restrict out, int64_t n,
                            float eps) {
    float scale = 1.0f / sqrtf(dot(x, x, n) / (float)n + eps);
    for (int64_t i = 0; i < n; i++) out[i] = x[i] * scale * weight[i];
}
