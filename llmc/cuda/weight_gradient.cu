// weight_gradient: see weight_gradient.cuh.
//
// Blocks are persistent, one per multiprocessor: a feeder warp and two warpgroups that multiply. A block's tile of dW
// is (128, N), a warpgroup's (64, N). A pair of blocks computes neighbouring tiles, along the rows of dW (sharing dY)
// or along its columns (sharing X). Each block fetches half of the shared operand for both, which halves L2 reads.
//
// A step is one tile for one example: all T rows of X and dY. TileSchedule deals steps to pairs.
// 1. A warpgroup sums a step in `e`. After the step it adds e to `total`, and each warp writes its sum of squares of e
//    to a slot. In bf16 without squares e sums all of a pair's steps in a tile and is stored; `total` is not used.
// 2. After a pair's last step in a tile, `total` is stored: to dW if the pair had all examples of the tile, else to a
//    part. Stores overlap the next step, 32 columns per stage. gradient_finish_kernel adds parts in a fixed order.
// 3. The feeder's idle warps sum the columns of dY from shared memory. The block in tile row s sums rows r of a stage
//    with r mod `shares` = s. So each row is read once, and all stages take equal time.
// In e4m3 tokens run along the rows of a stage, 128 per row, so a tile has no panels.
#include "cuda/weight_gradient.cuh"
#include "cuda/sm90.cuh"
#include "cuda/vec.cuh"

#include "math/accumulate.h"

#include <algorithm>
#include <assert.h>
#include <math.h>
#include <type_traits>

enum { TILE_M = WEIGHT_GRADIENT_TILE, PAIR = WEIGHT_GRADIENT_PAIR };
enum { OUT_ROWS = 16, OUT_COLUMNS = 32 }; // a box that a warp copies out

// ---- The schedule: which pair computes which tiles, for which examples ----------------------------------------------

// A level of the schedule deals tiles, with B examples each, to its pairs:
// 1. Whole rounds: each pair gets `whole` tiles, with all B examples.
// 2. The `rest` tiles, fewer than pairs, get `full` pairs each, with `run` examples per pair.
// 3. The next level deals the remaining examples to the remaining pairs, by the same rules.
// So all pairs end at about the same time. At any time the pairs read few places of X and dY, which stay in L2.
struct Level {
    int first, pairs, tile, b, B, whole, rest, run, full; // first, tile, b: first pair, tile and example
    int whole_part, rest_part;                            // first part of the whole tiles; of the rest; < 0: no parts
};

enum { LEVELS_MAX = 8 }; // 5 suffice up to 66 pairs, 400 tiles, 130 examples; level 8 would not balance its pairs

struct TileSchedule { // depends on the shape and number of pairs only
    Level level[LEVELS_MAX];
    int levels, parts, steps; // steps: steps of the busiest pair
};

static TileSchedule schedule_of(int tiles, int B, int pairs) {
    TileSchedule s = {};
    Level l = {};
    l.pairs = pairs, l.B = B, l.whole_part = -1;
    for (int before = 0;;) { // before: steps of earlier levels
        Level &to = s.level[s.levels++];
        l.whole = tiles / l.pairs, l.rest = tiles % l.pairs;
        l.run = !l.rest ? 0 : s.levels == LEVELS_MAX ? l.B : ceil_div(l.rest * l.B, l.pairs);
        l.full = l.rest ? l.B / l.run : 0;
        const int left = l.rest ? l.B - l.full * l.run : 0;
        const bool cut = s.levels > 1 || l.full > 1 || left > 0;
        if (s.levels > 1) l.whole_part = s.parts, s.parts += l.whole * l.pairs;
        l.rest_part = cut ? s.parts : -1;
        if (cut) s.parts += l.rest * l.full;
        s.steps = std::max(s.steps, before + l.whole * l.B + l.run);
        to = l;
        if (left == 0) return s;
        tiles = l.rest, l.tile += l.whole * l.pairs, before += l.whole * l.B;
        l.first += l.rest * l.full, l.pairs -= l.rest * l.full, l.b += l.full * l.run, l.B = left;
    }
}

struct Step {
    int tile, b, part; // part < 0: the pair has the whole tile
    bool last;         // the pair's last step in this tile
};

// Sets *step to step i of a pair; returns false if the pair has fewer steps.
__device__ static inline bool step_at(Step *step, const TileSchedule &s, int pair, int i) {
    for (int k = 0; k < s.levels; k++) {
        const Level &l = s.level[k];
        const int own = pair - l.first, whole = l.whole * l.B;
        if (i < whole) {
            const int tile = i / l.B * l.pairs + own;
            *step = {l.tile + tile, l.b + i % l.B, l.whole_part < 0 ? -1 : l.whole_part + tile, i % l.B == l.B - 1};
            return true;
        }
        i -= whole;
        if (own >= l.rest * l.full) continue;
        if (i >= l.run) return false;
        *step = {l.tile + l.whole * l.pairs + own % l.rest, l.b + own / l.rest * l.run + i,
                 l.rest_part < 0 ? -1 : l.rest_part + own, i == l.run - 1};
        return true;
    }
    return false;
}

// Calls f(part) for each part of cut tile i, in order.
template <typename F> __device__ static inline void each_part(const TileSchedule &s, int i, F f) {
    for (int k = 0; k < s.levels && i >= 0; k++) {
        const Level &l = s.level[k];
        const int whole = k > 0 ? l.whole * l.pairs : 0;
        if (i < whole) f(l.whole_part + i);
        i -= whole;
        for (int j = i < 0 ? l.full : 0; j < l.full; j++) f(l.rest_part + j * l.rest + i);
    }
}

// A launch. A tile here is a tile of a pair: the tiles of its two blocks side by side.
struct GradientJob {
    struct {
        int B, T, in, out;
    } shape;
    TileSchedule schedule;
    int tiles_m, tiles_n, row_blocks, slots; // row_blocks: stages per step; slots: squares per example, one per warp
    bool add;
    float *squares;    // (B, slots) of g_b / scale, or NULL
    unsigned *arrived; // (1) number of blocks that have added their squares
    float *columns;    // column sums of dY over each share of an example's rows (columns_split), or NULL
    int shares;
    const int *row_at;
    float *rows;
    WeightGradientPairs pairs;
    float scale; // factor of e4m3 products

    // Tiles are numbered along the shorter side first.
    __device__ int m(int tile) const { return tiles_m <= tiles_n ? tile % tiles_m : tile / tiles_n; }
    __device__ int n(int tile) const { return tiles_m <= tiles_n ? tile / tiles_m : tile % tiles_n; }
};

// ---- Shared memory --------------------------------------------------------------------------------------------------

enum { ROWS = 64, WORKERS = 2 * WARPGROUP, THREADS = WORKERS + WARPGROUP, WARPS = WORKERS / WARP, COLUMN_WARPS = 3 };
enum { OUT_BYTES = OUT_ROWS * OUT_COLUMNS * sizeof(float) };

// An operand (64 rows, COLUMNS) in panels of 64 columns. A narrower last panel has its own map. A SHARED operand is
// fetched as two halves of 32 rows.
template <int COLUMNS, bool SHARED> struct Operand {
    static constexpr int WHOLE = COLUMNS / PANEL, PANELS = (COLUMNS + PANEL - 1) / PANEL;
    static constexpr int BOX_ROWS = SHARED ? ROWS / 2 : ROWS;
    static constexpr int PANEL_BYTES = BOX_ROWS * PANEL_ROW_BYTES, BOX_BYTES = PANELS * PANEL_BYTES;
    static constexpr int BYTES = PANELS * ROWS * PANEL_ROW_BYTES, FETCHED_BYTES = ROWS * COLUMNS * sizeof(real);

    __device__ static constexpr int row(int r) { return r / BOX_ROWS * BOX_BYTES + r % BOX_ROWS * PANEL_ROW_BYTES; }
    __device__ static constexpr int step(int k) { return row(16 * k) >> 4; } // offset of the k-th wgmma's rows

    // Fetches the operand; if SHARED, fetches this block's half for both blocks. narrow: map of the narrower panel.
    __device__ static void load(char *tile, const CUtensorMap *map, const CUtensorMap *narrow, uint64_t *full, int row,
                                int column, int b, int half) {
        UNROLL_FOR (int p = 0; p < PANELS; p++) {
            const CUtensorMap *of_panel = p < WHOLE ? map : narrow;
            if (SHARED)
                copy_box_in_pair(tile + half * BOX_BYTES + p * PANEL_BYTES, of_panel, full, column + p * PANEL,
                                 row + half * BOX_ROWS, b);
            else copy_box_in(tile + p * PANEL_BYTES, of_panel, full, column + p * PANEL, row, b);
        }
    }
};

// An operand in e4m3 (COLUMNS, 128 tokens). A SHARED operand is fetched as two halves of its columns.
template <int COLUMNS, bool SHARED> struct OperandE4m3 {
    static constexpr int BOX_COLUMNS = SHARED ? COLUMNS / 2 : COLUMNS, PANEL_BYTES = PANEL * PANEL_ROW_BYTES;
    static constexpr int BYTES = COLUMNS * PANEL_ROW_BYTES, FETCHED_BYTES = BYTES;

    __device__ static constexpr int step(int k) { return 2 * k; }

    __device__ static void load(char *tile, const CUtensorMap *map, const CUtensorMap *, uint64_t *full, int token,
                                int column, int b, int half) {
        const int first = SHARED ? half * BOX_COLUMNS : 0;
        tile += first * PANEL_ROW_BYTES, column += first;
        if (SHARED) copy_box_in_pair(tile, map, full, token, column, b);
        else copy_box_in(tile, map, full, token, column, b);
    }
};

// ALONG_M: the blocks of a pair lie along the rows of dW; otherwise along the columns of dW.
template <int N_, bool ALONG_M, bool E4M3_> struct GradientLayout {
    static constexpr bool E4M3 = E4M3_;
    static constexpr int N = N_, PAIR_M = ALONG_M ? PAIR * TILE_M : TILE_M, PAIR_N = ALONG_M ? N : PAIR * N;
    static constexpr int DEPTH = E4M3 ? 2 * ROWS : ROWS; // tokens per stage
    typedef std::conditional_t<E4M3, OperandE4m3<TILE_M, !ALONG_M>, Operand<TILE_M, !ALONG_M>> X;
    typedef std::conditional_t<E4M3, OperandE4m3<N, ALONG_M>, Operand<N, ALONG_M>> Y;
    static constexpr int STAGE_BYTES = X::BYTES + Y::BYTES, FETCHED_BYTES = X::FETCHED_BYTES + Y::FETCHED_BYTES;
    static constexpr int STAGES = (227 * 1024 - SHARED_ALIGNMENT - WARPS * (int)OUT_BYTES) / STAGE_BYTES;
    static constexpr int WORKER_REGISTERS = N == 208 ? 232 : 224, FEEDER_REGISTERS = N == 208 ? 40 : 56;
    static constexpr bool SUMS_COLUMNS = N != 208 && !E4M3; // N = 208 leaves no registers

    struct Shared {
        char x[STAGES][X::BYTES], y[STAGES][Y::BYTES], out[WARPS][OUT_BYTES];
        uint64_t full[STAGES], empty[STAGES];
    };

    // First row and column of the block's tile.
    __device__ static int row(const GradientJob &job, int tile, int rank) {
        return job.m(tile) * PAIR_M + (ALONG_M ? rank * TILE_M : 0);
    }
    __device__ static int column(const GradientJob &job, int tile, int rank) {
        return job.n(tile) * PAIR_N + (ALONG_M ? 0 : rank * N);
    }
};

namespace {

// dy_narrow: boxes for a tile's columns beyond whole panels; dw_narrow, parts_narrow: beyond whole OUT_COLUMNS.
struct GradientMaps {
    CUtensorMap x, dy, dy_narrow, dw, dw_narrow, parts, parts_narrow;
};

#ifdef SM90_CODE

// ---- The feeder's warpgroup -----------------------------------------------------------------------------------------

template <class L>
__device__ void operands_feed(typename L::Shared &s, const GradientMaps &maps, const GradientJob &job, int cluster,
                              int rank) {
    Ring<L::STAGES> ring;
    Step step;
    for (int i = 0; step_at(&step, job.schedule, cluster, i); i++) {
        const int row = L::row(job, step.tile, rank), column = L::column(job, step.tile, rank);
#    pragma unroll 1
        for (int t = 0; t < job.shape.T; t += L::DEPTH) {
            barrier_wait(&s.empty[ring.stage], ring.parity ^ 1);
            barrier_expect(&s.full[ring.stage], L::FETCHED_BYTES);
            L::X::load(s.x[ring.stage], &maps.x, NULL, &s.full[ring.stage], t, row, step.b, rank);
            L::Y::load(s.y[ring.stage], &maps.dy, &maps.dy_narrow, &s.full[ring.stage], t, column, step.b, rank);
            ring.advance();
        }
    }
    for (int i = 0; i < L::STAGES; i++) { // wait until both blocks have released all stages
        barrier_wait(&s.empty[ring.stage], ring.parity ^ 1);
        ring.advance();
    }
}

// Sums columns of dY over the block's share of rows, in panels `first`, first + COLUMN_WARPS, ... A lane sums 8 columns
// of every fourth row of the share.
template <class L>
__device__ void dy_columns_sum(typename L::Shared &s, const GradientJob &job, int cluster, int rank, int first) {
    constexpr int PANELS = (L::Y::PANELS + COLUMN_WARPS - 1) / COLUMN_WARPS; // panels per warp
    const int lane = threadIdx.x % WARP, piece = lane % 8, row0 = lane / 8;
    Ring<L::STAGES> ring;
    Step step;
    for (int i = 0; step_at(&step, job.schedule, cluster, i); i++) {
        const int share = L::row(job, step.tile, rank) / TILE_M, column = L::column(job, step.tile, rank);
        const int row = share < job.shares ? share + row0 * job.shares : ROWS;
        float sum[PANELS][VEC] = {};
#    pragma unroll 1
        for (int k = 0; k < job.row_blocks; k++) {
            barrier_wait(&s.full[ring.stage], ring.parity);
#    pragma unroll 2
            for (int r = row; r < ROWS; r += WARP / 8 * job.shares)
                UNROLL_FOR (int p = 0; p < PANELS; p++) {
                    const int panel = first + p * COLUMN_WARPS;
                    if (panel >= L::Y::PANELS) continue;
                    float v[VEC];
                    pack_get(v, *(const Pack<VEC> *)(s.y[ring.stage] + panel * L::Y::PANEL_BYTES + L::Y::row(r) +
                                                     (piece ^ r % 8) * 16));
                    floats_add(sum[p], v);
                }
            fence_before_copies(); // before the next copy into the stage
            pair_arrive(&s.empty[ring.stage], rank);
            ring.advance();
        }
        float *to = job.columns + ((size_t)step.b * (job.shares + 1) + share) * job.shape.out + column;
        UNROLL_FOR (int p = 0; p < PANELS; p++) {
            const int c = (first + p * COLUMN_WARPS) * PANEL + piece * VEC;
            UNROLL_FOR (int j = 0; j < VEC; j++) {
                sum[p][j] += __shfl_xor_sync(~0u, sum[p][j], 8);
                sum[p][j] += __shfl_xor_sync(~0u, sum[p][j], 16);
            }
            if (row0 == 0 && share < job.shares && c < L::N && column + c < job.shape.out) floats_store(to + c, sum[p]);
        }
    }
}

// ---- The workers ----------------------------------------------------------------------------------------------------

// Calls f(0), f(1), ..., f(COUNT - 1) with compile-time constants.
template <int I, int COUNT, class F> __device__ inline void times(F &&f) {
    if constexpr (I < COUNT) {
        f(std::integral_constant<int, I>());
        times<I + 1, COUNT>(f);
    }
}

// Destination of a warp's rows.
enum Target { NOWHERE, TO_DW, TO_PARTS };
struct Out {
    Target target;
    int row, column;
};

// Stores columns [32 C, 32 C + 32) of a warp's rows, fewer at the tile's end, and zeroes them in c. place: the warp's
// shared memory. A launch adds to each address once.
template <int C, int COUNT>
__device__ void columns_out(float (&c)[COUNT], char *place, const Out &out, const GradientMaps &maps, bool add) {
    constexpr int LEFT = 2 * COUNT - OUT_COLUMNS * C;
    constexpr bool NARROW = LEFT < OUT_COLUMNS;
    const int lane = threadIdx.x % WARP, column = out.column + OUT_COLUMNS * C;
    if (lane == 0) copy_out_wait_read(); // until the previous copy has read `place`
    __syncwarp();
    UNROLL_FOR (int i = 0; i < (NARROW ? LEFT : OUT_COLUMNS) / 8; i++)
        UNROLL_FOR (int h = 0; h < 2; h++) {
            char *piece = place + (lane / 4 + 8 * h) * PANEL_ROW_BYTES + ((2 * i + lane % 4 / 2) ^ lane / 4) * 16;
            float &x = c[16 * C + 4 * i + 2 * h], &y = c[16 * C + 4 * i + 2 * h + 1];
            *(float2 *)(piece + lane % 2 * 8) = make_float2(x, y);
            x = y = 0.0f;
        }
    fence_before_copies();
    __syncwarp();
    if (lane > 0) return;
    const CUtensorMap *dw = NARROW ? &maps.dw_narrow : &maps.dw;
    if (out.target == TO_PARTS) copy_box_out(NARROW ? &maps.parts_narrow : &maps.parts, place, column, out.row, 0);
    else if (add) copy_box_add(dw, place, column, out.row, 0);
    else copy_box_out(dw, place, column, out.row, 0);
    copy_out_commit();
}

// Copies each of a warp's 16 rows to job.rows, unless its row_at is 0. at: in lane l, row_at of row l.
template <int COUNT>
__device__ void rows_out(const float (&e)[COUNT], const GradientJob &job, int at, int b, int column) {
    const int lane = threadIdx.x % WARP;
    UNROLL_FOR (int h = 0; h < 2; h++) {
        const int t = __shfl_sync(~0u, at, lane / 4 + 8 * h);
        if (t == 0) continue;
        float *to = job.rows + ((size_t)b * job.shape.T + t - 1) * job.shape.out + column + lane % 4 * 2;
        UNROLL_FOR (int i = 0; i < COUNT / 4; i++)
            if (column + 8 * i < job.shape.out)
                *(float2 *)(to + 8 * i) = make_float2(e[4 * i + 2 * h], e[4 * i + 2 * h + 1]);
    }
}

// Awaits the ring's stage, then issues the product e = x^T dy + (accumulate ? e : 0) of this stage as one group.
template <class L>
__device__ inline void stage_multiply(float (&e)[L::N / 2], typename L::Shared &s, const Ring<L::STAGES> &ring,
                                      int group, int accumulate) {
    barrier_wait(&s.full[ring.stage], ring.parity);
    const uint64_t x = operand(s.x[ring.stage] + group * L::X::PANEL_BYTES, L::X::PANEL_BYTES);
    const uint64_t y = operand(s.y[ring.stage], L::Y::PANEL_BYTES);
    registers_settle(e);
    wgmma_fence();
    UNROLL_FOR (int k = 0; k < ROWS / 16; k++) {
        const uint64_t x_step = x + L::X::step(k), y_step = y + L::Y::step(k);
        if constexpr (L::E4M3) wgmma_e4m3(e, x_step, y_step, k > 0 ? 1 : accumulate);
        else wgmma<false, false>(e, x_step, y_step, k > 0 ? 1 : accumulate);
    }
    wgmma_commit();
}

// Returns the destination of the warp's rows after a step: NOWHERE unless it is the pair's last step in the tile.
template <class L> __device__ inline Out out_of(const Step &step, const GradientJob &job, int rank, int warp) {
    if (!step.last) return {};
    if (step.part >= 0) return {TO_PARTS, (step.part * PAIR + rank) * TILE_M + warp * OUT_ROWS, 0};
    return {TO_DW, L::row(job, step.tile, rank) + warp * OUT_ROWS, L::column(job, step.tile, rank)};
}

// total += e; in e4m3 total += scale e. Returns the lane's sum of squares of e.
template <bool E4M3, int COUNT>
__device__ inline float add_example(float (&total)[COUNT], const float (&e)[COUNT], float scale) {
    float q[4] = {};
    UNROLL_FOR (int j = 0; j < COUNT; j++) {
        q[j % 4] = add_square(q[j % 4], e[j]);
        total[j] = E4M3 ? fmaf(e[j], scale, total[j]) : total[j] + e[j];
    }
    return (q[0] + q[1]) + (q[2] + q[3]);
}

// Lane l returns row_at of the warp's row l, or 0.
__device__ inline int row_at(const GradientJob &job, int b, int row) {
    const int lane = threadIdx.x % WARP;
    const bool is = job.row_at && lane < OUT_ROWS && row + lane < job.shape.in;
    return is ? job.row_at[(size_t)b * job.shape.in + row + lane] : 0;
}

// Computes all steps of a warpgroup.
template <class L, bool SQUARES>
__device__ void gradient_work(typename L::Shared &s, const GradientMaps &maps, const GradientJob &job, int cluster,
                              int rank) {
    constexpr int PIECES = (L::N + OUT_COLUMNS - 1) / OUT_COLUMNS;
    constexpr bool BY_STEP = SQUARES || L::E4M3;
    const int group = uniform(threadIdx.x / WARPGROUP), warp = uniform(threadIdx.x / WARP), lane = threadIdx.x % WARP;
    Ring<L::STAGES> ring;
    float e[L::N / 2], total[L::N / 2] = {}; // total: used if BY_STEP
    float squares = 0.0f, *square = NULL;    // the lane's sum for the previous step; the warp's slot
    auto square_out = [&]() {
        const float sum = SQUARES && square ? warp_sum(squares) : 0.0f;
        if (SQUARES && square && lane == 0) *square = sum;
    };
    Out out = {};
    Step step;
    bool more = step_at(&step, job.schedule, cluster, 0);
    for (int i = 0; more;) {
        int blocks = job.row_blocks, previous = ring.stage, k = 1;
        for (; !BY_STEP && !step.last; blocks += job.row_blocks) step_at(&step, job.schedule, cluster, ++i);
        stage_multiply<L>(e, s, ring, group, 0);
        ring.advance();
        square_out();
        auto next = [&]() {
            stage_multiply<L>(e, s, ring, group, 1);
            wgmma_wait<1>();
            pair_arrive(&s.empty[previous], rank);
            previous = ring.stage;
            ring.advance();
            k++;
        };
        if constexpr (BY_STEP) {
            if (out.target != NOWHERE) {
                times<0, PIECES>([&](auto c) {
                    columns_out<c>(total, s.out[warp], out, maps, job.add);
                    if (k < blocks) next();
                });
            }
        }
#    pragma unroll 1
        while (k < blocks) next();
        // The code up to wgmma_wait runs while the last products are in flight.
        const int b = step.b, row = L::row(job, step.tile, rank) + warp * OUT_ROWS;
        const int column = L::column(job, step.tile, rank), at = SQUARES && !L::E4M3 ? row_at(job, b, row) : 0;
        if (SQUARES) square = job.squares + (size_t)b * job.slots + (step.tile * PAIR + rank) * WARPS + warp;
        out = out_of<L>(step, job, rank, warp);
        more = step_at(&step, job.schedule, cluster, ++i);
        wgmma_wait<0>();
        pair_arrive(&s.empty[previous], rank);
        registers_settle(e);
        if constexpr (BY_STEP) {
            squares = add_example<L::E4M3>(total, e, job.scale);
            if (!L::E4M3 && job.row_at) rows_out(e, job, at, b, column);
        } else times<0, PIECES>([&](auto c) { columns_out<c>(e, s.out[warp], out, maps, job.add); });
    }
    square_out();
    if (BY_STEP && out.target != NOWHERE)
        times<0, PIECES>([&](auto c) { columns_out<c>(total, s.out[warp], out, maps, job.add); });
    if (lane == 0) copy_out_wait();
    __syncwarp();
}

#endif

template <class L, bool SQUARES>
__global__ void __launch_bounds__(SM90_THREADS(THREADS), 1)
    product_kernel(const __grid_constant__ GradientMaps maps, const __grid_constant__ GradientJob job) {
#ifdef SM90_CODE
    auto &s = *(typename L::Shared *)shared_memory();
    const int number = blockIdx.x / PAIR, rank = blockIdx.x % PAIR;
    const int cluster = uniform(job.pairs.place[number]);
    if (threadIdx.x == 0) {
        for (int i = 0; i < L::STAGES; i++) {
            barrier_init(&s.full[i], 1);
            barrier_init(&s.empty[i], (WARPS + (job.columns ? COLUMN_WARPS : 0)) * PAIR);
        }
        barriers_publish();
    }
    __syncthreads();
    cluster_sync();
    after_allow();
    after_wait();
    if (blockIdx.x == 0 && threadIdx.x == 0) *job.arrived = 0;
    // Each branch ends with cluster_sync: until then the other block may write to this block's shared memory.
    if (threadIdx.x >= WORKERS) {
        registers_give<L::FEEDER_REGISTERS>();
        const int warp = threadIdx.x / WARP - WARPS;
        if (threadIdx.x == WORKERS) operands_feed<L>(s, maps, job, cluster, rank);
        if constexpr (L::SUMS_COLUMNS)
            if (warp > 0 && job.columns) dy_columns_sum<L>(s, job, cluster, rank, warp - 1);
        __syncwarp();
        cluster_sync();
    } else {
        registers_take<L::WORKER_REGISTERS>();
        gradient_work<L, SQUARES>(s, maps, job, cluster, rank);
        cluster_sync();
    }
#endif
}

// ---- Second kernel: adds parts and squares --------------------------------------------------------------------------

enum { FINISH_THREADS = 512 };

struct GradientFinish {
    GradientJob job;
    const float *parts; // (parts, 2, 128, n)
    float *dw;
    double *squares, *norms, scale; // norms (B); scale multiplies squares
    int examples;                   // number of blocks for squares; the other blocks add parts
    int n, tile_blocks;             // columns of a tile; blocks per tile
    int pair_m, pair_n;             // size of a pair's tile
};

// norms[b] = sum of example b's squares. The last block to arrive adds all norms to *squares, in order.
__device__ void squares_finish(const GradientFinish &f, int b) {
    __shared__ double shared[FINISH_THREADS / WARP];
    const float *slots = f.job.squares + (size_t)b * f.job.slots;
    double sum = 0.0;
    for (int i = threadIdx.x * 4; i < f.job.slots; i += FINISH_THREADS * 4) {
        float v[4];
        floats_load(v, slots + i);
        sum += ((double)v[0] + v[1]) + ((double)v[2] + v[3]);
    }
    sum = block_sum(sum, shared);
    bool last = false;
    if (threadIdx.x == 0) {
        f.norms[b] = sum * f.scale;
        __threadfence();
        last = atomicAdd(f.job.arrived, 1) == (unsigned)f.examples - 1;
    }
    if (!__syncthreads_or(last)) return;
    __threadfence();
    sum = 0.0;
    for (int k = threadIdx.x; k < f.examples; k += FINISH_THREADS) sum += __ldcg(f.norms + k);
    sum = block_sum(sum, shared);
    if (threadIdx.x == 0) *f.squares += sum;
}

// Sums a piece of a tile's parts into dW.
__device__ void parts_finish(const GradientFinish &f, int i) {
    const GradientJob &job = f.job;
    const Level &top = job.schedule.level[0];
    const int quads = TILE_M * f.n / 4, q = i % f.tile_blocks * FINISH_THREADS + threadIdx.x;
    const int index = i / f.tile_blocks / PAIR, rank = i / f.tile_blocks % PAIR, tile = top.whole * top.pairs + index;
    const int row = job.m(tile) * f.pair_m + (f.pair_m > TILE_M ? rank * TILE_M : 0) + q / (f.n / 4);
    const int column = job.n(tile) * f.pair_n + (f.pair_m > TILE_M ? 0 : rank * f.n) + q % (f.n / 4) * 4;
    if (row >= job.shape.in || column >= job.shape.out) return;
    float *to = f.dw + (size_t)row * job.shape.out + column, sum[4] = {}, last[4] = {}, before[4] = {};
    if (job.add) floats_load(before, to);
    each_part(job.schedule, index, [&](int part) { // a part loads while the previous one is added
        float v[4];
        floats_load(v, f.parts + ((size_t)(part * PAIR + rank) * quads + q) * 4);
        floats_add(sum, last);
        UNROLL_FOR (int k = 0; k < 4; k++) last[k] = v[k];
    });
    floats_add(sum, last);
    floats_add(sum, before);
    floats_store(to, sum);
}

__global__ void __launch_bounds__(FINISH_THREADS, 3) gradient_finish_kernel(const __grid_constant__ GradientFinish f) {
#ifdef SM90_CODE
    const int i = blockIdx.x;
    after_wait();
    if (i < f.examples) squares_finish(f, i);
    else parts_finish(f, i - f.examples);
#endif
}

// ---- Host -----------------------------------------------------------------------------------------------------------

// A tile shape and its costs in clocks, measured on an H200. part_clocks: to write and read a part.
struct Tiling {
    int n, pair_m, pair_n, depth; // as in GradientLayout
    bool along_m, e4m3;
    size_t shared_bytes;
    void (*kernel[2])(GradientMaps, GradientJob); // without squares; with them. NULL: not compiled
    double step_clocks(int T, bool squares, bool columns) const {
        const double more = (n % PANEL == 0 ? 75 : columns ? 145 : 85) + (along_m ? 0 : 5);
        return ceil_div(T, depth) * (4.0 * n + more) + (squares ? 540 : 0);
    }
    double part_clocks() const { return PAIR * TILE_M * n * sizeof(float) * 2 / 2600.0; }
};

template <int N, bool ALONG_M, bool E4M3, bool PLAIN = true> constexpr Tiling tiling() {
    typedef GradientLayout<N, ALONG_M, E4M3> L;
    Tiling t = {
        N, L::PAIR_M, L::PAIR_N, L::DEPTH, ALONG_M, E4M3, sizeof(typename L::Shared), {NULL, product_kernel<L, true>}};
    if constexpr (PLAIN) t.kernel[0] = product_kernel<L, false>;
    return t;
}

// Other tiles (160 along the rows, 208 along the columns) won less than 1%, in bf16 on all models, in e4m3 on d12, d48.
const Tiling tilings[] = {tiling<192, true, false>(),  tiling<192, false, false>(), tiling<208, true, false, false>(),
                          tiling<160, false, false>(), tiling<192, true, true>(),   tiling<192, false, true>(),
                          tiling<208, true, true>(),   tiling<160, false, true>()};

} // namespace

// A call: its tiles, and the layout of its workspace (parts, squares, norms, arrivals).
struct GradientPlan {
    Tiling tile;
    GradientJob job; // without pointers
    size_t squares, norms, bytes;
};

// In this ColumnSplit a row is one share of an example, and a run is one row.
static ColumnSplit columns_split(WeightGradientShape s) {
    const int shares = std::min(ceil_div(s.in, TILE_M), (int)ROWS), blocks = s.B * shares;
    return {blocks, shares, 1, blocks, blocks + s.B};
}

size_t weight_gradient_column_bytes(WeightGradientShape s) { return column_bytes(columns_split(s), 1, s.out); }

// Returns the fastest plan. squares, columns: the plan must also compute these.
static GradientPlan plan_of(WeightGradientShape s, bool squares, bool columns, int clusters) {
    GradientPlan p = {};
    double best = INFINITY;
    for (const Tiling &t : tilings) {
        if (t.e4m3 != s.e4m3 || !t.kernel[squares] || (t.n == 208 && columns)) continue; // other type, or not compiled
        const int tiles_m = ceil_div(s.in, t.pair_m), tiles_n = ceil_div(s.out, t.pair_n);
        const TileSchedule schedule = schedule_of(tiles_m * tiles_n, s.B, clusters);
        const double cost = schedule.steps * t.step_clocks(s.T, squares, columns) + schedule.parts * t.part_clocks();
        if (cost >= best) continue;
        best = cost, p.tile = t, p.job.schedule = schedule, p.job.tiles_m = tiles_m, p.job.tiles_n = tiles_n;
    }
    p.job.shape = {s.B, s.T, s.in, s.out}, p.job.row_blocks = ceil_div(s.T, p.tile.depth);
    p.job.slots = p.job.tiles_m * p.job.tiles_n * PAIR * WARPS;
    p.job.shares = columns_split(s).T;
    p.squares = (size_t)p.job.schedule.parts * PAIR * TILE_M * p.tile.n * sizeof(float);
    p.norms = p.squares + round_up((size_t)s.B * p.job.slots * sizeof(float), 16);
    p.bytes = p.norms + round_up((s.B + 1) * sizeof(double), 16);
    return p;
}

size_t weight_gradient_workspace_bytes(WeightGradientShape s, int clusters) {
    size_t most = 0;
    for (bool squares : {false, true})
        for (bool columns : {false, !s.e4m3}) most = size_max(most, plan_of(s, squares, columns, clusters).bytes);
    return most;
}

static int maps_of(GradientMaps *maps, const Tiling &t, WeightGradientShape s, const void *x, const void *dy, float *dw,
                   float *parts, int part_rows, Error *e) {
    const auto left_of = [](int n, int piece) { return n % piece ? n % piece : piece; };
    const int out = left_of(t.n, OUT_COLUMNS);
    // A box of map_in or map_codes lies in one example; its rows beyond T arrive as zeros.
    const auto map_in = [&](CUtensorMap *map, const void *from, int columns, int rows, int wide) {
        return copy_map(map, from, {REAL_MAP, {columns, s.T, s.B}, {wide, rows, 1}, CU_TENSOR_MAP_L2_PROMOTION_L2_128B},
                        e);
    };
    const auto map_codes = [&](CUtensorMap *map, const void *from, int columns, int wide) {
        return copy_map(map, from, {CU_TENSOR_MAP_DATA_TYPE_UINT8, {s.T, columns, s.B}, {t.depth, wide, 1}}, e);
    };
    const auto map_out = [&](CUtensorMap *map, float *to, int rows, int columns, int wide) {
        const CUtensorMapDataType type = CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
        return copy_map(map, to, {type, {columns, rows, 1}, {wide, OUT_ROWS, 1}, CU_TENSOR_MAP_L2_PROMOTION_NONE}, e);
    };
    if (t.e4m3) {
        TRY(map_codes(&maps->x, x, s.in, t.along_m ? TILE_M : TILE_M / PAIR));
        TRY(map_codes(&maps->dy, dy, s.out, t.along_m ? t.n / PAIR : t.n));
    } else {
        const int x_rows = t.along_m ? ROWS : ROWS / 2, dy_rows = t.along_m ? ROWS / 2 : ROWS;
        TRY(map_in(&maps->x, x, s.in, x_rows, PANEL));
        TRY(map_in(&maps->dy, dy, s.out, dy_rows, PANEL));
        TRY(map_in(&maps->dy_narrow, dy, s.out, dy_rows, left_of(t.n, PANEL)));
    }
    TRY(map_out(&maps->dw, dw, s.in, s.out, OUT_COLUMNS));
    TRY(map_out(&maps->dw_narrow, dw, s.in, s.out, out));
    TRY(map_out(&maps->parts, parts, part_rows, t.n, OUT_COLUMNS));
    return map_out(&maps->parts_narrow, parts, part_rows, t.n, out);
}

int weight_gradient(const WeightGradient &g, const void *x, const void *dy, WeightGradientShape s,
                    const WeightGradientPairs &pairs, void *workspace, cudaStream_t stream, Error *e) {
    assert(!s.e4m3 || (s.T % FP8_TOKENS_MULTIPLE == 0 && !g.bias.sum && !g.row_at));
    const GradientPlan p = plan_of(s, g.squares, g.bias.sum, pairs.count);
    const Tiling &t = p.tile;
    const int cut = p.job.schedule.parts;
    char *memory = (char *)workspace;
    float *parts = (float *)memory;
    double *norms = (double *)(memory + p.norms);
    GradientMaps maps = {};
    GradientJob job = p.job;
    job.add = !g.first, job.scale = g.scale;
    job.squares = g.squares ? (float *)(memory + p.squares) : NULL;
    job.arrived = (unsigned *)(norms + s.B);
    job.columns = g.bias.sum ? column_begin(g.jobs, &g.bias, 1, columns_split(s), s.out) : NULL;
    job.row_at = g.row_at, job.rows = g.rows;
    job.pairs = pairs;
    TRY(maps_of(&maps, t, s, x, dy, g.dw, parts, std::max(cut * PAIR * TILE_M, 1), e));
    TRY(launch({job.schedule.level[0].pairs * PAIR, THREADS, stream, t.shared_bytes, PAIR}, e,
               t.kernel[g.squares != NULL], maps, job));

    GradientFinish f = {};
    f.job = job, f.parts = parts, f.dw = g.dw, f.squares = g.squares;
    f.norms = g.norms ? g.norms : norms, f.scale = (double)g.scale * g.scale, f.examples = g.squares ? s.B : 0;
    f.n = t.n, f.tile_blocks = TILE_M * t.n / 4 / FINISH_THREADS;
    f.pair_m = t.pair_m, f.pair_n = t.pair_n;
    const int blocks = f.examples + (cut ? job.schedule.level[0].rest * PAIR * f.tile_blocks : 0);
    if (!blocks) return 0;
    return launch({.blocks = blocks, .threads = FINISH_THREADS, .stream = stream, .early = true}, e,
                  gradient_finish_kernel, f);
}
