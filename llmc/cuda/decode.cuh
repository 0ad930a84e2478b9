// decode: kernels of logits_of_last (train_gpt2.cu), a forward pass over one token that reads the stored keys and
// values of earlier tokens. These kernels round at the same points as a pass over all tokens, but sum in another order.
// The head size is a multiple of VEC.
#pragma once

#include "cuda/linear_sm90.cuh"

// Computes LINEAR_BIAS, LINEAR_RESIDUAL (y may be extra) or LINEAR_GELU (without slope) for one row. in, out:
// multiples of VEC. gamma, beta (in) normalise x first (LayerNorm); NULL: no LayerNorm. Kernels queued earlier may
// still run when this kernel reads weight, bias, gamma and beta, so they must not write these.
int decode_linear(const Linear &l, const real *gamma, const real *beta, cudaStream_t stream, Error *e);

// out (C) = attention of the query in row `row` of qkv (T, 3C) to the keys in rows 0..row.
int decode_attention(real *out, const real *qkv, int row, int heads, int head_size, cudaStream_t stream, Error *e);
