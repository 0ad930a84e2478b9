// loss: cross-entropy of one row of logits, in nats, from the row's maximum and sum = sum of exp(logit - max).
//   loss = logsumexp - logit[target]      dlogit = softmax - onehot(target), softmax = exp(logit - logsumexp)
// Label smoothing s (Szegedy et al. 2016, arXiv 1512.00567, section 7) spreads a share s of the target's probability
// evenly over all V tokens, the target included:
//   loss = logsumexp - (1 - s) logit[target] - s mean(logit)      dlogit = softmax - (1 - s) onehot(target) - s / V
#pragma once

#include "base/common.h"

#include <math.h>

GNS_HD static inline float loss_logsumexp(float max, float sum) { return max + logf(sum); }

// Returns the loss with smoothing. loss: the loss without smoothing.
GNS_HD static inline float loss_smoothed(float loss, float target_logit, float mean_logit, float smoothing) {
    return loss + smoothing * (target_logit - mean_logit);
}
