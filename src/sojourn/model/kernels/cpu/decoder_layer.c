/* A decoder layer like Llama's, forward and backward, in one call each.

A thread takes a block of rows through norm, matrices, RoPE and SwiGLU while they are in its caches. Attention lies
between, and the gradients of weights, of which a thread computes a part for all rows: for that part of the MLP's
features, gradients of gate and up with it. Results do not depend on the number of threads: every sum has one order.
Tensors are contiguous; tokens of all documents lie end to end. */

#include "kernels.h"
#include "matmul.h"

#include <omp.h>

#define ROWS_IN_CACHE 96 /* of a block at most; a multiple of ROWS_PER_SUM */
#define FEATURES 192     /* of the MLP, and */
#define OUTPUTS 128      /* of a projection, whose gradients one thread computes at a time; multiples of PANEL */

typedef struct {
    int64_t tokens, size, heads, kv_heads, head_size, ffn, documents, longest;
} Sizes; /* as in library.py */

enum { Q, K, V, O, GATE, UP, DOWN, MATRICES };

/* A weight (outputs, inputs), its panels, and its gradient. */
typedef struct {
    const float *weight;
    int64_t outputs, inputs;
    float *panels, *grad;
} Matrix;

static void describe(Matrix *matrices, const float *const *weights, const Sizes *s) {
    int64_t q = s->heads * s->head_size, kv = s->kv_heads * s->head_size, d = s->size, f = s->ffn;
    int64_t outputs[] = {q, kv, kv, d, f, f, d}, inputs[] = {d, d, d, q, d, d, f};
    for (int i = 0; i < MATRICES; i++)
        matrices[i] = (Matrix){.weight = weights[i], .outputs = outputs[i], .inputs = inputs[i]};
}

/* Panels for the forward: of the transposed weights. For all threads. */
static void pack_transposed_weights(const Matrix *matrices) {
    for (int i = 0; i < MATRICES; i++) {
        const Matrix *a = matrices + i;
#pragma omp for schedule(static) nowait
        for (int64_t panel = 0; panel < panels_of(a->outputs); panel++)
            pack_transposed(a->panels, a->weight, a->inputs, a->outputs, panel, panel + 1);
    }
#pragma omp barrier
}

/* Panels for the backward. */
static void pack_weights(const Matrix *matrices) {
#pragma omp for schedule(dynamic)
    for (int i = 0; i < DOWN; i++) {
        const Matrix *a = matrices + i;
        pack(a->panels, a->weight, a->inputs, a->outputs, a->inputs);
    }
}

/* As many for every thread, where that is possible. */
static int64_t rows_of_a_block(int64_t tokens, int threads) {
    int64_t blocks = (tokens + ROWS_IN_CACHE - 1) / ROWS_IN_CACHE;
    blocks = (blocks + threads - 1) / threads * threads;
    int64_t rows = (tokens + blocks - 1) / blocks;
    return MAX((rows + ROWS_PER_SUM - 1) / ROWS_PER_SUM, 1) * ROWS_PER_SUM;
}

/* y = x W^T, or +=, for `rows` of x. */
static void linear(const Matrix *a, float *y, const float *x, int64_t rows, int add) {
    matmul(y, a->outputs, x, a->inputs, 1, a->panels, rows, a->outputs, a->inputs, add);
}

/* The gradient of x, or += it, from that of y. */
static void linear_backward(const Matrix *a, float *grad_x, const float *grad_y, int64_t rows, int add) {
    matmul(grad_x, a->inputs, grad_y, a->outputs, 1, a->panels, rows, a->inputs, a->outputs, add);
}

static void rope_rows(float *x, const float *cos, const float *sin, int64_t rows, int64_t heads, int64_t n,
                      float sign) {
    for (int64_t row = 0; row < rows; row++, x += heads * n, cos += n, sin += n)
        rope_token(x, n, cos, sin, x, n, heads, n, sign);
}

/* Memory of the calling thread, kept for its next call: what is returned to the system must be cleared again. */
static float *scratch_memory(int64_t floats) {
    static _Thread_local float *memory;
    static _Thread_local int64_t size;
    if (floats > size) {
        free(memory);
        memory = allocate(floats), size = floats;
    }
    return memory;
}

/* The next `floats` of it, in whole cache lines. */
static float *take(float **memory, int64_t floats) {
    float *taken = *memory;
    *memory += (floats + LANES - 1) / LANES * LANES;
    return taken;
}

typedef struct {
    const float *x, *cos, *sin, *norm_1, *norm_2, *weights[MATRICES];
    float *scale_1, *query, *key, *value, *attended, *lse, *x2, *scale_2, *gate, *up, *out;
} Forward; /* as in library.py */

void decoder_layer_forward(const Forward *t, const Sizes *s, const int32_t *starts, float eps_1, float eps_2,
                           float scale, int threads) {
    int64_t block = rows_of_a_block(s->tokens, threads), d = s->size, f = s->ffn;
    int64_t q = s->heads * s->head_size, kv = s->kv_heads * s->head_size;
    Matrix matrices[MATRICES];
    describe(matrices, t->weights, s);
    int64_t own = block * (d + f), size = threads * own + MATRICES * LANES; /* own: of a thread */
    for (int i = 0; i < MATRICES; i++) size += packed_size(matrices[i].inputs, matrices[i].outputs);
    float *memory = scratch_memory(size);
    for (int i = 0; i < MATRICES; i++)
        matrices[i].panels = take(&memory, packed_size(matrices[i].inputs, matrices[i].outputs));
#pragma omp parallel num_threads(threads)
    {
        float *own_memory = memory + omp_get_thread_num() * own;
        float *normed = take(&own_memory, block * d), *activated = take(&own_memory, block * f);
        pack_transposed_weights(matrices);
#pragma omp for schedule(dynamic)
        for (int64_t row = 0; row < s->tokens; row += block) {
            int64_t rows = MIN(block, s->tokens - row);
            const float *cos = t->cos + row * s->head_size, *sin = t->sin + row * s->head_size;
            rms_norm_rows(t->x + row * d, t->norm_1, normed, t->scale_1 + row, rows, d, eps_1);
            linear(matrices + Q, t->query + row * q, normed, rows, 0);
            linear(matrices + K, t->key + row * kv, normed, rows, 0);
            linear(matrices + V, t->value + row * kv, normed, rows, 0);
            rope_rows(t->query + row * q, cos, sin, rows, s->heads, s->head_size, 1.0f);
            rope_rows(t->key + row * kv, cos, sin, rows, s->kv_heads, s->head_size, 1.0f);
        }
        attention_forward_part(t->query, t->key, t->value, t->attended, t->lse, starts, s->documents, s->longest,
                               s->heads, s->kv_heads, s->head_size, scale);
#pragma omp for schedule(dynamic)
        for (int64_t row = 0; row < s->tokens; row += block) {
            int64_t rows = MIN(block, s->tokens - row);
            float *x2 = t->x2 + row * d, *out = t->out + row * d, *gate = t->gate + row * f, *up = t->up + row * f;
            memcpy(x2, t->x + row * d, rows * d * sizeof(float));
            linear(matrices + O, x2, t->attended + row * q, rows, 1);
            rms_norm_rows(x2, t->norm_2, normed, t->scale_2 + row, rows, d, eps_2);
            linear(matrices + GATE, gate, normed, rows, 0);
            linear(matrices + UP, up, normed, rows, 0);
            for (int64_t i = 0; i < rows * f; i += BLOCK)
                swiglu_block(gate + i, up + i, activated + i, MIN(BLOCK, rows * f - i));
            memcpy(out, x2, rows * d * sizeof(float));
            linear(matrices + DOWN, out, activated, rows, 1);
        }
    }
}

/* RMSNorm with the scales that the forward has saved. */
static void norm_again(float *normed, const float *x, const float *weight, const float *scale, int64_t rows,
                       int64_t n) {
    for (int64_t row = 0; row < rows; row++)
        for (int64_t i = 0; i < n; i++) normed[row * n + i] = x[row * n + i] * scale[row] * weight[i];
}

/* `partial`: as rms_norm_backward has it, of these rows. */
static void norm_backward(const float *grad, const float *x, const float *weight, const float *scale,
                          const float *residual_grad, float *grad_x, float *partial, int64_t rows, int64_t n) {
    for (int64_t row = 0; row < rows; row += ROWS_PER_SUM, partial += n)
        rms_norm_rows_backward(grad + row * n, x + row * n, weight, scale + row, residual_grad + row * n,
                               grad_x + row * n, partial, MIN(ROWS_PER_SUM, rows - row), n);
}

static void sum_rows(float *restrict out, const float *partial, int64_t rows, int64_t n) {
    memcpy(out, partial, n * sizeof(float));
    for (int64_t row = 1; row < rows; row++)
        for (int64_t i = 0; i < n; i++) out[i] += partial[row * n + i];
}

typedef struct {
    const float *grad, *x, *cos, *sin, *norm_1, *norm_2, *weights[MATRICES];
    const float *scale_1, *query, *key, *value, *attended, *lse, *x2, *scale_2;
    float *gate, *up; /* become their own gradients */
    float *grad_x, *grad_norm_1, *grad_norm_2, *grads[MATRICES];
} Backward; /* as in library.py */

/* The MLP's features from `first`, for all rows: gradients of gate and up in their place, and of the weights. */
static void mlp_features_backward(const Backward *t, const Sizes *s, const Matrix *matrices, float *memory,
                                  int64_t first, int64_t features) {
    int64_t n = s->tokens, d = s->size, f = s->ffn;
    float *down = take(&memory, packed_size(d, features)), *activated = take(&memory, ROWS_IN_CACHE * features);
    float *normed = take(&memory, ROWS_IN_CACHE * d), *normed_panels = take(&memory, packed_size(ROWS_IN_CACHE, d));
    float *grad_panels = take(&memory, packed_size(ROWS_IN_CACHE, d));
    float *panels = take(&memory, packed_size(ROWS_IN_CACHE, features));
    pack(down, matrices[DOWN].weight + first, f, d, features);
    for (int64_t row = 0; row < n; row += ROWS_IN_CACHE) {
        int64_t rows = MIN(ROWS_IN_CACHE, n - row);
        const float *grad = t->grad + row * d;
        float *gate = t->gate + row * f + first, *up = t->up + row * f + first;
        matmul(activated, features, grad, d, 1, down, rows, features, d, 0); /* the gradient of `activated` */
        for (int64_t i = 0; i < rows; i++)
            for (int64_t j = 0; j < features; j += BLOCK)
                swiglu_backward_block(activated + i * features + j, gate + i * f + j, up + i * f + j,
                                      MIN(BLOCK, features - j));
        pack(panels, activated, features, rows, features);
        pack(grad_panels, grad, d, rows, d);
        for (int64_t panel = 0; panel < panels_of(d); panel++)
            matmul(matrices[DOWN].grad + panel * PANEL * f + first, f, grad_panels + panel * PANEL * rows, 1, PANEL,
                   panels, MIN(PANEL, d - panel * PANEL), features, rows, row > 0);
        norm_again(normed, t->x2 + row * d, t->norm_2, t->scale_2 + row, rows, d);
        pack(normed_panels, normed, d, rows, d);
        for (int i = GATE; i <= UP; i++) {
            pack(panels, i == GATE ? gate : up, f, rows, features);
            for (int64_t panel = 0; panel < panels_of(features); panel++)
                matmul(matrices[i].grad + (first + panel * PANEL) * d, d, panels + panel * PANEL * rows, 1, PANEL,
                       normed_panels, MIN(PANEL, features - panel * PANEL), d, rows, row > 0);
        }
    }
}

/* The gradients of some outputs of a weight, by panels of these and of its inputs. */
static void weight_grad(const Matrix *a, const float *grad, const float *input, const float *norm, const float *scale,
                        float *memory, int64_t first, int64_t outputs, int64_t tokens) {
    float *normed = take(&memory, ROWS_IN_CACHE * a->inputs);
    float *input_panels = take(&memory, packed_size(ROWS_IN_CACHE, a->inputs));
    float *grad_panels = take(&memory, packed_size(ROWS_IN_CACHE, outputs));
    for (int64_t row = 0; row < tokens; row += ROWS_IN_CACHE) {
        int64_t rows = MIN(ROWS_IN_CACHE, tokens - row);
        const float *x = input + row * a->inputs;
        if (norm) {
            norm_again(normed, x, norm, scale + row, rows, a->inputs);
            x = normed;
        }
        pack(input_panels, x, a->inputs, rows, a->inputs);
        pack(grad_panels, grad + row * a->outputs + first, a->outputs, rows, outputs);
        for (int64_t panel = 0; panel < panels_of(outputs); panel++)
            matmul(a->grad + (first + panel * PANEL) * a->inputs, a->inputs, grad_panels + panel * PANEL * rows, 1,
                   PANEL, input_panels, MIN(PANEL, outputs - panel * PANEL), a->inputs, rows, row > 0);
    }
}

void decoder_layer_backward(const Backward *t, const Sizes *s, const int32_t *starts, float scale, int threads) {
    int64_t block = rows_of_a_block(s->tokens, threads), n = s->tokens, d = s->size, f = s->ffn;
    int64_t q = s->heads * s->head_size, kv = s->kv_heads * s->head_size, sums = (n + ROWS_PER_SUM - 1) / ROWS_PER_SUM;
    int64_t most = MAX(q, d);
    Matrix matrices[MATRICES];
    describe(matrices, t->weights, s);
    /* of a thread: */
    int64_t own = packed_size(d, FEATURES) + ROWS_IN_CACHE * (2 * FEATURES + 3 * (most + PANEL) + OUTPUTS);
    int64_t size = threads * own + n * (d + 2 * q + 2 * kv) + 2 * sums * d + 2 * MATRICES * LANES;
    for (int i = 0; i < MATRICES; i++) size += packed_size(matrices[i].outputs, matrices[i].inputs);
    float *memory = scratch_memory(size);
    for (int i = 0; i < MATRICES; i++) {
        matrices[i].panels = take(&memory, packed_size(matrices[i].outputs, matrices[i].inputs));
        matrices[i].grad = t->grads[i];
    }
    float *grad_x2 = take(&memory, n * d), *grad_attended = take(&memory, n * q);
    float *grad_query = take(&memory, n * q), *grad_key = take(&memory, n * kv);
    float *grad_value = take(&memory, n * kv);
    float *partial_1 = take(&memory, sums * d), *partial_2 = take(&memory, sums * d);
#pragma omp parallel num_threads(threads)
    {
        float *own_memory = memory + omp_get_thread_num() * own, *grad_normed = own_memory;
#pragma omp for schedule(dynamic)
        for (int64_t first = 0; first < f; first += FEATURES)
            mlp_features_backward(t, s, matrices, own_memory, first, MIN(FEATURES, f - first));
        pack_weights(matrices);
#pragma omp for schedule(dynamic)
        for (int64_t row = 0; row < n; row += block) {
            int64_t rows = MIN(block, n - row);
            linear_backward(matrices + GATE, grad_normed, t->gate + row * f, rows, 0);
            linear_backward(matrices + UP, grad_normed, t->up + row * f, rows, 1);
            norm_backward(grad_normed, t->x2 + row * d, t->norm_2, t->scale_2 + row, t->grad + row * d,
                          grad_x2 + row * d, partial_2 + row / ROWS_PER_SUM * d, rows, d);
            linear_backward(matrices + O, grad_attended + row * q, grad_x2 + row * d, rows, 0);
        }
        attention_backward_part(grad_attended, t->query, t->key, t->value, t->lse, grad_query, grad_key, grad_value,
                                starts, s->documents, s->longest, s->heads, s->kv_heads, s->head_size, scale);
#pragma omp for schedule(dynamic)
        for (int64_t row = 0; row < n; row += block) {
            int64_t rows = MIN(block, n - row);
            const float *cos = t->cos + row * s->head_size, *sin = t->sin + row * s->head_size;
            rope_rows(grad_query + row * q, cos, sin, rows, s->heads, s->head_size, -1.0f);
            rope_rows(grad_key + row * kv, cos, sin, rows, s->kv_heads, s->head_size, -1.0f);
            linear_backward(matrices + Q, grad_normed, grad_query + row * q, rows, 0);
            linear_backward(matrices + K, grad_normed, grad_key + row * kv, rows, 1);
            linear_backward(matrices + V, grad_normed, grad_value + row * kv, rows, 1);
            norm_backward(grad_normed, t->x + row * d, t->norm_1, t->scale_1 + row, grad_x2 + row * d,
                          t->grad_x + row * d, partial_1 + row / ROWS_PER_SUM * d, rows, d);
        }
        const float *grads[] = {grad_query, grad_key, grad_value, grad_x2};
        for (int i = Q; i <= O; i++) {
            const Matrix *a = matrices + i;
#pragma omp for schedule(dynamic) nowait
            for (int64_t first = 0; first < a->outputs; first += OUTPUTS)
                weight_grad(a, grads[i], i == O ? t->attended : t->x, i == O ? NULL : t->norm_1, t->scale_1, own_memory,
                            first, MIN(OUTPUTS, a->outputs - first), n);
        }
#pragma omp single nowait
        sum_rows(t->grad_norm_1, partial_1, sums, d);
#pragma omp single nowait
        sum_rows(t->grad_norm_2, partial_2, sums, d);
    }
}
