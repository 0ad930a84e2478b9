// gelu: GELU's tanh form, as in GPT-2 (Hendrycks and Gimpel 2016, arXiv 1606.08415): x/2 (1 + tanh u),
// u = sqrt(2/pi) (x + 0.044715 x^3). Both engines compute x s, s = sigmoid(2u). That is equal, since
// (1 + tanh u)/2 = 1/(1 + exp(-2u)), and no digits cancel for negative x.
//   2u      = GELU_SCALE x (1 + GELU_CUBIC x^2)
//   d/dx xs = s + x s (1 - s) GELU_SCALE (1 + 3 GELU_CUBIC x^2)
// The CPU computes it on vectors and guards exp against overflow (cpu/vector_math.h). The GPU computes it on scalars
// with its fast exponential (cuda/gelu.cu).
#pragma once

#define GELU_SCALE 1.5957691216f // 2 sqrt(2/pi)
#define GELU_CUBIC 0.044715f
