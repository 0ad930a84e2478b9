// linear_sm90: a layer's forward product on Hopper, with the pass over memory that would follow it done before the product
// is stored. Elsewhere cuBLASLt multiplies and kernels of their own follow (matmul.cuh, gelu.cuh, layernorm.cuh), with the
// same roundings.
#pragma once

#include "cuda/cuda_common.cuh"

typedef enum {
    LINEAR_GELU,    // y = x W + b; gelu = GELU(y as stored), with the bits of gelu_forward
    LINEAR_RESIDUAL // y = (x W + b, rounded) + residual, with the bits of layernorm_forward's sum
} LinearEpilogue;

// All row-major: x (rows, in), W (in, out), b (out); y, gelu, residual (rows, out), y not residual.
struct Linear {
    LinearEpilogue epilogue = LINEAR_GELU;
    int rows = 0, in = 0, out = 0;
    const real *x = NULL, *weight = NULL, *bias = NULL, *residual = NULL;
    real *y = NULL, *gelu = NULL;
    unsigned *ticket = NULL; // one on the device, 0 before and after
};

// Sets *yes if this GPU and this build have linear_sm90, and it takes these widths: multiples of 64, `in` at least 256.
int linear_sm90_usable(bool *yes, int in, int out, Error *e);
int linear_sm90(const Linear &l, cudaStream_t stream, Error *e);
