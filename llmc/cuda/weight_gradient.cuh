// weight_gradient: the gradient of a matrix and, from the same pass, the squared norm of every example's part of it, and
// the gradient of the bias. One kernel for Hopper on 16 bits; everywhere else weight_gradient_clusters is 0.
//
//   dW (in, out) = sum over b of X_b^T dY_b        |X_b^T dY_b|^2 for every b        dbias (out) = column sums of dY
//
// X (B, T, in) and dY (B, T, out) are of 16 bits; sums are fp32, in a fixed order: two runs give the same bits.
#pragma once

#include "cuda/reduce.cuh"
#include "model/cuda_sizes.h"

enum { WEIGHT_GRADIENT_TILE = 128 }; // rows of dW that a block computes at a time
enum { WEIGHT_GRADIENT_PAIRS_MOST = 128 };

struct WeightGradientShape {
    int B, T, in, out; // in and out: multiples of WEIGHT_GRADIENT_MULTIPLE
};

// What is wanted.
struct WeightGradient {
    float *dw; // (in, out) += (first: =); at a multiple of 16 bytes, as X and dY are
    bool first;
    double *squares;     // (1) += sum over b of |g_b|^2; NULL: not wanted
    double *norms;       // (B) = |g_b|^2, where squares are wanted; or NULL
    ColumnGradient bias; // sum NULL: not wanted
    // Rows of the examples' own gradients, where squares are wanted: row i of g_b goes to rows[b][t] where
    // row_at[b][i] = t + 1, and nowhere where that is 0. NULL: none.
    const int *row_at; // (B, in)
    float *rows;       // (B, T, out)
};

// Pairs of multiprocessors that the kernel runs on; 0: it does not run on this GPU, or in this build.
int weight_gradient_clusters(int *clusters, Error *e);

// These, and each pair's place in the schedule, by its number in a launch. Neighbours in the schedule share X or dY. What
// multiprocessors of one GPC ask for at about the same time is read from L2 once, so the pairs of a GPC follow one another:
// four small kernels find these. Sums depend on the place alone.
struct WeightGradientPairs {
    int count;
    unsigned char place[WEIGHT_GRADIENT_PAIRS_MOST];
};
int weight_gradient_pairs(WeightGradientPairs *pairs, Error *e);

size_t weight_gradient_workspace_bytes(WeightGradientShape s, int clusters);

int weight_gradient(const WeightGradient &g, const real *x, const real *dy, WeightGradientShape s,
                    const WeightGradientPairs &pairs, void *workspace, cudaStream_t stream, Error *e);
