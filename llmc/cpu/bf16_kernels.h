// bf16_kernels: products of packed bf16 panels, by what the machine has.
//
// c (12, 32) fp32, rows 32 floats apart = A B: the sums over the pairs in ascending order. `pairs` is a multiple of 16.
// a: (pairs, 12, 2) bf16; b: (pairs, 32, 2) bf16. A pair is two neighbouring k.
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __aarch64__
void bf16_tile_neon(float *c, const uint16_t *a, const uint16_t *b, size_t pairs);
bool bf16_neon_is_here(void);
#endif
