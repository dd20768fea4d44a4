/* What decoder_layer.c takes from kernels.c and attention.c: passes over some rows by one thread, and attention by the
threads of a parallel region. */

#pragma once

#include "vector_math.h"

#define ROWS_PER_SUM 32 /* of a partial gradient of the weight; as in library.py */
#define BLOCK 1024      /* elements that a thread takes at a time */

void rms_norm_rows(const float *x, const float *weight, float *out, float *scale, int64_t rows, int64_t n, float eps);

/* At most ROWS_PER_SUM rows. `residual_grad` is added to `grad_x`; `sums`: the gradient of the weight. Both may be
NULL. */
void rms_norm_rows_backward(const float *grad, const float *x, const float *weight, const float *scale,
                            const float *residual_grad, float *grad_x, float *sums, int64_t rows, int64_t n);

/* At most BLOCK elements. */
void swiglu_block(const float *gate, const float *up, float *out, int64_t n);
void swiglu_backward_block(float *grad_out, float *gate_out, float *up_out, int64_t n);

/* The loss; logits become its gradient. With a label below 0 there is neither. */
float cross_entropy_row(float *logits, int64_t label, int64_t n);

/* The heads of one token. `x` and `out` may be the same. */
void rope_token(const float *x, int64_t x_stride, const float *cos, const float *sin, float *out, int64_t out_stride,
                int64_t heads, int64_t n, float sign);

void attention_forward_part(const float *q, const float *k, const float *v, float *out, float *lse,
                            const int32_t *starts, int64_t documents, int64_t longest, int64_t heads, int64_t kv_heads,
                            int64_t n, float scale);
void attention_backward_part(const float *grad, const float *q, const float *k, const float *v, const float *lse,
                             float *grad_q, float *grad_k, float *grad_v, const int32_t *starts, int64_t documents,
                             int64_t longest, int64_t heads, int64_t kv_heads, int64_t n, float scale);
