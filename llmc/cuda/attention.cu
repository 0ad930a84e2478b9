// attention: chooses the code path.
#include "cuda/attention_paths.cuh"
#include "cuda/sm90.cuh"

size_t attention_workspace_bytes(AttentionShape s) { return 2 * sizeof(float) * (size_t)s.heads() * s.padded_T(); }

static bool is_fast(AttentionShape s) { return (s.D == 64 || s.D == 128) && sm90_runs(); }

int attention_forward(const Attention &a, cudaStream_t stream, Error *e) {
    if (is_fast(a.shape)) return attention_sm90_forward(a, stream, e);
    return attention_tiled_forward(a, stream, e);
}

int attention_backward(const Attention &a, cudaStream_t stream, Error *e) {
    const AttentionShape s = a.shape;
    float *lse2 = (float *)a.workspace, *delta = lse2 + (size_t)s.heads() * s.padded_T();
    if (is_fast(s)) return attention_sm90_backward(a, {lse2, delta}, stream, e);
    return attention_tiled_backward(a, {lse2, delta}, stream, e);
}
