// attention_mma: attention in bf16 on any GPU from sm_80, for any D <= 128 (zero-padded to 64 or 128 in shared memory).
//
// A block of 4 warps owns 64 rows (queries forward and for dQ, keys for dK and dV) and walks over the tiles of the
// other side. A warp owns 16 rows, so that a row's softmax stays inside 4 lanes and the second product of each pair
// takes its left operand from the registers in which the first one left it. dQ has its own kernel: 7 products instead
// of 5, and in exchange no sum over blocks, hence no atomics and no order to enforce.
#include "cuda/attention_paths.cuh"
#ifndef GNS_FP32

typedef __nv_bfloat16 bf16;

enum { WARPS = 4, THREADS = 32 * WARPS, ROWS = 64, WARP_ROWS = 16 };

// Row length of a tile in shared memory: 16 bytes of padding spread the 8 rows that ldmatrix reads over all banks.
template <int DP> struct Padded { static constexpr int stride = DP + 8; };

// ---------------------------------------------------------------------------------------------------------------------
// Tiles in shared memory

// A (rows of T, D columns) slice of a tensor in device memory: one head's q, k, v, out or a gradient of them.
struct Slice {
    const bf16 *data; // first row, first column
    int stride;       // elements from row to row
};

__device__ static Slice slice_of(const bf16 *tensor, AttentionShape s, int head, int parts, int part) {
    int b = head / s.NH, h = head % s.NH, stride = parts * s.C();
    return {tensor + (size_t)b * s.T * stride + part * s.C() + h * s.D, stride};
}

__device__ static void copy_async_16(void *to, const void *from, bool valid) {
    unsigned address = (unsigned)__cvta_generic_to_shared(to);
    int bytes = valid ? 16 : 0; // the rest of the 16 is filled with zeros
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(from), "r"(bytes) : "memory");
}

// Starts to copy rows row0.. of a slice; zeros beyond T and D.
template <int N, int DP> __device__ static void tile_load(bf16 *tile, Slice from, int row0, AttentionShape s) {
    constexpr int stride = Padded<DP>::stride;
    if (s.D % 8 == 0) {
        for (int i = threadIdx.x; i < N * DP / 8; i += THREADS) {
            int r = i / (DP / 8), d = i % (DP / 8) * 8;
            bool valid = row0 + r < s.T && d < s.D;
            copy_async_16(tile + r * stride + d, from.data + (valid ? (size_t)(row0 + r) * from.stride + d : 0), valid);
        }
    } else {
        for (int i = threadIdx.x; i < N * DP; i += THREADS) {
            int r = i / DP, d = i % DP;
            bool valid = row0 + r < s.T && d < s.D;
            tile[r * stride + d] = valid ? from.data[(size_t)(row0 + r) * from.stride + d] : __float2bfloat16(0.0f);
        }
    }
}

__device__ static void tile_wait() {
    asm volatile("cp.async.wait_all;" ::: "memory");
    __syncthreads();
}

// ---------------------------------------------------------------------------------------------------------------------
// Products of a warp. Accumulators follow mma.m16n8k16: of the 8 columns of block n, lane l holds columns
// 2 (l % 4) + {0, 1} of row l / 4 in [n][0..1] and of row l / 4 + 8 in [n][2..3].

__device__ static void ldmatrix(unsigned (&r)[4], const bf16 *p) {
    unsigned address = (unsigned)__cvta_generic_to_shared(p);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address));
}

__device__ static void ldmatrix_transposed(unsigned (&r)[4], const bf16 *p) {
    unsigned address = (unsigned)__cvta_generic_to_shared(p);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address));
}

__device__ static void mma(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ static unsigned pack(float low, float high) {
    __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return *(unsigned *)&pair;
}

template <int N> __device__ static void clear(float (&c)[N][4]) {
#    pragma unroll
    for (int n = 0; n < N; n++) c[n][0] = c[n][1] = c[n][2] = c[n][3] = 0.0f;
}

// c (16, 8N) += a (16, DP) b (8N, DP)^T, both in shared memory.
template <int DP, int N> __device__ static void multiply_abt(float (&c)[N][4], const bf16 *a, const bf16 *b) {
    constexpr int stride = Padded<DP>::stride;
    int lane = threadIdx.x % 32;
    a += lane % 16 * stride + lane / 16 * 8;
    b += (lane / 16 * 8 + lane % 8) * stride + lane / 8 % 2 * 8;
#    pragma unroll
    for (int k = 0; k < DP; k += 16) {
        unsigned af[4], bf[4];
        ldmatrix(af, a + k);
#    pragma unroll
        for (int n = 0; n < N; n += 2) {
            ldmatrix(bf, b + n * 8 * stride + k);
            mma(c[n], af, bf[0], bf[1]);
            mma(c[n + 1], af, bf[2], bf[3]);
        }
    }
}

// c (16, DP) += bf16(p) (16, 8K) b (8K, DP), p an accumulator, b in shared memory.
template <int DP, int K>
__device__ static void multiply_pb(float (&c)[DP / 8][4], const float (&p)[K][4], const bf16 *b) {
    constexpr int stride = Padded<DP>::stride;
    int lane = threadIdx.x % 32;
    b += lane % 16 * stride + lane / 16 * 8;
#    pragma unroll
    for (int k = 0; k < K; k += 2) {
        unsigned af[4] = {pack(p[k][0], p[k][1]), pack(p[k][2], p[k][3]), pack(p[k + 1][0], p[k + 1][1]),
                          pack(p[k + 1][2], p[k + 1][3])};
        unsigned bf[4];
#    pragma unroll
        for (int n = 0; n < DP / 8; n += 2) {
            ldmatrix_transposed(bf, b + k * 8 * stride + n * 8);
            mma(c[n], af, bf[0], bf[1]);
            mma(c[n + 1], af, bf[2], bf[3]);
        }
    }
}

// Writes factor[i] * c to rows row + 8 i of a (T, D) slice.
template <int N>
__device__ static void store_rows(Slice to, const float (&c)[N][4], const float (&factor)[2], int row,
                                  AttentionShape s) {
    int column = threadIdx.x % 4 * 2;
#    pragma unroll
    for (int i = 0; i < 2; i++) {
        if (row + 8 * i >= s.T) continue;
        bf16 *p = (bf16 *)to.data + (size_t)(row + 8 * i) * to.stride;
#    pragma unroll
        for (int n = 0; n < N; n++) {
            int d = n * 8 + column;
            float x = c[n][2 * i] * factor[i], y = c[n][2 * i + 1] * factor[i];
            if (s.D % 2 == 0) {
                if (d < s.D) *(unsigned *)(p + d) = pack(x, y);
            } else {
                if (d < s.D) p[d] = __float2bfloat16(x);
                if (d + 1 < s.D) p[d + 1] = __float2bfloat16(y);
            }
        }
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Forward

// Over the 4 lanes that share a row.
__device__ static float row_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
    return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}

__device__ static float row_sum(float x) {
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}

template <int DP>
__global__ void __launch_bounds__(THREADS, 2)
    forward_kernel(bf16 *out, float *lse, const bf16 *qkv, AttentionShape s, float scale) {
    constexpr int stride = Padded<DP>::stride, KEYS = 64;
    extern __shared__ __align__(16) bf16 shared[];
    bf16 *q_tile = shared, *k_tile = q_tile + ROWS * stride, *v_tile = k_tile + KEYS * stride;

    int tiles = s.tiles(ROWS), head = blockIdx.x / tiles;
    int row0 = (tiles - 1 - blockIdx.x % tiles) * ROWS; // the longest rows first
    int warp_row = threadIdx.x / 32 * WARP_ROWS, row = row0 + warp_row + threadIdx.x % 32 / 4;
    Slice q = slice_of(qkv, s, head, 3, 0), k = slice_of(qkv, s, head, 3, 1), v = slice_of(qkv, s, head, 3, 2);
    float scale2 = scale * LOG2E;

    float o[DP / 8][4], m[2] = {-INFINITY, -INFINITY}, l[2] = {0.0f, 0.0f};
    clear(o);
    tile_load<ROWS, DP>(q_tile, q, row0, s);
    for (int key0 = 0; key0 < row0 + ROWS && key0 < s.T; key0 += KEYS) {
        __syncthreads();
        tile_load<KEYS, DP>(k_tile, k, key0, s);
        tile_load<KEYS, DP>(v_tile, v, key0, s);
        tile_wait();

        float p[KEYS / 8][4];
        clear(p);
        multiply_abt<DP>(p, q_tile + warp_row * stride, k_tile);
#    pragma unroll
        for (int i = 0; i < 2; i++) {
            float top = m[i];
#    pragma unroll
            for (int n = 0; n < KEYS / 8; n++)
#    pragma unroll
                for (int j = 0; j < 2; j++) {
                    int key = key0 + n * 8 + threadIdx.x % 4 * 2 + j;
                    float &x = p[n][2 * i + j];
                    x = key > row + 8 * i ? -INFINITY : x * scale2;
                    top = fmaxf(top, x);
                }
            top = row_max(top); // finite: the first tile holds key 0, which every row sees
            float shrink = exp2f(m[i] - top), sum = 0.0f;
            m[i] = top;
#    pragma unroll
            for (int n = 0; n < KEYS / 8; n++)
#    pragma unroll
                for (int j = 0; j < 2; j++) sum += p[n][2 * i + j] = exp2f(p[n][2 * i + j] - top);
            l[i] = l[i] * shrink + row_sum(sum);
#    pragma unroll
            for (int n = 0; n < DP / 8; n++) {
                o[n][2 * i] *= shrink;
                o[n][2 * i + 1] *= shrink;
            }
        }
        multiply_pb<DP>(o, p, v_tile);
    }

    float inverse[2] = {1.0f / l[0], 1.0f / l[1]};
    store_rows(slice_of(out, s, head, 1, 0), o, inverse, row, s);
#    pragma unroll
    for (int i = 0; i < 2; i++)
        if (threadIdx.x % 4 == 0 && row + 8 * i < s.T) lse[(size_t)head * s.T + row + 8 * i] = m[i] * LN2 + logf(l[i]);
}

// ---------------------------------------------------------------------------------------------------------------------
// Backward

// A block owns 64 queries and walks over the keys they see.
template <int DP>
__global__ void __launch_bounds__(THREADS, 2)
    dq_kernel(bf16 *dqkv, const bf16 *dout, const bf16 *qkv, AttentionRows rows, AttentionShape s, float scale) {
    constexpr int stride = Padded<DP>::stride, KEYS = DP == 64 ? 64 : 32;
    extern __shared__ __align__(16) bf16 shared[];
    bf16 *q_tile = shared, *do_tile = q_tile + ROWS * stride, *k_tile = do_tile + ROWS * stride;
    bf16 *v_tile = k_tile + KEYS * stride;

    int tiles = s.tiles(ROWS), head = blockIdx.x / tiles;
    int row0 = (tiles - 1 - blockIdx.x % tiles) * ROWS;
    int warp_row = threadIdx.x / 32 * WARP_ROWS, row = row0 + warp_row + threadIdx.x % 32 / 4;
    Slice q = slice_of(qkv, s, head, 3, 0), k = slice_of(qkv, s, head, 3, 1), v = slice_of(qkv, s, head, 3, 2);
    float scale2 = scale * LOG2E, lse2[2], delta[2];
#    pragma unroll
    for (int i = 0; i < 2; i++) {
        lse2[i] = rows.lse2[(size_t)head * s.padded_T() + row + 8 * i];
        delta[i] = rows.delta[(size_t)head * s.padded_T() + row + 8 * i];
    }

    float dq[DP / 8][4];
    clear(dq);
    tile_load<ROWS, DP>(q_tile, q, row0, s);
    tile_load<ROWS, DP>(do_tile, slice_of(dout, s, head, 1, 0), row0, s);
    for (int key0 = 0; key0 < row0 + ROWS && key0 < s.T; key0 += KEYS) {
        __syncthreads();
        tile_load<KEYS, DP>(k_tile, k, key0, s);
        tile_load<KEYS, DP>(v_tile, v, key0, s);
        tile_wait();

        float p[KEYS / 8][4], dp[KEYS / 8][4];
        clear(p);
        clear(dp);
        multiply_abt<DP>(p, q_tile + warp_row * stride, k_tile);
        multiply_abt<DP>(dp, do_tile + warp_row * stride, v_tile);
#    pragma unroll
        for (int n = 0; n < KEYS / 8; n++)
#    pragma unroll
            for (int j = 0; j < 4; j++) {
                int key = key0 + n * 8 + threadIdx.x % 4 * 2 + j % 2, query = row + j / 2 * 8;
                float x = key > query ? 0.0f : exp2f(p[n][j] * scale2 - lse2[j / 2]);
                p[n][j] = x * (dp[n][j] - delta[j / 2]); // dS
            }
        multiply_pb<DP>(dq, p, k_tile);
    }
    float factor[2] = {scale, scale};
    store_rows(slice_of(dqkv, s, head, 3, 0), dq, factor, row, s);
}

// A block owns 64 keys and walks over the queries that see them. Everything is transposed: rows are keys.
template <int DP>
__global__ void __launch_bounds__(THREADS, 2)
    dkdv_kernel(bf16 *dqkv, const bf16 *dout, const bf16 *qkv, AttentionRows rows, AttentionShape s, float scale) {
    constexpr int stride = Padded<DP>::stride, QUERIES = DP == 64 ? 64 : 32;
    extern __shared__ __align__(16) bf16 shared[];
    bf16 *k_tile = shared, *v_tile = k_tile + ROWS * stride, *q_tile = v_tile + ROWS * stride;
    bf16 *do_tile = q_tile + QUERIES * stride;

    int tiles = s.tiles(ROWS), head = blockIdx.x / tiles, row0 = blockIdx.x % tiles * ROWS;
    int warp_row = threadIdx.x / 32 * WARP_ROWS, row = row0 + warp_row + threadIdx.x % 32 / 4;
    Slice q = slice_of(qkv, s, head, 3, 0), k = slice_of(qkv, s, head, 3, 1), v = slice_of(qkv, s, head, 3, 2);
    const float *lse2 = rows.lse2 + (size_t)head * s.padded_T(), *delta = rows.delta + (size_t)head * s.padded_T();
    float scale2 = scale * LOG2E;

    float dk[DP / 8][4], dv[DP / 8][4];
    clear(dk);
    clear(dv);
    tile_load<ROWS, DP>(k_tile, k, row0, s);
    tile_load<ROWS, DP>(v_tile, v, row0, s);
    for (int query0 = row0; query0 < s.T; query0 += QUERIES) {
        __syncthreads();
        tile_load<QUERIES, DP>(q_tile, q, query0, s);
        tile_load<QUERIES, DP>(do_tile, slice_of(dout, s, head, 1, 0), query0, s);
        tile_wait();

        float p[QUERIES / 8][4], dp[QUERIES / 8][4];
        clear(p);
        clear(dp);
        multiply_abt<DP>(p, k_tile + warp_row * stride, q_tile);
#    pragma unroll
        for (int n = 0; n < QUERIES / 8; n++)
#    pragma unroll
            for (int j = 0; j < 4; j++) {
                int query = query0 + n * 8 + threadIdx.x % 4 * 2 + j % 2, key = row + j / 2 * 8;
                p[n][j] = key > query ? 0.0f : exp2f(p[n][j] * scale2 - lse2[query]);
            }
        multiply_pb<DP>(dv, p, do_tile);
        multiply_abt<DP>(dp, v_tile + warp_row * stride, do_tile);
#    pragma unroll
        for (int n = 0; n < QUERIES / 8; n++)
#    pragma unroll
            for (int j = 0; j < 4; j++) p[n][j] *= dp[n][j] - delta[query0 + n * 8 + threadIdx.x % 4 * 2 + j % 2]; // dS
        multiply_pb<DP>(dk, p, q_tile);
    }
    float factor[2] = {scale, scale}, one[2] = {1.0f, 1.0f};
    store_rows(slice_of(dqkv, s, head, 3, 1), dk, factor, row, s);
    store_rows(slice_of(dqkv, s, head, 3, 2), dv, one, row, s);
}

// ---------------------------------------------------------------------------------------------------------------------
// Launches

// A block needs this many rows of DP in shared memory, more than the 48 KB that need no asking.
template <int DP, typename Kernel> static int shared_memory_allow(Kernel kernel, int rows, size_t *bytes, Error *e) {
    *bytes = (size_t)rows * Padded<DP>::stride * sizeof(bf16);
    CUDA_TRY(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)*bytes), e);
    return 0;
}

template <int DP>
static int forward(bf16 *out, float *lse, const bf16 *qkv, AttentionShape s, cudaStream_t stream, Error *e) {
    size_t bytes;
    TRY(shared_memory_allow<DP>(forward_kernel<DP>, 3 * ROWS, &bytes, e));
    forward_kernel<DP><<<s.heads() * s.tiles(ROWS), THREADS, bytes, stream>>>(out, lse, qkv, s, attention_scale(s));
    CUDA_LAUNCHED(e);
    return 0;
}

template <int DP>
static int backward(bf16 *dqkv, const bf16 *dout, const bf16 *qkv, AttentionRows rows, AttentionShape s,
                    cudaStream_t stream, Error *e) {
    size_t bytes;
    int blocks = s.heads() * s.tiles(ROWS);
    TRY(shared_memory_allow<DP>(dkdv_kernel<DP>, 4 * ROWS, &bytes, e));
    dkdv_kernel<DP><<<blocks, THREADS, bytes, stream>>>(dqkv, dout, qkv, rows, s, attention_scale(s));
    CUDA_LAUNCHED(e);
    TRY(shared_memory_allow<DP>(dq_kernel<DP>, 4 * ROWS, &bytes, e));
    dq_kernel<DP><<<blocks, THREADS, bytes, stream>>>(dqkv, dout, qkv, rows, s, attention_scale(s));
    CUDA_LAUNCHED(e);
    return 0;
}

int attention_mma_forward(real *out, float *lse, const real *qkv, AttentionShape s, cudaStream_t stream, Error *e) {
    return (s.D <= 64 ? forward<64> : forward<128>)(out, lse, qkv, s, stream, e);
}

int attention_mma_backward(real *dqkv, const real *dout, const real *qkv, AttentionRows rows, AttentionShape s,
                           cudaStream_t stream, Error *e) {
    return (s.D <= 64 ? backward<64> : backward<128>)(dqkv, dout, qkv, rows, s, stream, e);
}

#endif
