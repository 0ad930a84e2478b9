// crossentropy: softmax, cross-entropy and its gradient in one kernel, in place on a chunk of logits.
#pragma once

#include "cuda/cuda_common.cuh"

// A chunk of R rows of the flat (B, T) positions, starting at position row0:
//   losses[r] = logsumexp(logits[r][0..V-1]) - logits[r][target]                   losses (R) fp32: pass losses + row0
//   logits[r] = (softmax(logits[r]) - onehot(target)) scale / T for columns < V, 0 for V <= column < Vp
// scale: of the loss; 0: no gradient, and the logits stay.
// With label smoothing (math/loss.h) `smoothed` (R) is that of the loss, and the gradient is its; smoothed NULL: there is
// none. logits (R, Vp): row stride Vp, a multiple of 8. The padding is never read.
// tokens (B, T+1): the target of position n is tokens[n / T][n % T + 1].
int crossentropy(float *losses, float *smoothed, float smoothing, real *logits, float scale, const uint16_t *tokens,
                 int row0, int R, int T, int V, int Vp, cudaStream_t stream, Error *e);
