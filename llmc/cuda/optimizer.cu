#include "cuda/optimizer.cuh"

#include <assert.h>

// One thread: a few hundred numbers, summed in order.
__global__ static void scale_kernel(float *scale, const double *grad_sq, int count, double batch, double grad_clip) {
    double square = 0;
    for (int i = 0; i < count; i++) square += grad_sq[i];
    *scale = (float)adamw_grad_scale(square, batch, grad_clip);
}

int optimizer_scale(float *scale, const double *grad_sq, int count, double batch, double grad_clip, cudaStream_t stream,
                    Error *e) {
    scale_kernel<<<1, 1, 0, stream>>>(scale, grad_sq, count, batch, grad_clip);
    return CUDA_LAUNCHED(e);
}

struct alignas(4 * sizeof(real)) Real4 {
    real x, y, z, w;
};

__device__ static Real4 round4(float4 p) { return {(real)p.x, (real)p.y, (real)p.z, (real)p.w}; }

__global__ static void round_kernel(Real4 *out, const float4 *x, size_t fours) {
    size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x;
    if (i < fours) out[i] = round4(x[i]);
}

int optimizer_round(real *out, const float *x, size_t n, cudaStream_t stream, Error *e) {
    const unsigned threads = 256;
    assert(n % DECAY_GRANULE == 0);
    size_t fours = n / 4;
    if (fours == 0) return 0;
    round_kernel<<<(unsigned)((fours + threads - 1) / threads), threads, 0, stream>>>((Real4 *)out, (const float4 *)x,
                                                                                      fours);
    return CUDA_LAUNCHED(e);
}

// A thread takes four elements of one tensor: 28 bytes an element read and written, 30 with the copy.
__global__ static void update_kernel(OptimizerArrays a, size_t fours, AdamWStep step, const float *scale) {
    size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x;
    step.grad_scale = *scale;
    if (i >= fours || isnan(step.grad_scale)) return;
    bool decay = a.decay[4 * i / DECAY_GRANULE];
    float4 p = ((float4 *)a.param)[i], m = ((float4 *)a.moment1)[i], v = ((float4 *)a.moment2)[i];
    float4 g = ((const float4 *)a.grad)[i];
    p.x = adamw_update(p.x, g.x, &m.x, &v.x, &step, decay);
    p.y = adamw_update(p.y, g.y, &m.y, &v.y, &step, decay);
    p.z = adamw_update(p.z, g.z, &m.z, &v.z, &step, decay);
    p.w = adamw_update(p.w, g.w, &m.w, &v.w, &step, decay);
    ((float4 *)a.param)[i] = p;
    ((float4 *)a.moment1)[i] = m;
    ((float4 *)a.moment2)[i] = v;
    if (a.weight) ((Real4 *)a.weight)[i] = round4(p);
}

int optimizer_update(const OptimizerArrays *arrays, size_t n, AdamWStep step, const float *scale, cudaStream_t stream,
                     Error *e) {
    const unsigned threads = 256;
    assert(n % DECAY_GRANULE == 0);
    size_t fours = n / 4;
    if (fours == 0) return 0;
    update_kernel<<<(unsigned)((fours + threads - 1) / threads), threads, 0, stream>>>(*arrays, fours, step, scale);
    return CUDA_LAUNCHED(e);
}
