// bf16_tiles: the innermost loops of products in bf16, one for each kind of instruction. Each is compiled for its own
// instructions, whatever the flags, and called where the machine has them.
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#if defined(__x86_64__) && (__GNUC__ >= 11 || __clang_major__ >= 12) // older compilers do not know AMX
#    define BF16_X86
#endif

enum { BF16_STEP = 32, BF16_COLUMNS = 32, BF16_ROWS = 12, BF16_AMX_ROWS = 32 };

// c (rows, 32) fp32 = A B of packed panels: the sum over pairs of k, ascending. Of A's rows the first `count` are there;
// those of c after them may be written or not. pairs: a multiple of BF16_STEP / 2.
//   a: (pairs, 12, 2); for AMX (pairs / 16, 32 rows, 32)      b: (pairs, 32, 2)
typedef void Bf16Tile(float *c, const uint16_t *a, const uint16_t *b, size_t pairs, size_t count);
Bf16Tile bf16_tile_plain, bf16_tile_amx, bf16_tile_avx512, bf16_tile_neon;

bool bf16_amx_is_here(void);
bool bf16_avx512_is_here(void);
bool bf16_neon_is_here(void);
