// weight_gradient_pairs: finds the pairs of multiprocessors that weight_gradient uses, and groups them by GPC.
#include "cuda/sm90.cuh"
#include "cuda/vec.cuh"
#include "cuda/weight_gradient.cuh"

#include <algorithm>

enum { PAIR = WEIGHT_GRADIENT_PAIR, PAIRS_MOST = WEIGHT_GRADIENT_PAIRS_MOST, BLOCKS_MOST = PAIR * PAIRS_MOST };
enum { SHARED_BYTES = 200 * 1024 }; // so that a multiprocessor holds one block

// Writes the multiprocessor of each block. Blocks await each other, so no two run on the same multiprocessor.
__global__ static void where_kernel(int *block_at, int *blocks_begun) {
    if (threadIdx.x > 0) return;
    asm volatile("mov.u32 %0, %%smid;" : "=r"(block_at[blockIdx.x]));
    atomicAdd(blocks_begun, 1);
    for (int tries = 0; tries < 2000 && *(volatile int *)blocks_begun < (int)gridDim.x; tries++) {
    }
}

// Finds the multiprocessors of the blocks that run at once in clusters of `size`. *blocks = 0: the GPU runs no such
// clusters. room: (BLOCKS_MOST + 1) on the device.
static int blocks_where(int *at, int *blocks, int size, int *room, Error *e) {
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {(unsigned)size, 1, 1};
    cudaLaunchConfig_t config = {dim3(size), dim3(WARP), SHARED_BYTES, NULL, &attribute, 1};
    int clusters = 0;
    if (cudaOccupancyMaxActiveClusters(&clusters, where_kernel, &config) != cudaSuccess) cudaGetLastError();
    *blocks = std::min(clusters, BLOCKS_MOST / size) * size;
    if (*blocks == 0) return 0;
    config.gridDim = dim3(*blocks);
    CUDA_TRY(cudaMemset(room + BLOCKS_MOST, 0, sizeof *room), e);
    CUDA_TRY(cudaLaunchKernelEx(&config, where_kernel, room, room + BLOCKS_MOST), e);
    return CUDA_CALL(cudaMemcpy(at, room, *blocks * sizeof *at, cudaMemcpyDeviceToHost), e);
}

// Places the pairs by GPC. A cluster's blocks lie in one GPC, so overlapping clusters of several sizes reveal the GPCs.
static int pairs_place(WeightGradientPairs *pairs, int *room, Error *e) {
    int at[BLOCKS_MOST], blocks, group[BLOCKS_MOST], by_group[PAIRS_MOST];
    for (int i = 0; i < BLOCKS_MOST; i++) group[i] = i;
    CUDA_TRY(cudaFuncSetAttribute(where_kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1), e);
    TRY(shared_memory_allow(where_kernel, SHARED_BYTES, e));
    for (int size : {16, 8, 6, (int)PAIR}) {
        TRY(blocks_where(at, &blocks, size, room, e));
        for (int i = 0; i < blocks; i++) {
            if (at[i] >= BLOCKS_MOST) return 0; // the pairs keep the order of the launch
            const int one = group[at[i / size * size]], other = group[at[i]];
            for (int &g : group) g = g == other ? one : g;
        }
    }
    if (blocks != pairs->count * PAIR) return 0;
    for (int i = 0; i < pairs->count; i++) by_group[i] = i;
    std::stable_sort(by_group, by_group + pairs->count,
                     [&](int a, int b) { return group[at[PAIR * a]] < group[at[PAIR * b]]; });
    for (int i = 0; i < pairs->count; i++) pairs->place[by_group[i]] = (unsigned char)i;
    return 0;
}

int weight_gradient_clusters(void) {
    Error none_here;
    int blocks;
    if (!sm90_runs() || device_attribute(&blocks, cudaDevAttrMultiProcessorCount, &none_here)) return 0;
    return std::min(blocks / PAIR, (int)PAIRS_MOST);
}

int weight_gradient_pairs(WeightGradientPairs *pairs, Error *e) {
    Error ignored;
    int *room;
    *pairs = {};
    pairs->count = weight_gradient_clusters();
    for (int i = 0; i < pairs->count; i++) pairs->place[i] = (unsigned char)i;
    if (pairs->count == 0) return 0;
    CUDA_TRY(cudaMalloc(&room, (BLOCKS_MOST + 1) * sizeof *room), e);
    if (pairs_place(pairs, room, &ignored)) cudaGetLastError(); // a failure costs only speed
    return CUDA_CALL(cudaFree(room), e);
}
