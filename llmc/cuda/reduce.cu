// reduce: see reduce.cuh.
#include "cuda/reduce.cuh"
#include "cuda/vec.cuh"
#include "base/hash.h"
#include "math/accumulate.h"
#include <assert.h>

enum { SUM_THREADS = 1024, SUM_WARPS = SUM_THREADS / WARP };

// *to += sum of partials (B, G); rows (B) += sums over G, unless rows is NULL. One block calls.
__device__ static void example_partials_sum(double *to, double *rows, const double *partials, int B, int G) {
    __shared__ double shared[SUM_WARPS];
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const double before = threadIdx.x == 0 && to ? *to : 0.0;
    double total = 0.0;
    for (int b = warp; b < B; b += SUM_WARPS) {
        double example = 0.0;
#pragma unroll 8
        for (int g = lane; g < G; g += WARP) example += partials[(size_t)b * G + g];
        example = warp_sum(example);
        if (lane == 0) total += example;
        if (lane == 0 && rows) rows[b] += example;
    }
    total = block_sum(total, shared);
    if (threadIdx.x == 0 && to) *to = before + total;
}

// Grid: a block per set.
__global__ void __launch_bounds__(SUM_THREADS)
    example_partials_kernel(const __grid_constant__ ExampleSums sums, const double *partials, int B, int G) {
    double *rows = sums.rows ? sums.rows + blockIdx.x * B : NULL;
    example_partials_sum(sums.of[blockIdx.x], rows, partials + (size_t)blockIdx.x * B * G, B, G);
}

int reduce_example_partials(ExampleSums sums, const double *partials, int sets, int B, int G, cudaStream_t stream,
                            Error *e) {
    return launch({sets, SUM_THREADS, stream}, e, example_partials_kernel, sums, partials, B, G);
}

// ---- Column gradients -----------------------------------------------------------------------------------------------

ColumnSplit column_split(int B, int T, int target_blocks) {
    const int row_tile = 4; // most kernels process 1, 2 or 4 rows at a time
    const int rows_per_block = (int)round_up((size_t)ceil_div(B * T, target_blocks), row_tile);
    const int blocks = ceil_div(B * T, rows_per_block);
    return {B * T, T, rows_per_block, blocks, blocks + B};
}

// Pass two, in two kernels.
// 1. Block (x, set, z) of a job owns 32 W columns of a batch of examples, with equally many warps per example. The
//    block adds up each example's slots. It writes the batch's sum, and each example's square over these columns.
// 2. Block (0, set) of a job adds up the squares. Block (1 + x, set) adds up SUM_THREADS columns of the batches' sums.
enum { FINISH_WARPS = 16, SLOTS_PER_WARP = 8, SLOTS_IN_FLIGHT = 4 };

// Pass two of one job.
typedef struct {
    ColumnJob job;
    int B;
    int column_groups;     // groups of 32 W columns: blocks along x
    int warps_per_example; // a power of two
    int batch, batches;    // examples per block; blocks along z
    float *batch_sums;     // (batches, sets, C)
    double *squares;       // (sets, B, column_groups)
} ColumnFinish;

struct ColumnFinishes {
    ColumnFinish of[COLUMN_JOBS_MAX];
};

// Lays out a job's memory, *bytes in all: partial sums (slots, sets, C), sums of batches, squares. lane_columns: W of
// kernel 1. W = 1 needs most memory.
static ColumnFinish finish_of(const ColumnJob &job, size_t *bytes, int lane_columns = 1) {
    const ColumnSplit split = job.split;
    const int B = split.rows / split.T, groups = ceil_div(job.C, WARP * lane_columns);
    const int slots_per_example = split.blocks / B + 2; // upper bound
    int warps = 1;
    while (warps < FINISH_WARPS && warps * SLOTS_PER_WARP < slots_per_example) warps *= 2;
    const int batch = FINISH_WARPS / warps, batches = ceil_div(B, batch);
    const size_t batch_sums_at = round_up((size_t)split.slots * job.sets * job.C * sizeof(float), 16);
    const size_t squares_at = batch_sums_at + round_up((size_t)batches * job.sets * job.C * sizeof(float), 16);
    *bytes = round_up(squares_at + (size_t)job.sets * B * groups * sizeof(double), 16);
    char *memory = (char *)job.partials;
    ColumnFinish f = {};
    f.job = job, f.B = B, f.column_groups = groups;
    f.warps_per_example = warps, f.batch = batch, f.batches = batches;
    f.batch_sums = (float *)(memory + batch_sums_at), f.squares = (double *)(memory + squares_at);
    return f;
}

size_t column_bytes(ColumnSplit split, int sets, int C) {
    size_t bytes;
    finish_of({{}, split, sets, C, NULL}, &bytes);
    return bytes;
}

float *column_begin(ColumnJobs *jobs, const ColumnGradient *gradients, int sets, ColumnSplit split, int C) {
    assert(jobs->count < COLUMN_JOBS_MAX);
    ColumnJob job = {{}, split, sets, C, (float *)((char *)jobs->memory + jobs->used)};
    for (int s = 0; s < sets; s++) job.of[s] = gradients[s];
    jobs->job[jobs->count++] = job;
    jobs->used += column_bytes(split, sets, C);
    return job.partials;
}

// Return the number of a job's blocks: example_blocks in kernel 1, total_blocks in kernel 2.
static __host__ __device__ int example_blocks(const ColumnFinish &f) {
    return f.column_groups * f.job.sets * f.batches;
}
static __host__ __device__ int total_blocks(const ColumnFinish &f) {
    return (1 + (f.job.C + SUM_THREADS - 1) / SUM_THREADS) * f.job.sets;
}

// W: columns per lane.
template <int W>
__global__ void __launch_bounds__(FINISH_WARPS *WARP)
    column_examples_kernel(const __grid_constant__ ColumnFinishes all) {
    __shared__ alignas(16) float parts[FINISH_WARPS][WARP * W], examples[FINISH_WARPS][WARP * W];
    int job = 0, block = blockIdx.x;
    for (; block >= example_blocks(all.of[job]); job++) block -= example_blocks(all.of[job]);
    const ColumnFinish &f = all.of[job];
    const int C = f.job.C, T = f.job.split.T, rows_per_block = f.job.split.rows_per_block, sets = f.job.sets;
    const int x = block % f.column_groups, set = block / f.column_groups % sets, z = block / f.column_groups / sets;
    const int lane = threadIdx.x, warp = threadIdx.y, c = (x * WARP + lane) * W;
    const int b0 = z * f.batch, b = b0 + warp / f.warps_per_example;
    const int first = b * T / rows_per_block, last = ((b + 1) * T - 1) / rows_per_block;
    const ColumnGradient &to = f.job.of[set];
    after_allow();
    after_wait();
    float part[W] = {}, g[W] = {};
    if (b < f.B && c < C)
        for (int k0 = first + warp % f.warps_per_example; k0 <= last; k0 += f.warps_per_example * SLOTS_IN_FLIGHT) {
            float v[SLOTS_IN_FLIGHT][W] = {};
            UNROLL_FOR (int i = 0; i < SLOTS_IN_FLIGHT; i++) {
                const int k = k0 + i * f.warps_per_example;
                if (k <= last) floats_load(v[i], f.job.partials + ((size_t)(k + b) * sets + set) * C + c);
            }
            UNROLL_FOR (int i = 0; i < SLOTS_IN_FLIGHT; i++) floats_add(part, v[i]);
        }
    floats_store(parts[warp] + lane * W, part);
    __syncthreads();
    if (warp < f.batch) {
        for (int w = 0; w < f.warps_per_example; w++) {
            floats_load(part, parts[warp * f.warps_per_example + w] + lane * W);
            floats_add(g, part);
        }
        floats_store(examples[warp] + lane * W, g);
        float square = 0.0f;
        UNROLL_FOR (int j = 0; j < W; j++) square = add_square(square, g[j]);
        square = warp_sum(square);
        if (lane == 0 && b0 + warp < f.B) f.squares[((size_t)set * f.B + b0 + warp) * f.column_groups + x] = square;
        if (to.rows && c < C && b0 + warp < f.B)
            UNROLL_FOR (int j = 0; j < W; j++) to.rows[(b0 + warp) * to.stride + c + j] = g[j];
    }
    __syncthreads();
    if (warp > 0 || c >= C) return;
    float sum[W] = {};
    for (int i = 0; i < f.batch && b0 + i < f.B; i++) {
        floats_load(g, examples[i] + lane * W);
        floats_add(sum, g);
    }
    floats_store(f.batch_sums + ((size_t)z * sets + set) * C + c, sum);
}

__global__ void __launch_bounds__(SUM_THREADS) column_total_kernel(const __grid_constant__ ColumnFinishes all) {
    int i = 0, block = blockIdx.x;
    for (; block >= total_blocks(all.of[i]); i++) block -= total_blocks(all.of[i]);
    const ColumnFinish &f = all.of[i];
    const int sets = f.job.sets, set = block % sets, c = (block / sets - 1) * SUM_THREADS + (int)threadIdx.x;
    const ColumnGradient to = f.job.of[set];
    after_wait();
    if (block < sets) {
        const double *partials = f.squares + (size_t)set * f.B * f.column_groups;
        example_partials_sum(to.squares, NULL, partials, f.B, f.column_groups);
        return;
    }
    if (c >= f.job.C) return;
    const float before = to.first ? 0.0f : to.sum[c];
    float sum = 0.0f;
#pragma unroll 8
    for (int z = 0; z < f.batches; z++) sum += f.batch_sums[((size_t)z * sets + set) * f.job.C + c];
    to.sum[c] = before + sum;
}

int column_finish(ColumnJobs *jobs, cudaStream_t stream, Error *e) {
    ColumnFinishes all = {};
    int examples = 0, totals = 0, wide = 4;
    size_t bytes;
    for (int i = 0; i < jobs->count; i++)
        if (jobs->job[i].C % 4) wide = 1;
    for (int i = 0; i < jobs->count; i++) {
        const ColumnFinish f = all.of[i] = finish_of(jobs->job[i], &bytes, wide);
        examples += example_blocks(f), totals += total_blocks(f);
    }
    jobs->count = 0, jobs->used = 0;
    if (!examples) return 0;
    TRY(launch({.blocks = examples, .threads = dim3(WARP, FINISH_WARPS), .stream = stream, .early = true}, e,
               wide == 4 ? column_examples_kernel<4> : column_examples_kernel<1>, all));
    return launch({.blocks = totals, .threads = SUM_THREADS, .stream = stream, .early = true}, e, column_total_kernel,
                  all);
}

// ---- Squared norms of the tensors of a flat buffer, and of per-example gradients ------------------------------------

enum { FLAT_BLOCKS = 1056, FLAT_THREADS = 256 }; // 8 blocks on each of 132 multiprocessors

// Returns a thread's part of the sum of squares of x[begin..end).
__device__ static double squares_of_range(const float *x, size_t begin, size_t end) {
    const size_t body = size_t(begin + 3) / 4 * 4 < end ? size_t(begin + 3) / 4 * 4 : end;
    const size_t tail = end / 4 * 4 > body ? end / 4 * 4 : body;
    float s[4] = {};
    if (begin + threadIdx.x < body) s[0] = x[begin + threadIdx.x] * x[begin + threadIdx.x];
    if (tail + threadIdx.x < end) s[1] = x[tail + threadIdx.x] * x[tail + threadIdx.x];
#pragma unroll 4
    for (size_t i = body + 4 * threadIdx.x; i < tail; i += 4 * FLAT_THREADS) {
        float v[4];
        floats_load(v, x + i);
        UNROLL_FOR (int j = 0; j < 4; j++) s[j] = add_square(s[j], v[j]);
    }
    return ((double)s[0] + s[1]) + ((double)s[2] + s[3]);
}

// Grid: block k sums squares of elements [k span, (k + 1) span) of the range. The sum of segment s goes to slot k + s.
__global__ void __launch_bounds__(FLAT_THREADS)
    squares_kernel(double *slots, const float *x, Range range, size_t span, const Range *segments, int S) {
    __shared__ double shared[FLAT_THREADS / WARP];
    const size_t begin = range.begin + blockIdx.x * span;
    const Range own = range_overlap({begin, begin + span}, range);
    int low = 0, high = S; // search for the first segment that ends after `begin`
    while (low < high) {
        const int middle = (low + high) / 2;
        if (segments[middle].end > begin) high = middle;
        else low = middle + 1;
    }
    for (int s = low; s < S && segments[s].begin < own.end; s++) {
        const Range part = range_overlap(segments[s], own);
        const double mine = squares_of_range(x, part.begin - range.begin, part.end - range.begin);
        const double sum = block_sum(mine, shared);
        if (threadIdx.x == 0) slots[blockIdx.x + s] = sum;
        __syncthreads();
    }
}

// Grid: a warp per segment.
__global__ void squares_finish_kernel(double *squares, const double *slots, Range range, size_t span,
                                      const Range *segments) {
    const int s = blockIdx.x;
    const Range part = range_overlap(segments[s], range);
    if (range_length(part) == 0) return;
    const int first = (int)((part.begin - range.begin) / span), last = (int)((part.end - 1 - range.begin) / span);
    double sum = 0.0;
    for (int k = first + threadIdx.x; k <= last; k += WARP) sum += slots[k + s];
    sum = warp_sum(sum);
    if (threadIdx.x == 0) squares[s] = sum;
}

size_t reduce_squares_workspace_bytes(int S) { return (FLAT_BLOCKS + (size_t)S) * sizeof(double); }

int reduce_squares(double *squares, const float *x, Range range, const Range *segments, int S, void *workspace,
                   cudaStream_t stream, Error *e) {
    // span is a multiple of 4 floats, so a block inside one tensor reads 16 bytes at a time.
    const size_t span = size_max(round_up((range_length(range) + FLAT_BLOCKS - 1) / FLAT_BLOCKS, 4), 4);
    double *slots = (double *)workspace;
    TRY(launch({FLAT_BLOCKS, FLAT_THREADS, stream}, e, squares_kernel, slots, x, range, span, segments, S));
    return launch({S, WARP, stream}, e, squares_finish_kernel, squares, slots, range, span, segments);
}

enum { EXAMPLES_AT_ONCE = 8 }; // per kernel; registers hold their sums of squares

// gradient (n) += x (E, n), W columns per thread at a time, E <= EXAMPLES_AT_ONCE. partials (E, gridDim.x): sum of x^2.
template <int W>
__global__ void __launch_bounds__(FLAT_THREADS)
    examples_kernel(float *gradient, double *partials, const float *x, int E, size_t n) {
    __shared__ double shared[EXAMPLES_AT_ONCE][FLAT_THREADS / WARP];
    float squares[EXAMPLES_AT_ONCE] = {};
    for (size_t i = ((size_t)blockIdx.x * FLAT_THREADS + threadIdx.x) * W; i < n;
         i += (size_t)gridDim.x * FLAT_THREADS * W) {
        float v[EXAMPLES_AT_ONCE][W], g[W];
        floats_load(g, gradient + i);
        UNROLL_FOR (int b = 0; b < EXAMPLES_AT_ONCE; b++)
            if (b < E) floats_load(v[b], x + b * n + i);
        UNROLL_FOR (int b = 0; b < EXAMPLES_AT_ONCE; b++) {
            if (b >= E) continue;
            UNROLL_FOR (int j = 0; j < W; j++) {
                squares[b] = add_square(squares[b], v[b][j]);
                g[j] += v[b][j];
            }
        }
        floats_store(gradient + i, g);
    }
    UNROLL_FOR (int b = 0; b < EXAMPLES_AT_ONCE; b++) {
        if (b >= E) continue;
        const double sum = block_sum((double)squares[b], shared[b]);
        if (threadIdx.x == 0) partials[(size_t)b * gridDim.x + blockIdx.x] = sum;
    }
}

size_t reduce_examples_workspace_bytes(int E) { return (size_t)E * FLAT_BLOCKS * sizeof(double); }

int reduce_examples(float *gradient, double *squares, const float *x, int E, size_t n, void *workspace,
                    cudaStream_t stream, Error *e) {
    double *partials = (double *)workspace;
    for (int b = 0; b < E; b += EXAMPLES_AT_ONCE) {
        const int some = E - b < EXAMPLES_AT_ONCE ? E - b : EXAMPLES_AT_ONCE;
        const auto kernel = n % 4 ? examples_kernel<1> : examples_kernel<4>;
        TRY(launch({FLAT_BLOCKS, FLAT_THREADS, stream}, e, kernel, gradient, partials + (size_t)b * FLAT_BLOCKS,
                   x + b * n, some, n));
    }
    return reduce_example_partials({{squares}}, partials, 1, E, FLAT_BLOCKS, stream, e);
}

// ---- Whole arrays ---------------------------------------------------------------------------------------------------

// Grid: a block per sum. PRODUCTS: adds up products of a row and itself or, if the grid has rows along y, of two rows.
template <bool PRODUCTS> __global__ void sum_kernel(double *sums, const float *x, size_t n) {
    __shared__ double shared[SUM_WARPS];
    const float *a = x + blockIdx.x * n, *b = gridDim.y > 1 ? x + blockIdx.y * n : a;
    double mine = 0.0;
#pragma unroll 8
    for (size_t i = threadIdx.x; i < n; i += blockDim.x) mine += PRODUCTS ? (double)a[i] * b[i] : a[i];
    mine = block_sum(mine, shared);
    double *sum = sums + blockIdx.x * gridDim.y + blockIdx.y;
    if (threadIdx.x == 0) *sum = PRODUCTS ? mine : *sum + mine;
}

int reduce_sum(double *sums, const float *x, int rows, size_t n, cudaStream_t stream, Error *e) {
    return launch({rows, SUM_THREADS, stream}, e, sum_kernel<false>, sums, x, n);
}

int reduce_products(double *products, const float *x, int rows, int others, size_t n, cudaStream_t stream, Error *e) {
    return launch({dim3(rows, others), SUM_THREADS, stream}, e, sum_kernel<true>, products, x, n);
}

static unsigned flat_blocks(size_t n) { return min(blocks_of(n, FLAT_THREADS), (unsigned)FLAT_BLOCKS); }

__global__ static void add_kernel(float *sums, const float *x, size_t n, bool first, int rows, const uint16_t *of) {
    for (size_t i = blockIdx.x * (size_t)FLAT_THREADS + threadIdx.x; i < n; i += (size_t)gridDim.x * FLAT_THREADS)
        for (int b = 0; b < rows; b++) {
            float *sum = sums + (of ? of[b] * n : 0) + i;
            *sum = first ? x[b * n + i] : *sum + x[b * n + i];
        }
}

int reduce_add(float *sum, const float *x, size_t n, bool first, cudaStream_t stream, Error *e, int rows,
               const uint16_t *of) {
    if (n == 0) return 0;
    return launch({flat_blocks(n), FLAT_THREADS, stream}, e, add_kernel, sum, x, n, first, rows, of);
}

template <typename X>
__global__ void __launch_bounds__(FLAT_THREADS) hash_kernel(uint64_t *sum, const X *x, size_t n, uint64_t place) {
    const size_t stride = (size_t)gridDim.x * FLAT_THREADS;
    uint64_t mine = 0;
#pragma unroll 4
    for (size_t i = (size_t)blockIdx.x * FLAT_THREADS + threadIdx.x; i < n; i += stride)
        mine += hash_element(place + i, x[i]);
    for (int lanes = 16; lanes > 0; lanes /= 2) mine += __shfl_down_sync(0xffffffff, mine, lanes);
    if (threadIdx.x % 32 == 0) atomicAdd((unsigned long long *)sum, (unsigned long long)mine);
}

int reduce_hash(uint64_t *sum, const void *x, size_t value_bytes, size_t n, uint64_t place, cudaStream_t stream,
                Error *e) {
    if (n == 0) return 0;
    const Launch l = {flat_blocks(n), FLAT_THREADS, stream};
    if (value_bytes == sizeof(uint16_t)) return launch(l, e, hash_kernel<uint16_t>, sum, (const uint16_t *)x, n, place);
    return launch(l, e, hash_kernel<uint32_t>, sum, (const uint32_t *)x, n, place);
}
