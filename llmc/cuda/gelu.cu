// gelu: see gelu.cuh.
#include "cuda/gelu.cuh"
#include "cuda/vec.cuh"

enum { FLAT_THREADS = 256 };

// Grid: a thread per pack of W.
template <int W>
__global__ void __launch_bounds__(FLAT_THREADS) gelu_kernel(real *y, GeluSlope *slope, const real *x, size_t packs) {
    const size_t i = (size_t)blockIdx.x * FLAT_THREADS + threadIdx.x;
    float f[W];
    Bundle<GeluSlope, W> slopes;
    if (i >= packs) return;
    pack_get(f, pack_load<W>(x + i * W));
    UNROLL_FOR (int j = 0; j < W; j++) {
        const Gelu g = gelu_with_slope(f[j]);
        f[j] = g.y, slopes.x[j] = g.slope;
    }
    pack_store(y + i * W, pack_of<W>(f));
    *(Bundle<GeluSlope, W> *)(slope + i * W) = slopes;
}

int gelu_forward(real *y, GeluSlope *slope, const real *x, size_t n, cudaStream_t stream, Error *e) {
    const auto kernel = n % VEC ? gelu_kernel<1> : gelu_kernel<VEC>;
    const size_t packs = n / (n % VEC ? 1 : VEC);
    return launch({blocks_of(packs, FLAT_THREADS), FLAT_THREADS, stream}, e, kernel, y, slope, x, packs);
}

// ---- Column sums: pass one of a column gradient (reduce.cuh) with one set -------------------------------------------

enum { COLUMN_THREADS_MAX = 128, COLUMN_ROWS = sizeof(real) == 2 ? 8 : 4 }; // rows in flight

// Grid: (run of rows, columns); a thread sums W columns. GELU: first multiplies dy by slope.
template <int W, bool GELU>
__global__ void __launch_bounds__(COLUMN_THREADS_MAX, 8)
    columns_kernel(float *partials, real *dy, const GeluSlope *slope, ColumnSplit split, int C) {
    constexpr int ROWS = GELU ? COLUMN_ROWS / 2 : COLUMN_ROWS; // slopes need registers, too
    const int c = (blockIdx.y * blockDim.x + threadIdx.x) * W;
    after_wait();
    after_allow();
    if (c >= C) return;
    int row = blockIdx.x * split.rows_per_block;
    const int end = min(row + split.rows_per_block, split.rows);
    while (row < end) {
        const int b = row / split.T, stop = min(end, (b + 1) * split.T);
        float sums[W] = {};
        for (; row < stop; row += ROWS) {
            Pack<W> d[ROWS];
            Bundle<GeluSlope, W> slopes[ROWS];
            UNROLL_FOR (int r = 0; r < ROWS; r++) {
                const size_t i = (size_t)(row + r) * C + c;
                d[r] = row + r < stop ? pack_load<W>(dy + i) : Pack<W>{};
                if (GELU)
                    slopes[r] = row + r < stop ? *(const Bundle<GeluSlope, W> *)(slope + i) : Bundle<GeluSlope, W>{};
            }
            UNROLL_FOR (int r = 0; r < ROWS; r++) {
                float f[W];
                pack_get(f, d[r]);
                if constexpr (GELU) {
                    UNROLL_FOR (int j = 0; j < W; j++) f[j] *= slope_value(slopes[r].x[j]);
                    const Pack<W> written = pack_of<W>(f);
                    if (row + r < stop) pack_store(dy + (size_t)(row + r) * C + c, written);
                    pack_get(f, written);
                }
                floats_add(sums, f);
            }
        }
        row = stop; // the loop may end beyond stop
        floats_store(partials + (size_t)(blockIdx.x + b) * C + c, sums);
    }
}

typedef struct {
    int threads, columns; // threads per block; blocks per row
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

int bias_backward(ColumnGradient dbias, real *dy, const GeluSlope *slope, int B, int T, int C, ColumnJobs *jobs,
                  cudaStream_t stream, Error *e) {
    const ColumnLaunch l = column_launch(B, T, C);
    float *partials = column_begin(jobs, &dbias, 1, l.split, C);
    const auto kernel = C % VEC ? (slope ? columns_kernel<1, true> : columns_kernel<1, false>)
                                : (slope ? columns_kernel<VEC, true> : columns_kernel<VEC, false>);
    return launch({dim3(l.split.blocks, l.columns), l.threads, stream}, e, kernel, partials, dy, slope, l.split, C);
}
