// matmul: the matrix products of GPT-2, blocked and packed, on several threads. All matrices are dense and row-major;
// none may overlap. Values (void) are fp32 or bf16, as the kernel says (cpu/value.h); sums are fp32.
//
// Determinism: the sum of an element runs over k in ascending order, in blocks whose length depends on K alone; so the
// bits of a result depend neither on the thread count nor on M and N.
#pragma once

#include "base/common.h"
#include "model/modes.h"

typedef struct MatmulKernel MatmulKernel; // cpu/matmul_kernel.h

typedef struct {
    int threads;
    const MatmulKernel *kernel;
    size_t a_block; // most bytes of a packed block of A: matmul_a_block()
    void *scratch;  // matmul_scratch() bytes, aligned to a cache line
} Matmul;           // serves one product at a time

// The fastest kernel of this machine for values of a type; NULL: it has no instructions for bf16.
const MatmulKernel *matmul_kernel(Dtype type);

// Half of this machine's second-level cache; a default where its size is unknown.
size_t matmul_a_block(void);

// Bytes of scratch for products whose result has at most M rows of values.
size_t matmul_scratch(Dtype type, size_t M);

// Each writes C (M,N), a sum over K; none of these is 0.

// c = a b + bias: a (M,K), b (K,N), bias (N) or NULL
void matmul_nn(Matmul mm, void *c, const void *a, const void *b, const void *bias, size_t M, size_t N, size_t K);

// c = a b^T: a (M,K), b (N,K)
void matmul_nt(Matmul mm, void *c, const void *a, const void *b, size_t M, size_t N, size_t K);

// c = a^T b, and the column sums (N) of b unless NULL: a (K,M), b (K,N). accumulate: both are added to.
void matmul_tn(Matmul mm, float *c, float *column_sums, const void *a, const void *b, size_t M, size_t N, size_t K,
               bool accumulate);
