// weight_gradient: computes, in one pass, the gradient of a matrix, the squared norms of its per-example gradients, and
// the bias gradient. Needs Hopper and a 16-bit build; elsewhere weight_gradient_clusters returns 0.
//
//   dW (in, out) = sum over b of g_b, g_b = scale X_b^T dY_b    |g_b|^2 for every b    dbias (out) = column sums of dY
//
// Sums are fp32 in a fixed order, so two runs give the same bits.
#pragma once

#include "cuda/reduce.cuh"
#include "model/cuda_sizes.h"

enum { WEIGHT_GRADIENT_TILE = 128 };                                 // rows of dW per block and tile
enum { WEIGHT_GRADIENT_PAIR = 2, WEIGHT_GRADIENT_PAIRS_MOST = 128 }; // blocks per pair; pairs

struct WeightGradientShape {
    int B, T, in, out; // in and out: multiples of WEIGHT_GRADIENT_MULTIPLE
    bool e4m3 = false; // X (B, in, T), dY (B, out, T) are codes; false: X (B, T, in), dY (B, T, out) in 16 bits
};

// Outputs. e4m3: no bias, no rows.
struct WeightGradient {
    float *dw; // (in, out) += dW, or = dW if `first`. dw, X and dY are aligned to 16 bytes
    bool first;
    float scale = 1;          // factor of g_b, a power of two; for e4m3
    double *squares = NULL;   // (1) += sum over b of |g_b|^2; or NULL
    double *norms = NULL;     // (B) = |g_b|^2, needs squares; or NULL
    ColumnGradient bias = {}; // unless sum is NULL, adds a job of weight_gradient_column_bytes to `jobs`
    ColumnJobs *jobs = NULL;
    // Rows of per-example gradients; needs squares. rows[b][t] = row i of g_b where row_at[b][i] = t + 1. NULL: none.
    const int *row_at = NULL; // (B, in)
    float *rows = NULL;       // (B, T, out)
};

// Returns how many pairs of multiprocessors the kernel uses; 0 if it does not run on this GPU, or in this build.
int weight_gradient_clusters(void);

// Pairs of a launch, and each pair's place in the schedule. Neighbours in the schedule share X or dY. L2 serves
// requests for the same data once if they come from one GPC, a group of multiprocessors. So pairs of a GPC get
// neighbouring places; four small kernels find the GPCs. Sums depend on the place only.
struct WeightGradientPairs {
    int count;
    unsigned char place[WEIGHT_GRADIENT_PAIRS_MOST];
};
int weight_gradient_pairs(WeightGradientPairs *pairs, Error *e);

size_t weight_gradient_workspace_bytes(WeightGradientShape s, int clusters);
size_t weight_gradient_column_bytes(WeightGradientShape s);

// Microseconds in bf16 / e4m3, with squares (H200, bench_weight_gradient): d48 qkv 441/231, proj 151/84, fc 564/310,
// fcproj 567/307; d12 395/208, 137/78, 504/268, 497/266. In bf16 the time of qkv includes its bias gradient.
//
// Hopper truncates e4m3 products to 14 bits and sums an example's T products in 14 bits. Examples are added in fp32.
// Sums of mixed signs err by 0.05% of dW's norm at T = 1024 and by 0.08% at 2048; sums of one sign lose 1.5% and 3.4%
// (H200, test_weight_gradient_cuda).
int weight_gradient(const WeightGradient &g, const void *x, const void *dy, WeightGradientShape s,
                    const WeightGradientPairs &pairs, void *workspace, cudaStream_t stream, Error *e);
