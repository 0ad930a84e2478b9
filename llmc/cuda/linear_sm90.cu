// linear_sm90: see linear_sm90.cuh.
//
// Blocks are persistent, one per multiprocessor, in pairs. A pair computes 256 rows x 192 columns, each block 128 rows;
// each block fetches half of the weight tile for both. A block consists of
// - a producer thread, which copies stages to shared memory (64 values along the summed dimension; in e4m3 128), and
// - two warpgroups that alternate between tiles: while one multiplies, the other applies the epilogue to its tile and
//   stores it, 16 rows per warp at a time through the warp's slot of shared memory.
// Turn t is a block's t-th tile, which warpgroup t mod 2 computes. That warpgroup waits for the stages of turn t only
// after the other one has seen all stages of turn t - 1 (Shared.order). An mbarrier has one parity bit, so a wait two
// phases ahead would return at once.
#include "cuda/linear_sm90.cuh"

#include "cuda/gelu.cuh"
#include "cuda/mma.cuh"
#include "cuda/sm90.cuh"
#include "cuda/vec.cuh"
#include "model/cuda_sizes.h"

namespace {

enum { ROWS = 128, HALVES = 2, GROUPS = 2, WARPS = 4, PAIR = 2, DEPTH = 64, HALF_DEPTH = 32 };
enum { TURNS = 4 }; // tiles in flight: one fetched, one multiplied, one finished, one spare
enum { THREADS = (GROUPS + 1) * WARPGROUP, PRODUCER_REGISTERS = 24, WORKER_REGISTERS = 240 };

enum { COLUMNS = LINEAR_SM90_COLUMNS, PANELS = COLUMNS / PANEL, STAGES = 4, BAND = 16, SLOT_ROWS = 16 };
static_assert(LINEAR_SM90_MULTIPLE % PANEL == 0 && LINEAR_SM90_MULTIPLE % DEPTH == 0, "whole panels and stages");
enum { X_BYTES = ROWS * PANEL_ROW_BYTES, W_BYTES = COLUMNS * PANEL_ROW_BYTES };
// A warp's slot holds SLOT_ROWS rows of all panels of y. If by_panel, it holds two buffers for panels of y, then the
// slopes of all panels. With e4m3 factors LINEAR_GELU replaces the slopes by two buffers for panels of slopes and one
// for codes; LINEAR_DGELU overwrites slopes with codes.
enum { PANEL_BYTES = SLOT_ROWS * PANEL_ROW_BYTES, SLOPES_BYTES = SLOT_ROWS * PANEL, SLOPES_AT = 2 * PANEL_BYTES };
enum { ROWS_BYTES = PANELS * PANEL_BYTES, SLOT_BYTES = SLOPES_AT + PANELS * SLOPES_BYTES };
static_assert(PANELS % 2 == 1 && SLOT_BYTES >= ROWS_BYTES, "panels in turn, across the halves of a tile");

struct Shared {
    char x[STAGES][X_BYTES], w[STAGES][W_BYTES], slot[GROUPS][WARPS][SLOT_BYTES];
    alignas(16) real bias[GROUPS][WARPS][COLUMNS];
    alignas(16) float sums[GROUPS][WARPS][COLUMNS];                // column sums
    uint64_t full[STAGES], empty[STAGES], own_full[GROUPS][WARPS]; // own_full: bias and extra have arrived
    uint64_t tile_full[TURNS], tile_empty[TURNS], order[GROUPS];   // order: turn t - 1 has seen its stages
    int tile[TURNS];
};

// True if an epilogue stores y panel by panel, with slopes (by_panel); adds a bias (takes_bias); reads row_values
// (takes_row_values); reads W as (out, in) (is_across).
__host__ __device__ constexpr bool by_panel(LinearEpilogue e) { return e == LINEAR_GELU || e == LINEAR_DGELU; }
__host__ __device__ constexpr bool takes_bias(LinearEpilogue e) {
    return e == LINEAR_GELU || e == LINEAR_RESIDUAL || e == LINEAR_BIAS;
}
__host__ __device__ constexpr bool takes_row_values(LinearEpilogue e) {
    return e == LINEAR_SCALED || e == LINEAR_SOFTMAX;
}
__host__ __device__ constexpr bool is_across(LinearEpilogue e) { return e == LINEAR_DGELU || e == LINEAR_SOFTMAX; }

struct LinearJob : Linear {
    int depths;       // stages per tile: plain ones, then low_depths
    int low_depths;   // stages of x_low
    int down, across; // number of a pair's tiles down y; of whole tiles across y
    int narrow;       // 1: a narrower tile across covers the remaining columns
    float *partials;  // partial column sums, one run (ColumnSplit) per tile of a block; or NULL
    int per_example;  // runs per example

    __device__ int tiles() const { return down * (across + narrow); }
};

struct TilePlace {
    int row, column;
};

// Returns the place of a block's half of a tile. Tiles are drawn band by band (BAND tiles across), from top to bottom,
// so that a band's columns of W stay in L2. Narrow tiles come last, so that pairs end at about the same time.
__device__ TilePlace tile_place(const LinearJob &job, int tile, int rank) {
    const int wide = job.down * job.across;
    if (tile >= wide) return {((tile - wide) * PAIR + rank) * ROWS, job.across * COLUMNS};
    const int per_band = BAND * job.down, band = tile / per_band, rest = tile - band * per_band;
    const int width = min((int)BAND, job.across - band * BAND);
    return {(rest / width * PAIR + rank) * ROWS, (band * BAND + rest % width) * COLUMNS};
}

#ifdef SM90_CODE

// Draws a pair's next tile, as work_draw (attention_sm90.cuh) does. -1: no tile is left.
__device__ int tile_draw(const LinearJob &job) {
    const int tile = (int)atomicInc(job.ticket, job.tiles() + gridDim.x / PAIR - 1);
    return tile < job.tiles() ? tile : -1;
}

// Awaits and returns the tile of a turn. AS_WARP: all lanes of a warp call it; otherwise one thread does.
template <bool AS_WARP> __device__ int tile_await(Shared &s, int turn) {
    barrier_wait(&s.tile_full[turn % TURNS], turn / TURNS & 1);
    const int tile = s.tile[turn % TURNS];
    if (AS_WARP) __syncwarp();
    if (!AS_WARP || threadIdx.x % WARP == 0) barrier_arrive_at(&s.tile_empty[turn % TURNS], 0);
    return AS_WARP ? uniform(tile) : tile;
}

// Fetches a block's half of a stage of W into both blocks. ALONG: the summed dimension runs along the stored rows of W.
// E4M3 implies ALONG. The copy engine fills the last stage up with zeros.
template <bool ALONG, bool E4M3>
__device__ void weight_send(char *to, const CUtensorMap *w, uint64_t *full, const TilePlace &place, int k, int rank) {
    to += rank * (W_BYTES / PAIR);
    const int row = place.column + rank * (COLUMNS / PAIR);
    if (E4M3) copy_box_in_pair(to, w, full, k * 2 * DEPTH, row, 0);
    else if (ALONG) copy_box_in_pair(to, w, full, 0, row, k);
    else copy_box_in_pair(to, w, full, 0, k * DEPTH + rank * HALF_DEPTH, place.column / PANEL);
}

template <bool ALONG, bool E4M3>
__device__ void produce(Shared &s, const CUtensorMap *x, const CUtensorMap *w, const CUtensorMap *x_low,
                        const CUtensorMap *w_low, const LinearJob &job, int rank) {
    Ring<STAGES> ring;
    int drawn = rank == 0 ? tile_draw(job) : 0, ends = 0;
    for (int turn = 0; ends < GROUPS; turn++) {
        uint64_t *tile_full = &s.tile_full[turn % TURNS];
        if (rank == 0) {
            barrier_wait(&s.tile_empty[turn % TURNS], (turn / TURNS & 1) ^ 1);
            for (int to = 0; to < PAIR; to++) send_at(&s.tile[turn % TURNS], drawn, tile_full, to);
            if (drawn >= 0) drawn = tile_draw(job); // the latency of the draw overlaps this tile's fetches
        }
        barrier_expect(tile_full, sizeof(int));
        const int tile = tile_await<false>(s, turn);
        if (tile < 0) {
            ends++;
            continue;
        }
        const TilePlace place = tile_place(job, tile, rank);
#    pragma unroll 1
        for (int k = 0; k < job.depths; k++) {
            uint64_t *full = &s.full[ring.stage];
            const int plain = job.depths - job.low_depths;
            const bool low = E4M3 && k >= plain;
            const int depth = low ? k - plain : k;
            barrier_wait(&s.empty[ring.stage], ring.parity ^ 1);
            barrier_expect(full, X_BYTES + W_BYTES);
            copy_box_in(s.x[ring.stage], low ? x_low : x, full, E4M3 ? depth * 2 * DEPTH : 0, place.row, E4M3 ? 0 : k);
            weight_send<ALONG, E4M3>(s.w[ring.stage], low ? w_low : w, full, place, depth, rank);
            ring.advance();
        }
    }
}

__device__ float2 unpacked(unsigned x) { return {unpack(x, 0), unpack(x, 1)}; }

// Returns the bias of a thread's two columns among columns [column, column + 8).
__device__ float2 bias_at(const real *bias, int column) {
    return unpacked(*(const unsigned *)(bias + column + threadIdx.x % 4 * 2));
}

template <bool E4M3> __device__ float2 biased(float x, float y, float2 b, float scale) {
    if (E4M3) return {fmaf(x, scale, b.x), fmaf(y, scale, b.y)};
    return {x + b.x, y + b.y};
}

// Returns a lane's address for stmatrix or ldmatrix of four 8 x 8 matrices: columns [16 j, 16 j + 16) of a warp's slot.
__device__ char *matrices_at(char *slot, int j) {
    const int lane = threadIdx.x % WARP, row = lane % 16, piece = (2 * (j % 4) + lane / 16) ^ row % 8;
    return slot + (j / 4 * 16 + row) * PANEL_ROW_BYTES + piece * 16;
}
__device__ void matrices_store(char *slot, int j, const unsigned (&r)[4]) {
    asm volatile(
        "stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(matrices_at(slot, j))),
        "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
        : "memory");
}
__device__ void matrices_load(char *slot, int j, unsigned (&r)[4]) { ldmatrix(r, (const real *)matrices_at(slot, j)); }

// Returns the address of a thread's two slopes in columns [8 i, 8 i + 8) of a panel of slopes, swizzled as CopyTensor
// says. Even q: rows 0 to 7; odd q: rows 8 to 15. No bank conflicts.
__device__ uint16_t *slopes_at(char *slopes, int i, int q) {
    const int lane = threadIdx.x % WARP, row = lane / 4 + q % 2 * 8;
    return (uint16_t *)(slopes + row * PANEL + (i / 2 ^ lane / 8) * 16 + i % 2 * 8 + lane % 4 * 2);
}

// Starts the copy of a warp's slot to memory. Unless `wanted`, commits an empty copy, which slot_wait counts. FENCED:
// the warp wrote nothing to the slot since the last call.
template <bool FENCED = false>
__device__ void slot_out(const CUtensorMap *map, const char *slot, int row, int panel, bool wanted = true) {
    if (!FENCED) {
        fence_before_copies();
        __syncwarp();
    }
    if (threadIdx.x % WARP == 0) {
        if (wanted) copy_box_out(map, slot, 0, row, panel);
        copy_out_commit();
    }
}

// Waits until all but the last PENDING calls of slot_out have read the slot.
template <int PENDING = 0> __device__ void slot_wait() {
    if (threadIdx.x % WARP == 0) copy_out_wait_read<PENDING>();
    __syncwarp();
}

// row_values and row sums of a thread's two rows of a warp's slot.
struct RowPair {
    float value[2], sum[2];
    int thread; // threadIdx.x, re-read: no register is free for values derived from it
};

__device__ void row_values(RowPair &rows, const LinearJob &job, int row, float factor) {
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(rows.thread));
    row += rows.thread % WARP / 4;
    UNROLL_FOR (int k = 0; k < 2; k++)
        if (row + 8 * k < job.rows) rows.value[k] = job.row_values[row + 8 * k] * factor;
}

// Returns 2^min(x scale + offset, LINEAR_EXPONENT_MAX) and adds it to sum; 0 unless `counts`.
__device__ float exponential(float x, float scale, float offset, bool counts, float &sum) {
    const float power = fmaf(x, scale, offset);
    const float y = counts ? exp2_fast(power > LINEAR_EXPONENT_MAX ? LINEAR_EXPONENT_MAX : power) : 0.0f; // NaN stays
    sum += y;
    return y;
}

// For epilogues that are not by_panel. Applies the epilogue to a warp's 16 rows and writes them to its slot.
// LINEAR_RESIDUAL: on entry the slot holds `extra`.
template <LinearEpilogue EPILOGUE, bool E4M3>
__device__ void rows_round(char *slot, const float (&c)[COLUMNS / 2], const real *bias, RowPair &rows,
                           const LinearJob &job, int counted) {
    UNROLL_FOR (int j = 0; j < COLUMNS / 16; j++) {
        unsigned r[4], extra[4];
        if (EPILOGUE == LINEAR_RESIDUAL) matrices_load(slot, j, extra);
        UNROLL_FOR (int q = 0; q < 4; q++) { // matrix q begins at column 8 (q / 2) and row 8 (q % 2)
            const int i = 8 * j + 4 * (q / 2) + 2 * (q % 2);
            if (EPILOGUE == LINEAR_SOFTMAX) {
                const int own = counted - rows.thread % 4 * 2, column = 16 * j + q / 2 * 8;
                const float scale = E4M3 ? job.scale * LOG2E : LOG2E, offset = rows.value[q % 2];
                float unrounded = 0, &sum = E4M3 ? unrounded : rows.sum[q % 2];
                const float x = exponential(c[i], scale, offset, column < own, sum);
                r[q] = pack(x, exponential(c[i + 1], scale, offset, column + 1 < own, sum));
                if (E4M3) rows.sum[q % 2] += unpack(r[q], 0) + unpack(r[q], 1);
                continue;
            }
            if (EPILOGUE == LINEAR_SCALED) {
                r[q] = pack(c[i] * rows.value[q % 2], c[i + 1] * rows.value[q % 2]);
                continue;
            }
            const float2 b = bias_at(bias, 16 * j + q / 2 * 8);
            const float2 old = EPILOGUE == LINEAR_RESIDUAL ? unpacked(extra[q]) : float2{};
            const float2 sum = biased<E4M3>(c[i], c[i + 1], b, job.scale);
            r[q] = EPILOGUE == LINEAR_RESIDUAL ? pack(old.x + sum.x, old.y + sum.y) : pack(sum.x, sum.y);
        }
        matrices_store(slot, j, r);
    }
}

__device__ void rows_sums_out(const RowPair &rows, const LinearJob &job, int row, int column) {
    row += rows.thread % WARP / 4;
    UNROLL_FOR (int k = 0; k < 2; k++) {
        float sum = rows.sum[k];
        sum += __shfl_xor_sync(~0u, sum, 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
        if (rows.thread % 4 == 0 && row + 8 * k < job.rows)
            job.row_sums[(size_t)(column / COLUMNS) * job.rows + row + 8 * k] = sum;
    }
}

// sums = column sums of a panel of 16 rows, or += if `add`. A lane sums two neighbouring columns.
__device__ void columns_sum(float *sums, const char *panel, bool add) {
    const int lane = threadIdx.x % WARP;
    float2 *sum = (float2 *)sums + lane, all = add ? *sum : make_float2(0.0f, 0.0f);
    UNROLL_FOR (int r = 0; r < SLOT_ROWS; r++) {
        const char *row = panel + r * PANEL_ROW_BYTES;
        const float2 v = unpacked(*(const unsigned *)(row + (lane / 4 ^ r % 8) * 16 + lane % 4 * 4));
        all.x += v.x, all.y += v.y;
    }
    *sum = all;
}

// Starts the copy of a panel's slopes into the slot.
__device__ void slopes_in(char *slot, int p, const CUtensorMap *slope, uint64_t *full, int row, int panel) {
    copy_box_in(slot + SLOPES_AT + p * SLOPES_BYTES, slope, full, 0, row, panel + p);
}

// codes = the e4m3 copy of a panel, in the layout of slopes_at. Raises `most` (fp8_most) to the lane's |y| in the first
// `rows` rows. Lane l copies 16 columns of rows l / 4 and l / 4 + 8: no bank conflicts.
__device__ void panel_encode(char *codes, const char *panel, float scale, int rows, unsigned &most) {
    const int lane = threadIdx.x % WARP;
    UNROLL_FOR (int r = lane / 4, i = 0; i < 2; i++, r += 8) {
        const unsigned mask = r < rows ? 0x7fff7fff : 0;
        unsigned code[4];
        UNROLL_FOR (int j = 0; j < 2; j++) {
            const uint4 y = *(const uint4 *)(panel + r * PANEL_ROW_BYTES + ((2 * (lane % 4) + j) ^ r % 8) * 16);
            const unsigned pair[4] = {y.x, y.y, y.z, y.w};
            UNROLL_FOR (int k = 0; k < 4; k++) {
                const float2 v = unpacked(pair[k]);
                const unsigned two = fp8_pack(v.x * scale, v.y * scale);
                code[2 * j + k / 2] = k % 2 ? code[2 * j + k / 2] | two << 16 : two;
                most = __vmaxu2(most, pair[k] & mask);
            }
        }
        *(uint4 *)(codes + r * PANEL + (lane % 4 ^ r / 2 % 4) * 16) = make_uint4(code[0], code[1], code[2], code[3]);
    }
}

// Writes panel_encode's codes of 16 rows: column c from to[c * T] on. Lane l transposes columns 2 l and 2 l + 1.
__device__ void panel_transpose(uint8_t *to, size_t T, const char *codes) {
    const int lane = threadIdx.x % WARP;
    unsigned left[4], right[4];
    UNROLL_FOR (int i = 0; i < 4; i++) {
        unsigned row[4];
        UNROLL_FOR (int k = 0; k < 4; k++) {
            const int r = 4 * i + k;
            row[k] = *(const uint16_t *)(codes + r * PANEL + (lane / 8 ^ r / 2 % 4) * 16 + lane % 8 * 2);
        }
        const unsigned upper = __byte_perm(row[0], row[1], 0x5140), lower = __byte_perm(row[2], row[3], 0x5140);
        left[i] = __byte_perm(upper, lower, 0x5410), right[i] = __byte_perm(upper, lower, 0x7632);
    }
    to += 2 * lane * T;
    *(uint4 *)to = make_uint4(left[0], left[1], left[2], left[3]);
    *(uint4 *)(to + T) = make_uint4(right[0], right[1], right[2], right[3]);
}

// Writes the low parts of panel p's channel in the first `rows` of 16 rows from `row` on, and raises its candidate.
__device__ void panel_low(const Fp8Copy &copy, const char *panel, int row, int p, int rows) {
    static_assert(PANEL == FP8_GELU_GROUP);
    const int lane = threadIdx.x % WARP, channel = fp8_channel(copy.channels[p], PANEL);
    const auto value = [&](int r, int c) {
        return (float)*(const real *)(panel + r * PANEL_ROW_BYTES + (c / 8 ^ r % 8) * 16 + c % 8 * sizeof(real));
    };
    if (lane < min((int)SLOT_ROWS, rows))
        copy.low[(size_t)(row + lane) * FP8_GROUPS + p] = fp8_low_code(value(lane, channel), copy.scale);
    if (row % FP8_LOW_ROWS || rows <= 0) return;
    fp8_raise(copy.candidates + p, __uint_as_float(max(fp8_candidate(value(0, 2 * lane), 2 * lane),
                                                       fp8_candidate(value(0, 2 * lane + 1), 2 * lane + 1))));
}

// For epilogues that are by_panel. Applies the epilogue to 16 rows of half h of a tile and stores them. sums: column
// sums of y, or NULL. E4M3: also stores job.copy and raises `most` (fp8_most). LINEAR_DGELU: on entry the slot holds
// the slopes of these rows; half 0 starts the copies of half 1's slopes. These copies complete `full`.
template <LinearEpilogue EPILOGUE, bool E4M3, bool LOW>
__device__ void panels_round(char *slot, const float (&c)[COLUMNS / 2], const real *bias, const CUtensorMap *y,
                             const CUtensorMap *slope, const CUtensorMap *codes, const LinearJob &job, uint64_t *full,
                             float *sums, unsigned &most, int row, int panel, int h) {
    constexpr bool FORWARD = EPILOGUE == LINEAR_GELU;
    const bool fetches = !FORWARD && h == 0 && threadIdx.x % WARP == 0;
    if (fetches) barrier_expect(full, PANELS * SLOPES_BYTES);
    UNROLL_FOR (int p = 0; p < PANELS; p++) {
        const int buffer = (h + p) % 2;
        char *values = slot + buffer * PANEL_BYTES;
        char *slopes = slot + SLOPES_AT + (FORWARD && E4M3 ? buffer : p) * SLOPES_BYTES;
        if (!E4M3) slot_wait<FORWARD ? 2 : 1>(); // copies of panel p - 1 may be in flight
        UNROLL_FOR (int j = 0; j < PANEL / 16; j++) {
            unsigned r[4], pair[4]; // pair: slopes of two columns
            UNROLL_FOR (int q = 0; q < 4; q++) {
                const int column = p * PANEL + 16 * j + q / 2 * 8, i = column / 2 + 2 * (q % 2);
                if (FORWARD) {
                    const float2 sum = biased<E4M3>(c[i], c[i + 1], bias_at(bias, column), job.scale);
                    const float2 x = unpacked(pack(sum.x, sum.y));
                    const Gelu low = gelu_with_slope(x.x), high = gelu_with_slope(x.y);
                    r[q] = pack(low.y, high.y), pair[q] = low.slope | high.slope << 8;
                } else {
                    pair[q] = *slopes_at(slopes, 2 * j + q / 2, q);
                    const float scale = E4M3 ? job.scale : 1.0f;
                    r[q] = pack(c[i] * (slope_value(pair[q] & 0xff) * scale),
                                c[i + 1] * (slope_value(pair[q] >> 8) * scale));
                }
            }
            matrices_store(values, j, r);
            // Store the slopes last, so that the compiler keeps the next reads of the bias after these stores.
            UNROLL_FOR (int q = 0; FORWARD && q < 4; q++) *slopes_at(slopes, 2 * j + q / 2, q) = (uint16_t)pair[q];
        }
        if (FORWARD) slot_out(slope, slopes, row, panel + p);
        slot_out<FORWARD && E4M3>(y, values, row, panel + p, !E4M3 || !job.copy.alone);
        if (E4M3) { // free the buffers of panel p - 1 for panel p + 1
            char *copy = FORWARD ? slot + SLOPES_AT + 2 * SLOPES_BYTES : slopes;
            slot_wait<FORWARD ? 2 : 1>();
            if (fetches && p > 0) slopes_in(slot, p - 1, slope, full, row + ROWS / HALVES, panel);
            panel_encode(copy, values, job.copy.scale, panel + p < job.out / PANEL ? job.rows - row : 0, most);
            if (LOW && panel + p < job.copy.groups) panel_low(job.copy, values, row, panel + p, job.rows - row);
            slot_out(codes, copy, row, panel + p, job.copy.codes);
            if (job.copy.transposed && row < job.rows && panel + p < job.out / PANEL) {
                const int T = job.copy.T, b = row / T;
                panel_transpose(job.copy.transposed + ((size_t)b * job.out + (panel + p) * PANEL) * T + (row - b * T),
                                T, copy);
                __syncwarp(); // before slopes_in overwrites the codes
            }
        } else if (fetches) slopes_in(slot, p, slope, full, row + ROWS / HALVES, panel);
        if (!FORWARD && sums) columns_sum(sums + p * PANEL, values, h > 0);
    }
    if (E4M3 && fetches) {
        copy_out_wait_read();
        slopes_in(slot, PANELS - 1, slope, full, row + ROWS / HALVES, panel);
    }
}

// Adds the warps' column sums of a warpgroup's tile in order, and stores the result.
__device__ void tile_columns_out(const float (&sums)[WARPS][COLUMNS], const LinearJob &job, int row, int column,
                                 int barrier) {
    const int run = row / ROWS;
    if (row >= job.rows) return; // all threads of the warpgroup return
    threads_sync(barrier, WARPGROUP);
    float *to = job.partials + (size_t)(run + run / job.per_example) * job.out + column;
    for (int c = threadIdx.x % WARPGROUP; c < COLUMNS && column + c < job.out; c += WARPGROUP) {
        float sum = 0.0f;
        UNROLL_FOR (int w = 0; w < WARPS; w++) sum += sums[w][c];
        to[c] = sum;
    }
    threads_sync(barrier, WARPGROUP); // the next tile overwrites sums
}

// c = x W for the first N columns of a warpgroup's tile.
template <int N, bool ALONG, bool E4M3>
__device__ void tile_multiply(float (&c)[HALVES][COLUMNS / 2], Shared &s, int turn, int depths, int rank) {
    const int group = turn % GROUPS, round = turn / GROUPS;
    Ring<STAGES> ring;
    ring.stage = turn * depths % STAGES, ring.parity = turn * depths / STAGES & 1;
    int previous = 0;
    barrier_wait(&s.order[group], (round & 1) ^ (group == 0)); // turn 0 does not wait
#    pragma unroll 1
    for (int k = 0; k < depths; k++) {
        barrier_wait(&s.full[ring.stage], ring.parity);
        const uint64_t x = operand(s.x[ring.stage], 0);
        const uint64_t w = operand(s.w[ring.stage], HALF_DEPTH * PANEL_ROW_BYTES);
        UNROLL_FOR (int h = 0; h < HALVES; h++) registers_settle(c[h]);
        wgmma_fence();
        UNROLL_FOR (int i = 0; i < DEPTH / 16; i++)
            UNROLL_FOR (int h = 0; h < HALVES; h++) {
                const int down = (i / 2 * (W_BYTES / PAIR) >> 4) + step_down_columns(i % 2);
                const uint64_t x_step = x + 2 * i + (h * (X_BYTES / HALVES) >> 4), w_step = w + (ALONG ? 2 * i : down);
                auto &c_h = reinterpret_cast<float(&)[N / 2]>(c[h]);
                if constexpr (E4M3) wgmma_e4m3(c_h, x_step, w_step, k > 0 || i > 0);
                else wgmma<true, ALONG>(c_h, x_step, w_step, k > 0 || i > 0);
            }
        wgmma_commit();
        if (k > 0) {
            wgmma_wait<1>();
            pair_arrive(&s.empty[previous], rank);
        }
        previous = ring.stage;
        ring.advance();
    }
    warp_arrive(&s.order[GROUPS - 1 - group]);
    wgmma_wait<0>();
    pair_arrive(&s.empty[previous], rank);
    UNROLL_FOR (int h = 0; h < HALVES; h++) registers_settle(c[h]);
}

// Starts the copies of the operands that a tile's epilogue reads first. These copies complete `full`. One lane calls.
template <LinearEpilogue EPILOGUE, bool E4M3>
__device__ void operands_in(char *slot, real *bias, const CUtensorMap *other, uint64_t *full, const LinearJob &job,
                            const TilePlace &place) {
    constexpr bool EXTRA = EPILOGUE == LINEAR_RESIDUAL, SLOPES = EPILOGUE == LINEAR_DGELU;
    const bool has_bias = takes_bias(EPILOGUE) && (!E4M3 || job.bias);
    const int bytes = has_bias ? min((int)COLUMNS, job.out - place.column) * sizeof(real) : 0;
    barrier_expect(full, bytes + (EXTRA ? ROWS_BYTES : SLOPES ? PANELS * SLOPES_BYTES : 0));
    if (has_bias) copy_run_in(bias, job.bias + place.column, bytes, full);
    if (EXTRA || (SLOPES && E4M3)) copy_out_wait_read();
    if (EXTRA) copy_box_in(slot, other, full, 0, place.row, place.column / PANEL);
    for (int p = 0; SLOPES && p < PANELS; p++) slopes_in(slot, p, other, full, place.row, place.column / PANEL);
}

template <LinearEpilogue EPILOGUE, bool E4M3, bool LOW>
__device__ void linear_work(Shared &s, const CUtensorMap *y, const CUtensorMap *other, const CUtensorMap *codes,
                            const LinearJob &job, int rank) {
    constexpr bool EXTRA = EPILOGUE == LINEAR_RESIDUAL, SLOPES = EPILOGUE == LINEAR_DGELU;
    constexpr bool ALONG = E4M3 || is_across(EPILOGUE);
    const int group = uniform(threadIdx.x / WARPGROUP), warp = uniform(threadIdx.x / WARP % WARPS);
    const int lane = threadIdx.x % WARP;
    char *slot = s.slot[group][warp];
    real *bias = s.bias[group][warp];
    uint64_t *own_full = &s.own_full[group][warp];
    float c[HALVES][COLUMNS / 2] = {}; // zeros: without them ptxas up to 12.8 serialises every wgmma (C7515)
    unsigned own_parity = 0, most = 0;
    for (int i = lane; E4M3 && !job.bias && i < COLUMNS; i += WARP) bias[i] = (real)0.0f;
    for (int turn = group;; turn += GROUPS) {
        const int tile = tile_await<true>(s, turn);
        if (tile < 0) break;
        TilePlace place = tile_place(job, tile, rank);
        place.row += warp * SLOT_ROWS;
        const int panel = place.column / PANEL;
        if (lane == 0) operands_in<EPILOGUE, E4M3>(slot, bias, other, own_full, job, place);
        const int width = job.out - place.column; // less than COLUMNS for narrow tiles
        // Without these zeros the compiler keeps old sums in registers during the epilogue, which needs the registers.
        UNROLL_FOR (int i = 0; E4M3 && by_panel(EPILOGUE) && i < COLUMNS; i++)
            c[i / (COLUMNS / 2)][i % (COLUMNS / 2)] = 0;
        if (width >= COLUMNS) tile_multiply<COLUMNS, ALONG, E4M3>(c, s, turn, job.depths, rank);
        else if (width > PANEL) tile_multiply<2 * PANEL, ALONG, E4M3>(c, s, turn, job.depths, rank);
        else tile_multiply<PANEL, ALONG, E4M3>(c, s, turn, job.depths, rank);
        UNROLL_FOR (int h = 0; h < HALVES; h++, place.row += ROWS / HALVES) {
            if (h == 0 || EXTRA || SLOPES) {
                if (EXTRA && h > 0 && lane == 0) {
                    barrier_expect(own_full, ROWS_BYTES);
                    copy_out_wait_read();
                    copy_box_in(slot, other, own_full, 0, place.row, panel);
                }
                barrier_wait(own_full, own_parity);
                own_parity ^= 1;
            }
            if constexpr (by_panel(EPILOGUE)) {
                float *sums = job.partials ? s.sums[group][warp] : NULL;
                panels_round<EPILOGUE, E4M3, LOW>(slot, c[h], bias, y, other, codes, job, own_full, sums, most,
                                                  place.row, panel, h);
                continue;
            }
            RowPair rows = {};
            if (takes_row_values(EPILOGUE))
                row_values(rows, job, place.row, EPILOGUE == LINEAR_SOFTMAX ? -LOG2E : 1.0f);
            if (!EXTRA) slot_wait();
            rows_round<EPILOGUE, E4M3>(slot, c[h], bias, rows, job, job.counted - place.column);
            if (EPILOGUE == LINEAR_SOFTMAX) rows_sums_out(rows, job, place.row, place.column);
            slot_out(y, slot, place.row, panel);
        }
        if (EPILOGUE == LINEAR_DGELU && job.partials)
            tile_columns_out(s.sums[group], job, place.row - warp * SLOT_ROWS - ROWS, place.column, 1 + group);
    }
    if (lane == 0) copy_out_wait();
    if (E4M3 && job.copy.amax) fp8_raise(job.copy.amax, unpack(max(most & 0xffff, most >> 16), 0));
}

#endif

template <LinearEpilogue EPILOGUE, bool E4M3, bool LOW = false> // LOW: writes job.copy.low
__global__ void __launch_bounds__(SM90_THREADS(THREADS), 1)
    linear_kernel(const __grid_constant__ CUtensorMap x, const __grid_constant__ CUtensorMap w,
                  const __grid_constant__ CUtensorMap y, const __grid_constant__ CUtensorMap other,
                  const __grid_constant__ CUtensorMap codes, const __grid_constant__ CUtensorMap x_low,
                  const __grid_constant__ CUtensorMap w_low, const LinearJob job) {
#ifdef SM90_CODE
    Shared &s = *(Shared *)shared_memory();
    const int rank = blockIdx.x % PAIR, group = uniform(threadIdx.x / WARPGROUP);
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            barrier_init(&s.full[i], 1);
            barrier_init(&s.empty[i], PAIR * WARPS);
        }
        for (int i = 0; i < GROUPS * WARPS; i++) barrier_init(&s.own_full[i / WARPS][i % WARPS], 1);
        for (int i = 0; i < TURNS; i++) {
            barrier_init(&s.tile_full[i], 1);
            barrier_init(&s.tile_empty[i], PAIR * (1 + WARPS));
        }
        for (int i = 0; i < GROUPS; i++) barrier_init(&s.order[i], WARPS);
        barriers_publish();
    }
    cluster_sync();
    if (group == GROUPS) {
        registers_give<PRODUCER_REGISTERS>();
        if (threadIdx.x == GROUPS * WARPGROUP) produce<is_across(EPILOGUE), E4M3>(s, &x, &w, &x_low, &w_low, job, rank);
    } else {
        registers_take<WORKER_REGISTERS>();
        linear_work<EPILOGUE, E4M3, LOW>(s, &y, &other, &codes, job, rank);
    }
    __syncwarp();
    cluster_sync(); // until then the other block may signal this block's barriers
#endif
}

// Describes a matrix (rows, columns) to the copy engine, in boxes of `box_rows` rows x `panels` panels.
int panels_map(CUtensorMap *map, const void *matrix, int rows, int columns, int box_rows, int panels, Error *e,
               CUtensorMapDataType type = REAL_MAP) {
    CopyTensor t = {type, {PANEL, rows, columns / PANEL}, {PANEL, box_rows, panels}};
    t.stride[0] = columns, t.stride[1] = PANEL;
    return copy_map(map, matrix, t, e);
}

// Describes an e4m3 matrix (rows, columns) to the copy engine, in boxes of `box_rows` rows x 128 columns (a stage).
// stride: bytes from a row to the next; 0: columns.
int codes_map(CUtensorMap *map, const uint8_t *matrix, int rows, int columns, int box_rows, Error *e, int stride = 0) {
    CopyTensor t = {CU_TENSOR_MAP_DATA_TYPE_UINT8, {columns, rows, 1}, {2 * DEPTH, box_rows, 1}};
    t.stride[0] = stride;
    return copy_map(map, matrix, t, e);
}

decltype(&linear_kernel<LINEAR_GELU, false>) const kernels[2][LINEAR_SOFTMAX + 1] = { // in LinearEpilogue's order
    {linear_kernel<LINEAR_GELU, false>, linear_kernel<LINEAR_RESIDUAL, false>, linear_kernel<LINEAR_DGELU, false>,
     linear_kernel<LINEAR_BIAS, false>, linear_kernel<LINEAR_SCALED, false>, linear_kernel<LINEAR_SOFTMAX, false>},
    {linear_kernel<LINEAR_GELU, true>, linear_kernel<LINEAR_RESIDUAL, true>, linear_kernel<LINEAR_DGELU, true>,
     linear_kernel<LINEAR_BIAS, true>, NULL, linear_kernel<LINEAR_SOFTMAX, true>}};

} // namespace

bool linear_sm90_sums(int T) { return T % ROWS == 0; }

static ColumnSplit linear_split(int rows, int T) { return {rows, T, ROWS, rows / ROWS, rows / ROWS + rows / T}; }

size_t linear_sm90_column_bytes(int rows, int T, int out) {
    return linear_sm90_sums(T) ? column_bytes(linear_split(rows, T), 1, out) : 0;
}

int linear_sm90(const Linear &l, cudaStream_t stream, Error *e) {
    const bool e4m3 = l.x8, along = is_across(l.epilogue);
    const int down = ceil_div(l.rows, PAIR * ROWS), across = l.out / COLUMNS, narrow = l.out % COLUMNS != 0;
    CUtensorMap x, w, y, other, codes = {}, x_low = {}, w_low = {};
    int blocks;
    TRY(e4m3 ? codes_map(&x, l.x8, l.rows, l.in, ROWS, e) : panels_map(&x, l.x, l.rows, l.in, ROWS, 1, e));
    TRY(e4m3    ? codes_map(&w, l.weight8, l.out, l.in, COLUMNS / PAIR, e)
        : along ? panels_map(&w, l.weight, l.out, l.in, COLUMNS / PAIR, 1, e)
                : panels_map(&w, l.weight, l.in, l.out, HALF_DEPTH, PANELS, e));
    TRY(panels_map(&y, l.y, l.rows, l.out, SLOT_ROWS, by_panel(l.epilogue) ? 1 : PANELS, e));
    TRY(by_panel(l.epilogue)
            ? panels_map(&other, l.slope, l.rows, l.out, SLOT_ROWS, 1, e, CU_TENSOR_MAP_DATA_TYPE_UINT8)
            : panels_map(&other, l.extra ? l.extra : l.y, l.rows, l.out, SLOT_ROWS, PANELS, e));
    if (e4m3 && l.copy.codes)
        TRY(panels_map(&codes, l.copy.codes, l.rows, l.out, SLOT_ROWS, 1, e, CU_TENSOR_MAP_DATA_TYPE_UINT8));
    if (e4m3 && l.groups) TRY(codes_map(&x_low, l.x_low, l.rows, l.groups, ROWS, e, FP8_GROUPS));
    if (e4m3 && l.groups) TRY(codes_map(&w_low, l.weight_low, l.out, l.groups, COLUMNS / PAIR, e, FP8_GROUPS));
    TRY(device_attribute(&blocks, cudaDevAttrMultiProcessorCount, e));
    const int low_depths = e4m3 ? ceil_div(l.groups, 2 * DEPTH) : 0;
    LinearJob job = {l, ceil_div(l.in, e4m3 ? 2 * DEPTH : DEPTH) + low_depths, low_depths, down, across, narrow};
    if (l.columns.sum) {
        job.partials = column_begin(l.jobs, &l.columns, 1, linear_split(l.rows, l.T), l.out);
        job.per_example = l.T / ROWS;
    }
    const auto kernel = e4m3 && l.copy.groups ? linear_kernel<LINEAR_GELU, true, true> : kernels[e4m3][l.epilogue];
    return launch({blocks / PAIR * PAIR, THREADS, stream, sizeof(Shared), PAIR}, e, kernel, x, w, y, other, codes,
                  x_low, w_low, job);
}
