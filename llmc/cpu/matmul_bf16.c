#include "cpu/matmul_kernel.h"
#include "cpu/tile.h"
#include "cpu/value.h"

// The kernels of bf16. Instructions multiply two neighbours of k at once, so panels hold pairs as one word: elements
// (k, i) and (k + 1, i). B is packed as (pairs, 32, 2), A as (pairs, 12, 2); for AMX, A as (32 rows, 32) per 32 k.

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

// Packs columns [j, j + count) of B, and sums them.
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

// With `add`, adds the partial sums to a row of a tile. Then stores the row: to c with the bias, or to partial if c is
// NULL.
VECTOR_INLINE void write_row(float *sum, float *partial, bool add, uint16_t *c, const uint16_t *bias, size_t count) {
    if (add)
        for (size_t j = 0; j < count; j++) sum[j] += partial[j];
    if (!c) memcpy(partial, sum, count * sizeof *sum);
    else if (bias)
        for (size_t j = 0; j < count; j++) c[j] = f32_to_bf16(sum[j] + bf16_to_f32(bias[j]));
    else
        for (size_t j = 0; j < count; j++) c[j] = f32_to_bf16(sum[j]);
}

// Adds rows [first, end) of a tile to the partial sums. An fp32 C holds these itself. For a bf16 C block->partial does,
// and C is written after the last block of k.
static void write_rows(const MatmulTile *tile, float *sums, size_t first, size_t end) {
    if (first == end) return;
    const MatmulProduct *p = tile->product;
    const MatmulBlock *block = tile->block;
    size_t i = tile->i, j = tile->j, count = size_min(COLUMNS, block->n + block->columns - j);
    bool last = block->k + block->depth >= p->K, add = block->k > 0 || (p->accumulate && p->c_float);
    const uint16_t *bias = p->bias ? (const uint16_t *)p->bias + j : NULL;
    for (size_t r = first; r < end; r++) {
        size_t at = (i + r) * p->N + j;
        float *sum = sums + r * COLUMNS, *partial = block->partial + (i + r) * block->columns + (j - block->n);
        uint16_t *c = last && !p->c_float ? (uint16_t *)p->c + at : NULL;
        if (p->c_float) partial = (float *)p->c + at;
        if (p->stream && count == COLUMNS)
            for (size_t k = 0; k < COLUMNS; k += VEC) vec_stream(partial + k, vec_load(sum + k));
        else if (count == COLUMNS) write_row(sum, partial, add, c, bias, COLUMNS); // a constant length
        else write_row(sum, partial, add, c, bias, count);
    }
}

// Writes part `at` of `of` of the tile that was computed before this one. Passed to a Bf16Tile as `between`.
static void write_last_tile(void *work, size_t at, size_t of) {
    MatmulTiles *tiles = work;
    size_t rows = tiles->last.rows;
    write_rows(&tiles->last, tiles->sums, rows * at / of, rows * (at + 1) / of);
}

static void bf16_finish(MatmulTiles *tiles) { write_last_tile(tiles, 0, 1); }

static void bf16_tile(MatmulTiles *tiles, const MatmulProduct *p, const MatmulBlock *block, const void *a,
                      const void *b, size_t i, size_t j) {
    const MatmulTile tile = {p, block, i, j, size_min(p->kernel->rows, p->M - i)};
    p->kernel->bf16_tile(tiles->sums, a, b, block->padded / 2, tile.rows, &tiles->ahead, write_last_tile, tiles);
    prefetch_ahead(&tiles->ahead, tiles->ahead.lines);
    tiles->last = tile;
}

#    define KERNEL(called, rows_, pack, compute, available_)                                                           \
        {                                                                                                              \
            .name = called, .type = DTYPE_BF16, .rows = rows_, .columns = COLUMNS, .step = STEP,                       \
            .block_depth = BLOCK_DEPTH, .depth_unit = STEP, .pack_a = pack, .pack_b = bf16_pack_b, .tile = bf16_tile,  \
            .finish = bf16_finish, .bf16_tile = compute, .available = available_                                       \
        }

#endif

const MatmulKernel matmul_bf16[] = {
#ifdef BF16_X86
    KERNEL("AMX", AMX_ROWS, amx_pack_a, bf16_tile_amx, bf16_amx_available),
    KERNEL("AVX512-BF16", ROWS, bf16_pack_a, bf16_tile_avx512, bf16_avx512_available),
#elif defined(__aarch64__)
    KERNEL("BFMMLA", ROWS, bf16_pack_a, bf16_tile_neon, bf16_neon_available),
#endif
    {.name = NULL},
};

const MatmulKernel *matmul_kernel(Dtype type) {
    if (type == DTYPE_FP32) return &matmul_fp32;
    for (const MatmulKernel *kernel = matmul_bf16; kernel->name; kernel++)
        if (kernel->available()) return kernel;
    return NULL;
}
