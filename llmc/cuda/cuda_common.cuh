// cuda_common: the element type of the build, and checked CUDA calls.
#ifndef GNS_CUDA_COMMON_CUH
#define GNS_CUDA_COMMON_CUH

#include "base/common.h"

#include <cuda_bf16.h>
#include <cuda_runtime.h>

// What parameters (the working copy), activations and their gradients are stored in. Statistics, parameter gradients,
// moments and master weights are fp32 in every build. Arithmetic inside kernels is fp32.
#ifdef GNS_FP32
typedef float real; // make PRECISION=FP32: no TF32 either; for comparing with the CPU engine
#else
typedef __nv_bfloat16 real;
#endif

// Hands a failed CUDA call up as an Error (71 for memory, 70 for the rest).
#define CUDA_TRY(call, e)                                                                                              \
    do {                                                                                                               \
        cudaError_t cuda_try_ = (call);                                                                                \
        if (cuda_try_ != cudaSuccess)                                                                                  \
            return FAIL((e), cuda_try_ == cudaErrorMemoryAllocation ? ERR_MEMORY : ERR_INTERNAL, NULL, "%s: %s", #call, \
                        cudaGetErrorString(cuda_try_));                                                                \
    } while (0)

// After a kernel launch: catches a bad launch configuration at once (what fails later shows at the next sync).
#define CUDA_LAUNCHED(e) CUDA_TRY(cudaGetLastError(), e)

__device__ static inline float real_to_float(float x) { return x; }
__device__ static inline float real_to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

#endif
