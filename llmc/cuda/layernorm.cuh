// layernorm: layer normalisation (formulas: math/layernorm.h), fused with the residual add before it. The backward also
// yields per-example norms of dgamma and dbeta.
#pragma once

#include "cuda/cuda_common.cuh"
#include "cuda/dropout.cuh"
#include "cuda/fp8.cuh"
#include "cuda/reduce.cuh"

enum { LAYERNORM_WARP_COLUMNS = 2048 }; // widest row that a warp normalises in registers

// out = (x - mean) * rstd * gamma + beta, statistics in fp32.
//   b NULL:  x = a
//   else     x = sum = a + dropout(b), rounded to real; sum may be a or b
struct LayerNorm {
    real *sum, *out;          // (N, C), N = B * T
    float *mean, *rstd;       // (N)
    const real *a, *b;        // (N, C)
    const real *gamma, *beta; // (C)
    RowDropout drop;
    int N, C;
    Fp8Copy copy = {}; // copy of out. copy.alone requires C <= LAYERNORM_WARP_COLUMNS
};
int layernorm_forward(const LayerNorm &n, cudaStream_t stream, Error *e);

// The backward of B T rows. Without dropout dbranch is not written: dresidual serves as the branch's gradient.
struct LayerNormBackward {
    real *dresidual;          // (B, T, C) += dx if `accumulate`, else = dx. May be dy
    const real *dy, *x;       // (B, T, C)
    const float *mean, *rstd; // (B, T)
    const real *gamma;        // (C)
    float *partials = NULL;   // (slots, sets, C). layernorm_backward sets partials and split
    ColumnSplit split = {};
    int step = 0; // rows from one tile of a block to its next; set by layernorm_backward
    int C = 0;
    real *dbranch = NULL; // (B, T, C) dropout(dresidual): gradient of LayerNorm.b, the branch. May be dy
    RowDropout drop = {}; // dropout of this branch; drop.T must be set in any case
    bool accumulate = false, bias = false; // bias: set by layernorm_backward
    Fp8Copy copy = {};                     // copy of dbranch; without dropout, of dresidual. Needs dbias
};

// gradients: column sums of dy xhat (dgamma), of dy (dbeta) and of dbranch (dbias, the bias gradient of the branch's
// last product). gradients[2].sum NULL: no dbias. Adds all as one job to `jobs`, which must have
// layernorm_backward_bytes of memory left.
size_t layernorm_backward_bytes(int B, int T, int C);
int layernorm_backward(LayerNormBackward k, const ColumnGradient (&gradients)[3], int B, ColumnJobs *jobs,
                       cudaStream_t stream, Error *e);
