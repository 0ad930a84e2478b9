// matmul: the fp32 matrix products of GPT-2, blocked and packed, on several threads. All matrices are dense and
// row-major; none may overlap.
//
// Determinism: the sum of an element runs over k in ascending order, in blocks whose length depends on K alone; so the
// bits of a result depend neither on the thread count nor on M and N.
#pragma once

#include "base/common.h"

typedef struct {
    int threads;
    float *scratch; // packing buffers, matmul_scratch() floats, aligned to a vector
} Matmul;           // serves one product at a time

size_t matmul_scratch(void);

// Each writes C (M,N), a sum over K.

// c = a b + bias: a (M,K), b (K,N), bias (N) or NULL
void matmul_nn(Matmul mm, float *c, const float *a, const float *b, const float *bias, size_t M, size_t N, size_t K);

// c = a b^T: a (M,K), b (N,K)
void matmul_nt(Matmul mm, float *c, const float *a, const float *b, size_t M, size_t N, size_t K);

// c = a^T b, and the column sums (N) of b unless NULL: a (K,M), b (K,N). accumulate: both are added to.
void matmul_tn(Matmul mm, float *c, float *column_sums, const float *a, const float *b, size_t M, size_t N, size_t K,
               bool accumulate);
