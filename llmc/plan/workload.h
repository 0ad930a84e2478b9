// workload: the work of training, kernel by kernel: floating-point operations, and the fewest bytes read and written.
// plan.h turns them into time.
#pragma once

#include "model/engine.h"

typedef enum {
    FAMILY_BLOCK_MATMUL,
    FAMILY_HEAD_MATMUL,
    FAMILY_ATTENTION,
    FAMILY_LAYERNORM,
    FAMILY_GELU,
    FAMILY_BIAS,
    FAMILY_CROSSENTROPY,
    FAMILY_EMBEDDING,
    FAMILY_DROPOUT,
    FAMILY_EXACT_NORMS,
    FAMILY_OPTIMIZER,
    FAMILIES
} WorkFamily;
extern const char *const work_family_names[FAMILIES];

// Bound by arithmetic, but for WORK_STREAM. WORK_MASKS: drawing dropout's masks.
typedef enum { WORK_MATMUL, WORK_ATTENTION_FORWARD, WORK_ATTENTION_BACKWARD, WORK_MASKS, WORK_STREAM } WorkKind;

typedef enum { PASS_FORWARD, PASS_BACKWARD, PASS_UPDATE, PASSES } WorkPass;

// One kernel, launched `count` times.
typedef struct {
    WorkFamily family;
    WorkKind kind;
    WorkPass pass;
    double flops, read, written; // of one launch; FLOPs, bytes
    double count;
} Work;

// How the per-example norms of a matrix are measured. EXACT_BATCHED: each example's gradient is written to memory, then
// read. EXACT_FUSED: within the products.
typedef enum { EXACT_NONE, EXACT_BATCHED, EXACT_FUSED } ExactNorms;

enum { WORK_MAX = 64 };

// Kernels, and the sizes that they were counted from.
typedef struct {
    // By the device
    double value;      // bytes of a weight or an activation as the kernels read it: 2 in bf16, 4 in fp32
    double head_bytes; // largest chunk of logits
    ExactNorms exact;
    bool stores_exponentials; // of the logits: the loss then makes no pass over them
    // By the shape
    double B, T, N, C, NH, V, L; // B: rows of the micro-step; N = B T
    Recompute recompute;
    bool drops;
    int count;
    Work work[WORK_MAX];
} Workload;

// A micro-step: forward, loss and backward. The caller has set w's fields by the device; the others are 0.
Workload workload_micro_step(const EngineConfig *shape, int rows, Workload w);

// What a step does once: clearing and norms of all gradients, and the optimizer's step over `owned` parameters.
Workload workload_update(const Model *model, Optimizer optimizer, double owned, double value);
