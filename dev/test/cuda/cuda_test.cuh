// cuda_test: shared by the tests of single CUDA kernels (kernel_test.cuh) and of the CUDA engine (engine_test.cuh).
#pragma once

#include "../test.h"

#include "cuda/cuda_common.cuh"

enum { FP32 = REAL_DTYPE == DTYPE_FP32, FP16 = REAL_DTYPE == DTYPE_FP16 };

// Returns this build's tolerance.
static constexpr double by_type(double fp32, double fp16, double bf16) { return FP32 ? fp32 : FP16 ? fp16 : bf16; }

// Checks that f(..., &e) succeeds; the macro declares the Error e.
#define CALL_OK(call)                                                                                                  \
    do {                                                                                                               \
        Error e = {};                                                                                                  \
        CHECK_OK(call, &e);                                                                                            \
    } while (0)

// |a - b| / |b|, Euclidean.
static inline double relative_error(const float *a, const float *b, size_t n) {
    double off = 0, square = 0;
    for (size_t i = 0; i < n; i++) off += pow((double)a[i] - b[i], 2), square += pow((double)b[i], 2);
    return sqrt(off / square);
}

static inline double cosine_of(const float *a, const float *b, size_t n) {
    double aa = 0, bb = 0, ab = 0;
    for (size_t i = 0; i < n; i++) aa += (double)a[i] * a[i], bb += (double)b[i] * b[i], ab += (double)a[i] * b[i];
    return ab / sqrt(aa * bb);
}
