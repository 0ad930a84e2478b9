// hash: hashes a sequence of bytes in order, and an array's elements in any order.
#pragma once

#include "base/common.h"

// Mixes 64 bits. The function is one to one, and every input bit affects all output bits. It is the finalizer of
// splitmix64 (Steele, Lea and Flood, OOPSLA 2014; Stafford's variant 13).
GNS_HD static inline uint64_t hash_finish(uint64_t z) {
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

#define HASH_GOLDEN 0x9e3779b97f4a7c15u // 2^64 / golden ratio, odd: spreads small integers

// FNV-1a, 64 bits (Fowler, Noll and Vo). Start from HASH_START, or from the hash of earlier bytes. FNV-1a mixes the
// upper bits badly: apply hash_finish if they matter.
#define HASH_START 0xcbf29ce484222325u
static inline uint64_t hash_bytes(uint64_t hash, const void *bytes, size_t count) {
    for (size_t i = 0; i < count; i++) hash = (hash ^ ((const unsigned char *)bytes)[i]) * 0x100000001b3u;
    return hash;
}

// Hashes one element of an array. An array's hash is the sum of its elements' hashes mod 2^64, in any order, on host or
// device. Arrays with equal bits have equal hashes. One different element always changes the hash; several different
// elements keep it with probability 2^-64. HASH_GOLDEN spreads neighbouring places.
GNS_HD static inline uint64_t hash_element(uint64_t place, uint32_t bits) {
    return hash_finish((place + 1) * HASH_GOLDEN + bits);
}
#define HASH_SECOND ((uint64_t)1 << 48) // place of a second array's first element, beyond all places of the first array
