// crossentropy: softmax, cross-entropy and its gradient in one kernel, in place on a chunk of logits.
#pragma once

#include "cuda/cuda_common.cuh"

// A chunk of R rows of the flat (B, T) positions, starting at position row0:
//   losses[r] = logsumexp(logits[r][0..V-1]) - logits[r][target]                   losses (R) fp32: pass losses + row0
//   logits[r] = (softmax(logits[r]) - onehot(target)) scale / T for columns < V, 0 for V <= column < Vp
// scale: of the loss; 0: no gradient, logits unchanged.
// smoothed (R): losses with label smoothing (math/loss.h), whose gradient is written; NULL: no smoothing.
// logits (R, Vp): row stride Vp, a multiple of 8. Padding is never read.
// tokens (B, T+1): the target of position n is tokens[n / T][n % T + 1].
int crossentropy(float *losses, float *smoothed, float smoothing, real *logits, float scale, const uint16_t *tokens,
                 int row0, int R, int T, int V, int Vp, cudaStream_t stream, Error *e);

// Two calls around a product that stores exponentials instead of logits (LINEAR_SOFTMAX) save a pass: exponentials =
// exp(logit - target's logit), sum = their sum over a row, softmax = exponentials / sum, and
//   dlogits = factor (exponentials - sum onehot(target)),  factor = scale / T / sum
// The next products apply the factor: the input gradient per row (LINEAR_SCALED), the weight gradient through scaled x.

// Before the product: target_logits[r] = x[r] . weight[target]; x (R, C), weight (.., C), C a multiple of 8.
int crossentropy_targets(float *target_logits, const real *x, const real *weight, const uint16_t *tokens, int row0,
                         int R, int T, int C, cudaStream_t stream, Error *e);
// After the product; sums (tiles, R): its row sums by tile. losses[r] = log(sum); exponentials[r][target] = 1 - sum,
// rounded once; factors[r] = factor; x[r] *= factor. Losses above LINEAR_EXPONENT_MAX log 2 come out too small.
int crossentropy_finish(float *losses, float *factors, real *exponentials, real *x, const float *sums, int tiles,
                        float scale, const uint16_t *tokens, int row0, int R, int T, int C, int Vp, cudaStream_t stream,
                        Error *e);
