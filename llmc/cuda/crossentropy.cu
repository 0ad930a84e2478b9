// crossentropy: see crossentropy.cuh.
//
// A block a row. The row is read once, which takes the maximum and the sum of exponentials (online softmax: Milakov,
// Gimelshein 2018, arXiv 1805.02867), and kept in shared memory for the gradient where a multiprocessor has room for two
// rows (GPT-2's 50304 bf16 logits fit): one block computes while the other waits for memory. Other rows are read again,
// mostly from the L2 cache.
#include "cuda/crossentropy.cuh"
#include "cuda/vec.cuh"
#include "math/loss.h"

#include <assert.h>
#include <math_constants.h>

enum { ROW_THREADS = sizeof(real) == 2 ? 768 : 512, ROW_WARPS = ROW_THREADS / WARP }; // as the registers allow
#define CACHE_BYTES_MAX (112 * 1024) // of shared memory a block, so that two blocks share a multiprocessor's 227 KB

// exp(x - shift)
__device__ static inline float exp_minus(float x, float shift) {
#ifdef GNS_FP32
    return expf(x - shift);
#else
    const float log2e = 1.4426950408889634f;
    return exp2_fast(fmaf(x, log2e, -shift * log2e));
#endif
}

typedef struct {
    float *losses;
    real *logits; // overwritten by the gradient
    const uint16_t *tokens;
    int row0, T, V, Vp;
} Rows;

// Part of a softmax: the maximum of some logits, and the sum of exp(logit - max).
typedef struct {
    float max, sum;
} Partial;

// The softmax over the warp's parts, in every lane. A part that is empty or has the maximum is not scaled: no inf - inf.
__device__ static inline Partial partial_join_warp(Partial p) {
    float max = p.max;
    UNROLL_FOR (int offset = WARP / 2; offset > 0; offset /= 2)
        max = fmaxf(max, __shfl_xor_sync(0xffffffffu, max, offset));
    return {max, warp_sum(p.max == max ? p.sum : p.sum * exp_minus(p.max, max))};
}

// The softmax of the whole row, in every thread.
__device__ static inline Partial partial_join_block(Partial mine, Partial *shared) {
    const int lane = threadIdx.x % WARP;
    mine = partial_join_warp(mine);
    if (lane == 0) shared[threadIdx.x / WARP] = mine;
    __syncthreads();
    const Partial nothing = {-CUDART_INF_F, 0.0f};
    return partial_join_warp(lane < ROW_WARPS ? shared[lane] : nothing);
}

// Columns from V on do not count.
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
#else // two comparisons an instruction
    const __nv_bfloat162 *pairs = reinterpret_cast<const __nv_bfloat162 *>(pack.words);
    const __nv_bfloat162 m = __hmax2(__hmax2(pairs[0], pairs[1]), __hmax2(pairs[2], pairs[3]));
    return fmaxf(__low2float(m), __high2float(m));
#endif
}

enum { ROW_PACKS = 4 }; // loads in flight

// The thread's part of the row; CACHED: copies it to cache too.
template <bool CACHED> __device__ inline Partial row_partial(const real *row, real *cache, int V) {
    const int stride = ROW_THREADS * VEC;
    Partial mine = {-CUDART_INF_F, 0.0f};
    for (int c0 = threadIdx.x * VEC; c0 < V; c0 += stride * ROW_PACKS) {
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
            if (CACHED) pack_store(cache + c0 + p * stride, packs[p]);
            float x[VEC];
            pack_get(x, packs[p]);
            UNROLL_FOR (int j = 0; j < VEC; j++) mine.sum += exp_minus(x[j], max);
        }
    }
    return mine;
}

template <bool GRADIENT, bool CACHED>
__global__ void __launch_bounds__(ROW_THREADS, 2) row_kernel(const __grid_constant__ Rows k) {
    extern __shared__ __align__(16) unsigned char cache_bytes[];
    __shared__ Partial shared[ROW_WARPS];
    real *cache = reinterpret_cast<real *>(cache_bytes); // (Vp); a thread reads back only what it wrote
    real *row = k.logits + (size_t)blockIdx.x * k.Vp;
    const int n = k.row0 + blockIdx.x;
    const int target = k.tokens[(size_t)(n / k.T) * (k.T + 1) + n % k.T + 1];
    const Partial all = partial_join_block(row_partial<CACHED>(row, cache, k.V), shared);
    const float logsumexp = loss_logsumexp(all.max, all.sum);
    if constexpr (!GRADIENT) {
        if (threadIdx.x == 0) k.losses[blockIdx.x] = loss_at(logsumexp, real_to_float(row[target]));
        return;
    }

    const float shift = logsumexp + logf((float)k.T), onehot = 1.0f / k.T; // exp(x - shift) = softmax / T
#pragma unroll 4
    for (int c = threadIdx.x * VEC; c < k.Vp; c += ROW_THREADS * VEC) {
        float x[VEC] = {};
        if (c < k.V) pack_get(x, pack_load<VEC>((CACHED ? cache : row) + c));
        mask_padding(x, c, k.V); // exp(-inf) = 0
        float p[VEC];
        UNROLL_FOR (int j = 0; j < VEC; j++) p[j] = exp_minus(x[j], shift);
        if (target / VEC == c / VEC) { // this thread has it
            UNROLL_FOR (int j = 0; j < VEC; j++) {
                if (c + j != target) continue;
                k.losses[blockIdx.x] = loss_at(logsumexp, x[j]);
                p[j] = loss_gradient_at_target(p[j], onehot);
            }
        }
        pack_store(row + c, pack_of<VEC>(p));
    }
}

int crossentropy(float *losses, real *logits, bool gradient, const uint16_t *tokens, int row0, int R, int T, int V,
                 int Vp, cudaStream_t stream, Error *e) {
    const size_t row_bytes = Vp * sizeof(real);
    int most;
    assert(Vp % VEC == 0); // as the model pads it
    TRY(device_attribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, e));
    const bool fits = row_bytes <= CACHE_BYTES_MAX && row_bytes + ROW_WARPS * sizeof(Partial) <= (size_t)most;
    const size_t cache_bytes = gradient && fits ? row_bytes : 0;
    const auto kernel = !gradient ? row_kernel<false, false> : fits ? row_kernel<true, true> : row_kernel<true, false>;
    TRY(shared_memory_allow(kernel, cache_bytes, e));
    kernel<<<R, ROW_THREADS, cache_bytes, stream>>>({losses, logits, tokens, row0, T, V, Vp});
    return CUDA_LAUNCHED(e);
}
