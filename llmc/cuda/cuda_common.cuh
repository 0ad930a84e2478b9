// cuda_common: the element type of the build, and checked CUDA calls.
#pragma once

#include "base/common.h"
#include "model/modes.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

// real: type of the working weights, of activations and their gradients. Statistics, parameter gradients, moments,
// master weights and arithmetic inside kernels are fp32 in every build. The 16-bit builds differ in these names only:
//   REAL_NAME      the type in messages            REAL_PTX     in the tensor cores' instructions
//   REAL_LIBRARY   in cuBLASLt                     REAL_MAP     in tensor maps (cuda.h)
//   REAL_PAIR      two floats to a pair of values
//   REAL_OLDEST    ten times the oldest compute capability that the kernels run on
//   pack, unpack   two floats to values in a register; value i of such a register
#if defined(GNS_FP32)
typedef float real; // make PRECISION=FP32: no TF32; for comparing with the CPU engine
#    define REAL_NAME "fp32"
constexpr Dtype REAL_DTYPE = DTYPE_FP32;
constexpr cudaDataType_t REAL_LIBRARY = CUDA_R_32F;
constexpr int REAL_OLDEST = 80;
#    define REAL_MAP CU_TENSOR_MAP_DATA_TYPE_FLOAT32
#elif defined(GNS_FP16)
typedef __half real; // make PRECISION=FP16: with loss scaling, for GPUs before Ampere
constexpr Dtype REAL_DTYPE = DTYPE_FP16;
constexpr cudaDataType_t REAL_LIBRARY = CUDA_R_16F;
constexpr int REAL_OLDEST = 75;
#    define REAL_NAME "fp16"
#    define REAL_PTX  "f16"
#    define REAL_MAP  CU_TENSOR_MAP_DATA_TYPE_FLOAT16
#    define REAL_PAIR __floats2half2_rn
__device__ static inline float unpack(unsigned pair, int i) {
    return __half2float(__ushort_as_half((unsigned short)(i ? pair >> 16 : pair)));
}
#else
typedef __nv_bfloat16 real;
constexpr Dtype REAL_DTYPE = DTYPE_BF16;
constexpr cudaDataType_t REAL_LIBRARY = CUDA_R_16BF;
constexpr int REAL_OLDEST = 80;
#    define REAL_NAME "bf16"
#    define REAL_PTX  "bf16"
#    define REAL_MAP  CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
#    define REAL_PAIR __floats2bfloat162_rn
__device__ static inline float unpack(unsigned pair, int i) { // a bf16 is the upper half of a float
    return __uint_as_float(i ? pair & 0xffff0000u : pair << 16);
}
#endif
#ifndef GNS_FP32
__device__ static inline unsigned pack(float low, float high) {
    const auto pair = REAL_PAIR(low, high);
    return *reinterpret_cast<const unsigned *>(&pair);
}
#endif

// Converts a CUDA status to an error code: 71 for memory, 70 otherwise.
static inline int cuda_status(cudaError_t status, const char *call, const char *file, int line, Error *e) {
    if (status == cudaSuccess) return 0;
    return error_set(e, file, line, status == cudaErrorMemoryAllocation ? ERR_MEMORY : ERR_INTERNAL, NULL, "%s: %s",
                     call, cudaGetErrorString(status));
}
#define CUDA_CALL(call, e) cuda_status((call), #call, __FILE__, __LINE__, (e))
#define CUDA_TRY(call, e)  TRY(cuda_status((call), #call, __FILE__, __LINE__, (e)))

// Allows a kernel `bytes` of dynamic shared memory. Required if the kernel uses more than 48 KB of shared memory.
template <typename Kernel> static int shared_memory_allow(Kernel kernel, size_t bytes, Error *e) {
    return CUDA_CALL(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes), e);
}

static inline int device_attribute(int *value, cudaDeviceAttr attribute, Error *e) {
    int device;
    CUDA_TRY(cudaGetDevice(&device), e);
    return CUDA_CALL(cudaDeviceGetAttribute(value, attribute, device), e);
}

constexpr float LOG2E = 1.4426950408889634f;

// 2^x by the hardware's approximation; denormal results become 0.
__device__ static inline float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

#define UNROLL_FOR _Pragma("unroll") for // unrolling keeps the indexed arrays in registers
