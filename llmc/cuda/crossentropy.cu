// crossentropy: see crossentropy.cuh.
//
// A block a row. The row is read once, into shared memory where it fits twice on a multiprocessor (GPT-2's 50304 bf16
// logits do), with the maximum and the sum of exponentials taken on the way (online softmax: Milakov, Gimelshein 2018,
// arXiv 1805.02867); then the gradient is written. While one block of a multiprocessor waits for memory, the other
// computes. Rows that do not fit are read again, mostly from the L2 cache.
#include "crossentropy.cuh"
#include "vec.cuh"

#include <math_constants.h>

enum { ROW_THREADS = 512, ROW_WARPS = ROW_THREADS / WARP };
#define CACHE_BYTES_MAX (112 * 1024) // of shared memory a block, so that two blocks share a multiprocessor's 227 KB

__device__ static inline float exponential(float x) {
#ifdef GNS_FP32
    return expf(x);
#else
    return __expf(x);
#endif
}

typedef struct {
    float *losses;
    real *logits; // written only for the gradient
    const uint16_t *tokens;
    int row0, T, V, Vp;
} Rows;

// Part of a softmax: the maximum of some logits, and the sum of exp(logit - max).
typedef struct {
    float max, sum;
} Partial;

__device__ static inline Partial partial_join(Partial a, Partial b) {
    const float max = fmaxf(a.max, b.max);
    if (max == -CUDART_INF_F) return {max, a.sum + b.sum}; // both empty (or NaN): keeps inf - inf out
    return {max, a.sum * exponential(a.max - max) + b.sum * exponential(b.max - max)};
}

// The softmax of the whole row, in every thread.
__device__ static inline Partial partial_join_block(Partial mine, Partial *shared) {
#pragma unroll
    for (int offset = WARP / 2; offset > 0; offset /= 2) {
        const Partial other = {__shfl_xor_sync(0xffffffffu, mine.max, offset),
                               __shfl_xor_sync(0xffffffffu, mine.sum, offset)};
        // Both lanes of a pair join in the same order, so that they agree to the last bit.
        mine = threadIdx.x & offset ? partial_join(other, mine) : partial_join(mine, other);
    }
    if (threadIdx.x % WARP == 0) shared[threadIdx.x / WARP] = mine;
    __syncthreads();
    Partial all = shared[0];
    for (int w = 1; w < ROW_WARPS; w++) all = partial_join(all, shared[w]);
    return all;
}

// Columns at and behind V do not take part.
template <int W> __device__ inline void mask_padding(float (&x)[W], int c, int V) {
    if (c + W <= V) return;
#pragma unroll
    for (int j = 0; j < W; j++)
        if (c + j >= V) x[j] = -CUDART_INF_F;
}

template <int W> __device__ inline Partial partial_add(Partial p, const float (&x)[W]) {
    float max = p.max;
#pragma unroll
    for (int j = 0; j < W; j++) max = fmaxf(max, x[j]);
    if (max > p.max) { // rare once a few packs have been seen
        p.sum *= exponential(p.max - max);
        p.max = max;
    }
#pragma unroll
    for (int j = 0; j < W; j++) p.sum += exponential(x[j] - p.max);
    return p;
}

enum { ROW_PACKS = 4 }; // loads in flight

template <int W, bool GRADIENT, bool CACHED>
__global__ void __launch_bounds__(ROW_THREADS, 2) row_kernel(const __grid_constant__ Rows k) {
    extern __shared__ __align__(16) unsigned char cache_bytes[];
    __shared__ Partial shared[ROW_WARPS];
    real *cache = reinterpret_cast<real *>(cache_bytes); // (Vp); a thread reads back only what it wrote
    real *row = k.logits + (size_t)blockIdx.x * k.Vp;
    const int n = k.row0 + blockIdx.x, stride = ROW_THREADS * W;
    const int target = k.tokens[(size_t)(n / k.T) * (k.T + 1) + n % k.T + 1];
    const float target_logit = real_to_float(row[target]);

    Partial mine = {-CUDART_INF_F, 0.0f};
    for (int c0 = threadIdx.x * W; c0 < k.V; c0 += stride * ROW_PACKS) {
        Pack<W> packs[ROW_PACKS];
#pragma unroll
        for (int p = 0; p < ROW_PACKS; p++)
            if (c0 + p * stride < k.V) packs[p] = pack_load<W>(row + c0 + p * stride);
#pragma unroll
        for (int p = 0; p < ROW_PACKS; p++) {
            const int c = c0 + p * stride;
            if (c >= k.V) continue;
            if (CACHED) pack_store(cache + c, packs[p]);
            float x[W];
            pack_get(x, packs[p]);
            mask_padding(x, c, k.V);
            mine = partial_add(mine, x);
        }
    }
    const Partial all = partial_join_block(mine, shared);
    const float logsumexp = all.max + logf(all.sum);
    if (threadIdx.x == 0) k.losses[blockIdx.x] = logsumexp - target_logit;
    if constexpr (!GRADIENT) return;

    const float shift = logsumexp + logf((float)k.T), onehot = 1.0f / k.T; // exp(x - shift) = softmax / T
#pragma unroll 4
    for (int c = threadIdx.x * W; c < k.Vp; c += stride) {
        float x[W] = {};
        if (c < k.V) pack_get(x, pack_load<W>((CACHED ? cache : row) + c));
        mask_padding(x, c, k.V); // exp(-inf) = 0
#pragma unroll
        for (int j = 0; j < W; j++) x[j] = exponential(x[j] - shift) - (c + j == target ? onehot : 0.0f);
        pack_store(row + c, pack_of<W>(x));
    }
}

template <int W, bool GRADIENT, bool CACHED> static int rows_launch(Rows rows, int R, cudaStream_t stream, Error *e) {
    const int bytes = CACHED ? (int)(rows.Vp * sizeof(real)) : 0;
    if (CACHED)
        CUDA_TRY(
            cudaFuncSetAttribute(row_kernel<W, GRADIENT, CACHED>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
            e);
    row_kernel<W, GRADIENT, CACHED><<<R, ROW_THREADS, bytes, stream>>>(rows);
    CUDA_LAUNCHED(e);
    return 0;
}

// Does a row fit into shared memory, on this device?
static int cache_fits(bool *fits, int Vp, Error *e) {
    int device = 0, most = 0;
    CUDA_TRY(cudaGetDevice(&device), e);
    CUDA_TRY(cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device), e);
    const size_t bytes = Vp * sizeof(real);
    *fits = bytes <= CACHE_BYTES_MAX && bytes + ROW_WARPS * sizeof(Partial) <= (size_t)most;
    return 0;
}

int crossentropy_gradient(float *losses, real *logits, const uint16_t *tokens, int row0, int R, int T, int V, int Vp,
                          cudaStream_t stream, Error *e) {
    const Rows rows = {losses, logits, tokens, row0, T, V, Vp};
    bool fits = false;
    TRY(cache_fits(&fits, Vp, e));
    if (Vp % VEC) return rows_launch<1, true, false>(rows, R, stream, e);
    return fits ? rows_launch<VEC, true, true>(rows, R, stream, e) : rows_launch<VEC, true, false>(rows, R, stream, e);
}

int crossentropy_loss(float *losses, const real *logits, const uint16_t *tokens, int row0, int R, int T, int V, int Vp,
                      cudaStream_t stream, Error *e) {
    const Rows rows = {losses, (real *)logits, tokens, row0, T, V, Vp}; // not written without GRADIENT
    return Vp % VEC ? rows_launch<1, false, false>(rows, R, stream, e)
                    : rows_launch<VEC, false, false>(rows, R, stream, e);
}
