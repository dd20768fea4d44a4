/* The operations of the serving engine on a CPU, in fp32.

A row's result depends on that row alone, to the last bit: not on the other rows of the batch, not on how a prompt is
split into steps, not on the number of threads. Each output of a matrix is one chain of fused multiply-adds, k upwards from
0; attention is computed in chunks of positions that start at multiples of CHUNK, merged in order. How rows and columns are
grouped into registers, caches and threads changes none of these sums.

Weights lie in panels of PANEL outputs: [outputs / PANEL][inputs][PANEL], padded with zeros. Of bf16 weights, the first half
of a panel's outputs and the second alternate: a 32-bit word holds one of each. */

#include "vector_math.h"
#include <stdlib.h>
#include <sys/mman.h>

#if defined(__AVX512F__)
#include <immintrin.h>
#define WIDTH 16    /* floats in a register */
#define MAX_ROWS 12 /* rows whose sums, two registers each, stay in registers */
#define BROADCAST(x) ((vec)_mm512_set1_ps(x))
#define FMA(a, b, c) ((vec)_mm512_fmadd_ps((__m512)(a), (__m512)(b), (__m512)(c)))
#define LOAD_INT8(p) ((vec)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(p)))))
#elif defined(__AVX2__) && defined(__FMA__)
#include <immintrin.h>
#define WIDTH 8
#define MAX_ROWS 6
#define BROADCAST(x) ((vec)_mm256_set1_ps(x))
#define FMA(a, b, c) ((vec)_mm256_fmadd_ps((__m256)(a), (__m256)(b), (__m256)(c)))
#define LOAD_INT8(p) ((vec)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(p)))))
#elif defined(__aarch64__)
#include <arm_neon.h>
#define WIDTH 4
#define MAX_ROWS 12
#define BROADCAST(x) ((vec)vdupq_n_f32(x))
#define FMA(a, b, c) ((vec)vfmaq_f32((float32x4_t)(c), (float32x4_t)(a), (float32x4_t)(b)))
#define LOAD_INT8(p) ((vec){(p)[0], (p)[1], (p)[2], (p)[3]})
#else
#define WIDTH 4
#define MAX_ROWS 6
#define BROADCAST(x) ((vec){x, x, x, x})
#define FMA(a, b, c) ((a) * (b) + (c))
#define LOAD_INT8(p) ((vec){(p)[0], (p)[1], (p)[2], (p)[3]})
#endif

#define PANEL (2 * WIDTH)
#define BLOCK 16          /* tokens in a block of the KV cache */
#define CHUNK 256         /* positions whose scores are computed at once */
#define MAX_HEAD_DIM 512
#define ROWS_IN_CACHE 96  /* rows and inputs of x that stay in the L2 cache while panels pass by */
#define INPUTS_IN_CACHE 768
#ifndef AHEAD
#define AHEAD 4096        /* bytes from what is read to what is loaded into a cache */
#define HINT 3
#endif
#define KEY_VECTORS (BLOCK / WIDTH < 2 ? 1 : 2)
#define INLINE static inline __attribute__((always_inline))
#define MIN(a, b) ((a) < (b) ? (a) : (b))
#define MAX(a, b) ((a) > (b) ? (a) : (b))

typedef float vec __attribute__((vector_size(4 * WIDTH), may_alias));
typedef float unaligned_vec __attribute__((vector_size(4 * WIDTH), aligned(4), may_alias));
typedef uint32_t word_vec __attribute__((vector_size(4 * WIDTH), may_alias));

enum { FP32, BF16, INT8 };
static const int BYTES[] = {4, 2, 1};

enum { STORE, ADD, SILU, GELU_TANH }; /* what becomes of a matrix's outputs */

void panel_width(int64_t *out) { *out = PANEL; }

/* Fewer TLB misses: memory is read faster. For memory that nobody has touched yet; where the system has none, a no-op. */
void use_huge_pages(char *memory, int64_t size) {
    uintptr_t begin = ((uintptr_t)memory + 4095) / 4096 * 4096, end = (uintptr_t)(memory + size) / 4096 * 4096;
    if (begin < end) madvise((void *)begin, end - begin, MADV_HUGEPAGE);
}

/* sums[row][v] += x[row][k] * w[k][v] for k from 0 to n. Inlined with constant `rows`, `vectors` and `kind`, so that the
sums stay in registers. Meanwhile `next`, what will be read later, is loaded into a cache, `next_step` bytes for each k. */
INLINE void multiply_add(int rows, int vectors, int kind, vec (*sums)[2], const float *x, int64_t x_stride, const char *w,
                         int64_t w_stride, int64_t n, const char *next, int64_t next_step) {
    for (int64_t k = 0; k < n; k++, w += w_stride, next += next_step) {
        vec weights[2];
        __builtin_prefetch(next, 0, HINT);
        if (kind == FP32) __builtin_prefetch(next + 64, 0, HINT);
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

/* f with the number of rows as a constant. */
#if MAX_ROWS == 6
#define MORE_ROWS(f, ...)
#else
#define MORE_ROWS(f, ...)                                                                                              \
    case 7: f(7, __VA_ARGS__); break;                                                                                  \
    case 8: f(8, __VA_ARGS__); break;                                                                                  \
    case 9: f(9, __VA_ARGS__); break;                                                                                  \
    case 10: f(10, __VA_ARGS__); break;                                                                                \
    case 11: f(11, __VA_ARGS__); break;                                                                                \
    case 12: f(12, __VA_ARGS__); break;
#endif
#define WITH_ROWS(rows, f, ...)                                                                                        \
    switch (rows) {                                                                                                    \
        case 1: f(1, __VA_ARGS__); break;                                                                              \
        case 2: f(2, __VA_ARGS__); break;                                                                              \
        case 3: f(3, __VA_ARGS__); break;                                                                              \
        case 4: f(4, __VA_ARGS__); break;                                                                              \
        case 5: f(5, __VA_ARGS__); break;                                                                              \
        case 6: f(6, __VA_ARGS__); break;                                                                              \
        MORE_ROWS(f, __VA_ARGS__)                                                                                      \
    }

typedef struct {
    const float *x, *scale, *bias; /* scale: of each output of int8 weights; bias: may be NULL */
    const char *weight;
    float *out;
    int64_t inputs, outputs;
} Linear;

INLINE void linear_tile(int rows, int kind, const float *x, int64_t x_stride, const char *w, int64_t n, const char *next,
                        int64_t next_step, float *y, int64_t y_stride, int is_first) {
    vec sums[MAX_ROWS][2];
#pragma GCC unroll 16
    for (int row = 0; row < rows; row++)
        for (int v = 0; v < 2; v++)
            sums[row][v] = is_first ? BROADCAST(0.0f) : (vec)((unaligned_vec *)(y + row * y_stride))[v];
    multiply_add(rows, 2, kind, sums, x, x_stride, w, BYTES[kind] * PANEL, n, next, next_step);
#pragma GCC unroll 16
    for (int row = 0; row < rows; row++)
        for (int v = 0; v < 2; v++) ((unaligned_vec *)(y + row * y_stride))[v] = (unaligned_vec)sums[row][v];
}

/* Inputs from k to k + n of one panel's outputs, for rows that fit into registers. */
static void linear_panel(const Linear *a, int kind, int rows, const float *x, int64_t x_stride, int64_t row, int64_t panel,
                         int64_t k, int64_t n, int64_t tile, int64_t tiles) {
    int64_t column = panel * PANEL, width = MIN(PANEL, a->outputs - column);
    const char *w = a->weight + (panel * a->inputs + k) * PANEL * BYTES[kind];
    int64_t next_step = PANEL * BYTES[kind] / tiles;
    const char *next = tiles == 1 ? w + AHEAD : w + (a->inputs * tiles + n * tile) * next_step;
    float *out = a->out + row * a->outputs + column, edge[MAX_ROWS * PANEL], *y = width < PANEL ? edge : out;
    int64_t y_stride = width < PANEL ? PANEL : a->outputs;
    if (y == edge && k)
        for (int r = 0; r < rows; r++) memcpy(edge + r * PANEL, out + r * a->outputs, width * sizeof(float));
    if (kind == FP32)
        WITH_ROWS(rows, linear_tile, FP32, x, x_stride, w, n, next, next_step, y, y_stride, k == 0)
    else if (kind == BF16)
        WITH_ROWS(rows, linear_tile, BF16, x, x_stride, w, n, next, next_step, y, y_stride, k == 0)
    else
        WITH_ROWS(rows, linear_tile, INT8, x, x_stride, w, n, next, next_step, y, y_stride, k == 0)
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
        if (copies)
            for (int64_t r = row; r < end; r++) memcpy(copy + (r - row) * stride, x + (r - row) * a->inputs, n * sizeof(float));
        for (int64_t p = panel; p < last; p++)
            for (int64_t t = 0; t < tiles; t++) {
                int64_t first = (end - row) * t / tiles, rows = (end - row) * (t + 1) / tiles - first;
                linear_panel(a, kind, rows, (copies ? copy : x) + first * stride, stride, row + first, p, k, n, t, tiles);
            }
    }
}

static void norm_row(const float *restrict x, const float *restrict weight, float *restrict out, int64_t n, float eps) {
    float scale = 1.0f / sqrtf(dot(x, x, n) / (float)n + eps);
    for (int64_t i = 0; i < n; i++) out[i] = x[i] * scale * weight[i];
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

/* Adds y to out, or applies the activation to rows [gate, up] of y; n outputs in a row of `out`. Called by all threads. */
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
            for (int64_t row = 0; row < rows; row++) norm_row(x + row * inputs, norm, normed + row * inputs, inputs, eps);
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

/* The KV cache of a layer: keys as [block][kv_head][head_dim][BLOCK], values as [block][kv_head][BLOCK][value_stride],
where value_stride is head_dim rounded up to a multiple of PANEL, the rest zero. */
typedef struct {
    float *keys, *values;
    int64_t kv_heads, head_dim, value_stride;
} Cache;

static Cache cache_of(float *keys, float *values, int64_t kv_heads, int64_t head_dim) {
    return (Cache){keys, values, kv_heads, head_dim, (head_dim + PANEL - 1) / PANEL * PANEL};
}

static float *keys_of(const Cache *c, int64_t block, int64_t kv_head) {
    return c->keys + (block * c->kv_heads + kv_head) * c->head_dim * BLOCK;
}

static float *values_of(const Cache *c, int64_t block, int64_t kv_head) {
    return c->values + (block * c->kv_heads + kv_head) * c->value_stride * BLOCK;
}

/* Rows of qkv are [heads of q, of k, of v]. q and k are normed (unless the norms are NULL) and rotated, the first half of
`rotary` against the second; q goes to `query`, k and v into the cache's slots. */
void rope_store(const float *qkv, float *query, float *keys, float *values, const int32_t *slots, const int32_t *positions,
                const float *cos, const float *sin, const float *q_norm, const float *k_norm, int64_t tokens, int64_t heads,
                int64_t kv_heads, int64_t head_dim, int64_t rotary, float eps, int threads) {
    Cache cache = cache_of(keys, values, kv_heads, head_dim);
    int64_t half = rotary / 2;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t token = 0; token < tokens; token++) {
        const float *from = qkv + token * (heads + 2 * kv_heads) * head_dim, *v = from + (heads + kv_heads) * head_dim;
        const float *restrict c = cos + positions[token] * half, *restrict s = sin + positions[token] * half;
        int64_t block = slots[token] / BLOCK, offset = slots[token] % BLOCK;
        for (int64_t head = 0; head < heads + kv_heads; head++) {
            float x[MAX_HEAD_DIM], y[MAX_HEAD_DIM];
            const float *norm = head < heads ? q_norm : k_norm;
            if (norm)
                norm_row(from + head * head_dim, norm, x, head_dim, eps);
            else
                memcpy(x, from + head * head_dim, head_dim * sizeof(float));
            for (int64_t i = 0; i < half; i++) y[i] = x[i] * c[i] - x[i + half] * s[i];
            for (int64_t i = 0; i < half; i++) y[i + half] = x[i + half] * c[i] + x[i] * s[i];
            memcpy(y + rotary, x + rotary, (head_dim - rotary) * sizeof(float));
            if (head < heads)
                memcpy(query + (token * heads + head) * head_dim, y, head_dim * sizeof(float));
            else {
                float *to = keys_of(&cache, block, head - heads) + offset;
                for (int64_t i = 0; i < head_dim; i++) to[i * BLOCK] = y[i];
            }
        }
        for (int64_t head = 0; head < kv_heads; head++)
            memcpy(values_of(&cache, block, head) + offset * cache.value_stride, v + head * head_dim, head_dim * sizeof(float));
    }
}

typedef struct {
    const float *query;
    float *out;
    Cache cache;
    const int32_t *block_table, *starts, *context;
    int64_t table_stride, heads, window;
    float scale;
} Attention;

/* Rows of one sequence and one KV head; row r is query r / group of the sequence, and head r % group of the KV head's. */
typedef struct {
    int64_t sequence, kv_head, row, rows;
    int64_t begin, end; /* of the positions that its rows see */
    int64_t job;        /* number of chunks of all tiles before it */
} Tile;

static int64_t position_of(const Attention *a, int64_t sequence, int64_t row) {
    int64_t queries = a->starts[sequence + 1] - a->starts[sequence];
    return a->context[sequence] - queries + row / (a->heads / a->cache.kv_heads);
}

static int64_t first_seen(const Attention *a, int64_t position) { return MAX(0, position + 1 - a->window); }

static int64_t head_offset(const Attention *a, const Tile *tile, int64_t row) {
    int64_t group = a->heads / a->cache.kv_heads, index = tile->row + row;
    return ((a->starts[tile->sequence] + index / group) * a->heads + tile->kv_head * group + index % group) *
           a->cache.head_dim;
}

/* One tile over the positions of one chunk. `partial` gets, for each of MAX_ROWS rows, the largest score, then the sums of
exp(score - largest) (0: no position was seen), then the values weighted by these, value_stride floats a row. */
INLINE void attend_chunk(int rows, const Attention *a, const Tile *tile, int64_t chunk, float *partial) {
    const Cache *c = &a->cache;
    float query[MAX_ROWS * MAX_HEAD_DIM], scores[MAX_ROWS * CHUNK] __attribute__((aligned(64)));
    int64_t begin = MAX(tile->begin, chunk * CHUNK), end = MIN(tile->end, (chunk + 1) * CHUNK);
    const int32_t *blocks = a->block_table + tile->sequence * a->table_stride;
    int64_t base = chunk * CHUNK, last = (tile->end - 1) / BLOCK;
    for (int row = 0; row < rows; row++) {
        const float *restrict from = a->query + head_offset(a, tile, row);
        float *restrict to = query + row * c->head_dim;
        for (int64_t i = 0; i < c->head_dim; i++) to[i] = from[i] * a->scale;
    }
    for (int64_t block = begin / BLOCK; block * BLOCK < end; block++)
        for (int64_t t = 0; t < BLOCK; t += KEY_VECTORS * WIDTH) {
            vec sums[MAX_ROWS][2] = {0};
            const float *keys = keys_of(c, blocks[block], tile->kv_head) + t;
            const float *next = keys_of(c, blocks[MIN(block + 1, last)], tile->kv_head) + t;
            multiply_add(rows, KEY_VECTORS, FP32, sums, query, c->head_dim, (const char *)keys, 4 * BLOCK, c->head_dim,
                         (const char *)next, 4 * BLOCK);
#pragma GCC unroll 16
            for (int row = 0; row < rows; row++)
                for (int v = 0; v < KEY_VECTORS; v++)
                    *(vec *)(scores + row * CHUNK + block * BLOCK % CHUNK + t + v * WIDTH) = sums[row][v];
        }
    for (int row = 0; row < rows; row++) {
        float *s = scores + row * CHUNK - base, lanes[LANES] = {0}; /* by position */
        int64_t position = position_of(a, tile->sequence, tile->row + row);
        int64_t from = MIN(end, MAX(begin, first_seen(a, position))), to = MAX(from, MIN(end, position + 1));
        for (int64_t i = begin; i < from; i++) s[i] = 0.0f;
        for (int64_t i = to; i < end; i++) s[i] = 0.0f;
        float most = from < to ? maximum(s + from, to - from) : 0.0f;
        for (int64_t i = from; i < to; i++) s[i] = within_range_of_exp(s[i] - most);
        for (int64_t i = from; i < to; i++) s[i] = exp_f32(s[i]);
        int64_t i = from;
        for (; i + LANES <= to; i += LANES)
            for (int l = 0; l < LANES; l++) lanes[l] += s[i + l];
        for (int l = 0; i + l < to; l++) lanes[l] += s[i + l];
        partial[row] = most;
        partial[MAX_ROWS + row] = sum_lanes(lanes);
    }
    for (int64_t i = 0; i < c->value_stride; i += PANEL) {
        vec sums[MAX_ROWS][2] = {0};
        for (int64_t t = begin; t < end; t = (t / BLOCK + 1) * BLOCK) {
            const float *values = values_of(c, blocks[t / BLOCK], tile->kv_head) + t % BLOCK * c->value_stride + i;
            const float *next = values_of(c, blocks[MIN(t / BLOCK + 1, last)], tile->kv_head) + i;
            multiply_add(rows, 2, FP32, sums, scores + t - base, CHUNK, (const char *)values, 4 * c->value_stride,
                         MIN(BLOCK - t % BLOCK, end - t), (const char *)next, 4 * c->value_stride);
        }
#pragma GCC unroll 16
        for (int row = 0; row < rows; row++)
            for (int v = 0; v < 2; v++)
                ((unaligned_vec *)(partial + 2 * MAX_ROWS + row * c->value_stride + i))[v] = sums[row][v];
    }
}

static void attend(const Attention *a, const Tile *tile, int64_t chunk, float *partial) {
    WITH_ROWS(tile->rows, attend_chunk, a, tile, chunk, partial)
}

static void merge(const Attention *a, const Tile *tile, float *state, const float *partial) {
    int64_t n = a->cache.value_stride;
    for (int64_t row = 0; row < tile->rows; row++) {
        float most = state[row], sum = state[MAX_ROWS + row], other = partial[row], other_sum = partial[MAX_ROWS + row];
        float *restrict to = state + 2 * MAX_ROWS + row * n, largest = MAX(most, other);
        const float *restrict from = partial + 2 * MAX_ROWS + row * n;
        if (other_sum == 0.0f) continue;
        if (sum == 0.0f) {
            state[row] = other, state[MAX_ROWS + row] = other_sum;
            memcpy(to, from, n * sizeof(float));
            continue;
        }
        float keep = exp_f32(within_range_of_exp(most - largest)), add = exp_f32(within_range_of_exp(other - largest));
        state[row] = largest, state[MAX_ROWS + row] = MULTIPLY_ADD(sum, keep, other_sum * add);
        for (int64_t i = 0; i < n; i++) to[i] = MULTIPLY_ADD(to[i], keep, from[i] * add);
    }
}

static void write_rows(const Attention *a, const Tile *tile, const float *state) {
    for (int64_t row = 0; row < tile->rows; row++) {
        float *restrict to = a->out + head_offset(a, tile, row), sum = state[MAX_ROWS + row];
        const float *restrict from = state + 2 * MAX_ROWS + row * a->cache.value_stride;
        for (int64_t i = 0; i < a->cache.head_dim; i++) to[i] = from[i] / sum;
    }
}

static int64_t chunks_of(const Tile *tile) { return (tile->end - 1) / CHUNK - tile->begin / CHUNK + 1; }

/* Every tile of the batch; their number. `tiles` may be NULL. */
static int64_t list_tiles(const Attention *a, int64_t sequences, Tile *tiles) {
    int64_t count = 0, job = 0, group = a->heads / a->cache.kv_heads;
    for (int64_t s = 0; s < sequences; s++) {
        int64_t all = (a->starts[s + 1] - a->starts[s]) * group;
        for (int64_t kv_head = 0; kv_head < a->cache.kv_heads; kv_head++)
            for (int64_t row = 0; row < all; row += MAX_ROWS, count++) {
                if (!tiles) continue;
                int64_t rows = MIN(MAX_ROWS, all - row), begin = first_seen(a, position_of(a, s, row));
                tiles[count] = (Tile){s, kv_head, row, rows, begin, position_of(a, s, row + rows - 1) + 1, job};
                job += chunks_of(&tiles[count]);
            }
    }
    return count;
}

/* A thread computes a tile, chunk by chunk; of few tiles it computes one chunk, and they are merged afterwards. */
void attention(const float *query, float *keys, float *values, float *out, const int32_t *block_table,
               const int32_t *starts, const int32_t *context, int64_t sequences, int64_t table_stride, int64_t heads,
               int64_t kv_heads, int64_t head_dim, int64_t window, float scale, int threads) {
    Cache cache = cache_of(keys, values, kv_heads, head_dim);
    Attention a = {query, out, cache, block_table, starts, context, table_stride, heads, window, scale};
    int64_t count = list_tiles(&a, sequences, NULL), size = MAX_ROWS * (2 + cache.value_stride);
    Tile *tiles = malloc((count + 1) * sizeof(Tile));
    list_tiles(&a, sequences, tiles);
    int64_t jobs = count ? tiles[count - 1].job + chunks_of(&tiles[count - 1]) : 0;
    float *partials = threads > 1 && count < 4 * threads && jobs > count ? malloc(jobs * size * sizeof(float)) : NULL;
#pragma omp parallel num_threads(threads)
    {
        if (partials) {
#pragma omp for schedule(dynamic)
            for (int64_t job = 0; job < jobs; job++) {
                const Tile *tile = tiles;
                while (job >= tile->job + chunks_of(tile)) tile++;
                attend(&a, tile, tile->begin / CHUNK + job - tile->job, partials + job * size);
            }
        }
#pragma omp for schedule(dynamic)
        for (int64_t i = 0; i < count; i++) {
            const Tile *tile = &tiles[i];
            float state[MAX_ROWS * (2 + MAX_HEAD_DIM)], own[MAX_ROWS * (2 + MAX_HEAD_DIM)];
            memset(state, 0, 2 * MAX_ROWS * sizeof(float));
            for (int64_t chunk = 0; chunk < chunks_of(tile); chunk++) {
                if (!partials) attend(&a, tile, tile->begin / CHUNK + chunk, own);
                merge(&a, tile, state, partials ? partials + (tile->job + chunk) * size : own);
            }
            write_rows(&a, tile, state);
        }
    }
    free(partials);
    free(tiles);
}
