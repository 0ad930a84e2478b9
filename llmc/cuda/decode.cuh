// decode: forward pass of one token, given the keys and values of the tokens before it. It reads every weight once, in
// less time than launches of all its kernels would take: one kernel computes all layers (decode.cu). It rounds where
// the kernels of a whole pass round; only sums have another order.
#pragma once

#include "cuda/cuda_common.cuh"

#include "model/model.h"

typedef struct {
    const Model *model;
    const real *weight; // all weights, in the flat layout
    real *qkv;          // (T, 3C) of block 0
    size_t qkv_stride;  // elements from block to block
    float *scratch;     // decode_scratch_floats
    int turn;           // number of launches since another kernel last used scratch
    const cudaDeviceProp *device;
} Decoder;

size_t decode_scratch_floats(const ModelConfig *config);

// True if the device can run decode for this model: heads of whole packs of 8 elements, enough shared memory, all
// blocks at once.
bool decode_fits(const ModelConfig *config, const cudaDeviceProp *device);

// Computes the token at position `row`: writes its keys and values to this row of every block's qkv, and the next
// token's logits (V), in memory of the device or pinned memory of the host.
int decode(float *logits, const Decoder *decoder, int token, int row, cudaStream_t stream, Error *e);
