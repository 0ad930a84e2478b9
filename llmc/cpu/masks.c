#include "cpu/masks.h"

#include "cpu/layers.h"

#ifdef __SSE2__
#    include <immintrin.h>
#elif defined(__aarch64__)
#    include <arm_neon.h>
#endif

// VEC / 2 integers of 64 bits; the upper 32 bits of each are ignored.
typedef uint64_t Wide __attribute__((vector_size(VEC * 4), may_alias));

// Multiplies the lower halves, 32 x 32 -> 64 bits. Intrinsics, since GCC compiles no plain C to this instruction.
VECTOR_INLINE Wide multiply_low(Wide x, uint32_t by) {
    Wide factor = (Wide){0} + by;
#if defined(__AVX512F__)
    return (Wide)_mm512_mul_epu32((__m512i)x, (__m512i)factor);
#elif defined(__AVX2__)
    return (Wide)_mm256_mul_epu32((__m256i)x, (__m256i)factor);
#elif defined(__SSE2__) && !defined(__AVX__)
    return (Wide)_mm_mul_epu32((__m128i)x, (__m128i)factor);
#elif defined(__aarch64__)
    return (Wide)vmull_u32(vmovn_u64((uint64x2_t)x), vmovn_u64((uint64x2_t)factor));
#else
    return (x & 0xffffffff) * factor;
#endif
}

// Runs rng_rounds (math/rng.h) on VEC / 2 counters at once; the upper halves of the words are arbitrary.
VECTOR_INLINE void philox(Wide word[4], uint64_t seed) {
    uint32_t key0 = (uint32_t)seed, key1 = (uint32_t)(seed >> 32);
    for (int round = 0; round < DROPOUT_ROUNDS; round++) {
        Wide p0 = multiply_low(word[0], 0xD2511F53u), p1 = multiply_low(word[2], 0xCD9E8D57u);
        word[0] = p1 >> 32 ^ word[1] ^ key0;
        word[1] = p1;
        word[2] = p0 >> 32 ^ word[3] ^ key1;
        word[3] = p0;
        key0 += 0x9E3779B9u;
        key1 += 0xBB67AE85u;
    }
}

enum { LANES = 16 };

// Writes Philox's four words for LANES blocks of math/dropout.h: (r, k), (r, k + 1), ...
static void blocks_of(uint32_t words[4][LANES], Dropout d, DropoutPlace place, uint32_t head, uint32_t r, uint32_t k) {
    const RngBlock counter = dropout_counter(d, place, head, r, k);
    for (uint32_t lane = 0; lane < LANES; lane += VEC) {
        Wide first = {0}, parity[2][4]; // [0]: even lanes, [1]: odd lanes
        for (uint32_t i = 0; i < VEC / 2; i++) first[i] = counter.word[0] + lane + 2 * i;
        for (uint32_t odd = 0; odd < 2; odd++) {
            parity[odd][0] = first + odd;
            for (int w = 1; w < 4; w++) parity[odd][w] = (Wide){0} + counter.word[w];
            philox(parity[odd], d.seed);
        }
        for (int w = 0; w < 4; w++) {
            Wide both = (parity[0][w] & 0xffffffff) | parity[1][w] << 32;
            memcpy(words[w] + lane, &both, sizeof both);
        }
    }
}

void dropout_factors(float *factor, Dropout d, DropoutPlace place, size_t head, size_t row, size_t first) {
    const float scale = dropout_scale(d);
    uint32_t words[4][LANES], pairs[DROPOUT_SPAN / 2]; // pairs[i]: bits of columns 2i and 2i + 1
    if (place == DROPOUT_PROBABILITY) {
        for (size_t part = 0; part < 2; part++) { // part: 4 tiles of 16 columns; i: a half tile
            blocks_of(words, d, place, (uint32_t)head, (uint32_t)(row / 16 * 8 + row % 8),
                      (uint32_t)(first / 4 + part * LANES));
            for (size_t i = 0; i < 8; i++)
                memcpy(pairs + part * 32 + 4 * i, words[i % 2 * 2 + row / 8 % 2] + i / 2 * 4, 4 * sizeof *pairs);
        }
    } else {
        blocks_of(words, d, place, (uint32_t)head, (uint32_t)row, (uint32_t)(first / 8));
        for (size_t i = 0; i < DROPOUT_SPAN / 2; i++) pairs[i] = words[i % 4][i / 4];
    }
    for (size_t i = 0; i < DROPOUT_SPAN / 2; i++) {
        factor[2 * i] = (pairs[i] & DROPOUT_BITS) < d.below ? 0 : scale;
        factor[2 * i + 1] = (pairs[i] >> 16 & DROPOUT_BITS) < d.below ? 0 : scale;
    }
}

VECTOR_INLINE void multiply_row(void *to, const void *x, size_t at, const float *factor, size_t n, const Dtype type) {
    size_t whole = n / VEC * VEC;
    for (size_t i = 0; i < whole; i += VEC)
        value_store(to, at + i, value_load(x, at + i, type) * vec_load(factor + i), type);
    for (size_t i = whole; i < n; i++) value_set(to, at + i, value_get(x, at + i, type) * factor[i], type);
}

void dropout_apply(void *to, const void *x, Dropout d, DropoutPlace place, int B, int T, int C, Dtype type) {
#pragma omp parallel for schedule(static) if ((size_t)B * T * C > PARALLEL_FLOATS)
    for (int i = 0; i < B * T; i++) {
        const Dropout of_row = dropout_at(d, d.example + (uint64_t)(i / T), d.layer);
        float factor[DROPOUT_SPAN];
        for (size_t c = 0, n = (size_t)C; c < n; c += DROPOUT_SPAN) {
            dropout_factors(factor, of_row, place, 0, (size_t)(i % T), c);
            size_t at = (size_t)i * n + c, columns = n - c < DROPOUT_SPAN ? n - c : DROPOUT_SPAN;
            BY_TYPE(type, multiply_row(to, x, at, factor, columns, TYPE));
        }
    }
}
