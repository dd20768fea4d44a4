/* Causal attention within documents, in fp32: no scores between documents, and no mask.

One thread computes the heads of one document that share keys and values, a block of queries at a time, in scratch
memory of its own. Scores are (keys, QUERIES): sums and maxima over keys need no sums within a register. The order of
every sum is fixed: results do not depend on the number of threads. Queries are multiplied by `scale` as they are read.
Heads, queries and keys are padded with zeros to whole registers.

q, k, v, out and their gradients: tokens of all documents end to end, contiguous (tokens, heads, n). */

#include "kernels.h"
#include "registers.h"

#define QUERIES 32                     /* in a block; a multiple of LANES */
#define ROWS (MAX_ROWS == 12 ? 8 : 4) /* whose sums, two registers each, stay in registers */

/* out (m, columns) = a b, or += if `add`: a (m, k) by two strides, b (k, columns). m: a multiple of ROWS. */
INLINE void multiply_tile(int vectors, float *out, int64_t out_stride, const float *a, int64_t a_row, int64_t a_k,
                          const float *b, int64_t b_stride, int64_t k, int add) {
    vec sums[ROWS][2];
#pragma GCC unroll 8
    for (int row = 0; row < ROWS; row++)
        for (int v = 0; v < vectors; v++)
            sums[row][v] = add ? (vec) *(unaligned_vec *)(out + row * out_stride + v * WIDTH) : BROADCAST(0.0f);
    for (int64_t i = 0; i < k; i++, a += a_k, b += b_stride) {
        vec right[2];
        for (int v = 0; v < vectors; v++) right[v] = (vec) *(const unaligned_vec *)(b + v * WIDTH);
#pragma GCC unroll 8
        for (int row = 0; row < ROWS; row++) {
            vec left = BROADCAST(a[row * a_row]);
            for (int v = 0; v < vectors; v++) sums[row][v] = FMA(left, right[v], sums[row][v]);
        }
    }
#pragma GCC unroll 8
    for (int row = 0; row < ROWS; row++)
        for (int v = 0; v < vectors; v++) *(unaligned_vec *)(out + row * out_stride + v * WIDTH) = sums[row][v];
}

static void multiply(float *out, int64_t out_stride, const float *a, int64_t a_row, int64_t a_k, const float *b,
                     int64_t b_stride, int64_t m, int64_t columns, int64_t k, int add) {
    for (int64_t row = 0; row < m; row += ROWS) {
        float *to = out + row * out_stride;
        const float *from = a + row * a_row;
        int64_t column = 0;
        for (; column + 2 * WIDTH <= columns; column += 2 * WIDTH)
            multiply_tile(2, to + column, out_stride, from, a_row, a_k, b + column, b_stride, k, add);
        if (column < columns)
            multiply_tile(1, to + column, out_stride, from, a_row, a_k, b + column, b_stride, k, add);
    }
}

static int64_t padded(int64_t n) { return (n + LANES - 1) / LANES * LANES; }

/* Rows of a head into scratch, multiplied by `scale`; `height` rows of `width`, zeros behind those that there are. */
static void read_rows(float *to, int64_t height, int64_t width, const float *from, int64_t stride, int64_t rows,
                      int64_t n, float scale) {
    for (int64_t row = 0; row < height; row++) {
        float *restrict ys = to + row * width;
        const float *restrict xs = from + row * stride;
        int64_t count = row < rows ? n : 0;
        for (int64_t i = 0; i < count; i++) ys[i] = xs[i] * scale;
        for (int64_t i = count; i < width; i++) ys[i] = 0.0f;
    }
}

/* (QUERIES, n) as (n, QUERIES). */
static void transpose(float *restrict to, const float *restrict from, int64_t n) {
    for (int64_t i = 0; i < n; i++)
        for (int64_t row = 0; row < QUERIES; row++) to[i * QUERIES + row] = from[row * n + i];
}

static void write_rows(float *to, int64_t stride, const float *from, int64_t from_stride, int64_t rows, int64_t n,
                       float scale) {
    for (int64_t row = 0; row < rows; row++)
        for (int64_t i = 0; i < n; i++) to[row * stride + i] = from[row * from_stride + i] * scale;
}

/* A key's scores with queries before it. */
static void fill_behind(float *restrict x, int count, float value) {
    for (int i = 0; i < QUERIES; i++) x[i] = i < count ? value : x[i];
}

/* exp(scores - offsets); 0 for keys behind their query. `start`: position of the first query. */
WHOLE_REGISTERS static void exponentials(float *restrict scores, const float *restrict offsets, int64_t keys,
                                         int64_t start) {
    for (int64_t key = 0; key < keys; key++) {
        float *restrict x = scores + key * QUERIES;
        for (int i = 0; i < QUERIES; i++) x[i] = within_range_of_exp(x[i] - offsets[i]);
        for (int i = 0; i < QUERIES; i++) x[i] = exp_f32(x[i]);
        if (key > start) fill_behind(x, key - start, 0.0f);
    }
}

/* Scores become weights, whose sums are `sums`; `most`: the largest score of each query. */
static void softmax(float *restrict scores, float *restrict most, float *restrict sums, int64_t keys, int64_t start) {
    for (int i = 0; i < QUERIES; i++) most[i] = scores[i], sums[i] = 0.0f;
    for (int64_t key = 1; key < keys; key++) {
        float *restrict x = scores + key * QUERIES;
        if (key > start) fill_behind(x, key - start, -INFINITY);
        for (int i = 0; i < QUERIES; i++) most[i] = x[i] > most[i] ? x[i] : most[i];
    }
    exponentials(scores, most, keys, start);
    for (int64_t key = 0; key < keys; key++)
        for (int i = 0; i < QUERIES; i++) sums[i] += scores[key * QUERIES + i];
}

/* `starts`: of the documents, and the end of the last. `lse`: log(sum(exp(scores))) of every token and head. */
void attention_forward_part(const float *q, const float *k, const float *v, float *out, float *lse,
                            const int32_t *starts, int64_t documents, int64_t longest, int64_t heads, int64_t kv_heads,
                            int64_t n, float scale) {
    int64_t width = padded(n), most_keys = padded(longest), group = heads / kv_heads;
    float *scratch = allocate(2 * most_keys * width + QUERIES * (2 * width + most_keys));
    float *keys = scratch, *values = keys + most_keys * width, *queries = values + most_keys * width;
    float *queries_t = queries + QUERIES * width, *weights = queries_t + QUERIES * width;
    float most[QUERIES], sums[QUERIES];
#pragma omp for schedule(dynamic)
    for (int64_t task = 0; task < documents * kv_heads; task++) {
        int64_t first = starts[task / kv_heads], count = starts[task / kv_heads + 1] - first, kv = task % kv_heads;
        int64_t at = (first * kv_heads + kv) * n;
        read_rows(keys, padded(count), width, k + at, kv_heads * n, count, n, 1.0f);
        read_rows(values, padded(count), width, v + at, kv_heads * n, count, n, 1.0f);
        for (int64_t head = kv * group; head < (kv + 1) * group; head++)
            for (int64_t start = 0; start < count; start += QUERIES) {
                int64_t rows = MIN(QUERIES, count - start), seen = padded(start + rows);
                int64_t from = (first + start) * heads + head;
                read_rows(queries, QUERIES, width, q + from * n, heads * n, rows, n, scale);
                transpose(queries_t, queries, width);
                multiply(weights, QUERIES, keys, width, 1, queries_t, QUERIES, seen, QUERIES, n, 0);
                softmax(weights, most, sums, start + rows, start);
                multiply(queries, width, weights, 1, QUERIES, values, width, QUERIES, width, start + rows, 0);
                for (int64_t row = 0; row < rows; row++) {
                    write_rows(out + (from + row * heads) * n, 0, queries + row * width, 0, 1, n, 1 / sums[row]);
                    lse[from + row * heads] = most[row] + logf(sums[row]);
                }
            }
    }
    free(scratch);
}

void attention_forward(const float *q, const float *k, const float *v, float *out, float *lse, const int32_t *starts,
                       int64_t documents, int64_t longest, int64_t heads, int64_t kv_heads, int64_t n, float scale,
                       int threads) {
#pragma omp parallel num_threads(threads)
    attention_forward_part(q, k, v, out, lse, starts, documents, longest, heads, kv_heads, n, scale);
}

/* `weights` (from scores) and `grads` of the scores (from those of the weights). */
static void softmax_backward(float *restrict weights, float *restrict grads, const float *restrict lse, int64_t keys,
                             int64_t start) {
    float means[QUERIES] = {0};
    exponentials(weights, lse, keys, start);
    for (int64_t key = 0; key < keys; key++)
        for (int i = 0; i < QUERIES; i++) means[i] += weights[key * QUERIES + i] * grads[key * QUERIES + i];
    for (int64_t key = 0; key < keys; key++)
        for (int i = 0; i < QUERIES; i++)
            grads[key * QUERIES + i] = weights[key * QUERIES + i] * (grads[key * QUERIES + i] - means[i]);
}

void attention_backward_part(const float *grad, const float *q, const float *k, const float *v, const float *lse,
                             float *grad_q, float *grad_k, float *grad_v, const int32_t *starts, int64_t documents,
                             int64_t longest, int64_t heads, int64_t kv_heads, int64_t n, float scale) {
    int64_t width = padded(n), most_keys = padded(longest), group = heads / kv_heads;
    float *scratch = allocate(4 * most_keys * width + QUERIES * (4 * width + 2 * most_keys));
    float *keys = scratch, *values = keys + most_keys * width, *key_grads = values + most_keys * width;
    float *value_grads = key_grads + most_keys * width, *queries = value_grads + most_keys * width;
    float *queries_t = queries + QUERIES * width, *outs = queries_t + QUERIES * width;
    float *outs_t = outs + QUERIES * width, *weights = outs_t + QUERIES * width;
    float *score_grads = weights + QUERIES * most_keys, own_lse[QUERIES];
#pragma omp for schedule(dynamic)
    for (int64_t task = 0; task < documents * kv_heads; task++) {
        int64_t first = starts[task / kv_heads], count = starts[task / kv_heads + 1] - first, kv = task % kv_heads;
        int64_t at = (first * kv_heads + kv) * n;
        read_rows(keys, padded(count), width, k + at, kv_heads * n, count, n, 1.0f);
        read_rows(values, padded(count), width, v + at, kv_heads * n, count, n, 1.0f);
        memset(key_grads, 0, padded(count) * width * sizeof(float));
        memset(value_grads, 0, padded(count) * width * sizeof(float));
        for (int64_t head = kv * group; head < (kv + 1) * group; head++)
            for (int64_t start = 0; start < count; start += QUERIES) {
                int64_t rows = MIN(QUERIES, count - start), end = start + rows, seen = padded(end);
                int64_t from = (first + start) * heads + head;
                read_rows(queries, QUERIES, width, q + from * n, heads * n, rows, n, scale);
                read_rows(outs, QUERIES, width, grad + from * n, heads * n, rows, n, 1.0f);
                for (int64_t row = 0; row < QUERIES; row++) own_lse[row] = row < rows ? lse[from + row * heads] : 0;
                transpose(queries_t, queries, width);
                transpose(outs_t, outs, width);
                multiply(weights, QUERIES, keys, width, 1, queries_t, QUERIES, seen, QUERIES, n, 0);
                multiply(score_grads, QUERIES, values, width, 1, outs_t, QUERIES, seen, QUERIES, n, 0);
                softmax_backward(weights, score_grads, own_lse, seen, start);
                multiply(value_grads, width, weights, QUERIES, 1, outs, width, seen, width, rows, 1);
                multiply(key_grads, width, score_grads, QUERIES, 1, queries, width, seen, width, rows, 1);
                multiply(queries, width, score_grads, 1, QUERIES, keys, width, QUERIES, width, end, 0);
                write_rows(grad_q + from * n, heads * n, queries, width, rows, n, scale);
            }
        write_rows(grad_k + at, kv_heads * n, key_grads, width, count, n, 1.0f);
        write_rows(grad_v + at, kv_heads * n, value_grads, width, count, n, 1.0f);
    }
    free(scratch);
}

void attention_backward(const float *grad, const float *q, const float *k, const float *v, const float *lse,
                        float *grad_q, float *grad_k, float *grad_v, const int32_t *starts, int64_t documents,
                        int64_t longest, int64_t heads, int64_t kv_heads, int64_t n, float scale, int threads) {
#pragma omp parallel num_threads(threads)
    attention_backward_part(grad, q, k, v, lse, grad_q, grad_k, grad_v, starts, documents, longest, heads, kv_heads, n,
                            scale);
}
