#include "cpu/matmul_kernel.h"
#include "cpu/tile.h"
#include "cpu/value.h"

#if defined(__x86_64__) && !defined(GNS_AVX2) && (__GNUC__ >= 11 || __clang_major__ >= 12) // older compilers lack AMX
#    define BF16_X86
#    include <cpuid.h>
#    include <immintrin.h>
#    include <sys/syscall.h>
#    include <unistd.h>
#elif defined(__aarch64__)
#    include <arm_neon.h>
#    include <sys/auxv.h>
#endif

// The kernels of bf16. Instructions multiply two neighbours of k at once, so a word of a panel holds a pair: elements
// (k, i) and (k + 1, i). B is packed as (pairs, 32, 2), A as (pairs, 12, 2); for AMX, A as (32 rows, 32) per 32 k. Each
// kernel is compiled for its own instructions, whatever the compiler's flags. matmul_kernel chooses among the kernels.

#if defined(BF16_X86) || defined(__aarch64__)
enum { STEP = BF16_STEP, COLUMNS = BF16_COLUMNS, ROWS = BF16_ROWS, AMX_ROWS = BF16_AMX_ROWS };
enum { BLOCK_DEPTH = 768 };

// Packs a matrix with k down the columns: panel[k / 2][i] = {src[k][i], src[k + 1][i]}, i < count <= width. Pads with
// zeros.
VECTOR_INLINE void pack_pairs_down(uint32_t *panel, const size_t width, const uint16_t *src, size_t row, size_t count,
                                   size_t depth, size_t padded) {
    for (size_t k = 0; k < padded; k += 2, panel += width) {
        const uint16_t *even = src + k * row, *odd = even + row;
        if (count == width && k + 2 <= depth) {
            for (size_t i = 0; i < width; i++) panel[i] = even[i] | (uint32_t)odd[i] << 16;
            continue;
        }
        memset(panel, 0, width * sizeof *panel);
        for (size_t i = 0; i < count && k < depth; i++) panel[i] = even[i];
        for (size_t i = 0; i < count && k + 1 < depth; i++) panel[i] |= (uint32_t)odd[i] << 16;
    }
}

// Packs a matrix with k along the rows: panel[k / 2][i] = {src[i][k], src[i][k + 1]}. width is a multiple of 4.
VECTOR_INLINE void pack_pairs_along(uint32_t *panel, const size_t width, const uint16_t *src, size_t row, size_t count,
                                    size_t depth, size_t padded) {
    size_t blocked = count == width ? depth / 8 * 8 : 0;
    transpose_rows(panel, width, src, row * sizeof *src, blocked / 2);
    memset(panel + blocked / 2 * width, 0, (padded - blocked) / 2 * width * sizeof *panel);
    uint16_t *halves = (uint16_t *)panel;
    for (size_t k = blocked; k < depth; k++)
        for (size_t i = 0; i < count; i++) halves[(k / 2 * width + i) * 2 + k % 2] = src[i * row + k];
}

static void bf16_pack_a(void *panel, const MatmulProduct *p, const MatmulBlock *block, size_t i, size_t count) {
    const uint16_t *src = (const uint16_t *)p->a + i * p->a_row + block->k * p->a_column;
    if (p->a_column == 1) pack_pairs_along(panel, ROWS, src, p->a_row, count, block->depth, block->padded);
    else pack_pairs_down(panel, ROWS, src, p->a_column, count, block->depth, block->padded);
}

#    ifdef BF16_X86
static void amx_pack_a(void *panel, const MatmulProduct *p, const MatmulBlock *block, size_t i, size_t count) {
    const uint16_t *src = (const uint16_t *)p->a + i * p->a_row + block->k * p->a_column;
    uint16_t *to = panel;
    for (size_t k = 0; k < block->padded; k += STEP, to += AMX_ROWS * STEP) {
        size_t depth = size_min(STEP, block->depth - k);
        if (count < AMX_ROWS || depth < STEP) memset(to, 0, AMX_ROWS * STEP * sizeof *to);
        for (size_t r = 0; r < count && p->a_column == 1; r++)
            memcpy(to + r * STEP, src + r * p->a_row + k, depth * sizeof *to);
        if (p->a_column == 1) continue;
        uint32_t words[STEP / 2 * AMX_ROWS]; // (pair, row), then transposed
        pack_pairs_down(words, AMX_ROWS, src + k * p->a_column, p->a_column, count, depth, STEP);
        transpose_rows(to, STEP / 2, words, AMX_ROWS * sizeof *words, AMX_ROWS);
    }
}
#    endif

// Packs columns [j, j + count) of B. Writes the columns' sums, if wanted.
static void bf16_pack_b(void *panel, const MatmulProduct *p, const MatmulBlock *block, size_t j, size_t count) {
    const uint16_t *src = (const uint16_t *)p->b + block->k * p->b_row + j * p->b_column, *packed = panel;
    if (p->b_column == 1) pack_pairs_down(panel, COLUMNS, src, p->b_row, count, block->depth, block->padded);
    else pack_pairs_along(panel, COLUMNS, src, p->b_column, count, block->depth, block->padded);
    if (!p->column_sums) return;
    float sum[COLUMNS] = {0};
    for (size_t k = 0; k < block->padded; k += 2, packed += 2 * COLUMNS)
        for (size_t i = 0; i < COLUMNS; i++) {
            sum[i] += bf16_to_f32(packed[2 * i]);
            sum[i] += bf16_to_f32(packed[2 * i + 1]);
        }
    bool add = p->accumulate || block->k > 0;
    for (size_t i = 0; i < count; i++) p->column_sums[j + i] = sum[i] + (add ? p->column_sums[j + i] : 0);
}

// With `add`, adds the partial sums to a tile's row. Then stores it: to c, with the bias, or to `partial` if c is NULL.
VECTOR_INLINE void write_row(float *sum, float *partial, bool add, uint16_t *c, const uint16_t *bias, size_t count) {
    if (add)
        for (size_t j = 0; j < count; j++) sum[j] += partial[j];
    if (!c) memcpy(partial, sum, count * sizeof *sum);
    else if (bias)
        for (size_t j = 0; j < count; j++) c[j] = f32_to_bf16(sum[j] + bf16_to_f32(bias[j]));
    else
        for (size_t j = 0; j < count; j++) c[j] = f32_to_bf16(sum[j]);
}

// Adds rows [first, end) of the last tile to the partial sums. An fp32 C holds them itself; for a bf16 C they lie in
// block->partial, and C is written after the last block of k.
static void write_rows(MatmulTiles *tiles, size_t first, size_t end) {
    const MatmulProduct *p = tiles->product;
    const MatmulBlock *block = tiles->block;
    size_t i = tiles->last_i, j = tiles->j, count = size_min(COLUMNS, block->n + block->columns - j);
    bool last = block->k + block->depth >= p->K, add = block->k > 0 || (p->accumulate && p->c_float);
    const uint16_t *bias = p->bias ? (const uint16_t *)p->bias + j : NULL;
    for (size_t r = first; r < end; r++) {
        size_t at = (i + r) * p->N + j;
        float *sum = tiles->sums + r * COLUMNS, *partial = block->partial + (i + r) * block->columns + (j - block->n);
        uint16_t *c = last && !p->c_float ? (uint16_t *)p->c + at : NULL;
        if (p->c_float) partial = (float *)p->c + at;
        if (p->stream && count == COLUMNS)
            for (size_t k = 0; k < COLUMNS; k += VEC) vec_stream(partial + k, vec_load(sum + k));
        else if (count == COLUMNS) write_row(sum, partial, add, c, bias, COLUMNS); // a constant length
        else write_row(sum, partial, add, c, bias, count);
    }
}

// Divides the last tile into `of` equal parts, and writes part `at`, counted from 0.
static void write_last_tile(MatmulTiles *tiles, size_t at, size_t of) {
    size_t first = tiles->last_rows * at / of, end = tiles->last_rows * (at + 1) / of;
    if (first < end) write_rows(tiles, first, end);
}

#    ifdef BF16_X86
// ---- AMX ------------------------------------------------------------------------------------------------------------

// Asks Linux for the AMX registers, which a process gets only on request (Documentation/arch/x86/xstate.rst).
static bool amx_available(void) {
    enum { ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18, AMX_BF16 = 1 << 22, AMX_TILE = 1 << 24 };
    unsigned a, b, c, d;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(d & AMX_BF16) || !(d & AMX_TILE)) return false;
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
}

// Configures this thread's tiles once. Tiles 0 to 3: c, 2 x 2 tiles of 16 x 16; 4, 5: rows of a; 6, 7: columns of b.
__attribute__((target("amx-tile"))) static void configure(void) {
    static _Thread_local bool configured;
    struct {
        uint8_t palette, start_row, reserved[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    } config __attribute__((aligned(64))) = {.palette = 1};
    if (configured) return;
    for (int i = 0; i < 8; i++) config.row_bytes[i] = 64, config.rows[i] = 16;
    _tile_loadconfig(&config);
    configured = true;
}

__attribute__((target("amx-tile,amx-bf16"))) static void amx_multiply(MatmulTiles *tiles, const uint16_t *a,
                                                                      const uint16_t *b, size_t pairs, size_t count) {
    enum { A_ROW = 64, B_ROW = 128, C_ROW = 128, PAIRS = 16 }; // *_ROW: bytes between rows; PAIRS: pairs of k in a tile
    float *c = tiles->sums, *c1 = c + 16 * COLUMNS;
    size_t lines = (tiles->ahead.lines + pairs / PAIRS - 1) / (pairs / PAIRS); // cache lines to prefetch per step
    configure();
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (size_t at = 0; at < pairs; at += PAIRS, a += AMX_ROWS * STEP, b += PAIRS * 2 * COLUMNS) {
        _tile_loadd(4, a, A_ROW);
        _tile_loadd(6, b, B_ROW);
        _tile_loadd(7, b + COLUMNS, B_ROW);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if (count > 16) {
            _tile_loadd(5, a + 16 * STEP, A_ROW);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
        prefetch_ahead(&tiles->ahead, lines);
        write_last_tile(tiles, at / PAIRS, pairs / PAIRS); // on the vector units, which AMX leaves idle
    }
    _tile_stored(0, c, C_ROW);
    _tile_stored(1, c + 16, C_ROW);
    if (count <= 16) return;
    _tile_stored(2, c1, C_ROW);
    _tile_stored(3, c1 + 16, C_ROW);
}

// ---- AVX512-BF16 ----------------------------------------------------------------------------------------------------

#        define AVX512_BF16 __attribute__((target("avx512f,avx512bw,avx512vl,avx512bf16")))

static bool avx512_available(void) {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bf16");
}

enum { STEP_PAIRS = STEP / 2 };

// Computes a tile of `rows` rows. `rows` is a constant, so the sums, rows x 2 vectors, stay in registers.
AVX512_BF16 static inline __attribute__((always_inline)) void
avx512_tile(const int rows, float *c, const uint16_t *a, const uint16_t *b, size_t pairs, Ahead *ahead) {
    __m512 sum[ROWS][2];
#        pragma GCC unroll 12
    for (int i = 0; i < rows; i++) sum[i][0] = sum[i][1] = _mm512_setzero_ps();
    Ahead mine = *ahead;
    size_t steps = pairs / STEP_PAIRS, lines = (mine.lines + steps - 1) / steps;
    for (; pairs > 0; pairs--, a += 2 * ROWS, b += 2 * COLUMNS) {
        if (pairs % STEP_PAIRS == 0) prefetch_ahead(&mine, lines);
        __m512bh b0 = (__m512bh)_mm512_loadu_si512(b), b1 = (__m512bh)_mm512_loadu_si512(b + COLUMNS);
#        pragma GCC unroll 12
        for (int i = 0; i < rows; i++) {
            int32_t pair;
            memcpy(&pair, a + 2 * i, sizeof pair);
            __m512bh x = (__m512bh)_mm512_set1_epi32(pair);
            sum[i][0] = _mm512_dpbf16_ps(sum[i][0], x, b0);
            sum[i][1] = _mm512_dpbf16_ps(sum[i][1], x, b1);
        }
    }
    *ahead = mine;
#        pragma GCC unroll 12
    for (int i = 0; i < rows; i++, c += COLUMNS) {
        _mm512_storeu_ps(c, sum[i][0]);
        _mm512_storeu_ps(c + COLUMNS / 2, sum[i][1]);
    }
}

AVX512_BF16 static void avx512_multiply(MatmulTiles *tiles, const uint16_t *a, const uint16_t *b, size_t pairs,
                                        size_t count) {
    write_last_tile(tiles, 0, 1);
    if (count > 8) avx512_tile(12, tiles->sums, a, b, pairs, &tiles->ahead);
    else if (count > 4) avx512_tile(8, tiles->sums, a, b, pairs, &tiles->ahead);
    else avx512_tile(4, tiles->sums, a, b, pairs, &tiles->ahead);
}
#    else
// ---- BFMMLA ---------------------------------------------------------------------------------------------------------

// Every Arm core with bf16 has bfmmla, which adds the product of (2, 4) and (4, 2) to (2, 2). bfmmla gives the bits of
// two bfdot: it sums pair by pair, rounds each sum of two products and each addition to odd, and flushes subnormals.
// Other machines round to nearest, so their bits differ.
#        define BF16 __attribute__((target("arch=armv8.2-a+bf16")))

enum { GROUP = 8 }; // sums of GROUP columns fill 24 of 32 registers

typedef struct {
    bfloat16x8_t low, high; // (2, 4) each: the first two and the last two of four rows of A, or columns of B
} Four;

static bool neon_available(void) { return getauxval(AT_HWCAP2) & HWCAP2_BF16; }

// Loads two pairs of four rows of A, or of four columns of B. The second pair lies `width` values after the first.
BF16 static inline __attribute__((always_inline)) Four load_four(const uint16_t *p, size_t width) {
    uint32x4_t first = vreinterpretq_u32_u16(vld1q_u16(p)), second = vreinterpretq_u32_u16(vld1q_u16(p + width));
    return (Four){vreinterpretq_bf16_u32(vzip1q_u32(first, second)), vreinterpretq_bf16_u32(vzip2q_u32(first, second))};
}

// Computes GROUP columns of c.
BF16 static void multiply_group(float *c, const uint16_t *a, const uint16_t *b, size_t pairs) {
    float32x4_t sum[ROWS / 2][GROUP / 2]; // (2, 2) each
#        pragma GCC unroll 24
    for (int i = 0; i < ROWS / 2 * GROUP / 2; i++) sum[i / (GROUP / 2)][i % (GROUP / 2)] = vdupq_n_f32(0);
    for (size_t pair = 0; pair < pairs; pair += 2, a += 4 * ROWS, b += 4 * COLUMNS) {
        Four b0 = load_four(b, 2 * COLUMNS), b1 = load_four(b + 8, 2 * COLUMNS);
        bfloat16x8_t columns[] = {b0.low, b0.high, b1.low, b1.high};
#        pragma GCC unroll 3
        for (int i = 0; i < ROWS / 4; i++) {
            Four rows = load_four(a + 8 * i, 2 * ROWS);
#        pragma GCC unroll 4
            for (int j = 0; j < GROUP / 2; j++) {
                sum[2 * i][j] = vbfmmlaq_f32(sum[2 * i][j], rows.low, columns[j]);
                sum[2 * i + 1][j] = vbfmmlaq_f32(sum[2 * i + 1][j], rows.high, columns[j]);
            }
            __asm__("" ::: "memory"); // keeps the loads apart; all at once would need the registers of `sum`
        }
    }
#        pragma GCC unroll 12
    for (int i = 0; i < ROWS / 2 * GROUP / 4; i++) {
        float32x4_t left = sum[i / 2][i % 2 * 2], right = sum[i / 2][i % 2 * 2 + 1];
        float *at = c + i / 2 * 2 * COLUMNS + i % 2 * 4;
        vst1q_f32(at, vcombine_f32(vget_low_f32(left), vget_low_f32(right)));
        vst1q_f32(at + COLUMNS, vcombine_f32(vget_high_f32(left), vget_high_f32(right)));
    }
}

// Computes all twelve rows, whatever the count; the caller prefetches.
static void neon_multiply(MatmulTiles *tiles, const uint16_t *a, const uint16_t *b, size_t pairs, size_t count) {
    write_last_tile(tiles, 0, 1);
    for (int j = 0; j < COLUMNS; j += GROUP) multiply_group(tiles->sums + j, a, b + 2 * j, pairs);
}
#    endif

// ---- The kernels ----------------------------------------------------------------------------------------------------

static void bf16_finish(MatmulTiles *tiles) { write_last_tile(tiles, 0, 1); }

static void bf16_tile(MatmulTiles *tiles, const void *a, const void *b, size_t i) {
    const MatmulProduct *p = tiles->product;
    size_t rows = size_min(p->kernel->rows, p->M - i);
    p->kernel->multiply(tiles, a, b, tiles->block->padded / 2, rows);
    prefetch_ahead(&tiles->ahead, tiles->ahead.lines); // the lines that `multiply` did not prefetch
    tiles->last_i = i, tiles->last_rows = rows;
}

#    define KERNEL(called, rows_, pack, compute, available_)                                                           \
        {                                                                                                              \
            .name = called, .type = DTYPE_BF16, .rows = rows_, .columns = COLUMNS, .block_depth = BLOCK_DEPTH,         \
            .depth_unit = STEP, .pack_a = pack, .pack_b = bf16_pack_b, .tile = bf16_tile, .finish = bf16_finish,       \
            .multiply = compute, .available = available_                                                               \
        }

#endif

const MatmulKernel matmul_bf16[] = {
#ifdef BF16_X86
    KERNEL("AMX", AMX_ROWS, amx_pack_a, amx_multiply, amx_available),
    KERNEL("AVX512-BF16", ROWS, bf16_pack_a, avx512_multiply, avx512_available),
#elif defined(__aarch64__)
    KERNEL("BFMMLA", ROWS, bf16_pack_a, neon_multiply, neon_available),
#endif
    {.name = NULL},
};

const MatmulKernel *matmul_kernel(Dtype type) {
    if (type == DTYPE_FP32 || dtype_is_fp8(type)) return &matmul_fp32;
    for (const MatmulKernel *kernel = matmul_bf16; kernel->name; kernel++)
        if (kernel->available()) return kernel;
    return NULL;
}
