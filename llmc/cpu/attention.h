// attention: causal multi-head self-attention, forward and backward, in fp32.
//
// qkv is packed as GPT-2's c_attn makes it: a row holds q, k and v, each (NH, D) inside C = NH D. Scores are scaled by
// 1/sqrt(D). No (T, T) matrix is kept: the forward pass leaves the log-sum-exp of each row of scores, and the backward
// pass recomputes the probabilities from it, a tile at a time (as FlashAttention does: Dao et al. 2022,
// arXiv 2205.14135, section 3.1 and appendix B). One thread does one head of one example from beginning to end, so the
// bits do not depend on the thread count.
#ifndef GNS_CPU_ATTENTION_H
#define GNS_CPU_ATTENTION_H

#include "base/common.h"

// Scratch of every thread, made once for sequences up to max_T and heads up to max_D.
typedef struct Attention Attention;

int attention_create(Attention **out, int threads, size_t max_T, size_t max_D, Error *e);
void attention_free(Attention *at);                              // NULL is fine
size_t attention_bytes(int threads, size_t max_T, size_t max_D); // what attention_create allocates

// out (B,T,C) and lse (B,NH,T), the natural logarithm of the sum of exp of the scaled scores, from qkv (B,T,3C): of the
// rows t from `first` on; some before may be written again, as they were.
void attention_forward(Attention *at, float *out, float *lse, const float *qkv, size_t B, size_t T, size_t first,
                       size_t NH, size_t D);

// dqkv (B,T,3C), overwritten, from dout (B,T,C) and what the forward pass read and wrote.
void attention_backward(Attention *at, float *dqkv, const float *dout, const float *qkv, const float *out,
                        const float *lse, size_t B, size_t T, size_t NH, size_t D);

#endif
