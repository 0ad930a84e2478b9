// decode: see decode.cuh. A row occupies a GPU for less time than a kernel needs to start. So there are few kernels:
// LayerNorm, GELU and the residual are part of a product. It starts early (vec.cuh), and loads its first weights before
// it waits for its input.
#include "cuda/decode.cuh"
#include "cuda/gelu.cuh"
#include "math/layernorm.h"

enum { THREADS = 512, WARPS = THREADS / WARP };

// A block loads ACROSS packs (32 bytes: memory delivers no fewer) of DOWN rows of W at once. A thread has AHEAD loads
// in flight.
enum { ACROSS = 32 / (int)sizeof(Pack<VEC>), DOWN = THREADS / ACROSS, AHEAD = 96 / (int)sizeof(Pack<VEC>) };

// Grid: a block per ACROSS packs of y. Each block computes LayerNorm's statistics anew.
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
        for (int r = threadIdx.x; r < l.in; r += THREADS) sum += real_to_float(l.x[r]);
        mean = block_sum(sum, shared[0]) / l.in;
        for (int r = threadIdx.x; r < l.in; r += THREADS) squares = add_square(squares, real_to_float(l.x[r]) - mean);
        rstd = layernorm_rstd(block_sum(squares, shared[1]), l.in);
    }
    float sum[VEC] = {};
    for (int begin = first; begin < l.in; begin += AHEAD * DOWN) {
        if (begin != first) fetch(begin);
        UNROLL_FOR (int i = 0; i < AHEAD; i++) {
            const int r = begin + i * DOWN;
            if (r >= l.in) continue;
            float x = real_to_float(l.x[r]), f[VEC];
            if (gamma)
                x = real_to_float(
                    (real)layernorm_y(layernorm_xhat(x, mean, rstd), real_to_float(scale[i]), real_to_float(shift[i])));
            pack_get(f, w[i]);
            UNROLL_FOR (int j = 0; j < VEC; j++) sum[j] = add_product(sum[j], x, f[j]);
        }
    }
    // Sum over the block: lanes of the same pack, then warps.
    UNROLL_FOR (int j = 0; j < VEC; j++)
        UNROLL_FOR (int offset = WARP / 2; offset >= ACROSS; offset /= 2)
            sum[j] += __shfl_xor_sync(0xffffffffu, sum[j], offset);
    if (lane < ACROSS) floats_store(parts[threadIdx.x / WARP] + lane * VEC, sum);
    __syncthreads();
    if (!stores) return;
    float y = real_to_float(bias);
    for (int i = 0; i < WARPS; i++) y += parts[i][threadIdx.x];
    if (l.epilogue == LINEAR_GELU) y = gelu_with_slope(real_to_float((real)y)).y;
    l.y[own] = (real)(l.epilogue == LINEAR_RESIDUAL ? y + real_to_float(l.extra[own]) : y);
}

int decode_linear(const Linear &l, const real *gamma, const real *beta, cudaStream_t stream, Error *e) {
    const Launch early = {
        .blocks = blocks_of(l.out, ACROSS * VEC), .threads = THREADS, .stream = stream, .early = true};
    return launch(early, e, linear_row_kernel, l, gamma, beta);
}
