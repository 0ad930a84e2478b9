// linear_sm90: see linear_sm90.cuh.
//
// Blocks are persistent, one a multiprocessor, in pairs: a pair's tile is 256 rows, a block's 128, and each block fetches
// half of the pair's part of b for both. A block is a producer thread, which copies stages of 64 of the summed dimension
// to shared memory, and two warpgroups that take turns: while one multiplies its tile, the other finishes and stores its
// last one. A row's sums do not depend on other rows.
#include "cuda/linear_sm90.cuh"

#include "cuda/gelu.cuh"
#include "cuda/sm90.cuh"
#include "cuda/vec.cuh"
#ifndef GNS_FP32

namespace {

enum { ROWS = 128, HALVES = 2, GROUPS = 2, WARPS = 4, PAIR = 2, DEPTH = 64, HALF_DEPTH = 32 };
enum { TURNS = 4, THREADS = (GROUPS + 1) * WARPGROUP, PRODUCER_REGISTERS = 24, WORKER_REGISTERS = 240 };

template <int COLUMNS_, int STAGES_> struct Layout {
    static constexpr int COLUMNS = COLUMNS_, STAGES = STAGES_, PANELS = COLUMNS / PANEL;
    static constexpr int A_BYTES = ROWS * PANEL_ROW_BYTES, B_BYTES = COLUMNS * PANEL_ROW_BYTES;
    static constexpr int SLOT_ROWS = 16, SLOT_BYTES = SLOT_ROWS * COLUMNS * (int)sizeof(real);
    struct Shared {
        char a[STAGES][A_BYTES], b[STAGES][B_BYTES], slot[GROUPS][WARPS][SLOT_BYTES];
        alignas(16) real bias[GROUPS][WARPS][COLUMNS];
        uint64_t full[STAGES], empty[STAGES], own_full[GROUPS][WARPS];
        uint64_t tile_full[TURNS], tile_empty[TURNS];
        int tile[TURNS];
    };
};

template <LinearEpilogue e> constexpr bool HAS_BIAS = e == LINEAR_BIAS || e == LINEAR_GELU || e == LINEAR_RESIDUAL;
template <LinearEpilogue e> constexpr bool HAS_EXTRA = e == LINEAR_RESIDUAL || e == LINEAR_DGELU;

// Tiles of a pair of blocks go in bands of `band` tiles side by side, so that the band's part of b stays in L2.
struct Job {
    int m, n, depths; // depths: stages a tile
    int tiles_m, tiles_n, band;
    const real *bias;
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

// The tile of a turn. AS_WARP: all lanes of a warp call, else one thread.
template <bool AS_WARP, class Shared> __device__ int tile_of(Shared &s, int turn) {
    barrier_wait(&s.tile_full[turn % TURNS], turn / TURNS & 1);
    const int tile = s.tile[turn % TURNS];
    if (AS_WARP) __syncwarp();
    if (!AS_WARP || threadIdx.x % WARP == 0) barrier_arrive_at(&s.tile_empty[turn % TURNS], 0);
    return AS_WARP ? uniform(tile) : tile;
}

template <class L, bool B_ALONG>
__device__ void produce(typename L::Shared &s, const CUtensorMap *a, const CUtensorMap *b, const Job &job, int rank) {
    Ring<L::STAGES> ring;
    int drawn = rank == 0 ? tile_draw(job) : 0, ends = 0;
    for (int turn = 0; ends < GROUPS; turn++) {
        uint64_t *tile_full = &s.tile_full[turn % TURNS];
        if (rank == 0) {
            barrier_wait(&s.tile_empty[turn % TURNS], (turn / TURNS & 1) ^ 1);
            for (int to = 0; to < PAIR; to++) send_at(&s.tile[turn % TURNS], drawn, tile_full, to);
            if (drawn >= 0) drawn = tile_draw(job); // it is there when this tile has been fetched
        }
        barrier_expect(tile_full, sizeof(int));
        const int tile = tile_of<false>(s, turn);
        if (tile < 0) {
            ends++;
            continue;
        }
        const Place place = place_of<L>(job, tile, rank);
#        pragma unroll 1
        for (int k = 0; k < job.depths; k++) {
            uint64_t *full = &s.full[ring.stage];
            char *b_half = s.b[ring.stage] + rank * (L::B_BYTES / PAIR);
            barrier_wait(&s.empty[ring.stage], ring.parity ^ 1);
            barrier_expect(full, L::A_BYTES + L::B_BYTES);
            copy_box_in(s.a[ring.stage], a, full, 0, place.row, k, 0);
            if (B_ALONG) copy_box_in_all(b_half, b, full, 0, place.column + rank * L::COLUMNS / PAIR, k, 0, 3);
            else copy_box_in_all(b_half, b, full, 0, k * DEPTH + rank * HALF_DEPTH, place.column / PANEL, 0, 3);
            ring.advance();
        }
    }
}

__device__ float2 unpacked(unsigned x) { return {__uint_as_float(x << 16), __uint_as_float(x & 0xffff0000u)}; }
__device__ unsigned packed(float x, float y) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(x, y);
    return *(const unsigned *)&pair;
}

// Two neighbouring sums, with the bias, as they are stored. x: of extra.
template <LinearEpilogue EPILOGUE> __device__ unsigned finished(float v0, float v1, unsigned x) {
    const float2 extra = unpacked(x);
    if (EPILOGUE == LINEAR_DGELU) return packed(v0 * gelu_derivative(extra.x), v1 * gelu_derivative(extra.y));
    const unsigned rounded = packed(v0, v1);
    if (EPILOGUE != LINEAR_RESIDUAL) return rounded;
    const float2 r = unpacked(rounded);
    return packed(r.x + extra.x, r.y + extra.y);
}

// A warp's 16 x 16 at columns 16 j of its slot: four 8 x 8 matrices, as stmatrix and ldmatrix have them.
__device__ unsigned matrices_at(char *slot, int j) {
    const int lane = threadIdx.x % WARP, row = lane % 16, piece = (2 * (j % 4) + lane / 16) ^ row % 8;
    return shared_address(slot + (j / 4 * 16 + row) * PANEL_ROW_BYTES + piece * 16);
}
__device__ void matrices_store(char *slot, int j, const unsigned (&r)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(matrices_at(slot, j)),
                 "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
                 : "memory");
}
__device__ void matrices_load(char *slot, int j, unsigned (&r)[4]) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(matrices_at(slot, j))
                 : "memory");
}

__device__ void matrices_gelu(char *slot, int j, unsigned (&r)[4]) {
    matrices_load(slot, j, r);
    UNROLL_FOR (int q = 0; q < 4; q++) {
        const float2 v = unpacked(r[q]);
        r[q] = packed(gelu(v.x), gelu(v.y));
    }
}

// Sends a warp's slot out.
__device__ void slot_out(const CUtensorMap *map, const char *slot, int row, int column) {
    fence_before_copy_out();
    __syncwarp();
    if (threadIdx.x % WARP == 0) {
        copy_box_out(map, slot, 0, row, column / PANEL);
        copy_out_commit();
    }
}

// Waits until the warp's slot has been read by the copy out.
__device__ void slot_wait() {
    if (threadIdx.x % WARP == 0) copy_out_wait_read();
    __syncwarp();
}

// Stores a warp's 16 rows of sums; extra is in the slot.
template <class L, LinearEpilogue EPILOGUE>
__device__ void rows_out(const float (&c)[L::COLUMNS / 2], char *slot, const real *bias, const CUtensorMap *out,
                         const CUtensorMap *second, int row, int column) {
    UNROLL_FOR (int j = 0; j < L::COLUMNS / 16; j++) {
        unsigned r[4], x[4] = {};
        if (HAS_EXTRA<EPILOGUE>) matrices_load(slot, j, x);
        UNROLL_FOR (int q = 0; q < 4; q++) { // 8 columns on with q / 2, 8 rows on with q % 2
            float2 add = {0.0f, 0.0f};
            if (HAS_BIAS<EPILOGUE>)
                add = unpacked(*(const unsigned *)(bias + 16 * j + q / 2 * 8 + threadIdx.x % 4 * 2));
            const int i = 8 * j + 4 * (q / 2) + 2 * (q % 2);
            r[q] = finished<EPILOGUE>(c[i] + add.x, c[i + 1] + add.y, x[q]);
        }
        matrices_store(slot, j, r);
    }
    slot_out(out, slot, row, column);
    if constexpr (EPILOGUE == LINEAR_GELU) {
        constexpr int HELD = L::COLUMNS / 64; // computed before the copy out has read the slot
        unsigned held[HELD][4];
        UNROLL_FOR (int j = 0; j < HELD; j++) matrices_gelu(slot, j, held[j]);
        slot_wait();
        UNROLL_FOR (int j = 0; j < HELD; j++) matrices_store(slot, j, held[j]);
        UNROLL_FOR (int j = HELD; j < L::COLUMNS / 16; j++) {
            unsigned r[4];
            matrices_gelu(slot, j, r);
            matrices_store(slot, j, r);
        }
        slot_out(second, slot, row, column);
    }
}

// A stage has been read, in both blocks: a warp's part.
__device__ void stage_release(uint64_t *empty, int rank) {
    __syncwarp();
    if (threadIdx.x % WARP < PAIR) barrier_arrive_at(empty, rank ^ (int)(threadIdx.x % WARP));
}

// The sums of a warpgroup's tile, of its first N columns.
template <class L, bool B_ALONG, int N>
__device__ void multiply(float (&c)[HALVES][L::COLUMNS / 2], typename L::Shared &s, Ring<L::STAGES> ring, int depths,
                         int rank) {
    int previous = 0;
#        pragma unroll 1
    for (int k = 0; k < depths; k++) {
        barrier_wait(&s.full[ring.stage], ring.parity);
        const uint64_t a = operand(s.a[ring.stage], 0);
        const uint64_t b = operand(s.b[ring.stage], HALF_DEPTH * PANEL_ROW_BYTES);
        UNROLL_FOR (int h = 0; h < HALVES; h++) registers_settle(c[h]);
        wgmma_fence();
        UNROLL_FOR (int i = 0; i < DEPTH / 16; i++)
            UNROLL_FOR (int h = 0; h < HALVES; h++) {
                const int b_step = B_ALONG ? 2 * i : (i / 2 * (L::B_BYTES / PAIR) >> 4) + step_down_columns(i % 2);
                wgmma<true, B_ALONG>(reinterpret_cast<float(&)[N / 2]>(c[h]),
                                     a + 2 * i + (h * (L::A_BYTES / HALVES) >> 4), b + b_step, k > 0 || i > 0);
            }
        wgmma_commit();
        if (k > 0) {
            wgmma_wait<1>();
            stage_release(&s.empty[previous], rank);
        }
        previous = ring.stage;
        ring.advance();
    }
    wgmma_wait<0>();
    stage_release(&s.empty[previous], rank);
    UNROLL_FOR (int h = 0; h < HALVES; h++) registers_settle(c[h]);
}

template <class L, LinearEpilogue EPILOGUE, bool B_ALONG>
__device__ void work(typename L::Shared &s, const CUtensorMap *out, const CUtensorMap *second, const Job &job,
                     int rank) {
    constexpr bool BIAS = HAS_BIAS<EPILOGUE>, EXTRA = HAS_EXTRA<EPILOGUE>;
    const int group = uniform(threadIdx.x / WARPGROUP), warp = uniform(threadIdx.x / WARP % WARPS);
    const int lane = threadIdx.x % WARP;
    char *slot = s.slot[group][warp];
    real *bias = s.bias[group][warp];
    uint64_t *own_full = &s.own_full[group][warp];
    float c[HALVES][L::COLUMNS / 2];
    unsigned own_parity = 0;
    for (int turn = group;; turn += GROUPS) {
        const int tile = tile_of<true>(s, turn);
        if (tile < 0) break;
        Place place = place_of<L>(job, tile, rank);
        place.row += warp * L::SLOT_ROWS;
        if ((BIAS || EXTRA) && lane == 0) {
            const int bytes = BIAS ? min(L::COLUMNS, job.n - place.column) * (int)sizeof(real) : 0;
            barrier_expect(own_full, bytes + (EXTRA ? L::SLOT_BYTES : 0));
            if (BIAS) copy_run_in(bias, job.bias + place.column, bytes, own_full);
            if (EXTRA) {
                copy_out_wait_read();
                copy_box_in(slot, second, own_full, 0, place.row, place.column / PANEL);
            }
        }
        Ring<L::STAGES> ring;
        ring.stage = turn * job.depths % L::STAGES, ring.parity = turn * job.depths / L::STAGES & 1;
        if (job.n - place.column > PANEL) multiply<L, B_ALONG, L::COLUMNS>(c, s, ring, job.depths, rank);
        else multiply<L, B_ALONG, PANEL>(c, s, ring, job.depths, rank);
        UNROLL_FOR (int h = 0; h < HALVES; h++) {
            if ((BIAS && h == 0) || EXTRA) {
                barrier_wait(own_full, own_parity);
                own_parity ^= 1;
            }
            if (!EXTRA) slot_wait();
            rows_out<L, EPILOGUE>(c[h], slot, bias, out, second, place.row, place.column);
            place.row += ROWS / HALVES;
            if (EXTRA && h == 0 && lane == 0) {
                barrier_expect(own_full, L::SLOT_BYTES);
                copy_out_wait_read();
                copy_box_in(slot, second, own_full, 0, place.row, place.column / PANEL);
            }
        }
        __syncwarp(); // before the bias is overwritten
    }
    if (lane == 0) copy_out_wait();
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
            barrier_init(&s.empty[i], PAIR * WARPS);
        }
        for (int i = 0; i < GROUPS * WARPS; i++) barrier_init(&s.own_full[0][i], 1);
        for (int i = 0; i < TURNS; i++) {
            barrier_init(&s.tile_full[i], 1);
            barrier_init(&s.tile_empty[i], PAIR * (1 + WARPS));
        }
        barriers_publish();
    }
    cluster_sync();
    if (group == GROUPS) {
        registers_give<PRODUCER_REGISTERS>();
        if (threadIdx.x == GROUPS * WARPGROUP) produce<L, B_ALONG>(s, &a, &b, job, rank);
    } else {
        registers_take<WORKER_REGISTERS>();
        work<L, EPILOGUE, B_ALONG>(s, &out, &second, job, rank);
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

// The same for copies of a warp's rows, in and out.
int out_map(CUtensorMap *map, const real *matrix, int rows, int columns, int panels, Error *e) {
    const CopyTensor t = {CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
                          3,
                          {PANEL, (cuuint64_t)rows, (cuuint64_t)columns / PANEL},
                          {columns * sizeof(real), PANEL_ROW_BYTES},
                          {PANEL, 16, (cuuint32_t)panels},
                          CU_TENSOR_MAP_L2_PROMOTION_L2_256B};
    return copy_map(map, matrix, t, e);
}

template <class L, LinearEpilogue EPILOGUE, bool B_ALONG> int launch(const Linear &l, cudaStream_t stream, Error *e) {
    const auto kernel = linear_kernel<L, EPILOGUE, B_ALONG>;
    CUtensorMap a, b, out, second;
    int blocks;
    TRY(panels_map(&a, l.a, l.m, l.k, ROWS, 1, e));
    if (B_ALONG) TRY(panels_map(&b, l.b, l.n, l.k, L::COLUMNS / PAIR, 1, e));
    else TRY(panels_map(&b, l.b, l.k, l.n, HALF_DEPTH, L::PANELS, e));
    TRY(out_map(&out, l.out, l.m, l.n, L::PANELS, e));
    const real *other = EPILOGUE == LINEAR_GELU ? l.second : HAS_EXTRA<EPILOGUE> ? l.extra : l.out;
    TRY(out_map(&second, other, l.m, l.n, L::PANELS, e));
    TRY(device_attribute(&blocks, cudaDevAttrMultiProcessorCount, e));
    TRY(shared_memory_allow(kernel, sizeof(typename L::Shared), e));
    Job job = {l.m, l.n, l.k / DEPTH, ceil_div(l.m, PAIR * ROWS), ceil_div(l.n, L::COLUMNS), 16, l.bias, l.tickets};
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

typedef Layout<192, 4> Tiles;

} // namespace

int linear_sm90_usable(bool *yes, int n, int k, Error *e) {
    cudaFuncAttributes attributes;
    CUDA_TRY(cudaFuncGetAttributes(&attributes, linear_kernel<Tiles, LINEAR_BIAS, false>), e);
    *yes = attributes.maxThreadsPerBlock >= THREADS && n % PANEL == 0 && k % DEPTH == 0 && k >= Tiles::STAGES * DEPTH;
    return 0;
}

int linear_sm90(const Linear &l, cudaStream_t stream, Error *e) {
    switch (l.epilogue) {
    case LINEAR_PLAIN:
        return (l.transpose_b ? launch<Tiles, LINEAR_PLAIN, true> : launch<Tiles, LINEAR_PLAIN, false>)(l, stream, e);
    case LINEAR_BIAS: return launch<Tiles, LINEAR_BIAS, false>(l, stream, e);
    case LINEAR_GELU: return launch<Tiles, LINEAR_GELU, false>(l, stream, e);
    case LINEAR_RESIDUAL: return launch<Tiles, LINEAR_RESIDUAL, false>(l, stream, e);
    case LINEAR_DGELU: return launch<Tiles, LINEAR_DGELU, true>(l, stream, e);
    }
    return FAIL(e, ERR_INTERNAL, NULL, "no epilogue %d", (int)l.epilogue);
}

#else

int linear_sm90_usable(bool *yes, int, int, Error *) {
    *yes = false;
    return 0;
}

int linear_sm90(const Linear &, cudaStream_t, Error *e) {
    return FAIL(e, ERR_INTERNAL, NULL, "this build has no linear_sm90");
}

#endif
