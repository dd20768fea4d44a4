/* Vectors in registers: `vec` has WIDTH floats. */

#pragma once

#include "vector_math.h"
#include <stdlib.h>

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

#define INLINE static inline __attribute__((always_inline))
typedef float vec __attribute__((vector_size(4 * WIDTH), may_alias));
typedef float unaligned_vec __attribute__((vector_size(4 * WIDTH), aligned(4), may_alias));

static inline float *allocate(int64_t floats) { return aligned_alloc(64, (floats * sizeof(float) + 63) / 64 * 64); }

/* f(rows, ...) with a constant number of rows. */
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
