// vec: vector loads, sums and launches for memory-bound kernels. A thread processes W columns at a time: 8 (16 bytes of
// 16-bit values) if the row length is a multiple of 8, else 1. Sums over a warp or block have a fixed order.
#pragma once

#include "cuda/cuda_common.cuh"

enum { WARP = 32, VEC = 8 };

// W neighbouring values as stored, in whole registers: 8 values of 16 bits occupy 4.
template <int W> struct alignas(16) Pack { uint32_t words[W * sizeof(real) / sizeof(uint32_t)]; };
template <> struct alignas(sizeof(real)) Pack<1> { real x; };

template <int W> __device__ inline Pack<W> pack_load(const real *p) { return *reinterpret_cast<const Pack<W> *>(p); }
template <int W> __device__ inline void pack_store(real *p, const Pack<W> &v) { *reinterpret_cast<Pack<W> *>(p) = v; }

template <int W> __device__ inline void pack_get(float (&f)[W], const Pack<W> &v) {
    if constexpr (W == 1) f[0] = (float)v.x;
    else if constexpr (sizeof(real) == sizeof(float)) {
        UNROLL_FOR (int i = 0; i < W; i++) f[i] = __uint_as_float(v.words[i]);
    } else {
        UNROLL_FOR (int i = 0; i < W; i++) f[i] = unpack(v.words[i / 2], i % 2);
    }
}

template <int W> __device__ inline Pack<W> pack_of(const float (&f)[W]) {
    Pack<W> v;
    if constexpr (W == 1) v.x = (real)f[0];
    else if constexpr (sizeof(real) == sizeof(float)) {
        UNROLL_FOR (int i = 0; i < W; i++) v.words[i] = __float_as_uint(f[i]);
    } else {
        UNROLL_FOR (int i = 0; i < W / 2; i++) v.words[i] = pack(f[2 * i], f[2 * i + 1]);
    }
    return v;
}

// Makes the compiler unpack v again later, instead of keeping the unpacked floats in registers.
template <int W> __device__ inline void pack_forget(Pack<W> &v) {
    UNROLL_FOR (int i = 0; i < (int)(sizeof(v) / sizeof(uint32_t)); i++) asm volatile("" : "+r"(v.words[i]));
}

// W values as stored, accessed at most 16 bytes at a time.
template <typename X, int W> struct alignas(W * sizeof(X) < 16 ? W * sizeof(X) : 16) Bundle { X x[W]; };

template <int W> __device__ inline void floats_load(float (&x)[W], const float *p) {
    const auto v = *reinterpret_cast<const Bundle<float, W> *>(p);
    UNROLL_FOR (int j = 0; j < W; j++) x[j] = v.x[j];
}
template <int W> __device__ inline void floats_store(float *p, const float (&x)[W]) {
    Bundle<float, W> v;
    UNROLL_FOR (int j = 0; j < W; j++) v.x[j] = x[j];
    *reinterpret_cast<Bundle<float, W> *>(p) = v;
}

template <int W> __device__ inline void floats_add(float (&sum)[W], const float (&x)[W]) {
    UNROLL_FOR (int j = 0; j < W; j++) sum[j] += x[j];
}

// Returns the sum over the warp, in every lane.
template <typename F> __device__ inline F warp_sum(F x) {
    UNROLL_FOR (int offset = WARP / 2; offset > 0; offset /= 2) x += __shfl_xor_sync(0xffffffffu, x, offset);
    return x;
}

// Returns the sum over a block of whole warps, in every thread. shared: one F per warp, in use until the next
// __syncthreads.
template <typename F> __device__ inline F block_sum(F x, F *shared) {
    x = warp_sum(x);
    if (threadIdx.x % WARP == 0) shared[threadIdx.x / WARP] = x;
    __syncthreads();
    F sum = 0;
    for (int w = 0; w < (int)blockDim.x / WARP; w++) sum += shared[w];
    return sum;
}

// Early launch hides launch latency: from compute capability 9.0 a kernel may start while its predecessor still runs.
// 1. A kernel starts early only once every block of its predecessor has called after_allow or ended.
// 2. after_wait returns when the predecessor has ended. Call after_wait before using what earlier kernels wrote.
// 3. A kernel that calls after_allow must call after_wait, however it is launched. A successor waits for this kernel's
//    end only. Thanks to after_wait, this end implies the end of all older kernels.
__device__ static inline void after_wait(void) {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ static inline void after_allow(void) {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

struct Launch {
    dim3 blocks, threads;
    cudaStream_t stream;
    size_t shared_bytes = 0; // dynamic shared memory
    unsigned cluster = 1;    // blocks per cluster
    bool early = false;      // see after_wait
};

// Starts a kernel. Fails if its configuration is wrong. The next synchronisation reports errors of the running kernel.
template <typename... Parameters, typename... Arguments>
static int launch(const Launch &l, Error *e, void (*kernel)(Parameters...), Arguments... arguments) {
    cudaLaunchAttribute attribute = {};
    cudaLaunchConfig_t config = {l.blocks, l.threads, l.shared_bytes, l.stream, &attribute, 0};
    int major = 0;
    if (l.early) TRY(device_attribute(&major, cudaDevAttrComputeCapabilityMajor, e));
    if (major >= 9) {
        attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
        attribute.val.programmaticStreamSerializationAllowed = 1;
        config.numAttrs = 1;
    }
    if (l.cluster > 1) {
        attribute.id = cudaLaunchAttributeClusterDimension;
        attribute.val.clusterDim = {l.cluster, 1, 1};
        config.numAttrs = 1;
    }
    if (l.shared_bytes > 0) TRY(shared_memory_allow(kernel, l.shared_bytes, e));
    return CUDA_CALL(cudaLaunchKernelEx(&config, kernel, arguments...), e);
}

template <typename To, typename From> __global__ static void convert_kernel(To *out, const From *in, size_t n) {
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x)
        out[i] = (To)in[i];
}

// Enough for full memory bandwidth: with 64 blocks the rounding of gradients for transfers in bf16 took 12 ms of a step
// of 110 ms, more than bf16 saves.
enum { FULL_BLOCKS = 1024, FULL_THREADS = 256 };

// out = in, rounded to nearest even.
template <typename To, typename From>
static int convert(To *out, const From *in, size_t n, cudaStream_t stream, Error *e) {
    return launch({FULL_BLOCKS, FULL_THREADS, stream}, e, convert_kernel<To, From>, out, in, n);
}

static inline int ceil_div(int a, int b) { return (a + b - 1) / b; }
static inline unsigned blocks_of(size_t threads, int block) { return (unsigned)((threads + block - 1) / block); }
