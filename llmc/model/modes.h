// modes: the choices that the engine, the ranks and the command line share. An option's names stand
// in options/table.def in the order of its enum.
#ifndef GNS_MODES_H
#define GNS_MODES_H

// Which per-example gradient norms a step measures (--gns).
typedef enum {
    GNS_OFF,
    GNS_LN,   // LayerNorm parameters: they fall out of the LayerNorm backward
    GNS_EXACT // every tensor
} GnsMode;

// What the backward computes again instead of keeping (--recompute). The choice moves memory and time, never a bit of
// any result.
typedef enum {
    RECOMPUTE_NONE,
    RECOMPUTE_GELU, // GELU's output
    RECOMPUTE_BLOCK // everything inside a block but its input
} Recompute;

static const char *const recompute_names[] = {"none", "gelu", "block"};

// Which rank keeps what (--zero); parallel.h explains the stages.
typedef enum { ZERO_0, ZERO_1, ZERO_2 } ZeroStage;

// When gradients are summed over the ranks (--reduce): once a step, or after every micro-step (ZERO_2 only).
typedef enum { REDUCE_STEP, REDUCE_MICRO_STEP } ReduceCadence;

// What gradients are rounded to on their way between ranks (--comm-dtype).
typedef enum { WIRE_FP32, WIRE_BF16 } WireType;

#endif
