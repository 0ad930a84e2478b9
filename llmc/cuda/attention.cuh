// attention: causal multi-head self-attention, forward and backward, without a T x T matrix in memory.
//
//     S = scale Q K^T, masked to key <= query     P = softmax(S)     O = P V     scale = 1/sqrt(D)
//
// The forward computes the softmax online, one tile of keys at a time (Dao et al. 2022, arXiv 2205.14135, algorithm 1;
// 2023, arXiv 2307.08691, section 3.1). The backward recomputes P from the saved log-sum-exp (* is elementwise):
//
//     delta = rowsum(dO * O)     dV = P^T dO     dS = P * (dO V^T - delta)     dQ = scale dS K     dK = scale dS^T Q
//
// Dropout multiplies P by factors M (math/dropout.h), drawn again in every pass:
//
//     O = (P * M) V     dV = (P * M)^T dO     dS = P * (M * dO V^T - delta)
//
// With documents a query sees keys of its own document only. One block computes each result, in a fixed order of sums,
// so two runs give the same bits.
#pragma once

#include "cuda/cuda_common.cuh"
#include "cuda/dropout.cuh"

// B examples of T >= 1 tokens, NH heads of size 1 <= D <= ATTENTION_HEAD_SIZE_MAX (cuda_sizes.h). D = 64, 128 are fast.
struct AttentionShape {
    int B, T, NH, D;

    __host__ __device__ int C() const { return NH * D; }
    __host__ __device__ int heads() const { return B * NH; }
    __host__ __device__ int padded_T() const { return (T + 127) / 128 * 128; } // no tile ends after padded_T
    __host__ __device__ int tiles(int rows) const { return (T + rows - 1) / rows; }
};

// Masks besides the causal one.
struct AttentionMasks {
    const uint16_t *first, *last; // (B, T) from embedding_documents; NULL: an example is one document
    Dropout dropout;              // dropout.example: number of example 0; example b has number dropout.example + b
    DropoutConstants constants;   // dropout_constants(dropout)
    int first_head = 0;           // the index that qkv's first head has in the whole model
};

// A call. Pointers are on the device, aligned to 16 bytes.
struct Attention {
    AttentionShape shape;
    AttentionMasks masks = {};
    unsigned *ticket = NULL; // (1) counts drawn tiles; 0 between calls. Overlapping calls need a ticket each
    const real *qkv = NULL;  // (B, T, 3C): q, k, v, each (NH, D)
    real *out = NULL;        // (B, T, C)
    float *lse = NULL;       // (B, NH, T), natural log
    const real *dout = NULL; // (B, T, C). This field and those below: backward only
    real *dqkv = NULL;       // (B, T, 3C)
    void *workspace = NULL;  // attention_workspace_bytes of scratch
};

// Writes out and lse.
int attention_forward(const Attention &a, cudaStream_t stream, Error *e);

// Writes dqkv.
int attention_backward(const Attention &a, cudaStream_t stream, Error *e);

// Bytes of the backward's workspace.
size_t attention_workspace_bytes(AttentionShape s);
