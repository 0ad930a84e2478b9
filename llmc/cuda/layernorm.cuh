// layernorm: layer normalisation (formulas: math/layernorm.h), fused with the residual add before it; its backward yields
// per-example norms of dgamma and dbeta from the same pass over memory.
#pragma once

#include "cuda/cuda_common.cuh"
#include "cuda/dropout.cuh"
#include "cuda/reduce.cuh"

// out = (x - mean) * rstd * gamma + beta, statistics in fp32. x = a, or with b the sum a + b rounded to real, which is
// written to sum (may be a or b); dropout acts on b. b NULL: no sum.
// sum, out, a, b (N, C); mean, rstd (N); gamma, beta (C). N is B * T.
int layernorm_forward(real *sum, real *out, float *mean, float *rstd, const real *a, const real *b, const real *gamma,
                      const real *beta, const RowDropout &drop, int N, int C, cudaStream_t stream, Error *e);

// dresidual (B, T, C): += dx (accumulate) or = dx. It may be dy.
// dgamma, dbeta: sums over rows of dy xhat and of dy, with their per-example squares.
// dbias: sums over rows of dresidual as written: the gradient of the bias of the projection whose output was added to the
//        residual stream right before. .sum = NULL: not wanted. With dropout the sums of dbranch.
// dbranch (B, T, C): what dropout leaves of dresidual as written, the gradient of that branch; not written where nothing
//        drops. It may be dy.
// dy, x (B, T, C); mean, rstd (B, T); gamma (C). All gradients hold the sum over examples of that of
// L_b = mean over T of the cross-entropy.
// The column gradients join jobs, whose memory has layernorm_backward_bytes left for them.
size_t layernorm_backward_bytes(int B, int T, int C);
int layernorm_backward(real *dresidual, bool accumulate, ColumnGradient dgamma, ColumnGradient dbeta,
                       ColumnGradient dbias, real *dbranch, const RowDropout &drop, const real *dy, const real *x,
                       const float *mean, const float *rstd, const real *gamma, int B, int T, int C, ColumnJobs *jobs,
                       cudaStream_t stream, Error *e);
