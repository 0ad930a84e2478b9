// cuda_common: the element type of the build, and checked CUDA calls.
#pragma once

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

// A CUDA call's status as an error code: 71 for memory, 70 for the rest.
static inline int cuda_status(cudaError_t status, const char *call, const char *file, int line, Error *e) {
    if (status == cudaSuccess) return 0;
    return error_set(e, file, line, status == cudaErrorMemoryAllocation ? ERR_MEMORY : ERR_INTERNAL, NULL, "%s: %s",
                     call, cudaGetErrorString(status));
}
#define CUDA_CALL(call, e) cuda_status((call), #call, __FILE__, __LINE__, (e))
#define CUDA_TRY(call, e)  TRY(cuda_status((call), #call, __FILE__, __LINE__, (e)))

// After a kernel launch: an error code where its configuration is bad. (A later failure shows at the next sync.)
#define CUDA_LAUNCHED(e) CUDA_CALL(cudaGetLastError(), e)

// Grants a kernel `bytes` of dynamic shared memory: more than 48 KB need it.
template <typename Kernel> static int shared_memory_allow(Kernel kernel, size_t bytes, Error *e) {
    return CUDA_CALL(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes), e);
}

static inline int device_attribute(int *value, cudaDeviceAttr attribute, Error *e) {
    int device;
    CUDA_TRY(cudaGetDevice(&device), e);
    return CUDA_CALL(cudaDeviceGetAttribute(value, attribute, device), e);
}

// The unit's own 2^x, without denormals.
__device__ static inline float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

#define UNROLL_FOR _Pragma("unroll") for // a loop that is unrolled, so that the arrays that it indexes are registers

__device__ static inline float real_to_float(float x) { return x; }
__device__ static inline float real_to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
