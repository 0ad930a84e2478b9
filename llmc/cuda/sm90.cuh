// sm90: Hopper's instructions: barriers in shared memory, the copy engine (TMA), wgmma, clusters. PTX ISA 8.0, sections
// "mbarrier", "cp.async.bulk.tensor" and "wgmma".
//
// A tile in shared memory is cut into panels of 64 columns = 128 bytes per row. Panels have the 128-byte swizzle: the
// 16-byte piece c of row r is the row's piece c ^ (r % 8) in memory. So tiles begin at multiples of 1024 bytes.
#pragma once

#include "cuda/cuda_common.cuh"

#include <cuda.h>
#include <cudaTypedefs.h>

// True if the GPU is a Hopper and this 16-bit build holds sm_90a kernels. False in an fp32 build.
bool sm90_runs(void);

// SM90_CODE: defined where kernels of sm_90a instructions are compiled. SM90_THREADS: launch bounds of such a kernel.
// Without SM90_CODE the kernel is empty and its bound is one thread. sm90_runs detects missing code by this bound.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL) && !defined(GNS_FP32)
#    define SM90_CODE
#endif
#if defined(__CUDA_ARCH__) && !defined(SM90_CODE)
#    define SM90_THREADS(threads) 1
#else
#    define SM90_THREADS(threads) threads
#endif

enum { WARPGROUP = 128, PANEL = 64, PANEL_ROW_BYTES = 128 };

// Barriers. A barrier counts arrivals and bytes; a wait names the parity of the phase it waits for.

__device__ static inline unsigned shared_address(const void *p) { return (unsigned)__cvta_generic_to_shared(p); }

// Tells the compiler that x is equal in all lanes, so values derived from x need no vector registers.
__device__ static inline int uniform(int x) { return __shfl_sync(~0u, x, 0); }

__device__ static inline void barrier_init(uint64_t *barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}

__device__ static inline void barrier_arrive(uint64_t *barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// Arrives at the barrier of the same address in block `rank` of the cluster.
__device__ static inline void barrier_arrive_at(uint64_t *barrier, int rank) {
    asm volatile("{\n.reg .b32 there;\n"
                 "mapa.shared::cluster.u32 there, %0, %1;\n"
                 "mbarrier.arrive.shared::cluster.b64 _, [there];\n}" ::"r"(shared_address(barrier)),
                 "r"(rank)
                 : "memory");
}

__device__ static inline void barrier_expect(uint64_t *barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
                 : "memory");
}

__device__ static inline void barrier_wait(uint64_t *barrier, unsigned parity) {
    asm volatile("{\n"
                 ".reg .pred done;\n"
                 "again:\n"
                 "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
                 "@!done bra again;\n"
                 "}\n" ::"r"(shared_address(barrier)),
                 "r"(parity)
                 : "memory");
}

// Makes initialised barriers visible to the copy engine; a __syncthreads must follow.
__device__ static inline void barriers_publish() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

// Arrives once per warp, when all lanes are done.
__device__ static inline void warp_arrive(uint64_t *barrier) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(barrier);
}

// Arrives, once per warp, at this barrier in both blocks of a pair. rank: this block's rank.
__device__ static inline void pair_arrive(uint64_t *barrier, int rank) {
    __syncwarp();
    if (threadIdx.x % 32 < 2) barrier_arrive_at(barrier, rank ^ (int)(threadIdx.x % 32));
}

// Position in a ring of stages. The parity flips with each round.
template <int STAGES> struct Ring {
    int stage = 0;
    unsigned parity = 0;

    __device__ void advance() {
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
};

// Synchronises the cluster. Call it before the first access to shared memory of another block, and after the last one.
__device__ static inline void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Writes x to the address `to` in block `rank` of the cluster, and counts 4 bytes at that block's barrier.
__device__ static inline void send_at(int *to, int x, uint64_t *barrier, int rank) {
    asm volatile(
        "{\n.reg .b32 there, signal;\n"
        "mapa.shared::cluster.u32 there, %0, %3;\n"
        "mapa.shared::cluster.u32 signal, %2, %3;\n"
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [there], %1, [signal];\n}" ::"r"(shared_address(to)),
        "r"(x), "r"(shared_address(barrier)), "r"(rank)
        : "memory");
}

// Synchronises `threads` threads (whole warps) at a named barrier, 1 to 15.
__device__ static inline void threads_sync(int barrier, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// The copy engine. A CUtensorMap (copy_map) describes a tensor and its boxes. copy_box_in writes zeros for elements
// outside the tensor, and the barrier counts their bytes, too; copy_box_out skips these elements.

__device__ static inline void copy_box_in(void *to, const CUtensorMap *map, uint64_t *barrier, int column, int row,
                                          int b) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%3, %4, %5}], [%2];" ::"r"(shared_address(to)),
                 "l"(map), "r"(shared_address(barrier)), "r"(column), "r"(row), "r"(b)
                 : "memory");
}

// Copies a box to the same address in both blocks of a pair, and counts its bytes at the same barrier in both.
__device__ static inline void copy_box_in_pair(void *to, const CUtensorMap *map, uint64_t *barrier, int column, int row,
                                               int b) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
                 "[%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(shared_address(to)),
                 "l"(map), "r"(shared_address(barrier)), "r"(column), "r"(row), "r"(b), "h"((uint16_t)3)
                 : "memory");
}

__device__ static inline void copy_box_out(const CUtensorMap *map, const void *from, int column, int row, int b) {
    asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(map),
                 "r"(shared_address(from)), "r"(column), "r"(row), "r"(b)
                 : "memory");
}

// Adds a box of floats to memory.
__device__ static inline void copy_box_add(const CUtensorMap *map, const void *from, int column, int row, int b) {
    asm volatile(
        "cp.reduce.async.bulk.tensor.3d.global.shared::cta.add.tile.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(map),
        "r"(shared_address(from)), "r"(column), "r"(row), "r"(b)
        : "memory");
}

__device__ static inline void copy_out_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Waits until all but the thread's last PENDING committed groups have read shared memory.
template <int PENDING = 0> __device__ static inline void copy_out_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
}
__device__ static inline void copy_out_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
// Orders the thread's reads and writes of shared memory before later copies out of or into it (PTX ISA, "Causality
// order").
__device__ static inline void fence_before_copies() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Copies `bytes` to shared memory. `bytes` and both addresses must be multiples of 16.
__device__ static inline void copy_run_in(void *to, const void *from, int bytes, uint64_t *barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     shared_address(to)),
                 "l"(from), "r"(bytes), "r"(shared_address(barrier))
                 : "memory");
}

// A tensor of 3 dimensions, and its boxes. Dimension 0 is the innermost. Boxes have the 128-byte swizzle. UINT8
// boxes with rows of 64 bytes have the 64-byte swizzle: the 16-byte piece c of row r is the row's piece c ^ (r / 2 % 4)
// in memory. stride: elements between neighbours along dimensions 1 and 2; 0: no gaps. Strides in bytes and the
// tensor's address must be multiples of 16.
struct CopyTensor {
    CUtensorMapDataType type;
    int64_t size[3];
    int box[3];
    CUtensorMapL2promotion promotion = CU_TENSOR_MAP_L2_PROMOTION_L2_256B;
    int64_t stride[2] = {};
};
int copy_map(CUtensorMap *map, const void *tensor, const CopyTensor &t, Error *e);

// wgmma. A warpgroup computes 64 rows, each warp 16. Accumulators: see fragment_row, fragment_column.

// Returns the matrix descriptor of a tile: address, distance between panels, 1024 bytes between groups of 8 rows (all
// in units of 16 bytes), 128-byte swizzle. Add step_along_rows(k) or step_down_columns(k).
__device__ static inline uint64_t operand(const char *tile, int panel_bytes) {
    unsigned low = uniform((shared_address(tile) & 0x3ffff) >> 4 | panel_bytes >> 4 << 16);
    return low | (uint64_t)(1024 >> 4) << 32 | (uint64_t)1 << 62;
}

// Offset of the k-th slice of the summed dimension: 16 columns (step_along_rows) or 16 rows (step_down_columns).
template <int ROWS> __device__ constexpr int step_along_rows(int k) {
    return (k / 4 * ROWS * PANEL_ROW_BYTES + k % 4 * 32) >> 4;
}
__device__ constexpr int step_down_columns(int k) { return k * 16 * PANEL_ROW_BYTES >> 4; }

__device__ static inline void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ static inline void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until at most PENDING committed groups are in flight.
template <int PENDING> __device__ static inline void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// Keeps the compiler from moving reads of wgmma's registers above the wait, or writes to them below the issue.
template <int N> __device__ static inline void registers_settle(float (&r)[N]) {
    UNROLL_FOR (int i = 0; i < N; i++) asm volatile("" : "+f"(r[i])::"memory");
}

#ifdef SM90_CODE
#    define SM90_LIST_32                                                                                               \
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                                       \
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#    define SM90_LIST_64                                                                                               \
        SM90_LIST_32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "              \
                     "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#    define SM90_LIST_80 SM90_LIST_64 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#    define SM90_LIST_96 SM90_LIST_80 ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#    define SM90_8(i)                                                                                                  \
        "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3]), "+f"(c[i + 4]), "+f"(c[i + 5]), "+f"(c[i + 6]),    \
            "+f"(c[i + 7])
#    define SM90_LIST_104 SM90_LIST_96 ", %96, %97, %98, %99, %100, %101, %102, %103"
#    define SM90_SUMS_32  SM90_8(0), SM90_8(8), SM90_8(16), SM90_8(24)
#    define SM90_SUMS_64  SM90_SUMS_32, SM90_8(32), SM90_8(40), SM90_8(48), SM90_8(56)
#    define SM90_SUMS_80  SM90_SUMS_64, SM90_8(64), SM90_8(72)
#    define SM90_SUMS_96  SM90_SUMS_80, SM90_8(80), SM90_8(88)
#    define SM90_SUMS_104 SM90_SUMS_96, SM90_8(96)

// c (64, N) = op(a) op(b)^T + (accumulate ? c : 0), both operands in shared memory.
//   wgmma        sums 16 products for each element of c. A_ALONG: the sum runs along the 64 rows of a's tile; else down
//                its columns. B_ALONG: the sum runs along the N rows of b's tile; else down its columns
//   wgmma_e4m3   sums 32 products for each element, along the rows of both tiles. A panel's row of 128 bytes
//                holds 128 elements. step_along_rows(k) is the offset of the k-th slice of 32 elements
#    define SM90_ISSUE(N, COUNT, ACCUMULATE, KIND, OPERANDS, ...)                                                      \
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " ACCUMULATE ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N KIND  \
                     " {" SM90_LIST_##COUNT "}, " OPERANDS ";\n}"                                                      \
                     : SM90_SUMS_##COUNT                                                                               \
                     : __VA_ARGS__)
#    define SM90_WGMMA(N, COUNT, A, B, ACCUMULATE, A_DOWN, B_DOWN)                                                     \
        template <bool A_ALONG, bool B_ALONG>                                                                          \
        __device__ static inline void wgmma(float(&c)[COUNT], uint64_t a, uint64_t b, int accumulate) {                \
            SM90_ISSUE(N, COUNT, ACCUMULATE, "k16.f32." REAL_PTX "." REAL_PTX,                                         \
                       A ", " B ", p, 1, 1, " A_DOWN ", " B_DOWN, "l"(a), "l"(b), "r"(accumulate), "n"(!A_ALONG),      \
                       "n"(!B_ALONG));                                                                                 \
        }                                                                                                              \
        __device__ static inline void wgmma_e4m3(float(&c)[COUNT], uint64_t a, uint64_t b, int accumulate) {           \
            SM90_ISSUE(N, COUNT, ACCUMULATE, "k32.f32.e4m3.e4m3", A ", " B ", p, 1, 1", "l"(a), "l"(b),                \
                       "r"(accumulate));                                                                               \
        }
SM90_WGMMA(64, 32, "%32", "%33", "%34", "%35", "%36")
SM90_WGMMA(128, 64, "%64", "%65", "%66", "%67", "%68")
SM90_WGMMA(160, 80, "%80", "%81", "%82", "%83", "%84")
SM90_WGMMA(192, 96, "%96", "%97", "%98", "%99", "%100")
SM90_WGMMA(208, 104, "%104", "%105", "%106", "%107", "%108")

// registers_give returns a warpgroup's registers to the block's pool; registers_take takes registers from the pool.
// Every warp of the group must call. registers_take waits until enough registers are free: forever if the warpgroups
// want more than the block got at launch. Three warpgroups get 168 per thread: 3 x 168 = 2 x 232 + 40 = 2 x 240 + 24.
template <int A_THREAD> __device__ static inline void registers_give() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(A_THREAD));
}

template <int A_THREAD> __device__ static inline void registers_take() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(A_THREAD));
}
#endif

enum { SHARED_ALIGNMENT = 1024 };

__device__ static inline char *shared_memory() {
    extern __shared__ __align__(SHARED_ALIGNMENT) char shared_of_block[];
    return shared_of_block;
}
