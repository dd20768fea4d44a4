/* Matrices, norms and activations of the serving engine on a CPU.

Weights lie in panels of PANEL outputs: [outputs / PANEL][inputs][PANEL], padded with zeros. Of bf16 weights, the first
half of a panel's outputs and the second alternate: a 32-bit word holds one of each. */

#include "tile.h"

#define ROWS_IN_CACHE 96  /* rows and inputs of x that stay in the L2 cache while panels pass by */
#define INPUTS_IN_CACHE 768
#define AHEAD 4096        /* bytes from what is read to what is prefetched */

enum { STORE, ADD, SILU, GELU_TANH }; /* what becomes of a matrix's outputs */

void panel_width(int64_t *out) { *out = PANEL; }

typedef struct {
    const float *x, *scale, *bias; /* scale: of each output of int8 weights; bias: may be NULL */
    const char *weight;
    float *out;
    int64_t inputs, outputs;
} Linear;

INLINE void linear_tile(int rows, int kind, const float *x, int64_t x_stride, const char *w, int64_t n,
                        Prefetch next, float *y, int64_t y_stride, int is_first) {
    vec sums[MAX_ROWS][2];
#pragma GCC unroll 16
    for (int row = 0; row < rows; row++)
        for (int v = 0; v < 2; v++)
            sums[row][v] = is_first ? BROADCAST(0.0f) : (vec)((unaligned_vec *)(y + row * y_stride))[v];
    Prefetch second = {next.at + 64, next.step};
    multiply_add(rows, 2, kind, sums, x, x_stride, w, BYTES[kind] * PANEL, n, next, second);
#pragma GCC unroll 16
    for (int row = 0; row < rows; row++)
        for (int v = 0; v < 2; v++) ((unaligned_vec *)(y + row * y_stride))[v] = (unaligned_vec)sums[row][v];
}

/* Inputs from k to k + n of one panel's outputs, for rows that fit into registers. */
static void linear_panel(const Linear *a, int kind, int rows, const float *x, int64_t x_stride, int64_t row,
                         int64_t panel, int64_t k, int64_t n, int64_t tile, int64_t tiles) {
    int64_t column = panel * PANEL, width = MIN(PANEL, a->outputs - column);
    const char *w = a->weight + (panel * a->inputs + k) * PANEL * BYTES[kind];
    int64_t step = PANEL * BYTES[kind] / tiles; /* each tile prefetches its share of the next panel */
    Prefetch next = {tiles == 1 ? w + AHEAD : w + (a->inputs * tiles + n * tile) * step, step};
    float *out = a->out + row * a->outputs + column, edge[MAX_ROWS * PANEL], *y = width < PANEL ? edge : out;
    int64_t y_stride = width < PANEL ? PANEL : a->outputs;
    if (y == edge && k)
        for (int r = 0; r < rows; r++) memcpy(edge + r * PANEL, out + r * a->outputs, width * sizeof(float));
    if (kind == FP32)
        WITH_ROWS(rows, linear_tile, FP32, x, x_stride, w, n, next, y, y_stride, k == 0)
    else if (kind == BF16)
        WITH_ROWS(rows, linear_tile, BF16, x, x_stride, w, n, next, y, y_stride, k == 0)
    else
        WITH_ROWS(rows, linear_tile, INT8, x, x_stride, w, n, next, y, y_stride, k == 0)
    for (int r = 0; r < rows; r++, y += y_stride, out += a->outputs) {
        if (k + n == a->inputs) {
            if (a->scale)
                for (int64_t i = 0; i < width; i++) y[i] *= a->scale[column + i];
            if (a->bias)
                for (int64_t i = 0; i < width; i++) y[i] += a->bias[column + i];
        }
        if (y != out) memcpy(out, y, width * sizeof(float));
    }
}

/* Rows from `row` to `end` of the outputs in panels from `panel` to `last`. */
static void linear_part(const Linear *a, int kind, int64_t row, int64_t end, int64_t panel, int64_t last) {
    static _Thread_local float copy[ROWS_IN_CACHE * (INPUTS_IN_CACHE + LANES)];
    int64_t tiles = (end - row + MAX_ROWS - 1) / MAX_ROWS, step = tiles < 2 ? a->inputs : INPUTS_IN_CACHE;
    int copies = tiles > 1 && a->inputs % 256 == 0; /* else all rows would fall into the same sets of the L1 cache */
    for (int64_t k = 0; k < a->inputs; k += step) {
        int64_t n = MIN(step, a->inputs - k), stride = copies ? INPUTS_IN_CACHE + LANES : a->inputs;
        const float *x = a->x + row * a->inputs + k;
        if (copies) {
            for (int64_t r = 0; r < end - row; r++) memcpy(copy + r * stride, x + r * a->inputs, n * sizeof(float));
            x = copy;
        }
        for (int64_t p = panel; p < last; p++)
            for (int64_t t = 0; t < tiles; t++) {
                int64_t first = (end - row) * t / tiles, rows = (end - row) * (t + 1) / tiles - first;
                linear_panel(a, kind, rows, x + first * stride, stride, row + first, p, k, n, t, tiles);
            }
    }
}

void rms_norm(const float *x, const float *weight, float *out, int64_t rows, int64_t n, float eps, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t row = 0; row < rows; row++) norm_row(x + row * n, weight, out + row * n, n, eps);
}

/* act(gate) * up. act(x) is x * sigmoid(z), with z = x for SiLU, and for GELU by tanh
z = 2 * sqrt(2 / pi) * (x + 0.044715 x^3). */
static void gate(int then, const float *restrict x, const float *restrict up, float *restrict out, int64_t n) {
    float z[CHUNK];
    for (int64_t i = 0; i < n; i++)
        z[i] = then == SILU ? -x[i] : x[i] * -1.595769122f * (1.0f + 0.044715f * x[i] * x[i]);
    for (int64_t i = 0; i < n; i++) z[i] = within_range_of_exp(z[i]);
    for (int64_t i = 0; i < n; i++) out[i] = x[i] / (1.0f + exp_f32(z[i])) * up[i];
}

/* Adds y to out, or applies the activation to rows [gate, up] of y; n outputs in a row of `out`. For all threads. */
static void finish(int then, const float *y, float *out, int64_t rows, int64_t n) {
    int64_t pieces = (n + CHUNK - 1) / CHUNK;
#pragma omp for schedule(static)
    for (int64_t part = 0; part < rows * pieces; part++) {
        int64_t row = part / pieces, first = part % pieces * CHUNK, count = MIN(CHUNK, n - first);
        const float *restrict from = y + row * (then == ADD ? n : 2 * n) + first;
        float *restrict to = out + row * n + first;
        if (then == ADD)
            for (int64_t i = 0; i < count; i++) to[i] += from[i];
        else
            gate(then, from, from + n, to, count);
    }
}

void gated_act(const float *gate_up, float *out, int64_t rows, int64_t n, int then, int threads) {
#pragma omp parallel num_threads(threads)
    finish(then, gate_up, out, rows, n);
}

/* Rows of x are normed first, unless `norm` is NULL. `scale` and `bias` may be NULL. */
void linear(const float *x, const float *norm, const char *weight, const float *scale, const float *bias, float *out,
            int64_t rows, int64_t inputs, int64_t outputs, float eps, int kind, int then, int threads) {
    float *normed = norm ? malloc(rows * inputs * sizeof(float)) : NULL;
    float *y = then == STORE ? out : malloc(rows * outputs * sizeof(float));
    Linear a = {norm ? normed : x, scale, bias, weight, y, inputs, outputs};
    int64_t panels = (outputs + PANEL - 1) / PANEL, blocks = (rows + ROWS_IN_CACHE - 1) / ROWS_IN_CACHE;
    int64_t groups = blocks % threads ? threads : 1; /* of panels, so that every thread has as much to do */
#pragma omp parallel num_threads(threads)
    {
        if (norm) {
#pragma omp for schedule(static)
            for (int64_t r = 0; r < rows; r++) norm_row(x + r * inputs, norm, normed + r * inputs, inputs, eps);
        }
#pragma omp for schedule(static)
        for (int64_t part = 0; part < blocks * groups; part++) {
            int64_t b = part / groups, g = part % groups;
            linear_part(&a, kind, rows * b / blocks, rows * (b + 1) / blocks, panels * g / groups,
                        panels * (g + 1) / groups);
        }
        if (then != STORE) finish(then, y, out, rows, then == ADD ? outputs : outputs / 2);
    }
    free(normed);
    if (then != STORE) free(y);
}
