// layernorm: layer normalisation (formulas: math/layernorm.h), fused with the residual add before it. The backward also
// yields per-example norms of dgamma and dbeta.
#pragma once

#include "cuda/cuda_common.cuh"
#include "cuda/dropout.cuh"
#include "cuda/reduce.cuh"

// out = (x - mean) * rstd * gamma + beta, statistics in fp32.
//   b NULL:  x = a
//   else     x = sum = a + dropout(b), rounded to real; sum may be a or b
struct LayerNorm {
    real *sum, *out;          // (N, C), N = B * T
    float *mean, *rstd;       // (N)
    const real *a, *b;        // (N, C)
    const real *gamma, *beta; // (C)
    const RowDropout &drop;
    int N, C;
};
int layernorm_forward(const LayerNorm &n, cudaStream_t stream, Error *e);

// dresidual (B, T, C): += dx if `accumulate`, else = dx. May be dy.
// dgamma, dbeta: column sums of dy xhat and of dy, with per-example squares.
// dbranch (B, T, C): the stored dresidual with dropout applied, the gradient of the branch that was last added to the
//       residual stream. May be dy. Not written without dropout.
// dbias: column sums of dbranch, or without dropout of the stored dresidual; the bias gradient of the product that
//       ends this branch. sum NULL: not wanted.
// dy, x (B, T, C); mean, rstd (B, T); gamma (C).
// Adds the column gradients as one job to jobs, whose memory must have layernorm_backward_bytes left.
size_t layernorm_backward_bytes(int B, int T, int C);
int layernorm_backward(real *dresidual, bool accumulate, ColumnGradient dgamma, ColumnGradient dbeta,
                       ColumnGradient dbias, real *dbranch, const RowDropout &drop, const real *dy, const real *x,
                       const float *mean, const float *rstd, const real *gamma, int B, int T, int C, ColumnJobs *jobs,
                       cudaStream_t stream, Error *e);
