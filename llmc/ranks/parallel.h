// parallel: runs a training step on several ranks by data parallelism, or on one. A rank is a process with one engine.
// dev/docs/code.md defines the words, and draws who does what in a step and the states of a bucket and of a collective.
//
//   1. Group d (without --tensor: rank d) computes a contiguous range of a step's B examples. Groups differ by at most
//      one row.
//   2. The backward pass completes the buckets from the last to the first; bucket 0 begins first and finishes last.
//   3. A bucket's reduction starts once the bucket is final, while the backward pass computes earlier blocks. The
//      engine chooses the moment. Each rank computes squared norms of what it owns; the ranks' norms are then summed.
//   4. All ranks start the same transfers in the same order, even a rank without rows. With ZeRO-3 this holds for every
//      pass, so in evaluations and samples all ranks compute each pass, if need be on rows that do not count.
//   5. The order of summation depends on --reduce, never on --zero: every stage reduces the same buckets in the same
//      order and computes the same norms of the same parts. So all stages give the same bits. With --reduce step a rank
//      adds up its micro-steps, and the last micro-step sums over ranks once.
//   6. Muon needs whole matrices: blocks are not cut, and the ranks own blocks in turn (Division). LAMB needs norms of
//      whole tensors: at every stage each rank computes squared norms of what it owns, and these are summed over ranks.
//   7. With --tensor K, rank d K + t is rank t of group d, and `model` is its local model. The group's ranks compute
//      the same micro-steps together (TensorRanks), and divide their rows. Bucket 0 is cut among all ranks, and the
//      other buckets among the ranks of equal t (Division). So owned parts are disjoint, and squared norms are sums
//      over all ranks. A group without rows makes no exchanges. It still counts them, for the watchdog.
//   8. With --shard machine each machine divides the state among its own ranks, so machines hold replicas. Ranks with
//      the same number on their machines own the same part. A part is summed within each machine, then over these
//      ranks. Only machine 0 counts the part's norms. For LAMB, which needs only ratios of norms, all machines count.
//
// --zero (Rajbhandari et al. 2020, ZeRO, arXiv 1910.02054) says which rank keeps what:
//   0  Every rank gathers all gradients and updates all weights. It keeps all moments.
//   1  Every rank updates its owned parts and keeps only their moments. The next forward pass begins by gathering the
//      weights.
//   2  As 1, and gradients are sharded: memory holds a micro-step's gradients of two blocks and of the embeddings.
//      After a bucket's reduction the owned part is collected.
//   3  As 2, and weights are sharded: a rank keeps the embeddings' weights and the master weights of what it owns (on a
//      GPU also a rounded copy, which the ranks gather). Forward passes gather the blocks from first to last, backward
//      passes from last to first. A block is gathered into a slot while the pass computes the block before it. A block
//      that its slot still holds is not gathered again.
// A rank's sum of gradients over several micro-steps is as large as the model. So where a step may have several
// micro-steps, stages 2 and 3 shard gradients only with --reduce micro-step. Each micro-step's gradients are then
// summed over ranks first, over micro-steps second. M micro-steps transfer M times as much, during M backward passes.
#pragma once

#include "ranks/comm.h"
#include "model/shard.h"
#include "ranks/transport.h"

typedef struct {
    ZeroStage zero;
    ReduceCadence reduce;
    int shared;        // ranks of a machine, among which buckets are cut (8); 0: all ranks
    int tensor;        // K ranks hold one model together (7); 1: each rank holds one
    int64_t batch_max; // most rows of a step, over all ranks
    const TransportApi *transport;
} ParallelConfig;

typedef struct {
    Comm *comm;
    const Model *model;
    ParallelConfig config;
    const EngineConfig *shape;
    int group, groups; // this rank's group d; number of groups, ranks / K. Without --tensor each rank is a group
    int buckets;       // 0: one rank
    Range *owned;      // (buckets) this rank's parts, in ascending order
    Division division;
    Engine *engine; // set by parallel_start
    const TransportApi *api;
    Transport *transport; // NULL: one rank
    double waited;        // seconds that the engine has waited for transfers in this step
    bool first;           // uncollected sums belong to the step's first micro-step
    bool has_gradients;   // this rank has computed gradients of rows in this step
    int64_t own;          // number of own rows in this step
    int unreduced;        // buckets [0, unreduced): reduction not started in this micro-step
    int uncollected;      // buckets [unreduced, uncollected): started, but not collected (shard_grads)
    int64_t *work;        // (buckets) number of the transfer of each bucket's gradients
    int64_t *gathered;    // (buckets) number of the transfer of new weights; 0: memory neither holds nor receives them
    int kept;             // buckets [0, kept): whole weights stay in memory between passes
    int arrived;          // buckets [0, arrived), arrived <= kept: wait_for was called for the transfer of new weights
} Parallel;

// Creates buckets and parts of shape->model for rank comm->rank of comm->ranks, without communication. Sets in *shape
// what this rank's engine keeps. *shape must outlive *p.
int parallel_create(Parallel *p, Comm *comm, const ParallelConfig *config, EngineConfig *shape, Error *e);
void parallel_destroy(Parallel *p);

// Call when each rank has loaded what it owns. With ZeRO-0 the ranks gather whole arrays before the call returns. With
// ZeRO-1 to 3 the next forward pass gathers the weights, as after an update.
int parallel_start(Parallel *p, Engine *engine, WireType wire, Error *e);

// Returns the number of micro-steps, the same for every rank, in a step of `rows` rows. A rank whose group has no rows
// left calls parallel_micro_step with n = 0.
int64_t parallel_micro_steps(const Parallel *p, int64_t rows);

// A step calls parallel_begin_step, parallel_micro_step for this rank's rows (see EngineApi), parallel_norms and
// parallel_update. last: the step's last micro-step.
int parallel_begin_step(Parallel *p, Error *e);
int parallel_micro_step(Parallel *p, const uint16_t *tokens, int n, GnsMode mode, bool last, Error *e);

int parallel_norms(Parallel *p, Error *e); // norms of the gradients' sum over all ranks
int parallel_update(Parallel *p, const UpdateConfig *update, Error *e);

// Starts to gather all new weights now, not in the next forward pass. All ranks call this before any work outside the
// steps, even if only one rank does that work.
int parallel_send_weights(Parallel *p, Error *e);

// Returns when no transfer is in flight on any rank: each rank may then end. Call after training or a settled error.
int parallel_drain(Parallel *p, Error *e);

// Sums the step's statistics over all ranks. Call it after parallel_norms.
typedef struct {
    StepResult
        *result; // set by engine_result; summed over ranks, except amax of sites (the largest of any rank) and grad_sq
                 // (already summed: parallel_norms)
    int slowest; // the rank that waited least for transfers
    double lost; // mean over ranks: seconds waited, less the seconds that `slowest` waited
    bool stop;   // in: this rank was asked to stop; out: any rank was
    double more; // the caller's value; summed over ranks
} StepSums;
int parallel_sums(Parallel *p, StepSums *sums, Error *e);

// Returns 0 if all ranks have the same weights, to the bit. With --tensor all ranks must have the same bucket 0, and
// ranks of equal t the same blocks. Only faulty hardware makes weights differ. ERR_RANK, settled, names the lowest rank
// whose weights differ from those of rank 0, or of the first rank with the same t.
int parallel_compare(Parallel *p, Error *e);

static inline bool parallel_stores_alone(const Parallel *p) { // true if rank 0's engine holds all of a checkpoint
    return !p->buckets || (p->config.zero == ZERO_0 && p->config.tensor == 1);
}
