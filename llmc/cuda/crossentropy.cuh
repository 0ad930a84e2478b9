// crossentropy: softmax, cross-entropy and its gradient in one kernel, in place on a chunk of logits.
#pragma once

#include "cuda/cuda_common.cuh"

// Logits of R of the B T positions, from position row0 on.
struct LogitRows {
    float *losses = NULL;             // (R)
    float *smoothed = NULL;           // (R) losses with label smoothing (math/loss.h). NULL: not wanted
    float smoothing = 0;              // if > 0, dlogits is the gradient of the smoothed losses
    float onehot = 0, everywhere = 0; // set by crossentropy: dlogits[target] -= onehot, every dlogits -= everywhere
    real *logits = NULL;              // (R, Vp), Vp a multiple of 8. Padding is ignored
    const uint16_t *tokens = NULL;    // (B, T + 1): the target of position n is tokens[n / T][n % T + 1]
    int R = 0, row0 = 0, T = 0, V = 0, Vp = 0;
    float scale = 0; // loss scale; 0: no gradient, logits unchanged
};
//   losses[r] = logsumexp(logits[r][0..V-1]) - logits[r][target]
//   logits[r] = (softmax(logits[r]) - onehot(target)) scale / T for columns < V, 0 for V <= column < Vp
int crossentropy(LogitRows rows, cudaStream_t stream, Error *e);

// The two functions below save a pass over the logits. The head's product (LINEAR_SOFTMAX) stores, in place of logits,
// exponentials = exp(logit - shift), shift = target's logit. With sum = a row's sum of exponentials, softmax =
// exponentials / sum, and
//   dlogits = factor (exponentials - sum onehot(target)),  factor = scale / T / sum
// In bf16 the target's exponential is stored as 1. In e4m3 it is not 1, as shift is a bf16 product. Taking it as 1
// biased the loss by -0.02 (d12). Its rounding error, up to 2^-9, cancels in gradients, as `sum` has rounded terms.
// The product for the input gradient multiplies row r by its factor (LINEAR_SCALED). For the weight gradient,
// crossentropy_finish multiplies row r of x by its factor.

// Before the product: target_logits[r] = x[r] . weight[target]; x (R, C), weight (.., C), C a multiple of 8.
int crossentropy_targets(float *target_logits, const real *x, const real *weight, const LogitRows &k, int C,
                         cudaStream_t stream, Error *e);
// After the product. losses[r] = log(sum / exponentials[r][target]); then exponentials[r][target] -= sum, rounded once;
// factors[r] = factor; x[r] *= factor. Losses above LINEAR_EXPONENT_MAX log 2 come out too small.
struct LossFinish {
    LogitRows k;       // logits: the exponentials
    float *factors;    // (R)
    real *x;           // (R, C)
    const float *sums; // (tiles, R): the product's row sums by tile
    int tiles, C;
};
int crossentropy_finish(const LossFinish &f, cudaStream_t stream, Error *e);
