// optimizer: AdamW over any range of the flat parameter array in one launch, clipped by a norm that never leaves the
// device.
#ifndef GNS_OPTIMIZER_CUH
#define GNS_OPTIMIZER_CUH

#include "cuda/cuda_common.cuh"

#include "math/adamw.h"
#include "model/model.h"

enum { DECAY_GRANULE = 64 }; // elements; every tensor begins at a multiple of it (model.h)

// decay[i]: does weight decay apply to elements [64 i, 64 i + 64)? Host memory, flat_count / 64 bytes.
void optimizer_decay_map(uint8_t *decay, const Model *model);

// *scale = what turns the gradient, summed over `batch` examples, into the clipped mean gradient; NaN where the norm
// sqrt(sum of grad_sq) is not finite. grad_sq (count) in device memory, summed in order.
int optimizer_scale(float *scale, const double *grad_sq, int count, double batch, double grad_clip, cudaStream_t stream,
                    Error *e);

// Where each array has the first element to be updated, number 64 k of the flat arrays.
typedef struct {
    float *param; // fp32 master weights
    real *weight; // the working copy of them; NULL where param itself is used
    float *moment1, *moment2;
    const float *grad;
    const uint8_t *decay; // the map above, in device memory, from entry k on
} OptimizerArrays;

// One step over n elements, a multiple of 64; step.grad_scale is replaced by *scale, and nothing at all changes where
// that is NaN.
int optimizer_update(const OptimizerArrays *arrays, size_t n, AdamWStep step, const float *scale, cudaStream_t stream,
                     Error *e);

#endif
