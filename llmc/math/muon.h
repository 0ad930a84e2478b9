// muon: Muon (Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks",
// kellerjordan.github.io/posts/muon) for the matrices of the blocks. AdamW updates everything else.
//
//     m = mu m + (1 - mu) g    x = (1 - mu) g + mu m (Nesterov)    O = NewtonSchulz(x)    p -= lr (scale O + decay p)
//
// With x = U S V^T, O approximates U V^T, whose elements have a root mean square of 1 / sqrt(longer side). With scale =
// 0.2 sqrt(longer side), scale O has a root mean square of 0.2, as AdamW's direction has, so AdamW's lr and weight
// decay fit (Liu et al. 2025, "Muon is scalable for LLM training", arXiv 2502.16982, section 2.2). Jordan's lr is this
// lr times 0.2 sqrt(longer side) / sqrt(max(1, out / in)).
//
// The weights of queries, keys and values are three matrices (tensor_muon_matrices), as Jordan advises. If they were
// orthogonalized as one matrix, the size of each matrix's step would depend on the other two matrices.
#pragma once

#include "base/common.h"
#include <math.h>

// Newton-Schulz: x = x / (|x| + eps), then MUON_STEPS times x = a x + b (x x^T) x + c (x x^T)^2 x. Singular values move
// from (0, 1] to about 0.7 to 1.2.
enum { MUON_STEPS = 5 };
#define MUON_A   3.4445f
#define MUON_B   (-4.7750f)
#define MUON_C   2.0315f
#define MUON_EPS 1e-7

// Returns x. g: the clipped mean gradient; m: the updated moment.
GNS_HD static inline float muon_nesterov(float g, float m, float mu) { return (1.0f - mu) * g + mu * m; }

// Updates the moment and returns x.
GNS_HD static inline float muon_momentum(float g, float *m, float mu) {
    *m = mu * *m + (1.0f - mu) * g;
    return muon_nesterov(g, *m, mu);
}

static inline double muon_scale(size_t rows, size_t columns) {
    return 0.2 * sqrt((double)(rows > columns ? rows : columns));
}

GNS_HD static inline float muon_update(float p, float o, float lr, float scale, float weight_decay) {
    return p - lr * (scale * o + weight_decay * p);
}
