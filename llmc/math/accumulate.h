// accumulate: one step of an fp32 sum of products, as both engines take it: a fused multiply-add, whose product is not
// rounded. Compilers fuse sum + a * b (-ffp-contract=fast, nvcc's default); fmaf is a library call on CPUs without FMA.
#pragma once

#include "base/common.h"

GNS_HD static inline float add_product(float sum, float a, float b) { return sum + a * b; }
GNS_HD static inline float add_square(float sum, float x) { return add_product(sum, x, x); }
