// loss_scale: the factor of the loss that keeps gradients within fp16's range (Micikevicius et al. 2018, arXiv
// 1710.03740, section 3.2). The scale doubles after LOSS_SCALE_INTERVAL steps without an overflow. A step whose
// gradient overflows (the gradient's norm is infinite or NaN) is skipped, and the scale is halved. PyTorch's GradScaler
// has the same first scale, interval and factors; Megatron-LM has the same smallest scale.
#pragma once

#include "base/common.h"
#include <math.h>

enum { LOSS_SCALE_START = 1 << 16, LOSS_SCALE_MIN = 1, LOSS_SCALE_INTERVAL = 2000 };
static const double LOSS_SCALE_MAX = 0x1p32;

// Stored in checkpoints.
typedef struct {
    double scale;      // scale of the next step; 0: the engine needs no scale
    int64_t clean;     // steps since the scale changed
    int64_t overflows; // so far: steps that fp16 skipped, and repeats of steps by fp8
} LossScale;

// True for a power of two within the limits.
static inline bool loss_scale_valid(double scale) {
    return scale >= LOSS_SCALE_MIN && scale <= LOSS_SCALE_MAX && (double)(1ull << ilogb(scale)) == scale;
}

// Updates the scale after a step. If it would fall below LOSS_SCALE_MIN, returns false and does not change it.
static inline bool loss_scale_step(LossScale *s, bool overflowed) {
    s->clean = overflowed ? 0 : s->clean + 1;
    s->overflows += overflowed;
    if (overflowed && s->scale == LOSS_SCALE_MIN) return false;
    if (overflowed) s->scale /= 2;
    if (s->clean < LOSS_SCALE_INTERVAL) return true;
    s->clean = 0;
    if (s->scale < LOSS_SCALE_MAX) s->scale *= 2;
    return true;
}
