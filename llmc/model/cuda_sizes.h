// cuda_sizes: the CUDA engine's fixed sizes, and its limits on models. Plain C, since builds without CUDA also plan for
// GPUs (--dry-run).
#pragma once

#include "model/engine.h"

enum {
    CUDA_HEAD_BYTES = 1600 << 20,      // largest chunk of logits: 16k tokens, GPT-2's vocabulary, bf16
    MATMUL_WORKSPACE_BYTES = 64 << 20, // for cuBLASLt's split-K sums
    CUDA_LATER_BYTES = 64 << 20,       // left free for kernels, which CUDA loads at their first launch
    ATTENTION_HEAD_SIZE_MAX = 128,     // elements of a head
    WEIGHT_GRADIENT_MULTIPLE = 8,      // channels must be a multiple of this for weight_gradient
    LINEAR_SM90_MULTIPLE = 64,         // channels must be a multiple of this for linear_sm90
    FP8_TOKENS_MULTIPLE = 16,          // seq_len must be a multiple of this for weight_gradient of e4m3
    HOPPER_MULTIPROCESSORS = 132       // an H100 or H200 SXM has this many
};

// ERR_USAGE if the type is fp8, but no fp8 product supports these channels and this row length.
static inline int fp8_check(Dtype type, int channels, int seq_len, Error *e) {
    const char *name = dtype_names[type];
    if (dtype_is_fp8(type) && channels % LINEAR_SM90_MULTIPLE)
        return FAIL(e, ERR_USAGE, "use --dtype bf16",
                    "--dtype %s on a GPU needs channels that are a multiple of %d, not %d", name, LINEAR_SM90_MULTIPLE,
                    channels);
    if (type == DTYPE_FP8_DW && seq_len % FP8_TOKENS_MULTIPLE)
        return FAIL(e, ERR_USAGE, "use --dtype fp8",
                    "--dtype %s on a GPU needs a --seq-len that is a multiple of %d, not %d", name, FP8_TOKENS_MULTIPLE,
                    seq_len);
    return 0;
}

// ERR_USAGE if no kernel supports this shape: the heads are too large, or fp8_check refuses it.
static inline int cuda_check(const EngineConfig *c, Error *e) {
    const int channels = c->model->config.channels, head_size = channels / c->model->config.heads;
    TRY(fp8_check(c->dtype, channels, c->seq_len, e));
    if (head_size <= ATTENTION_HEAD_SIZE_MAX) return 0;
    return FAIL(e, ERR_USAGE, "use more heads", "attention on the GPU has head sizes up to %d, not %d",
                ATTENTION_HEAD_SIZE_MAX, head_size);
}
