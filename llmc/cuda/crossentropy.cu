// crossentropy: see crossentropy.cuh.
//
// Pass 1 over a row finds its maximum and its sum of exponentials (online softmax: Milakov, Gimelshein 2018,
// arXiv 1805.02867). Pass 2 reads the row from L2 and writes the gradient.
#include "cuda/crossentropy.cuh"
#include "cuda/vec.cuh"
#include "math/loss.h"

#include <assert.h>
#include <math_constants.h>

enum { ROW_THREADS = sizeof(real) == 2 ? 768 : 512, ROW_WARPS = ROW_THREADS / WARP }; // limited by registers

// exp(x - shift)
__device__ static inline float exp_minus(float x, float shift) {
#ifdef GNS_FP32
    return expf(x - shift);
#else
    return exp2_fast(fmaf(x, LOG2E, -shift * LOG2E));
#endif
}

__device__ static inline int row_target(const LogitRows &k, int r) {
    return k.tokens[(size_t)((k.row0 + r) / k.T) * (k.T + 1) + (k.row0 + r) % k.T + 1];
}

// Softmax of some logits: their maximum, the sum of exp(logit - max), the sum of the logits.
typedef struct {
    float max, sum, logits;
} Partial;

// Joins the lanes' partials; returns the result in every lane. A lane whose max equals the result's max does not scale
// its sum. If both are -inf, the factor exp(-inf + inf) would be NaN.
__device__ static inline Partial partial_join_warp(Partial p) {
    float max = p.max;
    UNROLL_FOR (int offset = WARP / 2; offset > 0; offset /= 2)
        max = fmaxf(max, __shfl_xor_sync(0xffffffffu, max, offset));
    return {max, warp_sum(p.max == max ? p.sum : p.sum * exp_minus(p.max, max)), warp_sum(p.logits)};
}

// Joins the threads' partials; returns the result in every thread.
__device__ static inline Partial partial_join_block(Partial mine, Partial *shared) {
    const int lane = threadIdx.x % WARP;
    mine = partial_join_warp(mine);
    if (lane == 0) shared[threadIdx.x / WARP] = mine;
    __syncthreads();
    const Partial nothing = {-CUDART_INF_F, 0.0f, 0.0f};
    return partial_join_warp(lane < ROW_WARPS ? shared[lane] : nothing);
}

// Loads VEC logits; those in columns from V on are replaced by -infinity.
__device__ static inline Pack<VEC> logits_load(const real *row, int c, int V) {
    const Pack<VEC> pack = pack_load<VEC>(row + c);
    if (c + VEC <= V) return pack;
    float x[VEC];
    pack_get(x, pack);
    UNROLL_FOR (int j = 0; j < VEC; j++)
        if (c + j >= V) x[j] = -CUDART_INF_F;
    return pack_of<VEC>(x);
}

__device__ static inline float pack_max(const Pack<VEC> &pack) {
    float x[VEC];
    pack_get(x, pack);
    float max = x[0];
    UNROLL_FOR (int j = 1; j < VEC; j++) max = fmaxf(max, x[j]);
    return max;
}

enum { ROW_PACKS = 4 }; // packs in flight per thread

// Returns the partial of a thread's logits.
__device__ static inline Partial row_partial(const real *row, int V) {
    const int stride = ROW_THREADS * VEC;
    Partial mine = {-CUDART_INF_F, 0.0f, 0.0f};
    for (int c0 = threadIdx.x * VEC; c0 < V; c0 += ROW_PACKS * stride) {
        Pack<VEC> packs[ROW_PACKS];
        float max = mine.max;
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
            UNROLL_FOR (int j = 0; j < VEC; j++) sum += x[j];
            mine.logits += c0 + p * stride + VEC <= V ? sum : 0.0f; // no branch, so packs are summed in parallel
        }
    }
    const int tail = V / VEC * VEC; // first column of the pack that mixes logits and padding, if any
    if (tail / VEC % ROW_THREADS == (int)threadIdx.x)
#pragma unroll 1
        for (int c = tail; c < V; c++) mine.logits += (float)row[c];
    return mine;
}

// Replaces logits [c, c + VEC) of a row by their gradient. exp(x - shift) = softmax * scale / T.
__device__ static inline void gradient_write(const LogitRows &k, real *row, int target, float shift, int c) {
    float x[VEC] = {};
    if (c < k.V) pack_get(x, pack_load<VEC>(row + c));
    UNROLL_FOR (int j = 0; j < VEC; j++) x[j] = exp_minus(x[j], shift) - k.everywhere;
    if (target / VEC == c / VEC || c + VEC > k.V) // one branch for the target and the padding
        UNROLL_FOR (int j = 0; j < VEC; j++) {
            if (c + j == target) x[j] -= k.onehot;
            if (c + j >= k.V) x[j] = 0.0f;
        }
    pack_store(row + c, pack_of<VEC>(x));
}

// Grid: a block per row.
__global__ static void __launch_bounds__(ROW_THREADS, 2) row_kernel(const __grid_constant__ LogitRows k) {
    __shared__ Partial shared[ROW_WARPS];
    const int r = blockIdx.x, target = row_target(k, r);
    real *row = k.logits + (size_t)r * k.Vp;
    const Partial all = partial_join_block(row_partial(row, k.V), shared);
    const float logsumexp = loss_logsumexp(all.max, all.sum), shift = logsumexp + logf((float)k.T / k.scale);
    if (target / VEC % ROW_THREADS == (int)threadIdx.x) { // the same thread overwrites this logit later
        const float logit = (float)row[target], loss = logsumexp - logit;
        k.losses[r] = loss;
        if (k.smoothed) k.smoothed[r] = loss_smoothed(loss, logit, all.logits / k.V, k.smoothing);
    }
#pragma unroll 2 // unrolled by 4, registers spill in fp16
    for (int c = threadIdx.x * VEC; k.scale > 0 && c < k.Vp; c += ROW_THREADS * VEC)
        gradient_write(k, row, target, shift, c);
}

int crossentropy(LogitRows rows, cudaStream_t stream, Error *e) {
    rows.onehot = (1.0f - rows.smoothing) * rows.scale / rows.T;
    rows.everywhere = rows.scale / rows.T * rows.smoothing / rows.V;
    assert(rows.Vp % VEC == 0); // model_create pads to 128
    return launch({rows.R, ROW_THREADS, stream}, e, row_kernel, rows);
}

// ---- Around a product that stores exponentials ----------------------------------------------------------------------

enum { PRODUCT_THREADS = 256, PRODUCT_WARPS = PRODUCT_THREADS / WARP };

// Grid: a warp per row.
__global__ static void targets_kernel(float *target_logits, const real *x, const real *weight,
                                      const __grid_constant__ LogitRows k, int C) {
    const int r = blockIdx.x * PRODUCT_WARPS + threadIdx.x / WARP;
    if (r >= k.R) return;
    const real *row = x + (size_t)r * C, *column = weight + (size_t)row_target(k, r) * C;
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
                  k, C);
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
        real *target = f.k.logits + (size_t)r * f.k.Vp + row_target(f.k, r);
        f.k.losses[r] = logf(sum / (float)*target);
        f.factors[r] = factors[lane] = f.k.scale / f.k.T / sum;
        *target = (real)((float)*target - sum);
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
