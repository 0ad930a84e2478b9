// e4m3: converts to and from e4m3 codes, for tests; the trainer converts with a GPU's instructions.
#pragma once

#include "math/fp8.h"

// Returns the code of the e4m3 number nearest to y.
static inline uint8_t e4m3_code(float y) {
    const float rounded = fp8_round(y), size = fabsf(rounded);
    uint32_t bits;
    if (size != size) return 0x7f;
    memcpy(&bits, &y, sizeof bits);
    const uint8_t sign = (uint8_t)(bits >> 24 & 0x80);
    if (size < 0x1p-6f) return sign | (uint8_t)(size * 0x1p9f);
    memcpy(&bits, &size, sizeof bits);
    return sign | (uint8_t)((bits >> 20) - (120u << 3)); // an exponent has bias 127 in fp32, 7 in e4m3
}

// Returns the e4m3 number of a code, by definition: (-1)^sign 2^(exponent - 7) (1 + mantissa / 8). With exponent 0 it
// is subnormal.
static inline float e4m3_value(int code) {
    const int exponent = code >> 3 & 15, mantissa = code & 7;
    const float size = exponent ? ldexpf((float)(8 + mantissa), exponent - 10) : ldexpf((float)mantissa, -9);
    if ((code & 0x7f) == 0x7f) return NAN;
    return code & 0x80 ? -size : size;
}
