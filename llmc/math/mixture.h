// mixture: chooses the source of each training example among several.
//
// Sources 0, 1, ... have shares p_0, p_1, ... above 0; the shares sum to 1. u(e) in [0, 1) is number e of a
// pseudorandom sequence from the run's seed (splitmix64, see base/hash.h). Example e comes from source
//
//     s(e) = the first s with u(e) < p_0 + ... + p_s,
//
// and is that source's example number n(e) = |{e' < e: s(e') = s(e)}|. Every source counts its own epochs: example n of
// source s, which has N windows, is window permutation_at(N, permutation_key(seed + s, n / N), n % N) of the source.
//
// The order depends on the seed and e alone, not on batches, micro-batches, ranks or restarts. The draws are
// independent, so a batch is a random sample of the mixture, as the estimator of the noise scale assumes.
#pragma once

#include "base/hash.h"

// u(e)
GNS_HD static inline double mixture_draw(uint64_t seed, uint64_t example) {
    return (double)(hash_finish(hash_finish(seed + 2 * HASH_GOLDEN) + example * HASH_GOLDEN) >> 11) * 0x1p-53;
}

// s(e). end[s] is p_0 + ... + p_s; the last one is 1.
GNS_HD static inline int mixture_source(const double *end, uint64_t seed, uint64_t example) {
    double u = mixture_draw(seed, example);
    int s = 0;
    while (u >= end[s]) s++;
    return s;
}
