// optimizer: AdamW and LAMB over a range of the flat arrays in one launch. The clipping norm stays on the device.
// Muon's matrices: muon.cuh.
#pragma once

#include "cuda/reduce.cuh"

#include "math/adamw.h"
#include "model/model.h"

enum { DECAY_GRANULE = 64 }; // elements; every tensor begins at a multiple of it (model.h)

// *scale turns the gradient, summed over `batch` examples, into the clipped mean gradient; NaN if its norm,
// sqrt(sum of grad_sq (count)), is not finite.
int optimizer_scale(float *scale, const double *grad_sq, int count, double batch, double grad_clip, cudaStream_t stream,
                    Error *e);

// What a granule is part of: a vector (no decay), a matrix (decay), or one of Muon's matrices.
enum UpdateRule : uint8_t { RULE_PLAIN, RULE_DECAY, RULE_MUON };

// Addresses of the first element to update, which begins a granule of the flat arrays.
typedef struct {
    float *param; // fp32 master weights
    real *weight; // working copy; NULL: param serves
    float *moment1, *moment2;
    const float *grad;
    const UpdateRule *rule; // (granules)
    const uint16_t *tensor; // (granules) LAMB: the tensor's number
    const double *trust;    // (2, tensors) LAMB: optimizer_trust's squares; NULL: AdamW
    int tensors;
    double lr; // LAMB: lr times the trust ratio replaces step.lr
} OptimizerArrays;

// One step over n elements, a multiple of 64, with *scale as step.grad_scale. *scale NaN: no change. Skips RULE_MUON.
int optimizer_update(const OptimizerArrays *arrays, size_t n, AdamWStep step, const float *scale, cudaStream_t stream,
                     Error *e);

// For LAMB. For the part of segment s < S in the range: squares[s] += squared norm of the weights, squares[S + s] +=
// squared norm of the step's direction. The arrays begin at range.begin.
size_t optimizer_trust_workspace_bytes(int S);
int optimizer_trust(double *squares, const OptimizerArrays *arrays, Range range, const Range *segments, int S,
                    AdamWStep step, const float *scale, void *workspace, cudaStream_t stream, Error *e);
