// gelu: see gelu.cuh.
#include "cuda/gelu.cuh"
#include "cuda/vec.cuh"

enum { FLAT_THREADS = 256, FLAT_PACKS = 4 }; // packs in flight per thread

// y = gelu(x), `packs` packs of W. Grid: a thread per FLAT_PACKS packs.
template <int W> __global__ void __launch_bounds__(FLAT_THREADS) gelu_kernel(real *y, const real *x, size_t packs) {
    const size_t first = (size_t)blockIdx.x * FLAT_THREADS * FLAT_PACKS + threadIdx.x;
    Pack<W> v[FLAT_PACKS];
    UNROLL_FOR (int p = 0; p < FLAT_PACKS; p++) {
        const size_t i = first + p * FLAT_THREADS;
        if (i < packs) v[p] = pack_load<W>(x + i * W);
    }
    UNROLL_FOR (int p = 0; p < FLAT_PACKS; p++) {
        const size_t i = first + p * FLAT_THREADS;
        if (i >= packs) continue;
        float f[W];
        pack_get(f, v[p]);
        UNROLL_FOR (int j = 0; j < W; j++) f[j] = gelu(f[j]);
        pack_store(y + i * W, pack_of<W>(f));
    }
}

int gelu_forward(real *y, const real *x, size_t n, cudaStream_t stream, Error *e) {
    const auto kernel = n % VEC ? gelu_kernel<1> : gelu_kernel<VEC>;
    const size_t packs = n / (n % VEC ? 1 : VEC);
    return launch({blocks_of(packs, FLAT_THREADS * FLAT_PACKS), FLAT_THREADS, stream}, e, kernel, y, x, packs);
}

__global__ static void gelu_backward_kernel(real *dx, const real *x, size_t n) {
    const size_t i = blockIdx.x * (size_t)FLAT_THREADS + threadIdx.x;
    if (i < n) dx[i] = (real)(real_to_float(dx[i]) * gelu_derivative(real_to_float(x[i])));
}

int gelu_backward(real *dx, const real *x, size_t n, cudaStream_t stream, Error *e) {
    return launch({blocks_of(n, FLAT_THREADS), FLAT_THREADS, stream}, e, gelu_backward_kernel, dx, x, n);
}

// ---- Column sums: pass one of a column gradient (reduce.cuh) with one set -------------------------------------------

enum { COLUMN_THREADS_MAX = 128, COLUMN_ROWS = sizeof(real) == 2 ? 8 : 4 }; // rows in flight

// Grid: (run of rows, columns); a thread sums W columns.
template <int W>
__global__ void __launch_bounds__(COLUMN_THREADS_MAX, 8)
    columns_kernel(float *partials, const real *dy, ColumnSplit split, int C) {
    const int c = (blockIdx.y * blockDim.x + threadIdx.x) * W;
    after_wait();
    after_allow();
    if (c >= C) return;
    int row = blockIdx.x * split.rows_per_block;
    const int end = min(row + split.rows_per_block, split.rows);
    while (row < end) {
        const int b = row / split.T, stop = min(end, (b + 1) * split.T);
        float sums[W] = {};
        for (; row < stop; row += COLUMN_ROWS) {
            Pack<W> d[COLUMN_ROWS];
            UNROLL_FOR (int r = 0; r < COLUMN_ROWS; r++)
                d[r] = row + r < stop ? pack_load<W>(dy + (size_t)(row + r) * C + c) : Pack<W>{};
            UNROLL_FOR (int r = 0; r < COLUMN_ROWS; r++) {
                float f[W];
                pack_get(f, d[r]);
                floats_add(sums, f);
            }
        }
        row = stop; // the loop may have passed it
        floats_store(partials + (size_t)(blockIdx.x + b) * C + c, sums);
    }
}

typedef struct {
    int threads, columns; // threads per block; blocks side by side
    ColumnSplit split;
} ColumnLaunch;

static ColumnLaunch column_launch(int B, int T, int C) {
    const int packs = ceil_div(C, C % VEC ? 1 : VEC);
    const int columns = ceil_div(packs, COLUMN_THREADS_MAX);
    const int threads = (int)round_up((size_t)ceil_div(packs, columns), WARP);
    const int places = 132 * (1024 / threads) / columns; // 64 registers per thread, 132 multiprocessors
    return {threads, columns, column_split(B, T, places > 132 ? places : 132)};
}

size_t bias_backward_bytes(int B, int T, int C) { return column_bytes(column_launch(B, T, C).split, 1, C); }

int bias_backward(ColumnGradient dbias, const real *dy, int B, int T, int C, ColumnJobs *jobs, cudaStream_t stream,
                  Error *e) {
    const ColumnLaunch l = column_launch(B, T, C);
    float *partials = column_begin(jobs, &dbias, 1, l.split, C);
    const auto kernel = C % VEC ? columns_kernel<1> : columns_kernel<VEC>;
    return launch({dim3(l.split.blocks, l.columns), l.threads, stream}, e, kernel, partials, dy, l.split, C);
}
