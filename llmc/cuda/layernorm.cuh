// layernorm: layer normalisation (Ba, Kiros, Hinton 2016, arXiv 1607.06450), fused with the residual add before it;
// its backward yields per-example norms of dgamma and dbeta from the same pass over memory (Gray et al. 2024,
// arXiv 2411.00999, without its einsums: the per-example sums are simply not thrown away).
#ifndef GNS_LAYERNORM_CUH
#define GNS_LAYERNORM_CUH

#include "cuda/cuda_common.cuh"
#include "cuda/reduce.cuh"

// out = (x - mean) * rstd * gamma + beta, statistics in fp32 (math/layernorm.h).
// out, x (N, C); mean, rstd (N); gamma, beta (C). N is B * T.
int layernorm_forward(real *out, float *mean, float *rstd, const real *x, const real *gamma, const real *beta, int N,
                      int C, cudaStream_t stream, Error *e);

// residual_out = a + b rounded to real, then the above of the rounded value. residual_out may be a or b.
// residual_out, out, a, b (N, C).
int residual_layernorm_forward(real *residual_out, real *out, float *mean, float *rstd, const real *a, const real *b,
                               const real *gamma, const real *beta, int N, int C, cudaStream_t stream, Error *e);

// dx = rstd (dy gamma - mean_c(dy gamma) - xhat mean_c(dy gamma xhat)), xhat = (x - mean) rstd
// dresidual (B, T, C): += dx (accumulate) or = dx. It may be dy itself.
// dgamma, dbeta: sums over rows of dy xhat and of dy, with their per-example squares.
// dbias: sums over rows of dresidual as written, which is the gradient of the bias of the projection whose output was
//        added to the residual stream just before (its weight's dY is dresidual too). .sum = NULL: not wanted.
// dy, x (B, T, C); mean, rstd (B, T); gamma (C). All gradients hold the sum over examples of that of
// L_b = mean over T of the cross-entropy.
size_t layernorm_backward_workspace_bytes(int B, int T, int C);
int layernorm_backward(real *dresidual, bool accumulate, ColumnGradient dgamma, ColumnGradient dbeta,
                       ColumnGradient dbias, const real *dy, const real *x, const float *mean, const float *rstd,
                       const real *gamma, int B, int T, int C, void *workspace, cudaStream_t stream, Error *e);

#endif
