// arrays: random operands; outputs between guards, which no kernel may overwrite.
#pragma once

#include "../test.h"

enum { GUARD = 64 };                            // floats before and after an output
static const uint32_t guard_bits = 0x7fc0beefu; // a NaN that no arithmetic makes
static uint64_t random_state = 0x9e3779b97f4a7c15u;

static inline uint32_t random_next(void) { // xorshift64*: Vigna 2016
    random_state ^= random_state >> 12, random_state ^= random_state << 25, random_state ^= random_state >> 27;
    return (uint32_t)(random_state * 0x2545f4914f6cdd1du >> 32);
}
static inline float random_float(void) { return (float)random_next() * 0x1p-31f - 1; } // [-1, 1]

static inline float *random_array(size_t n, float size) {
    float *x = malloc(n * sizeof *x + 1);
    for (size_t i = 0; i < n; i++) x[i] = size * random_float();
    return x;
}

// Returns n NaNs between guards.
static inline float *guarded_array(size_t n) {
    float *base = aligned_alloc(64, (n + 2 * GUARD + 15) / 16 * 64); // aligned to cache lines, as the engine's arrays
    for (size_t i = 0; i < n + 2 * GUARD; i++) memcpy(base + i, &guard_bits, sizeof guard_bits);
    return base + GUARD;
}
static inline void guarded_free(float *x) { free(x - GUARD); }

static inline bool guards_intact(const float *x, size_t n) {
    for (size_t i = 0; i < GUARD; i++)
        if (memcmp(x - GUARD + i, &guard_bits, 4) || memcmp(x + n + i, &guard_bits, 4)) return false;
    return true;
}
