// permutation: the order of the data, as a keyed bijection on [0, n). Any point is computed in constant memory, so a
// run's position in its data is one counter.
//
// The bijection is a Feistel network on [0, 2^bits), with the least 2^bits >= n. Cycle walking repeats the network
// until the result is below n, after fewer than two passes on average (Black and Rogaway, "Ciphers with Arbitrary
// Finite Domains", CT-RSA 2002, section 3). The halves may differ in width by one bit. Each round XORs a keyed hash of
// one half into the other, so a round is its own inverse.
#pragma once

#include "base/hash.h"

#define PERMUTATION_ROUNDS 8 // four rounds suffice for wide halves (Luby and Rackoff 1988); these halves are narrow

// The key of one epoch's order.
GNS_HD static inline uint64_t permutation_key(uint64_t seed, uint64_t epoch) {
    return hash_finish(hash_finish(seed + HASH_GOLDEN) + epoch * HASH_GOLDEN);
}

// The shift of an epoch's windows, in [0, n). No round of the epoch's permutation uses this hash.
GNS_HD static inline uint64_t permutation_shift(uint64_t n, uint64_t key) {
    return hash_finish(key + (PERMUTATION_ROUNDS + 1) * HASH_GOLDEN) % n;
}

// One pass of the network over [0, 2^(low_bits + high_bits)).
GNS_HD static inline uint64_t permutation_feistel(uint64_t x, int low_bits, int high_bits, uint64_t key) {
    uint64_t low_mask = ((uint64_t)1 << low_bits) - 1, high_mask = ((uint64_t)1 << high_bits) - 1;
    uint64_t low = x & low_mask, high = x >> low_bits;
    for (int round = 0; round < PERMUTATION_ROUNDS; round++) {
        key += HASH_GOLDEN; // a new key each round
        if (round % 2 == 0) high ^= hash_finish(hash_finish(key) ^ low) & high_mask;
        else low ^= hash_finish(hash_finish(key) ^ high) & low_mask;
    }
    return high << low_bits | low;
}

// Returns the image of k in [0, n), for 1 <= n <= 2^48. For each (n, key) this is a bijection.
GNS_HD static inline uint64_t permutation_at(uint64_t n, uint64_t key, uint64_t k) {
    int bits = 0;
    while (((uint64_t)1 << bits) < n) bits++;
    int low_bits = bits / 2, high_bits = bits - low_bits;
    do k = permutation_feistel(k, low_bits, high_bits, key);
    while (k >= n);
    return k;
}
