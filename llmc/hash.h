// hash: tells apart arrays that should be the same to the bit, on the host and on the device. Every element makes a
// number of its place and its bits, and the numbers are added mod 2^64: in whatever order they come, the sum is the
// same. One element that differs always shows; two or more cancel out once in 2^64.
#ifndef GNS_HASH_H
#define GNS_HASH_H

#include "common.h"

// The finalizer of splitmix64 (Steele, Lea and Flood 2014) is one to one, and its golden-ratio increment spreads places.
GNS_HD static inline uint64_t hash_element(uint64_t place, uint32_t bits) {
    uint64_t z = (place + 1) * 0x9e3779b97f4a7c15u + bits;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

#endif
