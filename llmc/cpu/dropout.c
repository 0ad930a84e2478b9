#include "cpu/dropout.h"

#include "cpu/layers.h"

#ifdef __SSE2__
#    include <immintrin.h>
#elif defined(__aarch64__)
#    include <arm_neon.h>
#endif

// Half as many numbers of 64 bits, of which the lower 32 count.
typedef uint64_t Wide __attribute__((vector_size(VEC * 4), may_alias));

// The products of the lower halves. GCC makes one instruction of no plain expression for them.
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

// rng_philox (math/rng.h) on VEC / 2 counters at once; the upper halves of the words are arbitrary.
VECTOR_INLINE void philox(Wide word[4], uint64_t seed) {
    uint32_t key0 = (uint32_t)seed, key1 = (uint32_t)(seed >> 32);
    for (int round = 0; round < 10; round++) {
        Wide p0 = multiply_low(word[0], 0xD2511F53u), p1 = multiply_low(word[2], 0xCD9E8D57u);
        word[0] = p1 >> 32 ^ word[1] ^ key0;
        word[1] = p1;
        word[2] = p0 >> 32 ^ word[3] ^ key1;
        word[3] = p0;
        key0 += 0x9E3779B9u;
        key1 += 0xBB67AE85u;
    }
}

void dropout_factors(float *factor, Dropout d, DropoutPlace place, size_t head, size_t row, size_t first) {
    const uint64_t stream = dropout_stream(d);
    const Vec scale = vec_set(dropout_scale(d));
    for (int lane = 0; lane < DROPOUT_LANES; lane += VEC) {
        uint64_t block = dropout_block(d, place, (uint32_t)head, (uint32_t)row, (uint32_t)first) + (uint64_t)lane;
        Wide place0 = {0}, words[2][4]; // of even and of odd lanes
        for (int i = 0; i < VEC / 2; i++) place0[i] = block + 2 * (uint64_t)i;
        for (int odd = 0; odd < 2; odd++) {
            Wide *w = words[odd];
            w[0] = place0 + (uint64_t)odd;
            w[1] = (Wide){0} + (block >> 32);
            w[2] = (Wide){0} + stream;
            w[3] = (Wide){0} + (stream >> 32);
            philox(w, d.seed);
        }
        for (int h = 0; h < DROPOUT_HALVES; h++) {
            VecBits bits = (VecBits)((words[0][h / 2] & 0xffffffff) | words[1][h / 2] << 32);
            bits = bits >> 16 * (h % 2) & 0xffff;
            vec_store(factor + h * DROPOUT_LANES + lane, vec_select((VecInt)bits < (int32_t)d.below, (Vec){0}, scale));
        }
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
