// decode: see decode.cuh. Computing a row takes less time than starting a kernel, so kernels are few: products include
// LayerNorm, GELU and the residual. Each kernel starts early (vec.cuh). A product loads its first weights before it
// waits for its input.
#include "cuda/decode.cuh"
#include "cuda/gelu.cuh"
#include "math/layernorm.h"
#include "model/cuda_sizes.h"

#include <float.h>

enum { THREADS = 512, WARPS = THREADS / WARP };

// ---- Products -------------------------------------------------------------------------------------------------------

// A block loads ACROSS packs (32 bytes: memory delivers no fewer) of DOWN rows of W at once. A thread has AHEAD loads
// in flight.
enum { ACROSS = 32 / (int)sizeof(Pack<VEC>), DOWN = THREADS / ACROSS, AHEAD = 96 / (int)sizeof(Pack<VEC>) };

// Grid: a block per ACROSS packs of y. Each block computes LayerNorm's mean and rstd itself.
__global__ void __launch_bounds__(THREADS, 2)
    linear_row_kernel(const __grid_constant__ Linear l, const real *gamma, const real *beta) {
    __shared__ alignas(16) float parts[WARPS][ACROSS * VEC];
    __shared__ float shared[2][WARPS];
    const int lane = threadIdx.x % WARP, first = threadIdx.x / ACROSS;
    const int c = (blockIdx.x * ACROSS + threadIdx.x % ACROSS) * VEC; // first column of the thread's pack
    const int own = blockIdx.x * ACROSS * VEC + threadIdx.x;          // the element of y that the thread stores
    const bool stores = threadIdx.x < ACROSS * VEC && own < l.out;
    Pack<VEC> w[AHEAD];
    real scale[AHEAD], shift[AHEAD];
    const auto fetch = [&](int begin) {
        UNROLL_FOR (int i = 0; i < AHEAD; i++) {
            const int r = begin + i * DOWN;
            w[i] = r < l.in && c < l.out ? pack_load<VEC>(l.weight + (size_t)r * l.out + c) : Pack<VEC>{};
            if (gamma && r < l.in) scale[i] = gamma[r], shift[i] = beta[r];
        }
    };
    fetch(first);
    const real bias = stores ? l.bias[own] : (real)0.0f;
    after_allow();
    after_wait();

    float mean = 0, rstd = 0;
    if (gamma) {
        float sum = 0, squares = 0;
        for (int r = threadIdx.x; r < l.in; r += THREADS) sum += (float)l.x[r];
        mean = block_sum(sum, shared[0]) / l.in;
        for (int r = threadIdx.x; r < l.in; r += THREADS) squares = add_square(squares, (float)l.x[r] - mean);
        rstd = layernorm_rstd(block_sum(squares, shared[1]), l.in);
    }
    float sum[VEC] = {};
    for (int begin = first; begin < l.in; begin += AHEAD * DOWN) {
        if (begin != first) fetch(begin);
        UNROLL_FOR (int i = 0; i < AHEAD; i++) {
            const int r = begin + i * DOWN;
            if (r >= l.in) continue;
            float x = (float)l.x[r], f[VEC];
            if (gamma) x = (float)(real)layernorm_y(layernorm_xhat(x, mean, rstd), (float)scale[i], (float)shift[i]);
            pack_get(f, w[i]);
            UNROLL_FOR (int j = 0; j < VEC; j++) sum[j] = add_product(sum[j], x, f[j]);
        }
    }
    // Sum over the lanes of a warp that hold the same pack, then over the warps.
    UNROLL_FOR (int j = 0; j < VEC; j++)
        UNROLL_FOR (int offset = WARP / 2; offset >= ACROSS; offset /= 2)
            sum[j] += __shfl_xor_sync(0xffffffffu, sum[j], offset);
    if (lane < ACROSS) floats_store(parts[threadIdx.x / WARP] + lane * VEC, sum);
    __syncthreads();
    if (!stores) return;
    float y = (float)bias;
    for (int i = 0; i < WARPS; i++) y += parts[i][threadIdx.x];
    if (l.epilogue == LINEAR_GELU) y = gelu_with_slope((float)(real)y).y;
    l.y[own] = (real)(l.epilogue == LINEAR_RESIDUAL ? y + (float)l.extra[own] : y);
}

int decode_linear(const Linear &l, const real *gamma, const real *beta, cudaStream_t stream, Error *e) {
    const Launch early = {
        .blocks = blocks_of(l.out, ACROSS * VEC), .threads = THREADS, .stream = stream, .early = true};
    return launch(early, e, linear_row_kernel, l, gamma, beta);
}

// ---- Attention ------------------------------------------------------------------------------------------------------

enum { KEYS = 128 / (int)sizeof(Pack<VEC>) }; // keys in flight per thread

// Grid: a block per head. A group of `lanes` lanes, a power of two, shares a key; each lane holds a pack of the key's D
// elements. Group g scores keys g, g + groups, ... in one pass. The group keeps its largest score so far, and sums
// values with weights 2^(score - largest). scale: log2(e) / sqrt(D).
__global__ void __launch_bounds__(THREADS)
    attention_row_kernel(real *out, const real *qkv, int row, int D, int lanes, float scale) {
    __shared__ alignas(16) float values[WARPS][ATTENTION_HEAD_SIZE_MAX];
    __shared__ float tops[WARPS], totals[WARPS];
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, groups = THREADS / lanes;
    const int element = lane % lanes * VEC;
    const size_t C = (size_t)gridDim.x * D;
    const real *from = qkv + (size_t)blockIdx.x * D + element;
    float q[VEC] = {}, sum[VEC] = {}, total = 0, largest = -FLT_MAX;
    after_allow();
    after_wait();

    if (element < D) pack_get(q, pack_load<VEC>(from + row * 3 * C));
    for (int first = warp * (WARP / lanes); first <= row; first += KEYS * groups) { // first is equal in all lanes
        Pack<VEC> k[KEYS], v[KEYS];
        float score[KEYS], x[VEC], top = largest;
        UNROLL_FOR (int i = 0; i < KEYS; i++) {
            const int key = first + lane / lanes + i * groups;
            const bool there = key <= row && element < D;
            k[i] = there ? pack_load<VEC>(from + key * 3 * C + C) : Pack<VEC>{};
            v[i] = there ? pack_load<VEC>(from + key * 3 * C + 2 * C) : Pack<VEC>{};
        }
        UNROLL_FOR (int i = 0; i < KEYS; i++) {
            score[i] = 0;
            pack_get(x, k[i]);
            UNROLL_FOR (int j = 0; j < VEC; j++) score[i] = add_product(score[i], q[j], x[j]);
            for (int offset = lanes / 2; offset > 0; offset /= 2)
                score[i] += __shfl_xor_sync(0xffffffffu, score[i], offset);
            score[i] = first + lane / lanes + i * groups <= row ? score[i] * scale : -INFINITY;
            top = fmaxf(top, score[i]);
        }
        const float old = exp2_fast(largest - top);
        total *= old, largest = top;
        UNROLL_FOR (int j = 0; j < VEC; j++) sum[j] *= old;
        UNROLL_FOR (int i = 0; i < KEYS; i++) {
            const float weight = exp2_fast(score[i] - top);
            pack_get(x, v[i]);
            total += weight;
            UNROLL_FOR (int j = 0; j < VEC; j++) sum[j] = add_product(sum[j], weight, x[j]);
        }
    }
    // Give all groups the block's largest score. Sum over the lanes of a warp that hold the same pack, then over warps.
    float top = largest;
    UNROLL_FOR (int offset = WARP / 2; offset > 0; offset /= 2)
        top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, offset));
    if (lane == 0) tops[warp] = top;
    __syncthreads();
    for (int i = 0; i < WARPS; i++) top = fmaxf(top, tops[i]);
    const float share = exp2_fast(largest - top);
    total *= share;
    UNROLL_FOR (int j = 0; j < VEC; j++) sum[j] *= share;
    for (int offset = WARP / 2; offset >= lanes; offset /= 2) {
        total += __shfl_xor_sync(0xffffffffu, total, offset);
        UNROLL_FOR (int j = 0; j < VEC; j++) sum[j] += __shfl_xor_sync(0xffffffffu, sum[j], offset);
    }
    if (lane < lanes && element < D) floats_store(values[warp] + element, sum);
    if (lane == 0) totals[warp] = total;
    __syncthreads();
    if (threadIdx.x >= D) return;
    float value = total = 0;
    for (int i = 0; i < WARPS; i++) total += totals[i], value += values[i][threadIdx.x];
    out[blockIdx.x * D + threadIdx.x] = (real)(value / total);
}

int decode_attention(real *out, const real *qkv, int row, int heads, int head_size, cudaStream_t stream, Error *e) {
    int lanes = 1;
    while (lanes * VEC < head_size) lanes *= 2;
    const Launch early = {.blocks = heads, .threads = THREADS, .stream = stream, .early = true};
    return launch(early, e, attention_row_kernel, out, qkv, row, head_size, lanes, LOG2E / sqrtf((float)head_size));
}
