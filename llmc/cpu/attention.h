// attention: causal multi-head self-attention, forward and backward. qkv, out and their gradients are of Attention.type
// (fp32 or bf16, cpu/value.h); everything in between is fp32.
//
// A row of qkv holds q, k and v, each (NH, D), with C = NH D, as GPT-2's c_attn makes it. Scores are scaled by
// 1/sqrt(D). No (T, T) matrix is kept: the forward pass stores the log-sum-exp of each row of scores, from which the
// backward pass recomputes the probabilities, a tile at a time (FlashAttention: Dao et al. 2022, arXiv 2205.14135,
// section 3.1 and appendix B). One thread computes a head of an example, so bits do not depend on the thread count.
#pragma once

#include "base/common.h"
#include "math/dropout.h"
#include "model/modes.h"

typedef struct {
    int threads;
    size_t max_T, max_D; // longest sequence, largest head
    float *scratch;      // attention_scratch(threads, max_T, max_D) floats, aligned to a vector
    Dtype type;
    Dropout dropout; // dropout of the layer and the first example; both passes must get the same one
    // (B, T): each token's position in its document, 0, 1, 2, ...; a token sees only its document. NULL: a row is one
    // document.
    const uint16_t *position;
    size_t first_head; // index of the first head in the whole model, for dropout
} Attention;

size_t attention_scratch(int threads, size_t max_T, size_t max_D);

// Computes rows t >= first of out (B,T,C) and of lse (B,NH,T) from qkv (B,T,3C). lse = ln(sum over keys of
// exp(scaled score)). May rewrite some rows before `first`, with unchanged values.
void attention_forward(const Attention *at, void *out, float *lse, const void *qkv, size_t B, size_t T, size_t first,
                       size_t NH, size_t D);

// Overwrites dqkv (B,T,3C). Reads dout (B,T,C), and qkv, out and lse of the forward pass.
void attention_backward(const Attention *at, void *dqkv, const void *dout, const void *qkv, const void *out,
                        const float *lse, size_t B, size_t T, size_t NH, size_t D);
