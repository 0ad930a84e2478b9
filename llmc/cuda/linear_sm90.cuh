// linear_sm90: products on Hopper with fused epilogues. A fused epilogue saves a pass over memory. On other GPUs
// cuBLASLt multiplies and other kernels follow. That path rounds at the same points, but also rounds LINEAR_DGELU's
// product before the slope multiplies it. All epilogues but LINEAR_SCALED (crossentropy.cuh) support e4m3 factors
// (fp8.cuh). Microseconds in bf16 / e4m3, epilogue included, column sums not (H200): d48 qkv 317/184, proj 126/81, fc
// with GELU 445/320, DGELU 448/300; d12 304/181, 123/84, 493/418, 453/365.
//
// Hopper sums e4m3 products in 14 bits and truncates each product to 14 bits. No partial sum is promoted to fp32.
// Sums of mixed signs, as in training, err by 0.25% of a row's norm at in = 6400; rounding to bf16 alone errs by 0.17%.
// Sums of one sign lose 10% at in = 6400 and 0.9% at in = 768 (H200, test_fp8_cuda).
#pragma once

#include "cuda/fp8.cuh"
#include "cuda/gelu.cuh"
#include "cuda/reduce.cuh"

enum { LINEAR_SM90_COLUMNS = 192 }; // columns of a tile
enum { LINEAR_EXPONENT_MAX = 100 }; // keeps a row's sum finite

typedef enum {
    LINEAR_GELU,     // y = GELU(x W + b), and slope; same bits as LINEAR_BIAS, then gelu_forward
    LINEAR_RESIDUAL, // y = x W + b + extra, rounded once
    LINEAR_DGELU,    // y = (x W^T) * slope, rounded once; columns.sum gets column sums of the rounded y
    LINEAR_BIAS,     // y = x W + b
    LINEAR_SCALED,   // y = row_values[row] x W
    LINEAR_SOFTMAX   // y = exp(x W^T - row_values[row]), at most 2^LINEAR_EXPONENT_MAX; 0 from column `counted` on
} LinearEpilogue;

// Row-major: x (rows, in); W (in, out), for LINEAR_DGELU and LINEAR_SOFTMAX (out, in); b (out); y, slope, extra
// (rows, out). y must not be extra. in, out: multiples of LINEAR_SM90_MULTIPLE. Only where sm90_runs.
struct Linear {
    LinearEpilogue epilogue = LINEAR_GELU;
    int rows = 0, in = 0, out = 0;
    const real *x = NULL, *weight = NULL, *bias = NULL, *extra = NULL;
    // If set, e4m3 factors in place of x and weight: x8 (rows, in), weight8 (out, in). Bias may then be NULL: no bias.
    const uint8_t *x8 = NULL, *weight8 = NULL;
    float scale = 1; // multiplies the product of e4m3 factors
    // With e4m3 factors also adds x_low weight_low^T over their first `groups` columns (math/fp8.h): x_low (rows,
    // FP8_GROUPS), weight_low (out, FP8_GROUPS).
    int groups = 0;
    const uint8_t *x_low = NULL, *weight_low = NULL;
    real *y = NULL;
    Fp8Copy copy = {}; // copy of y; only for LINEAR_GELU and LINEAR_DGELU with e4m3 factors
    GeluSlope *slope = NULL;
    const float *row_values = NULL; // (rows)
    float *row_sums = NULL; // (linear_sm90_tiles, rows) LINEAR_SOFTMAX: sums of y per tile and row, unrounded in bf16
    int counted = 0;
    unsigned *ticket = NULL;     // (1) counts drawn tiles; 0 between calls
    ColumnGradient columns = {}; // column sums of y; sum NULL: none
    int T = 0;                   // with columns: rows of an example (linear_sm90_sums)
    ColumnJobs *jobs = NULL;     // with columns: the list to join
};

// True if LINEAR_DGELU can sum columns of examples of T rows.
bool linear_sm90_sums(int T);

// Returns the number of tiles across y, which is the number of rows of row_sums.
static inline int linear_sm90_tiles(int out) { return (out + LINEAR_SM90_COLUMNS - 1) / LINEAR_SM90_COLUMNS; }
size_t linear_sm90_column_bytes(int rows, int T, int out);

int linear_sm90(const Linear &l, cudaStream_t stream, Error *e);
