/* Decoder layers like Llama's, forward and backward: one in a call, or all with embedding and final norm.

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
#define HEAD_OUTPUTS 64  /* of the LM head, likewise */

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
} Forward;

/* `weights` of a layer: as layer_on_cpu has them. `saved`: what its backward needs. */
static Forward forward_of(const float *x, const float *cos, const float *sin, const float *const *weights, float *saved,
                          float *out, const Sizes *s) {
    int64_t n = s->tokens, q = n * s->heads * s->head_size, kv = n * s->kv_heads * s->head_size;
    Forward t = {.x = x, .cos = cos, .sin = sin, .norm_1 = weights[0], .norm_2 = weights[5], .out = out};
    for (int i = 0; i < MATRICES; i++) t.weights[i] = weights[i < 4 ? i + 1 : i + 2];
    t.scale_1 = saved, t.query = t.scale_1 + n, t.key = t.query + q, t.value = t.key + kv, t.attended = t.value + kv;
    t.lse = t.attended + q, t.x2 = t.lse + n * s->heads, t.scale_2 = t.x2 + n * s->size, t.gate = t.scale_2 + n;
    t.up = t.gate + n * s->ffn;
    return t;
}

/* Of the layers of a decoder, which are alike. */
typedef struct {
    const Sizes *sizes;
    const int32_t *starts; /* of the documents, and the end of the last */
    const float *eps;      /* of both norms, layer by layer */
    float scale;
    int threads;
} Settings;

/* Scratch memory that layers use one after another; `own`: floats of a thread, which lie in `threads`. */
typedef struct {
    float *panels[MATRICES], *threads;
    int64_t own;
    float *grad_x2, *grad_attended, *grad_query, *grad_key, *grad_value, *partial_1, *partial_2; /* of a backward */
} Scratch;

static Scratch forward_scratch(const Settings *settings) {
    const Sizes *s = settings->sizes;
    Matrix matrices[MATRICES];
    describe(matrices, (const float *[MATRICES]){0}, s);
    Scratch scratch = {.own = rows_of_a_block(s->tokens, settings->threads) * (s->size + s->ffn)};
    int64_t size = settings->threads * scratch.own + MATRICES * LANES;
    for (int i = 0; i < MATRICES; i++) size += packed_size(matrices[i].inputs, matrices[i].outputs);
    float *memory = scratch_memory(size);
    for (int i = 0; i < MATRICES; i++)
        scratch.panels[i] = take(&memory, packed_size(matrices[i].inputs, matrices[i].outputs));
    scratch.threads = memory;
    return scratch;
}

/* By all threads of a parallel region. */
static void layer_forward(const Forward *t, const Settings *settings, const float *eps, const Scratch *scratch) {
    const Sizes *s = settings->sizes;
    int64_t block = rows_of_a_block(s->tokens, settings->threads), d = s->size, f = s->ffn;
    int64_t q = s->heads * s->head_size, kv = s->kv_heads * s->head_size;
    Matrix matrices[MATRICES];
    describe(matrices, t->weights, s);
    for (int i = 0; i < MATRICES; i++) matrices[i].panels = scratch->panels[i];
    float *own_memory = scratch->threads + omp_get_thread_num() * scratch->own;
    float *normed = take(&own_memory, block * d), *activated = take(&own_memory, block * f);
    pack_transposed_weights(matrices);
#pragma omp for schedule(dynamic)
    for (int64_t row = 0; row < s->tokens; row += block) {
        int64_t rows = MIN(block, s->tokens - row);
        const float *cos = t->cos + row * s->head_size, *sin = t->sin + row * s->head_size;
        rms_norm_rows(t->x + row * d, t->norm_1, normed, t->scale_1 + row, rows, d, eps[0]);
        linear(matrices + Q, t->query + row * q, normed, rows, 0);
        linear(matrices + K, t->key + row * kv, normed, rows, 0);
        linear(matrices + V, t->value + row * kv, normed, rows, 0);
        rope_rows(t->query + row * q, cos, sin, rows, s->heads, s->head_size, 1.0f);
        rope_rows(t->key + row * kv, cos, sin, rows, s->kv_heads, s->head_size, 1.0f);
    }
    attention_forward_part(t->query, t->key, t->value, t->attended, t->lse, settings->starts, s->documents, s->longest,
                           s->heads, s->kv_heads, s->head_size, settings->scale);
#pragma omp for schedule(dynamic)
    for (int64_t row = 0; row < s->tokens; row += block) {
        int64_t rows = MIN(block, s->tokens - row);
        float *x2 = t->x2 + row * d, *out = t->out + row * d, *gate = t->gate + row * f, *up = t->up + row * f;
        memcpy(x2, t->x + row * d, rows * d * sizeof(float));
        linear(matrices + O, x2, t->attended + row * q, rows, 1);
        rms_norm_rows(x2, t->norm_2, normed, t->scale_2 + row, rows, d, eps[1]);
        linear(matrices + GATE, gate, normed, rows, 0);
        linear(matrices + UP, up, normed, rows, 0);
        for (int64_t i = 0; i < rows * f; i += BLOCK)
            swiglu_block(gate + i, up + i, activated + i, MIN(BLOCK, rows * f - i));
        memcpy(out, x2, rows * d * sizeof(float));
        linear(matrices + DOWN, out, activated, rows, 1);
    }
}

void decoder_layer_forward(const float *x, const float *cos, const float *sin, const float *const *weights,
                           float *saved, float *out, const Sizes *s, const int32_t *starts, const float *eps,
                           float scale, int threads) {
    Settings settings = {s, starts, eps, scale, threads};
    Scratch scratch = forward_scratch(&settings);
    Forward layer = forward_of(x, cos, sin, weights, saved, out, s);
#pragma omp parallel num_threads(threads)
    layer_forward(&layer, &settings, eps, &scratch);
}

typedef struct {
    const int64_t *ids, *targets; /* `targets`: tokens whose hidden states are computed, ascending */
    const float *cos, *sin;
    float *x, *scale, *hidden; /* `x`: inputs of the layers and output of the last; those of two, in turns, if not `keep` */
} DecoderForward;              /* as in library.py */

/* Embedding, layers, final norm of the target tokens. `weights`: of these first, then of each layer; `saved`: of each
layer, or one if not `keep`; `eps`: of the norms of each layer, then of the final one. */
void decoder_forward(const DecoderForward *t, const float *const *weights, float *const *saved, int64_t count,
                     const Sizes *s, const int32_t *starts, const float *eps, float scale, int64_t targets, int keep,
                     int threads) {
    Settings settings = {s, starts, eps, scale, threads};
    Scratch scratch = forward_scratch(&settings);
    int64_t d = s->size, turn = keep ? count + 1 : 2;
#pragma omp parallel num_threads(threads)
    {
#pragma omp for schedule(static)
        for (int64_t row = 0; row < s->tokens; row++)
            memcpy(t->x + row * d, weights[0] + t->ids[row] * d, d * sizeof(float));
        for (int64_t i = 0; i < count; i++) {
            float *x = t->x + i % turn * s->tokens * d, *out = t->x + (i + 1) % turn * s->tokens * d;
            Forward layer = forward_of(x, t->cos, t->sin, weights + 2 + 9 * i, saved[keep ? i : 0], out, s);
            layer_forward(&layer, &settings, eps + 2 * i, &scratch);
        }
        const float *last = t->x + count % turn * s->tokens * d;
#pragma omp for schedule(static)
        for (int64_t i = 0; i < targets; i++)
            rms_norm_rows(last + t->targets[i] * d, weights[1], t->hidden + i * d, t->scale + i, 1, d, eps[2 * count]);
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
    Forward saved; /* whose gate and up become their own gradients */
    const float *grad;
    float *grad_x, *grad_norm_1, *grad_norm_2, *grads[MATRICES];
} Backward;

/* `grads`: as `weights`. */
static Backward backward_of(const float *grad, const Forward *saved, float *grad_x, float *const *grads) {
    Backward t = {*saved, grad, grad_x, grads[0], grads[5]};
    for (int i = 0; i < MATRICES; i++) t.grads[i] = grads[i < 4 ? i + 1 : i + 2];
    return t;
}

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
        float *gate = t->saved.gate + row * f + first, *up = t->saved.up + row * f + first;
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
        norm_again(normed, t->saved.x2 + row * d, t->saved.norm_2, t->saved.scale_2 + row, rows, d);
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

static Scratch backward_scratch(const Settings *settings) {
    const Sizes *s = settings->sizes;
    int64_t n = s->tokens, d = s->size, sums = (n + ROWS_PER_SUM - 1) / ROWS_PER_SUM;
    int64_t q = s->heads * s->head_size, kv = s->kv_heads * s->head_size, most = MAX(q, d);
    Matrix matrices[MATRICES];
    describe(matrices, (const float *[MATRICES]){0}, s);
    Scratch scratch = {.own = packed_size(d, FEATURES) + ROWS_IN_CACHE * (2 * FEATURES + 3 * (most + PANEL) + OUTPUTS)};
    int64_t size = settings->threads * scratch.own + n * (d + 2 * q + 2 * kv) + 2 * sums * d + 2 * MATRICES * LANES;
    for (int i = 0; i < MATRICES; i++) size += packed_size(matrices[i].outputs, matrices[i].inputs);
    float *memory = scratch_memory(size);
    for (int i = 0; i < MATRICES; i++)
        scratch.panels[i] = take(&memory, packed_size(matrices[i].outputs, matrices[i].inputs));
    scratch.grad_x2 = take(&memory, n * d), scratch.grad_attended = take(&memory, n * q);
    scratch.grad_query = take(&memory, n * q), scratch.grad_key = take(&memory, n * kv);
    scratch.grad_value = take(&memory, n * kv);
    scratch.partial_1 = take(&memory, sums * d), scratch.partial_2 = take(&memory, sums * d);
    scratch.threads = memory;
    return scratch;
}

/* By all threads of a parallel region. */
static void layer_backward(const Backward *t, const Settings *settings, const Scratch *scratch) {
    const Sizes *s = settings->sizes;
    int64_t block = rows_of_a_block(s->tokens, settings->threads), n = s->tokens, d = s->size, f = s->ffn;
    int64_t q = s->heads * s->head_size, kv = s->kv_heads * s->head_size, sums = (n + ROWS_PER_SUM - 1) / ROWS_PER_SUM;
    Matrix matrices[MATRICES];
    describe(matrices, t->saved.weights, s);
    for (int i = 0; i < MATRICES; i++) matrices[i].panels = scratch->panels[i], matrices[i].grad = t->grads[i];
    float *grad_x2 = scratch->grad_x2, *grad_attended = scratch->grad_attended, *grad_query = scratch->grad_query;
    float *grad_key = scratch->grad_key, *grad_value = scratch->grad_value;
    float *partial_1 = scratch->partial_1, *partial_2 = scratch->partial_2;
    float *own_memory = scratch->threads + omp_get_thread_num() * scratch->own, *grad_normed = own_memory;
#pragma omp for schedule(dynamic)
    for (int64_t first = 0; first < f; first += FEATURES)
        mlp_features_backward(t, s, matrices, own_memory, first, MIN(FEATURES, f - first));
    pack_weights(matrices);
#pragma omp for schedule(dynamic)
    for (int64_t row = 0; row < n; row += block) {
        int64_t rows = MIN(block, n - row);
        linear_backward(matrices + GATE, grad_normed, t->saved.gate + row * f, rows, 0);
        linear_backward(matrices + UP, grad_normed, t->saved.up + row * f, rows, 1);
        norm_backward(grad_normed, t->saved.x2 + row * d, t->saved.norm_2, t->saved.scale_2 + row, t->grad + row * d, grad_x2 + row * d,
                      partial_2 + row / ROWS_PER_SUM * d, rows, d);
        linear_backward(matrices + O, grad_attended + row * q, grad_x2 + row * d, rows, 0);
    }
    attention_backward_part(grad_attended, t->saved.query, t->saved.key, t->saved.value, t->saved.lse, grad_query, grad_key, grad_value,
                            settings->starts, s->documents, s->longest, s->heads, s->kv_heads, s->head_size,
                            settings->scale);
#pragma omp for schedule(dynamic)
    for (int64_t row = 0; row < n; row += block) {
        int64_t rows = MIN(block, n - row);
        const float *cos = t->saved.cos + row * s->head_size, *sin = t->saved.sin + row * s->head_size;
        rope_rows(grad_query + row * q, cos, sin, rows, s->heads, s->head_size, -1.0f);
        rope_rows(grad_key + row * kv, cos, sin, rows, s->kv_heads, s->head_size, -1.0f);
        linear_backward(matrices + Q, grad_normed, grad_query + row * q, rows, 0);
        linear_backward(matrices + K, grad_normed, grad_key + row * kv, rows, 1);
        linear_backward(matrices + V, grad_normed, grad_value + row * kv, rows, 1);
        norm_backward(grad_normed, t->saved.x + row * d, t->saved.norm_1, t->saved.scale_1 + row, grad_x2 + row * d,
                      t->grad_x + row * d, partial_1 + row / ROWS_PER_SUM * d, rows, d);
    }
    const float *grads[] = {grad_query, grad_key, grad_value, grad_x2};
    for (int i = Q; i <= O; i++) {
        const Matrix *a = matrices + i;
#pragma omp for schedule(dynamic) nowait
        for (int64_t first = 0; first < a->outputs; first += OUTPUTS)
            weight_grad(a, grads[i], i == O ? t->saved.attended : t->saved.x, i == O ? NULL : t->saved.norm_1, t->saved.scale_1, own_memory,
                        first, MIN(OUTPUTS, a->outputs - first), n);
    }
#pragma omp single nowait
    sum_rows(t->grad_norm_1, partial_1, sums, d);
#pragma omp single nowait
    sum_rows(t->grad_norm_2, partial_2, sums, d);
#pragma omp barrier
}

void decoder_layer_backward(const float *grad, const float *x, const float *cos, const float *sin,
                            const float *const *weights, float *saved, float *grad_x, float *const *grads,
                            const Sizes *s, const int32_t *starts, float scale, int threads) {
    Settings settings = {s, starts, NULL, scale, threads};
    Scratch scratch = backward_scratch(&settings);
    Forward forward = forward_of(x, cos, sin, weights, saved, NULL, s);
    Backward layer = backward_of(grad, &forward, grad_x, grads);
#pragma omp parallel num_threads(threads)
    layer_backward(&layer, &settings, &scratch);
}

typedef struct {
    DecoderForward forward;
    const float *grad;       /* of the hidden states */
    float *grad_x, *partial; /* `grad_x`: of the inputs of two layers, in turns; `partial`: as rms_norm_backward has it */
} DecoderBackward;           /* as in library.py */

/* The final norm of at most ROWS_PER_SUM target tokens. */
static void final_norm_backward(const DecoderBackward *t, const float *last, const float *norm, float *grad_last,
                                int64_t first, int64_t count, int64_t d, float *memory) {
    const int64_t *targets = t->forward.targets + first;
    float *x = take(&memory, count * d), *grad_x = take(&memory, count * d);
    for (int64_t i = 0; i < count; i++) memcpy(x + i * d, last + targets[i] * d, d * sizeof(float));
    rms_norm_rows_backward(t->grad + first * d, x, norm, t->forward.scale + first, NULL, grad_x,
                           t->partial + first / ROWS_PER_SUM * d, count, d);
    for (int64_t i = 0; i < count; i++) memcpy(grad_last + targets[i] * d, grad_x + i * d, d * sizeof(float));
}

/* Columns of the gradient of the embedding, from those of its outputs. */
static void embedding_backward(float *sums, const float *grad, const int64_t *ids, int64_t tokens, int64_t vocabulary,
                               int64_t padding, int64_t d, int64_t width) {
    for (int64_t id = 0; id < vocabulary; id++) memset(sums + id * d, 0, width * sizeof(float));
    for (int64_t row = 0; row < tokens; row++) {
        float *restrict sum = sums + ids[row] * d;
        const float *restrict part = grad + row * d;
        for (int64_t i = 0; ids[row] != padding && i < width; i++) sum[i] += part[i];
    }
}

/* Of decoder_forward. `padding`: the id whose embedding is not trained, or -1. */
void decoder_backward(const DecoderBackward *t, const float *const *weights, float *const *saved, float *const *grads,
                      int64_t count, const Sizes *s, const int32_t *starts, float scale, int64_t targets,
                      int64_t vocabulary, int64_t padding, int threads) {
    Settings settings = {s, starts, NULL, scale, threads};
    Scratch scratch = backward_scratch(&settings);
    int64_t d = s->size, size = s->tokens * d;
    float *grad_last = t->grad_x + count % 2 * size;
#pragma omp parallel num_threads(threads)
    {
#pragma omp for schedule(static)
        for (int64_t row = 0; row < s->tokens; row++) memset(grad_last + row * d, 0, d * sizeof(float));
#pragma omp for schedule(static)
        for (int64_t i = 0; i < targets; i += ROWS_PER_SUM)
            final_norm_backward(t, t->forward.x + count * size, weights[1], grad_last, i,
                                MIN(ROWS_PER_SUM, targets - i), d,
                                scratch.threads + omp_get_thread_num() * scratch.own);
        for (int64_t i = count - 1; i >= 0; i--) {
            Forward forward = forward_of(t->forward.x + i * size, t->forward.cos, t->forward.sin, weights + 2 + 9 * i,
                                         saved[i], NULL, s);
            Backward layer = backward_of(t->grad_x + (i + 1) % 2 * size, &forward, t->grad_x + i % 2 * size,
                                         grads + 2 + 9 * i);
            layer_backward(&layer, &settings, &scratch);
        }
#pragma omp single nowait
        sum_rows(grads[1], t->partial, (targets + ROWS_PER_SUM - 1) / ROWS_PER_SUM, d);
#pragma omp for schedule(dynamic)
        for (int64_t column = 0; column < d; column += 2 * LANES)
            embedding_backward(grads[0] + column, t->grad_x + column, t->forward.ids, s->tokens, vocabulary, padding, d,
                               MIN(2 * LANES, d - column));
    }
}

/* Logits of an LM head (outputs, inputs) and their losses: `logits` become their gradient, from which come those of the
hidden states and of the head. */
void linear_cross_entropy(const float *hidden, const float *weight, const int64_t *labels, float *logits, float *losses,
                          float *grad_hidden, float *grad_weight, int64_t tokens, int64_t d, int64_t vocabulary,
                          int threads) {
    int64_t block = rows_of_a_block(tokens, threads), forward = packed_size(d, vocabulary);
    int64_t backward = packed_size(vocabulary, d), own = ROWS_IN_CACHE * (2 * d + 2 * PANEL + HEAD_OUTPUTS);
    float *memory = scratch_memory(forward + backward + threads * own + 3 * LANES);
    Matrix head = {.weight = weight, .outputs = vocabulary, .inputs = d, .panels = take(&memory, forward)};
    Matrix transposed = head;
    transposed.panels = take(&memory, backward), transposed.grad = grad_weight;
#pragma omp parallel num_threads(threads)
    {
        float *own_memory = memory + omp_get_thread_num() * own;
#pragma omp for schedule(static) nowait
        for (int64_t panel = 0; panel < panels_of(vocabulary); panel++)
            pack_transposed(head.panels, weight, d, vocabulary, panel, panel + 1);
#pragma omp single
        pack(transposed.panels, weight, d, vocabulary, d);
#pragma omp for schedule(dynamic)
        for (int64_t row = 0; row < tokens; row += block) {
            int64_t rows = MIN(block, tokens - row);
            float *own_logits = logits + row * vocabulary;
            linear(&head, own_logits, hidden + row * d, rows, 0);
            for (int64_t i = 0; i < rows; i++)
                losses[row + i] = cross_entropy_row(own_logits + i * vocabulary, labels[row + i], vocabulary);
            linear_backward(&transposed, grad_hidden + row * d, own_logits, rows, 0);
        }
#pragma omp for schedule(dynamic)
        for (int64_t first = 0; first < vocabulary; first += HEAD_OUTPUTS)
            weight_grad(&transposed, logits, hidden, NULL, NULL, own_memory, first,
                        MIN(HEAD_OUTPUTS, vocabulary - first), tokens);
    }
}
