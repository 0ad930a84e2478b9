// Bf16Tile on Arm, with bfmmla: every core with bf16 has it. bfmmla adds the product of (2, 4) and (4, 2) to (2, 2).
// It gives the bits of two bfdot: it sums pair by pair, rounds each sum of two products and each addition to odd, and
// flushes subnormals. Other machines round to nearest, so their bits differ.

#include "cpu/bf16_tiles.h"

#ifdef __aarch64__

#    include <arm_neon.h>
#    include <sys/auxv.h>

#    define BF16 __attribute__((target("arch=armv8.2-a+bf16")))

enum { ROWS = BF16_ROWS, COLUMNS = BF16_COLUMNS, GROUP = 8 }; // sums of GROUP columns fill 24 of 32 registers

typedef struct {
    bfloat16x8_t low, high; // (2, 4) each: the first two and the last two of four rows of A, or columns of B
} Four;

bool bf16_neon_available(void) { return getauxval(AT_HWCAP2) & HWCAP2_BF16; }

// Loads two pairs of four rows of A, or of four columns of B. The second pair lies `width` after the first.
BF16 static inline __attribute__((always_inline)) Four load_four(const uint16_t *p, size_t width) {
    uint32x4_t first = vreinterpretq_u32_u16(vld1q_u16(p)), second = vreinterpretq_u32_u16(vld1q_u16(p + width));
    return (Four){vreinterpretq_bf16_u32(vzip1q_u32(first, second)), vreinterpretq_bf16_u32(vzip2q_u32(first, second))};
}

// Computes GROUP columns of c.
BF16 static void multiply_group(float *c, const uint16_t *a, const uint16_t *b, size_t pairs) {
    float32x4_t sum[ROWS / 2][GROUP / 2]; // (2, 2) each
#    pragma GCC unroll 24
    for (int i = 0; i < ROWS / 2 * GROUP / 2; i++) sum[i / (GROUP / 2)][i % (GROUP / 2)] = vdupq_n_f32(0);
    for (size_t pair = 0; pair < pairs; pair += 2, a += 4 * ROWS, b += 4 * COLUMNS) {
        Four b0 = load_four(b, 2 * COLUMNS), b1 = load_four(b + 8, 2 * COLUMNS);
        bfloat16x8_t columns[] = {b0.low, b0.high, b1.low, b1.high};
#    pragma GCC unroll 3
        for (int i = 0; i < ROWS / 4; i++) {
            Four rows = load_four(a + 8 * i, 2 * ROWS);
#    pragma GCC unroll 4
            for (int j = 0; j < GROUP / 2; j++) {
                sum[2 * i][j] = vbfmmlaq_f32(sum[2 * i][j], rows.low, columns[j]);
                sum[2 * i + 1][j] = vbfmmlaq_f32(sum[2 * i + 1][j], rows.high, columns[j]);
            }
            __asm__("" ::: "memory"); // keeps the loads in order: all at once, they would need sum's registers
        }
    }
#    pragma GCC unroll 12
    for (int i = 0; i < ROWS / 2 * GROUP / 4; i++) {
        float32x4_t left = sum[i / 2][i % 2 * 2], right = sum[i / 2][i % 2 * 2 + 1];
        float *at = c + i / 2 * 2 * COLUMNS + i % 2 * 4;
        vst1q_f32(at, vcombine_f32(vget_low_f32(left), vget_low_f32(right)));
        vst1q_f32(at + COLUMNS, vcombine_f32(vget_high_f32(left), vget_high_f32(right)));
    }
}

void bf16_tile_neon(float *c, const uint16_t *a, const uint16_t *b, size_t pairs, size_t count, Ahead *ahead,
                    void (*between)(void *, size_t, size_t), void *work) {
    (void)count, (void)ahead; // always computes all twelve rows
    if (between) between(work, 0, 1);
    for (int j = 0; j < COLUMNS; j += GROUP) multiply_group(c + j, a, b + 2 * j, pairs);
}

#endif
