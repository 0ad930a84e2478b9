// tile: the innermost loop of every matrix product on the CPU.
//
// A tile of the result, TILE_ROWS x TILE_COLUMNS, stays in registers while k runs. Each step loads one row of B (as
// TILE_VECS vectors), broadcasts TILE_ROWS elements of A and makes TILE_ROWS x TILE_VECS fused multiply-adds. The tile
// fills 24 of 32 vector registers (AVX-512, NEON), or 12 of 16. A larger one would leave none for B and a broadcast.
#pragma once

#include "cpu/vector_math.h"

#include <stdbool.h>

#if defined(__AVX512F__) || defined(__aarch64__)
enum { TILE_ROWS = 12, TILE_ROW_STEP = 4 };
#else
enum { TILE_ROWS = 6, TILE_ROW_STEP = 2 };
#endif
enum { TILE_VECS = 2, TILE_COLUMNS = TILE_VECS * VEC };

typedef struct {
    Vec v[TILE_ROWS][TILE_VECS];
} Tile; // held in registers; the first `rows` rows are in use

// Adds A (rows, K) times B (K, TILE_COLUMNS) to t, over k in ascending order. Element (i, k) of A lies at
// a[i * a_row + k * a_k], row k of B at b + k * b_k. `rows` must be a constant.
VECTOR_INLINE void tile_add_product(const int rows, Tile *t, size_t K, const float *a, size_t a_row, size_t a_k,
                                    const float *b, size_t b_k) {
#ifdef __x86_64__ // not on Arm, where the loads of four steps would need t's registers
#    pragma GCC unroll 4
#endif
    for (size_t k = 0; k < K; k++, a += a_k, b += b_k) {
        Vec b0 = vec_load(b), b1 = vec_load(b + VEC);
#ifdef __aarch64__
        if (__builtin_constant_p(a_row) && a_row == 1) { // fmla can read an element of a vector: load four at once
#    pragma GCC unroll 12
            for (int i = 0; i < rows; i++) {
                Vec four = vec_load(a + i / 4 * 4);
                t->v[i][0] += four[i % 4] * b0;
                t->v[i][1] += four[i % 4] * b1;
            }
            continue;
        }
#endif
#pragma GCC unroll 12
        for (int i = 0; i < rows; i++) {
            t->v[i][0] += a[i * a_row] * b0;
            t->v[i][1] += a[i * a_row] * b1;
#ifdef __aarch64__
            __asm__("" ::: "memory"); // keeps the loads apart; all at once would need the registers of `t`
#endif
        }
    }
}

VECTOR_INLINE Tile tile_zero(const int rows) {
    Tile t;
#pragma GCC unroll 12
    for (int i = 0; i < rows; i++) t.v[i][0] = t.v[i][1] = (Vec){0};
    return t;
}

// Runs `body` with a constant ROWS, the smallest of TILE_ROWS / 3, 2/3 TILE_ROWS and TILE_ROWS that is >= rows.
#define TILE_DISPATCH(rows, body)                                                                                      \
    do {                                                                                                               \
        if ((rows) > 2 * TILE_ROW_STEP) {                                                                              \
            enum { ROWS = TILE_ROWS };                                                                                 \
            body;                                                                                                      \
        } else if ((rows) > TILE_ROW_STEP) {                                                                           \
            enum { ROWS = 2 * TILE_ROW_STEP };                                                                         \
            body;                                                                                                      \
        } else {                                                                                                       \
            enum { ROWS = TILE_ROW_STEP };                                                                             \
            body;                                                                                                      \
        }                                                                                                              \
    } while (0)

// Adds a row of TILE_COLUMNS, in two halves, to each row of t.
VECTOR_INLINE void tile_add_row(const int rows, Tile *t, Vec row0, Vec row1) {
#pragma GCC unroll 12
    for (int i = 0; i < rows; i++) t->v[i][0] += row0, t->v[i][1] += row1;
}

// C (rows, TILE_COLUMNS) = t; add: C += t. stream: written past the caches. Rows of C lie c_row floats apart.
VECTOR_INLINE void tile_write(const int rows, float *c, size_t c_row, const Tile *t, bool add, bool stream) {
#pragma GCC unroll 12
    for (int i = 0; i < rows; i++, c += c_row) {
        Vec c0 = t->v[i][0], c1 = t->v[i][1];
        if (add) c0 += vec_load(c), c1 += vec_load(c + VEC);
        if (stream) vec_stream(c, c0), vec_stream(c + VEC, c1);
        else vec_store(c, c0), vec_store(c + VEC, c1);
    }
}

// Packing. A panel is (K, width): for each k the elements of `width` neighbouring rows of A, or columns of B, padded
// with zeros.

typedef uint32_t Words4 __attribute__((vector_size(16), may_alias, aligned(2))); // floats, or pairs of bf16
#ifdef __clang__
#    define SHUFFLE4(x, y, i, j, k, l) __builtin_shufflevector(x, y, i, j, k, l)
#else
typedef int32_t Int4 __attribute__((vector_size(16)));
#    define SHUFFLE4(x, y, i, j, k, l) __builtin_shuffle(x, y, (Int4){i, j, k, l})
#endif

VECTOR_INLINE Words4 words_load(const void *src) { return *(const Words4 *)src; }
VECTOR_INLINE void words_store(void *to, size_t i, Words4 v) { *(Words4 *)((uint32_t *)to + i) = v; }

// Transposes 4 rows of 4 words: word k * width + i of panel = word k of row i. Rows of src lie row_bytes apart.
VECTOR_INLINE void transpose_4x4(void *panel, size_t width, const void *src, size_t row_bytes) {
    const char *row = src;
    Words4 r0 = words_load(row), r1 = words_load(row + row_bytes);
    Words4 r2 = words_load(row + 2 * row_bytes), r3 = words_load(row + 3 * row_bytes);
    Words4 low01 = SHUFFLE4(r0, r1, 0, 4, 1, 5), high01 = SHUFFLE4(r0, r1, 2, 6, 3, 7);
    Words4 low23 = SHUFFLE4(r2, r3, 0, 4, 1, 5), high23 = SHUFFLE4(r2, r3, 2, 6, 3, 7);
    words_store(panel, 0, SHUFFLE4(low01, low23, 0, 1, 4, 5));
    words_store(panel, width, SHUFFLE4(low01, low23, 2, 3, 6, 7));
    words_store(panel, 2 * width, SHUFFLE4(high01, high23, 0, 1, 4, 5));
    words_store(panel, 3 * width, SHUFFLE4(high01, high23, 2, 3, 6, 7));
}

#ifdef __AVX2__
// Loads four words from each of the rows i, i + 4, ... < WIDE. Words from rows >= `rows` are arbitrary.
#    ifdef __AVX512F__
enum { WIDE = 16 };
typedef __m512i WideWords;
#        define UNPACK(part, x, y) _mm512_unpack##part(x, y)
VECTOR_INLINE WideWords wide_load(const size_t rows, size_t i, const char *src, size_t row_bytes) {
    const char *row = src + i * row_bytes;
    WideWords v = _mm512_castsi128_si512(_mm_loadu_si128((const __m128i *)row));
    v = _mm512_inserti32x4(v, _mm_loadu_si128((const __m128i *)(row + 4 * row_bytes)), 1);
    v = _mm512_inserti32x4(v, _mm_loadu_si128((const __m128i *)(row + 8 * row_bytes)), 2);
    return rows <= 12 ? v : _mm512_inserti32x4(v, _mm_loadu_si128((const __m128i *)(row + 12 * row_bytes)), 3);
}
#    else
enum { WIDE = 8 };
typedef __m256i WideWords;
#        define UNPACK(part, x, y) _mm256_unpack##part(x, y)
VECTOR_INLINE WideWords wide_load(const size_t rows, size_t i, const char *src, size_t row_bytes) {
    const char *low = src + i * row_bytes, *high = i + 4 < rows ? low + 4 * row_bytes : low;
    return _mm256_loadu2_m128i((const __m128i *)high, (const __m128i *)low);
}
#    endif

// Transposes `rows` <= WIDE rows of 4 words. Always writes WIDE words: those after the first `rows` are arbitrary.
VECTOR_INLINE void transpose_wide(const size_t rows, uint32_t *panel, size_t width, const char *src, size_t row_bytes) {
    WideWords r0 = wide_load(rows, 0, src, row_bytes), r1 = wide_load(rows, 1, src, row_bytes);
    WideWords r2 = wide_load(rows, 2, src, row_bytes), r3 = wide_load(rows, 3, src, row_bytes);
    WideWords low01 = UNPACK(lo_epi32, r0, r1), high01 = UNPACK(hi_epi32, r0, r1);
    WideWords low23 = UNPACK(lo_epi32, r2, r3), high23 = UNPACK(hi_epi32, r2, r3);
    WideWords word[4] = {UNPACK(lo_epi64, low01, low23), UNPACK(hi_epi64, low01, low23),
                         UNPACK(lo_epi64, high01, high23), UNPACK(hi_epi64, high01, high23)};
#    pragma GCC unroll 4
    for (size_t k = 0; k < 4; k++) memcpy(panel + k * width, &word[k], sizeof word[k]);
}
#endif

// panel (words, width) = `width` rows of src, transposed. words is a multiple of 4. With AVX-512 width is 12 or a
// multiple of 16.
VECTOR_INLINE void transpose_rows(void *panel, const size_t width, const void *src, size_t row_bytes, size_t words) {
    size_t i = 0, k = 0;
#ifdef __AVX2__
    for (; i + WIDE <= width; i += WIDE)
        for (size_t w = 0; w < words; w += 4)
            transpose_wide(WIDE, (uint32_t *)panel + w * width + i, width, (const char *)src + i * row_bytes + 4 * w,
                           row_bytes);
    for (; width < WIDE && k + 4 < words; k += 4) // the next call overwrites the arbitrary words
        transpose_wide(width, (uint32_t *)panel + k * width, width, (const char *)src + 4 * k, row_bytes);
#endif
    for (; k < words; k += 4)
        for (size_t at = i; at < width; at += 4) {
            size_t i4 = at + 4 <= width ? at : width - 4; // width 6: the last four rows overlap the first four
            transpose_4x4((uint32_t *)panel + k * width + i4, width, (const char *)src + i4 * row_bytes + 4 * k,
                          row_bytes);
        }
}

// Packs a matrix with k along the rows: panel[k * width + i] = src[i * row + k], i < count <= width.
VECTOR_INLINE void pack_transposed(float *panel, const size_t width, const float *src, size_t row, size_t count,
                                   size_t K) {
    size_t blocked_k = count == width ? K / 4 * 4 : 0;
    transpose_rows(panel, width, src, row * sizeof *src, blocked_k);
    for (size_t k = blocked_k; k < K; k++)
        for (size_t i = 0; i < width; i++) panel[k * width + i] = i < count ? src[i * row + k] : 0;
}

// Packs a matrix with k down the columns: panel[k * width + i] = src[k * row + i], i < count <= width.
VECTOR_INLINE void pack_straight(float *panel, const size_t width, const float *src, size_t row, size_t count,
                                 size_t K) {
    for (size_t k = 0; k < K; k++, panel += width, src += row) {
        if (count == width) memcpy(panel, src, width * sizeof *panel); // a constant length
        else {
            memcpy(panel, src, count * sizeof *panel);
            memset(panel + count, 0, (width - count) * sizeof *panel);
        }
    }
}
