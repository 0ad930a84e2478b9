// attention: chooses the code path.
#include "cuda/attention_paths.cuh"
#include "cuda/sm90.cuh"
#include "cuda/weight_gradient.cuh"

static ColumnSplit attention_split(AttentionShape s) {
    const int rows = s.B * s.T, blocks = rows / ATTENTION_SUM_ROWS;
    return {rows, s.T, ATTENTION_SUM_ROWS, blocks, blocks + s.B};
}

size_t attention_workspace_bytes(AttentionShape s) { return 2 * sizeof(float) * (size_t)s.heads() * s.padded_T(); }
size_t attention_column_bytes(AttentionShape s) {
    return attention_sums(s) ? column_bytes(attention_split(s), 1, 3 * s.C()) : 0;
}

bool attention_sums(AttentionShape s) {
    return sizeof(real) < sizeof(float) && s.D == 64 && s.T % ATTENTION_SUM_ROWS == 0 &&
           s.C() % WEIGHT_GRADIENT_TILE != 0;
}

#ifndef GNS_FP32
static bool is_fast(AttentionShape s) { return (s.D == 64 || s.D == 128) && sm90_runs(); }
#endif

int attention_forward(const Attention &a, cudaStream_t stream, Error *e) {
#ifndef GNS_FP32
    if (is_fast(a.shape)) return attention_sm90_forward(a, stream, e);
#endif
    return attention_tiled_forward(a, stream, e);
}

int attention_backward(const Attention &a, ColumnGradient bias, ColumnJobs *jobs, cudaStream_t stream, Error *e) {
    const AttentionShape s = a.shape;
    float *lse2 = (float *)a.workspace, *delta = lse2 + (size_t)s.heads() * s.padded_T();
    float *columns = bias.sum ? column_begin(jobs, &bias, 1, attention_split(s), 3 * s.C()) : NULL;
#ifndef GNS_FP32
    if (is_fast(s)) return attention_sm90_backward(a, {lse2, delta, columns}, stream, e);
#endif
    return attention_tiled_backward(a, {lse2, delta, columns}, stream, e);
}
