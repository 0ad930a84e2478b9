// attention: checks the shape and chooses the code path.
#include "cuda/attention_paths.cuh"
#include "cuda/weight_gradient.cuh"
#include "model/cuda_sizes.h"

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

int attention_forward(real *out, float *lse, const real *qkv, unsigned *ticket, AttentionShape s,
                      const AttentionMasks &masks, cudaStream_t stream, Error *e) {
    Path path;
    TRY(path_choose(&path, s, e));
    return path.forward(out, lse, qkv, ticket, s, masks, stream, e);
}

int attention_backward(real *dqkv, ColumnGradient bias, const real *dout, const real *qkv, const real *out,
                       const float *lse, void *workspace, ColumnJobs *jobs, unsigned *ticket, AttentionShape s,
                       const AttentionMasks &masks, cudaStream_t stream, Error *e) {
    float *lse2 = (float *)workspace,
          *columns = bias.sum ? column_begin(jobs, &bias, 1, attention_split(s), 3 * s.C()) : NULL;
    Path path;
    TRY(path_choose(&path, s, e));
    return path.backward(dqkv, dout, qkv, out, lse, {lse2, lse2 + (size_t)s.heads() * s.padded_T(), columns}, ticket, s,
                         masks, stream, e);
}
