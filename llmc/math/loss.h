// loss: cross-entropy of one row of logits, in nats, from the row's maximum and sum = sum of exp(logit - max).
//   loss = logsumexp - logit[target]      dlogit = softmax - onehot(target), softmax = exp(logit - logsumexp)
// Label smoothing s (Szegedy et al. 2016, arXiv 1512.00567, section 7) spreads a share s of the target's probability
// evenly over all V tokens, the target included:
//   loss = logsumexp - (1 - s) logit[target] - s mean(logit)      dlogit = softmax - (1 - s) onehot(target) - s / V
#pragma once

#include "base/common.h"

#include <math.h>

GNS_HD static inline float loss_logsumexp(float max, float sum) { return max + logf(sum); }

GNS_HD static inline float loss_at(float logsumexp, float target_logit) { return logsumexp - target_logit; }

// Returns the loss with smoothing. loss: the loss without smoothing.
GNS_HD static inline float loss_smoothed(float loss, float target_logit, float mean_logit, float smoothing) {
    return loss + smoothing * (target_logit - mean_logit);
}

// Returns scale * dlogit[target]. p: scale * softmax[target]. For all other logits scale * dlogit = scale * softmax.
// With smoothing s pass the same p, but (1 - s) scale; subtract loss_gradient_everywhere from every scale * dlogit.
GNS_HD static inline float loss_gradient_at_target(float p, float scale) { return p - scale; }

GNS_HD static inline float loss_gradient_everywhere(float scale, float smoothing, int V) {
    return scale * smoothing / (float)V;
}
