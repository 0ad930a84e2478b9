// attention_sm90: the forward on Hopper.
//
// Tensor cores, memory and exponentials take 0.13, 0.1 and 0.1 ms at B 64, NH 12, T 1024, D 64, so the kernel overlaps
// them:
// - Blocks are persistent, one per multiprocessor. A block has one or two teams of a feeder and two warpgroups. The
//   feeder draws tiles of queries, and copies Q, K and V to shared memory. Each warpgroup owns 64 queries of a tile.
// - Warpgroups do not wait for each other: one computes its softmax while another multiplies or starts new queries.
// - A warpgroup's softmax of a tile of keys overlaps the product P V of its previous tile of keys.
#include "cuda/attention_sm90.cuh"

template <int D_> struct ForwardLayout {
    static constexpr int D = D_, TEAMS = D == 64 ? 2 : 1, GROUPS = 2, QUERIES = 64 * GROUPS;
    static constexpr int KEYS = D == 64 ? 64 : 128, STAGES = D == 64 ? 3 : 2, Q_STAGES = 2;
    // The last warpgroup holds the feeders and gives most of its registers to the other warpgroups. At launch a thread
    // has 96 registers (D = 64) or 168.
    static constexpr int FEEDERS = WARPGROUP * GROUPS * TEAMS, THREADS = FEEDERS + WARPGROUP;
    static constexpr int FEEDER_REGISTERS = D == 64 ? 32 : 40, WORKER_REGISTERS = D == 64 ? 112 : 232;

    static constexpr int Q_BYTES = TILE_BYTES<64, D>, KV_BYTES = TILE_BYTES<KEYS, D>;
    struct alignas(SHARED_ALIGNMENT) Team {
        char q[Q_STAGES][GROUPS][Q_BYTES];
        char out[GROUPS][Q_BYTES]; // staging: 16 rows per warp
        char k[STAGES][KV_BYTES], v[STAGES][KV_BYTES];
        HeadTile work[Q_STAGES];
        uint64_t q_full[Q_STAGES], q_empty[Q_STAGES];
        uint64_t k_full[STAGES], k_empty[STAGES], v_full[STAGES], v_empty[STAGES];
    };
};

namespace {

#ifdef SM90_CODE

template <class F, Masks M>
__device__ void forward_feed(typename F::Team &shared, const CUtensorMap *qkv, unsigned *ticket, AttentionShape s,
                             const AttentionMasks &masks) {
    Ring<F::Q_STAGES> q_ring;
    Ring<F::STAGES> ring;
    for (;;) {
        HeadTile work = work_draw(ticket, F::TEAMS * gridDim.x, gridDim.x, s.tiles(F::QUERIES), s);
        int row = work.tile * F::QUERIES;
        uint64_t *q_full = &shared.q_full[q_ring.stage];
        barrier_wait(&shared.q_empty[q_ring.stage], q_ring.parity ^ 1);
        shared.work[q_ring.stage] = work;
        if (work.tile < 0) {
            barrier_arrive(q_full);
            return;
        }
        barrier_expect(q_full, F::GROUPS * F::Q_BYTES);
        for (int g = 0; g < F::GROUPS; g++)
            tile_in<64, F::D>(shared.q[q_ring.stage][g], qkv, q_full, work.column, row + 64 * g, work.b);
        q_ring.advance();
        int first = M == CAUSAL ? 0 : first_key(masks, s, work.b, row) / F::KEYS;
#    pragma unroll 1
        for (int n = key_tiles<F::KEYS>(row + F::QUERIES - 1, s.T) - 1; n >= first; n--) {
            int stage = ring.stage;
            barrier_wait(&shared.k_empty[stage], ring.parity ^ 1);
            barrier_expect(&shared.k_full[stage], F::KV_BYTES);
            tile_in<F::KEYS, F::D>(shared.k[stage], qkv, &shared.k_full[stage], s.C() + work.column, n * F::KEYS,
                                   work.b);
            barrier_wait(&shared.v_empty[stage], ring.parity ^ 1);
            barrier_expect(&shared.v_full[stage], F::KV_BYTES);
            tile_in<F::KEYS, F::D>(shared.v[stage], qkv, &shared.v_full[stage], 2 * s.C() + work.column, n * F::KEYS,
                                   work.b);
            ring.advance();
        }
    }
}

// For each of a thread's two rows: the maximum raw score, and the thread's part of the sum of probabilities.
struct Softmax {
    float top[2], sum[2];
};

// An old maximum is kept, without rescaling, while exponentials stay within 2^STALE_LIMIT. They then cannot overflow.
constexpr float STALE_LIMIT = 8.0f;

// Turns scores (64, KEYS) into unnormalised probabilities. shrink: factor for earlier sums and outputs.
template <bool DIAGONAL, int N>
__device__ void softmax_step(float (&c)[N], Softmax &state, float (&shrink)[2], float scale2, int row, int key0) {
    UNROLL_FOR (int i = 0; i < 2; i++) {
        float top = state.top[i], sum = 0.0f;
        UNROLL_FOR (int k = 0; k < N / 2; k++) {
            int j = fragment_element(i, k);
            if (DIAGONAL && key0 + fragment_column(j) > row + fragment_row(j)) c[j] = -INFINITY;
            top = fmaxf(top, c[j]);
        }
        top = row_max(top); // finite: the first tile holds the key of the row's own position
        if ((top - state.top[i]) * scale2 <= STALE_LIMIT) top = state.top[i];
        shrink[i] = exp2_fast((state.top[i] - top) * scale2);
        state.top[i] = top;
        float offset = top * scale2;
        UNROLL_FOR (int k = 0; k < N / 2; k++) {
            float &x = c[fragment_element(i, k)];
            x = exp2_fast(fmaf(x, scale2, -offset));
            sum += x;
        }
        state.sum[i] = state.sum[i] * shrink[i] + sum;
    }
}

// Clears dropped elements of a warp's packed probabilities (16, 2 N).
template <Masks M, int N> __device__ void drop_packed(unsigned (&p)[N], const WarpMasks<M, false> &masks, int key0) {
    UNROLL_FOR (int k = 0; k < N / 4 && M == DROPPED; k++) {
        const RngBlock block = lane_block(masks.dropout, masks.warp_row, key0 + 16 * k);
        UNROLL_FOR (int w = 0; w < 4; w++) p[4 * k + w] &= dropout_kept(masks.dropout.blocks.c, block.word[w]);
    }
}

// o (64, D) = unnormalised output of a warpgroup's 64 queries. Walks over tiles of keys, from the diagonal back.
template <class F, Masks M>
__device__ void queries_attend(typename F::Team &shared, Ring<F::STAGES> &ring, float (&o)[F::D / 2], Softmax &state,
                               LeftShared q, int last_tile, int first_tile, int row, float scale2,
                               const WarpMasks<M, false> &masks) {
    float c[F::KEYS / 2], shrink[2];
    unsigned p[F::KEYS / 4];
    int v_stage = ring.stage;
    clear(o);

    barrier_wait(&shared.k_full[ring.stage], ring.parity);
    wgmma_fence();
    issue_abt<F::D, F::KEYS>(c, q, shared.k[ring.stage]);
    wgmma_wait<0>();
    registers_settle(c);
    warp_arrive(&shared.k_empty[ring.stage]);
    masks.hide(c, last_tile * F::KEYS, -INFINITY);
    softmax_step<true>(c, state, shrink, scale2, row, last_tile * F::KEYS);
    pack_rows(p, c);
    drop_packed(p, masks, last_tile * F::KEYS);
    barrier_wait(&shared.v_full[ring.stage], ring.parity);
    ring.advance();

    for (int n = last_tile - 1; n >= first_tile; n--) {
        barrier_wait(&shared.k_full[ring.stage], ring.parity);
        registers_settle(c);
        registers_settle(o);
        wgmma_fence();
        issue_abt<F::D, F::KEYS>(c, q, shared.k[ring.stage]);
        issue_pb<F::D, F::KEYS>(o, p, shared.v[v_stage]);
        wgmma_wait<1>();
        registers_settle(c);
        warp_arrive(&shared.k_empty[ring.stage]);
        masks.hide(c, n * F::KEYS, -INFINITY);
        softmax_step<false>(c, state, shrink, scale2, row, 0);
        // `never` is false, but depends on the softmax, so the compiler must keep the softmax before the wait.
        unsigned never = state.sum[0] < 0.0f || state.sum[1] < 0.0f;
        barrier_wait(&shared.v_full[ring.stage], ring.parity ^ never);
        wgmma_wait<0>();
        registers_settle(o);
        warp_arrive(&shared.v_empty[v_stage]);
        v_stage = ring.stage;
        ring.advance();
        pack_rows(p, c);
        drop_packed(p, masks, n * F::KEYS);
        if (__any_sync(~0u, shrink[0] != 1.0f || shrink[1] != 1.0f)) {
            UNROLL_FOR (int i = 0; i < F::D / 2; i++) o[i] *= shrink[i / 2 % 2];
        }
    }

    registers_settle(o);
    wgmma_fence();
    issue_pb<F::D, F::KEYS>(o, p, shared.v[v_stage]);
    wgmma_wait<0>();
    registers_settle(o);
    warp_arrive(&shared.v_empty[v_stage]);
}

// Awaits the next `count` tiles and releases them unread.
template <class F> __device__ void tiles_skip(typename F::Team &shared, Ring<F::STAGES> &ring, int count) {
#    pragma unroll 1
    for (int i = 0; i < count; i++) {
        barrier_wait(&shared.k_full[ring.stage], ring.parity);
        warp_arrive(&shared.k_empty[ring.stage]);
        barrier_wait(&shared.v_full[ring.stage], ring.parity);
        warp_arrive(&shared.v_empty[ring.stage]);
        ring.advance();
    }
}

template <class F, Masks M>
__device__ void forward_work(typename F::Team &shared, const CUtensorMap *out, float *lse, AttentionShape s,
                             const AttentionMasks &all_masks, float scale) {
    int g = uniform(threadIdx.x / WARPGROUP % F::GROUPS), warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    Ring<F::Q_STAGES> q_ring;
    Ring<F::STAGES> ring;
    for (;;) {
        barrier_wait(&shared.q_full[q_ring.stage], q_ring.parity);
        const HeadTile &work = shared.work[q_ring.stage]; // a reference: no registers are free for a copy
        int tile = uniform(work.tile);
        if (tile < 0) break;
        int block_row = tile * F::QUERIES, group_row = block_row + 64 * g;
        int tiles = key_tiles<F::KEYS>(block_row + F::QUERIES - 1, s.T);
        int first = M == CAUSAL ? 0 : first_key(all_masks, s, work.b, block_row) / F::KEYS;
        int own_tiles = group_row < s.T ? key_tiles<F::KEYS>(group_row + 63, s.T) : first;
        tiles_skip<F>(shared, ring, tiles - own_tiles); // keys after all queries of this warpgroup
        if (group_row >= s.T) {
            barrier_arrive(&shared.q_empty[q_ring.stage]);
            q_ring.advance();
            continue;
        }
        float o[F::D / 2];
        Softmax state = {{-INFINITY, -INFINITY}, {0.0f, 0.0f}};
        int warp_row = group_row + 16 * warp, row = warp_row + lane / 4;
        int own_first = M == CAUSAL ? 0 : first_key(all_masks, s, work.b, group_row) / F::KEYS;
        const WarpMasks<M, false> masks(all_masks, s, work.b, work.head, warp_row);
        queries_attend<F, M>(shared, ring, o, state, {shared.q[q_ring.stage][g]}, own_tiles - 1, own_first, row,
                             scale * LOG2E, masks);
        if (M != CAUSAL) tiles_skip<F>(shared, ring, own_first - first); // keys before all documents of this warpgroup

        float sum0 = row_sum(state.sum[0]), sum1 = row_sum(state.sum[1]);
        char *stage = shared.out[g] + warp * TILE_BYTES<16, F::D>;
        warp_rows_out<F::D>(out, stage, o, masks.factor / sum0, masks.factor / sum1, work.column, warp_row, work.b);
        float *lse_head = lse + (size_t)work.head * s.T;
        if (lane % 4 == 0 && row < s.T) lse_head[row] = state.top[0] * scale + logf(sum0);
        if (lane % 4 == 0 && row + 8 < s.T) lse_head[row + 8] = state.top[1] * scale + logf(sum1);
        barrier_arrive(&shared.q_empty[q_ring.stage]);
        q_ring.advance();
    }
    if (lane == 0) copy_out_wait();
}

#endif

template <class F, Masks M>
__global__ void __launch_bounds__(SM90_THREADS(F::THREADS), 1)
    forward_sm90_kernel(const __grid_constant__ CUtensorMap qkv, const __grid_constant__ CUtensorMap out, float *lse,
                        unsigned *ticket, AttentionShape s, float scale, const __grid_constant__ AttentionMasks masks) {
#ifdef SM90_CODE
    typename F::Team *teams = (typename F::Team *)shared_memory();
    if (threadIdx.x < F::TEAMS) {
        typename F::Team &team = teams[threadIdx.x];
        for (int i = 0; i < F::Q_STAGES; i++) {
            barrier_init(&team.q_full[i], 1);
            barrier_init(&team.q_empty[i], WARPGROUP * F::GROUPS);
        }
        for (int i = 0; i < F::STAGES; i++) {
            barrier_init(&team.k_full[i], 1);
            barrier_init(&team.v_full[i], 1);
            barrier_init(&team.k_empty[i], 4 * F::GROUPS);
            barrier_init(&team.v_empty[i], 4 * F::GROUPS);
        }
        barriers_publish();
    }
    __syncthreads();
    if (threadIdx.x >= F::FEEDERS) {
        registers_give<F::FEEDER_REGISTERS>();
        int team = (threadIdx.x - F::FEEDERS) / 32;
        if (team < F::TEAMS && threadIdx.x % 32 == 0) forward_feed<F, M>(teams[team], &qkv, ticket, s, masks);
    } else {
        registers_take<F::WORKER_REGISTERS>();
        int team = uniform(threadIdx.x / (WARPGROUP * F::GROUPS));
        forward_work<F, M>(teams[team], &out, lse, s, masks, scale);
    }
#endif
}

} // namespace

int attention_sm90_forward(const Attention &a, cudaStream_t stream, Error *e) {
    typedef ForwardLayout<64> Narrow;
    typedef ForwardLayout<128> Wide;
    static constexpr decltype(&forward_sm90_kernel<Narrow, CAUSAL>) kernels[2][3] = {
        {forward_sm90_kernel<Narrow, CAUSAL>, forward_sm90_kernel<Narrow, DOCUMENTS>,
         forward_sm90_kernel<Narrow, DROPPED>},
        {forward_sm90_kernel<Wide, CAUSAL>, forward_sm90_kernel<Wide, DOCUMENTS>, forward_sm90_kernel<Wide, DROPPED>}};
    const AttentionShape s = a.shape;
    const bool wide = s.D == 128;
    CUtensorMap qkv, out;
    int blocks;
    TRY(attention_sm90_map(&qkv, a.qkv, 3 * s.C(), BOX_ROWS, s, e));
    TRY(attention_sm90_map(&out, a.out, s.C(), STORE_ROWS, s, e));
    TRY(device_attribute(&blocks, cudaDevAttrMultiProcessorCount, e));
    const Launch l = {blocks, wide ? Wide::THREADS : Narrow::THREADS, stream,
                      wide ? sizeof(Wide::Team) : Narrow::TEAMS * sizeof(Narrow::Team)};
    return launch(l, e, kernels[wide][masks_of(a.masks)], qkv, out, a.lse, a.ticket, s, attention_scale(s), a.masks);
}
