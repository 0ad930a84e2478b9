// attention_fp32: attention in plain fp32, for comparing engines. No tensor cores, so no TF32.
//
// A block owns 32 rows (queries forward and for dQ, keys for dK and dV) and walks over tiles of 32 of the other side.
// Of a 32 x 32 tile of scores a thread has rows 2y, 2y + 1 and columns x + 8j; of an accumulator (32, D) the same rows
// and columns x + 8j. Eight neighbouring lanes share a row.
#include "cuda/attention_paths.cuh"
#ifdef GNS_FP32

enum { ROWS = 32, LANES = 8, THREADS = ROWS / 2 * LANES, SCORES = ROWS / LANES, SCORE_STRIDE = ROWS + 1 };

struct Place {
    int x, row; // lane within the row; first of the two rows
};

__device__ static Place place_of_thread() { return {(int)threadIdx.x % LANES, (int)threadIdx.x / LANES * 2}; }

// One head's q, k, v, out or a gradient of them: (T, D), rows `stride` apart.
struct Slice {
    const float *data;
    int stride;
};

__device__ static Slice slice_of(const float *tensor, AttentionShape s, int head, int parts, int part) {
    int b = head / s.NH, h = head % s.NH, stride = parts * s.C();
    return {tensor + (size_t)b * s.T * stride + part * s.C() + h * s.D, stride};
}

// Rows row0.. of a slice into shared memory, zeros beyond T and D.
template <int DP> __device__ static void tile_load(float *tile, Slice from, int row0, AttentionShape s) {
    for (int i = threadIdx.x; i < ROWS * DP; i += THREADS) {
        int r = i / DP, d = i % DP;
        bool inside = row0 + r < s.T && d < s.D;
        tile[r * (DP + 1) + d] = inside ? from.data[(size_t)(row0 + r) * from.stride + d] : 0.0f;
    }
}

template <int N> __device__ static void clear(float (&c)[2][N]) {
#    pragma unroll
    for (int i = 0; i < 2; i++)
#    pragma unroll
        for (int j = 0; j < N; j++) c[i][j] = 0.0f;
}

// c (32, 32) = a b^T, both (32, DP) in shared memory.
template <int DP> __device__ static void scores(float (&c)[2][SCORES], const float *a, const float *b) {
    Place p = place_of_thread();
    clear(c);
#    pragma unroll 8
    for (int d = 0; d < DP; d++)
#    pragma unroll
        for (int j = 0; j < SCORES; j++)
#    pragma unroll
            for (int i = 0; i < 2; i++) c[i][j] += a[(p.row + i) * (DP + 1) + d] * b[(p.x + LANES * j) * (DP + 1) + d];
}

// c (32, DP) += p (32, 32) b (32, DP); a row of p goes through shared memory, seen by the warp that wrote it alone.
template <int DP>
__device__ static void accumulate(float (&c)[2][DP / LANES], const float (&p)[2][SCORES], float *p_tile,
                                  const float *b) {
    Place place = place_of_thread();
    __syncwarp();
#    pragma unroll
    for (int i = 0; i < 2; i++)
#    pragma unroll
        for (int j = 0; j < SCORES; j++) p_tile[(place.row + i) * SCORE_STRIDE + place.x + LANES * j] = p[i][j];
    __syncwarp();
#    pragma unroll 4
    for (int k = 0; k < ROWS; k++)
#    pragma unroll
        for (int j = 0; j < DP / LANES; j++)
#    pragma unroll
            for (int i = 0; i < 2; i++)
                c[i][j] += p_tile[(place.row + i) * SCORE_STRIDE + k] * b[k * (DP + 1) + place.x + LANES * j];
}

template <int N>
__device__ static void store_rows(Slice to, const float (&c)[2][N], const float (&factor)[2], int row0,
                                  AttentionShape s) {
    Place p = place_of_thread();
#    pragma unroll
    for (int i = 0; i < 2; i++)
#    pragma unroll
        for (int j = 0; j < N; j++) {
            int t = row0 + p.row + i, d = p.x + LANES * j;
            if (t < s.T && d < s.D) ((float *)to.data)[(size_t)t * to.stride + d] = c[i][j] * factor[i];
        }
}

// ---------------------------------------------------------------------------------------------------------------------
// Forward

template <int DP>
__global__ void __launch_bounds__(THREADS, 2)
    forward_kernel(float *out, float *lse, const float *qkv, AttentionShape s, float scale) {
    extern __shared__ float shared[];
    float *q_tile = shared, *k_tile = q_tile + ROWS * (DP + 1), *v_tile = k_tile + ROWS * (DP + 1);
    float *p_tile = v_tile + ROWS * (DP + 1);
    int tiles = s.tiles(ROWS), head = blockIdx.x / tiles, row0 = blockIdx.x % tiles * ROWS;
    Place place = place_of_thread();
    float scale2 = scale * LOG2E;

    float o[2][DP / LANES], m[2] = {-INFINITY, -INFINITY}, l[2] = {0.0f, 0.0f};
    clear(o);
    tile_load<DP>(q_tile, slice_of(qkv, s, head, 3, 0), row0, s);
    for (int key0 = 0; key0 <= row0; key0 += ROWS) {
        __syncthreads();
        tile_load<DP>(k_tile, slice_of(qkv, s, head, 3, 1), key0, s);
        tile_load<DP>(v_tile, slice_of(qkv, s, head, 3, 2), key0, s);
        __syncthreads();

        float p[2][SCORES];
        scores<DP>(p, q_tile, k_tile);
#    pragma unroll
        for (int i = 0; i < 2; i++) {
            float top = m[i], sum = 0.0f;
#    pragma unroll
            for (int j = 0; j < SCORES; j++) {
                p[i][j] = key0 + place.x + LANES * j > row0 + place.row + i ? -INFINITY : p[i][j] * scale2;
                top = fmaxf(top, p[i][j]);
            }
#    pragma unroll
            for (int offset = LANES / 2; offset > 0; offset /= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, offset));
#    pragma unroll
            for (int j = 0; j < SCORES; j++) sum += p[i][j] = exp2f(p[i][j] - top);
#    pragma unroll
            for (int offset = LANES / 2; offset > 0; offset /= 2) sum += __shfl_xor_sync(~0u, sum, offset);
            float shrink = exp2f(m[i] - top);
            m[i] = top;
            l[i] = l[i] * shrink + sum;
#    pragma unroll
            for (int j = 0; j < DP / LANES; j++) o[i][j] *= shrink;
        }
        accumulate<DP>(o, p, p_tile, v_tile);
    }

    float inverse[2] = {1.0f / l[0], 1.0f / l[1]};
    store_rows(slice_of(out, s, head, 1, 0), o, inverse, row0, s);
#    pragma unroll
    for (int i = 0; i < 2; i++) {
        int t = row0 + place.row + i;
        if (place.x == 0 && t < s.T) lse[(size_t)head * s.T + t] = m[i] * LN2 + logf(l[i]);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Backward

// A block owns 32 queries and walks over the keys they see.
template <int DP>
__global__ void __launch_bounds__(THREADS, 2)
    dq_kernel(float *dqkv, const float *dout, const float *qkv, AttentionRows rows, AttentionShape s, float scale) {
    extern __shared__ float shared[];
    float *q_tile = shared, *do_tile = q_tile + ROWS * (DP + 1), *k_tile = do_tile + ROWS * (DP + 1);
    float *v_tile = k_tile + ROWS * (DP + 1), *p_tile = v_tile + ROWS * (DP + 1);
    int tiles = s.tiles(ROWS), head = blockIdx.x / tiles, row0 = blockIdx.x % tiles * ROWS;
    Place place = place_of_thread();
    size_t first = (size_t)head * s.padded_T() + row0 + place.row;
    float scale2 = scale * LOG2E;

    float dq[2][DP / LANES];
    clear(dq);
    tile_load<DP>(q_tile, slice_of(qkv, s, head, 3, 0), row0, s);
    tile_load<DP>(do_tile, slice_of(dout, s, head, 1, 0), row0, s);
    for (int key0 = 0; key0 <= row0; key0 += ROWS) {
        __syncthreads();
        tile_load<DP>(k_tile, slice_of(qkv, s, head, 3, 1), key0, s);
        tile_load<DP>(v_tile, slice_of(qkv, s, head, 3, 2), key0, s);
        __syncthreads();

        float p[2][SCORES], dp[2][SCORES];
        scores<DP>(p, q_tile, k_tile);
        scores<DP>(dp, do_tile, v_tile);
#    pragma unroll
        for (int i = 0; i < 2; i++)
#    pragma unroll
            for (int j = 0; j < SCORES; j++) {
                bool hidden = key0 + place.x + LANES * j > row0 + place.row + i;
                p[i][j] = hidden ? 0.0f : exp2f(p[i][j] * scale2 - rows.lse2[first + i]);
                p[i][j] *= dp[i][j] - rows.delta[first + i]; // dS
            }
        accumulate<DP>(dq, p, p_tile, k_tile);
    }
    float factor[2] = {scale, scale};
    store_rows(slice_of(dqkv, s, head, 3, 0), dq, factor, row0, s);
}

// A block owns 32 keys and walks over the queries that see them. Everything is transposed: rows are keys.
template <int DP>
__global__ void __launch_bounds__(THREADS, 2)
    dkdv_kernel(float *dqkv, const float *dout, const float *qkv, AttentionRows rows, AttentionShape s, float scale) {
    extern __shared__ float shared[];
    float *k_tile = shared, *v_tile = k_tile + ROWS * (DP + 1), *q_tile = v_tile + ROWS * (DP + 1);
    float *do_tile = q_tile + ROWS * (DP + 1), *p_tile = do_tile + ROWS * (DP + 1);
    int tiles = s.tiles(ROWS), head = blockIdx.x / tiles, row0 = blockIdx.x % tiles * ROWS;
    Place place = place_of_thread();
    const float *lse2 = rows.lse2 + (size_t)head * s.padded_T(), *delta = rows.delta + (size_t)head * s.padded_T();
    float scale2 = scale * LOG2E;

    float dk[2][DP / LANES], dv[2][DP / LANES];
    clear(dk);
    clear(dv);
    tile_load<DP>(k_tile, slice_of(qkv, s, head, 3, 1), row0, s);
    tile_load<DP>(v_tile, slice_of(qkv, s, head, 3, 2), row0, s);
    for (int query0 = row0; query0 < s.T; query0 += ROWS) {
        __syncthreads();
        tile_load<DP>(q_tile, slice_of(qkv, s, head, 3, 0), query0, s);
        tile_load<DP>(do_tile, slice_of(dout, s, head, 1, 0), query0, s);
        __syncthreads();

        float p[2][SCORES], dp[2][SCORES];
        scores<DP>(p, k_tile, q_tile);
        scores<DP>(dp, v_tile, do_tile);
#    pragma unroll
        for (int i = 0; i < 2; i++)
#    pragma unroll
            for (int j = 0; j < SCORES; j++) {
                int query = query0 + place.x + LANES * j;
                bool hidden = row0 + place.row + i > query;
                p[i][j] = hidden ? 0.0f : exp2f(p[i][j] * scale2 - lse2[query]);
                dp[i][j] = p[i][j] * (dp[i][j] - delta[query]); // dS
            }
        accumulate<DP>(dv, p, p_tile, do_tile);
        accumulate<DP>(dk, dp, p_tile, q_tile);
    }
    float factor[2] = {scale, scale}, one[2] = {1.0f, 1.0f};
    store_rows(slice_of(dqkv, s, head, 3, 1), dk, factor, row0, s);
    store_rows(slice_of(dqkv, s, head, 3, 2), dv, one, row0, s);
}

// ---------------------------------------------------------------------------------------------------------------------
// Launches

template <int DP, typename Kernel> static int shared_memory_allow(Kernel kernel, int tiles, size_t *bytes, Error *e) {
    *bytes = ((size_t)tiles * ROWS * (DP + 1) + ROWS * SCORE_STRIDE) * sizeof(float);
    CUDA_TRY(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)*bytes), e);
    return 0;
}

template <int DP>
static int forward(float *out, float *lse, const float *qkv, AttentionShape s, cudaStream_t stream, Error *e) {
    size_t bytes;
    TRY(shared_memory_allow<DP>(forward_kernel<DP>, 3, &bytes, e));
    forward_kernel<DP><<<s.heads() * s.tiles(ROWS), THREADS, bytes, stream>>>(out, lse, qkv, s, attention_scale(s));
    CUDA_LAUNCHED(e);
    return 0;
}

template <int DP>
static int backward(float *dqkv, const float *dout, const float *qkv, AttentionRows rows, AttentionShape s,
                    cudaStream_t stream, Error *e) {
    size_t bytes;
    int blocks = s.heads() * s.tiles(ROWS);
    TRY(shared_memory_allow<DP>(dkdv_kernel<DP>, 4, &bytes, e));
    dkdv_kernel<DP><<<blocks, THREADS, bytes, stream>>>(dqkv, dout, qkv, rows, s, attention_scale(s));
    CUDA_LAUNCHED(e);
    TRY(shared_memory_allow<DP>(dq_kernel<DP>, 4, &bytes, e));
    dq_kernel<DP><<<blocks, THREADS, bytes, stream>>>(dqkv, dout, qkv, rows, s, attention_scale(s));
    CUDA_LAUNCHED(e);
    return 0;
}

int attention_fp32_forward(float *out, float *lse, const float *qkv, AttentionShape s, cudaStream_t stream, Error *e) {
    return (s.D <= 64 ? forward<64> : forward<128>)(out, lse, qkv, s, stream, e);
}

int attention_fp32_backward(float *dqkv, const float *dout, const float *qkv, AttentionRows rows, AttentionShape s,
                            cudaStream_t stream, Error *e) {
    return (s.D <= 64 ? backward<64> : backward<128>)(dqkv, dout, qkv, rows, s, stream, e);
}

#endif
