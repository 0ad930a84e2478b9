// muon: Muon's step (math/muon.h) for matrices of one shape, all at once. Newton-Schulz multiplies in the build's type;
// moments and weights are fp32.
#pragma once

#include "cuda/matmul.cuh"

// Addresses of a matrix's first element. Rows begin `stride` elements apart.
typedef struct {
    float *param, *moment;
    real *weight; // NULL: param itself is used
    const float *grad;
    size_t stride;
} MuonMatrix;

enum { MUON_MATRICES_MAX = 64 };

typedef struct {
    int count, rows, columns;
    MuonMatrix matrix[MUON_MATRICES_MAX];
} MuonMatrices;

typedef struct {
    float momentum, lr, weight_decay;
} MuonStep;

// Bytes of scratch for `count` matrices; how many matrices, at least one, `bytes` are enough for.
size_t muon_scratch_bytes(int count, int rows, int columns);
int muon_capacity(size_t bytes, int rows, int columns);

// grad x *grad_scale is the clipped mean gradient. Changes nothing where that is NaN.
int muon_run(Matmul *mm, const MuonMatrices *matrices, MuonStep step, const float *grad_scale, void *scratch,
             cudaStream_t stream, Error *e);
