#define _POSIX_C_SOURCE 200809L
#include "cpu/matmul.h"
#include "cpu/tile.h"
#include <assert.h>

// Blocking (after Goto & van de Geijn 2008, "Anatomy of High-Performance Matrix Multiplication", with A and B in each
// other's place): all threads together pack a block of B, BLOCK_K x BLOCK_N, into panels of TILE_COLUMNS columns, small
// enough for the second-level cache. Then each thread packs a row panel of A at a time, TILE_ROWS x BLOCK_K, which
// stays in its first-level cache while all panels of the block go by.
enum { BLOCK_K = 384, BLOCK_N = 768 };
enum { ROW_COLUMNS = 384 };            // of a product of one row, at a time
enum { TASKS_PER_THREAD = 8 };         // wanted of a block, so that the threads end at about the same time
enum { SERIAL_FLOPS = 2 * 64 * 1024 }; // about what it costs to wake a thread

struct Matmul {
    int threads;
    float *b_blocks[2]; // (BLOCK_N / TILE_COLUMNS, BLOCK_K, TILE_COLUMNS) each: one is packed while the other is in use
};

typedef struct {
    MatmulResult c;
    MatmulOperand a, b;
    size_t M, N, K;
} Product;

typedef struct {
    size_t n, columns; // of B and C: [n, n + columns)
    size_t k, depth;   // of A and B: [k, k + depth)
    float *panels;     // B packed
} Block;

static const size_t B_BLOCK_FLOATS = (size_t)BLOCK_K * BLOCK_N;

size_t matmul_bytes(int threads) {
    (void)threads; // the panels of A are on the threads' stacks
    return sizeof(Matmul) + 2 * B_BLOCK_FLOATS * sizeof(float);
}

int matmul_create(Matmul **out, int threads, Error *e) {
    TRY(memory_alloc_zero((void **)out, sizeof(Matmul), "matmul workspace", e));
    Matmul *mm = *out;
    mm->threads = threads;
    int code = 0;
    for (int i = 0; i < 2 && !code; i++)
        code = memory_alloc((void **)&mm->b_blocks[i], B_BLOCK_FLOATS * sizeof(float), "matmul packing buffer", e);
    if (code) {
        matmul_free(mm);
        *out = NULL;
    }
    return code;
}

void matmul_free(Matmul *mm) {
    if (!mm) return;
    memory_free(mm->b_blocks[1]);
    memory_free(mm->b_blocks[0]);
    memory_free(mm);
}

// Rows [i, i + count) of A, the block's k.
static void pack_a(float *panel, const Product *p, const Block *block, size_t i, size_t count) {
    const float *src = p->a.data + i * p->a.row + block->k * p->a.column;
    if (p->a.column == 1) pack_transposed(panel, TILE_ROWS, src, p->a.row, count, block->depth);
    else pack_straight(panel, TILE_ROWS, src, p->a.column, count, block->depth);
}

// Column sums of a packed panel of B, on their way past.
static void sum_columns(const Product *p, const Block *block, const float *panel, size_t j, size_t count) {
    Vec sum[TILE_VECS] = {{0}};
    for (size_t k = 0; k < block->depth; k++)
        for (int v = 0; v < TILE_VECS; v++) sum[v] += vec_load(panel + k * TILE_COLUMNS + v * VEC);
    bool add = p->c.accumulate || block->k > 0;
    for (size_t i = 0; i < count; i++)
        p->c.column_sums[j + i] = sum[i / VEC][i % VEC] + (add ? p->c.column_sums[j + i] : 0);
}

static void pack_b(const Product *p, const Block *block, size_t panel_index) {
    size_t j = block->n + panel_index * TILE_COLUMNS;
    size_t count = size_min(TILE_COLUMNS, block->n + block->columns - j);
    float *panel = block->panels + panel_index * TILE_COLUMNS * block->depth;
    const float *src = p->b.data + block->k * p->b.row + j * p->b.column;
    if (p->b.column == 1) pack_straight(panel, TILE_COLUMNS, src, p->b.row, count, block->depth);
    else pack_transposed(panel, TILE_COLUMNS, src, p->b.column, count, block->depth);
    if (p->c.column_sums) sum_columns(p, block, panel, j, count);
}

// c = t + bias, or c += t + bias; bias may be NULL
VECTOR_INLINE void finish_tile(const int rows, float *c, size_t c_row, const Tile *t, const float *bias, bool add) {
    Vec bias0 = bias ? vec_load(bias) : (Vec){0}, bias1 = bias ? vec_load(bias + VEC) : (Vec){0};
#pragma GCC unroll 12
    for (int i = 0; i < rows; i++, c += c_row) {
        Vec c0 = t->v[i][0] + bias0, c1 = t->v[i][1] + bias1;
        if (add) c0 += vec_load(c), c1 += vec_load(c + VEC);
        vec_store(c, c0);
        vec_store(c + VEC, c1);
    }
}

static void copy_rows(float *to, size_t to_row, const float *from, size_t from_row, size_t rows, size_t columns) {
    for (size_t i = 0; i < rows; i++) memcpy(to + i * to_row, from + i * from_row, columns * sizeof *to);
}

// The tile of C at (i, j) from a packed panel of A and one of B. At the edges of C it is worked on beside it.
static void compute_tile(const Product *p, const Block *block, const float *a, const float *b, size_t i, size_t j) {
    size_t rows = size_min(TILE_ROWS, p->M - i), columns = size_min(TILE_COLUMNS, block->n + block->columns - j);
    bool add = p->c.accumulate || block->k > 0, edge = rows % TILE_ROW_STEP || columns < TILE_COLUMNS;
    const float *bias = p->c.bias && block->k == 0 ? p->c.bias + j : NULL;
    float *c = p->c.data + i * p->c.row + j, edge_tile[TILE_ROWS * TILE_COLUMNS], edge_bias[TILE_COLUMNS];
    size_t c_row = p->c.row;
    if (edge) {
        if (add) copy_rows(edge_tile, TILE_COLUMNS, c, c_row, rows, columns);
        if (bias) bias = memcpy(edge_bias, bias, columns * sizeof *bias);
        c = edge_tile, c_row = TILE_COLUMNS;
    }
    TILE_DISPATCH(rows, {
        Tile t = tile_product(ROWS, block->depth, a, 1, TILE_ROWS, b, TILE_COLUMNS);
        finish_tile(ROWS, c, c_row, &t, bias, add);
    });
    if (edge) copy_rows(p->c.data + i * p->c.row + j, p->c.row, edge_tile, TILE_COLUMNS, rows, columns);
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

// Called by every thread of a parallel region. The barrier behind the packing is the only one: a thread that passes it
// knows that all have left the block before, whose buffer is the next to be packed. The schedules are static so that a
// thread finds the rows that it wrote last time still in its cache.
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

// The length of the blocks that n is cut into: the fewest of at most `limit`, about equal, multiples of `unit`.
static size_t block_length(size_t n, size_t limit, size_t unit) {
    return round_up(divide_up(n, size_max(1, divide_up(n, limit))), unit);
}

// Columns [j, j + n) of a product of one row. The sums are those of tiles: over k in ascending order, block by block.
static void compute_one_row(const Product *p, size_t depth, size_t j, size_t n) {
    float *c = p->c.data + j;
    for (size_t first = 0; first == 0 || first < p->K; first += size_max(depth, 1)) {
        float sum[ROW_COLUMNS] = {0};
        const float *b = p->b.data + first * p->b.row + j, *bias = first == 0 && p->c.bias ? p->c.bias + j : NULL;
        for (size_t k = first; k < size_min(first + depth, p->K); k++, b += p->b.row)
            for (size_t i = 0; i < n; i++) sum[i] += p->a.data[k * p->a.column] * b[i];
        bool add = p->c.accumulate || first > 0;
        for (size_t i = 0; i < n; i++) c[i] = sum[i] + (bias ? bias[i] : 0) + (add ? c[i] : 0);
    }
}

// A single row reads each element of B once, so packing would cost more than the product.
static void multiply_one_row(const Product *p, size_t depth, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (size_t j = 0; j < p->N; j += ROW_COLUMNS) compute_one_row(p, depth, j, size_min(ROW_COLUMNS, p->N - j));
}

void matmul_general(Matmul *mm, MatmulResult c, MatmulOperand a, MatmulOperand b, size_t M, size_t N, size_t K) {
    assert(a.row == 1 || a.column == 1);
    assert(b.column == 1 || (b.row == 1 && !c.column_sums));
    if (!M || !N) return;
    const Product p = {c, a, b, M, N, K};
    size_t depth = block_length(K, BLOCK_K, 4), columns = block_length(N, BLOCK_N, TILE_COLUMNS);
    int threads = 2 * M * N * K < SERIAL_FLOPS ? 1 : mm->threads;
    if (M == 1 && b.column == 1 && !c.column_sums) {
        multiply_one_row(&p, depth, threads);
        return;
    }
#pragma omp parallel num_threads(threads)
    {
        int buffer = 0;
        for (size_t n = 0; n < N; n += columns)
            for (size_t k = 0; k == 0 || k < K; k += size_max(depth, 1), buffer ^= 1) {
                Block block = {n, size_min(columns, N - n), k, size_min(depth, K - k), mm->b_blocks[buffer]};
                compute_block(&p, &block, threads);
            }
    }
}

void matmul_forward(Matmul *mm, float *y, const float *x, const float *w, const float *bias, size_t M, size_t K,
                    size_t N) {
    MatmulOperand a = {x, K, 1}, b = {w, N, 1}; // x (M,K), w (K,N)
    matmul_general(mm, (MatmulResult){.data = y, .row = N, .bias = bias}, a, b, M, N, K);
}

void matmul_dinput(Matmul *mm, float *dx, const float *dy, const float *w, size_t M, size_t K, size_t N,
                   bool accumulate) {
    MatmulOperand a = {dy, N, 1}, b = {w, 1, N}; // dy (M,N), w^T (N,K)
    matmul_general(mm, (MatmulResult){.data = dx, .row = K, .accumulate = accumulate}, a, b, M, K, N);
}

void matmul_dweight(Matmul *mm, float *dw, float *dbias, const float *x, const float *dy, size_t M, size_t K, size_t N,
                    bool accumulate) {
    MatmulOperand a = {x, 1, K}, b = {dy, N, 1}; // x^T (K,M), dy (M,N)
    MatmulResult c = {.data = dw, .row = N, .accumulate = accumulate, .column_sums = dbias};
    matmul_general(mm, c, a, b, K, N, M);
}

void matmul_head_forward(Matmul *mm, float *logits, const float *x, const float *wte, size_t M, size_t C, size_t V) {
    MatmulOperand a = {x, C, 1}, b = {wte, 1, C}; // x (M,C), wte^T (C,V)
    matmul_general(mm, (MatmulResult){.data = logits, .row = V}, a, b, M, V, C);
}

void matmul_head_dinput(Matmul *mm, float *dx, const float *dlogits, const float *wte, size_t M, size_t C, size_t V,
                        bool accumulate) {
    MatmulOperand a = {dlogits, V, 1}, b = {wte, C, 1}; // dlogits (M,V), wte (V,C)
    matmul_general(mm, (MatmulResult){.data = dx, .row = C, .accumulate = accumulate}, a, b, M, C, V);
}

void matmul_head_dweight(Matmul *mm, float *dwte, const float *dlogits, const float *x, size_t M, size_t C, size_t V,
                         bool accumulate) {
    MatmulOperand a = {dlogits, 1, V}, b = {x, C, 1}; // dlogits^T (V,M), x (M,C)
    matmul_general(mm, (MatmulResult){.data = dwte, .row = C, .accumulate = accumulate}, a, b, V, C, M);
}

void matmul_reference(MatmulResult c, MatmulOperand a, MatmulOperand b, size_t M, size_t N, size_t K) {
    for (size_t i = 0; i < M; i++)
        for (size_t j = 0; j < N; j++) {
            double sum = (c.bias ? c.bias[j] : 0) + (c.accumulate ? c.data[i * c.row + j] : 0);
            for (size_t k = 0; k < K; k++)
                sum += (double)a.data[i * a.row + k * a.column] * b.data[k * b.row + j * b.column];
            c.data[i * c.row + j] = (float)sum;
        }
    for (size_t j = 0; j < N && c.column_sums; j++) {
        double sum = c.accumulate ? c.column_sums[j] : 0;
        for (size_t k = 0; k < K; k++) sum += b.data[k * b.row + j * b.column];
        c.column_sums[j] = (float)sum;
    }
}
