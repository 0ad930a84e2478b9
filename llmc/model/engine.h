// engine: the interface between the program and an engine, a struct of functions (EngineApi). main passes it to
// program_main. There are two engines, train_gpt2.c (CPU) and train_gpt2.cu (CUDA).
//
// The host queues work on the device and runs ahead of it. In a step the host waits only in engine_result, and in
// engine_micro_step until an earlier micro-step's tokens are copied. Outside a step, it waits in create, tune, load,
// store, hash, eval and logits. With several engines on one device, call an engine only after the last engine_result,
// engine_eval or engine_logits of the others has returned.
//
// Convention for gradients: the gradient buffer holds the SUM over examples of g_b. g_b is the gradient of L_b, the
// mean cross-entropy over the T tokens of example b (with label smoothing if that is on). The update divides by B. So
// per-example norms need no correction, and micro-batches of any size accumulate to the same sum.
//
// A loss scale S (`scale_loss`) is a power of two. With it the buffer holds S times the gradients, and `norms` writes
// S^2 times the squared norms. `update` and `result` undo this, exactly.
#pragma once

#include "math/dropout.h"
#include "math/fp8.h"
#include "model/model.h"
#include "model/modes.h"

#include <assert.h>

// The state of an engine. Each engine completes this type for itself; its first member is `const EngineApi *api`.
typedef struct Engine Engine;

// The ranks that hold one model together (--tensor, model_create_local). ranks = 0 or 1: one rank holds the model.
// micro_step, eval and logits must get the same tokens on every rank.
//   own rows      rows_of_rank(n, rank, ranks) of a call's n rows; may be none. Each rank computes embeddings,
//                 LayerNorms, the residual stream, the head and the losses for its own rows only
//   all rows      the n rows. Each rank computes attention (its model's heads) and MLP (its columns) for all rows
// A block's forward pass, on every rank of the group in the same order:
//     ln_1 (own) | gather | qkv, attention, proj (all) | reduce | residual, ln_2 (own) | gather | fc, GELU, fcproj
//     (all) | reduce
// A block's backward pass (with RECOMPUTE_BLOCK all but the last block rerun the forward pass up to GELU before it):
//     gather | fcproj, GELU, fc (all) | reduce | ln_2 (own) | gather | proj, attention, qkv (all) | reduce | ln_1 (own)
// Outputs of proj and fcproj, and gradients of the outputs of ln_1 and ln_2, are partial sums until reduced. Exactly
// one rank adds the biases of proj and fcproj. Gradients of whole tensors, biases included, must be summed over the
// ranks to cover all rows.
// gather_rows: `values` (rows, width) holds this rank's rows at their place, and receives the other ranks' rows.
// reduce_rows: own (own rows, width) = sum over the ranks of `partial` (rows, width), in fp32 in the ranks' order, then
// rounded. `width` counts values of `type`. After its rows `partial` has room for `ranks` times the own rows; on a
// device for ranks - 1 times. On a device both functions work in the order of the engine's stream.
typedef struct {
    int rank, ranks;
    int (*gather_rows)(void *context, void *values, int rows, size_t width, Dtype type, Error *e);
    int (*reduce_rows)(void *context, void *own, const void *partial, int rows, size_t width, Dtype type, Error *e);
    void *context;
} TensorRanks;

typedef struct {
    const Model *model; // outlives the engine; with `tensor` this rank's local model
    TensorRanks tensor;
    int micro_batch; // most rows of a micro-step; they hold at most MICRO_BATCH_TOKENS_MAX tokens
    int seq_len;     // T, at most the model's context
    int threads;     // CPU threads; 0: one per core
    GnsMode gns;     // the largest mode that a step will use
    Dtype dtype;     // --dtype
    bool fp8_head;   // types of fp8 also round the factors of the logits, in training
    bool inference;  // no gradients and moments: for sampling and evaluation only
    Recompute recompute;
    bool document_mask;    // attention stays within a document, where positions begin at 0 (also in eval and logits)
    uint16_t separator;    // the token that begins a document
    Dropout dropout;       // seed and rate, for micro-steps only; `examples` sets dropout.example
    Optimizer optimizer;   // with Muon no owned range may cut a block's matrix
    float label_smoothing; // in training's loss only (math/loss.h), not in eval
    const Range *owned;    // the ranges that this rank updates, ascending. Moments and other arrays of the update cover
    int owned_count;       // only these ranges. owned_count 0: the whole model
    bool shard_grads;      // shard gradients (`collect`); each owned range then lies within one of the model's buckets
    bool shard_weights;    // shard weights (`own_weights`); needs owned ranges, each within one of the model's buckets
    int step_rows;         // most rows of this engine in a step; 0: `result` does not return StepResult.row
    int sources;           // number of sources, at least 2, with step_rows; 0: `result` does not return source_gram
    size_t leave;          // bytes of the device's memory to leave free, for transfers between ranks
    bool plan_fused;       // plan_memory only: plan for a device with exact_is_fused
    // Returns the source of an example, by its index (`examples`).
    int (*source)(const void *source_data, uint64_t example);
    const void *source_data;
} EngineConfig;

// Memory of an engine, by category, known before it is allocated (--dry-run).
typedef struct {
    struct {
        const char *what;
        size_t bytes;
    } item[16];
    int count;
    size_t total; // bytes
} MemoryPlan;

// The device of an engine.
typedef struct {
    char name[256];      // the maker's or the driver's name; "": this machine has no such device
    bool is_cpu;         // a CPU, whose speeds are measured; a GPU's are in a table (plan/devices.h)
    size_t value_bytes;  // bytes of a weight or activation in the kernels
    size_t head_bytes;   // bytes of the largest chunk of logits
    double flops;        // FLOP/s of multiply-adds, measured; 0: not measured, or no kernel for the type
    double bandwidth;    // B/s of a copy, read and written together, measured; 0: not measured
    double memory_bytes; // 0: unknown
    // True if the products also compute per-example norms, without writing an example's gradient. Then GNS_EXACT costs
    // at most a few percent of a step. Depends on GPU, precision and channels.
    bool exact_is_fused;
} EngineDevice;

enum { TUNING_BYTES = 1 << 14 }; // most bytes of the text that `tuning` returns, NUL included

// The four arrays of an engine, all in the model's flat layout; load and store convert from and to fp32.
typedef enum { STATE_PARAM, STATE_GRAD, STATE_MOMENT1, STATE_MOMENT2 } StateKind;

// Fill (StateReader) or consume (StateWriter) the values of a range.
typedef int (*StateReader)(void *context, StateKind kind, Range range, float *values, Error *e);
typedef int (*StateWriter)(void *context, StateKind kind, Range range, const float *values, Error *e);

// The engine's own memory, on the device if there is one, for transfers between ranks.
typedef enum {
    BUFFER_GRAD,   // float, the flat layout; with shard_grads see `collect`
    BUFFER_WEIGHT, // the weights that forward and backward read, fp32 or rounded, the flat layout; with shard_weights
                   // see shard_weight_place
    BUFFER_MASTER, // float, the flat layout; only if this rank keeps all master weights
    BUFFER_MOMENT1,
    BUFFER_MOMENT2,
    BUFFER_NORMS, // double, S^2 times each tensor's squared norm; `norms` writes it, `update` and `result` read it
    BUFFER_TRUST  // double, two per tensor; `trust` writes it, `update` reads it
} EngineBuffer;

// With several ranks the engine reports the progress of a micro-step's gradients, bucket by bucket, from the model's
// last bucket to its first. Bucket 0 includes the head's gradient, so it begins first and finishes last. Both functions
// may queue work on the engine's stream; an error ends the micro-step. The engine may delay `final` so that the
// transfer overlaps well.
typedef struct {
    int (*begins)(void *context, Range range, Error *e); // called before the range's first gradient; may be NULL
    int (*final)(void *context, Range range, Error *e);  // every gradient in the range is complete
    void *context;
} GradientWatch;

// With several ranks new weights may still be in transfer when the next forward pass begins. The engine calls `await`
// before it reads any weight of a range; the engine's stream then waits for these weights. The engine may call `soon`
// earlier, when a transfer overlaps well. The ranges are the model's buckets, from first to last; one call of `soon`
// may cover all of them. `hash` also calls `await` for its range; `store` never does.
//
// With shard_weights every pass gathers the blocks' weights (`own_weights`), the backward pass from last to first.
// `soon` then covers only the next block's bucket. The engine calls it once the slot's last read is queued.
typedef struct {
    int (*soon)(void *context, Range range, Error *e);
    int (*await)(void *context, Range range, Error *e);
    void *context;
} WeightsWatch; // without functions: no weights are in transfer

typedef struct {
    double lr, beta1, beta2, eps, weight_decay;
    double muon_lr;   // learning rate of Muon's matrices; AdamW and LAMB use lr
    double momentum;  // Muon's mu (math/muon.h)
    double grad_clip; // largest norm of the batch's mean gradient; 0: no clipping
    int64_t step;     // counts from 1, for bias correction
    int64_t batch;    // B, examples of this step over all ranks
} UpdateConfig;

// Statistics of one row.
typedef struct RowResult {
    double sq;     // |g_b|^2 over all LayerNorms
    double nll;    // L_b without label smoothing
    double rarity; // engines leave it 0 (run/row_outliers.h)
} RowResult;

// Statistics of a step. Arrays have one entry per tensor of the model's table.
typedef struct StepResult {
    double loss_sum;    // sum over the step's examples of L_b, nats per token
    double *grad_sq;    // |sum_b g_b|^2
    double *example_sq; // sum_b |g_b|^2; NaN where the step's mode did not measure it
    double nll_sum;     // loss_sum without label smoothing
    // (EngineConfig.step_rows) the step's rows, in order; 0 in rows that another rank of a tensor group owns. NULL: not
    // asked for.
    RowResult *row;
    // (sources, sources) <v_s, v_t>; NULL: not asked for. v_s is the gradient of the LayerNorm parameters, summed over
    // this rank's rows of source s.
    double *source_gram;
    // (fp8_entries) largest |x| of each site on this rank, before rounding; NaN if any x is NaN, 0 without rows. NULL:
    // not asked for.
    float *amax;
} StepResult;

typedef struct EngineApi EngineApi;
struct EngineApi {
    // ---- Before there is an engine ----------------------------------------------------------------------------------

    bool needs_loss_scale; // true if gradients are fp16
    Dtype dtype;           // the default --dtype

    // ERR_USAGE if this build has no such type, ERR_UNAVAILABLE if this machine has no instructions for it.
    int (*check_dtype)(Dtype dtype, Error *e);

    void (*plan_memory)(const EngineConfig *config, MemoryPlan *plan);

    // measure: also measures the speeds of a CPU, which no table lists; this takes a moment.
    void (*device)(const EngineConfig *config, bool measure, EngineDevice *device);

    // ERR_USAGE if the engine cannot compute this shape. NULL: it computes all shapes.
    int (*check)(const EngineConfig *config, Error *e);

    int (*create)(Engine **out, const EngineConfig *config, Error *e);
    void (*destroy)(Engine *engine);

    // Writes one line about the machine and the build: "CPU, fp32, 2 threads, vectors of 512 bits".
    void (*describe)(const Engine *engine, char *out, size_t bytes);

    // ---- The choice of cuBLASLt's algorithm for each matrix product -------------------------------------------------
    // The default is cuBLASLt's proposal, the same at every start on the same machine. Algorithms differ in the order
    // of sums, and so in the results' last bits. NULL: there is nothing to choose (CPU).

    // Times all algorithms for every product of a micro-step that has no choice yet, and chooses the fastest. Do not
    // call it within a step, since it destroys the gradients and the step's statistics.
    int (*tune)(Engine *engine, Error *e);

    // tuning returns the choices as one line of text for run.json and checkpoints; "": none. set_tuning restores
    // choices before the first step. ERR_INPUT, and no choices, if another GPU or library version made them.
    const char *(*tuning)(const Engine *engine);
    int (*set_tuning)(Engine *engine, const char *tuning, Error *e);

    // ---- State ------------------------------------------------------------------------------------------------------
    // If an array covers only the owned ranges, store writes no `values` of other ranges, and load reads none. A load
    // of STATE_PARAM also sets the weights that forward and backward read (with shard_weights only the embeddings).

    int (*load)(Engine *engine, StateKind kind, Range range, const float *values, Error *e);

    // Stores the values of the last update; does not wait for later work. May run in another thread until the next
    // update or load. While weights are in transfer (watch_weights), store owned ranges only, since transfers write the
    // others. The engine does not use `values` after store or load has returned, even with an error.
    int (*store)(Engine *engine, StateKind kind, Range range, float *values, Error *e);

    // Pins (page-locks) host memory that store fills or load reads, until unpin. Optional, but other memory is copied
    // more slowly. Any thread may call them. NULL: the engine does not need them.
    void (*pin)(Engine *engine, void *memory, size_t bytes);
    void (*unpin)(Engine *engine, void *memory);

    // Hashes (base/hash.h) those weights of the range that are equal on every rank: the weights that forward and
    // backward read, and the master weights unless they are sharded. Waits for the device. With shard_weights awaits
    // one block after another.
    int (*hash)(Engine *engine, Range range, uint64_t *hash, Error *e);

    // ---- One optimizer step: begin_step, micro-steps, norms, update, result -----------------------------------------
    // The first micro-step overwrites the last step's gradients, which are never cleared.

    int (*begin_step)(Engine *engine, Error *e);

    // Says that the rows of the following micro-steps are the run's examples first, first + 1, ... Dropout and a row's
    // source depend on these indices.
    void (*examples)(Engine *engine, uint64_t first);

    // Sets the loss scale of the following steps; 1 until then.
    void (*scale_loss)(Engine *engine, double scale);

    // Sets exponents and channels k (fp8_entries) of the following steps (math/fp8.h); copies them. FP8_UNSET until
    // then. A step rounds a product's factors if both have an exponent. With DTYPE_FP8_DW it also rounds a weight
    // gradient's two factors, if they and the weight have exponents. If a site saturates, `norms` makes the norm of the
    // first tensor infinite, so that no rank updates. k NULL: the steps run in bf16, for benchmarks of the CUDA engine.
    // Call it only for types of fp8.
    void (*exponents)(Engine *engine, const int8_t *k);

    // Runs forward and backward over 0 < n <= micro_batch rows. tokens: (n, T + 1); row b trains tokens[b][0..T-1] to
    // predict tokens[b][1..T]. Adds to the loss, to the per-example norms of the mode, and to the gradients. A step's
    // first micro-step overwrites the gradients; with shard_grads every micro-step does. The caller may reuse tokens on
    // return.
    int (*micro_step)(Engine *engine, const uint16_t *tokens, int n, GnsMode mode, Error *e);

    // Measures squared norms, by tensor, of the gradients in the range. A tensor without elements in the range keeps
    // its norm; begin_step clears all norms.
    int (*norms)(Engine *engine, Range range, Error *e);

    // Measures squared norms, by tensor, of weights and of the step's direction in the owned part of the range. For
    // LAMB, before the first `update` of a step. A tensor without elements in this part keeps its norms; begin_step
    // clears all norms.
    int (*trust)(Engine *engine, Range range, const UpdateConfig *update, Error *e);

    // Applies the optimizer's step to the owned part of the range. Divides the gradient by B, and clips it by the norm
    // that `norms` wrote. Changes nothing if that norm is not finite.
    int (*update)(Engine *engine, Range range, const UpdateConfig *update, Error *e);

    int (*result)(Engine *engine, StepResult *result, Error *e); // waits for the device

    // ---- Without training -------------------------------------------------------------------------------------------

    // Computes the losses of n <= micro_batch rows of T <= seq_len tokens. tokens: (n, T + 1). loss (n, T), in nats:
    // loss[b][t] is the loss of tokens[b][t + 1]; 0 in rows that another rank of a tensor group owns.
    int (*eval)(Engine *engine, const uint16_t *tokens, int n, int T, float *loss, Error *e);

    // Computes the logits of the token that follows n <= seq_len tokens. logits: (V), only on rank 0 of a tensor group.
    int (*logits)(Engine *engine, const uint16_t *tokens, int n, float *logits, Error *e);

    // ---- Several ranks (ranks/parallel.h) ---------------------------------------------------------------------------

    void (*watch)(Engine *engine, const GradientWatch *watch);        // for the next micro-step only
    void (*watch_weights)(Engine *engine, const WeightsWatch *watch); // from now on

    // With shard_grads no array holds the whole gradient. The gradients of a micro-step's blocks share two slots in
    // memory, one for even and one for odd buckets:
    //
    //     bucket               is in memory from its `begins` until
    //     0 (the embeddings)   its `begins` in the next micro-step
    //     1 + l (block l)      the next `begins` of a block in its slot
    //
    // collect adds a range of gradients to the step's sums, which `norms` and `update` read. first: copies them.
    // The range must lie within one owned range. Call it after the ranks have summed the bucket, while it is in memory.
    int (*collect)(Engine *engine, Range range, bool first, Error *e);

    // With shard_weights memory holds the embeddings' weights, and one block's in each slot (shard_weight_place):
    //
    //     bucket               is in memory from its `await` until
    //     0 (the embeddings)   the next update
    //     1 + l (block l)      `soon` or `await` of another block in its slot
    //
    // The master weights of the owned ranges are stored separately. own_weights returns the address from which the
    // ranks gather the weights of a range within one owned range, in the type that forward and backward read. The
    // address may lie in the bucket's memory. Otherwise the weights stay at this address until the next update.
    const void *(*own_weights)(Engine *engine, Range range);

    // Sets the range's gradients in memory to 0, for a rank without rows.
    int (*clear)(Engine *engine, Range range, Error *e);

    void *(*buffer)(Engine *engine, EngineBuffer buffer, size_t element); // address of an element
    size_t (*weight_bytes)(const Engine *engine);                         // bytes of an element of BUFFER_WEIGHT

    // Returns the stream on which the engine queues its work, a cudaStream_t. NULL: calls return when the work is done.
    void *(*stream)(Engine *engine);
};

extern const EngineApi cpu_engine, cuda_engine; // train_gpt2.c, train_gpt2.cu

// ---- Calls of an engine's functions, under the name engine_X --------------------------------------------------------

static inline const EngineApi *engine_api(const Engine *engine) { return *(const EngineApi *const *)engine; }

static inline int engine_create(const EngineApi *api, Engine **out, const EngineConfig *config, Error *e) {
    assert(!config->sources || config->step_rows);
    int code = api->create(out, config, e);
    if (!code) *(const EngineApi **)*out = api;
    return code;
}
static inline void engine_destroy(Engine *engine) {
    if (engine) engine_api(engine)->destroy(engine);
}

#define engine_describe(g, ...)      engine_api(g)->describe(g, __VA_ARGS__)
#define engine_tune(g, ...)          engine_api(g)->tune(g, __VA_ARGS__)
#define engine_load(g, ...)          engine_api(g)->load(g, __VA_ARGS__)
#define engine_store(g, ...)         engine_api(g)->store(g, __VA_ARGS__)
#define engine_hash(g, ...)          engine_api(g)->hash(g, __VA_ARGS__)
#define engine_begin_step(g, ...)    engine_api(g)->begin_step(g, __VA_ARGS__)
#define engine_examples(g, ...)      engine_api(g)->examples(g, __VA_ARGS__)
#define engine_scale_loss(g, ...)    engine_api(g)->scale_loss(g, __VA_ARGS__)
#define engine_exponents(g, k)       engine_api(g)->exponents(g, k)
#define engine_micro_step(g, ...)    engine_api(g)->micro_step(g, __VA_ARGS__)
#define engine_norms(g, ...)         engine_api(g)->norms(g, __VA_ARGS__)
#define engine_update(g, ...)        engine_api(g)->update(g, __VA_ARGS__)
#define engine_trust(g, ...)         engine_api(g)->trust(g, __VA_ARGS__)
#define engine_result(g, ...)        engine_api(g)->result(g, __VA_ARGS__)
#define engine_eval(g, ...)          engine_api(g)->eval(g, __VA_ARGS__)
#define engine_logits(g, ...)        engine_api(g)->logits(g, __VA_ARGS__)
#define engine_watch(g, ...)         engine_api(g)->watch(g, __VA_ARGS__)
#define engine_watch_weights(g, ...) engine_api(g)->watch_weights(g, __VA_ARGS__)
#define engine_collect(g, ...)       engine_api(g)->collect(g, __VA_ARGS__)
#define engine_own_weights(g, ...)   engine_api(g)->own_weights(g, __VA_ARGS__)
#define engine_clear(g, ...)         engine_api(g)->clear(g, __VA_ARGS__)
#define engine_buffer(g, ...)        engine_api(g)->buffer(g, __VA_ARGS__)
#define engine_weight_bytes(g)       engine_api(g)->weight_bytes(g)

// Functions that an engine may lack.
#define engine_pin(g, memory, bytes) (engine_api(g)->pin ? engine_api(g)->pin(g, memory, bytes) : (void)0)
#define engine_unpin(g, memory)      (engine_api(g)->unpin ? engine_api(g)->unpin(g, memory) : (void)0)
#define engine_stream(g)             (engine_api(g)->stream ? engine_api(g)->stream(g) : NULL)
#define engine_tuning(g)             (engine_api(g)->tuning ? engine_api(g)->tuning(g) : "")

static inline int engine_set_tuning(Engine *engine, const char *tuning, Error *e) {
    if (engine_api(engine)->set_tuning) return engine_api(engine)->set_tuning(engine, tuning, e);
    if (!*tuning) return 0;
    return FAIL(e, ERR_INPUT, NULL, "matrix products were tuned for %.*s, and this is the CPU",
                (int)strcspn(tuning, ":"), tuning);
}

// ---- For the engines ------------------------------------------------------------------------------------------------

// Divides the squared norms of tensors and of `rows` rows, and source_gram, by scale^2.
static inline void step_result_unscale(StepResult *result, const EngineConfig *c, int rows, double scale) {
    for (int i = 0; i < rows && result->row; i++) result->row[i].sq /= scale * scale;
    for (int i = 0; i < c->sources * c->sources && result->source_gram; i++) result->source_gram[i] /= scale * scale;
    for (int i = 0; i < c->model->tensor_count && scale != 1; i++) {
        result->grad_sq[i] /= scale * scale;
        result->example_sq[i] /= scale * scale;
    }
}

// Return the number of ranks in the engine's tensor group, and which of n rows this rank owns.
static inline int tensor_ranks(const EngineConfig *c) { return c->tensor.ranks > 1 ? c->tensor.ranks : 1; }
static inline RankRows own_rows(const EngineConfig *c, int64_t n) {
    return rows_of_rank(n, c->tensor.rank, tensor_ranks(c));
}

// Returns the number of calls of gather_rows and reduce_rows in a micro-step; trains false: in eval or logits.
static inline int tensor_exchanges(const EngineConfig *c, bool trains) {
    const int L = c->model->config.layers, again = c->recompute == RECOMPUTE_BLOCK ? 3 * (L - 1) : 0;
    return tensor_ranks(c) > 1 ? trains ? 8 * L + again : 4 * L : 0;
}

// True if a micro-step in this mode measures the tensor's per-example norms.
static inline bool gns_measures(const Tensor *tensor, GnsMode mode) {
    return mode == GNS_EXACT || (mode == GNS_LN && tensor->group == GROUP_LN);
}

// Calls function f of a GradientWatch or WeightsWatch, unless NULL, for a range: watch_call(watch, f, range, e).
#define watch_call(watch, f, ...) ((watch)->f ? (watch)->f((watch)->context, __VA_ARGS__) : 0)
