// lamb: LAMB (You et al. 2020, arXiv 1904.00962, algorithm 2, with phi(x) = x). The direction of a step is AdamW's,
// weight decay included (math/adamw.h). Each tensor is one of the paper's layers, with rate lr x |weights| /
// |direction|.
#pragma once

#include "base/common.h"
#include <math.h>

// Returns a tensor's trust ratio, from squared norms; 1 if one is 0, as in the authors' code: biases begin at 0.
GNS_HD static inline double lamb_ratio(double weights_sq, double direction_sq) {
    return weights_sq > 0 && direction_sq > 0 ? sqrt(weights_sq / direction_sq) : 1.0;
}
