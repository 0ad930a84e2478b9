// adamw: one parameter's step of AdamW, and LAMB's trust ratio.
// AdamW: the decoupled decay of Loshchilov and Hutter 2019 (arXiv 1711.05101, algorithm 2); the moments and bias
// correction of Kingma and Ba 2015 (arXiv 1412.6980, algorithm 1).
// LAMB: You et al. 2020 (arXiv 1904.00962, algorithm 2), with phi(x) = x. A tensor (the paper's layer) moves along
// AdamW's direction, weight decay included, at the rate lr |weights| / |direction|.
#pragma once

#include "base/common.h"
#include <math.h>

// Constants of one optimizer step, the same for all parameters.
typedef struct {
    float lr, beta1, beta2, eps, weight_decay;
    float bias1, bias2; // 1 - beta1^t, 1 - beta2^t at step t
    float grad_scale;   // clip factor / B: turns the summed gradient into the clipped mean gradient
} AdamWStep;

// t counts steps from 1. The corrections use the betas rounded to float, as the moments do. With betas in double the
// corrections would not match the moments: 1 - 0.999f is (1 - 1.3e-5) 0.001.
static inline AdamWStep adamw_step(double lr, double beta1, double beta2, double eps, double weight_decay, int64_t t,
                                   double grad_scale) {
    AdamWStep s = {(float)lr, (float)beta1, (float)beta2, (float)eps, (float)weight_decay, 0, 0, (float)grad_scale};
    s.bias1 = (float)(1.0 - pow((double)s.beta1, (double)t));
    s.bias2 = (float)(1.0 - pow((double)s.beta2, (double)t));
    return s;
}

// Returns the factor that clips a gradient of this global norm to max_norm (Pascanu et al. 2013); 1 if max_norm is 0.
GNS_HD static inline double adamw_clip(double norm, double max_norm) {
    return max_norm > 0 && norm > max_norm ? max_norm / norm : 1.0;
}

// Returns the factor that turns a gradient summed over the batch into its clipped mean; NaN if the norm is not finite.
// sq: squared norm of the summed gradient.
GNS_HD static inline double adamw_grad_scale(double sq, double batch, double max_norm) {
    double norm = sqrt(sq) / batch;
    return isfinite(norm) ? adamw_clip(norm, max_norm) / batch : (double)NAN;
}

// Updates the moments m and v and returns the direction of the step. decay: weight decay applies to this tensor.
GNS_HD static inline float adamw_direction(float p, float g, float *m, float *v, const AdamWStep *s, bool decay) {
    g *= s->grad_scale;
    *m = s->beta1 * *m + (1.0f - s->beta1) * g;
    *v = s->beta2 * *v + (1.0f - s->beta2) * g * g;
    float step = (*m / s->bias1) / (sqrtf(*v / s->bias2) + s->eps);
    if (decay) step += s->weight_decay * p;
    return step;
}

// Returns the new parameter.
GNS_HD static inline float adamw_update(float p, float g, float *m, float *v, const AdamWStep *s, bool decay) {
    return p - s->lr * adamw_direction(p, g, m, v, s, decay);
}

// LAMB: returns a tensor's trust ratio, from squared norms. Returns 1 if a norm is 0 (biases, at first), as the
// authors' code does.
GNS_HD static inline double lamb_ratio(double weights_sq, double direction_sq) {
    return weights_sq > 0 && direction_sq > 0 ? sqrt(weights_sq / direction_sq) : 1.0;
}
