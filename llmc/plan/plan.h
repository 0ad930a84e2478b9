// plan: what a run will take, before it is run: time of a step from the machine's figures and the kernels' work, memory
// that fits, what several ranks gain, steps and hours of the whole run. --dry-run prints it (plan_print.c).
//
// Time of a kernel: the roofline (Williams, Waterman and Patterson 2009, "Roofline: an insightful visual performance
// model", CACM 52(4)): no less than its FLOPs over the peak and no less than its bytes over the bandwidth, each times
// the part of the data sheet's figure that code of this kind reaches (PlanEfficiency). A kernel whose intensity (FLOPs
// a byte) is under the machine's critical one, peak over bandwidth, is bound by memory.
// Left out: products that tiles do not divide evenly (the 1600 channels of d48: 4% of its step), or that have fewer tiles
// than the device has multiprocessors (micro-batches of a row or two), and the bandwidth that collectives take away from
// the kernels beside them.
//
// Time of a collective: a ring (Patarasuk and Yuan 2009, J. Parallel Distrib. Comput. 69(2)): K - 1 rounds in which each
// rank passes on 1/K of the bytes, so (K - 1)/K of them over the link, and K - 1 latencies.
#ifndef GNS_PLAN_H
#define GNS_PLAN_H

#include "gns/ramp.h"
#include "plan/devices.h"
#include "plan/workload.h"

// What of a machine's figures comes out at the end.
typedef struct {
    double matmul;       // of the peak: the inner loop of a large product
    double matmul_reads; // of the time that a product's operands take to read, this is not hidden behind arithmetic
    double attention_forward;  // of the peak
    double attention_backward; // of the peak, five products counted
    double stream;             // of the bandwidth: kernels that only stream
    double copy;               // of the bandwidth: a plain copy, and what products write
    double link;               // of the link and of the network: large collectives
    double launch;             // s: no kernel takes less
    double hop, network_hop;   // s: latency of a ring's round inside a machine; between two
} PlanEfficiency;

typedef struct {
    char name[256];                 // "": there is none
    bool measured;                  // the figures are measured (CPU), not those of a data sheet
    double value;                   // bytes of a weight or activation in the kernels
    double peak;                    // FLOP/s for such values; 0: not known, and no time can be planned
    double bandwidth, memory_bytes; // B/s, bytes
    double link, network;           // B/s each way a device, in a machine and between machines; 0: not known
    int devices_a_machine;
    double head_bytes; // of a chunk of logits, as the engine cuts them
    PlanEfficiency efficiency;
} PlanDevice;

// The device to plan for: `wanted` (--device) from the table of devices, otherwise what the engine would run on here.
// ERR_USAGE where the table does not have what is wanted. link_override: --link, B/s between machines; 0: the table's.
int plan_device(PlanDevice *out, const char *wanted, const EngineDevice *here, double link_override, Error *e);

double plan_kernel_seconds(const PlanDevice *device, const Work *work); // of one launch
double plan_critical_intensity(const PlanDevice *device);               // FLOPs a byte

typedef struct {
    const EngineApi *engine;
    const Model *model;
    EngineConfig shape;
    PlanDevice device;
    bool estimate_memory; // of a device that this program's engine does not run on
    int ranks;
    int zero;              // --zero
    bool every_micro_step; // --reduce micro-step
    double wire;           // bytes of a gradient on its way between ranks
    double exact_part;     // of the steps that measure exact norms
} Plan;

// A step of `rows` rows over all ranks, on the rank that has most of them.
typedef struct {
    double forward, backward, update;                    // s, of all micro-steps; of the once-a-step kernels
    double first_forward, first_backward, last_backward; // s, of single micro-steps, which hide what travels
    double exposed;                                      // s of communication that nothing hides
    double seconds;                                      // in all
    int64_t micro_steps;
} PlanStep;
PlanStep plan_step(const Plan *plan, int64_t rows);

// Forward passes over this many rows, shared out to the ranks: validation.
double plan_eval_seconds(const Plan *plan, int64_t rows);

// One family of kernels over a whole step of one rank.
typedef struct {
    double flops, bytes, seconds;
} PlanFamily;
void plan_families(const Plan *plan, int64_t rows, PlanFamily families[FAMILIES]);

// Bytes that a rank passes on in a step, and the tokens a rank needs for its arithmetic to take as long as they do: at
// the peak, the link's full rate and no overlap lost (Austin et al. 2025, "How to scale your model", part 5).
typedef enum {
    SHARDING_NONE,
    SHARDING_STATE,
    SHARDING_ALL,
    SHARDINGS
} Sharding; // data parallel; ZeRO-1, -2; -3 (FSDP)
extern const char *const sharding_names[SHARDINGS];
double plan_ring_bytes(const Plan *plan, Sharding sharding, int ranks);
double plan_critical_tokens(const Plan *plan, Sharding sharding, int ranks);
double plan_link_bandwidth(const PlanDevice *device, int ranks); // B/s a rank, each way; 0: not known
double plan_ring_seconds(const PlanDevice *device, int ranks, double bytes);

// The whole run, walked through with the ramp's own code. target: what the noise scale's lower bound would say, in rows,
// at every step (only --ramp gns listens): 0 never grows, INFINITY grows as soon as the ramp may.
typedef struct {
    int64_t steps, first_batch, last_batch; // rows
    double seconds;
    bool cut; // longer than PLAN_STEPS_MAX steps: what follows was taken to go on like the last one
} PlanRun;
enum { PLAN_STEPS_MAX = 5000000 };
PlanRun plan_run(const Plan *plan, const Ramp *ramp, double target);

// How many checkpoints are on the disk at a time, at most, in the longest run that the ramp allows: saved every so many
// steps and at the end, and with --keep-best after each validation, every best_every steps (0: never), if it has to be;
// `keep` stay, and the best (0: all).
int64_t plan_checkpoints(const Ramp *ramp, int64_t every, int64_t best_every, int64_t keep);

// Bytes that a rank keeps from step to step, of its share or of all (--zero).
typedef struct {
    double weights, gradients, moments;
} PlanState;
PlanState plan_state(const EngineConfig *shape, double value);

// Memory (plan_memory.c): of a rank at this micro-batch, with the libraries'; what of the device's there is for it; the
// largest micro-batch that fits into that with `besides` bytes of something else, up to `most` and to what the options
// allow (0: not even one row).
void plan_memory(const Plan *plan, int micro_batch, MemoryPlan *memory);
double plan_usable_memory(const PlanDevice *device);
int plan_largest_micro_batch(const Plan *plan, double besides, int most);

// Memory of the CUDA engine as far as the sizes of tensors tell it, for a machine without that engine's code.
void plan_estimate_memory(const EngineConfig *shape, const PlanDevice *device, MemoryPlan *memory);
#endif
