// attention_paths: the code paths of attention.cuh, and what they share.
#pragma once

#include "cuda/attention.cuh"
#include <math.h>

// Softmax runs in base 2 throughout: exp2(x log2 e) is one multiply-add and one instruction.
constexpr float LOG2E = 1.4426950408889634f;
constexpr float LN2 = 0.6931471805599453f;

// The workspace of the backward, filled by its first kernel. In the padding lse2 is infinite, so that P = exp2(S - lse2) is zero, and delta is zero.
struct AttentionRows {
    float *lse2;  // (B, NH, padded T) lse * log2(e)
    float *delta; // (B, NH, padded T) rowsum(dO * O)
};

typedef int AttentionForward(real *out, float *lse, const real *qkv, unsigned *ticket, AttentionShape s,
                             cudaStream_t stream, Error *e);
typedef int AttentionBackward(real *dqkv, const real *dout, const real *qkv, const real *out, const float *lse,
                              AttentionRows rows, unsigned *ticket, AttentionShape s, cudaStream_t stream, Error *e);

// Any GPU from REAL_OLDEST on, any D <= 128: mma.sync on 16 bits, plain fp32 (no TF32) in the FP32 build.
AttentionForward attention_tiled_forward;
AttentionBackward attention_tiled_backward;

#ifndef GNS_FP32
// 16 bits on Hopper: wgmma and the copy engine, D = 64 or 128. usable: sets *yes if shape, GPU and build allow it.
int attention_sm90_usable(bool *yes, AttentionShape s, Error *e);
AttentionForward attention_sm90_forward;
AttentionBackward attention_sm90_backward;
#endif

static inline float attention_scale(AttentionShape s) { return 1.0f / sqrtf((float)s.D); }

constexpr int VECTOR = 16 / sizeof(real); // elements of a 16-byte access

__device__ static inline float dot_vectors(uint4 a, uint4 b) {
    real x[VECTOR], y[VECTOR];
    *(uint4 *)x = a;
    *(uint4 *)y = b;
    float sum = 0.0f;
    UNROLL_FOR (int i = 0; i < VECTOR; i++) sum += real_to_float(x[i]) * real_to_float(y[i]);
    return sum;
}

template <int N> __device__ static inline void clear(float (&c)[N]) {
    UNROLL_FOR (int i = 0; i < N; i++) c[i] = 0.0f;
}

#ifndef GNS_FP32
// ---------------------------------------------------------------------------------------------------------------------
// Accumulators of mma.m16n8k16 and of wgmma: a warp owns 16 rows. A lane's element i of a matrix (16, N) lies
// fragment_row(i) rows below row lane / 4, in column fragment_column(i): it has parts of two rows 8 apart.

__device__ static inline int fragment_row(int i) { return i / 2 % 2 * 8; }
__device__ static inline int fragment_column(int i) { return i / 4 * 8 + (int)threadIdx.x % 4 * 2 + i % 2; }

// The k-th of a lane's elements in its first (i = 0) or second (i = 1) row.
__device__ static inline int fragment_element(int i, int k) { return k / 2 * 4 + 2 * i + k % 2; }

// Over the 4 lanes that share a row.
__device__ static inline float row_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
    return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}

__device__ static inline float row_sum(float x) {
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}
#endif
