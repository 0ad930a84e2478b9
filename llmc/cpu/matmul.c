#include "cpu/matmul_kernel.h"
#include "cpu/value.h"

#include <assert.h>
#include <omp.h>
#include <unistd.h>

// Blocking (after Goto & van de Geijn 2008, "Anatomy of High-Performance Matrix Multiplication"): all threads together
// pack a block of A, at most block_depth deep, into panels of kernel->rows rows. A block fills half the second-level
// cache, at most 1 MiB. Then each thread packs one panel of B at a time, and multiplies the block's panels, or some of
// them, by that panel. Meanwhile it prefetches its next panel of B: the hardware does not prefetch such distant rows.
enum { A_BLOCK_MAX = 1 << 20 };        // bytes
enum { PARTIAL_COLUMNS = 768 };        // columns at a time if C is bf16, which cannot hold partial sums
enum { ROW_COLUMNS = 384 };            // columns at a time in a product of one row
enum { TASKS_PER_THREAD = 8 };         // fewest tasks per block and thread; more tasks balance the load
enum { STREAM_FLOATS = 1 << 18 };      // smallest C that is written past the caches
enum { SERIAL_FLOPS = 2 * 64 * 1024 }; // smaller products run on one thread

// Scratch holds two blocks of A (one is packed while the other is in use), then the partial sums of a bf16 C.
size_t matmul_scratch(Dtype type, size_t M) {
    return 2 * (size_t)A_BLOCK_MAX + (type == DTYPE_FP32 ? 0 : M * PARTIAL_COLUMNS * sizeof(float));
}

size_t matmul_a_block(void) {
    long second_level = sysconf(_SC_LEVEL2_CACHE_SIZE); // bytes; 0 or -1: unknown
    return second_level > 0 ? size_min((size_t)second_level / 2, A_BLOCK_MAX) : A_BLOCK_MAX / 2;
}

static size_t divide_up(size_t n, size_t by) { return (n + by - 1) / by; }

// The panel of B in `block` that begins at column j.
typedef struct {
    const MatmulBlock *block; // NULL: no panel
    size_t j;
} BPanel;

static size_t panel_columns(const MatmulProduct *p, BPanel panel) {
    return size_min(p->kernel->columns, panel.block->n + panel.block->columns - panel.j);
}

// Returns the memory to prefetch for a panel of B; empty without a block.
static Ahead ahead_of(const MatmulProduct *p, BPanel panel) {
    const MatmulBlock *block = panel.block;
    if (!block) return (Ahead){0};
    size_t count = panel_columns(p, panel), size = value_bytes(p->kernel->type), runs = block->depth;
    Ahead ahead = {.length = count * size, .stride = p->b_row * size};
    if (p->b_column != 1) runs = count, ahead.length = block->depth * size, ahead.stride = p->b_column * size;
    ahead.run = (const char *)p->b + (block->k * p->b_row + panel.j * p->b_column) * size;
    ahead.lines = runs * divide_up(ahead.length, CACHE_LINE);
    return ahead;
}

// Multiplies panels [first, end) of the block's rows by panel `now` of B. next: this thread's next panel, to prefetch.
static void compute_columns(const MatmulProduct *p, BPanel now, size_t first, size_t end, BPanel next) {
    const MatmulKernel *kernel = p->kernel;
    const MatmulBlock *block = now.block;
    char b[MATMUL_PANEL_BYTES] __attribute__((aligned(CACHE_LINE)));
    MatmulTiles tiles;
    tiles.product = p, tiles.block = block, tiles.j = now.j, tiles.ahead = ahead_of(p, next), tiles.last_rows = 0;
    size_t lines = tiles.ahead.lines, all = end - first;
    size_t c_size = p->c_float ? sizeof(float) : value_bytes(kernel->type);
    kernel->pack_b(b, p, block, now.j, panel_columns(p, now));
    for (size_t panel = first; panel < end; panel++) {
        size_t i = block->i + panel * kernel->rows;
        tiles.ahead.lines = lines * (panel + 1 - first) / all - lines * (panel - first) / all;
        for (size_t row = i + kernel->rows; row < size_min(i + 2 * kernel->rows, p->M) && !p->stream; row++) {
            const char *c = (const char *)p->c + (row * p->N + now.j) * c_size; // the next tile's rows of C
            __builtin_prefetch(c, 1);
            __builtin_prefetch(c + (kernel->columns - 1) * c_size, 1);
        }
        kernel->tile(&tiles, block->panels + panel * block->panel_bytes, b, i);
    }
    if (kernel->finish) kernel->finish(&tiles);
}

// Every thread of a parallel region calls this. after: the next block, or NULL. One barrier, at the end of packing, is
// enough: past it no thread reads the previous block's buffer, into which the next call packs. A thread computes the
// same columns of C in every block, since they may still be in its cache.
static void compute_block(const MatmulProduct *p, const MatmulBlock *block, const MatmulBlock *after, int threads) {
    const MatmulKernel *kernel = p->kernel;
    size_t columns = divide_up(block->columns, kernel->columns), panels = divide_up(block->rows, kernel->rows);
    size_t wanted = threads > 1 ? (size_t)threads * TASKS_PER_THREAD : 1;
    size_t parts = size_min(panels, divide_up(wanted, columns)); // the block's rows are cut into `parts`
    size_t me = (size_t)omp_get_thread_num(), all = (size_t)omp_get_num_threads();
    size_t first = columns * parts * me / all, end = columns * parts * (me + 1) / all;
#pragma omp for schedule(static)
    for (size_t panel = 0; panel < panels; panel++)
        kernel->pack_a(block->panels + panel * block->panel_bytes, p, block, block->i + panel * kernel->rows,
                       size_min(kernel->rows, block->rows - panel * kernel->rows));
    for (size_t task = first; task < end; task++) {
        size_t part = task / columns, next = task + 1 < end ? task + 1 : first;
        BPanel now = {block, block->n + task % columns * kernel->columns};
        BPanel then = {task + 1 < end ? block : after, block->n + next % columns * kernel->columns};
        MatmulProduct product = *p;
        if (part || block->i) product.column_sums = NULL; // sum each column once
        compute_columns(&product, now, panels * part / parts, panels * (part + 1) / parts, then);
    }
    if (p->stream) vec_stream_end();
}

// Computes columns [j, j + n) of a product of one row. Sums as tiles do: over k in ascending order, block by block.
static void compute_one_row(const MatmulProduct *p, size_t depth, size_t j, size_t n) {
    float *c = (float *)p->c + j;
    const float *a = p->a, *all_b = p->b, *all_bias = p->bias;
    for (size_t first = 0; first < p->K; first += depth) {
        float sum[ROW_COLUMNS] = {0};
        const float *b = all_b + first * p->b_row + j, *bias = first == 0 && all_bias ? all_bias + j : NULL;
        for (size_t k = first; k < size_min(first + depth, p->K); k++, b += p->b_row)
            for (size_t i = 0; i < n; i++) sum[i] += a[k * p->a_column] * b[i];
        bool add = p->accumulate || first > 0;
        for (size_t i = 0; i < n; i++) c[i] = sum[i] + (bias ? bias[i] : 0) + (add ? c[i] : 0);
    }
}

// Every thread calls this. block: the caller has set only `columns` and `partial`.
static void multiply_blocks(const MatmulProduct *p, MatmulBlock block, size_t depth, Matmul mm, int threads) {
    const size_t columns = block.columns;
    int buffer = 0;
    for (block.n = 0; block.n < p->N; block.n += columns) {
        block.columns = size_min(columns, p->N - block.n);
        for (block.k = 0; block.k < p->K; block.k += depth) {
            block.depth = size_min(depth, p->K - block.k);
            block.padded = round_up(block.depth, p->kernel->depth_unit);
            block.panel_bytes = round_up(p->kernel->rows * block.padded * value_bytes(p->kernel->type), CACHE_LINE);
            size_t rows = size_max(mm.a_block / block.panel_bytes, 1) * p->kernel->rows;
            for (block.i = 0; block.i < p->M; block.i += rows, buffer ^= 1) {
                block.rows = size_min(rows, p->M - block.i);
                block.panels = (char *)mm.scratch + (size_t)buffer * A_BLOCK_MAX;
                MatmulBlock after = block; // the next block; only n, columns, k and depth are valid
                bool same_k = block.i + rows < p->M, last = !same_k && block.k + depth >= p->K;
                if (!same_k) after.k += depth, after.depth = size_min(depth, p->K - size_min(p->K, after.k));
                compute_block(p, &block, last ? NULL : &after, threads);
            }
        }
    }
}

static void matmul(Matmul mm, MatmulProduct p) {
    const MatmulKernel *kernel = p.kernel = mm.kernel;
    assert(p.M > 0 && p.N > 0 && p.K > 0);
    assert((p.a_row == 1 || p.a_column == 1) && (p.b_column == 1 || (p.b_row == 1 && !p.column_sums)));
    // Cut k into as few blocks as possible, of about equal depth.
    size_t depth = round_up(divide_up(p.K, divide_up(p.K, kernel->block_depth)), kernel->depth_unit);
    int threads = 2 * p.M * p.N * p.K < SERIAL_FLOPS ? 1 : mm.threads;
    if (p.M == 1 && p.b_column == 1 && !p.column_sums && kernel->type == DTYPE_FP32) {
        // A single row reads each element of B once, so packing would cost more than the product.
#pragma omp parallel for schedule(static) num_threads(threads)
        for (size_t j = 0; j < p.N; j += ROW_COLUMNS) compute_one_row(&p, depth, j, size_min(ROW_COLUMNS, p.N - j));
        return;
    }
    // Write past the caches, since a large gradient would leave them before it is read again. The product must write
    // each element once, in whole cache lines.
    bool aligned = (uintptr_t)p.c % CACHE_LINE == 0 && p.N % (CACHE_LINE / sizeof(float)) == 0;
    p.stream = VEC_STREAMS && p.c_float && !p.accumulate && p.K <= depth && p.M * p.N >= STREAM_FLOATS && aligned;
    MatmulBlock block = {.columns = p.N, .partial = (float *)((char *)mm.scratch + 2 * (size_t)A_BLOCK_MAX)};
    if (kernel->type != DTYPE_FP32 && !p.c_float && p.K > depth) block.columns = PARTIAL_COLUMNS;
#pragma omp parallel num_threads(threads) firstprivate(block)
    multiply_blocks(&p, block, depth, mm, threads);
}

void matmul_nn(Matmul mm, void *c, const void *a, const void *b, const void *bias, size_t M, size_t N, size_t K) {
    MatmulProduct p = {.M = M, .N = N, .K = K, .a = a, .b = b, .c = c, .bias = bias};
    p.a_row = K, p.a_column = 1, p.b_row = N, p.b_column = 1;
    matmul(mm, p);
}

void matmul_nt(Matmul mm, void *c, const void *a, const void *b, size_t M, size_t N, size_t K) {
    MatmulProduct p = {.M = M, .N = N, .K = K, .a = a, .b = b, .c = c};
    p.a_row = K, p.a_column = 1, p.b_row = 1, p.b_column = K;
    matmul(mm, p);
}

void matmul_tn(Matmul mm, float *c, float *column_sums, const void *a, const void *b, size_t M, size_t N, size_t K,
               bool accumulate) {
    MatmulProduct p = {.M = M, .N = N, .K = K, .a = a, .b = b, .c = c, .column_sums = column_sums};
    p.a_row = 1, p.a_column = M, p.b_row = N, p.b_column = 1;
    p.accumulate = accumulate, p.c_float = true;
    matmul(mm, p);
}
