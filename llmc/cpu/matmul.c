#include "cpu/matmul.h"
#include "cpu/tile.h"

#include <assert.h>

// Blocking (after Goto & van de Geijn 2008, "Anatomy of High-Performance Matrix Multiplication", with A and B
// exchanged): all threads together pack a block of B, BLOCK_K x BLOCK_N, into panels of TILE_COLUMNS columns; it fits
// the second-level cache. Then each thread packs one row panel of A at a time, TILE_ROWS x BLOCK_K, which stays in its
// first-level cache while it meets every panel of the block.
enum { BLOCK_K = 384, BLOCK_N = 768, B_BLOCK_FLOATS = BLOCK_K * BLOCK_N };
enum { ROW_COLUMNS = 384 };            // columns that a product of one row computes at a time
enum { TASKS_PER_THREAD = 8 };         // wanted of a block, so that the threads end at about the same time
enum { SERIAL_FLOPS = 2 * 64 * 1024 }; // about what it costs to wake a thread

// C (M,N) = A B, or += with accumulate. Element (i, k) of A is a[i * a_row + k * a_column], and likewise B's; one of an
// operand's two strides is 1.
typedef struct {
    size_t M, N, K;
    const float *a;
    size_t a_row, a_column;
    const float *b;
    size_t b_row, b_column;
    float *c;
    const float *bias;  // (N), added to every row; or NULL
    float *column_sums; // (N), of B over k; or NULL. b_column must then be 1
    bool accumulate;    // for column_sums too
} Product;

typedef struct {
    size_t n, columns; // of B and C: [n, n + columns)
    size_t k, depth;   // of A and B: [k, k + depth)
    float *panels;     // B packed
} Block;

// Two blocks of B: one is packed while the other is in use.
size_t matmul_scratch(void) { return 2 * (size_t)B_BLOCK_FLOATS; }

// Rows [i, i + count) of A, the block's k.
static void pack_a(float *panel, const Product *p, const Block *block, size_t i, size_t count) {
    const float *src = p->a + i * p->a_row + block->k * p->a_column;
    if (p->a_column == 1) pack_transposed(panel, TILE_ROWS, src, p->a_row, count, block->depth);
    else pack_straight(panel, TILE_ROWS, src, p->a_column, count, block->depth);
}

// Column sums of a packed panel of B, count of whose columns exist.
static void sum_columns(const Product *p, const Block *block, const float *panel, size_t j, size_t count) {
    Vec sum[TILE_VECS] = {{0}};
    for (size_t k = 0; k < block->depth; k++)
        for (int v = 0; v < TILE_VECS; v++) sum[v] += vec_load(panel + k * TILE_COLUMNS + v * VEC);
    bool add = p->accumulate || block->k > 0;
    for (size_t i = 0; i < count; i++)
        p->column_sums[j + i] = sum[i / VEC][i % VEC] + (add ? p->column_sums[j + i] : 0);
}

static void pack_b(const Product *p, const Block *block, size_t panel_index) {
    size_t j = block->n + panel_index * TILE_COLUMNS;
    size_t count = size_min(TILE_COLUMNS, block->n + block->columns - j);
    float *panel = block->panels + panel_index * TILE_COLUMNS * block->depth;
    const float *src = p->b + block->k * p->b_row + j * p->b_column;
    if (p->b_column == 1) pack_straight(panel, TILE_COLUMNS, src, p->b_row, count, block->depth);
    else pack_transposed(panel, TILE_COLUMNS, src, p->b_column, count, block->depth);
    if (p->column_sums) sum_columns(p, block, panel, j, count);
}

static void copy_rows(float *to, size_t to_row, const float *from, size_t from_row, size_t rows, size_t columns) {
    for (size_t i = 0; i < rows; i++) memcpy(to + i * to_row, from + i * from_row, columns * sizeof *to);
}

// The tile of C at (i, j) from a packed panel of A and one of B. At the edges of C a copy is worked on.
static void compute_tile(const Product *p, const Block *block, const float *a, const float *b, size_t i, size_t j) {
    size_t rows = size_min(TILE_ROWS, p->M - i), columns = size_min(TILE_COLUMNS, block->n + block->columns - j);
    bool add = p->accumulate || block->k > 0, edge = rows % TILE_ROW_STEP || columns < TILE_COLUMNS;
    const float *bias = p->bias && block->k == 0 ? p->bias + j : NULL;
    float *c = p->c + i * p->N + j, edge_tile[TILE_ROWS * TILE_COLUMNS], edge_bias[TILE_COLUMNS];
    size_t c_row = p->N;
    if (edge) {
        if (add) copy_rows(edge_tile, TILE_COLUMNS, c, c_row, rows, columns);
        if (bias) bias = memcpy(edge_bias, bias, columns * sizeof *bias);
        c = edge_tile, c_row = TILE_COLUMNS;
    }
    Vec bias0 = bias ? vec_load(bias) : (Vec){0}, bias1 = bias ? vec_load(bias + VEC) : (Vec){0};
    TILE_DISPATCH(rows, {
        Tile t = tile_product(ROWS, block->depth, a, 1, TILE_ROWS, b, TILE_COLUMNS);
        tile_add_row(ROWS, &t, bias0, bias1);
        tile_write(ROWS, c, c_row, &t, add);
    });
    if (edge) copy_rows(p->c + i * p->N + j, p->N, edge_tile, TILE_COLUMNS, rows, columns);
}

// The row panel of C at row i, with the block's panels [first, end).
static void compute_rows(const Product *p, const Block *block, size_t i, size_t first, size_t end) {
    float a[TILE_ROWS * BLOCK_K] __attribute__((aligned(64)));
    pack_a(a, p, block, i, size_min(TILE_ROWS, p->M - i));
    for (size_t panel = first; panel < end; panel++)
        compute_tile(p, block, a, block->panels + panel * TILE_COLUMNS * block->depth, i,
                     block->n + panel * TILE_COLUMNS);
}

static size_t divide_up(size_t n, size_t by) { return (n + by - 1) / by; }

// Called by every thread of a parallel region. The barrier after the packing is the only one: a thread that passes it
// knows that all have left the previous block, whose buffer is packed next. The schedules are static so that a thread
// finds the rows that it wrote last time still in its cache.
static void compute_block(const Product *p, const Block *block, int threads) {
    size_t panels = divide_up(block->columns, TILE_COLUMNS), row_panels = divide_up(p->M, TILE_ROWS);
    size_t wanted = threads > 1 ? (size_t)threads * TASKS_PER_THREAD : 1;
    size_t parts = size_min(panels, divide_up(wanted, row_panels)); // of a row panel
#pragma omp for schedule(static)
    for (size_t panel = 0; panel < panels; panel++) pack_b(p, block, panel);
#pragma omp for schedule(static) nowait
    for (size_t task = 0; task < row_panels * parts; task++) {
        size_t part = task % parts;
        compute_rows(p, block, task / parts * TILE_ROWS, panels * part / parts, panels * (part + 1) / parts);
    }
}

// The length of the blocks that n is cut into: as few as possible of at most `limit`, about equal, multiples of `unit`.
static size_t block_length(size_t n, size_t limit, size_t unit) {
    return round_up(divide_up(n, size_max(1, divide_up(n, limit))), unit);
}

// Columns [j, j + n) of a product of one row, with the same sums as in tiles: over k in ascending order, block by block.
static void compute_one_row(const Product *p, size_t depth, size_t j, size_t n) {
    float *c = p->c + j;
    for (size_t first = 0; first == 0 || first < p->K; first += size_max(depth, 1)) {
        float sum[ROW_COLUMNS] = {0};
        const float *b = p->b + first * p->b_row + j, *bias = first == 0 && p->bias ? p->bias + j : NULL;
        for (size_t k = first; k < size_min(first + depth, p->K); k++, b += p->b_row)
            for (size_t i = 0; i < n; i++) sum[i] += p->a[k * p->a_column] * b[i];
        bool add = p->accumulate || first > 0;
        for (size_t i = 0; i < n; i++) c[i] = sum[i] + (bias ? bias[i] : 0) + (add ? c[i] : 0);
    }
}

// A single row reads each element of B once, so packing would cost more than the product.
static void multiply_one_row(const Product *p, size_t depth, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (size_t j = 0; j < p->N; j += ROW_COLUMNS) compute_one_row(p, depth, j, size_min(ROW_COLUMNS, p->N - j));
}

static void multiply(Matmul mm, const Product *p) {
    assert((p->a_row == 1 || p->a_column == 1) && (p->b_column == 1 || (p->b_row == 1 && !p->column_sums)));
    if (!p->M || !p->N) return;
    size_t depth = block_length(p->K, BLOCK_K, 4), columns = block_length(p->N, BLOCK_N, TILE_COLUMNS);
    int threads = 2 * p->M * p->N * p->K < SERIAL_FLOPS ? 1 : mm.threads;
    if (p->M == 1 && p->b_column == 1 && !p->column_sums) {
        multiply_one_row(p, depth, threads);
        return;
    }
#pragma omp parallel num_threads(threads)
    {
        float *panels[2] = {mm.scratch, mm.scratch + B_BLOCK_FLOATS};
        int buffer = 0;
        for (size_t n = 0; n < p->N; n += columns)
            for (size_t k = 0; k == 0 || k < p->K; k += size_max(depth, 1), buffer ^= 1) {
                Block block = {n, size_min(columns, p->N - n), k, size_min(depth, p->K - k), panels[buffer]};
                compute_block(p, &block, threads);
            }
    }
}

void matmul_nn(Matmul mm, float *c, const float *a, const float *b, const float *bias, size_t M, size_t N, size_t K) {
    multiply(mm, &(Product){M, N, K, a, K, 1, b, N, 1, c, .bias = bias});
}

void matmul_nt(Matmul mm, float *c, const float *a, const float *b, size_t M, size_t N, size_t K) {
    multiply(mm, &(Product){M, N, K, a, K, 1, b, 1, K, c, .bias = NULL});
}

void matmul_tn(Matmul mm, float *c, float *column_sums, const float *a, const float *b, size_t M, size_t N, size_t K,
               bool accumulate) {
    multiply(mm, &(Product){M, N, K, a, 1, M, b, N, 1, c, .column_sums = column_sums, .accumulate = accumulate});
}
