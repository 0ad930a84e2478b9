// fp8: see fp8.cuh.
#include "cuda/fp8.cuh"

enum { THREADS = 256, PACKS = 4 }; // packs in flight per thread

// Raises *amax to the largest `most` of a block's threads. All threads must call.
__device__ static void block_raise(float *amax, unsigned most) {
    __shared__ float of_block;
    if (threadIdx.x == 0) of_block = 0;
    __syncthreads();
    fp8_raise(&of_block, fp8_most_value(most));
    __syncthreads();
    if (threadIdx.x == 0) fp8_raise_to(amax, of_block);
}

// Grid: a thread per PACKS packs.
__global__ static void __launch_bounds__(THREADS) cast_kernel(Fp8Copy copy, const real *y, size_t packs) {
    const size_t first = (size_t)blockIdx.x * THREADS * PACKS + threadIdx.x;
    Pack<VEC> v[PACKS];
    unsigned most = 0;
    UNROLL_FOR (int p = 0; p < PACKS; p++) {
        const size_t i = first + p * THREADS;
        v[p] = i < packs ? pack_load<VEC>(y + i * VEC) : Pack<VEC>{};
    }
    UNROLL_FOR (int p = 0; p < PACKS; p++) {
        const size_t i = first + p * THREADS;
        if (i < packs) fp8_copy(copy, i * VEC, v[p], most);
    }
    block_raise(copy.amax, most);
}

int fp8_cast(const Fp8Copy &copy, const real *y, size_t n, cudaStream_t stream, Error *e) {
    if (!copy.amax) return 0;
    return launch({blocks_of(n / VEC, THREADS * PACKS), THREADS, stream}, e, cast_kernel, copy, y, n / VEC);
}

enum { TILE = 64, TILE_PACKS = TILE / VEC, TILE_STRIDE = TILE + 4 }; // TILE_STRIDE: bytes; few bank conflicts

// Grid: (tiles of the largest weight, 4).
__global__ static void __launch_bounds__(THREADS) weights_kernel(const __grid_constant__ Fp8Weights weights) {
    __shared__ alignas(4) uint8_t tile[TILE * TILE_STRIDE];
    const auto &w = weights.of[blockIdx.y];
    const int across = w.out / TILE, row = blockIdx.x / across * TILE, column = blockIdx.x % across * TILE;
    unsigned most = 0;
    if (row >= w.in) return;
    UNROLL_FOR (int i = threadIdx.x; i < TILE * TILE_PACKS; i += THREADS) {
        const int r = i / TILE_PACKS, c = i % TILE_PACKS * VEC;
        const size_t at = (size_t)(row + r) * w.out + column + c;
        const Pack<VEC> x = pack_load<VEC>(w.weight + at);
        fp8_most(most, x);
        if (!w.copy.codes) continue;
        const uint2 codes = fp8_codes(x, w.copy.scale);
        *(uint2 *)(w.copy.codes + at) = codes;
        *(unsigned *)(tile + r * TILE_STRIDE + c) = codes.x;
        *(unsigned *)(tile + r * TILE_STRIDE + c + 4) = codes.y;
    }
    block_raise(w.copy.amax, most); // its barriers also separate writes and reads of the tile
    if (!w.copy.codes) return;
    const int c = threadIdx.x / 4, r = threadIdx.x % 4 * 16; // a thread transposes 16 values of a column
    unsigned codes[4] = {};
    UNROLL_FOR (int i = 0; i < 16; i++) codes[i / 4] |= tile[(r + i) * TILE_STRIDE + c] << i % 4 * 8;
    *(uint4 *)(w.transposed + (size_t)(column + c) * w.in + row + r) = {codes[0], codes[1], codes[2], codes[3]};
}

int fp8_weights(const Fp8Weights &w, cudaStream_t stream, Error *e) {
    int tiles = 0;
    for (const auto &of : w.of) tiles = max(tiles, of.in / TILE * (of.out / TILE));
    return launch({dim3(tiles, 4), THREADS, stream}, e, weights_kernel, w);
}

// Grid: one block.
__global__ static void veto_kernel(double *norm, const int8_t *k, const float *amax, int count) {
    for (int i = threadIdx.x; i < count; i += THREADS)
        if (fp8_saturates(k[i], amax[i])) *norm = INFINITY;
}

int fp8_veto(double *norm, const int8_t *k, const float *amax, int count, cudaStream_t stream, Error *e) {
    return launch({1, THREADS, stream}, e, veto_kernel, norm, k, amax, count);
}
