// loss: cross-entropy of one row of logits, in nats, from the row's maximum and sum = sum of exp(logit - max).
//   loss = logsumexp - logit[target]      dlogit = softmax - onehot(target), softmax = exp(logit - logsumexp)
#pragma once

#include "base/common.h"

#include <math.h>

GNS_HD static inline float loss_logsumexp(float max, float sum) { return max + logf(sum); }

GNS_HD static inline float loss_at(float logsumexp, float target_logit) { return logsumexp - target_logit; }

// scale x dlogit of the target, from p = scale x softmax, which is the gradient of every other logit.
GNS_HD static inline float loss_gradient_at_target(float p, float scale) { return p - scale; }
