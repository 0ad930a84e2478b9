// decode: the forward pass of one token after others whose keys and values are in memory. It reads every weight once, which
// takes less time than launches of so many kernels would: one kernel walks through all layers, and its thread blocks, one
// a multiprocessor, send each other the results of each product.
//
// Values are rounded where the kernels of a whole pass round them: only sums have another order.
#pragma once

#include "cuda/cuda_common.cuh"

#include "model/model.h"

typedef struct {
    const Model *model;
    const real *weight; // all, in the flat layout
    real *qkv;          // (T, 3C) of block 0
    size_t qkv_stride;  // elements from a block's to the next one's
    float *scratch;     // decode_scratch_floats
    int turn;           // launches before this one whose scratch nobody has touched since
    const cudaDeviceProp *device;
} Decoder;

size_t decode_scratch_floats(const ModelConfig *config);

// Can the device run decode for this model? It needs heads of whole packs of 8 elements, shared memory for what a thread block
// keeps, and all thread blocks at once.
bool decode_fits(const ModelConfig *config, const cudaDeviceProp *device);

// Writes keys and values to row number `row` of qkv in every block, that of the token after as many others, and the logits of
// the next one (V), in memory of the device or pinned memory of the host.
int decode(float *logits, const Decoder *decoder, int token, int row, cudaStream_t stream, Error *e);
