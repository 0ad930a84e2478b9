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

// Pairs of multiprocessors that the kernel runs on; 0: it does not run on this GPU, or in this build. Also finds out which
// pairs are in one GPC, by four small kernels, for the schedules of all later calls.
int weight_gradient_clusters(int *clusters, Error *e);

size_t weight_gradient_workspace_bytes(WeightGradientShape s, int clusters);

int weight_gradient(const WeightGradient &g, const real *x, const real *dy, WeightGradientShape s, int clusters,
                    void *workspace, cudaStream_t stream, Error *e);
