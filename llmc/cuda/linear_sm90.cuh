// linear_sm90: products of activations and weights on Hopper, with what follows them done before they are stored.
#pragma once

#include "cuda/cuda_common.cuh"

// What is done to a sum of products before it is stored, in this order.
typedef enum {
    LINEAR_PLAIN,    // round
    LINEAR_BIAS,     // + bias, round
    LINEAR_GELU,     // + bias, round; and second = GELU of that
    LINEAR_RESIDUAL, // + bias, round, + extra (rows, out), round
    LINEAR_DGELU     // round, x gelu'(extra), round
} LinearEpilogue;

// out (m, n) = a (m, k) op(b): op(b) (k, n), stored (n, k) if transposed.
struct Linear {
    int m = 0, n = 0, k = 0;
    bool transpose_b = false;
    LinearEpilogue epilogue = LINEAR_PLAIN;
    real *out = NULL, *second = NULL;
    const real *a = NULL, *b = NULL, *bias = NULL, *extra = NULL;
    unsigned *tickets = NULL; // one on the device, 0 before and after
};

// Sets *yes if this GPU and this build have linear_sm90, and it takes n and k: multiples of 64, k at least 256.
int linear_sm90_usable(bool *yes, int n, int k, Error *e);
int linear_sm90(const Linear &l, cudaStream_t stream, Error *e);
