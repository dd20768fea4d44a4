/* Fused operations of decoder layers and of the loss on a CPU, in fp32: one pass over memory each.

Sums have a fixed order, and the compiler makes no fused multiply-adds of its own (-ffp-contract=off): results depend
neither on the compiler nor on the number of threads. Tensors are contiguous unless strides are given. */

#include "kernels.h"

void rms_norm_rows(const float *x, const float *weight, float *out, float *scale, int64_t rows, int64_t n, float eps) {
    for (int64_t row = 0; row < rows; row++) {
        const float *restrict xs = x + row * n;
        float *restrict ys = out + row * n;
        float s = 1.0f / sqrtf(dot(xs, xs, n) / (float)n + eps);
        scale[row] = s;
        for (int64_t i = 0; i < n; i++) ys[i] = xs[i] * s * weight[i];
    }
}

void rms_norm_forward(const float *x, const float *weight, float *out, float *scale, int64_t rows, int64_t n, float eps,
                      int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t row = 0; row < rows; row++) rms_norm_rows(x + row * n, weight, out + row * n, scale + row, 1, n, eps);
}

void rms_norm_rows_backward(const float *grad, const float *x, const float *weight, const float *scale,
                            const float *residual_grad, float *grad_x, float *sums, int64_t rows, int64_t n) {
    if (sums) memset(sums, 0, n * sizeof(float));
    for (int64_t row = 0; row < rows; row++) {
        const float *restrict gs = grad + row * n, *restrict xs = x + row * n;
        float *restrict ds = grad_x + row * n, *restrict totals = sums;
        float s = scale[row];
        for (int64_t i = 0; i < n; i++) ds[i] = gs[i] * weight[i];
        float c = dot(ds, xs, n) * s * s * s / (float)n;
        if (residual_grad) {
            const float *restrict rs = residual_grad + row * n;
            for (int64_t i = 0; i < n; i++) ds[i] = rs[i] + (ds[i] * s - xs[i] * c);
        } else
            for (int64_t i = 0; i < n; i++) ds[i] = ds[i] * s - xs[i] * c;
        if (sums)
            for (int64_t i = 0; i < n; i++) totals[i] += gs[i] * (xs[i] * s);
    }
}

/* `partial_grad`: of the weight, one row for every ROWS_PER_SUM rows; may be NULL. */
void rms_norm_backward(const float *grad, const float *x, const float *weight, const float *scale,
                       const float *residual_grad, float *grad_x, float *partial_grad, int64_t rows, int64_t n,
                       int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t first = 0; first < rows; first += ROWS_PER_SUM) {
        const float *residual = residual_grad ? residual_grad + first * n : 0;
        float *sums = partial_grad ? partial_grad + first / ROWS_PER_SUM * n : 0;
        rms_norm_rows_backward(grad + first * n, x + first * n, weight, scale + first, residual, grad_x + first * n,
                               sums, MIN(ROWS_PER_SUM, rows - first), n);
    }
}

WHOLE_REGISTERS void swiglu_block(const float *restrict gate, const float *restrict up, float *restrict out,
                                  int64_t n) {
    float x[BLOCK];
    for (int64_t i = 0; i < n; i++) x[i] = within_range_of_exp(-gate[i]);
    for (int64_t i = 0; i < n; i++) out[i] = gate[i] / (1.0f + exp_f32(x[i])) * up[i];
}

void swiglu_forward(const float *gate, const float *up, float *out, int64_t n, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t i = 0; i < n; i += BLOCK) swiglu_block(gate + i, up + i, out + i, n - i < BLOCK ? n - i : BLOCK);
}

WHOLE_REGISTERS void swiglu_backward_block(float *grad_out, float *gate_out, float *up_out, int64_t n) {
    float x[BLOCK], grad[BLOCK], gate[BLOCK], up[BLOCK];
    for (int64_t i = 0; i < n; i++) x[i] = within_range_of_exp(-gate_out[i]);
    memcpy(grad, grad_out, n * sizeof(float));
    memcpy(gate, gate_out, n * sizeof(float));
    memcpy(up, up_out, n * sizeof(float));
    float *restrict out = grad_out, *restrict grad_gate = gate_out, *restrict grad_up = up_out;
    for (int64_t i = 0; i < n; i++) {
        float sigmoid = 1.0f / (1.0f + exp_f32(x[i])), silu = gate[i] * sigmoid;
        out[i] = silu * up[i];
        grad_up[i] = grad[i] * silu;
        grad_gate[i] = grad[i] * up[i] * (sigmoid + silu * (1.0f - sigmoid));
    }
}

/* `gate` and `up` become their own gradients, and `grad` the output of the forward. */
void swiglu_backward(float *grad, float *gate, float *up, int64_t n, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t i = 0; i < n; i += BLOCK)
        swiglu_backward_block(grad + i, gate + i, up + i, n - i < BLOCK ? n - i : BLOCK);
}

/* Both halves of a part of a head; `x` and `out` may be the same. */
static inline void rope_part(const float *x, const float *restrict c, const float *restrict s, float *out, int64_t half,
                             int64_t count, float sign) {
    float left[LANES], right[LANES];
    memcpy(left, x, count * sizeof(float));
    memcpy(right, x + half, count * sizeof(float));
    float *restrict ys = out, *restrict zs = out + half;
    for (int64_t i = 0; i < count; i++) ys[i] = left[i] * c[i] - right[i] * (sign * s[i]);
    for (int64_t i = 0; i < count; i++) zs[i] = right[i] * c[half + i] + left[i] * (sign * s[half + i]);
}

void rope_token(const float *x, int64_t x_stride, const float *cos, const float *sin, float *out, int64_t out_stride,
                int64_t heads, int64_t n, float sign) {
    int64_t half = n / 2;
    for (int64_t head = 0; head < heads; head++, x += x_stride, out += out_stride) {
        int64_t i = 0;
        for (; i + LANES <= half; i += LANES) rope_part(x + i, cos + i, sin + i, out + i, half, LANES, sign);
        rope_part(x + i, cos + i, sin + i, out + i, half, half - i, sign);
    }
}

/* Rotates the `heads` of size n of every token, or rotates them back (`sign` -1). `x` and `out` may be the same. */
void rope(const float *x, const int64_t *x_strides, const float *cos, const float *sin, float *out,
          const int64_t *out_strides, int64_t rows, int64_t tokens, int64_t heads, int64_t n, float sign, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t index = 0; index < rows * tokens; index++) {
        int64_t row = index / tokens, token = index % tokens;
        rope_token(x + row * x_strides[0] + token * x_strides[1], x_strides[2], cos + index * n, sin + index * n,
                   out + row * out_strides[0] + token * out_strides[1], out_strides[2], heads, n, sign);
    }
}

/* The sum of squares of all tensors together. */
void sum_of_squares(const float **tensors, const int64_t *sizes, int64_t count, double *partial, double *sum,
                    int threads) {
#pragma omp parallel num_threads(threads)
    for (int64_t t = 0, first = 0; t < count; first += (sizes[t] + BLOCK - 1) / BLOCK, t++) {
#pragma omp for schedule(static) nowait
        for (int64_t i = 0; i < sizes[t]; i += BLOCK) {
            int64_t n = sizes[t] - i < BLOCK ? sizes[t] - i : BLOCK;
            partial[first + i / BLOCK] = dot(tensors[t] + i, tensors[t] + i, n);
        }
    }
    int64_t blocks = 0;
    for (int64_t t = 0; t < count; t++) blocks += (sizes[t] + BLOCK - 1) / BLOCK;
    *sum = 0.0;
    for (int64_t i = 0; i < blocks; i++) *sum += partial[i];
}

static void adamw_block(float *restrict weight, const float *restrict grad, float *restrict mean,
                        float *restrict square, int64_t n, const float *s) {
    float factor = s[0], beta1 = s[1], beta2 = s[2], decay = s[3], rate = s[4], root = s[5], eps = s[6];
    for (int64_t i = 0; i < n; i++) {
        float g = grad[i] * factor;
        mean[i] = MULTIPLY_ADD(beta1, mean[i] - g, g);
        square[i] = MULTIPLY_ADD(beta2, square[i], (1.0f - beta2) * g * g);
        weight[i] = weight[i] * decay - rate * (mean[i] / (sqrtf(square[i]) * root + eps));
    }
}

/* One step of AdamW. `states`: mean, mean square and count of steps of each; `settings`: 5 numbers of each: the betas,
the learning rate, weight decay, epsilon; `factor`: what gradients are multiplied by. */
void adamw(float **weights, const float **grads, float **states, const int64_t *sizes, const double *settings,
           int64_t count, float factor, int threads) {
#pragma omp parallel num_threads(threads)
    for (int64_t t = 0; t < count; t++) {
        const double *s = settings + 5 * t;
        double steps = *states[3 * t + 2] + 1.0;
        float numbers[] = {factor,
                           (float)s[0],
                           (float)s[1],
                           (float)(1.0 - s[2] * s[3]),
                           (float)(s[2] / (1.0 - pow(s[0], steps))),
                           (float)(1.0 / sqrt(1.0 - pow(s[1], steps))),
                           (float)s[4]};
#pragma omp for schedule(static) nowait
        for (int64_t i = 0; i < sizes[t]; i += BLOCK)
            adamw_block(weights[t] + i, grads[t] + i, states[3 * t] + i, states[3 * t + 1] + i,
                        MIN(BLOCK, sizes[t] - i), numbers);
    }
    for (int64_t t = 0; t < count; t++) *states[3 * t + 2] += 1.0f;
}

float cross_entropy_row(float *restrict x, int64_t label, int64_t n) {
    if (label < 0) {
        memset(x, 0, n * sizeof(float));
        return 0.0f;
    }
    int64_t i = 0;
    float lanes[LANES] = {0}, most = maximum(x, n), own = x[label];
    for (i = 0; i < n; i++) x[i] = within_range_of_exp(x[i] - most);
    for (i = 0; i < n; i++) x[i] = exp_f32(x[i]);
    for (i = 0; i + LANES <= n; i += LANES)
        for (int l = 0; l < LANES; l++) lanes[l] += x[i + l];
    for (int l = 0; i + l < n; l++) lanes[l] += x[i + l];
    float sum = sum_lanes(lanes), factor = 1.0f / sum;
    for (i = 0; i < n; i++) x[i] *= factor;
    x[label] -= 1.0f;
    return logf(sum) + (most - own);
}

void cross_entropy(float *logits, const int64_t *labels, float *losses, int64_t rows, int64_t n, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t row = 0; row < rows; row++) losses[row] = cross_entropy_row(logits + row * n, labels[row], n);
}
