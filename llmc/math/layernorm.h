// layernorm: one element of LayerNorm (Ba et al. 2016, arXiv 1607.06450) over rows of C, forward and backward.
//   forward   xhat = (x - mean) rstd, y = xhat gamma + beta
//   backward  with g = dy gamma: dx = rstd (g - mean(g) - xhat mean(g xhat)), means over the row of C;
//             dgamma and dbeta are the sums of dy xhat and of dy over rows
// The sums over example b's T rows are dgamma_b and dbeta_b. So the norms |dgamma_b|^2 and |dbeta_b|^2 cost only the
// squares (Gray et al. 2024, arXiv 2411.00999, section 3).
#pragma once

#include "math/accumulate.h"

#include <math.h>

#define LAYERNORM_EPSILON 1e-5 // GPT-2's layer_norm_epsilon

// squares: sum over the row of (x - mean)^2. The GPU's rsqrtf and the CPU's quotient may differ in the last bit.
GNS_HD static inline float layernorm_rstd(float squares, int C) {
    const float variance = squares / (float)C + (float)LAYERNORM_EPSILON;
#ifdef __CUDA_ARCH__
    return rsqrtf(variance);
#else
    return 1.0f / sqrtf(variance);
#endif
}

GNS_HD static inline float layernorm_xhat(float x, float mean, float rstd) { return (x - mean) * rstd; }

GNS_HD static inline float layernorm_y(float xhat, float gamma, float beta) { return add_product(beta, xhat, gamma); }

// Adds an element to its row's sum of g xhat, and to its column's dgamma and dbeta. The callers themselves sum
// g = dy gamma, because some of them round each g first.
GNS_HD static inline void layernorm_add(float *sum_g_xhat, float *dgamma, float *dbeta, float dy, float gamma,
                                        float xhat) {
    *sum_g_xhat = add_product(*sum_g_xhat, dy * gamma, xhat);
    *dgamma = add_product(*dgamma, dy, xhat);
    *dbeta += dy;
}

GNS_HD static inline float layernorm_dx(float dy, float gamma, float xhat, float rstd, float mean_g,
                                        float mean_g_xhat) {
    return rstd * (dy * gamma - mean_g - xhat * mean_g_xhat);
}
