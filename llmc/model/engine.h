// engine: what the training loop asks of an engine. There are two, one a program: train_gpt2.c (CPU) and
// train_gpt2.cu (CUDA).
//
// A device works through a queue, and the host runs ahead of it. In a step only engine_result waits until the queue has
// come as far as the step's numbers (and engine_micro_step, if need be, until an earlier one's tokens are copied).
// Beside the steps engine_create, engine_tune, engine_load, engine_store, engine_hash, engine_eval and engine_logits
// wait. Several engines on one device take turns: before one computes, the other's last engine_result, engine_eval or
// engine_logits has returned.
//
// Convention for gradients: the gradient buffer holds the SUM over examples of g_b, where g_b is the gradient of
// L_b = mean over the T tokens of example b's cross-entropy. There is no loss scale; the division by B happens in the
// update. So per-example norms need no correction, and micro-batches of any size accumulate to the same thing.
#ifndef GNS_ENGINE_H
#define GNS_ENGINE_H

#include "model/model.h"
#include "model/modes.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct Engine Engine;

typedef struct {
    const Model *model; // outlives the engine
    int micro_batch;    // rows of one micro-step, at most; of no more than MICRO_BATCH_TOKENS_MAX tokens
    int seq_len;        // T, at most the model's context
    int threads;        // CPU threads; 0: all there are
    GnsMode gns;        // the most a step will measure
    bool inference;     // no gradients and moments: for sampling and evaluation only
    Recompute recompute;
    const Range *owned; // what this rank updates, in ascending order: moments (and what else only the update needs)
    int owned_count;    // exist for these ranges alone. 0: for everything
    bool shard_grads;   // gradients too, see engine_collect; an owned range then lies within one of the model's buckets
    size_t leave;       // bytes of a device's memory that others will want: the ranks' exchange
} EngineConfig;

// Memory the engine will take, by category, known before it is taken (--dry-run).
typedef struct {
    struct {
        const char *what;
        size_t bytes;
    } item[16];
    int count;
    size_t total; // bytes
} MemoryPlan;

void engine_plan_memory(const EngineConfig *config, MemoryPlan *plan);

// The device that the engine would run on, without creating it.
typedef struct {
    char name[256];      // as its maker or driver calls it; "": none here
    size_t value_bytes;  // of a weight or an activation in the kernels
    size_t head_bytes;   // most that a chunk of logits takes
    double flops;        // FLOP/s of multiply-adds, measured in a moment; 0: ask device_specs.h
    double bandwidth;    // B/s of a copy, read and written together, likewise
    double memory_bytes; // likewise
} EngineDevice;
void engine_device(const EngineConfig *config, EngineDevice *device);

// Can the engine compute this shape? ERR_USAGE where not, as engine_create would say.
int engine_check(const EngineConfig *config, Error *e);

int engine_create(Engine **out, const EngineConfig *config, Error *e);
void engine_destroy(Engine *engine); // NULL is fine

// One line about the machine and the build: "CPU, fp32, 2 threads, vectors of 512 bits".
void engine_describe(const Engine *engine, char *out, size_t bytes);

// Peak of the engine's matmul arithmetic in FLOP/s from a table of known devices; 0 where it is not known.
double engine_peak_flops(const Engine *engine);

// Bytes in use at present: on the device, by everyone, where there is one; else the process's resident set. 0: unknown.
size_t engine_memory_in_use(const Engine *engine);

// Which of the algorithms on offer the matrix products take. Unasked, what the library proposes, which is the same
// whenever it is asked on the same machine. engine_tune times them all, for every product of a micro-step that has no
// choice yet, and keeps to the fastest; gradients and the step's numbers are lost, so not within a step. Another
// algorithm sums in another order: the last bits differ. ERR_USAGE where there is nothing to choose (CPU).
int engine_tune(Engine *engine, Error *e);

// What was chosen, a line of text for run.json and checkpoints ("": nothing), and the same back, before the first step:
// ERR_INPUT where it was chosen on another GPU or library; then nothing is taken over.
enum { TUNING_BYTES = 1 << 14 }; // the most that the text takes, with its NUL
const char *engine_tuning(const Engine *engine);
int engine_set_tuning(Engine *engine, const char *tuning, Error *e);

// The four arrays an engine keeps, all in the model's flat layout, seen from outside as fp32. Of arrays that exist for
// the owned ranges alone, the rest is not there: storing leaves its values alone, loading passes over them. (The weights
// that forward and backward read are all there, and a load of STATE_PARAM sets them all.)
typedef enum { STATE_PARAM, STATE_GRAD, STATE_MOMENT1, STATE_MOMENT2 } StateKind;
int engine_load(Engine *engine, StateKind kind, Range range, const float *values, Error *e);
int engine_store(Engine *engine, StateKind kind, Range range, float *values, Error *e);

// engine_store may also run in another thread while micro-steps, engine_eval and the like go on in this one, as long as
// nothing changes what it stores (no engine_update, no engine_load) and no weights are on their way
// (engine_watch_weights). What it stores is as the last update left it; it does not wait for what was queued since.
// When it or engine_load returns, with an error too, `values` is the caller's again.

// Host memory that engine_store is to fill at full speed, until engine_unpin: a device copies only to pages that stay
// where they are without a detour. Only a hint, from any thread: what cannot be pinned is copied as before.
void engine_pin(Engine *engine, void *memory, size_t bytes);
void engine_unpin(Engine *engine, void *memory);

// One optimizer step: begin, micro-steps, norms, update, result. What is in memory of the last step's gradients counts no
// more, but is not cleared: that would be a pass over memory for nothing.
int engine_begin_step(Engine *engine, Error *e);

// Forward and backward over 0 < n <= micro_batch rows. tokens: (n, T + 1); row b trains tokens[b][0..T-1] to predict
// tokens[b][1..T]. Adds to the loss, as mode says to the per-example norms, and to the gradients; but the step's first
// gradients, and with shard_grads every micro-step's, replace what is there. tokens may be reused on return.
int engine_micro_step(Engine *engine, const uint16_t *tokens, int n, GnsMode mode, Error *e);

// With several ranks: who is told how far a micro-step's gradients are. The ranges are the model's buckets, from the last
// to the first; but bucket 0, to which the head's gradient belongs, begins before all others, and is final last. Both
// functions may queue work on the engine's stream; an error that they return ends the micro-step.
// `final` may come a while after the gradient is complete: when the engine's next kernels suffer least from a transfer
// beside them.
typedef struct {
    int (*begins)(void *context, Range range, Error *e); // its first gradient comes next; NULL: nobody cares
    int (*final)(void *context, Range range, Error *e);  // all that lies in it has got its gradient
    void *context;
} GradientWatch;
void engine_watch(Engine *engine, const GradientWatch *watch); // the next micro-step, and no other

// From the engines: bucket i of the model begins, is final.
static inline int watch_begins(const GradientWatch *watch, const Model *model, int i, Error *e) {
    return watch->begins ? watch->begins(watch->context, model_bucket(model, i), e) : 0;
}
static inline int watch_final(const GradientWatch *watch, const Model *model, int i, Error *e) {
    return watch->final ? watch->final(watch->context, model_bucket(model, i), e) : 0;
}

// With shard_grads there is no gradient of a whole step. Of a micro-step's gradients the blocks' share two places in
// memory, one for even and one for odd buckets:
//
//     bucket               is in memory from its `begins` until
//     0 (the embeddings)   its `begins` in the next micro-step
//     1 + l (block l)      the next `begins` of a block whose bucket is likewise even or odd
//
// When the ranks have summed a bucket's gradients up between them, and while these are in memory, engine_collect takes
// them over into the step's sums (first), or adds them: those of a range that lies within a single owned one. Norms and
// update are about these sums.
int engine_collect(Engine *engine, Range range, bool first, Error *e);

// Sets gradients in memory to 0, with shard_grads those of a bucket: for a rank that has no rows to make any of.
int engine_clear(Engine *engine, Range range, Error *e);

// Squared norms of the gradient, by tensor, of all that lies in the range. A tensor without elements there keeps what
// it had: engine_begin_step clears them all.
int engine_norms(Engine *engine, Range range, Error *e);

// Adds the same of this rank's own gradient, before any other's is added to it, to StepResult's rank_sq.
int engine_rank_norms(Engine *engine, Range range, Error *e);

// The engine's own memory, for what travels between ranks: on the device where there is one, and in the order of the
// stream on which the engine queues its work (a cudaStream_t; NULL on the CPU, where a call has done its work when it
// returns).
typedef enum {
    BUFFER_GRAD,   // float, the flat layout; with shard_grads each bucket somewhere else, see engine_collect
    BUFFER_WEIGHT, // what forward and backward read, the flat layout: fp32, or the rounded copy
    BUFFER_NORMS   // double, one a tensor: what engine_norms leaves and engine_update and engine_result read
} EngineBuffer;
void *engine_buffer(Engine *engine, EngineBuffer buffer, size_t element); // address of an element
size_t engine_weight_bytes(const Engine *engine);                         // of one element of BUFFER_WEIGHT
void *engine_stream(Engine *engine);

// A hash (hash.h) of the bits of all weights in the range that every rank keeps alike: what forward and backward read,
// and the master weights, unless this rank has only its share of them. Waits for the device.
int engine_hash(Engine *engine, Range range, uint64_t *hash, Error *e);

// With several ranks: weights may still be on their way from the others when the next forward pass begins. Before it
// reads any of a range, the engine calls `await`, which orders its stream behind their arrival. Before that, where it
// can, it calls `soon`: the range is needed next, and a transfer that begins now slows the engine's kernels least. The
// ranges are the model's buckets, from the first to the last; all at once for `soon`, if the engine likes; and for
// `await` also what engine_store and engine_hash are asked for.
typedef struct {
    int (*soon)(void *context, Range range, Error *e);
    int (*await)(void *context, Range range, Error *e);
    void *context;
} WeightsWatch;
void engine_watch_weights(Engine *engine, const WeightsWatch *watch); // NULL: all are there

// From the engines. A watch without functions: all are there.
static inline int watch_soon(const WeightsWatch *watch, Range range, Error *e) {
    return watch->soon ? watch->soon(watch->context, range, e) : 0;
}
static inline int watch_await(const WeightsWatch *watch, Range range, Error *e) {
    return watch->await ? watch->await(watch->context, range, e) : 0;
}

typedef struct {
    double lr, beta1, beta2, eps, weight_decay;
    double grad_clip; // most that the norm of the batch's mean gradient may be; 0: no clipping
    int64_t step;     // 1 for the first: bias correction
    int64_t batch;    // B, examples of this step over all ranks
} UpdateConfig;

// AdamW over the owned part of the range, with the gradient divided by B, and clipped by the norm that engine_norms
// left. Changes nothing where that norm is not finite.
int engine_update(Engine *engine, Range range, const UpdateConfig *update, Error *e);

// Does a micro-step in this mode measure the tensor's per-example norms?
static inline bool gns_measures(const Tensor *tensor, GnsMode mode) {
    return mode == GNS_EXACT || (mode == GNS_LN && tensor->group == GROUP_LN);
}

// What came out of the step. Waits for the device. Arrays have one entry a tensor of the model's table.
typedef struct StepResult {
    double loss_sum;    // sum over the step's examples of L_b, nats a token
    double *grad_sq;    // |sum_b g_b|^2
    double *example_sq; // sum_b |g_b|^2; NaN where the step's mode did not measure it
    double *rank_sq;    // |this rank's own gradients|^2 as engine_rank_norms left it, else 0; NULL: not asked for
} StepResult;
int engine_result(Engine *engine, StepResult *result, Error *e);

// Losses of n <= micro_batch rows of T <= seq_len tokens, without training. tokens: (n, T + 1). loss: (n, T), in nats,
// of predicting tokens[b][t + 1].
int engine_eval(Engine *engine, const uint16_t *tokens, int n, int T, float *loss, Error *e);

// Logits of the token that follows n <= seq_len tokens. logits: (V).
int engine_logits(Engine *engine, const uint16_t *tokens, int n, float *logits, Error *e);

#ifdef __cplusplus
}
#endif
#endif
