// attention_paths: the code paths of attention.cuh, and what they share.
#pragma once

#include "cuda/attention.cuh"
#include <float.h>
#include <math.h>

// Softmax runs in base 2 throughout: exp2(x log2 e) is one multiply-add and one instruction.
constexpr float LOG2E = 1.4426950408889634f;
constexpr float LN2 = 0.6931471805599453f;

// The workspace of the backward, filled by its first kernel. In the padding lse2 is infinite, so that P = exp2(S - lse2) is
// zero, and delta is zero.
struct AttentionRows {
    float *lse2;  // (B, NH, padded T) lse * log2(e)
    float *delta; // (B, NH, padded T) rowsum(dO * O)
    // Column sums of dqkv as stored, of ATTENTION_SUM_ROWS rows each, as a ColumnSplit has them: (slots, 3C); or NULL.
    float *columns;
};

enum { ATTENTION_SUM_ROWS = 64 }; // those of a warpgroup

typedef int AttentionForward(real *out, float *lse, const real *qkv, unsigned *ticket, AttentionShape s,
                             const AttentionMasks &masks, cudaStream_t stream, Error *e);
typedef int AttentionBackward(real *dqkv, const real *dout, const real *qkv, const real *out, const float *lse,
                              AttentionRows rows, unsigned *ticket, AttentionShape s, const AttentionMasks &masks,
                              cudaStream_t stream, Error *e);

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

// The first key that a query of example b sees but for the causal mask, and the last query that sees a key. Rows beyond T
// are as the last one.
__device__ static inline int first_key(const AttentionMasks &masks, AttentionShape s, int b, int query) {
    return masks.first ? masks.first[(size_t)b * s.T + min(query, s.T - 1)] : 0;
}
__device__ static inline int last_query(const AttentionMasks &masks, AttentionShape s, int b, int key) {
    return masks.last ? masks.last[(size_t)b * s.T + min(key, s.T - 1)] : s.T - 1;
}

// Dropout of one head of an example.
struct HeadDropout {
    Dropout dropout;
    int head; // 0 to NH - 1
    DropoutBlocks blocks;

    __device__ HeadDropout(const AttentionMasks &masks, int b, int head_)
        : dropout(dropout_at(masks.dropout, masks.dropout.example + b, masks.dropout.layer)), head(head_),
          blocks(masks.constants, dropout_counter(dropout, DROPOUT_PROBABILITY, head_, 0, 0)) {}
};

// Which of a lane's elements of a tile are kept: a bit each.
__device__ static inline unsigned kept_bit(int i) { return 1u << (i % 2 * 16 + i / 2); }

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

// The block of a 16 x 16 tile that has this lane's elements (math/dropout.h): the word of elements i and i + 1 is i / 2.
__device__ static inline RngBlock lane_block(const HeadDropout &h, unsigned query0, unsigned key0) {
    unsigned lane = threadIdx.x % 32;
    return h.blocks.block(((lane / 4) << 16 | lane % 4) + ((query0 / 2) << 16) + key0 / 4);
}

// Of elements i < E of a tile: 16 queries from query0 on, 2 E keys.
template <int E> __device__ static inline unsigned lane_kept(const HeadDropout &h, int query0, int key0) {
    unsigned kept = 0;
    UNROLL_FOR (int k = 0; k < E / 8; k++) {
        const RngBlock block = lane_block(h, query0, key0 + 16 * k);
        UNROLL_FOR (int w = 0; w < 4; w++)
            kept |= dropout_kept(h.blocks.c, block.word[w]) & (kept_bit(0) | kept_bit(1)) << (4 * k + w);
    }
    return kept;
}

// The same of the transposed tile: 16 keys, 2 E queries. A lane's bits of all 8 x 8 matrices of the tile change places at
// once, those of two neighbouring queries in a register's halves.
template <int E> __device__ static inline unsigned lane_kept_transposed(const HeadDropout &h, int query0, int key0) {
    unsigned kept = 0, transposed;
    UNROLL_FOR (int k = 0; k < E / 8; k++) {
        const RngBlock block = lane_block(h, query0 + 16 * k, key0);
        UNROLL_FOR (int w = 0; w < 4; w++)
            kept |= dropout_kept(h.blocks.c, block.word[w]) & (kept_bit(0) | kept_bit(1))
                                                                  << (4 * k + w % 2 * 2 + w / 2);
    }
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(kept));
    return transposed;
}

// All ones in each half of a word whose element is kept, of elements 2 i and 2 i + 1: a byte's sign bit, four times.
__device__ static inline unsigned kept_pair(unsigned kept, int i) {
    unsigned mask;
    asm("prmt.b32 %0, %1, 0, %2;" : "=r"(mask) : "r"(kept << (7 - i % 8)), "r"(i < 8 ? 0xaa88 : 0xbb99));
    return mask;
}

// Over the 4 lanes that share a row.
__device__ static inline float row_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
    return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}

__device__ static inline float row_sum(float x) {
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}
#else
enum { LANES = 8 }; // that share a row

__device__ static inline float row_max(float x) {
    UNROLL_FOR (int offset = LANES / 2; offset > 0; offset /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, offset));
    return x;
}

__device__ static inline float row_sum(float x) {
    UNROLL_FOR (int offset = LANES / 2; offset > 0; offset /= 2) x += __shfl_xor_sync(~0u, x, offset);
    return x;
}
#endif
