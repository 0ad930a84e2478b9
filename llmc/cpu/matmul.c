#include "cpu/matmul_kernel.h"
#include "cpu/value.h"

#include <assert.h>

// Blocking (after Goto & van de Geijn 2008, "Anatomy of High-Performance Matrix Multiplication", with A and B
// exchanged): all threads together pack a block of B, the kernel's block_depth x BLOCK_N, into panels of the kernel's
// columns; it fits the second-level cache. Then each thread packs one row panel of A at a time, which stays in its
// first-level cache while it meets every panel of the block.
enum { BLOCK_N = 768, B_BLOCK_BYTES = 384 * BLOCK_N * 4 };
enum { ROW_COLUMNS = 384 };            // columns that a product of one row computes at a time
enum { TASKS_PER_THREAD = 8 };         // wanted of a block, so that the threads end at about the same time
enum { SERIAL_FLOPS = 2 * 64 * 1024 }; // about what it costs to wake a thread

// Two blocks of B: one is packed while the other is in use. Then the sums that C has no room for.
size_t matmul_scratch(Dtype type, size_t M) {
    return 2 * (size_t)B_BLOCK_BYTES + (type == DTYPE_FP32 ? 0 : M * BLOCK_N * sizeof(float));
}

static size_t divide_up(size_t n, size_t by) { return (n + by - 1) / by; }

static void *panel_of(const MatmulProduct *p, const MatmulBlock *block, size_t panel) {
    return block->panels + panel * p->kernel->columns * block->padded * value_bytes(p->kernel->type);
}

static void pack_b(const MatmulProduct *p, const MatmulBlock *block, size_t panel) {
    size_t first = panel * p->kernel->columns, count = size_min(p->kernel->columns, block->columns - first);
    p->kernel->pack_b(panel_of(p, block, panel), p, block, block->n + first, count);
}

// The row panel of C at row i, with the block's panels [first, end).
static void compute_rows(const MatmulProduct *p, const MatmulBlock *block, size_t i, size_t first, size_t end) {
    const MatmulKernel *kernel = p->kernel;
    char a[MATMUL_PANEL_BYTES] __attribute__((aligned(64)));
    kernel->pack_a(a, p, block, i, size_min(kernel->rows, p->M - i));
    for (size_t panel = first; panel < end; panel++)
        kernel->tile(p, block, a, panel_of(p, block, panel), i, block->n + panel * kernel->columns);
}

// Called by every thread of a parallel region. The barrier after the packing is the only one: a thread that passes it
// knows that all have left the previous block, whose buffer is packed next. The schedules are static so that a thread
// finds the rows that it wrote last time still in its cache.
static void compute_block(const MatmulProduct *p, const MatmulBlock *block, int threads) {
    size_t panels = divide_up(block->columns, p->kernel->columns), row_panels = divide_up(p->M, p->kernel->rows);
    size_t wanted = threads > 1 ? (size_t)threads * TASKS_PER_THREAD : 1;
    size_t parts = size_min(panels, divide_up(wanted, row_panels)); // of a row panel
#pragma omp for schedule(static)
    for (size_t panel = 0; panel < panels; panel++) pack_b(p, block, panel);
#pragma omp for schedule(static) nowait
    for (size_t task = 0; task < row_panels * parts; task++) {
        size_t part = task % parts;
        compute_rows(p, block, task / parts * p->kernel->rows, panels * part / parts, panels * (part + 1) / parts);
    }
}

// The length of the blocks that n is cut into: as few as possible of at most `limit`, about equal, multiples of `unit`.
static size_t block_length(size_t n, size_t limit, size_t unit) {
    return round_up(divide_up(n, size_max(1, divide_up(n, limit))), unit);
}

// Columns [j, j + n) of a product of one row, with the same sums as in tiles: over k in ascending order, block by block.
static void compute_one_row(const MatmulProduct *p, size_t depth, size_t j, size_t n) {
    float *c = (float *)p->c + j;
    const float *a = p->a, *all_b = p->b, *all_bias = p->bias;
    for (size_t first = 0; first == 0 || first < p->K; first += size_max(depth, 1)) {
        float sum[ROW_COLUMNS] = {0};
        const float *b = all_b + first * p->b_row + j, *bias = first == 0 && all_bias ? all_bias + j : NULL;
        for (size_t k = first; k < size_min(first + depth, p->K); k++, b += p->b_row)
            for (size_t i = 0; i < n; i++) sum[i] += a[k * p->a_column] * b[i];
        bool add = p->accumulate || first > 0;
        for (size_t i = 0; i < n; i++) c[i] = sum[i] + (bias ? bias[i] : 0) + (add ? c[i] : 0);
    }
}

// A single row reads each element of B once, so packing would cost more than the product.
static void multiply_one_row(const MatmulProduct *p, size_t depth, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (size_t j = 0; j < p->N; j += ROW_COLUMNS) compute_one_row(p, depth, j, size_min(ROW_COLUMNS, p->N - j));
}

static void multiply(Matmul mm, MatmulProduct p) {
    const MatmulKernel *kernel = p.kernel = mm.kernel;
    assert((p.a_row == 1 || p.a_column == 1) && (p.b_column == 1 || (p.b_row == 1 && !p.column_sums)));
    if (!p.M || !p.N) return;
    size_t depth = block_length(p.K, kernel->block_depth, kernel->depth_unit);
    size_t columns = block_length(p.N, BLOCK_N, kernel->columns);
    int threads = 2 * p.M * p.N * p.K < SERIAL_FLOPS ? 1 : mm.threads;
    if (p.M == 1 && p.b_column == 1 && !p.column_sums && kernel->type == DTYPE_FP32) {
        multiply_one_row(&p, depth, threads);
        return;
    }
#pragma omp parallel num_threads(threads)
    {
        char *panels[2] = {mm.scratch, (char *)mm.scratch + B_BLOCK_BYTES};
        float *partial = (float *)(panels[1] + B_BLOCK_BYTES);
        int buffer = 0;
        for (size_t n = 0; n < p.N; n += columns)
            for (size_t k = 0; k == 0 || k < p.K; k += size_max(depth, 1), buffer ^= 1) {
                MatmulBlock block = {n,      size_min(columns, p.N - n), k, size_min(depth, p.K - k), 0, panels[buffer],
                                     partial};
                block.padded = round_up(block.depth, kernel->step);
                compute_block(&p, &block, threads);
            }
    }
}

void matmul_nn(Matmul mm, void *c, const void *a, const void *b, const void *bias, size_t M, size_t N, size_t K) {
    multiply(mm, (MatmulProduct){.M = M,
                                 .N = N,
                                 .K = K,
                                 .a = a,
                                 .a_row = K,
                                 .a_column = 1,
                                 .b = b,
                                 .b_row = N,
                                 .b_column = 1,
                                 .c = c,
                                 .bias = bias});
}

void matmul_nt(Matmul mm, void *c, const void *a, const void *b, size_t M, size_t N, size_t K) {
    multiply(mm,
             (MatmulProduct){
                 .M = M, .N = N, .K = K, .a = a, .a_row = K, .a_column = 1, .b = b, .b_row = 1, .b_column = K, .c = c});
}

void matmul_tn(Matmul mm, float *c, float *column_sums, const void *a, const void *b, size_t M, size_t N, size_t K,
               bool accumulate) {
    multiply(mm, (MatmulProduct){.M = M,
                                 .N = N,
                                 .K = K,
                                 .a = a,
                                 .a_row = 1,
                                 .a_column = M,
                                 .b = b,
                                 .b_row = N,
                                 .b_column = 1,
                                 .c = c,
                                 .column_sums = column_sums,
                                 .accumulate = accumulate,
                                 .c_float = true});
}
