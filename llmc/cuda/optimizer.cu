// optimizer: see optimizer.cuh.
#include "cuda/optimizer.cuh"
#include "cuda/vec.cuh"

#include <assert.h>

enum { THREADS = 256 };

// Grid: one thread, which sums a few hundred squares in order.
__global__ static void scale_kernel(float *scale, const double *grad_sq, int count, double batch, double grad_clip) {
    double square = 0;
    for (int i = 0; i < count; i++) square += grad_sq[i];
    *scale = (float)adamw_grad_scale(square, batch, grad_clip);
}

int optimizer_scale(float *scale, const double *grad_sq, int count, double batch, double grad_clip, cudaStream_t stream,
                    Error *e) {
    return launch({1, 1, stream}, e, scale_kernel, scale, grad_sq, count, batch, grad_clip);
}

// Grid: a thread per four elements of one tensor. Traffic: 28 bytes per element, 30 with the working copy.
__global__ static void update_kernel(OptimizerArrays a, size_t fours, AdamWStep step, const float *scale) {
    size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x;
    step.grad_scale = *scale;
    if (i >= fours || isnan(step.grad_scale)) return;
    const size_t granule = 4 * i / DECAY_GRANULE;
    const UpdateRule rule = a.rule[granule];
    const bool decay = rule == RULE_DECAY;
    if (rule == RULE_MUON) return;
    if (a.trust)
        step.lr = (float)(a.lr * lamb_ratio(a.trust[a.tensor[granule]], a.trust[a.tensors + a.tensor[granule]]));
    float4 p = ((float4 *)a.param)[i], m = ((float4 *)a.moment1)[i], v = ((float4 *)a.moment2)[i];
    float4 g = ((const float4 *)a.grad)[i];
    p.x = adamw_update(p.x, g.x, &m.x, &v.x, &step, decay);
    p.y = adamw_update(p.y, g.y, &m.y, &v.y, &step, decay);
    p.z = adamw_update(p.z, g.z, &m.z, &v.z, &step, decay);
    p.w = adamw_update(p.w, g.w, &m.w, &v.w, &step, decay);
    ((float4 *)a.param)[i] = p;
    ((float4 *)a.moment1)[i] = m;
    ((float4 *)a.moment2)[i] = v;
    if (a.weight) ((Bundle<real, 4> *)a.weight)[i] = {{(real)p.x, (real)p.y, (real)p.z, (real)p.w}};
}

int optimizer_update(const OptimizerArrays *arrays, size_t n, AdamWStep step, const float *scale, cudaStream_t stream,
                     Error *e) {
    assert(n % DECAY_GRANULE == 0);
    if (n == 0) return 0;
    return launch({blocks_of(n / 4, THREADS), THREADS, stream}, e, update_kernel, *arrays, n / 4, step, scale);
}

// ---- LAMB -----------------------------------------------------------------------------------------------------------

enum { TRUST_BLOCKS = 128 };

// partials (2, S, TRUST_BLOCKS): squared norms of weights, then of the direction. Grid: (TRUST_BLOCKS, segment).
__global__ static void __launch_bounds__(THREADS)
    trust_kernel(double *partials, OptimizerArrays a, Range range, const Range *segments, AdamWStep step,
                 const float *scale) {
    __shared__ double shared[2][THREADS / WARP];
    const Range part = range_overlap(segments[blockIdx.y], range);
    double weights = 0, direction = 0;
    step.grad_scale = *scale;
    for (size_t i = blockIdx.x * THREADS + threadIdx.x; i < range_length(part); i += TRUST_BLOCKS * THREADS) {
        const size_t at = part.begin - range.begin + i;
        float p = a.param[at], m = a.moment1[at], v = a.moment2[at]; // adamw_direction changes these copies only
        const float d = adamw_direction(p, a.grad[at], &m, &v, &step, a.rule[at / DECAY_GRANULE] == RULE_DECAY);
        weights += (double)p * p;
        direction += (double)d * d;
    }
    weights = block_sum(weights, shared[0]);
    direction = block_sum(direction, shared[1]);
    const size_t at = blockIdx.y * TRUST_BLOCKS + blockIdx.x;
    if (threadIdx.x == 0) partials[at] = weights, partials[gridDim.y * TRUST_BLOCKS + at] = direction;
}

size_t optimizer_trust_workspace_bytes(int S) { return 2 * sizeof(double) * TRUST_BLOCKS * (size_t)S; }

int optimizer_trust(double *squares, const OptimizerArrays *arrays, Range range, const Range *segments, int S,
                    AdamWStep step, const float *scale, void *workspace, cudaStream_t stream, Error *e) {
    double *partials = (double *)workspace;
    TRY(launch({dim3(TRUST_BLOCKS, S), THREADS, stream}, e, trust_kernel, partials, *arrays, range, segments, step,
               scale));
    return reduce_example_partials({{}, squares}, partials, 2, S, TRUST_BLOCKS, stream, e);
}
