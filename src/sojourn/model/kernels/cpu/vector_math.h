/* What kernels.c and infer/engine/cpu/ share: sums in a fixed order, and exp.

The compiler makes no fused multiply-adds of its own (-ffp-contract=off): results depend neither on it nor on how it
vectorizes. */

#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

#define LANES 16
#define MIN(a, b) ((a) < (b) ? (a) : (b))
#define MAX(a, b) ((a) > (b) ? (a) : (b))

/* For long loops: gcc takes half of an AVX-512 register by default. */
#ifdef __AVX512F__
#define WHOLE_REGISTERS __attribute__((target("prefer-vector-width=512")))
#else
#define WHOLE_REGISTERS
#endif

#ifdef __FP_FAST_FMAF
#define MULTIPLY_ADD(a, b, c) __builtin_fmaf(a, b, c)
#else
#define MULTIPLY_ADD(a, b, c) ((a) * (b) + (c))
#endif

static inline float sum_lanes(float *lanes) {
    for (int width = LANES / 2; width; width /= 2)
        for (int l = 0; l < width; l++) lanes[l] += lanes[l + width];
    return lanes[0];
}

static inline float maximum(const float *x, int64_t n) {
    float lanes[LANES], most = x[0];
    for (int l = 0; l < LANES; l++) lanes[l] = most;
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES)
        for (int l = 0; l < LANES; l++) lanes[l] = x[i + l] > lanes[l] ? x[i + l] : lanes[l];
    for (int l = 0; i + l < n; l++) lanes[l] = x[i + l] > lanes[l] ? x[i + l] : lanes[l];
    for (int l = 0; l < LANES; l++) most = lanes[l] > most ? lanes[l] : most;
    return most;
}

static inline float dot(const float *restrict a, const float *restrict b, int64_t n) {
    float lanes[LANES] = {0};
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES)
        for (int l = 0; l < LANES; l++) lanes[l] = MULTIPLY_ADD(a[i + l], b[i + l], lanes[l]);
    for (int l = 0; i + l < n; l++) lanes[l] = MULTIPLY_ADD(a[i + l], b[i + l], lanes[l]);
    return sum_lanes(lanes);
}

/* In a loop of its own: compilers would else compute with both limits, and make denormal numbers, which are slow. */
static inline float within_range_of_exp(float x) {
    x = x < -87.0f ? -87.0f : x;
    return x > 88.0f ? 88.0f : x;
}

/* For x from -87 to 88, or NaN. The Taylor series to the 7th degree around the nearest multiple of ln 2: exact to 2
units in the last place. */
static inline float exp_f32(float x) {
    const float to_integer = 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer, in the low bits */
    float shifted = MULTIPLY_ADD(x, 1.44269504f, to_integer);
    uint32_t bits;
    memcpy(&bits, &shifted, 4);
    float n = shifted - to_integer;
    float r = MULTIPLY_ADD(n, 2.12194440e-4f, MULTIPLY_ADD(n, -0.693359375f, x)); /* ln 2 in two parts */
    float p = 1.0f / 5040;
    p = MULTIPLY_ADD(p, r, 1.0f / 720);
    p = MULTIPLY_ADD(p, r, 1.0f / 120);
    p = MULTIPLY_ADD(p, r, 1.0f / 24);
    p = MULTIPLY_ADD(p, r, 1.0f / 6);
    p = MULTIPLY_ADD(p, r, 0.5f);
    p = MULTIPLY_ADD(p, r, 1.0f);
    p = MULTIPLY_ADD(p, r, 1.0f);
    bits = (bits + 127u) << 23; /* 2^n; the bits of `to_integer` are shifted out */
    float power;
    memcpy(&power, &bits, 4);
    return p * power;
}
