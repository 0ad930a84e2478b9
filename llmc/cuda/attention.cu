// attention: checks the shape, picks the path, and takes the row statistics that every backward starts from.
#include "cuda/attention_paths.cuh"
#include "model/cuda_sizes.h"

// Lanes that share one row of one head; 8 lanes of 16 bytes cover 64 bf16.
enum { ROW_LANES = 8, ROW_THREADS = 256, ROWS_A_THREAD = 4, BLOCK_ROWS = ROWS_A_THREAD * ROW_THREADS / ROW_LANES };

constexpr int VECTOR = 16 / sizeof(real); // elements of a 16-byte access

__device__ static float dot_vectors(uint4 a, uint4 b) {
    real x[VECTOR], y[VECTOR];
    *(uint4 *)x = a;
    *(uint4 *)y = b;
    float sum = 0.0f;
    UNROLL_FOR (int i = 0; i < VECTOR; i++) sum += real_to_float(x[i]) * real_to_float(y[i]);
    return sum;
}

// A lane's share of the dot product of two rows of D.
__device__ static float lane_dot(const real *a, const real *b, int D, int lane) {
    float sum = 0.0f;
    if (D % VECTOR == 0) {
        for (int d = lane * VECTOR; d < D; d += ROW_LANES * VECTOR)
            sum += dot_vectors(*(const uint4 *)(a + d), *(const uint4 *)(b + d));
    } else {
        for (int d = lane; d < D; d += ROW_LANES) sum += real_to_float(a[d]) * real_to_float(b[d]);
    }
    return sum;
}

// rows.delta = rowsum(dO * O), rows.lse2 = lse in base 2. A block takes BLOCK_ROWS rows of one head; neighbouring
// blocks take neighbouring heads of the same rows, which lie side by side in memory.
__global__ static void rows_kernel(AttentionRows rows, const float *lse, const real *dout, const real *out,
                                   AttentionShape s) {
    int padded_T = s.padded_T(), h = blockIdx.x % s.NH, chunk = blockIdx.x / s.NH;
    int b = chunk / (padded_T / BLOCK_ROWS), row0 = chunk % (padded_T / BLOCK_ROWS) * BLOCK_ROWS;
    int lane = threadIdx.x % ROW_LANES, head = b * s.NH + h;

    float delta[ROWS_A_THREAD];
    UNROLL_FOR (int i = 0; i < ROWS_A_THREAD; i++) {
        int t = row0 + i * (ROW_THREADS / ROW_LANES) + threadIdx.x / ROW_LANES;
        size_t start = ((size_t)b * s.T + t) * s.C() + h * s.D; // (B, T, C)
        delta[i] = t < s.T ? lane_dot(dout + start, out + start, s.D, lane) : 0.0f;
    }
    UNROLL_FOR (int i = 0; i < ROWS_A_THREAD; i++) {
        int t = row0 + i * (ROW_THREADS / ROW_LANES) + threadIdx.x / ROW_LANES;
        UNROLL_FOR (int offset = ROW_LANES / 2; offset > 0; offset /= 2)
            delta[i] += __shfl_xor_sync(~0u, delta[i], offset);
        if (lane == 0) {
            rows.delta[(size_t)head * padded_T + t] = delta[i];
            rows.lse2[(size_t)head * padded_T + t] = t < s.T ? lse[(size_t)head * s.T + t] * LOG2E : INFINITY;
        }
    }
}

int attention_rows_fill(AttentionRows *rows, void *workspace, const float *lse, const real *dout, const real *out,
                        AttentionShape s, cudaStream_t stream, Error *e) {
    size_t count = (size_t)s.heads() * s.padded_T();
    *rows = {(float *)workspace, (float *)workspace + count};
    rows_kernel<<<(unsigned)(count / BLOCK_ROWS), ROW_THREADS, 0, stream>>>(*rows, lse, dout, out, s);
    return CUDA_LAUNCHED(e);
}

size_t attention_workspace_bytes(AttentionShape s) { return 2 * sizeof(float) * (size_t)s.heads() * s.padded_T(); }

typedef struct {
    AttentionForward *forward;
    AttentionBackward *backward;
} Path;

static int path_choose(Path *path, AttentionShape s, Error *e) {
    TRY(attention_check(s.D, e));
    *path = {attention_tiled_forward, attention_tiled_backward};
#ifndef GNS_FP32
    bool hopper;
    TRY(attention_sm90_usable(&hopper, s, e));
    if (hopper) *path = {attention_sm90_forward, attention_sm90_backward};
#endif
    return 0;
}

int attention_forward(real *out, float *lse, const real *qkv, AttentionShape s, cudaStream_t stream, Error *e) {
    Path path;
    TRY(path_choose(&path, s, e));
    return path.forward(out, lse, qkv, s, stream, e);
}

int attention_backward(real *dqkv, const real *dout, const real *qkv, const real *out, const float *lse,
                       void *workspace, AttentionShape s, cudaStream_t stream, Error *e) {
    Path path;
    AttentionRows rows;
    TRY(path_choose(&path, s, e));
    TRY(attention_rows_fill(&rows, workspace, lse, dout, out, s, stream, e));
    return path.backward(dqkv, dout, qkv, rows, s, stream, e);
}
