// cuda_sizes: what the CUDA engine takes of a device whatever the model, and the models that it takes. Plain C: plans for a
// GPU are made without it too.
#pragma once

#include "base/common.h"

enum {
    CUDA_HEAD_BYTES = 1600 << 20,      // most that a chunk of logits takes: 16k rows of GPT-2's vocabulary in bf16
    MATMUL_WORKSPACE_BYTES = 64 << 20, // what split sums may use
    ATTENTION_HEAD_SIZE_MAX = 128,     // elements
    WEIGHT_GRADIENT_MULTIPLE = 8,      // channels of which the fused kernel of weight gradients takes a multiple
    LINEAR_SM90_MULTIPLE = 64,         // and linear_sm90
    HOPPER_MULTIPROCESSORS = 132       // of an H100 or H200 SXM
};

// ERR_USAGE where the GPU has no attention for heads of this size. Everything else has kernels for any model there may
// be.
static inline int attention_check(int head_size, Error *e) {
    if (head_size <= ATTENTION_HEAD_SIZE_MAX) return 0;
    return FAIL(e, ERR_USAGE, "use more heads", "attention on the GPU has head sizes up to %d, not %d",
                ATTENTION_HEAD_SIZE_MAX, head_size);
}
