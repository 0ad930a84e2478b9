// cuda_sizes: the CUDA engine's fixed sizes, and its limits on models. Plain C, since builds without CUDA plan for a
// GPU too (--dry-run).
#pragma once

#include "base/common.h"

enum {
    CUDA_HEAD_BYTES = 1600 << 20,      // largest chunk of logits: 16k rows of GPT-2's vocabulary in bf16
    MATMUL_WORKSPACE_BYTES = 64 << 20, // for cuBLASLt's split-K sums
    CUDA_LATER_BYTES = 64 << 20,       // left free: CUDA loads kernels at their first launch
    ATTENTION_HEAD_SIZE_MAX = 128,     // elements
    WEIGHT_GRADIENT_MULTIPLE = 8,      // weight_gradient needs channels that are a multiple of this
    LINEAR_SM90_MULTIPLE = 64,         // linear_sm90 needs channels that are a multiple of this
    HOPPER_MULTIPROCESSORS = 132       // of an H100 or H200 SXM
};

// ERR_USAGE if --dtype fp8 has no products for this width.
static inline int fp8_check(int channels, Error *e) {
    if (channels % LINEAR_SM90_MULTIPLE == 0) return 0;
    return FAIL(e, ERR_USAGE, "use --dtype bf16",
                "--dtype fp8 on a GPU needs channels that are a multiple of %d, not %d", LINEAR_SM90_MULTIPLE,
                channels);
}

// ERR_USAGE if no attention kernel supports this head size. All bf16 kernels support any model.
static inline int attention_check(int head_size, Error *e) {
    if (head_size <= ATTENTION_HEAD_SIZE_MAX) return 0;
    return FAIL(e, ERR_USAGE, "use more heads", "attention on the GPU has head sizes up to %d, not %d",
                ATTENTION_HEAD_SIZE_MAX, head_size);
}
