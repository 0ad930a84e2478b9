// attention_tiled: attention on any GPU, for any D <= 128. Heads are zero-padded to DP = 64 or 128 in shared memory.
// attention_forward and attention_backward, at the end, choose between attention_tiled and attention_sm90.
//
// A block of 4 warps owns ROWS rows (queries in the forward and for dQ, keys for dK and dV) and walks over tiles of the
// other side. A warp owns WARP_ROWS rows. The lanes that hold a row's scores belong to one warp, so softmax needs no
// shared memory. dQ has a separate kernel, which runs first, as in attention_sm90_backward.cu.
//
// A lane holds two rows (r = 0, 1) of an accumulator (WARP_ROWS, N). The lane's element i lies in row own_row() +
// fragment_row(i) and column fragment_column(i). fragment_element(r, k) is the index of element k of row r.
#include "cuda/attention_paths.cuh"
#include "cuda/mma.cuh"
#include "cuda/vec.cuh"

#include <cuda_pipeline.h>

enum { WARPS = 4, THREADS = 32 * WARPS };

// A slice (T, D) of a tensor in device memory: one head's q, k, v, `out`, or the gradient of one of these.
struct Slice {
    const real *data; // first row, first column
    int stride;       // elements from row to row
};

__device__ static Slice slice_of(const real *tensor, AttentionShape s, int head, int parts, int part) {
    int b = head / s.NH, h = head % s.NH, stride = parts * s.C();
    return {tensor + (size_t)b * s.T * stride + part * s.C() + h * s.D, stride};
}

enum { ROWS = 64, WARP_ROWS = 16 };

template <int DP> constexpr int OTHER_BACKWARD = DP == 64 ? 64 : 32; // rows of a tile of the other side
template <int DP, Masks M> constexpr int QUERIES_BACKWARD = DP == 128 && M != CAUSAL ? 16 : OTHER_BACKWARD<DP>;

// Row length of a tile in shared memory, padded against bank conflicts: by 16 bytes in 16-bit builds, where ldmatrix
// reads 8 rows at a time.
template <int DP> constexpr int STRIDE = DP + (sizeof(real) == 2 ? 8 : 1);

// Elements of a lane in an accumulator of N columns.
template <int N> constexpr int ELEMENTS = N / 2;

__device__ static int own_row() { return threadIdx.x % 32 / 4; }

#ifndef GNS_FP32
// ---- 16 bits: mma.sync. P and dS pass from one product to the next in registers. ------------------------------------

// c (16, N) = a (16, DP) b (N, DP)^T, both in shared memory.
template <int DP, int E> __device__ static void multiply_abt(float (&c)[E], const real *a, const real *b) {
    int lane = threadIdx.x % 32;
    clear(c);
    a += lane % 16 * STRIDE<DP> + lane / 16 * 8;
    b += (lane / 16 * 8 + lane % 8) * STRIDE<DP> + lane / 8 % 2 * 8;
    UNROLL_FOR (int k = 0; k < DP; k += 16) {
        unsigned af[4], bf[4];
        ldmatrix(af, a + k);
        UNROLL_FOR (int n = 0; n < E / 4; n += 2) {
            ldmatrix(bf, b + n * 8 * STRIDE<DP> + k);
            mma(c + 4 * n, af, bf[0], bf[1]);
            mma(c + 4 * n + 4, af, bf[2], bf[3]);
        }
    }
}

// c (16, DP) += real(p) (16, K) b (K, DP), p an accumulator, b in shared memory.
template <int DP, int E>
__device__ static void multiply_pb(float (&c)[ELEMENTS<DP>], const float (&p)[E], const real *b) {
    int lane = threadIdx.x % 32;
    b += lane % 16 * STRIDE<DP> + lane / 16 * 8;
    UNROLL_FOR (int k = 0; k < E / 4; k += 2) {
        const float *q = p + 4 * k;
        unsigned af[4] = {pack(q[0], q[1]), pack(q[2], q[3]), pack(q[4], q[5]), pack(q[6], q[7])}, bf[4];
        UNROLL_FOR (int n = 0; n < DP / 8; n += 2) {
            ldmatrix_transposed(bf, b + k * 8 * STRIDE<DP> + n * 8);
            mma(c + 4 * n, af, bf[0], bf[1]);
            mma(c + 4 * n + 4, af, bf[2], bf[3]);
        }
    }
}
#else
// ---- fp32: multiply-adds, no tensor cores ---------------------------------------------------------------------------

template <int DP, int E> __device__ static void multiply_abt(float (&c)[E], const float *a, const float *b) {
    clear(c);
#    pragma unroll 8
    for (int d = 0; d < DP; d++)
        UNROLL_FOR (int i = 0; i < E; i++)
            c[i] += a[(own_row() + fragment_row(i)) * STRIDE<DP> + d] * b[fragment_column(i) * STRIDE<DP> + d];
}

template <int DP, int E>
__device__ static void multiply_pb(float (&c)[ELEMENTS<DP>], const float (&p)[E], const float *b) {
    UNROLL_FOR (int k = 0; k < 2 * E; k++) {
        const int from = threadIdx.x % 32 / 4 * 4 + k % 8 / 2, i = k / 8 * 4 + k % 2; // p(row, k): p[i] of lane from
        const float x[2] = {__shfl_sync(~0u, p[i], from), __shfl_sync(~0u, p[i + 2], from)};
        UNROLL_FOR (int j = 0; j < ELEMENTS<DP>; j++) c[j] += x[j / 2 % 2] * b[k * STRIDE<DP> + fragment_column(j)];
    }
}
#endif

// ---- 16 bits and fp32 -----------------------------------------------------------------------------------------------

// Starts copies of N rows of a slice, from row0 on, into a tile. Writes zeros beyond T and D.
template <int N, int DP> __device__ static void tile_load(real *tile, Slice from, int row0, AttentionShape s) {
    if (sizeof(real) == 2 && s.D % 8 == 0) {
        for (int i = threadIdx.x; i < N * DP / 8; i += THREADS) {
            int r = i / (DP / 8), d = i % (DP / 8) * 8;
            bool valid = row0 + r < s.T && d < s.D;
            const real *at = from.data + (valid ? (size_t)(row0 + r) * from.stride + d : 0);
            __pipeline_memcpy_async(tile + r * STRIDE<DP> + d, at, 16, valid ? 0 : 16); // 16 bytes, 0 or 16 of them 0
        }
        return;
    }
    for (int i = threadIdx.x; i < N * DP; i += THREADS) {
        int r = i / DP, d = i % DP;
        bool valid = row0 + r < s.T && d < s.D;
        tile[r * STRIDE<DP> + d] = valid ? from.data[(size_t)(row0 + r) * from.stride + d] : (real)0.0f;
    }
}

// Awaits the block's threads, copies N rows of each of two slices, from row0 on, into tiles, and awaits the copies.
template <int N, int DP>
__device__ static void tiles_next(real *a_tile, Slice a, real *b_tile, Slice b, int row0, AttentionShape s) {
    __syncthreads();
    tile_load<N, DP>(a_tile, a, row0, s);
    tile_load<N, DP>(b_tile, b, row0, s);
    __pipeline_commit();
    __pipeline_wait_prior(0);
    __syncthreads();
}

// Writes c to a slice (T, D): a lane's first row times factor0, its second times factor1.
template <int E>
__device__ static void store_rows(Slice to, const float (&c)[E], float factor0, float factor1, int row,
                                  AttentionShape s) {
    UNROLL_FOR (int j = 0; j < E; j++) {
        int t = row + fragment_row(j), d = fragment_column(j);
        real *p = (real *)to.data + (size_t)t * to.stride + d;
        if (t < s.T && d < s.D) *p = (real)(c[j] * (fragment_row(j) ? factor1 : factor0));
    }
}

// The rows of a head that a block owns, and the head's slices of qkv.
struct BlockRows {
    int b, head, row0; // row0: first row of the block
    int warp_row, row; // first row of the warp, counted from row0; first row of the lane
    Slice q, k, v;
};

__device__ static BlockRows block_rows(const real *qkv, AttentionShape s, bool backwards) {
    int tiles = s.tiles(ROWS), head = blockIdx.x / tiles, tile = blockIdx.x % tiles;
    int row0 = (backwards ? tiles - 1 - tile : tile) * ROWS, warp_row = threadIdx.x / 32 * WARP_ROWS;
    Slice q = slice_of(qkv, s, head, 3, 0), k = slice_of(qkv, s, head, 3, 1), v = slice_of(qkv, s, head, 3, 2);
    return {head / s.NH, head, row0, warp_row, row0 + warp_row + own_row(), q, k, v};
}

// ---- Forward --------------------------------------------------------------------------------------------------------

// Grid: a block per head and ROWS queries.
template <int DP, Masks M>
__global__ void __launch_bounds__(THREADS, 2) forward_kernel(const __grid_constant__ Attention a, float scale) {
    const AttentionShape s = a.shape;
    constexpr int KEYS = ROWS, E = ELEMENTS<KEYS>;
    extern __shared__ __align__(16) real shared[];
    real *q_tile = shared, *k_tile = q_tile + ROWS * STRIDE<DP>, *v_tile = k_tile + KEYS * STRIDE<DP>;
    BlockRows at = block_rows(a.qkv, s, true); // longest rows first
    const WarpMasks<M, false> masks(a.masks, s, at.b, at.head, at.row0 + at.warp_row);
    float scale2 = scale * LOG2E;
    int key0 = M != CAUSAL ? first_key(a.masks, s, at.b, at.row0) / KEYS * KEYS : 0;

    float o[ELEMENTS<DP>] = {}, m[2] = {-INFINITY, -INFINITY}, l[2] = {0.0f, 0.0f};
    tile_load<ROWS, DP>(q_tile, at.q, at.row0, s);
    for (; key0 < at.row0 + ROWS && key0 < s.T; key0 += KEYS) {
        tiles_next<KEYS, DP>(k_tile, at.k, v_tile, at.v, key0, s);
        float p[E];
        multiply_abt<DP>(p, q_tile + at.warp_row * STRIDE<DP>, k_tile);
        masks.hide(p, key0, -INFINITY);
        UNROLL_FOR (int i = 0; i < 2; i++) {
            float top = m[i];
            UNROLL_FOR (int k = 0; k < E / 2; k++) {
                int j = fragment_element(i, k);
                int key = key0 + fragment_column(j);
                p[j] = key > at.row + fragment_row(j) ? -INFINITY : p[j] * scale2;
                top = fmaxf(top, p[j]);
            }
            top = row_max(top);                          // finite if CAUSAL: each row sees key 0 in the first tile
            if (M != CAUSAL) top = fmaxf(top, -FLT_MAX); // so p = shrink = 0 in a row that has seen no key
            float shrink = exp2f(m[i] - top), sum = 0.0f;
            m[i] = top;
            UNROLL_FOR (int k = 0; k < E / 2; k++) {
                float &x = p[fragment_element(i, k)];
                sum += x = exp2f(x - top);
            }
            l[i] = l[i] * shrink + row_sum(sum);
            UNROLL_FOR (int k = 0; k < ELEMENTS<DP> / 2; k++) o[fragment_element(i, k)] *= shrink;
        }
        const unsigned kept = masks.template kept<E>(key0);
        UNROLL_FOR (int j = 0; j < E && M != CAUSAL; j++)
            if (!(kept & kept_bit(j))) p[j] = 0.0f;
        multiply_pb<DP>(o, p, v_tile);
    }

    store_rows(slice_of(a.out, s, at.head, 1, 0), o, masks.factor / l[0], masks.factor / l[1], at.row, s);
    UNROLL_FOR (int i = 0; i < 2; i++) {
        int t = at.row + fragment_row(fragment_element(i, 0));
        if (fragment_column(0) == 0 && t < s.T) a.lse[(size_t)at.head * s.T + t] = m[i] * LN2 + logf(l[i]);
    }
}

// ---- Backward -------------------------------------------------------------------------------------------------------

// Returns rowsum(dO * O) of a row of D elements. 4 lanes share a row; each sums two of 8 parts.
__device__ static float delta_of(const real *dout, const real *out, int D) {
    float part[2] = {};
    UNROLL_FOR (int i = 0; i < 2; i++) {
        const int first = threadIdx.x % 4 + 4 * i;
        if (D % VECTOR == 0) {
            for (int d = first * VECTOR; d < D; d += 8 * VECTOR)
                part[i] += dot_vectors(*(const uint4 *)(dout + d), *(const uint4 *)(out + d));
        } else {
            for (int d = first; d < D; d += 8) part[i] += (float)dout[d] * (float)out[d];
        }
    }
    float sum = part[0] + part[1];
    sum += __shfl_xor_sync(~0u, sum, 2);
    return sum + __shfl_xor_sync(~0u, sum, 1);
}

// Grid: a block per head and ROWS queries; it walks over the keys that these queries see. Also fills `rows`.
template <int DP, Masks M>
__global__ void __launch_bounds__(THREADS, 2)
    dq_kernel(const __grid_constant__ Attention a, AttentionRows rows, float scale) {
    const AttentionShape s = a.shape;
    constexpr int KEYS = OTHER_BACKWARD<DP>, E = ELEMENTS<KEYS>;
    extern __shared__ __align__(16) real shared[];
    real *q_tile = shared, *do_tile = q_tile + ROWS * STRIDE<DP>, *k_tile = do_tile + ROWS * STRIDE<DP>;
    real *v_tile = k_tile + KEYS * STRIDE<DP>;
    BlockRows at = block_rows(a.qkv, s, true);
    const WarpMasks<M, false> masks(a.masks, s, at.b, at.head, at.row0 + at.warp_row);
    const Slice dout = slice_of(a.dout, s, at.head, 1, 0), out = slice_of(a.out, s, at.head, 1, 0);
    float scale2 = scale * LOG2E, lse2[2], delta[2];
    int key0 = M != CAUSAL ? first_key(a.masks, s, at.b, at.row0) / KEYS * KEYS : 0;
    UNROLL_FOR (int i = 0; i < 2; i++) {
        const int t = at.row + fragment_row(fragment_element(i, 0));
        const size_t row = (size_t)at.head * s.padded_T() + t, start = (size_t)min(t, s.T - 1) * dout.stride;
        lse2[i] = t < s.T ? a.lse[(size_t)at.head * s.T + t] * LOG2E : INFINITY;
        delta[i] = delta_of(dout.data + start, out.data + start, s.D);
        if (t >= s.T) delta[i] = 0.0f;
        if (threadIdx.x % 4 == 0) rows.lse2[row] = lse2[i], rows.delta[row] = delta[i];
    }

    float dq[ELEMENTS<DP>] = {};
    tile_load<ROWS, DP>(q_tile, at.q, at.row0, s);
    tile_load<ROWS, DP>(do_tile, dout, at.row0, s);
    for (; key0 < at.row0 + ROWS && key0 < s.T; key0 += KEYS) {
        tiles_next<KEYS, DP>(k_tile, at.k, v_tile, at.v, key0, s);
        float p[E], dp[E];
        multiply_abt<DP>(p, q_tile + at.warp_row * STRIDE<DP>, k_tile);
        multiply_abt<DP>(dp, do_tile + at.warp_row * STRIDE<DP>, v_tile);
        UNROLL_FOR (int j = 0; j < E; j++) {
            int key = key0 + fragment_column(j), query = at.row + fragment_row(j);
            p[j] = key > query ? 0.0f : exp2f(p[j] * scale2 - lse2[fragment_row(j) > 0]);
        }
        masks.hide(p, key0, 0.0f);
        const unsigned kept = masks.template kept<E>(key0);
        UNROLL_FOR (int j = 0; j < E; j++) {
            if (M != CAUSAL) dp[j] = kept & kept_bit(j) ? dp[j] * masks.factor : 0.0f;
            p[j] *= dp[j] - delta[fragment_row(j) > 0]; // dS
        }
        multiply_pb<DP>(dq, p, k_tile);
    }
    store_rows(slice_of(a.dqkv, s, at.head, 3, 0), dq, scale, scale, at.row, s);
}

// Grid: a block per head and ROWS keys; it walks over the queries that see these keys. Rows of its P and dS are keys.
template <int DP, Masks M>
__global__ void __launch_bounds__(THREADS, 2)
    dkdv_kernel(const __grid_constant__ Attention a, AttentionRows rows, float scale) {
    const AttentionShape s = a.shape;
    constexpr int QUERIES = QUERIES_BACKWARD<DP, M>, E = ELEMENTS<QUERIES>;
    extern __shared__ __align__(16) real shared[];
    real *k_tile = shared, *v_tile = k_tile + ROWS * STRIDE<DP>, *q_tile = v_tile + ROWS * STRIDE<DP>;
    real *do_tile = q_tile + QUERIES * STRIDE<DP>;
    BlockRows at = block_rows(a.qkv, s, false);
    const WarpMasks<M, true> masks(a.masks, s, at.b, at.head, at.row0 + at.warp_row);
    const int end = M != CAUSAL ? last_query(a.masks, s, at.b, at.row0 + ROWS - 1) + 1 : s.T;
    const Slice dout = slice_of(a.dout, s, at.head, 1, 0);
    const float *lse2 = rows.lse2 + (size_t)at.head * s.padded_T(),
                *delta = rows.delta + (size_t)at.head * s.padded_T();
    float scale2 = scale * LOG2E;

    float dk[ELEMENTS<DP>] = {}, dv[ELEMENTS<DP>] = {};
    tile_load<ROWS, DP>(k_tile, at.k, at.row0, s);
    tile_load<ROWS, DP>(v_tile, at.v, at.row0, s);
    for (int query0 = at.row0; query0 < end; query0 += QUERIES) {
        tiles_next<QUERIES, DP>(q_tile, at.q, do_tile, dout, query0, s);
        float p[E], dp[E];
        multiply_abt<DP>(p, k_tile + at.warp_row * STRIDE<DP>, q_tile);
        const unsigned kept = masks.template kept<E>(query0);
        UNROLL_FOR (int j = 0; j < E; j++) {
            int query = query0 + fragment_column(j);
            p[j] = at.row + fragment_row(j) > query ? 0.0f : exp2f(p[j] * scale2 - lse2[query]);
        }
        masks.hide(p, query0, 0.0f);
        UNROLL_FOR (int j = 0; j < E; j++) dp[j] = kept & kept_bit(j) ? p[j] : 0.0f;
        multiply_pb<DP>(dv, dp, do_tile);
        multiply_abt<DP>(dp, v_tile + at.warp_row * STRIDE<DP>, do_tile);
        UNROLL_FOR (int j = 0; j < E; j++) {
            if (M != CAUSAL) dp[j] = kept & kept_bit(j) ? dp[j] * masks.factor : 0.0f;
            p[j] *= dp[j] - delta[query0 + fragment_column(j)]; // dS
        }
        multiply_pb<DP>(dk, p, q_tile);
    }
    store_rows(slice_of(a.dqkv, s, at.head, 3, 1), dk, scale, scale, at.row, s);
    store_rows(slice_of(a.dqkv, s, at.head, 3, 2), dv, masks.factor, masks.factor, at.row, s);
}

int attention_tiled_forward(const Attention &a, cudaStream_t stream, Error *e) {
    const AttentionShape s = a.shape;
    const bool narrow = s.D <= 64, causal = masks_of(a.masks) == CAUSAL;
    const auto kernel = narrow ? (causal ? forward_kernel<64, CAUSAL> : forward_kernel<64, DROPPED>)
                               : (causal ? forward_kernel<128, CAUSAL> : forward_kernel<128, DROPPED>);
    const size_t bytes = 3 * ROWS * (narrow ? STRIDE<64> : STRIDE<128>)*sizeof(real);
    return launch({s.heads() * s.tiles(ROWS), THREADS, stream, bytes}, e, kernel, a, attention_scale(s));
}

int attention_tiled_backward(const Attention &a, AttentionRows rows, cudaStream_t stream, Error *e) {
    const AttentionShape s = a.shape;
    const bool narrow = s.D <= 64, causal = masks_of(a.masks) == CAUSAL;
    const int own = 2 * ROWS, other = 2 * (narrow ? OTHER_BACKWARD<64> : OTHER_BACKWARD<128>);
    const size_t bytes = (own + other) * (narrow ? STRIDE<64> : STRIDE<128>)*sizeof(real);
    const auto dq = narrow ? (causal ? dq_kernel<64, CAUSAL> : dq_kernel<64, DROPPED>)
                           : (causal ? dq_kernel<128, CAUSAL> : dq_kernel<128, DROPPED>);
    const auto dkdv = narrow ? (causal ? dkdv_kernel<64, CAUSAL> : dkdv_kernel<64, DROPPED>)
                             : (causal ? dkdv_kernel<128, CAUSAL> : dkdv_kernel<128, DROPPED>);
    const Launch l = {s.heads() * s.tiles(ROWS), THREADS, stream, bytes};
    TRY(launch(l, e, dq, a, rows, attention_scale(s))); // fills `rows`
    return launch(l, e, dkdv, a, rows, attention_scale(s));
}

// ---- The choice of the path -----------------------------------------------------------------------------------------

static bool is_fast(AttentionShape s) { return (s.D == 64 || s.D == 128) && sm90_runs(); }

int attention_forward(const Attention &a, cudaStream_t stream, Error *e) {
    return (is_fast(a.shape) ? attention_sm90_forward : attention_tiled_forward)(a, stream, e);
}

size_t attention_workspace_bytes(AttentionShape s) { return 2 * sizeof(float) * (size_t)s.heads() * s.padded_T(); }

int attention_backward(const Attention &a, cudaStream_t stream, Error *e) {
    float *lse2 = (float *)a.workspace, *delta = lse2 + (size_t)a.shape.heads() * a.shape.padded_T();
    return (is_fast(a.shape) ? attention_sm90_backward : attention_tiled_backward)(a, {lse2, delta}, stream, e);
}
