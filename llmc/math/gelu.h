// gelu: GELU's tanh form, GPT-2's (Hendrycks and Gimpel 2016, arXiv 1606.08415): x/2 (1 + tanh u),
// u = sqrt(2/pi) (x + 0.044715 x^3). Both engines compute x s with s = sigmoid(2u), which is the same, since
// (1 + tanh u)/2 = 1/(1 + exp(-2u)), and cancels no digits where x is negative.
//   2u      = GELU_SCALE x (1 + GELU_CUBIC x^2)
//   d/dx xs = s + x s (1 - s) GELU_SCALE (1 + 3 GELU_CUBIC x^2)
// The CPU evaluates it on vectors and guards exp against overflow (cpu/vector_math.h), the GPU on scalars with its fast
// exponential (cuda/gelu.cu).
#pragma once

#define GELU_SCALE 1.5957691216f // 2 sqrt(2/pi)
#define GELU_CUBIC 0.044715f
