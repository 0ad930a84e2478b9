// gelu: GELU's tanh form, as in GPT-2 (Hendrycks and Gimpel 2016, arXiv 1606.08415): x/2 (1 + tanh u),
// u = sqrt(2/pi) (x + 0.044715 x^3). Both engines compute GELU as x s, s = sigmoid(2u) = 1/(1 + exp(-2u)), which
// equals (1 + tanh u)/2. For negative x, 1 + tanh u loses digits; s does not.
//   2u         = GELU_SCALE x (1 + GELU_CUBIC x^2)
//   d/dx (x s) = s + x s (1 - s) GELU_SCALE (1 + 3 GELU_CUBIC x^2)
// The CPU computes GELU on vectors and guards exp against overflow (cpu/vector_math.h). The GPU computes it on scalars
// with its fast exponential (cuda/gelu.cu).
#pragma once

#include "base/common.h"

#include <math.h>
#include <string.h>

#define GELU_SCALE 1.5957691216f // 2 sqrt(2/pi)
#define GELU_CUBIC 0.044715f

// The code of GELU's derivative d is a byte: 26 + 202 d, rounded. 16-bit CUDA builds keep codes for the backward pass.
// -0.1290 <= d <= 1.1290 (at x = -1.42 and 1.42), so 202 codes per unit of d are the most that keep all codes below
// 255, NaN's code. d = 0 and d = 1 (at large |x|) are exact because 202 is an integer. The error of d is at most 1/404.
// For normally distributed x the error's rms is 2.1e-3 of d's rms; with d in bf16 it would be 1.6e-3.
enum { GELU_CODE_ZERO = 26, GELU_CODE_NAN = 255 };
#define GELU_CODE_STEPS 202.0f
#define GELU_CODE_SHIFT (0x1p23f + (float)GELU_CODE_ZERO) // floats from 2^23 on are integers: the last byte is the code

GNS_HD static inline uint8_t gelu_encode(float derivative) {
    const float shifted = fmaf(derivative, GELU_CODE_STEPS, GELU_CODE_SHIFT);
    uint32_t bits;
#ifndef __CUDA_ARCH__ // on a GPU NaN needs no test: it is always 0x7fffffff, whose last byte is GELU_CODE_NAN
    if (isnan(derivative)) return GELU_CODE_NAN;
#endif
    memcpy(&bits, &shifted, sizeof bits);
    return (uint8_t)bits;
}

GNS_HD static inline float gelu_decode(unsigned code) {
    const uint32_t bits = 0x4b000000u | code; // the float 2^23 + code; on a GPU a cast takes four times as long
    float shifted;
    memcpy(&shifted, &bits, sizeof shifted);
    return code == GELU_CODE_NAN ? NAN : (shifted - GELU_CODE_SHIFT) * (1.0f / GELU_CODE_STEPS);
}
