// half: converts to fp16 (IEEE 754-2019, table 3.5), for tests; the program only reads fp16.
#pragma once

#include <math.h>
#include <stdint.h>

// Returns the bits of a finite x that fp16 holds exactly: 1 sign, 5 exponent (bias 15), 10 fraction bits. 2^e is the
// largest power of 2 up to |x|, at least 2^-14. Bit 10 of the integer |x| / 2^(e - 10) adds 1 to the exponent e + 14.
static inline uint16_t f16_of(double x) {
    int e = x == 0 ? -14 : (int)fmax(ilogb(x), -14);
    return (uint16_t)((signbit(x) ? 0x8000 : 0) + ((e + 14) << 10) + (int)ldexp(fabs(x), 10 - e));
}
