// rng: random numbers as a pure function of (seed, stream, index). So any thread, rank or device can draw any of them.
// Philox4x32-10: Salmon, Moraes, Dror, Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011, section 3.3.
// The 64-bit seed is the key; the 128-bit counter is (block, stream). One block gives four 32-bit words.
// Use each stream for one kind of draw. On one stream rng_uniform and rng_normal would use the same words.
#pragma once

#include "base/common.h"
#include <math.h>

typedef struct {
    uint32_t word[4];
} RngBlock;

// One round: computes two 32x32 -> 64 bit products, swaps their halves across, and mixes in the key.
GNS_HD static inline RngBlock rng_round(RngBlock c, uint32_t key0, uint32_t key1) {
    uint64_t p0 = (uint64_t)0xD2511F53u * c.word[0]; // the paper's multipliers M0 and M1
    uint64_t p1 = (uint64_t)0xCD9E8D57u * c.word[2];
    RngBlock out = {
        {(uint32_t)(p1 >> 32) ^ c.word[1] ^ key0, (uint32_t)p1, (uint32_t)(p0 >> 32) ^ c.word[3] ^ key1, (uint32_t)p0}};
    return out;
}

// The bare bijection on 128-bit counters, as in the paper.
GNS_HD static inline RngBlock rng_rounds(RngBlock counter, uint32_t key0, uint32_t key1, int rounds) {
    for (int round = 0; round < rounds; round++) {
        counter = rng_round(counter, key0, key1);
        key0 += 0x9E3779B9u; // Weyl sequence of the golden ratio, in 32 bits
        key1 += 0xBB67AE85u; // Weyl sequence of sqrt(3) - 1, in 32 bits
    }
    return counter;
}

GNS_HD static inline RngBlock rng_block(uint64_t seed, uint64_t stream, uint64_t block) {
    RngBlock counter = {{(uint32_t)block, (uint32_t)(block >> 32), (uint32_t)stream, (uint32_t)(stream >> 32)}};
    return rng_rounds(counter, (uint32_t)seed, (uint32_t)(seed >> 32), 10);
}

// Uniform in [0, 1): multiples of 2^-53, never 1.
GNS_HD static inline double rng_uniform(uint64_t seed, uint64_t stream, uint64_t index) {
    const RngBlock b = rng_block(seed, stream, index / 2); // two draws: words 0 and 1, words 2 and 3
    const unsigned i = 2 * (unsigned)(index % 2);
    return (double)(((uint64_t)b.word[i + 1] << 32 | b.word[i]) >> 11) * 0x1p-53;
}

// Standard normal (Box and Muller 1958, in double), one block per draw. u1 is in (0, 1], so its log is finite. Machines
// may round log and cos differently: draws agree bit for bit only on the same kind of machine.
GNS_HD static inline double rng_normal(uint64_t seed, uint64_t stream, uint64_t index) {
    RngBlock b = rng_block(seed, stream, index);
    double u1 = ((double)(((uint64_t)b.word[1] << 32 | b.word[0]) >> 11) + 1.0) * 0x1p-53;
    double u2 = (double)(((uint64_t)b.word[3] << 32 | b.word[2]) >> 11) * 0x1p-53;
    const double two_pi = 6.283185307179586477;
    return sqrt(-2.0 * log(u1)) * cos(two_pi * u2);
}
