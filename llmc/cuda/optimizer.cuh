// optimizer: AdamW and LAMB over any range of the flat parameter array in one launch, clipped by a norm that stays on the
// device. Muon's matrices are left to muon.cuh.
#pragma once

#include "cuda/reduce.cuh"

#include "math/adamw.h"
#include "model/model.h"

enum { DECAY_GRANULE = 64 }; // elements; every tensor begins at a multiple of it (model.h)

// *scale = the factor from the gradient, summed over `batch` examples, to the clipped mean gradient; NaN where the norm
// sqrt(sum of grad_sq) is not finite. grad_sq (count) in device memory, summed in order.
int optimizer_scale(float *scale, const double *grad_sq, int count, double batch, double grad_clip, cudaStream_t stream,
                    Error *e);

// out = x, rounded to nearest even. n a multiple of 64.
int optimizer_round(real *out, const float *x, size_t n, cudaStream_t stream, Error *e);

// How 64 elements are updated: as part of a vector, of a matrix, or of one of Muon's matrices.
enum UpdateRule : uint8_t { RULE_PLAIN, RULE_DECAY, RULE_MUON };

// Addresses of the first element to update, number 64 k of the flat arrays.
typedef struct {
    float *param; // fp32 master weights
    real *weight; // the working copy of them; NULL where param itself is used
    float *moment1, *moment2;
    const float *grad;
    const UpdateRule *rule; // [i]: of elements [64 i, 64 i + 64)
    const uint16_t *tensor; // LAMB: [i]: their tensor
    const float *rate;      // LAMB: (tensors) instead of step.lr; NULL: AdamW
} OptimizerArrays;

// One step over n elements, a multiple of 64, with *scale as step.grad_scale. Changes nothing if *scale is NaN, and no
// elements of RULE_MUON.
int optimizer_update(const OptimizerArrays *arrays, size_t n, AdamWStep step, const float *scale, cudaStream_t stream,
                     Error *e);

// LAMB: squares[s] = the squared norm of the weights of segment s, squares[stride + s] = that of the step's direction.
// Offsets of segments count from the arrays' first element.
size_t optimizer_trust_workspace_bytes(int S);
int optimizer_trust(double *squares, size_t stride, const OptimizerArrays *arrays, const ReduceSegment *segments, int S,
                    AdamWStep step, const float *scale, void *workspace, cudaStream_t stream, Error *e);

// rate[i] = lr x the trust ratio of tensor i, from squares as above.
int optimizer_rates(float *rate, const double *squares, int tensors, double lr, cudaStream_t stream, Error *e);
