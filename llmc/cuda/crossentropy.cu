// crossentropy: see crossentropy.cuh.
//
// A first pass over a row finds its maximum and its sum of exponentials (online softmax: Milakov, Gimelshein 2018,
// arXiv 1805.02867); a second writes the gradient. Where a multiprocessor has room for two rows (50304 logits of 16
// bits fit), a block keeps its row in shared memory for the second pass, and fetches its next row into each place that
// the gradient frees. Longer rows get a block each and are read twice.
#include "cuda/crossentropy.cuh"
#include "cuda/reduce.cuh"
#include "cuda/vec.cuh"
#include "math/loss.h"

#include <assert.h>
#include <math_constants.h>

enum { ROW_THREADS = sizeof(real) == 2 ? 768 : 512, ROW_WARPS = ROW_THREADS / WARP }; // limited by registers
#define CACHE_BYTES_MAX (112 * 1024) // shared memory per block: two blocks share a multiprocessor's 227 KB

// exp(x - shift)
__device__ static inline float exp_minus(float x, float shift) {
#ifdef GNS_FP32
    return expf(x - shift);
#else
    return exp2_fast(fmaf(x, LOG2E, -shift * LOG2E));
#endif
}

__device__ static inline int target_at(const uint16_t *tokens, int n, int T) {
    return tokens[(size_t)(n / T) * (T + 1) + n % T + 1];
}
__device__ static inline int row_target(const LogitRows &k, int r) { return target_at(k.tokens, k.row0 + r, k.T); }

// Softmax of some logits: their maximum, and the sum of exp(logit - max).
typedef struct {
    float max, sum;
} Partial;

// Joins the lanes' partials; returns the result in every lane. Scales none of the largest maximum: it may be -inf.
__device__ static inline Partial partial_join_warp(Partial p) {
    float max = p.max;
    UNROLL_FOR (int offset = WARP / 2; offset > 0; offset /= 2)
        max = fmaxf(max, __shfl_xor_sync(0xffffffffu, max, offset));
    return {max, warp_sum(p.max == max ? p.sum : p.sum * exp_minus(p.max, max))};
}

// Joins the threads' partials; returns the result in every thread. SMOOTH: sums *sum, too.
template <bool SMOOTH>
__device__ static inline Partial partial_join_block(Partial mine, Partial *shared, float *sum, float *shared_sums) {
    const int lane = threadIdx.x % WARP;
    mine = partial_join_warp(mine);
    if (lane == 0) shared[threadIdx.x / WARP] = mine;
    if (SMOOTH) *sum = warp_sum(*sum);
    if (SMOOTH && lane == 0) shared_sums[threadIdx.x / WARP] = *sum;
    __syncthreads();
    if (SMOOTH) *sum = warp_sum(lane < ROW_WARPS ? shared_sums[lane] : 0.0f);
    const Partial nothing = {-CUDART_INF_F, 0.0f};
    return partial_join_warp(lane < ROW_WARPS ? shared[lane] : nothing);
}

// Sets columns from V on to -infinity.
__device__ static inline void mask_padding(float (&x)[VEC], int c, int V) {
    if (c + VEC <= V) return;
    UNROLL_FOR (int j = 0; j < VEC; j++)
        if (c + j >= V) x[j] = -CUDART_INF_F;
}

__device__ static inline Pack<VEC> logits_load(const real *row, int c, int V) {
    const Pack<VEC> pack = pack_load<VEC>(row + c);
    if (c + VEC <= V) return pack;
    float x[VEC];
    pack_get(x, pack);
    mask_padding(x, c, V);
    return pack_of<VEC>(x);
}

__device__ static inline float pack_max(const Pack<VEC> &pack) {
#ifdef GNS_FP32
    float x[VEC];
    pack_get(x, pack);
    float max = x[0];
    UNROLL_FOR (int j = 1; j < VEC; j++) max = fmaxf(max, x[j]);
    return max;
#else // two comparisons per instruction
    const real2 *pairs = reinterpret_cast<const real2 *>(pack.words);
    const real2 m = __hmax2(__hmax2(pairs[0], pairs[1]), __hmax2(pairs[2], pairs[3]));
    return fmaxf(__low2float(m), __high2float(m));
#endif
}

// A thread processes ROW_PACKS packs per turn. A row in shared memory takes at most TURNS_MAX turns.
enum { ROW_PACKS = 4, TURN = ROW_THREADS * ROW_PACKS * VEC };
enum { TURNS_MAX = (CACHE_BYTES_MAX / sizeof(real) + TURN - 1) / TURN };
static_assert(TURNS_MAX <= 3, "fetch_wait_turn has no more cases");

// Waits for the fetches of a turn, given that all TURNS_MAX turns are committed.
__device__ static inline void fetch_wait_turn(int turn) {
    if (turn == TURNS_MAX - 1) fetch_wait<0>();
    else if (turn == TURNS_MAX - 2) fetch_wait<1>();
    else fetch_wait<2>();
}

// Returns the partial of a thread's logits. FETCHED: the row is in shared memory. SMOOTH: *logits = their sum.
template <bool FETCHED, bool SMOOTH> __device__ inline Partial row_partial(const real *row, int V, float *logits) {
    const int stride = ROW_THREADS * VEC;
    Partial mine = {-CUDART_INF_F, 0.0f};
    int turn = 0;
    *logits = 0.0f;
    for (int c0 = threadIdx.x * VEC; c0 < V; c0 += TURN) {
        Pack<VEC> packs[ROW_PACKS];
        float max = mine.max;
        if (FETCHED) fetch_wait_turn(turn++);
        UNROLL_FOR (int p = 0; p < ROW_PACKS; p++)
            if (c0 + p * stride < V) packs[p] = logits_load(row, c0 + p * stride, V);
        UNROLL_FOR (int p = 0; p < ROW_PACKS; p++)
            if (c0 + p * stride < V) max = fmaxf(max, pack_max(packs[p]));
        mine.sum *= exp_minus(mine.max, max);
        mine.max = max;
        UNROLL_FOR (int p = 0; p < ROW_PACKS; p++) {
            if (c0 + p * stride >= V) continue;
            float x[VEC], sum = 0.0f;
            pack_get(x, packs[p]);
            UNROLL_FOR (int j = 0; j < VEC; j++) mine.sum += exp_minus(x[j], max);
            if (SMOOTH)
                UNROLL_FOR (int j = 0; j < VEC; j++) sum += x[j];
            if (SMOOTH) *logits += c0 + p * stride + VEC <= V ? sum : 0.0f; // no branch, so that packs overlap
        }
    }
    const int tail = V / VEC * VEC; // the last pack if it contains padding
    if (SMOOTH && tail / VEC % ROW_THREADS == (int)threadIdx.x)
#pragma unroll 1
        for (int c = tail; c < V; c++) *logits += real_to_float(row[c]);
    return mine;
}

// For a row's gradient: exp(x - shift) = softmax scale / T; onehot as in LogitRows.
typedef struct {
    int target;
    float shift, onehot;
} RowEnd;

// Writes the losses of row r, in the thread of the target's column. row: its logits; logits: their sum.
template <bool SMOOTH>
__device__ static inline RowEnd row_end(const LogitRows &k, int r, int target, Partial all, float logits,
                                        const real *row) {
    const float logsumexp = loss_logsumexp(all.max, all.sum);
    if (target / VEC % ROW_THREADS == (int)threadIdx.x) {
        const float logit = real_to_float(row[target]), loss = loss_at(logsumexp, logit);
        k.losses[r] = loss;
        if (SMOOTH) k.smoothed[r] = loss_smoothed(loss, logit, logits / k.V, k.smoothing);
    }
    return {target, logsumexp + logf((float)k.T / k.scale), SMOOTH ? k.onehot : k.scale / k.T};
}

// Writes columns [c, c + VEC) of the gradient to `row`, from the logits at `from`.
template <bool SMOOTH>
__device__ static inline void gradient_write(const LogitRows &k, real *row, const RowEnd &e, const real *from, int c) {
    float x[VEC] = {};
    if (c < k.V) pack_get(x, pack_load<VEC>(from + c));
    mask_padding(x, c, k.V); // exp(-inf) = 0
    UNROLL_FOR (int j = 0; j < VEC; j++) x[j] = exp_minus(x[j], e.shift);
    if (SMOOTH)
        UNROLL_FOR (int j = 0; j < VEC; j++) x[j] -= k.everywhere;
    if (e.target / VEC == c / VEC || (SMOOTH && c + VEC > k.V)) // one branch for the target and the padding
        UNROLL_FOR (int j = 0; j < VEC; j++) {
            if (c + j == e.target) x[j] = loss_gradient_at_target(x[j], e.onehot);
            if (SMOOTH && c + j >= k.V) x[j] = 0.0f;
        }
    pack_store(row + c, pack_of<VEC>(x));
}

// Rows of any length. Grid: a block per row.
template <bool SMOOTH>
__global__ void __launch_bounds__(ROW_THREADS, 2) row_kernel(const __grid_constant__ LogitRows k) {
    __shared__ Partial shared[ROW_WARPS];
    __shared__ float shared_sums[SMOOTH ? ROW_WARPS : 1];
    const int r = blockIdx.x;
    real *row = k.logits + (size_t)r * k.Vp;
    float logits;
    Partial all = row_partial<false, SMOOTH>(row, k.V, &logits);
    all = partial_join_block<SMOOTH>(all, shared, &logits, shared_sums);
    const RowEnd end = row_end<SMOOTH>(k, r, row_target(k, r), all, logits, row);
#pragma unroll 2 // 4 spill in fp16
    for (int c = threadIdx.x * VEC; k.scale > 0 && c < k.Vp; c += ROW_THREADS * VEC)
        gradient_write<SMOOTH>(k, row, end, row, c);
}

// Rows whose Vp logits fit into shared memory. Block i has rows i, i + blocks, ... A thread reads only what it fetched.
template <bool SMOOTH>
__global__ void __launch_bounds__(ROW_THREADS, 2) cached_rows_kernel(const __grid_constant__ LogitRows k) {
    extern __shared__ __align__(16) unsigned char cache_bytes[];
    __shared__ Partial shared[2][ROW_WARPS]; // double-buffered: one barrier per row is enough
    __shared__ float shared_sums[2][SMOOTH ? ROW_WARPS : 1];
    real *cache = reinterpret_cast<real *>(cache_bytes), *row = k.logits + (size_t)blockIdx.x * k.Vp;
    const size_t step = (size_t)gridDim.x * k.Vp;
    for (int i = 0, c = threadIdx.x * VEC; i < TURNS_MAX * ROW_PACKS; i++, c += ROW_THREADS * VEC) {
        if (c < k.V) pack_fetch((Pack<VEC> *)(cache + c), row + c, true);
        if (i % ROW_PACKS == ROW_PACKS - 1) fetch_commit();
    }
    for (int r = blockIdx.x, buffer = 0; r < k.R; r += gridDim.x, buffer ^= 1, row += step) {
        const int target = row_target(k, r), fetched = r + (int)gridDim.x < k.R ? k.V : 0;
        float logits;
        Partial all = row_partial<true, SMOOTH>(cache, k.V, &logits);
        all = partial_join_block<SMOOTH>(all, shared[buffer], &logits, shared_sums[buffer]);
        const RowEnd end = row_end<SMOOTH>(k, r, target, all, logits, cache);
#pragma unroll 2
        for (int i = 0, c = threadIdx.x * VEC; i < TURNS_MAX * ROW_PACKS; i++, c += ROW_THREADS * VEC) {
            if (c < k.Vp) gradient_write<SMOOTH>(k, row, end, cache, c);
            if (c < fetched) pack_fetch((Pack<VEC> *)(cache + c), row + step + c, true);
            if (i % ROW_PACKS == ROW_PACKS - 1) fetch_commit();
        }
    }
}

int crossentropy(LogitRows rows, cudaStream_t stream, Error *e) {
    const size_t row_bytes = rows.Vp * sizeof(real), sums = 2 * ROW_WARPS * (sizeof(Partial) + sizeof(float));
    const bool smooth = rows.smoothed;
    int most, of_two, reserved, processors;
    rows.onehot = (1.0f - rows.smoothing) * rows.scale / rows.T;
    rows.everywhere = loss_gradient_everywhere(rows.scale / rows.T, rows.smoothing, rows.V);
    assert(rows.Vp % VEC == 0); // the model pads it so
    TRY(device_attribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, e));
    TRY(device_attribute(&of_two, cudaDevAttrMaxSharedMemoryPerMultiprocessor, e));
    TRY(device_attribute(&reserved, cudaDevAttrReservedSharedMemoryPerBlock, e));
    most = min(most, of_two / 2 - reserved); // two blocks per multiprocessor
    TRY(device_attribute(&processors, cudaDevAttrMultiProcessorCount, e));
    if (rows.scale > 0 && row_bytes <= CACHE_BYTES_MAX && row_bytes + sums <= (size_t)most)
        return launch({min(rows.R, 2 * processors), ROW_THREADS, stream, row_bytes}, e,
                      smooth ? cached_rows_kernel<true> : cached_rows_kernel<false>, rows);
    return launch({rows.R, ROW_THREADS, stream}, e, smooth ? row_kernel<true> : row_kernel<false>, rows);
}

// ---- Around a product that stores exponentials ----------------------------------------------------------------------

enum { PRODUCT_THREADS = 256, PRODUCT_WARPS = PRODUCT_THREADS / WARP };

// Grid: a warp per row.
__global__ static void targets_kernel(float *target_logits, const real *x, const real *weight, const uint16_t *tokens,
                                      int row0, int R, int T, int C) {
    const int r = blockIdx.x * PRODUCT_WARPS + threadIdx.x / WARP;
    if (r >= R) return;
    const real *row = x + (size_t)r * C, *column = weight + (size_t)target_at(tokens, row0 + r, T) * C;
    float sum = 0.0f;
    for (int c = threadIdx.x % WARP * VEC; c < C; c += WARP * VEC) {
        float a[VEC], b[VEC];
        pack_get(a, pack_load<VEC>(row + c));
        pack_get(b, pack_load<VEC>(column + c));
        UNROLL_FOR (int j = 0; j < VEC; j++) sum = fmaf(a[j], b[j], sum);
    }
    sum = warp_sum(sum);
    if (threadIdx.x % WARP == 0) target_logits[r] = sum;
}

int crossentropy_targets(float *target_logits, const real *x, const real *weight, const LogitRows &k, int C,
                         cudaStream_t stream, Error *e) {
    assert(C % VEC == 0);
    return launch({blocks_of(k.R, PRODUCT_WARPS), PRODUCT_THREADS, stream}, e, targets_kernel, target_logits, x, weight,
                  k.tokens, k.row0, k.R, k.T, C);
}

// Grid: a block per 32 rows. A warp adds the sums of every eighth tile, a row per lane, then scales every eighth row.
__global__ static void __launch_bounds__(PRODUCT_THREADS) loss_finish_kernel(const __grid_constant__ LossFinish f) {
    __shared__ float part[PRODUCT_WARPS][WARP], factors[WARP];
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, first = blockIdx.x * WARP, r = first + lane;
    float sum = 0.0f;
    for (int i = warp; r < f.k.R && i < f.tiles; i += PRODUCT_WARPS) sum += f.sums[(size_t)i * f.k.R + r];
    part[warp][lane] = sum;
    __syncthreads();
    if (warp == 0 && r < f.k.R) {
        for (int w = 1; w < PRODUCT_WARPS; w++) sum += part[w][lane];
        const int target = row_target(f.k, r);
        f.k.losses[r] = logf(sum);
        f.factors[r] = factors[lane] = f.k.scale / f.k.T / sum;
        const float at_target = loss_gradient_at_target(1.0f, sum); // exp(0) = 1, not the product's rounded value
        f.k.logits[(size_t)r * f.k.Vp + target] = (real)at_target;
    }
    __syncthreads();
    for (int i = warp; i < WARP && first + i < f.k.R; i += PRODUCT_WARPS) {
        real *row = f.x + (size_t)(first + i) * f.C;
        for (int c = lane * VEC; c < f.C; c += WARP * VEC) {
            float v[VEC];
            pack_get(v, pack_load<VEC>(row + c));
            UNROLL_FOR (int j = 0; j < VEC; j++) v[j] *= factors[i];
            pack_store(row + c, pack_of<VEC>(v));
        }
    }
}

int crossentropy_finish(const LossFinish &f, cudaStream_t stream, Error *e) {
    assert(f.C % VEC == 0);
    return launch({blocks_of(f.k.R, WARP), PRODUCT_THREADS, stream}, e, loss_finish_kernel, f);
}
