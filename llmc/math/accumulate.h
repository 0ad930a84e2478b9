// accumulate: one step of an fp32 sum of products, the same in both engines. Compilers fuse sum + a * b
// (-ffp-contract=fast, nvcc's default), so the product is not rounded. fmaf is not used: without FMA it is a library
// call.
#pragma once

#include "base/common.h"

GNS_HD static inline float add_product(float sum, float a, float b) { return sum + a * b; }
GNS_HD static inline float add_square(float sum, float x) { return add_product(sum, x, x); }
