// linear_sm90: products on Hopper with fused epilogues; each saves a pass over memory. Elsewhere cuBLASLt multiplies
// and other kernels follow, with the same roundings, except that a product is rounded before GELU's slope multiplies
// it. All epilogues but LINEAR_SCALED and LINEAR_SOFTMAX (crossentropy.cuh) also support products of e4m3 factors
// (fp8.cuh). Microseconds in bf16 / e4m3, epilogue included (H200): d48 qkv 317/184, proj 126/81, fc with GELU 445/320,
// DGELU 448/300; d12 304/181, 123/84, 493/418, 453/365.
//
// Hopper sums e4m3 products in 14 bits, and truncates each product to them. No partial sum is promoted to fp32: sums of
// mixed signs, as in a block, err by 0.25% of a row's norm at in = 6400; bf16's rounding alone by 0.17%. Sums of one
// sign lose 10% there, and 0.9% at in = 768 (H200, test_fp8_cuda).
#pragma once

#include "cuda/fp8.cuh"
#include "cuda/gelu.cuh"
#include "cuda/reduce.cuh"

enum { LINEAR_SM90_COLUMNS = 192 }; // of a tile
enum { LINEAR_EXPONENT_MAX = 100 }; // keeps a row's sum finite

typedef enum {
    LINEAR_GELU,     // y = GELU(x W + b), slope: the bits of gelu_forward after LINEAR_BIAS
    LINEAR_RESIDUAL, // y = x W + b + extra, rounded once
    LINEAR_DGELU,    // y = x W^T slope, rounded once; columns: sums of the stored y
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
    // e4m3 factors instead, if set: x8 (rows, in), weight8 (out, in). Then bias may be NULL: none.
    const uint8_t *x8 = NULL, *weight8 = NULL;
    float scale = 1; // multiplies their product
    real *y = NULL;
    Fp8Copy copy = {}; // of y, by LINEAR_GELU and LINEAR_DGELU with e4m3 factors
    GeluSlope *slope = NULL;
    const float *row_values = NULL; // (rows)
    float *row_sums = NULL;         // (linear_sm90_tiles, rows) LINEAR_SOFTMAX: row sums per tile of unrounded y
    int counted = 0;
    unsigned *ticket = NULL;     // in device memory, 0 before and after
    ColumnGradient columns = {}; // sum NULL: not wanted
    int T = 0;                   // with columns: rows of an example (linear_sm90_sums)
    ColumnJobs *jobs = NULL;     // with columns: the list to join
};

// True if LINEAR_DGELU can sum columns of examples of T rows.
bool linear_sm90_sums(int T);

// Tiles across y, and so rows of row_sums.
static inline int linear_sm90_tiles(int out) { return (out + LINEAR_SM90_COLUMNS - 1) / LINEAR_SM90_COLUMNS; }
size_t linear_sm90_column_bytes(int rows, int T, int out);

int linear_sm90(const Linear &l, cudaStream_t stream, Error *e);
