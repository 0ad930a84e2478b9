// optimizer: AdamW over any range of the flat parameter array in one launch, clipped by a norm that stays on the device.
#pragma once

#include "cuda/cuda_common.cuh"

#include "math/adamw.h"
#include "model/model.h"

enum { DECAY_GRANULE = 64 }; // elements; every tensor begins at a multiple of it (model.h)

// *scale = the factor from the gradient, summed over `batch` examples, to the clipped mean gradient; NaN where the norm
// sqrt(sum of grad_sq) is not finite. grad_sq (count) in device memory, summed in order.
int optimizer_scale(float *scale, const double *grad_sq, int count, double batch, double grad_clip, cudaStream_t stream,
                    Error *e);

// out = x, rounded to nearest even. n a multiple of 64.
int optimizer_round(real *out, const float *x, size_t n, cudaStream_t stream, Error *e);

// Addresses of the first element to update, number 64 k of the flat arrays.
typedef struct {
    float *param; // fp32 master weights
    real *weight; // the working copy of them; NULL where param itself is used
    float *moment1, *moment2;
    const float *grad;
    const uint8_t *decay; // [i]: does weight decay apply to elements [64 i, 64 i + 64)? All tensors but vectors decay.
} OptimizerArrays;

// One step over n elements, a multiple of 64, with *scale as step.grad_scale. Changes nothing where *scale is NaN.
int optimizer_update(const OptimizerArrays *arrays, size_t n, AdamWStep step, const float *scale, cudaStream_t stream,
                     Error *e);
