// crossentropy: softmax, cross-entropy and its gradient in one kernel, in place on a chunk of logits.
#pragma once

#include "cuda/cuda_common.cuh"

// A chunk of R rows of the flat (B, T) positions, starting at position row0:
//   losses[r] = logsumexp(logits[r][0..V-1]) - logits[r][target]                   losses (R) fp32: pass losses + row0
//   logits[r] = (softmax(logits[r]) - onehot(target)) scale / T for columns < V, 0 for V <= column < Vp
// scale: of the loss; 0: no gradient, and the logits stay.
// smoothed (R): the losses with label smoothing (math/loss.h), of which the gradient is taken; NULL: no smoothing.
// logits (R, Vp): row stride Vp, a multiple of 8. The padding is never read.
// tokens (B, T+1): the target of position n is tokens[n / T][n % T + 1].
int crossentropy(float *losses, float *smoothed, float smoothing, real *logits, float scale, const uint16_t *tokens,
                 int row0, int R, int T, int V, int Vp, cudaStream_t stream, Error *e);

// The same with a product that stores exponentials instead of logits (LINEAR_SOFTMAX), which saves a pass over them. The
// exponentials are exp(logit - target's logit); with their sum over a row, softmax = exponentials / sum, and
//   dlogits = factor (exponentials - sum onehot(target)),  factor = scale / T / sum
// The following products apply the factor: the inputs' gradient by row, the weights' through x, which is multiplied by it.

// Before the product, target_logits[r] = x[r] . weight[target]; x (R, C), weight (.., C), C a multiple of 8.
int crossentropy_targets(float *target_logits, const real *x, const real *weight, const uint16_t *tokens, int row0,
                         int R, int T, int C, cudaStream_t stream, Error *e);
// After it, with sums (tiles, R) of parts of the rows: losses[r] = log(sum); exponentials[r][target] -= sum, without
// rounding in between; factors[r]; x[r] *= factor. A loss above LINEAR_EXPONENT_MAX log 2 is too small.
int crossentropy_finish(float *losses, float *factors, real *exponentials, real *x, const float *sums, int tiles,
                        float scale, const uint16_t *tokens, int row0, int R, int T, int C, int Vp, cudaStream_t stream,
                        Error *e);
