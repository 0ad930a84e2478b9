// matmul: the matrix products of GPT-2, blocked and packed, on several threads. All matrices are dense and row-major;
// none may overlap. Values (void) have the kernel's type, fp32 or bf16 (cpu/value.h); sums are fp32.
//
// An element's sum runs over k in ascending order, in blocks whose length depends on K alone. So the bits of a result
// depend neither on the thread count nor on M and N.
#pragma once

#include "base/common.h"
#include "model/modes.h"

typedef struct MatmulKernel MatmulKernel; // cpu/matmul_kernel.h

typedef struct {
    int threads;
    const MatmulKernel *kernel;
    size_t a_block; // largest packed block of A, in bytes: matmul_a_block()
    void *scratch;  // matmul_scratch() bytes, aligned to a cache line
} Matmul;           // serves one product at a time

// Returns this machine's fastest kernel for a type. NULL: the machine has no instructions for bf16.
const MatmulKernel *matmul_kernel(Dtype type);

// Returns half of this machine's second-level cache in bytes, at most 1 MiB; 512 KiB if its size is unknown.
size_t matmul_a_block(void);

// Returns the bytes of scratch for products whose bf16 C has at most M rows. A float C may have any number of rows.
size_t matmul_scratch(Dtype type, size_t M);

// Each product writes c (M,N) and sums over K. M, N and K are above 0.

// c = a b + bias: a (M,K), b (K,N), bias (N) or NULL
void matmul_nn(Matmul mm, void *c, const void *a, const void *b, const void *bias, size_t M, size_t N, size_t K);

// c = a b^T: a (M,K), b (N,K)
void matmul_nt(Matmul mm, void *c, const void *a, const void *b, size_t M, size_t N, size_t K);

// c = a^T b: a (K,M), b (K,N). column_sums (N): sums of b's columns; or NULL. accumulate: adds to c and column_sums.
void matmul_tn(Matmul mm, float *c, float *column_sums, const void *a, const void *b, size_t M, size_t N, size_t K,
               bool accumulate);
