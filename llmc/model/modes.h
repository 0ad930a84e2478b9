// modes: choices that engines, ranks and the command line share. options/table.def lists their names in the enums'
// order.
#pragma once

#include <stdbool.h>

// Which per-example gradient norms a step measures (--gns).
typedef enum {
    GNS_OFF,
    GNS_LN,   // LayerNorm parameters: a by-product of LayerNorm's backward pass
    GNS_EXACT // every tensor
} GnsMode;

// The activations that the backward pass recomputes (--recompute): less memory, more time, the same bits.
typedef enum {
    RECOMPUTE_NONE,
    RECOMPUTE_GELU, // GELU's output, and on a GPU its derivative
    RECOMPUTE_BLOCK // everything inside a block but its input
} Recompute;

static const char *const recompute_names[] = {"none", "gelu", "block"};

// The optimizer (--optimizer): math/adamw.h, muon.h.
typedef enum { OPTIMIZER_ADAMW, OPTIMIZER_LAMB, OPTIMIZER_MUON, OPTIMIZERS } Optimizer;

static const char *const optimizer_names[] = {"AdamW", "LAMB", "Muon"};

// The state that ranks shard (--zero): see ranks/parallel.h.
typedef enum { ZERO_0, ZERO_1, ZERO_2, ZERO_3 } ZeroStage;

// When ranks sum their gradients (--reduce): once a step, or after every micro-step (only with ZERO_2 and ZERO_3).
typedef enum { REDUCE_STEP, REDUCE_MICRO_STEP } ReduceCadence;

// The type of gradients in transfer between ranks (--comm-dtype).
typedef enum { WIRE_FP32, WIRE_BF16 } WireType;

// The type of stored weights and activations and of the factors of matrix products (--dtype). Master weights,
// gradients, moments and statistics are fp32. DTYPE_FP8 stores bf16 on a GPU, fp32 on the CPU. In training it rounds to
// e4m3 (math/fp8.h) the factors of the blocks' forward products and input gradients. DTYPE_FP8_DW also rounds the
// factors of the blocks' weight gradients.
typedef enum { DTYPE_FP32, DTYPE_BF16, DTYPE_FP16, DTYPE_FP8, DTYPE_FP8_DW } Dtype;

static const char *const dtype_names[] = {"fp32", "bf16", "fp16", "fp8", "fp8-dw"};

static inline bool dtype_is_fp8(Dtype type) { return type == DTYPE_FP8 || type == DTYPE_FP8_DW; }
