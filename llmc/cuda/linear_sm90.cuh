// linear_sm90: a layer's product on Hopper, with the pass over memory that would follow it, if any, done before the product
// is stored. Elsewhere cuBLASLt multiplies and kernels of their own follow (matmul.cuh, gelu.cuh, layernorm.cuh), with the
// same roundings; LINEAR_SCALED and LINEAR_SOFTMAX are crossentropy.cuh's.
#pragma once

#include "cuda/reduce.cuh"

enum { LINEAR_SM90_COLUMNS = 192, LINEAR_EXPONENT_MAX = 100 }; // of a tile; so that a row's sum is finite

typedef enum {
    LINEAR_GELU,     // y = x W + b; gelu = GELU(y as stored), with the bits of gelu_forward
    LINEAR_RESIDUAL, // y = x W + b + extra, rounded once
    LINEAR_DGELU,    // y = x W^T gelu'(extra), rounded once; columns: those of y as stored
    LINEAR_BIAS,     // y = x W + b
    LINEAR_SCALED,   // y = row_values[row] x W
    LINEAR_SOFTMAX   // y = exp(x W^T - row_values[row]), at most 2^LINEAR_EXPONENT_MAX; 0 from column `counted` on
} LinearEpilogue;

// All row-major: x (rows, in), W (in, out), of LINEAR_DGELU and LINEAR_SOFTMAX (out, in), b (out); y, gelu, extra (rows,
// out), y not extra.
struct Linear {
    LinearEpilogue epilogue = LINEAR_GELU;
    int rows = 0, in = 0, out = 0;
    const real *x = NULL, *weight = NULL, *bias = NULL, *extra = NULL;
    real *y = NULL, *gelu = NULL;
    const float *row_values = NULL; // (rows)
    float *row_sums = NULL; // (ceil(out / LINEAR_SM90_COLUMNS), rows): LINEAR_SOFTMAX's, by tile, before rounding
    int counted = 0;
    unsigned *ticket = NULL; // one on the device, 0 before and after
    ColumnGradient columns = {};
    int T = 0;               // rows of an example, if columns are wanted: see linear_sm90_sums
    ColumnJobs *jobs = NULL; // likewise
};

// Sets *yes if this GPU and this build have linear_sm90, and it takes these widths: multiples of 64.
int linear_sm90_usable(bool *yes, int in, int out, Error *e);

// Does LINEAR_DGELU sum columns for examples of T rows?
bool linear_sm90_sums(int T);

// Tiles of row_sums.
static inline int linear_sm90_tiles(int out) { return (out + LINEAR_SM90_COLUMNS - 1) / LINEAR_SM90_COLUMNS; }
size_t linear_sm90_column_bytes(int rows, int T, int out);

int linear_sm90(const Linear &l, cudaStream_t stream, Error *e);
