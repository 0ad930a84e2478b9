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
    int m, n, k;
    bool transpose_b;
    LinearEpilogue epilogue;
    real *out, *second;
    const real *a, *b, *bias, *extra;
    unsigned *tickets; // one on the device, 0 before and after
};

// Sets *yes if this GPU, this build and the shape allow linear_sm90.
int linear_sm90_usable(bool *yes, const Linear &l, Error *e);
int linear_sm90(const Linear &l, cudaStream_t stream, Error *e);
