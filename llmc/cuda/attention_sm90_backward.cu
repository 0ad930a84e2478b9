// attention_sm90_backward: the backward on Hopper, in two kernels.
//
// dQ sums over keys; dK and dV sum over queries. One kernel for all three would need 5 products, but would have to add
// dQ across blocks. Two kernels need 7 products, but keep each sum in one warpgroup's registers, in a fixed order. P
// and dS pass from one product to the next in registers. So the second kernel computes S^T = K Q^T, with keys as rows.
//
// The dQ kernel runs first. It also computes delta = rowsum(dO * O), and stores delta and lse2 for the other kernel.
//
// Blocks are persistent, one per multiprocessor. A block has a feeder warp and two warpgroups of 64 rows each. At
// D = 64 the block's next rows arrive while it works (OWN_STAGES); at D = 128 shared memory has no room for them.
#include "cuda/attention_sm90.cuh"
#include <type_traits>

enum { GROUPS = 2, ROWS = 64 * GROUPS, FEEDER = WARPGROUP * GROUPS, THREADS = FEEDER + WARPGROUP };

// The last warpgroup holds the feeder and gives most of its registers to the workers. At launch a thread has 168.
enum { FEEDER_REGISTERS = 24, WORKER_REGISTERS = 240 };

struct BackwardMaps {
    CUtensorMap dqkv, qkv, dout, out; // rows of a box: dqkv STORE_ROWS, the other tensors BOX_ROWS
};

// A block owns 2 x 64 rows of one side and walks over tiles of OTHERS rows of the other side:
//   dQ       owns queries (q, dout), walks over keys (k, v) from the diagonal back to key 0
//   dK, dV   owns keys (k, v), walks over queries (q, dout) from the diagonal to the end
template <int D_, bool DQ_> struct BackwardLayout {
    static constexpr bool DQ = DQ_;
    static constexpr int D = D_, OTHERS = DQ && D == 64 ? 128 : 64, STAGES = 3, OWN_STAGES = D == 64 ? 2 : 1;
    static constexpr int OWN_BYTES = TILE_BYTES<64, D>, TILE = TILE_BYTES<OTHERS, D>;
    // OWN: number of tensors whose own rows a block reads: q, dout and `out` for dQ; k and v for dK, dV. For dQ, each
    // thread computes lse2 and delta of its rows. For dK, dV, each tile of queries arrives with its lse2 and delta.
    static constexpr int OWN = DQ ? 3 : 2, STATISTICS_BYTES = DQ ? 0 : OTHERS * (int)sizeof(float);
    typedef typename std::conditional<!DQ && D == 64, LeftRegisters, LeftShared>::type Left;
    // Arrivals that free a stage: one per warp if only wgmma reads it; one per thread if threads read lse2 and delta.
    static constexpr int RELEASES = DQ ? 4 * GROUPS : WARPGROUP * GROUPS;
    struct Shared {
        char own[OWN][OWN_STAGES][GROUPS][OWN_BYTES];
        char gradient[GROUPS][OWN_BYTES]; // staging: 16 rows per warp
        char other[2][STAGES][TILE];
        float lse2[DQ ? 1 : STAGES][OTHERS], delta[DQ ? 1 : STAGES][OTHERS];
        HeadTile work[OWN_STAGES];
        uint64_t own_full[OWN_STAGES], own_empty[OWN_STAGES], full[STAGES], empty[STAGES];
    };
};

namespace {

#ifdef SM90_CODE

// Releases a stage. One arrival per warp would suffice. compute-sanitizer's racecheck credits an arrival to its thread
// alone, so every thread arrives where threads read the stage.
template <class F> __device__ void stage_release(uint64_t *empty) {
    if (F::RELEASES == WARPGROUP * GROUPS) barrier_arrive(empty);
    else warp_arrive(empty);
}

// Awaits the next `count` stages and releases them unread.
template <class F> __device__ void stages_skip(typename F::Shared &shared, Ring<F::STAGES> &ring, int count) {
#    pragma unroll 1
    for (int i = 0; i < count; i++) {
        barrier_wait(&shared.full[ring.stage], ring.parity);
        stage_release<F>(&shared.empty[ring.stage]);
        ring.advance();
    }
}

// Starts copies of a head's queries (q, dout) or keys (k, v), from row `row` on.
template <bool QUERIES, int ROWS, int D>
__device__ void pair_in(char *first, char *second, const BackwardMaps &maps, uint64_t *full, const HeadTile &work,
                        int row, AttentionShape s) {
    tile_in<ROWS, D>(first, &maps.qkv, full, (QUERIES ? 0 : s.C()) + work.column, row, work.b);
    tile_in<ROWS, D>(second, QUERIES ? &maps.dout : &maps.qkv, full, (QUERIES ? 0 : 2 * s.C()) + work.column, row,
                     work.b);
}

template <class F, Masks M>
__device__ void backward_feed(typename F::Shared &shared, const BackwardMaps &maps, AttentionRows rows,
                              unsigned *ticket, AttentionShape s, const AttentionMasks &masks) {
    constexpr int own_bytes = F::OWN * GROUPS * F::OWN_BYTES, other_bytes = 2 * F::TILE + 2 * F::STATISTICS_BYTES;
    Ring<F::OWN_STAGES> own;
    Ring<F::STAGES> ring;
    for (;;) {
        HeadTile work = work_draw(ticket, gridDim.x, gridDim.x, s.tiles(ROWS), s);
        uint64_t *own_full = &shared.own_full[own.stage];
        barrier_wait(&shared.own_empty[own.stage], own.parity ^ 1);
        shared.work[own.stage] = work;
        if (work.tile < 0) {
            barrier_arrive(own_full);
            return;
        }
        barrier_expect(own_full, own_bytes);
        int row = (F::DQ ? work.tile : s.tiles(ROWS) - 1 - work.tile) * ROWS; // longest walks first
#    pragma unroll 1
        for (int g = 0; g < GROUPS; g++) {
            pair_in<F::DQ, 64, F::D>(shared.own[0][own.stage][g], shared.own[1][own.stage][g], maps, own_full, work,
                                     row + 64 * g, s);
            if (F::DQ)
                tile_in<64, F::D>(shared.own[F::OWN - 1][own.stage][g], &maps.out, own_full, work.column, row + 64 * g,
                                  work.b);
        }
        size_t first = (size_t)work.head * s.padded_T();
        own.advance();
        int n = F::DQ ? key_tiles<F::OTHERS>(row + ROWS - 1, s.T) - 1 : row; // dQ: tile of keys; dK, dV: first query
        int end = F::DQ ? first_key(masks, s, work.b, row) / F::OTHERS       // dQ: last tile; dK, dV: end of queries
                        : last_query(masks, s, work.b, row + ROWS - 1) + 1;
        if (M == CAUSAL) end = F::DQ ? 0 : s.T;
#    pragma unroll 1
        for (; F::DQ ? n >= end : n < end; n += F::DQ ? -1 : F::OTHERS) {
            uint64_t *full = &shared.full[ring.stage];
            barrier_wait(&shared.empty[ring.stage], ring.parity ^ 1);
            if (!F::DQ) fence_before_copies(); // after the threads' reads of lse2 and delta
            barrier_expect(full, other_bytes);
            pair_in<!F::DQ, F::OTHERS, F::D>(shared.other[0][ring.stage], shared.other[1][ring.stage], maps, full, work,
                                             F::DQ ? n * F::OTHERS : n, s);
            if (!F::DQ) copy_run_in(shared.lse2[ring.stage], rows.lse2 + first + n, F::STATISTICS_BYTES, full);
            if (!F::DQ) copy_run_in(shared.delta[ring.stage], rows.delta + first + n, F::STATISTICS_BYTES, full);
            ring.advance();
        }
    }
}

// dq += dS K over one tile of keys. On return only this product is in flight.
template <bool DIAGONAL, class F, Masks M>
__device__ void dq_step(typename F::Shared &shared, float (&dq)[F::D / 2], Ring<F::STAGES> &ring, LeftShared q,
                        LeftShared dout, const float (&lse2)[2], const float (&delta)[2], float scale2, int row,
                        int key0, bool last, const WarpMasks<M, false> &masks) {
    int stage = ring.stage;
    ring.advance();
    unsigned packed[F::OTHERS / 4];
    float p[F::OTHERS / 2], dp[F::OTHERS / 2];
    wgmma_fence();
    issue_abt<F::D, F::OTHERS>(p, q, shared.other[0][stage]);
    issue_abt<F::D, F::OTHERS>(dp, dout, shared.other[1][stage]);
    wgmma_wait<1>();
    registers_settle(p);
    registers_settle(dq);
    UNROLL_FOR (int i = 0; i < F::OTHERS / 2; i++) {
        p[i] = exp2_fast(fmaf(p[i], scale2, -lse2[i / 2 % 2]));
        if (DIAGONAL && key0 + fragment_column(i) > row + fragment_row(i)) p[i] = 0.0f;
    }
    masks.hide(p, key0, 0.0f);
    registers_settle(p); // with the branch in barrier_wait, keeps the exponentials before the wait
    if (!last) barrier_wait(&shared.full[ring.stage], ring.parity);
    wgmma_wait<0>();
    registers_settle(dp);
    UNROLL_FOR (int k = 0; k < F::OTHERS / 16 && M == DROPPED; k++) {
        const RngBlock block = lane_block(masks.dropout, masks.warp_row, key0 + 16 * k);
        UNROLL_FOR (int w = 0; w < 4; w++)
            dropout_clear(masks.dropout.blocks.c, dp[8 * k + 2 * w], dp[8 * k + 2 * w + 1], block.word[w]);
    }
    UNROLL_FOR (int i = 0; i < F::OTHERS / 2; i++)
        dp[i] = p[i] * (M == DROPPED ? fmaf(dp[i], masks.factor, -delta[i / 2 % 2]) : dp[i] - delta[i / 2 % 2]); // dS
    pack_rows(packed, dp);
    registers_settle(dq);
    wgmma_fence();
    issue_pb<F::D, F::OTHERS>(dq, packed, shared.other[0][stage]);
}

// delta = rowsum(dout * out) of a thread's two rows: rows lane / 4 + {0, 8} of its warp. Four lanes share a row.
template <int D> __device__ void rows_dot(float (&delta)[2], const char *dout, const char *out) {
    int lane = threadIdx.x % 32;
    UNROLL_FOR (int i = 0; i < 2; i++) {
        int row = threadIdx.x / 32 % 4 * 16 + lane / 4 + 8 * i;
        float sum[2] = {};
        UNROLL_FOR (int panel = 0; panel < D / PANEL; panel++)
            UNROLL_FOR (int half = 0; half < 2; half++) {
                int at = (panel * 64 + row) * PANEL_ROW_BYTES + ((half * 4 + lane % 4) ^ row % 8) * 16;
                sum[half] += dot_vectors(*(const uint4 *)(dout + at), *(const uint4 *)(out + at));
            }
        float x = sum[0] + sum[1];
        x += __shfl_xor_sync(~0u, x, 2);
        delta[i] = x + __shfl_xor_sync(~0u, x, 1);
    }
}

// Computes lse2 and delta of the thread's rows; stores lse2 and delta / factor for the next kernel.
template <class F>
__device__ void statistics_compute(float (&lse2)[2], float (&delta)[2], const char *dout, const char *out,
                                   AttentionRows rows, const float *lse, int head, int row, float factor,
                                   AttentionShape s) {
    UNROLL_FOR (int i = 0; i < 2; i++)
        lse2[i] = row + 8 * i < s.T ? lse[(size_t)head * s.T + row + 8 * i] * LOG2E : INFINITY;
    rows_dot<F::D>(delta, dout, out);
    if (threadIdx.x % 4) return;
    UNROLL_FOR (int i = 0; i < 2; i++) {
        rows.lse2[(size_t)head * s.padded_T() + row + 8 * i] = lse2[i];
        rows.delta[(size_t)head * s.padded_T() + row + 8 * i] = delta[i] / factor;
    }
}

template <class F, Masks M>
__device__ void dq_work(typename F::Shared &shared, const CUtensorMap *dqkv, AttentionRows rows, const float *lse,
                        AttentionShape s, const AttentionMasks &all_masks, float scale) {
    int g = uniform(threadIdx.x / WARPGROUP), warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    Ring<F::OWN_STAGES> own;
    Ring<F::STAGES> ring;
    for (;; own.advance()) {
        barrier_wait(&shared.own_full[own.stage], own.parity);
        const HeadTile &work = shared.work[own.stage]; // a reference: no registers are free for a copy
        int tile = uniform(work.tile);
        if (tile < 0) break;
        int block_row = tile * ROWS, group_row = block_row + 64 * g, warp_row = group_row + 16 * warp;
        int row = warp_row + lane / 4, tiles = key_tiles<F::OTHERS>(block_row + ROWS - 1, s.T);
        int first = M == CAUSAL ? 0 : first_key(all_masks, s, work.b, block_row) / F::OTHERS;
        int own_tiles = group_row < s.T ? key_tiles<F::OTHERS>(group_row + 63, s.T) : first;
        stages_skip<F>(shared, ring, tiles - own_tiles); // keys after all queries of this warpgroup
        if (group_row >= s.T) {
            barrier_arrive(&shared.own_empty[own.stage]);
            continue;
        }
        const WarpMasks<M, false> masks(all_masks, s, work.b, work.head, warp_row);
        float dq[F::D / 2] = {}, lse2[2], delta[2];
        LeftShared q = {shared.own[0][own.stage][g]}, dout = {shared.own[1][own.stage][g]};
        statistics_compute<F>(lse2, delta, dout.tile, shared.own[F::OWN - 1][own.stage][g], rows, lse, work.head, row,
                              masks.factor, s);
        int own_first = M == CAUSAL ? 0 : first_key(all_masks, s, work.b, group_row) / F::OTHERS;
        barrier_wait(&shared.full[ring.stage], ring.parity);
        int previous = ring.stage, n = own_tiles - 1;
        dq_step<true, F, M>(shared, dq, ring, q, dout, lse2, delta, scale * LOG2E, row, n * F::OTHERS, n == own_first,
                            masks);
        while (--n >= own_first) {
            int current = ring.stage;
            dq_step<false, F, M>(shared, dq, ring, q, dout, lse2, delta, scale * LOG2E, row, n * F::OTHERS,
                                 n == own_first, masks);
            stage_release<F>(&shared.empty[previous]);
            previous = current;
        }
        wgmma_wait<0>();
        registers_settle(dq);
        stage_release<F>(&shared.empty[previous]);
        if (M != CAUSAL) stages_skip<F>(shared, ring, own_first - first); // keys before all documents of this warpgroup
        char *stage = shared.gradient[g] + warp * TILE_BYTES<16, F::D>;
        warp_rows_out<F::D>(dqkv, stage, dq, scale, scale, work.column, warp_row, work.b);
        barrier_arrive(&shared.own_empty[own.stage]);
    }
    if (lane == 0) copy_out_wait();
}

// dv += P^T dO, dk += dS^T Q over one tile of queries. On return both products may be in flight; earlier ones are done.
// With dropout, delta arrives divided by the scale of kept elements; dkdv_work multiplies dk and dv by that scale.
// At D = 128 registers are short, so dP is computed after P is packed, and dS reads the packed P.
template <bool DIAGONAL, class F, Masks M>
__device__ void dkdv_step(typename F::Shared &shared, float (&dk)[F::D / 2], float (&dv)[F::D / 2], int stage,
                          const typename F::Left &k, const typename F::Left &v, float scale2, int key, int query0,
                          const WarpMasks<M, true> &masks) {
    constexpr bool EARLY = F::D == 64;
    unsigned kept = ~0u;
    unsigned packed[F::OTHERS / 4];
    float p[F::OTHERS / 2], dp[F::OTHERS / 2];
    unsigned packed_p[F::OTHERS / 4];
    const float *lse2 = shared.lse2[stage] + threadIdx.x % 4 * 2, *delta = shared.delta[stage] + threadIdx.x % 4 * 2;
    wgmma_fence();
    issue_abt<F::D, F::OTHERS>(p, k, shared.other[0][stage]);
    if (EARLY) issue_abt<F::D, F::OTHERS>(dp, v, shared.other[1][stage]);
    wgmma_wait<EARLY ? 1 : 0>();
    registers_settle(p);
    registers_settle(dk);
    UNROLL_FOR (int n = 0; n < F::OTHERS / 8; n++) {
        float2 column = *(const float2 *)(lse2 + 8 * n);
        UNROLL_FOR (int i = 4 * n; i < 4 * n + 4; i++) {
            p[i] = exp2_fast(fmaf(p[i], scale2, -(i % 2 ? column.y : column.x)));
            if (DIAGONAL && key + fragment_row(i) > query0 + fragment_column(i)) p[i] = 0.0f;
        }
    }
    masks.hide(p, query0, 0.0f);
    pack_rows(packed_p, p);
    unsigned packed_kept[F::OTHERS / 4]; // packed P, with 0 for dropped elements
    if constexpr (M == DROPPED) {
        kept = lane_kept<F::OTHERS / 2, true>(masks.dropout, masks.warp_row, query0);
        UNROLL_FOR (int i = 0; i < F::OTHERS / 4; i++) packed_kept[i] = packed_p[i] & kept_pair(kept, i);
    }
    registers_settle(dv);
    wgmma_fence();
    if (!EARLY) issue_abt<F::D, F::OTHERS>(dp, v, shared.other[1][stage]);
    if constexpr (M == DROPPED) issue_pb<F::D, F::OTHERS>(dv, packed_kept, shared.other[1][stage]);
    else issue_pb<F::D, F::OTHERS>(dv, packed_p, shared.other[1][stage]);
    wgmma_wait<1>();
    registers_settle(dp);
    UNROLL_FOR (int n = 0; n < F::OTHERS / 8; n++) {
        float2 column = *(const float2 *)(delta + 8 * n);
        UNROLL_FOR (int i = 4 * n; i < 4 * n + 4; i++) {
            float probability = EARLY ? p[i] : unpack(packed_p[i / 2], i % 2);
            if (M == DROPPED && i % 2 == 0) mask_clear(dp[i], dp[i + 1], kept_pair(kept, i / 2));
            dp[i] = probability * (dp[i] - (i % 2 ? column.y : column.x)); // dS
        }
    }
    pack_rows(packed, dp);
    registers_settle(dk);
    wgmma_fence();
    issue_pb<F::D, F::OTHERS>(dk, packed, shared.other[0][stage]);
}

template <class F, Masks M>
__device__ void dkdv_work(typename F::Shared &shared, const CUtensorMap *dqkv, AttentionShape s,
                          const AttentionMasks &all_masks, float scale) {
    int g = uniform(threadIdx.x / WARPGROUP), warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    Ring<F::OWN_STAGES> own;
    Ring<F::STAGES> ring;
    for (;; own.advance()) {
        barrier_wait(&shared.own_full[own.stage], own.parity);
        const HeadTile &work = shared.work[own.stage]; // a reference: no registers are free for a copy
        int tile = uniform(work.tile);
        if (tile < 0) break;
        int block_row = (s.tiles(ROWS) - 1 - tile) * ROWS, group_row = block_row + 64 * g;
        int warp_row = group_row + 16 * warp, row = warp_row + lane / 4;
        int last = M == CAUSAL ? s.T - 1 : last_query(all_masks, s, work.b, block_row + ROWS - 1);
        int tiles = (last - block_row) / F::OTHERS + 1, own_tiles = tiles - g;
        stages_skip<F>(shared, ring, min(g, tiles)); // queries before all keys of this warpgroup
        if (own_tiles <= 0) {
            barrier_arrive(&shared.own_empty[own.stage]);
            continue;
        }
        int later = 0; // tiles of queries after the last document of this warpgroup
        if (M != CAUSAL)
            later = own_tiles - 1 - (last_query(all_masks, s, work.b, group_row + 63) - group_row) / F::OTHERS;
        own_tiles -= later;
        const WarpMasks<M, true> masks(all_masks, s, work.b, work.head, warp_row);
        typename F::Left k, v;
        k.load(shared.own[0][own.stage][g]);
        v.load(shared.own[1][own.stage][g]);
        float dk[F::D / 2] = {}, dv[F::D / 2] = {};
        barrier_wait(&shared.full[ring.stage], ring.parity);
        dkdv_step<true, F, M>(shared, dk, dv, ring.stage, k, v, scale * LOG2E, row, group_row, masks);
        int previous = ring.stage;
        ring.advance();
        for (int n = 1; n < own_tiles; n++) {
            barrier_wait(&shared.full[ring.stage], ring.parity);
            dkdv_step<false, F, M>(shared, dk, dv, ring.stage, k, v, scale * LOG2E, row, group_row + n * F::OTHERS,
                                   masks);
            stage_release<F>(&shared.empty[previous]);
            previous = ring.stage;
            ring.advance();
        }
        wgmma_wait<0>();
        registers_settle(dk);
        registers_settle(dv);
        stage_release<F>(&shared.empty[previous]);
        if (M != CAUSAL) stages_skip<F>(shared, ring, later);
        char *stage = shared.gradient[g] + warp * TILE_BYTES<16, F::D>;
        float dk_scale = M == DROPPED ? scale * masks.factor : scale;
        warp_rows_out<F::D>(dqkv, stage, dv, masks.factor, masks.factor, 2 * s.C() + work.column, warp_row, work.b);
        warp_rows_out<F::D>(dqkv, stage, dk, dk_scale, dk_scale, s.C() + work.column, warp_row, work.b);
        barrier_arrive(&shared.own_empty[own.stage]);
    }
    if (lane == 0) copy_out_wait();
}

#endif

template <class F, Masks M>
__global__ void __launch_bounds__(SM90_THREADS(THREADS), 1)
    backward_sm90_kernel(const __grid_constant__ BackwardMaps maps, AttentionRows rows, const float *lse,
                         unsigned *ticket, AttentionShape s, float scale,
                         const __grid_constant__ AttentionMasks masks) {
#ifdef SM90_CODE
    typename F::Shared &shared = *(typename F::Shared *)shared_memory();
    if (threadIdx.x == 0) {
        for (int i = 0; i < F::OWN_STAGES; i++) {
            barrier_init(&shared.own_full[i], 1);
            barrier_init(&shared.own_empty[i], WARPGROUP * GROUPS);
        }
        for (int i = 0; i < F::STAGES; i++) {
            barrier_init(&shared.full[i], 1);
            barrier_init(&shared.empty[i], F::RELEASES);
        }
        barriers_publish();
    }
    __syncthreads();
    if (threadIdx.x >= FEEDER) {
        registers_give<FEEDER_REGISTERS>();
        if (threadIdx.x == FEEDER) backward_feed<F, M>(shared, maps, rows, ticket, s, masks);
    } else {
        registers_take<WORKER_REGISTERS>();
        if constexpr (F::DQ) dq_work<F, M>(shared, &maps.dqkv, rows, lse, s, masks, scale);
        else dkdv_work<F, M>(shared, &maps.dqkv, s, masks, scale);
    }
#endif
}

} // namespace

template <class F>
static int backward_launch(const Attention &a, const BackwardMaps &maps, AttentionRows rows, cudaStream_t stream,
                           Error *e) {
    static constexpr decltype(&backward_sm90_kernel<F, CAUSAL>) kernels[] = {
        backward_sm90_kernel<F, CAUSAL>, backward_sm90_kernel<F, DOCUMENTS>, backward_sm90_kernel<F, DROPPED>};
    int blocks;
    TRY(device_attribute(&blocks, cudaDevAttrMultiProcessorCount, e));
    return launch({blocks, THREADS, stream, sizeof(typename F::Shared)}, e, kernels[masks_of(a.masks)], maps, rows,
                  a.lse, a.ticket, a.shape, attention_scale(a.shape), a.masks);
}

int attention_sm90_backward(const Attention &a, AttentionRows rows, cudaStream_t stream, Error *e) {
    const AttentionShape s = a.shape;
    const bool wide = s.D == 128;
    BackwardMaps maps;
    TRY(attention_sm90_map(&maps.dqkv, a.dqkv, 3 * s.C(), STORE_ROWS, s, e));
    TRY(attention_sm90_map(&maps.qkv, a.qkv, 3 * s.C(), BOX_ROWS, s, e));
    TRY(attention_sm90_map(&maps.dout, a.dout, s.C(), BOX_ROWS, s, e));
    TRY(attention_sm90_map(&maps.out, a.out, s.C(), BOX_ROWS, s, e));
    const auto dq = wide ? backward_launch<BackwardLayout<128, true>> : backward_launch<BackwardLayout<64, true>>;
    const auto dkdv = wide ? backward_launch<BackwardLayout<128, false>> : backward_launch<BackwardLayout<64, false>>;
    TRY(dq(a, maps, rows, stream, e));
    return dkdv(a, maps, rows, stream, e);
}
