// decode: the products of logits_of_last (train_gpt2.cu), a forward pass over one token. They round where those of a
// whole pass round; only sums have another order.
#pragma once

#include "cuda/linear_sm90.cuh"

// Computes LINEAR_BIAS, LINEAR_RESIDUAL (y may be extra) or LINEAR_GELU (without slope) for one row. in, out:
// multiples of VEC. gamma, beta (in): normalise x first; NULL: do not. Kernels queued earlier must not write weight,
// bias, gamma or beta: they may still run when these are read.
int decode_linear(const Linear &l, const real *gamma, const real *beta, cudaStream_t stream, Error *e);
