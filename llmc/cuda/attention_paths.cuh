// attention_paths: the code paths behind attention.cuh, and what they share.
#ifndef GNS_ATTENTION_PATHS_CUH
#define GNS_ATTENTION_PATHS_CUH

#include "cuda/attention.cuh"
#include <math.h>

struct AttentionShape {
    int B, T, NH, D; // batch, tokens, heads, head size

    __host__ __device__ int C() const { return NH * D; }
    __host__ __device__ int heads() const { return B * NH; }
    // Rows of the workspace are padded so that a tile never runs off their end.
    __host__ __device__ int padded_T() const { return (T + 127) / 128 * 128; }
    __host__ __device__ int tiles(int rows) const { return (T + rows - 1) / rows; }
};

// The workspace of the backward. Softmax runs in base 2 throughout: exp2(x log2 e) is one multiply-add and one
// instruction. In the padding lse2 is infinite, so that P = exp2(S - lse2) is zero there, and delta is zero.
struct AttentionRows {
    float *lse2;  // (B, NH, padded T) lse * log2(e)
    float *delta; // (B, NH, padded T) rowsum(dO * O)
};

constexpr float LOG2E = 1.4426950408889634f;
constexpr float LN2 = 0.6931471805599453f;

static inline float attention_scale(AttentionShape s) { return 1.0f / sqrtf((float)s.D); }

#ifdef GNS_FP32

// Plain fp32, for comparing engines: no tensor cores, no TF32.
int attention_fp32_forward(float *out, float *lse, const float *qkv, AttentionShape s, cudaStream_t stream, Error *e);
int attention_fp32_backward(float *dqkv, const float *dout, const float *qkv, AttentionRows rows, AttentionShape s,
                            cudaStream_t stream, Error *e);

#else

// bf16 on any GPU from sm_80: mma.sync, any D <= 128.
int attention_mma_forward(real *out, float *lse, const real *qkv, AttentionShape s, cudaStream_t stream, Error *e);
int attention_mma_backward(real *dqkv, const real *dout, const real *qkv, AttentionRows rows, AttentionShape s,
                           cudaStream_t stream, Error *e);

// bf16 on Hopper: wgmma and the copy engine, D = 64 or 128. usable: sets *yes if shape, GPU and build allow it.
int attention_sm90_usable(bool *yes, AttentionShape s, Error *e);
int attention_sm90_forward(real *out, float *lse, const real *qkv, AttentionShape s, cudaStream_t stream, Error *e);
int attention_sm90_backward(real *dqkv, const real *dout, const real *qkv, AttentionRows rows, AttentionShape s,
                            cudaStream_t stream, Error *e);

#endif

// Fills rows from lse, dout and out: the start of every backward.
int attention_rows_fill(AttentionRows rows, const float *lse, const real *dout, const real *out, AttentionShape s,
                        cudaStream_t stream, Error *e);
AttentionRows attention_rows_at(void *workspace, AttentionShape s);

#endif
