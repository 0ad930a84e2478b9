// attention: causal multi-head self-attention, forward and backward, without a T x T matrix in memory.
//
//     S = scale Q K^T, masked to key <= query     P = softmax(S)     O = P V     scale = 1/sqrt(D)
//
// The softmax is taken online, a tile of keys at a time (Dao et al. 2022, arXiv 2205.14135, algorithm 1; 2023,
// arXiv 2307.08691, section 3.1); the backward recomputes P from the saved log-sum-exp:
//
//     delta = rowsum(dO * O)     dV = P^T dO     dS = P * (dO V^T - delta)     dQ = scale dS K     dK = scale dS^T Q
//
// Every result is written once, by one thread block, in a fixed order: two runs give the same bits. Blocks draw work
// from a counter, of which a device has one: calls on one device must follow one another, as on one stream.
#ifndef GNS_ATTENTION_CUH
#define GNS_ATTENTION_CUH

#include "cuda/cuda_common.cuh"

// Any T >= 1 and 1 <= D <= ATTENTION_HEAD_SIZE_MAX (sizes.h); D = 64 and 128 are fast. All pointers on the device, 16-byte aligned.
// out (B, T, C), lse (B, NH, T) natural log, qkv (B, T, 3C): q, k, v, each (NH, D); C = NH * D.
int attention_forward(real *out, float *lse, const real *qkv, int B, int T, int NH, int D, cudaStream_t stream,
                      Error *e);

// Writes dqkv (B, T, 3C) whole. workspace: attention_workspace_bytes() of scratch, nothing kept between calls.
int attention_backward(real *dqkv, const real *dout, const real *qkv, const real *out, const float *lse,
                       void *workspace, int B, int T, int NH, int D, cudaStream_t stream, Error *e);

// Backward only: 8 bytes a query and head, T rounded up to 128.
size_t attention_workspace_bytes(int B, int T, int NH, int D);

#endif
