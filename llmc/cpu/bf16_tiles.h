// bf16_tiles: the innermost loops of products in bf16, one per instruction set. Each is compiled for its instructions,
// whatever the flags; matmul_kernel chooses by what the machine has.
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#if defined(__x86_64__) && !defined(GNS_AVX2) &&                                                                       \
    (__GNUC__ >= 11 || __clang_major__ >= 12) // older compilers lack AMX
#    define BF16_X86
#endif

enum { CACHE_LINE = 64 };

// Memory to prefetch while a tile is computed, a few cache lines at a time: all at once would delay the tile's own
// loads (an Emerald Rapids has at most 16 lines in flight, each for 100 ns).
typedef struct {
    const char *run;             // the present run of `length` bytes; runs lie `stride` bytes apart
    size_t byte, length, stride; // byte: the next line's offset in the run
    size_t lines;                // left to prefetch
} Ahead;

static inline __attribute__((always_inline)) void prefetch_ahead(Ahead *ahead, size_t lines) {
    for (; lines > 0 && ahead->lines > 0; lines--, ahead->lines--) {
        __builtin_prefetch(ahead->run + ahead->byte);
        ahead->byte += CACHE_LINE;
        if (ahead->byte >= ahead->length) ahead->byte = 0, ahead->run += ahead->stride;
    }
}

enum { BF16_STEP = 32, BF16_COLUMNS = 32, BF16_ROWS = 12, BF16_AMX_ROWS = 32 };

// Computes c = A B, fp32 (rows, 32), from packed panels: sums over pairs of k, ascending. A has `count` rows; later
// rows of c are arbitrary. pairs: a multiple of BF16_STEP / 2, not 0.
//   a: (pairs, 12, 2); for AMX (pairs / 16, 32 rows, 32)      b: (pairs, 32, 2)
// A Bf16Tile may prefetch some of the lines ahead; its caller prefetches the rest. It calls between(work, at, of), for
// at = 0 to of - 1, before it writes c; between NULL: nothing. AMX calls it after each step of k, since it leaves the
// vector units idle; the others call it at the start.
typedef void Bf16Tile(float *c, const uint16_t *a, const uint16_t *b, size_t pairs, size_t count, Ahead *ahead,
                      void (*between)(void *work, size_t at, size_t of), void *work);
Bf16Tile bf16_tile_amx, bf16_tile_avx512, bf16_tile_neon;

bool bf16_amx_available(void);
bool bf16_avx512_available(void);
bool bf16_neon_available(void);
