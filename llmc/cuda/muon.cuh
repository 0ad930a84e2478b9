// muon: Muon's step (math/muon.h) for a batch of matrices of one shape. Newton-Schulz multiplies in `real`; moments and
// weights are fp32.
#pragma once

#include "cuda/matmul.cuh"

// Addresses of a matrix's first element; rows lie `stride` elements apart.
typedef struct {
    float *param, *moment;
    real *weight; // working copy; NULL: param serves
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

// Return the bytes of scratch for `count` matrices; how many matrices `bytes` suffice for, 1 to MUON_MATRICES_MAX.
size_t muon_scratch_bytes(int count, int rows, int columns);
int muon_capacity(size_t bytes, int rows, int columns);

// Runs one step. *grad_scale turns grad into the clipped mean gradient; NaN: no change.
int muon_run(Matmul *mm, const MuonMatrices *matrices, MuonStep step, const float *grad_scale, void *scratch,
             cudaStream_t stream, Error *e);
