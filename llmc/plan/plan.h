// plan: predicts a run's cost for --dry-run: memory, the time of a step, the gain of several ranks, steps and hours.
//
// A kernel takes at least FLOPs over peak, and at least bytes over bandwidth: the roofline (Williams, Waterman and
// Patterson 2009, "Roofline: an insightful visual performance model", CACM 52(4)). Peak and bandwidth are the data
// sheet's figures times the fraction that code of this kind reaches (PlanEfficiency). A kernel whose intensity (FLOPs
// per byte) is below the machine's critical intensity, peak over bandwidth, is bound by memory. The plan ignores three
// losses: products whose sizes are no multiples of a tile (the 1600 channels of d48: 4% of its step), products with
// fewer tiles than the device has multiprocessors (micro-batches of a row or two), and bandwidth that collectives take
// from concurrent kernels.
//
// A collective runs as a ring (Patarasuk and Yuan 2009, J. Parallel Distrib. Comput. 69(2)) of K - 1 rounds. A rank
// sends 1/K of the bytes per round, so the link carries (K - 1)/K of the bytes, with K - 1 latencies. In a torus, rings
// run along all axes at once, both ways, and share the bytes, so an axis of k ranks costs (k - 1)/2 latencies.
#pragma once

#include "gns/ramp.h"
#include "options/options.h"
#include "ranks/parallel.h"
#include "text/shards.h"
#include "plan/devices.h"

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

// One kernel. Its pass launches it `count` times, and the backward pass `again` times, to recompute its results.
typedef struct {
    WorkFamily family;
    WorkKind kind;
    WorkPass pass;
    double flops, read, written; // per launch; read, written: bytes
    double count, again;
} Work;

// The fractions of a machine's figures that a program reaches.
typedef struct {
    double of_peak[WORK_STREAM]; // by WorkKind: fraction of the peak; attention's backward counts five products
    double matmul_reads;         // share of a product's reads that counts; arithmetic hides the rest
    double stream;               // fraction of the bandwidth that streaming kernels reach
    double copy;                 // fraction of the bandwidth that a plain copy, or a product's writes, reach
    double link;                 // fraction of link and network that large collectives reach
    double launch;               // seconds of the shortest kernel
    double hop, network_hop;     // seconds of latency of a ring's round: within a machine; between two machines
} PlanEfficiency;

typedef struct {
    char name[256];    // "": no device
    DeviceSpec spec;   // the data sheet's figures; a CPU's are measured (0: unknown)
    bool measured;     // true for a CPU
    double value;      // bytes of a weight or activation in the kernels
    double peak;       // FLOP/s for values of this size; 0: unknown, and no time can be planned
    double head_bytes; // largest chunk of logits
    bool fuses_exact;  // has Hopper's kernels, which fuse exact norms if the channels allow it (plan_fuses_exact)
    PlanEfficiency efficiency;
} PlanDevice;

// Finds the device to plan for: --device, or else the engine's device, `here`. The user's figures (--device-flops, ...)
// replace the table's. ERR_USAGE if neither has the peak and bandwidth of --device.
int plan_device(PlanDevice *out, const Options *o, const EngineDevice *here, Error *e);

// True if the weight gradients' kernel measures exact per-example norms (EngineDevice.exact_is_fused).
bool plan_fuses_exact(const PlanDevice *device, const ModelConfig *model);

double plan_kernel_seconds(const PlanDevice *device, const Work *work); // seconds per launch

typedef struct {
    const Options *options;
    const EngineApi *engine;
    EngineConfig shape; // shape of the whole model; the functions below cut the model for the ranks
    PlanDevice device;
    bool estimate_memory; // true if this program's engine does not run on the device
    int ranks;
    ParallelConfig sharing;     // how the ranks share work and state: --zero, --reduce
    const Ramp *ramp;           // NULL: the length of the run is unknown
    int64_t rows;               // the batch that the page describes
    const Dataset *train, *val; // NULL: not read
    bool copies;                // checkpoints are written from a copy on the host
    double checkpoint_bytes, disk_free_bytes;
} Plan;

// Work and time of a rank, by family of kernels and by pass.
typedef struct {
    struct {
        double flops, bytes, seconds;
    } family[FAMILIES];
    double pass[PASSES]; // s
} PlanWork;

// Adds `times` micro-steps of `rows` rows: forward, loss and backward. A fraction `exact` of them measures exact norms.
void plan_add_micro_steps(PlanWork *sum, const PlanDevice *device, const EngineConfig *shape, int rows, double exact,
                          double times);

// Adds the work that a step does once: clears all gradients, computes their norms, and updates `owned` parameters.
void plan_add_update(PlanWork *sum, const PlanDevice *device, const Model *model, Optimizer optimizer, double owned);

// A step of `rows` rows over all ranks, as seen by the rank with the most rows.
typedef struct {
    PlanWork all;         // micro-steps and update
    PlanWork first, last; // first and last micro-step, which hide transfers
    double exposed;       // s of communication that nothing hides, --tensor's included
    double seconds;
    double bytes; // that the rank sends, if its link is known
    int64_t micro_steps;
} PlanStep;
PlanStep plan_step(const Plan *plan, int64_t rows);

// Returns how many of `ranks` ranks share a machine.
static inline int plan_machine(const PlanDevice *d, int ranks) {
    return ranks < d->spec.devices_a_machine ? ranks : d->spec.devices_a_machine;
}

double plan_link_bandwidth(const PlanDevice *device, int ranks); // B/s per rank, each way; 0: unknown
double plan_ring_seconds(const PlanDevice *device, int ranks, double bytes);
double plan_all_to_all_seconds(const PlanDevice *device, int ranks, double bytes); // bytes: of all ranks together

// Returns the plan with another --zero, number of ranks and --tensor (1 if that does not divide the ranks).
Plan plan_with(const Plan *plan, ZeroStage zero, int ranks, int tensor);

// Returns rank 0's model, which has the most heads: shape.model, or *local with --tensor. Call model_destroy(local).
// Returns shape.model if there is no memory for *local.
const Model *plan_model(const Plan *plan, Model *local);

// Returns the largest n in [low, over) for which `holds` is true, or low. As n grows, `holds` may only turn false.
int plan_most(const Plan *plan, int low, int over, bool (*holds)(const Plan *plan, int n));

// Simulates the whole run with the ramp's code. target: the batch, in rows, at which --ramp gns aims in every step.
// With 0 the batch stays smallest; with INFINITY it grows as fast as the ramp allows.
typedef struct {
    int64_t steps, first_batch, last_batch; // batches in rows
    double seconds;
    bool cut; // only PLAN_STEPS_MAX steps were simulated; later steps count as copies of the last one
} PlanRun;
enum { PLAN_STEPS_MAX = 5000000 };
PlanRun plan_run(const Plan *plan, double target);

// Returns the most checkpoints on the disk at a time, in the longest run that the ramp allows. A step whose checkpoint
// is due twice (--checkpoint-every, --keep-best) counts twice. With --on-spike abandoned checkpoints count, too.
int64_t plan_checkpoints(const Ramp *ramp, const Options *options);

// Plans the memory of a rank, libraries included (memory.c); on a CPU also the copy for checkpoints. Returns the bytes
// of the copy; 0: there is no copy.
double plan_memory(const Plan *plan, int micro_batch, MemoryPlan *memory);
double plan_usable_memory(const PlanDevice *device); // bytes of the device's memory that a run can use; 0: unknown
bool plan_fits(const Plan *plan, int micro_batch);

// Returns the largest micro-batch that fits and that the options allow; 0: none.
int plan_largest_micro_batch(const Plan *plan);

// Returns the fewest ranks, a multiple of --tensor, on which the plan fits with this --zero and its micro-batch; 0:
// none up to `most`.
int plan_fewest_ranks(const Plan *plan, ZeroStage zero, int most);

// ERR_MEMORY if not even one row fits into the device's memory. If its size is unknown, everything fits.
int plan_check_fits(const Plan *plan, Error *e);

void plan_print(const Plan *plan); // prints a page for a person (print.c)
