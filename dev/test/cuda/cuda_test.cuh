// cuda_test: helpers of the tests of single CUDA kernels (kernel_test.cuh) and of the CUDA engine (engine_test.cuh).
#pragma once

#include "../test.h"

#include "cuda/cuda_common.cuh"

enum { FP32 = REAL_DTYPE == DTYPE_FP32, FP16 = REAL_DTYPE == DTYPE_FP16 };

// Returns the value for this build's type.
static constexpr double by_type(double fp32, double fp16, double bf16) { return FP32 ? fp32 : FP16 ? fp16 : bf16; }

// Checks that a call f(..., &e) succeeds. The macro declares the Error e.
#define CALL_OK(call)                                                                                                  \
    do {                                                                                                               \
        Error e = {};                                                                                                  \
        CHECK_OK(call, &e);                                                                                            \
    } while (0)
