// fp8: e4m3 copies of bf16 tensors (math/fp8.h). The kernel that computes a tensor writes its copy, or fp8_cast does.
#pragma once

#include "cuda/cuda_common.cuh"
#include "cuda/reduce.cuh"
#include "cuda/vec.cuh"
#include "math/fp8.h"

constexpr bool FP8_BUILT = REAL_DTYPE == DTYPE_BF16; // other builds make no copies

// An e4m3 copy of the rounded output y of a kernel.
struct Fp8Copy {
    uint8_t *codes = NULL; // shape of y; NULL: no copy
    float scale = 1;       // 2^k; codes[i] = e4m3(y[i] scale)
    float *amax = NULL;    // device memory, raised to the largest |y|; NaN counts as the largest. NULL: not measured
    bool alone = false; // y itself is not stored; codes may lie in its memory. layernorm_forward and linear_sm90 only
    // (B, C, T): linear_sm90 also stores the codes of y (B, T, C) here. T is a multiple of 16. NULL: not wanted.
    uint8_t *transposed = NULL;
    int T = 0;
    // If groups > 0: low (rows, FP8_GROUPS) = low parts of y (rows, columns) (math/fp8.h). channels, candidates: the
    // groups' entries and amax in device memory; candidates are raised. layernorm_forward, linear_sm90, fp8_cast only
    int group = 0, groups = 0, columns = 0;
    uint8_t *low = NULL;
    const int8_t *channels = NULL;
    float *candidates = NULL;
};

// Returns the codes of `low` and `high`, low's in the low byte; 0 on GPUs before Ada.
__device__ static inline uint16_t fp8_pack(float low, float high) {
    uint16_t codes = 0;
#if __CUDA_ARCH__ >= 890
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(high), "f"(low));
#endif
    return codes;
}

// fp8_raise_to raises *amax to x; fp8_raise raises *amax to the largest x of all lanes. x is >= 0 or NaN, so its bits,
// read as an integer, have the order of x.
__device__ static inline void fp8_raise_to(float *amax, float x) {
    if (x != 0) atomicMax((unsigned *)amax, __float_as_uint(x));
}
__device__ static inline void fp8_raise(float *amax, float x) {
#if __CUDA_ARCH__ >= 800
    x = __uint_as_float(__reduce_max_sync(~0u, __float_as_uint(x)));
    if (threadIdx.x % 32 == 0) fp8_raise_to(amax, x);
#endif
}

// Raises `most` to the |x| of a pack, as bits of bf16. The halves of `most` are the maxima of even and of odd values.
__device__ static inline void fp8_most(unsigned &most, const Pack<VEC> &x) {
    UNROLL_FOR (int i = 0; i < VEC / 2; i++) most = __vmaxu2(most, x.words[i] & 0x7fff7fff);
}
__device__ static inline float fp8_most_value(unsigned most) {
    return __uint_as_float(max(most << 16, most & 0xffff0000u));
}

// Returns the codes of 8 values.
__device__ static inline uint2 fp8_codes(const Pack<VEC> &x, float scale) {
    float f[VEC];
    unsigned codes[VEC / 2];
    pack_get(f, x);
    UNROLL_FOR (int i = 0; i < VEC / 2; i++) codes[i] = fp8_pack(f[2 * i] * scale, f[2 * i + 1] * scale);
    return {codes[0] | codes[1] << 16, codes[2] | codes[3] << 16};
}

// Writes the codes of 8 values, y, which are values [i, i + 8) of the tensor. Raises `most` to them (fp8_most).
__device__ static inline void fp8_copy(const Fp8Copy &copy, size_t i, const Pack<VEC> &y, unsigned &most) {
    if (copy.codes) *(uint2 *)(copy.codes + i) = fp8_codes(y, copy.scale);
    fp8_most(most, y);
}

// Returns the code of a value's low part.
__device__ static inline uint8_t fp8_low_code(float x, float scale) {
    return (uint8_t)fp8_pack(x * scale - fp8_round(x * scale), 0);
}

// Writes the low part of a row's group, values [c, c + 8) = y, and raises the group's candidate.
__device__ static inline void fp8_low_copy(const Fp8Copy &copy, int row, int c, const Pack<VEC> &y) {
    static_assert(!FP8_BUILT || VEC == FP8_LN1_GROUP);
    const int g = c / VEC, channel = fp8_channel(copy.channels[g], VEC);
    float f[VEC], x = 0;
    uint32_t most = 0;
    pack_get(f, y);
    UNROLL_FOR (int j = 0; j < VEC; j++) x = j == channel ? f[j] : x;
    copy.low[(size_t)row * FP8_GROUPS + g] = fp8_low_code(x, copy.scale);
    if (row % FP8_LOW_ROWS) return;
    UNROLL_FOR (int j = 0; j < VEC; j++) most = max(most, fp8_candidate(f[j], j));
    fp8_raise_to(copy.candidates + g, __uint_as_float(most));
}

// Writes the copy of y (n values, n a multiple of 8). No-op if copy.amax is NULL.
int fp8_cast(const Fp8Copy &copy, const real *y, size_t n, cudaStream_t stream, Error *e);

// low (out, FP8_GROUPS) = a weight's codes (out, in) in the channels of x's low parts. copy: x's. No-op without groups.
int fp8_low_columns(uint8_t *low, const Fp8Copy &copy, const uint8_t *codes, int out, cudaStream_t stream, Error *e);

// transposed (B, C, T) = codes of y (B, T, C); C is a multiple of 64, T of 16. A weight has B = 1. If copy.codes or
// copy.amax is set, fp8_cast_transposed also writes the copy. If columns.sum is set, it adds y's column sums to `jobs`
// as one job (fp8_column_bytes).
size_t fp8_column_bytes(int B, int T, int C);
int fp8_cast_transposed(uint8_t *transposed, const Fp8Copy &copy, const real *y, int B, int T, int C,
                        const ColumnGradient &columns, ColumnJobs *jobs, cudaStream_t stream, Error *e);
int fp8_transpose(uint8_t *transposed, const uint8_t *codes, int B, int T, int C, cudaStream_t stream, Error *e);

// *norm = infinity if one of `count` sites saturates (fp8_saturates). k, amax: in device memory.
int fp8_veto(double *norm, const int8_t *k, const float *amax, int count, cudaStream_t stream, Error *e);
