// hash: see hash.cuh.
#include "cuda/hash.cuh"

#include "base/hash.h"

enum { THREADS = 256, BLOCKS = 1024 };

__device__ static inline uint32_t bits_of(float x) { return __float_as_uint(x); }
__device__ static inline uint32_t bits_of(__nv_bfloat16 x) { return __bfloat16_as_ushort(x); }

template <typename X>
__global__ void __launch_bounds__(THREADS) hash_kernel(uint64_t *sum, const X *x, size_t n, uint64_t place) {
    const size_t stride = (size_t)gridDim.x * THREADS;
    uint64_t mine = 0;
#pragma unroll 4
    for (size_t i = (size_t)blockIdx.x * THREADS + threadIdx.x; i < n; i += stride)
        mine += hash_element(place + i, bits_of(x[i]));
    for (int lanes = 16; lanes > 0; lanes /= 2) mine += __shfl_down_sync(0xffffffff, mine, lanes);
    if (threadIdx.x % 32 == 0) atomicAdd((unsigned long long *)sum, (unsigned long long)mine);
}

template <typename X> int hash_add(uint64_t *sum, const X *x, size_t n, uint64_t place, cudaStream_t stream, Error *e) {
    const int blocks = (int)size_min((n + THREADS - 1) / THREADS, BLOCKS);
    if (n == 0) return 0;
    hash_kernel<<<blocks, THREADS, 0, stream>>>(sum, x, n, place);
    return CUDA_LAUNCHED(e);
}

template int hash_add(uint64_t *, const float *, size_t, uint64_t, cudaStream_t, Error *);
template int hash_add(uint64_t *, const __nv_bfloat16 *, size_t, uint64_t, cudaStream_t, Error *);
