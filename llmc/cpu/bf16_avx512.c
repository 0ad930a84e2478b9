#include "cpu/bf16_tiles.h"

#ifdef BF16_X86

#    include <immintrin.h>
#    include <string.h>

#    define AVX512_BF16 __attribute__((target("avx512f,avx512bw,avx512vl,avx512bf16")))

bool bf16_avx512_available(void) {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bf16");
}

enum { STEP_PAIRS = BF16_STEP / 2 };

// Computes a tile of `rows` rows. `rows` is a constant, so the sums, rows x 2 vectors, stay in registers.
AVX512_BF16 static inline __attribute__((always_inline)) void tile(const int rows, float *c, const uint16_t *a,
                                                                   const uint16_t *b, size_t pairs, Ahead *ahead) {
    __m512 sum[BF16_ROWS][2];
#    pragma GCC unroll 12
    for (int i = 0; i < rows; i++) sum[i][0] = sum[i][1] = _mm512_setzero_ps();
    Ahead mine = *ahead;
    size_t steps = pairs / STEP_PAIRS, lines = (mine.lines + steps - 1) / steps;
    for (; pairs > 0; pairs--, a += 2 * BF16_ROWS, b += 2 * BF16_COLUMNS) {
        if (pairs % STEP_PAIRS == 0) prefetch_ahead(&mine, lines);
        __m512bh b0 = (__m512bh)_mm512_loadu_si512(b), b1 = (__m512bh)_mm512_loadu_si512(b + BF16_COLUMNS);
#    pragma GCC unroll 12
        for (int i = 0; i < rows; i++) {
            int32_t pair;
            memcpy(&pair, a + 2 * i, sizeof pair);
            __m512bh x = (__m512bh)_mm512_set1_epi32(pair);
            sum[i][0] = _mm512_dpbf16_ps(sum[i][0], x, b0);
            sum[i][1] = _mm512_dpbf16_ps(sum[i][1], x, b1);
        }
    }
    *ahead = mine;
#    pragma GCC unroll 12
    for (int i = 0; i < rows; i++, c += BF16_COLUMNS) {
        _mm512_storeu_ps(c, sum[i][0]);
        _mm512_storeu_ps(c + BF16_COLUMNS / 2, sum[i][1]);
    }
}

AVX512_BF16 void bf16_tile_avx512(float *c, const uint16_t *a, const uint16_t *b, size_t pairs, size_t count,
                                  Ahead *ahead, void (*between)(void *, size_t, size_t), void *work) {
    if (between) between(work, 0, 1);
    if (count > 8) tile(12, c, a, b, pairs, ahead);
    else if (count > 4) tile(8, c, a, b, pairs, ahead);
    else tile(4, c, a, b, pairs, ahead);
}

#endif
