// gelu: the tanh GELU of GPT-2 (Hendrycks, Gimpel 2016, arXiv 1606.08415), and gradients of biases.
#pragma once

#include "cuda/cuda_common.cuh"
#include "cuda/reduce.cuh"
#include "math/gelu.h"

// sigmoid(2u); the fast exponential is good enough for 16 bits
__device__ static inline float gelu_sigmoid(float x) {
    const float minus_2u = -GELU_SCALE * x * fmaf(GELU_CUBIC * x, x, 1.0f);
#ifdef GNS_FP32
    return 1.0f / (1.0f + expf(minus_2u));
#else
    return __fdividef(1.0f, 1.0f + __expf(minus_2u));
#endif
}

__device__ static inline float gelu(float x) { return x * gelu_sigmoid(x); }

__device__ static inline float gelu_derivative(float x) {
    const float s = gelu_sigmoid(x);
    const float twice_du = GELU_SCALE * fmaf(3.0f * GELU_CUBIC * x, x, 1.0f);
    return s + x * s * (1.0f - s) * twice_du;
}

// y = gelu(x), n elements. In place is allowed.
int gelu_forward(real *y, const real *x, size_t n, cudaStream_t stream, Error *e);

// dbias: sums over the rows of dy (B, T, C), with per-example squares. With x (B, T, C): dx = dy gelu'(x), which may be
// dy, and sums over the rows of dx as written: the bias gradient of the projection that made x. x NULL: no dx.
size_t bias_backward_workspace_bytes(int B, int T, int C);
int bias_backward(real *dx, ColumnGradient dbias, const real *dy, const real *x, int B, int T, int C, void *workspace,
                  cudaStream_t stream, Error *e);
