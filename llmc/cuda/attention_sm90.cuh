// attention_sm90: the parts of Hopper's kernels: barriers in shared memory, the copy engine (TMA), wgmma, and how blocks
// draw work. PTX ISA 8.0, sections "mbarrier", "cp.async.bulk.tensor" and "wgmma".
//
// A tile in shared memory is cut into panels of 64 columns = 128 bytes a row. A panel has the 128-byte swizzle: the
// 16-byte piece c of row r lies at c ^ (r % 8). So tiles begin at multiples of 1024 bytes.
#pragma once

#include "cuda/attention_paths.cuh"
#ifndef GNS_FP32
#    include <cuda.h>
#    include <cudaTypedefs.h>

// wgmma and setmaxnreg exist in sm_90a code only. Elsewhere the kernels are empty and allow one thread a block, which
// tells attention_sm90_usable that they are.
#    if defined(__CUDA_ARCH__) && !defined(__CUDA_ARCH_FEAT_SM90_ALL)
#        define SM90_LAUNCH_BOUNDS(threads) __launch_bounds__(1, 1)
#    else
#        define SM90_LAUNCH_BOUNDS(threads) __launch_bounds__(threads, 1)
#    endif

enum { WARPGROUP = 128, PANEL = 64, PANEL_ROW_BYTES = 128, BOX_ROWS = 64, STORE_ROWS = 16 };

// ---------------------------------------------------------------------------------------------------------------------
// Barriers. A barrier counts arrivals and bytes; a wait names the parity of the phase it waits for.

__device__ static inline unsigned shared_address(const void *p) { return (unsigned)__cvta_generic_to_shared(p); }

// Tells the compiler that a value is the same in all lanes: what follows from it then costs no vector registers.
__device__ static inline int uniform(int x) { return __shfl_sync(~0u, x, 0); }

__device__ static inline void barrier_init(uint64_t *barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}

__device__ static inline void barrier_arrive(uint64_t *barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
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

// Makes initialised barriers known to the copy engine; a __syncthreads must follow.
__device__ static inline void barriers_publish() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

// A warp arrives once, when all of its lanes are done.
__device__ static inline void warp_arrive(uint64_t *barrier) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(barrier);
}

// Position in a ring of stages; the parity flips each time round.
template <int STAGES> struct Ring {
    int stage = 0;
    unsigned parity = 0;

    __device__ void advance() {
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
};

__device__ static inline void copy_box_in(void *to, const CUtensorMap *map, uint64_t *barrier, int column, int row,
                                          int b) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%3, %4, %5}], [%2];" ::"r"(shared_address(to)),
                 "l"(map), "r"(shared_address(barrier)), "r"(column), "r"(row), "r"(b)
                 : "memory");
}

__device__ static inline void copy_box_out(const CUtensorMap *map, const void *from, int column, int row, int b) {
    asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(map),
                 "r"(shared_address(from)), "r"(column), "r"(row), "r"(b)
                 : "memory");
}

__device__ static inline void copy_out_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
__device__ static inline void copy_out_wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
__device__ static inline void copy_out_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
__device__ static inline void fence_before_copy_out() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// `bytes` and both addresses: multiples of 16.
__device__ static inline void copy_run_in(void *to, const void *from, int bytes, uint64_t *barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     shared_address(to)),
                 "l"(from), "r"(bytes), "r"(shared_address(barrier))
                 : "memory");
}

// Copies (ROWS, D) of one head, from row `row` of example b, into a tile. Rows beyond T arrive as zeros, and count.
template <int ROWS, int D>
__device__ static inline void tile_in(char *tile, const CUtensorMap *map, uint64_t *barrier, int column, int row,
                                      int b) {
    UNROLL_FOR (int panel = 0; panel < D / PANEL; panel++)
        UNROLL_FOR (int r = 0; r < ROWS; r += BOX_ROWS)
            copy_box_in(tile + (panel * ROWS + r) * PANEL_ROW_BYTES, map, barrier, column + panel * PANEL, row + r, b);
}

template <int ROWS, int D> constexpr int TILE_BYTES = ROWS *D *(int)sizeof(real);

// ---------------------------------------------------------------------------------------------------------------------
// wgmma. A warpgroup computes 64 rows, a warp 16 of them; accumulators: fragment_row, fragment_column.

// Matrix descriptor of a tile: its address, the distance between panels, 1024 bytes between groups of 8 rows, the
// 128-byte swizzle; all in units of 16 bytes. The offset of step k is added to it.
__device__ static inline uint64_t operand(const char *tile, int panel_bytes) {
    unsigned low = uniform((shared_address(tile) & 0x3ffff) >> 4 | panel_bytes >> 4 << 16);
    return low | (uint64_t)(1024 >> 4) << 32 | (uint64_t)1 << 62;
}

// Offsets of step k: 16 columns where the summed dimension runs along the rows, 16 rows where it runs down the columns.
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

// Keeps the compiler from moving reads of wgmma's registers above the wait, and writes to them below the issue.
template <int N> __device__ static inline void registers_settle(float (&r)[N]) {
    UNROLL_FOR (int i = 0; i < N; i++) asm volatile("" : "+f"(r[i])::"memory");
}

#    define SM90_LIST_32                                                                                               \
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                                       \
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#    define SM90_LIST_64                                                                                               \
        SM90_LIST_32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "              \
                     "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#    define SM90_INOUT_8(d, i)                                                                                         \
        "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]),    \
            "+f"(d[i + 7])
#    define SM90_INOUT_32(d, i)                                                                                        \
        SM90_INOUT_8(d, i), SM90_INOUT_8(d, i + 8), SM90_INOUT_8(d, i + 16), SM90_INOUT_8(d, i + 24)

// c (64, N) = a b^T + (accumulate ? c : 0), 16 columns of a and b: a in shared memory or in registers, b in shared memory.
__device__ static inline void wgmma_abt(float (&c)[32], uint64_t a, uint64_t b, int accumulate) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" SM90_LIST_32 "}, %32, %33, p, 1, 1, 0, 0;\n}"
                 : SM90_INOUT_32(c, 0)
                 : "l"(a), "l"(b), "r"(accumulate));
}

__device__ static inline void wgmma_abt(float (&c)[64], uint64_t a, uint64_t b, int accumulate) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" SM90_LIST_64 "}, %64, %65, p, 1, 1, 0, 0;\n}"
                 : SM90_INOUT_32(c, 0), SM90_INOUT_32(c, 32)
                 : "l"(a), "l"(b), "r"(accumulate));
}

__device__ static inline void wgmma_abt(float (&c)[32], const unsigned *a, uint64_t b, int accumulate) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" SM90_LIST_32
                 "}, {%32, %33, %34, %35}, %36, p, 1, 1, 0;\n}"
                 : SM90_INOUT_32(c, 0)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));
}

// c (64, N) += p b, 16 columns of p in registers, 16 rows of b in shared memory.
__device__ static inline void wgmma_pb(float (&c)[32], const unsigned *p, uint64_t b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" SM90_LIST_32
                 "}, {%32, %33, %34, %35}, %36, 1, 1, 1, 1;"
                 : SM90_INOUT_32(c, 0)
                 : "r"(p[0]), "r"(p[1]), "r"(p[2]), "r"(p[3]), "l"(b));
}

__device__ static inline void wgmma_pb(float (&c)[64], const unsigned *p, uint64_t b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" SM90_LIST_64
                 "}, {%64, %65, %66, %67}, %68, 1, 1, 1, 1;"
                 : SM90_INOUT_32(c, 0), SM90_INOUT_32(c, 32)
                 : "r"(p[0]), "r"(p[1]), "r"(p[2]), "r"(p[3]), "l"(b));
}

// The left operand (64, D) of a product, summed along D: a tile in shared memory ...
struct LeftShared {
    const char *tile;

    __device__ void load(const char *own_tile) { tile = own_tile; }
};

// ... or registers, for D = 64: a product (64, 64) with both operands in shared memory would need all of its 128 bytes a
// clock.
struct LeftRegisters {
    unsigned r[16]; // 4 a step of 16 columns

    __device__ void load(const char *own_tile) {
        int row = threadIdx.x / 32 % 4 * 16 + threadIdx.x % 16;
        UNROLL_FOR (int k = 0; k < 4; k++) {
            int piece = 2 * k + threadIdx.x % 32 / 16;
            unsigned address = shared_address(own_tile) + row * PANEL_ROW_BYTES + (piece ^ row % 8) * 16;
            asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                         : "=r"(r[4 * k]), "=r"(r[4 * k + 1]), "=r"(r[4 * k + 2]), "=r"(r[4 * k + 3])
                         : "r"(address)
                         : "memory");
        }
    }
};

// Issues c (64, N) = a (64, D) b (N, D)^T as one group; b is a tile of N rows.
template <int D, int N> __device__ static inline void multiply_abt(float (&c)[N / 2], LeftShared a, const char *b) {
    uint64_t a_operand = operand(a.tile, 0), b_operand = operand(b, 0); // the step goes from panel to panel
    UNROLL_FOR (int k = 0; k < D / 16; k++)
        wgmma_abt(c, a_operand + step_along_rows<64>(k), b_operand + step_along_rows<N>(k), k > 0);
    wgmma_commit();
}

template <int D, int N>
__device__ static inline void multiply_abt(float (&c)[N / 2], const LeftRegisters &a, const char *b) {
    static_assert(D == 64 && N == 64, "the one case in use");
    uint64_t b_operand = operand(b, 0);
    UNROLL_FOR (int k = 0; k < D / 16; k++) wgmma_abt(c, a.r + 4 * k, b_operand + step_along_rows<N>(k), k > 0);
    wgmma_commit();
}

// Issues c (64, D) += p (64, K) b (K, D) as one group; p packed by pack_rows, b a tile of K rows.
template <int D, int K>
__device__ static inline void multiply_pb(float (&c)[D / 2], const unsigned (&p)[K / 4], const char *b) {
    uint64_t b_operand = operand(b, K * PANEL_ROW_BYTES);
    UNROLL_FOR (int k = 0; k < K / 16; k++) wgmma_pb(c, p + 4 * k, b_operand + step_down_columns(k));
    wgmma_commit();
}

// An accumulator as the left operand of the next product: the layouts agree (figure "wgmma.m64k16 A fragment").
template <int N> __device__ static inline void pack_rows(unsigned (&p)[N / 2], const float (&c)[N]) {
    UNROLL_FOR (int i = 0; i < N / 2; i++) p[i] = pack(c[2 * i], c[2 * i + 1]);
}

// A warpgroup returns registers to its block's pool, or takes some from it; each of its warps must call.
#    if defined(__CUDA_ARCH_FEAT_SM90_ALL)
template <int A_THREAD> __device__ static inline void registers_give() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(A_THREAD));
}

template <int A_THREAD> __device__ static inline void registers_take() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(A_THREAD));
}
#    endif

enum { SHARED_ALIGNMENT = 1024 };

__device__ static inline char *shared_memory() {
    extern __shared__ __align__(SHARED_ALIGNMENT) char shared_of_block[];
    return shared_of_block;
}

// Writes a warp's 16 rows of an accumulator, times factor0 (rows 0 to 7) and factor1, to rows row.. of one head, through
// `stage`, (16, D) of shared memory of its own. Rows beyond T are not written. The copy may be in flight on return.
template <int D>
__device__ static inline void warp_rows_out(const CUtensorMap *map, char *stage, const float (&c)[D / 2], float factor0,
                                            float factor1, int column, int row, int b) {
    int lane = threadIdx.x % 32;
    if (lane == 0) copy_out_wait_read(); // of the rows last staged here
    __syncwarp();
    UNROLL_FOR (int n = 0; n < D / 8; n++) {
        char *piece = stage + n / 8 * STORE_ROWS * PANEL_ROW_BYTES + lane / 4 * PANEL_ROW_BYTES +
                      ((n % 8) ^ (lane / 4)) * 16 + lane % 4 * 4;
        *(unsigned *)piece = pack(c[4 * n] * factor0, c[4 * n + 1] * factor0);
        *(unsigned *)(piece + 8 * PANEL_ROW_BYTES) = pack(c[4 * n + 2] * factor1, c[4 * n + 3] * factor1);
    }
    fence_before_copy_out();
    __syncwarp();
    if (lane == 0) {
        UNROLL_FOR (int panel = 0; panel < D / PANEL; panel++)
            copy_box_out(map, stage + panel * STORE_ROWS * PANEL_ROW_BYTES, column + panel * PANEL, row, b);
        copy_out_commit();
    }
}

// One tile of rows of one head. tile < 0: no more work.
struct Work {
    int tile, head, b, column; // column of the head in (NH, D)
};

// Draws the next work item, for one of `workers` that draw until there is none. A block draws when it is free: one that
// starts late, because NCCL holds its multiprocessor, leaves its items to the others (items dealt out at launch made the
// kernels up to 1.8 times as long there). A tile's result does not depend on the block that computes it.
// *ticket counts the draws. Each worker's last draw finds no item; the last of these wraps the count to 0, where the
// next kernel starts.
// Heads are taken in lots of at most `at_once`, one for each multiprocessor, so that a head's keys and values stay in
// L2 until its tiles are done. Within a lot, tiles go from the last to the first: under the causal mask, from the longest
// to the shortest for queries. Lots are of one size, so that the last one keeps all blocks busy too.
__device__ static inline Work work_draw(unsigned *ticket, int workers, int at_once, int tiles, AttentionShape s) {
    int lots = (s.heads() + at_once - 1) / at_once, lot_heads = (s.heads() + lots - 1) / lots;
    int item = (int)atomicInc(ticket, s.heads() * tiles + workers - 1);
    if (item >= s.heads() * tiles) return {-1, 0, 0, 0};
    int lot = item / (lot_heads * tiles), rest = item - lot * lot_heads * tiles;
    int heads = min(lot_heads, s.heads() - lot * lot_heads), head = lot * lot_heads + rest % heads;
    return {tiles - 1 - rest / heads, head, head / s.NH, head % s.NH * s.D};
}

// Tiles of KEYS keys that queries up to `last` see.
template <int KEYS> __device__ static inline int key_tiles(int last, int T) { return min(last, T - 1) / KEYS + 1; }

// Describes a (B, T, columns) tensor to the copy engine, in boxes of `rows` rows and one panel.
int attention_sm90_map(CUtensorMap *map, const real *tensor, int columns, int rows, AttentionShape s, Error *e);

#endif
