/* Matrix products of one thread, in fp32.

The right-hand matrix b (k, n) lies in panels of PANEL columns, padded with zeros: [n / PANEL][k][PANEL]. Every element
of a product is one chain of fused multiply-adds, k upwards from 0: it depends neither on how rows and columns are
grouped nor on the number of threads. */

#pragma once

#include "registers.h"

#define PANEL (2 * WIDTH)

int64_t panels_of(int64_t n);
int64_t packed_size(int64_t k, int64_t n);

/* b (k, n), whose rows lie `stride` apart, as panels. */
void pack(float *to, const float *b, int64_t stride, int64_t k, int64_t n);

/* Panels from `panel` to `end` of a transposed b (n, k). */
void pack_transposed(float *to, const float *b, int64_t k, int64_t n, int64_t panel, int64_t end);

/* out (m, n) = a b, or += if `add`; a (m, k) by two strides. */
void matmul(float *out, int64_t out_stride, const float *a, int64_t a_row, int64_t a_k, const float *packed, int64_t m,
            int64_t n, int64_t k, int add);
