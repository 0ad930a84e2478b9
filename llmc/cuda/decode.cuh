// decode: kernels of logits_of_last (train_gpt2.cu): a forward pass over one token, with the stored keys and values of
// the tokens before it. These kernels round at the same points as a whole pass, but sum in another order. The head size
// is a multiple of VEC.
#pragma once

#include "cuda/linear_sm90.cuh"

// Computes LINEAR_BIAS, LINEAR_RESIDUAL (y may be extra) or LINEAR_GELU (without slope) for one row. in, out:
// multiples of VEC. gamma, beta (in): LayerNorm of x first; NULL: no LayerNorm. Kernels queued earlier must not write
// weight, bias, gamma or beta: they may still run when this kernel reads them.
int decode_linear(const Linear &l, const real *gamma, const real *beta, cudaStream_t stream, Error *e);

// out (C) = attention of the query in row `row` of qkv (T, 3C) to the keys in rows 0..row.
int decode_attention(real *out, const real *qkv, int row, int heads, int head_size, cudaStream_t stream, Error *e);
