// gelu: GELU (math/gelu.h), and gradients of biases.
#pragma once

#include "cuda/cuda_common.cuh"
#include "cuda/reduce.cuh"
#include "math/gelu.h"

// sigmoid(2u) of math/gelu.h. Fast exponential and reciprocal suffice for 16 bits.
__device__ static inline float gelu_sigmoid(float x) {
#ifdef GNS_FP32
    return 1.0f / (1.0f + expf(-GELU_SCALE * x * fmaf(GELU_CUBIC * x, x, 1.0f)));
#else
    const float scale = -LOG2E * GELU_SCALE; // exp(-2u) = 2^(scale x (1 + GELU_CUBIC x^2))
    float s;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(s) : "f"(1.0f + exp2_fast(x * fmaf(scale * GELU_CUBIC, x * x, scale))));
    return s;
#endif
}

// GELU's derivative as the forward pass stores it: a code (math/gelu.h); in fp32 the derivative itself.
#ifdef GNS_FP32
typedef float GeluSlope;
__device__ static inline float slope_value(GeluSlope slope) { return slope; }
__device__ static inline GeluSlope slope_of(float derivative) { return derivative; }
#else
typedef uint8_t GeluSlope;
__device__ static inline float slope_value(unsigned slope) { return gelu_decode(slope); }
__device__ static inline GeluSlope slope_of(float derivative) { return gelu_encode(derivative); }
#endif

struct Gelu {
    float y;
    GeluSlope slope;
};

// y = x s, derivative s + s w (1 - s), w = 2 x du/dx
__device__ static inline Gelu gelu_with_slope(float x) {
    const float s = gelu_sigmoid(x), w = x * fmaf(3.0f * GELU_CUBIC * GELU_SCALE, x * x, GELU_SCALE);
    return {x * s, slope_of(fmaf(s, fmaf(-w, s, w), s))};
}

// y = gelu(x) and slope = gelu'(x), n elements. y may be x.
int gelu_forward(real *y, GeluSlope *slope, const real *x, size_t n, cudaStream_t stream, Error *e);

// Multiplies dy (B, T, C) by slope (B, T, C), unless slope is NULL. Then adds a job to `jobs`: dbias (C) = column sums
// of dy, with per-example squares.
size_t bias_backward_bytes(int B, int T, int C);
int bias_backward(ColumnGradient dbias, real *dy, const GeluSlope *slope, int B, int T, int C, ColumnJobs *jobs,
                  cudaStream_t stream, Error *e);
