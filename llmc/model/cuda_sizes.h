// cuda_sizes: the CUDA engine's fixed sizes, and its limits on models. Plain C: --dry-run plans for a GPU in builds
// without CUDA too.
#pragma once

#include "base/common.h"

enum {
    CUDA_HEAD_BYTES = 1600 << 20,      // largest chunk of logits: 16k rows of GPT-2's vocabulary in bf16
    MATMUL_WORKSPACE_BYTES = 64 << 20, // for cuBLASLt's split-K sums
    CUDA_LATER_BYTES = 64 << 20,       // left free for kernels, which CUDA loads at their first launch
    ATTENTION_HEAD_SIZE_MAX = 128,     // elements
    WEIGHT_GRADIENT_MULTIPLE = 8,      // channels must be a multiple of this for weight_gradient,
    LINEAR_SM90_MULTIPLE = 64,         // and of this for linear_sm90
    HOPPER_MULTIPROCESSORS = 132       // of an H100 or H200 SXM
};

// ERR_USAGE where no attention kernel takes heads of this size. All other kernels take any model.
static inline int attention_check(int head_size, Error *e) {
    if (head_size <= ATTENTION_HEAD_SIZE_MAX) return 0;
    return FAIL(e, ERR_USAGE, "use more heads", "attention on the GPU has head sizes up to %d, not %d",
                ATTENTION_HEAD_SIZE_MAX, head_size);
}
