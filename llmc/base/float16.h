// float16: converts between fp32 (1 sign, 8 exponent, 23 fraction bits) and the 16-bit types, on their bits.
// Conversions to fp32 are exact. Conversions from fp32 round to the nearest, ties to even (IEEE 754), and quieten NaNs.
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

static inline float f32_from_bits(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

// bf16 is the upper half of an fp32.
static inline float bf16_to_f32(uint16_t x) { return f32_from_bits((uint32_t)x << 16); }

static inline uint16_t f32_to_bf16(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    if ((bits & 0x7fffffff) > 0x7f800000) return (uint16_t)(bits >> 16 | 0x40); // NaN
    uint32_t odd = bits >> 16 & 1;
    return (uint16_t)((bits + 0x7fff + odd) >> 16); // adds just under half a bf16 unit; exactly half if odd
}

// fp16: 1 sign, 5 exponent (bias 15), 10 fraction bits; with exponent 0 the value is fraction * 2^-24.
static inline float f16_to_f32(uint16_t x) {
    uint32_t sign = (uint32_t)(x & 0x8000) << 16, exponent = x >> 10 & 31, fraction = x & 1023;
    if (exponent == 31) return f32_from_bits(sign | 0x7f800000 | fraction << 13);
    if (exponent) return f32_from_bits(sign | (exponent + 127 - 15) << 23 | fraction << 13);
    float magnitude = (float)fraction * 0x1p-24f;
    return sign ? -magnitude : magnitude;
}

// Converts n 16-bit values to floats in place. Load the values to half_place, the upper half of the n floats `values`.
// Then call half_widen, which reads each value before it overwrites it.
static inline void *half_place(float *values, size_t n) { return (uint16_t *)values + n; }

static inline void half_widen(float *values, size_t n, bool bf16) {
    const char *from = (const char *)half_place(values, n);
    for (size_t i = 0; i < n; i++) {
        uint16_t x;
        memcpy(&x, from + i * sizeof x, sizeof x);
        values[i] = bf16 ? bf16_to_f32(x) : f16_to_f32(x);
    }
}
