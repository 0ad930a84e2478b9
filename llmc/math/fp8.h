// fp8: e4m3 (Micikevicius et al. 2022, arXiv 2209.05433) for the factors of matrix products (--dtype fp8).
// A value x of a site (FP8_LN1, ...) is stored as the e4m3 number nearest to x 2^k; ties go to even, |x| 2^k > 448
// becomes 448, NaN stays. e4m3: 1 sign, 4 exponent and 3 mantissa bits, bias 7; normal from 2^-6, subnormal from 2^-9;
// 0x7f is NaN. Every e4m3 number times a power of two is exactly a bf16 number.
//
// Each site of each block has its own exponent k. fp8_next keeps k if the largest |x| 2^k is in [28, 160]. In [3.5, 28)
// k rises by 1: the largest |dy| of single steps may be a fourth of the usual. Otherwise the next k puts it in [64, 128).
// Exponents 2 to 3 lower leave many neurons, queries and keys without a gradient: their dy is 2^-13 of the site's
// largest and less. AdamW's steps do not shrink with a gradient.
//
// The head (--fp8-head) has the entries of one more block, which follows the L blocks. Its input lnf has site FP8_LN2,
// wte has FP8_FC_WEIGHT. Only the product that computes logits is in e4m3: e4m3 of softmax would turn the gradients of
// tokens without a target.
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
    FP8_SITES,
    FP8_GROUPS = 256, // at most, of ln1 or gelu; further channels have no low parts
    FP8_LN1_CHANNELS = FP8_SITES,
    FP8_GELU_CHANNELS = FP8_LN1_CHANNELS + FP8_GROUPS,
    FP8_ENTRIES = FP8_GELU_CHANNELS + FP8_GROUPS // of a block: its sites' exponents, then its groups' channels
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
    const float scaled = ldexpf(amax, k); // at most 1 if k is FP8_UNSET
    int exponent;                         // amax is in [0.5, 1) 2^exponent
    frexpf(amax, &exponent);
    const int next = scaled > 160.0f || scaled < 3.5f ? 7 - exponent : k + (scaled < 28.0f);
    return next < -FP8_EXPONENT_MAX ? -FP8_EXPONENT_MAX : next > FP8_EXPONENT_MAX ? FP8_EXPONENT_MAX : next;
}

// ---- Low parts ------------------------------------------------------------------------------------------------------

// Rounding x costs loss mostly in few channels of ln1 and gelu (dev/docs/gpt2-124M.md). So the forward products
// of both read one channel per group as two e4m3 numbers: round(x 2^k) and the low part, round(x 2^k - round(x 2^k)).
// It is the channel with the largest |x| in rows 0, FP8_LOW_ROWS, ... of rank 0's micro-batches in the last step, or
// channel 0 if that step had no low parts. Its entry is FP8_UNSET + 1 + channel. FP8_UNSET: no low parts.
enum { FP8_LN1_GROUP = 8, FP8_GELU_GROUP = 64, FP8_LOW_ROWS = 64 };

GNS_HD static inline int fp8_channel(int entry, int group) { return (entry - FP8_UNSET - 1) & (group - 1); }

// Returns the index of a site's first group among a block's entries.
static inline int fp8_channels_at(int site) { return site == FP8_LN1 ? FP8_LN1_CHANNELS : FP8_GELU_CHANNELS; }

// Returns the length of a site's groups; 0: the site has no low parts. entries: of the block.
static inline int fp8_group_length(const int8_t *entries, int site) {
    if ((site != FP8_LN1 && site != FP8_GELU) || entries[fp8_channels_at(site)] == FP8_UNSET) return 0;
    return site == FP8_LN1 ? FP8_LN1_GROUP : FP8_GELU_GROUP;
}
static inline int fp8_group_count(int length, int channels) {
    return channels / length < FP8_GROUPS ? channels / length : FP8_GROUPS;
}

// Returns |x|, cut to bf16, with the channel in its lower 16 bits. The largest, read as a float, is the group's amax.
GNS_HD static inline uint32_t fp8_candidate(float x, int channel) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return (bits & 0x7fff0000) | (uint32_t)channel;
}

// Return the number of all blocks' exponents and of all entries, with the head's.
static inline int fp8_exponents(int layers) { return (layers + 1) * FP8_SITES; }
static inline int fp8_entries(int layers) { return (layers + 1) * FP8_ENTRIES; }

// Returns the index of exponent i of all blocks among the entries.
GNS_HD static inline int fp8_exponent_at(int i) { return i / FP8_SITES * FP8_ENTRIES + i % FP8_SITES; }

// Adapts the entries to the step's amax. begin: also sets entries that are FP8_UNSET. If a site saturates, the step is
// computed again with the same channels.
static inline void fp8_adapt(int8_t *entry, const float *amax, int layers, bool begin) {
    bool saturates = false;
    for (int i = 0; i < fp8_exponents(layers); i++) {
        const int at = fp8_exponent_at(i);
        saturates = saturates || fp8_saturates(entry[at], amax[at]);
        if (begin || entry[at] != FP8_UNSET) entry[at] = (int8_t)fp8_next(entry[at], amax[at]);
    }
    for (int i = 0; i < layers * FP8_ENTRIES && !saturates; i++) {
        uint32_t candidate;
        memcpy(&candidate, amax + i, sizeof candidate);
        if (i % FP8_ENTRIES < FP8_SITES || (entry[i] == FP8_UNSET && !begin)) continue;
        entry[i] = (int8_t)(FP8_UNSET + 1 + (int)(candidate % FP8_GELU_GROUP));
    }
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
