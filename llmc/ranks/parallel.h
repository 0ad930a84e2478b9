// parallel: data parallelism. What a step does when several ranks share it, and plainly itself when there is one.
//
// Rows. Rank r takes a contiguous share of a step's B examples; shares differ by one row at most.
//
// Gradients. The flat array comes in buckets (model_bucket), a block each and the embeddings, in the order in which the
// backward pass finishes them. Each bucket is cut into one part a rank; rank r owns part r of every bucket. Soon after a
// bucket is final on a rank its reduction begins (the engine says when), so that it travels while the blocks before it
// are computed. Each rank takes the norms of what it owns; their sums, by tensor, are the batch's.
//
// The order of summation is the run's (--reduce), never the mode's: every mode reduces the same buckets in the same
// order, and the same norms of the same parts, so that all give the same bits. By step, a rank adds up its micro-steps
// and the ranks' sums meet once, in the last of them. The mode (Rajbhandari et al. 2020, ZeRO, arXiv 1910.02054) only
// says who keeps what:
//   0  everybody gets all gradients back and updates all weights: moments everywhere
//   1  everybody updates what it owns, and the weights are gathered, while the next forward pass begins: moments, and
//      what else only the update needs, are kept for the owned ranges alone
//   2  gradients as well: those of a micro-step are kept for two blocks and the embeddings only, whose part is collected
//      after the reduction
// A rank's sum over several micro-steps is as large as the model: while steps may have several, stage 2 shards gradients
// only if they are reduced at every micro-step (--reduce micro-step), which is another order: the micro-steps' sums over
// the ranks are added up. That is M times the traffic for M micro-steps, hidden behind M backward passes.
#ifndef GNS_PARALLEL_H
#define GNS_PARALLEL_H

#include "ranks/comm.h"
#include "model/engine.h"
#include "ranks/shared_memory.h"
#include "ranks/transport.h"

typedef struct {
    int64_t first, count; // rows
} Share;
Share parallel_share(int64_t rows, int rank, int ranks);

typedef struct {
    ZeroStage zero;
    ReduceCadence reduce;
    int micro_batch;   // rows of a micro-step, at most
    int64_t batch_max; // rows of a step over all ranks, at most
    const TransportApi *transport;
} ParallelConfig;

typedef struct {
    Comm *comm;
    const Model *model;
    ParallelConfig config;
    bool shard_grads;
    int buckets;    // 0: one rank
    Range *owned;   // (buckets) this rank's parts, in ascending order
    Engine *engine; // from parallel_start on
    const TransportApi *api;
    Transport *transport; // NULL: one rank
    bool rank_norms;      // of this step
    bool first;           // micro-step under way or the last one: the first of its step
    bool made_any;        // gradients, of rows of its own, in this step
    int unreduced;        // buckets [0, unreduced) of it are not on their way yet
    int uncollected;      // [unreduced, uncollected) are, and are to be collected (shard_grads)
    int64_t *work;        // (buckets) the number of the transport's work for it
    SharedMemory copy;    // parallel_share_copy's
    int sent, arrived;    // buckets of the new weights that are on their way, and that the engine can count on
} Parallel;

// Buckets and parts, for rank comm->rank of comm->ranks; talks to nobody.
int parallel_create(Parallel *p, Comm *comm, const Model *model, const ParallelConfig *config, Error *e);
void parallel_destroy(Parallel *p);

// What an engine of this rank shall keep.
void parallel_shard(const Parallel *p, EngineConfig *config);

int parallel_start(Parallel *p, Engine *engine, WireType wire, Error *e);

// Micro-steps that all ranks take for a step of so many rows: as many as the largest share needs. A rank that has no
// more rows takes part in the others without any (n = 0).
int64_t parallel_micro_steps(const Parallel *p, int64_t rows);

// A step: begin; micro-steps over this rank's rows, like engine_micro_step's, of which the last is known; norms; update.
// rank_norms: measure |sum of this rank's gradients| too.
int parallel_begin_step(Parallel *p, bool rank_norms, Error *e);
int parallel_micro_step(Parallel *p, const uint16_t *tokens, int n, GnsMode mode, bool last, Error *e);

int parallel_norms(Parallel *p, Error *e); // of the sum of all ranks' gradients
int parallel_update(Parallel *p, const UpdateConfig *update, Error *e);

// New weights go round during the next forward pass. Where something else comes before it, which one rank may even do
// by itself, all ranks first send for those that have not set out.
int parallel_send_weights(Parallel *p, Error *e);

// Where training ends on an error that all ranks know (settled): nothing travels any more when this returns, on any rank,
// so that each may take its end down in its own time.
int parallel_come_to_rest(Parallel *p, Error *e);

// The step's numbers, over all ranks: any time after the norms.
typedef struct {
    StepResult *result; // engine_result's; summed over the ranks but for grad_sq, which is the whole batch's already
    double rank_sq;     // sum over ranks r of |s_r|^2, s_r the sum of rank r's gradients; by REDUCE_MICRO_STEP, over
                        // every micro-step's of every rank
    bool stop;          // in: asked of this rank; out: of any
} StepSums;
int parallel_sums(Parallel *p, StepSums *sums, Error *e);

// Have all ranks the same weights, to the bit? They start with the same and make the same updates, so it takes a fault of
// a machine to change that. ERR_RANK, settled, names the ranks that are out of line and the first tensor.
int parallel_compare(Parallel *p, Error *e);

// The engine's state as a whole, wherever it is kept: engine_store for rank 0, while the others serve it. In between
// rank 0 may store whatever it likes, in any order, or do what only it does; parallel_served lets the others go on.
int parallel_store(Parallel *p, StateKind kind, Range range, float *values, Error *e); // on rank 0
bool parallel_stores_alone(const Parallel *p); // is all of a checkpoint in rank 0's engine?
int parallel_served(Parallel *p, Error *e);    // on rank 0
int parallel_serve(Parallel *p, Error *e);     // on the others

// Memory on rank 0 for whole arrays of state, which begin `stride` floats apart: where the state is shared out, the ranks
// of its machine put their parts there themselves, at the same time, and send nothing. All ranks together, before the
// first store; it lives as long as p. memory: NULL on the others, and where there is nothing to gain or none to be had.
int parallel_share_copy(Parallel *p, int arrays, size_t stride, float **memory, Error *e);

// Meanwhile a deadline is for one piece of what rank 0 does, not for all of it. On rank 0, from the thread that speaks
// with the others: a piece is done. They are told, so that everybody's deadline starts anew; twice a second at most.
void parallel_beat(void *parallel); // a Pulse's
#endif
