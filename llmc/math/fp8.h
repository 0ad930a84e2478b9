// fp8: e4m3 (Micikevicius et al. 2022, arXiv 2209.05433) for the factors of matrix products (--dtype fp8).
// A value x of a site (FP8_LN1, ...) is stored as the e4m3 number nearest to x 2^k; ties go to even, |x| 2^k > 448
// becomes 448, NaN stays. e4m3: 1 sign, 4 exponent and 3 mantissa bits, bias 7; normal from 2^-6, subnormal from 2^-9;
// 0x7f is NaN. Every e4m3 number times a power of two is exactly a bf16 number.
//
// Each site of each block has its own exponent k. The relative rounding error hardly depends on k while the largest
// |x| 2^k varies by a factor of up to 2^9, so k rarely needs to change. fp8_next keeps k if the largest
// |x| 2^k is in [3.5, 112]. Otherwise fp8_next sets k so that the largest |x| 2^k is in [14, 28).
#pragma once

#include "base/common.h"

#include <math.h>
#include <stdint.h>
#include <string.h>

// Sites of a block: the factors of its four linear layers.
typedef enum {
    FP8_LN1,        // x of qkv
    FP8_ATTENTION,  // x of proj
    FP8_LN2,        // x of fc
    FP8_GELU,       // x of fcproj
    FP8_DFCPROJ,    // dy of fcproj, the gradient of the MLP branch
    FP8_DFC,        // dy of fc
    FP8_DPROJ,      // dy of proj, the gradient of the attention branch
    FP8_DQKV,       // dy of qkv
    FP8_QKV_WEIGHT, // weights
    FP8_PROJ_WEIGHT,
    FP8_FC_WEIGHT,
    FP8_FCPROJ_WEIGHT,
    FP8_SITES // site s of block l has index l FP8_SITES + s
} Fp8Site;

static const char *const fp8_site_names[] = {"ln1",        "attention",   "ln2",       "gelu",
                                             "dfcproj",    "dfc",         "dproj",     "dqkv",
                                             "qkv weight", "proj weight", "fc weight", "fcproj weight"};

// FP8_UNSET: the site has no exponent yet, and its products do not round factors. FP8_EXPONENT_MAX: largest |exponent|;
// 2^(sum of two exponents) is then a normal float.
enum { FP8_UNSET = -128, FP8_EXPONENT_MAX = 63 };
#define FP8_MAX 448.0f

// True if amax 2^k > FP8_MAX or amax is not finite; false if k is FP8_UNSET. amax: the largest |x|.
GNS_HD static inline bool fp8_saturates(int k, float amax) { return k != FP8_UNSET && !(ldexpf(amax, k) <= FP8_MAX); }

// Returns the next step's exponent. k, amax: this step's exponent and largest |x|. amax 0 or not finite: returns k.
static inline int fp8_next(int k, float amax) {
    if (!isfinite(amax) || amax == 0) return k;
    if (k != FP8_UNSET && ldexpf(amax, k) >= 3.5f && ldexpf(amax, k) <= 112.0f) return k;
    int exponent; // amax = m 2^exponent, m in [0.5, 1)
    const float m = frexpf(amax, &exponent);
    const int next = (m < 0.875f ? 5 : 4) - exponent; // amax 2^next = m 2^5 in [16, 28), or m 2^4 in [14, 16)
    return next < -FP8_EXPONENT_MAX ? -FP8_EXPONENT_MAX : next > FP8_EXPONENT_MAX ? FP8_EXPONENT_MAX : next;
}

// ---- e4m3 numbers ---------------------------------------------------------------------------------------------------

// Returns the e4m3 number nearest to y. e4m3 numbers in [2^e, 2^(e+1)) are 2^(e-3) apart; below 2^-6 they are 2^-9
// apart. Floats near 1.5 2^(e+20) are 2^(e-3) apart, too, so adding and subtracting 1.5 2^(e+20) rounds y.
GNS_HD static inline float fp8_round(float y) {
    uint32_t bits;
    float power; // 2^e
    y = y > FP8_MAX ? FP8_MAX : y < -FP8_MAX ? -FP8_MAX : y;
    memcpy(&bits, &y, sizeof bits);
    bits &= 0x7f800000;
    bits = bits < 121u << 23 ? 121u << 23 : bits; // 2^-6
    memcpy(&power, &bits, sizeof power);
    return (y + 0x1.8p20f * power) - 0x1.8p20f * power;
}
