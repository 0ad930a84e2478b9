// fp8: e4m3 copies of 16-bit tensors for products (math/fp8.h), on the device.
#pragma once

#include "cuda/cuda_common.cuh"
#include "math/fp8.h"

// An e4m3 copy that a kernel writes beside its output y. The copy is of the stored, rounded y.
struct Fp8Copy {
    uint8_t *codes = NULL; // like y; NULL: no copy
    float scale = 1;       // 2^k: codes are of y scale
    float *amax = NULL;    // in device memory: raised to the largest |y|, NaN above all; NULL: not wanted
};

// Returns the codes of low and high, low in the low byte. On Hopper one instruction.
__device__ static inline uint16_t fp8_pack(float low, float high) {
    uint16_t codes;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(high), "f"(low));
    return codes;
}

// Raises *amax to the largest x >= 0 (or NaN) of a warp. All lanes must call. Bits of such floats sort like integers.
__device__ static inline void fp8_raise(float *amax, float x) {
    const unsigned most = __reduce_max_sync(~0u, __float_as_uint(x));
    if (threadIdx.x % 32 == 0 && most) atomicMax((unsigned *)amax, most);
}
