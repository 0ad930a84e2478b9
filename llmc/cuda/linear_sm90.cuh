// linear_sm90: a layer's product on Hopper, with the pass over memory that would follow it done before the product is
// stored. Elsewhere cuBLASLt multiplies and kernels of their own follow (matmul.cuh, gelu.cuh, layernorm.cuh), with the
// same roundings.
#pragma once

#include "cuda/reduce.cuh"

typedef enum {
    LINEAR_GELU,     // y = x W + b; gelu = GELU(y as stored), with the bits of gelu_forward
    LINEAR_RESIDUAL, // y = (x W + b, rounded) + extra, with the bits of layernorm_forward's sum
    LINEAR_DGELU     // y = x W^T gelu'(extra), rounded once; columns: those of y as stored
} LinearEpilogue;

// All row-major: x (rows, in), W (in, out), of LINEAR_DGELU (out, in), b (out); y, gelu, extra (rows, out), y not extra.
struct Linear {
    LinearEpilogue epilogue = LINEAR_GELU;
    int rows = 0, in = 0, out = 0;
    const real *x = NULL, *weight = NULL, *bias = NULL, *extra = NULL;
    real *y = NULL, *gelu = NULL;
    unsigned *ticket = NULL; // one on the device, 0 before and after
    ColumnGradient columns = {};
    int T = 0;              // rows of an example, if columns are wanted: see linear_sm90_sums
    void *workspace = NULL; // likewise
};

// Sets *yes if this GPU and this build have linear_sm90, and it takes these widths: multiples of 64.
int linear_sm90_usable(bool *yes, int in, int out, Error *e);

// Does LINEAR_DGELU sum columns for examples of T rows?
bool linear_sm90_sums(int T);
size_t linear_sm90_workspace_bytes(int rows, int T, int out);

int linear_sm90(const Linear &l, cudaStream_t stream, Error *e);
