// linear_sm90: see linear_sm90.cuh.
//
// Blocks are persistent, one a multiprocessor, in pairs: a pair's tile is 256 rows, a block's 128, and each block fetches
// half of the pair's part of b for both. A block is
// - two warpgroups that multiply, 64 rows each. One has the other's stages to go through while that one rounds its sums
//   and leaves them in a slot of shared memory;
// - a producer thread, which copies stages of 64 of the summed dimension to shared memory;
// - three warps that finish slots (GELU, residual) and store them, while the others are at the next tile.
// A row's sums do not depend on other rows.
#include "cuda/linear_sm90.cuh"

#include "cuda/gelu.cuh"
#include "cuda/sm90.cuh"
#include "cuda/vec.cuh"
#ifndef GNS_FP32

namespace {

enum { ROWS = 128, GROUP_ROWS = 64, GROUPS = 2, PAIR = 2, DEPTH = 64, HALF = 32 };
enum { TURNS = 4 }; // tiles between the one that is fetched and the one that is stored, both included, and one more
enum { THREADS = (GROUPS + 1) * WARPGROUP, FINISHERS = 3, SERVANT_REGISTERS = 104, WORKER_REGISTERS = 200 };

template <int COLUMNS_, int STAGES_, int SLOTS_, bool STAGGER_ = true> struct Layout {
    static constexpr bool STAGGER = STAGGER_;
    static constexpr int COLUMNS = COLUMNS_, STAGES = STAGES_, SLOTS = SLOTS_, PANELS = COLUMNS / PANEL;
    static constexpr int A_BYTES = ROWS * PANEL_ROW_BYTES, B_BYTES = COLUMNS * PANEL_ROW_BYTES;
    static constexpr int SLOT_BYTES = GROUP_ROWS * COLUMNS * (int)sizeof(real);
    static constexpr int CHUNKS = SLOT_BYTES / 16 / WARP; // of a slot: a warp's 16 bytes a thread
    struct Shared {
        char a[STAGES][A_BYTES], b[STAGES][B_BYTES], slot[SLOTS][SLOT_BYTES];
        alignas(16) real bias[2][COLUMNS];
        uint64_t full[STAGES], empty[STAGES], slot_full[SLOTS], slot_empty[SLOTS];
        int tile[TURNS];
        uint64_t tile_full[TURNS], tile_empty[TURNS];
    };
};

// Tiles of a pair of blocks go in bands of `band` tiles side by side, so that the band's part of b stays in L2.
struct Job {
    int m, n, depths; // depths: stages a tile
    int tiles_m, tiles_n, band;
    const real *bias, *extra;
    unsigned *tickets;

    __device__ int tiles() const { return tiles_m * tiles_n; }
};

struct Place {
    int row, column;
};

template <class L> __device__ Place place_of(const Job &job, int tile, int rank) {
    const int per_band = job.band * job.tiles_m, band = tile / per_band, rest = tile - band * per_band;
    const int width = min(job.band, job.tiles_n - band * job.band);
    return {(rest / width * PAIR + rank) * ROWS, (band * job.band + rest % width) * L::COLUMNS};
}

#    if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// Tiles are drawn as in attention (work_draw), by the producer of a pair's first block, which sends them to both blocks:
// a pair that starts late leaves its tiles to the others. tile < 0: no more.
__device__ int tile_draw(const Job &job) {
    const int tile = (int)atomicInc(job.tickets, job.tiles() + gridDim.x / PAIR - 1);
    return tile < job.tiles() ? tile : -1;
}

// A role's next tile. AS_WARP: all lanes of a warp call, else one thread.
template <bool AS_WARP, class Shared> __device__ int tile_next(Shared &s, Ring<TURNS> &ring) {
    barrier_wait(&s.tile_full[ring.stage], ring.parity);
    const int tile = s.tile[ring.stage];
    if (AS_WARP) __syncwarp();
    if (!AS_WARP || threadIdx.x % WARP == 0) barrier_arrive_at(&s.tile_empty[ring.stage], 0);
    ring.advance();
    return AS_WARP ? uniform(tile) : tile;
}

template <class L, LinearEpilogue EPILOGUE, bool B_ALONG>
__device__ void produce(typename L::Shared &s, const CUtensorMap *a, const CUtensorMap *b, const Job &job, int rank) {
    constexpr bool BIAS = EPILOGUE == LINEAR_BIAS || EPILOGUE == LINEAR_GELU || EPILOGUE == LINEAR_RESIDUAL;
    Ring<L::STAGES> ring;
    Ring<TURNS> turns;
    int drawn = rank == 0 ? tile_draw(job) : 0;
    for (int odd = 0;; odd ^= 1) {
        if (rank == 0) {
            barrier_wait(&s.tile_empty[turns.stage], turns.parity ^ 1);
            for (int to = 0; to < PAIR; to++) send_at(&s.tile[turns.stage], drawn, &s.tile_full[turns.stage], to);
            if (drawn >= 0) drawn = tile_draw(job); // it is there when this tile has been fetched
        }
        barrier_expect(&s.tile_full[turns.stage], sizeof(int));
        const int tile = tile_next<false>(s, turns);
        if (tile < 0) return;
        const Place place = place_of<L>(job, tile, rank);
        const int bias_bytes = BIAS ? min(L::COLUMNS, job.n - place.column) * (int)sizeof(real) : 0;
#        pragma unroll 1
        for (int k = 0; k < job.depths; k++) {
            uint64_t *full = &s.full[ring.stage];
            char *b_half = s.b[ring.stage] + rank * (L::B_BYTES / PAIR);
            barrier_wait(&s.empty[ring.stage], ring.parity ^ 1);
            barrier_expect(full, L::A_BYTES + L::B_BYTES + (k == 0 ? bias_bytes : 0));
            copy_box_in(s.a[ring.stage], a, full, 0, place.row, k, 0);
            if (B_ALONG) copy_box_in_all(b_half, b, full, 0, place.column + rank * L::COLUMNS / PAIR, k, 0, 3);
            else copy_box_in_all(b_half, b, full, 0, k * DEPTH + rank * HALF, place.column / PANEL, 0, 3);
            if (BIAS && k == 0) copy_run_in(s.bias[odd], job.bias + place.column, bias_bytes, full);
            ring.advance();
        }
    }
}

// The sums (64, COLUMNS), with the bias, as rounded, into a slot.
template <class L, bool BIAS>
__device__ void leave(char *slot, const float (&c)[L::COLUMNS / 2], const real *bias) {
    const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32, row = lane % 16;
    char *own = slot + (warp * 16 + row) * PANEL_ROW_BYTES;
    UNROLL_FOR (int j = 0; j < L::COLUMNS / 16; j++) {
        unsigned r[4];
        UNROLL_FOR (int h = 0; h < 2; h++) {
            float2 add = {0.0f, 0.0f};
            if (BIAS) add = __bfloat1622float2(*(const __nv_bfloat162 *)(bias + 16 * j + 8 * h + lane % 4 * 2));
            UNROLL_FOR (int i = 0; i < 2; i++) {
                const __nv_bfloat162 pair =
                    __floats2bfloat162_rn(c[8 * j + 4 * h + 2 * i] + add.x, c[8 * j + 4 * h + 2 * i + 1] + add.y);
                r[2 * h + i] = *(const unsigned *)&pair;
            }
        }
        const int piece = (2 * (j % 4) + lane / 16) ^ row % 8;
        asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                         shared_address(own + j / 4 * GROUP_ROWS * PANEL_ROW_BYTES + piece * 16)),
                     "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
                     : "memory");
    }
}

template <class L, LinearEpilogue EPILOGUE, bool B_ALONG>
__device__ void multiply(typename L::Shared &s, const Job &job, int rank) {
    constexpr bool BIAS = EPILOGUE == LINEAR_BIAS || EPILOGUE == LINEAR_GELU || EPILOGUE == LINEAR_RESIDUAL;
    const int group = uniform(threadIdx.x / WARPGROUP), lane = threadIdx.x % 32;
    Ring<L::STAGES> ring;
    Ring<TURNS> turns;
    float c[L::COLUMNS / 2];
    int turn = group;
    auto release = [&](int stage) {
        __syncwarp();
        if (lane < PAIR) barrier_arrive_at(&s.empty[stage], rank ^ lane);
    };
    for (int odd = 0; tile_next<true>(s, turns) >= 0; odd ^= 1) {
        int previous = 0;
        if (L::STAGGER && turn == 1) barrier_wait(&s.full[L::STAGES - 1], 0); // from here on the other group is ahead
#        pragma unroll 1
        for (int k = 0; k < job.depths; k++) {
            barrier_wait(&s.full[ring.stage], ring.parity);
            const uint64_t a = operand(s.a[ring.stage] + group * GROUP_ROWS * PANEL_ROW_BYTES, 0);
            const uint64_t b = operand(s.b[ring.stage], HALF * PANEL_ROW_BYTES);
            registers_settle(c);
            wgmma_fence();
            UNROLL_FOR (int i = 0; i < DEPTH / 16; i++) {
                const int b_step = B_ALONG ? 2 * i : (i / 2 * (L::B_BYTES / PAIR) >> 4) + step_down_columns(i % 2);
                wgmma<true, B_ALONG>(c, a + 2 * i, b + b_step, k > 0 || i > 0);
            }
            wgmma_commit();
            if (k > 0) {
                wgmma_wait<1>();
                release(previous);
            }
            previous = ring.stage;
            ring.advance();
        }
        wgmma_wait<0>();
        release(previous);
        registers_settle(c);
        const int slot = turn % L::SLOTS;
        barrier_wait(&s.slot_empty[slot], (turn / L::SLOTS & 1) ^ 1);
        leave<L, BIAS>(s.slot[slot], c, s.bias[odd]);
        fence_before_copy_out();
        warp_arrive(&s.slot_full[slot]);
        turn += GROUPS;
    }
}

// A lane's 16 bytes of a chunk of a slot: where they are in memory, and whether they are in the matrix.
struct Piece {
    size_t at;
    bool there;
};
__device__ Piece piece_at(const Job &job, int row, int column, int chunk) {
    const int p = chunk * WARP + threadIdx.x % WARP, r = p / 8 % GROUP_ROWS;
    const int c = p / (8 * GROUP_ROWS) * PANEL + (p % 8 ^ r % 8) * VEC;
    return {(size_t)(row + r) * job.n + column + c, row + r < job.m && column + c < job.n};
}

template <LinearEpilogue EPILOGUE> __device__ Pack<VEC> finished(const Pack<VEC> &pack, const Pack<VEC> &extra) {
    float x[VEC], y[VEC];
    pack_get(x, pack);
    pack_get(y, extra);
    UNROLL_FOR (int v = 0; v < VEC; v++)
        x[v] = EPILOGUE == LINEAR_GELU       ? gelu(x[v])
               : EPILOGUE == LINEAR_RESIDUAL ? y[v] + x[v]
                                             : x[v] * gelu_derivative(y[v]);
    return pack_of<VEC>(x);
}

// Finishes a slot in place. For GELU it is on its way out already, and is not written before it has left.
template <class L, LinearEpilogue EPILOGUE>
__device__ void finish_slot(char *slot, uint64_t *full, unsigned parity, const CUtensorMap *out, const Job &job,
                            Place place, int warp) {
    constexpr bool EXTRA = EPILOGUE == LINEAR_RESIDUAL || EPILOGUE == LINEAR_DGELU;
    constexpr int BATCH = 8;
    const int lane = threadIdx.x % WARP;
    for (int first = warp; first < L::CHUNKS; first += FINISHERS * BATCH) {
        Pack<VEC> packs[BATCH], extra[BATCH];
        UNROLL_FOR (int i = 0; i < BATCH; i++) {
            const Piece piece = piece_at(job, place.row, place.column, first + FINISHERS * i);
            const bool there = EXTRA && piece.there && first + FINISHERS * i < L::CHUNKS;
            extra[i] = there ? pack_load<VEC>(job.extra + piece.at) : Pack<VEC>{};
        }
        if (first == warp) {
            barrier_wait(full, parity);
            if (EPILOGUE == LINEAR_GELU && warp == 0 && lane == 0) {
                copy_box_out(out, slot, 0, place.row, place.column / PANEL);
                copy_out_commit();
            }
        }
        UNROLL_FOR (int i = 0; i < BATCH; i++) {
            const int chunk = first + FINISHERS * i;
            if (chunk < L::CHUNKS)
                packs[i] = finished<EPILOGUE>(pack_load<VEC>((real *)slot + (chunk * WARP + lane) * VEC), extra[i]);
        }
        if (EPILOGUE == LINEAR_GELU && first == warp) {
            if (warp == 0 && lane == 0) copy_out_wait_read();
            threads_sync(1, FINISHERS * WARP);
        }
        UNROLL_FOR (int i = 0; i < BATCH; i++) {
            const int chunk = first + FINISHERS * i;
            if (chunk < L::CHUNKS) pack_store((real *)slot + (chunk * WARP + lane) * VEC, packs[i]);
        }
    }
    fence_before_copy_out();
    threads_sync(1, FINISHERS * WARP);
}

template <class L, LinearEpilogue EPILOGUE>
__device__ void finish(typename L::Shared &s, const CUtensorMap *out, const CUtensorMap *second, const Job &job,
                       int rank) {
    constexpr bool STORE_ONLY = EPILOGUE == LINEAR_PLAIN || EPILOGUE == LINEAR_BIAS;
    const int warp = uniform(threadIdx.x / WARP % 4 - 1), thread = threadIdx.x % WARPGROUP - WARP;
    Ring<TURNS> turns;
    int turn = 0;
    if (STORE_ONLY && thread > 0) return;
    for (;;) {
        const int tile = tile_next<!STORE_ONLY>(s, turns);
        if (tile < 0) break;
        Place place = place_of<L>(job, tile, rank);
        for (int group = 0; group < GROUPS; group++, turn++, place.row += GROUP_ROWS) {
            const int slot = turn % L::SLOTS;
            const unsigned parity = turn / L::SLOTS & 1;
            if (STORE_ONLY) barrier_wait(&s.slot_full[slot], parity);
            else finish_slot<L, EPILOGUE>(s.slot[slot], &s.slot_full[slot], parity, out, job, place, warp);
            if (thread == 0) {
                copy_box_out(EPILOGUE == LINEAR_GELU ? second : out, s.slot[slot], 0, place.row,
                             place.column / PANEL);
                copy_out_commit();
                copy_out_wait_read();
                barrier_arrive(&s.slot_empty[slot]);
            }
        }
    }
    if (thread == 0) copy_out_wait();
}

#    endif

template <class L, LinearEpilogue EPILOGUE, bool B_ALONG>
__global__ void SM90_LAUNCH_BOUNDS(THREADS)
    linear_kernel(const __grid_constant__ CUtensorMap a, const __grid_constant__ CUtensorMap b,
                  const __grid_constant__ CUtensorMap out, const __grid_constant__ CUtensorMap second, const Job job) {
#    if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    auto &s = *(typename L::Shared *)shared_memory();
    const int rank = blockIdx.x % PAIR, group = uniform(threadIdx.x / WARPGROUP);
    if (threadIdx.x == 0) {
        for (int i = 0; i < L::STAGES; i++) {
            barrier_init(&s.full[i], 1);
            barrier_init(&s.empty[i], PAIR * GROUPS * 4);
        }
        for (int i = 0; i < L::SLOTS; i++) {
            barrier_init(&s.slot_full[i], 4);
            barrier_init(&s.slot_empty[i], 1);
        }
        constexpr bool STORE_ONLY = EPILOGUE == LINEAR_PLAIN || EPILOGUE == LINEAR_BIAS;
        for (int i = 0; i < TURNS; i++) {
            barrier_init(&s.tile_full[i], 1);
            barrier_init(&s.tile_empty[i], PAIR * (1 + GROUPS * 4 + (STORE_ONLY ? 1 : FINISHERS)));
        }
        barriers_publish();
    }
    cluster_sync();
    if (group == GROUPS) {
        registers_give<SERVANT_REGISTERS>();
        if (threadIdx.x % WARPGROUP >= WARP) finish<L, EPILOGUE>(s, &out, &second, job, rank);
        else if (threadIdx.x % WARPGROUP == 0) produce<L, EPILOGUE, B_ALONG>(s, &a, &b, job, rank);
    } else {
        registers_take<WORKER_REGISTERS>();
        multiply<L, EPILOGUE, B_ALONG>(s, job, rank);
    }
    __syncwarp();
    cluster_sync(); // the other block may still signal this one's barriers
#    endif
}

// A stored matrix (rows, columns) in boxes of `box_rows` rows and `panels` panels.
int panels_map(CUtensorMap *map, const real *matrix, int rows, int columns, int box_rows, int panels, Error *e) {
    const CopyTensor t = {CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
                          4,
                          {PANEL, (cuuint64_t)rows, (cuuint64_t)columns / PANEL, 1},
                          {columns * sizeof(real), PANEL_ROW_BYTES, columns * sizeof(real)},
                          {PANEL, (cuuint32_t)box_rows, (cuuint32_t)panels, 1},
                          CU_TENSOR_MAP_L2_PROMOTION_L2_256B};
    return copy_map(map, matrix, t, e);
}

// The same for copies out.
int out_map(CUtensorMap *map, const real *matrix, int rows, int columns, int panels, Error *e) {
    const CopyTensor t = {CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
                          3,
                          {PANEL, (cuuint64_t)rows, (cuuint64_t)columns / PANEL},
                          {columns * sizeof(real), PANEL_ROW_BYTES},
                          {PANEL, GROUP_ROWS, (cuuint32_t)panels},
                          CU_TENSOR_MAP_L2_PROMOTION_L2_256B};
    return copy_map(map, matrix, t, e);
}

template <class L, LinearEpilogue EPILOGUE, bool B_ALONG>
int launch(const Linear &l, cudaStream_t stream, Error *e) {
    const auto kernel = linear_kernel<L, EPILOGUE, B_ALONG>;
    CUtensorMap a, b, out, second;
    int blocks;
    TRY(panels_map(&a, l.a, l.m, l.k, ROWS, 1, e));
    if (B_ALONG) TRY(panels_map(&b, l.b, l.n, l.k, L::COLUMNS / PAIR, 1, e));
    else TRY(panels_map(&b, l.b, l.k, l.n, HALF, L::PANELS, e));
    TRY(out_map(&out, l.out, l.m, l.n, L::PANELS, e));
    TRY(out_map(&second, EPILOGUE == LINEAR_GELU ? l.second : l.out, l.m, l.n, L::PANELS, e));
    TRY(device_attribute(&blocks, cudaDevAttrMultiProcessorCount, e));
    TRY(shared_memory_allow(kernel, sizeof(typename L::Shared), e));
    Job job = {l.m, l.n, l.k / DEPTH, ceil_div(l.m, PAIR * ROWS), ceil_div(l.n, L::COLUMNS), 16, l.bias, l.extra, l.tickets};
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {PAIR, 1, 1};
    cudaLaunchConfig_t config = {};
    config.gridDim = blocks / PAIR * PAIR;
    config.blockDim = THREADS;
    config.dynamicSmemBytes = sizeof(typename L::Shared);
    config.stream = stream;
    config.attrs = &attribute;
    config.numAttrs = 1;
    return CUDA_CALL(cudaLaunchKernelEx(&config, kernel, a, b, out, second, job), e);
}

} // namespace

#endif
