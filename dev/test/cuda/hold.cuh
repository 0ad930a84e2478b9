// hold: occupies some of a GPU's multiprocessors for a while, as NCCL does while the engine runs.
#pragma once

#include "cuda/vec.cuh"

struct Hold {
    cudaStream_t stream;
    int *begun; // number of running blocks, in pinned memory
    int shared_bytes;
};

__device__ static long long hold_nanoseconds() {
    long long t;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
    return t;
}

// Ends by the GPU's clock, because polling host memory would halve the speed of the whole GPU.
__global__ static void hold_kernel(int *begun, long long duration) {
    long long start = hold_nanoseconds();
    atomicAdd_system(begun, 1);
    while (hold_nanoseconds() - start < duration) continue;
}

static inline int hold_create(Hold *h, Error *e) {
    TRY(device_attribute(&h->shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, e));
    CUDA_TRY(cudaStreamCreateWithFlags(&h->stream, cudaStreamNonBlocking), e);
    return CUDA_CALL(cudaMallocHost((void **)&h->begun, sizeof *h->begun), e);
}

// Holds all shared memory of `blocks` multiprocessors for `ms` milliseconds. Returns when the blocks run.
static inline int hold_begin(Hold *h, int blocks, double ms, Error *e) {
    *h->begun = 0;
    const Launch l = {blocks, 1, h->stream, (size_t)h->shared_bytes};
    TRY(launch(l, e, hold_kernel, h->begun, (long long)(ms * 1e6)));
    while (*(volatile int *)h->begun < blocks) continue;
    return 0;
}

static inline int hold_end(Hold *h, Error *e) { return CUDA_CALL(cudaStreamSynchronize(h->stream), e); }

static inline void hold_destroy(Hold *h) {
    if (h->begun) cudaFreeHost(h->begun);
    if (h->stream) cudaStreamDestroy(h->stream);
    *h = {};
}
