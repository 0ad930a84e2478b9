// workload: counts the work of training, kernel by kernel: floating-point operations, and the fewest bytes that must be
// read and written. plan.h converts them to time.
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

// All kinds but WORK_STREAM are bound by arithmetic. WORK_MASKS: dropout's random masks. WORK_FP8: products of e4m3.
typedef enum {
    WORK_MATMUL,
    WORK_ATTENTION_FORWARD,
    WORK_ATTENTION_BACKWARD,
    WORK_MASKS,
    WORK_FP8,
    WORK_STREAM
} WorkKind;

typedef enum { PASS_FORWARD, PASS_BACKWARD, PASS_UPDATE, PASSES } WorkPass;

// One kernel, launched `count` times.
typedef struct {
    WorkFamily family;
    WorkKind kind;
    WorkPass pass;
    double flops, read, written; // per launch; read, written: bytes
    double count;
} Work;

// How per-example norms of a matrix are measured. EXACT_BATCHED writes each example's gradient to memory, then reads
// it. EXACT_FUSED measures norms within the products.
typedef enum { EXACT_NONE, EXACT_BATCHED, EXACT_FUSED } ExactNorms;

enum { WORK_MAX = 64 };

typedef struct {
    // Fields that the caller sets, from the device:
    double value;      // bytes of a weight or an activation as the kernels read it: 2 in bf16, 4 in fp32
    double head_bytes; // largest chunk of logits
    ExactNorms exact;
    // True if the head stores exp(logits), which saves the loss's pass over them: 3.5% of a step. True on Hopper in
    // bf16. The plan also sets it for fp16 and label smoothing, though train_gpt2.cu stores logits there.
    bool stores_exponentials;
    int count;
    Work work[WORK_MAX];
} Workload;

// Counts a micro-step: forward, loss and backward. w: the fields from the device are set, the others are 0.
Workload workload_micro_step(const EngineConfig *shape, int rows, Workload w);

// Counts the work that a step does once: clears all gradients, computes their norms, and updates `owned` parameters.
Workload workload_update(const Model *model, Optimizer optimizer, double owned, double value);
