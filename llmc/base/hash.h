// hash: two hashes, of bytes one after another and of arrays whose elements come in any order.
#ifndef GNS_HASH_H
#define GNS_HASH_H

#include "base/common.h"

// The finalizer of splitmix64 (Steele, Lea and Flood, OOPSLA 2014; Stafford's variant 13): one to one, and every bit shows
// in all of them.
GNS_HD static inline uint64_t hash_finish(uint64_t z) {
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

#define HASH_GOLDEN 0x9e3779b97f4a7c15u // 2^64 / golden ratio, odd: spreads small integers

// FNV-1a, 64 bits (Fowler, Noll and Vo), from HASH_START on: of bytes that come in several pieces, the hash of one piece
// is what the next starts from. Its upper bits mix badly: where they count, hash_finish.
#define HASH_START 0xcbf29ce484222325u
static inline uint64_t hash_bytes(uint64_t hash, const void *bytes, size_t count) {
    for (size_t i = 0; i < count; i++) hash = (hash ^ ((const unsigned char *)bytes)[i]) * 0x100000001b3u;
    return hash;
}

// Tells apart arrays that should be the same to the bit, on the host and on the device. Every element makes a number of
// its place and its bits, and the numbers are added mod 2^64: in whatever order they come, the sum is the same. One
// element that differs always shows; two or more cancel out once in 2^64. The golden-ratio increment spreads places.
GNS_HD static inline uint64_t hash_element(uint64_t place, uint32_t bits) {
    return hash_finish((place + 1) * HASH_GOLDEN + bits);
}

#endif
