// vector_math: the widest float vector of the machine, with exp and GELU.
//
// The vector extensions of GCC and Clang compile one source for AVX-512, AVX2, NEON and everything else. The kernels
// need -ffp-contract=fast, which makes a * b + c one instruction: GCC's default, but not Clang's.
#pragma once

#include "math/gelu.h"

#ifdef __SSE2__
#    include <immintrin.h>
#endif
#include <stddef.h>
#include <stdint.h>

#ifdef __AVX512F__
enum { VEC = 16 }; // floats in a vector
#elif defined(__AVX__)
enum { VEC = 8 };
#else
enum { VEC = 4 }; // SSE, NEON
#endif

typedef float Vec __attribute__((vector_size(VEC * 4), may_alias));
typedef float VecUnaligned __attribute__((vector_size(VEC * 4), may_alias, aligned(4)));
typedef int32_t VecInt __attribute__((vector_size(VEC * 4), may_alias));
typedef uint32_t VecBits __attribute__((vector_size(VEC * 4), may_alias));

#define VECTOR_INLINE static inline __attribute__((always_inline))

VECTOR_INLINE Vec vec_load(const float *p) { return *(const VecUnaligned *)p; }
VECTOR_INLINE void vec_store(float *p, Vec v) { *(VecUnaligned *)p = v; }

// vec_stream stores past the caches. p must be aligned to a vector, and the caller must write the whole cache line at
// once. vec_stream_end must come before any thread reads the result.
#ifdef __AVX2__
enum { VEC_STREAMS = 1 };
#    ifdef __AVX512F__
VECTOR_INLINE void vec_stream(float *p, Vec v) { _mm512_stream_ps(p, (__m512)v); }
#    else
VECTOR_INLINE void vec_stream(float *p, Vec v) { _mm256_stream_ps(p, (__m256)v); }
#    endif
VECTOR_INLINE void vec_stream_end(void) { _mm_sfence(); }
#else
enum { VEC_STREAMS = 0 };
VECTOR_INLINE void vec_stream(float *p, Vec v) { vec_store(p, v); }
VECTOR_INLINE void vec_stream_end(void) {}
#endif

VECTOR_INLINE Vec vec_set(float x) { return (Vec){0} + x; }
VECTOR_INLINE Vec vec_select(VecInt mask, Vec yes, Vec no) { // mask: -1 or 0 in each place
#if defined(__AVX2__) && !defined(__AVX512F__)
    return (Vec)_mm256_blendv_ps((__m256)no, (__m256)yes, (__m256)mask);
#else
    return (Vec)((mask & (VecInt)yes) | (~mask & (VecInt)no));
#endif
}
VECTOR_INLINE float vec_sum(Vec v) {
    float sum = v[0];
    for (int i = 1; i < VEC; i++) sum += v[i];
    return sum;
}

VECTOR_INLINE float largest(const float *x, size_t n) {
    float max = x[0];
#pragma omp simd reduction(max : max)
    for (size_t i = 0; i < n; i++) max = x[i] > max ? x[i] : max;
    return max;
}

// Returns exp(x) to 1.1 ulp; 0 if that would be subnormal (x < -87.33), infinity for x above 88.72, NaN for NaN.
// Cody & Waite's reduction: x = n ln2 + r with |r| <= ln2/2, so exp(x) = 2^n exp(r), with exp(r) from a polynomial.
VECTOR_INLINE Vec vec_exp(Vec x) {
    const float log2e = 0x1.715476p+0f;
    const float ln2_high = 0x1.62ep-1f, ln2_low = 0x1.0bfbe8p-15f; // n ln2_high is exact: 13 bits and |n| <= 2^7
    const float shift = 0x1.8p+23f;                                // x + shift has x, rounded, in its low bits
    Vec biased = x * log2e + shift, n = biased - shift;
    Vec r = x - n * ln2_high - n * ln2_low;
    // exp(r) = 1 + r + r^2 p(r); p is a minimax fit on |r| <= ln2/2
    Vec p = r * 0x1.6850e4p-10f + 0x1.123bccp-7f;
    p = p * r + 0x1.555b98p-5f;
    p = p * r + 0x1.55548ep-3f;
    p = p * r + 0x1.fffff8p-2f;
    Vec exp_r = (p * r) * r + r + 1.0f;
    // Multiply by 2^n in two steps, since 2^128 would overflow. For x far outside the range the unsigned n_bits may
    // wrap; the selects below discard such results.
    VecBits n_bits = (VecBits)biased - (VecBits)vec_set(shift), half = (VecBits)((VecInt)n_bits >> 1);
    Vec result = exp_r * (Vec)((half + 127) << 23) * (Vec)((n_bits - half + 127) << 23);
    result = vec_select(x < -87.33654f, (Vec){0}, result);
    return vec_select(x > 88.72284f, vec_set(__builtin_inff()), result);
}

VECTOR_INLINE Vec vec_abs(Vec x) { return (Vec)((VecInt)x & INT32_MAX); }

// GELU is x s with s = sigmoid(2u) (math/gelu.h). With t = exp(-|2u|) and r = 1/(1 + t), s is r for x >= 0 and t r for
// x < 0, so nothing overflows or cancels.
VECTOR_INLINE Vec vec_gelu(Vec x) {
    Vec t = vec_exp(-GELU_SCALE * vec_abs(x) * (1.0f + GELU_CUBIC * x * x));
    return x * vec_select(x < 0.0f, t, vec_set(1)) / (1.0f + t);
}

// d/dx x s = s + x s (1 - s) d(2u)/dx, and s (1 - s) = t r^2
VECTOR_INLINE Vec vec_gelu_derivative(Vec x) {
    Vec square = x * x, t = vec_exp(-GELU_SCALE * vec_abs(x) * (1.0f + GELU_CUBIC * square)), r = 1.0f / (1.0f + t);
    Vec s = vec_select(x < 0.0f, t, vec_set(1)) * r, slope = GELU_SCALE * (1.0f + 3 * GELU_CUBIC * square);
    return s + x * slope * (t * r * r);
}
