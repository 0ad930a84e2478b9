// half: fp16 by its definition (IEEE 754-2019, table 3.5), for tests that write what the program only reads.
#pragma once

#include <math.h>
#include <stdint.h>

// The bits of a finite x that fp16 holds: 1 sign, 5 exponent (bias 15) and 10 fraction bits. In units of 2^(e - 10), with
// 2^e the power of two at or below |x|, 2^-14 at least, |x| is a whole number; its bit 10 counts towards the exponent.
static inline uint16_t f16_of(double x) {
    int e = x == 0 ? -14 : (int)fmax(ilogb(x), -14);
    return (uint16_t)((signbit(x) ? 0x8000 : 0) + ((e + 14) << 10) + (int)ldexp(fabs(x), 10 - e));
}
