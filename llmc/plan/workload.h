// workload: what training asks of a machine, kernel by kernel: the floating-point operations, and the bytes that must
// be read and written at least. Nothing here knows how fast a machine is; plan.h does.
#ifndef GNS_WORKLOAD_H
#define GNS_WORKLOAD_H

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
    FAMILY_EXACT_NORMS,
    FAMILY_OPTIMIZER,
    FAMILIES
} WorkFamily;
extern const char *const work_family_names[FAMILIES];

typedef enum { WORK_MATMUL, WORK_ATTENTION_FORWARD, WORK_ATTENTION_BACKWARD, WORK_STREAM } WorkKind;

typedef enum { PASS_FORWARD, PASS_BACKWARD, PASS_UPDATE } WorkPass;

// One kernel, launched `count` times alike.
typedef struct {
    WorkFamily family;
    WorkKind kind;
    WorkPass pass;
    double flops, read, written; // of a launch; FLOPs, bytes
    double count;
} Work;

typedef struct {
    const Model *model;
    int rows, seq_len; // of the micro-step: B, T
    double value;      // bytes of a weight or an activation as the kernels read it: 2 in bf16, 4 in fp32
    double head_bytes; // most that a chunk of logits may take
    Recompute recompute;
    bool exact; // per-example norms of every tensor
} WorkShape;

enum { WORK_MAX = 64 };
typedef struct {
    int count;
    Work work[WORK_MAX];
} Workload; // all zero: none

// Adds a micro-step's kernels: forward, loss and backward.
void workload_micro_step(Workload *w, const WorkShape *shape);

// Adds what a step does once: clearing and norms of all gradients, and AdamW over `owned` parameters. value as above.
void workload_update(Workload *w, const Model *model, double owned, double value);
#endif
