#include "cpu/matmul_kernel.h"
#include "cpu/tile.h"

// The kernel of fp32: fused multiply-adds on vectors.

#ifdef __x86_64__
enum { DIRECT_COLUMNS = 512 }; // largest N for which tiles read A unpacked, since packing would cost more
#else
enum { DIRECT_COLUMNS = 0 };
#endif

// True if tiles read rows of A unpacked. Only whole tiles do, since others would read beyond A.
static bool reads_in_place(const MatmulProduct *p, size_t rows) { return p->N <= DIRECT_COLUMNS && rows == TILE_ROWS; }

// Packs rows [i, i + count) of A, for the block's k.
static void fp32_pack_a(void *panel, const MatmulProduct *p, const MatmulBlock *block, size_t i, size_t count) {
    const float *src = (const float *)p->a + i * p->a_row + block->k * p->a_column;
    if (reads_in_place(p, count)) return;
    if (p->a_column == 1) pack_transposed(panel, TILE_ROWS, src, p->a_row, count, block->depth);
    else pack_straight(panel, TILE_ROWS, src, p->a_column, count, block->depth);
}

// Packs columns [j, j + count) of B. Writes the columns' sums, if wanted.
static void fp32_pack_b(void *panel, const MatmulProduct *p, const MatmulBlock *block, size_t j, size_t count) {
    const float *src = (const float *)p->b + block->k * p->b_row + j * p->b_column;
    if (p->b_column == 1) pack_straight(panel, TILE_COLUMNS, src, p->b_row, count, block->depth);
    else pack_transposed(panel, TILE_COLUMNS, src, p->b_column, count, block->depth);
    if (!p->column_sums) return;
    Vec sum[TILE_VECS] = {{0}};
    for (size_t k = 0; k < block->depth; k++)
        for (int v = 0; v < TILE_VECS; v++) sum[v] += vec_load((float *)panel + k * TILE_COLUMNS + v * VEC);
    bool add = p->accumulate || block->k > 0;
    for (size_t i = 0; i < count; i++)
        p->column_sums[j + i] = sum[i / VEC][i % VEC] + (add ? p->column_sums[j + i] : 0);
}

// Longest block of k. Panels of A and B: 6 + 16 KiB with AVX2 (32 KiB of first-level cache), 18 + 48 KiB with AVX-512.
enum { TILE_DEPTH = VEC == 8 ? 256 : 384 };
enum { PREFETCH_DEPTH = 16 }; // steps of k from one prefetch to the next

// Multiplies A and a panel of B as tile_add_product does, with prefetches.
VECTOR_INLINE Tile block_product(const int rows, size_t depth, const float *a, size_t a_row, size_t a_k, const float *b,
                                 Ahead *ahead) {
    size_t lines = (ahead->lines * PREFETCH_DEPTH + depth - 1) / depth;
    Tile t = tile_zero(rows);
    for (size_t k = 0; k < depth; k += PREFETCH_DEPTH) {
        prefetch_ahead(ahead, lines);
        tile_add_product(rows, &t, size_min(PREFETCH_DEPTH, depth - k), a + k * a_k, a_row, a_k, b + k * TILE_COLUMNS,
                         TILE_COLUMNS);
    }
    return t;
}

// Computes the tile of C at row i from rows of A, packed or not, and a panel of B. At an edge of C writes the tile to
// `whole` first.
static void fp32_tile(MatmulTiles *tiles, const void *a, const void *b, size_t i) {
    const MatmulProduct *p = tiles->product;
    const MatmulBlock *block = tiles->block;
    const size_t j = tiles->j;
    size_t rows = size_min(TILE_ROWS, p->M - i), columns = size_min(TILE_COLUMNS, block->n + block->columns - j);
    bool add = p->accumulate || block->k > 0, edge = rows % TILE_ROW_STEP || columns < TILE_COLUMNS;
    const float *bias = p->bias && block->k == 0 ? (const float *)p->bias + j : NULL;
    float *c = (float *)p->c + i * p->N + j, whole[TILE_ROWS][TILE_COLUMNS];
    Ahead ahead = tiles->ahead;
    const float *in_place = (const float *)p->a + i * p->a_row + block->k * p->a_column;
    TILE_DISPATCH(rows, {
        Tile t;
        if (!reads_in_place(p, rows)) t = block_product(ROWS, block->depth, a, 1, TILE_ROWS, b, &ahead);
        else if (p->a_column == 1) t = block_product(ROWS, block->depth, in_place, p->a_row, 1, b, &ahead);
        else t = block_product(ROWS, block->depth, in_place, 1, p->a_column, b, &ahead);
        if (!edge) tile_add_row(ROWS, &t, bias ? vec_load(bias) : (Vec){0}, bias ? vec_load(bias + VEC) : (Vec){0});
        if (edge) tile_write(ROWS, whole[0], TILE_COLUMNS, &t, false, false);
        else tile_write(ROWS, c, p->N, &t, add, p->stream);
    });
    tiles->ahead.run = ahead.run, tiles->ahead.byte = ahead.byte;
    for (size_t r = 0; r < rows && edge; r++, c += p->N)
        for (size_t k = 0; k < columns; k++) c[k] = whole[r][k] + (bias ? bias[k] : 0) + (add ? c[k] : 0);
}

const MatmulKernel matmul_fp32 = {
    .name = "fp32",
    .type = DTYPE_FP32,
    .rows = TILE_ROWS,
    .columns = TILE_COLUMNS,
    .block_depth = TILE_DEPTH,
    .depth_unit = 4,
    .pack_a = fp32_pack_a,
    .pack_b = fp32_pack_b,
    .tile = fp32_tile,
};
