// The CUDA engine's private state, shared by train_gpt2.cu, engine_life.cu, engine_memory.cu and engine_state.cu.
//
// Shapes: B rows of T tokens, C channels, NH heads, L layers, V vocabulary (Vp: padded).
#pragma once

#include "model/engine.h"
#include "cuda/device.cuh"
#include "cuda/matmul.cuh"
#include "cuda/optimizer.cuh"
#include "cuda/reduce.cuh"
#include "cuda/weight_gradient.cuh"

// A block's activations. With recomputation, and for inference, all blocks share one block's memory. For inference of one
// row each block has its own qkv, which cuda_logits reads again.
typedef struct {
    real *x;              // (B, T, C)  input of the block
    real *ln1;            // (B, T, C)
    float *mean1, *rstd1; // (B, T)
    real *qkv;            // (B, T, 3C)
    real *attention;      // (B, T, C)
    float *lse;           // (B, NH, T)
    real *x_mid;          // (B, T, C)  residual stream between attention and MLP
    real *ln2;            // (B, T, C)
    float *mean2, *rstd2; // (B, T)
    real *fc, *gelu;      // (B, T, 4C) before and after GELU
} Block;

enum { TOKEN_SLOTS = 2 }; // micro-steps whose tokens may be in flight to the device at once

struct Engine {
    const EngineApi *api;
    EngineConfig config;
    Device device;
    cudaStream_t stream;
    cudaStream_t store_stream; // copies to the host: they do not wait for kernels queued later
    cudaEvent_t state_ready;   // after the last update: see cuda_store
    Matmul *matmul;
    bool fused_linear; // linear_sm90 computes a block's products, except dinputs, and the head's
    WeightGradientPairs pairs;
    void *memory; // the one device allocation

    real *weight;     // what the kernels read: flat, as the tensor table has it, or a few buckets (shard_weight_place)
    real *own_weight; // with shard_weights in 16 bits: of the owned ranges, which the ranks gather from here
    float *param; // master weights: of the owned ranges (model/shard.h); the same as weight if these are fp32 and whole
    float *grad;  // of the step so far, with shard_grads of this micro-step: see shard_grad_place
    float *grad_sum;             // of the step: grad, or with shard_grads of the owned ranges
    float *moment1, *moment2;    // of the owned ranges
    UpdateRule *rule;            // see OptimizerArrays
    uint16_t *tensor;            // LAMB: see OptimizerArrays
    double *trust;               // LAMB: (2, tensors) squared norms of weights, of the step's direction
    float *rate;                 // LAMB: (tensors)
    void *muon;                  // Muon's scratch, in memory of activations
    ReduceSegment *segment;      // (tensors) the place of each, for norms
    ReduceSegment *segment_part; // (tensors) the part of each in the range of engine_norms
    double *stats;               // numbers of the step, see stats_count
    GradientWatch watch;         // of the next micro-step
    WeightsWatch weights_watch;  // await NULL: all weights are there
    float *grad_scale;           // (1) optimizer_scale
    bool scaled;                 // grad_scale is this step's
    float loss_scale;            // scale_loss

    Block *block;                             // (L)
    Block base;                               // activations of all blocks; each has a slice
    real *x_final;                            // (B, T, C)  output of the last block
    real *lnf;                                // (B, T, C)
    float *meanf, *rstdf;                     // (B, T)
    real *delta;                              // (B, T, C)  a branch's output, not yet added to the residual stream
    uint16_t *tokens;                         // (B, T + 1)
    uint16_t *document_first, *document_last; // (B, T) embedding_documents; NULL: a row is one
    unsigned *ticket;                         // (1) the next work item in attention and linear_sm90, 0 outside
    float *loss;                              // (B, T)
    float *smoothed;                          // (B, T) the same with label smoothing, or NULL
    real *logits;                             // (head_rows, Vp)  a chunk of the head
    real *dx, *dy;                            // (B, T, C)  gradient of the residual stream; of a branch
    real *dwide;                              // (B, T, 4C) gradient of qkv, fc
    void *sorted;                             // workspace of embedding_sort
    void *scratch;                            // of the running kernel
    ColumnJobs columns;                       // of the block whose backward runs
    void *matmul_scratch;
    float *decode_scratch;
    float *example_grad;  // gradients of one matrix, a few examples at a time (exact, not fused)
    float *head_at_token; // (B, T, C)  rows of the examples' head gradients (exact)
    int *head_row_at;     // (examples of a chunk, Vp)  which rows these are (exact, fused)

    uint16_t *staged[TOKEN_SLOTS]; // (B, T + 1) in pinned host memory
    cudaEvent_t sent[TOKEN_SLOTS]; // after the slot's copy
    int slot;
    float *logits_host;      // (V), pinned
    double *stats_host;      // (stats_count), then one number of cuda_hash; pinned
    cudaEvent_t stats_there; // after the copy of the step's numbers to stats_host
    bool stats_sent;         // that copy is queued, and no number has changed since
    uint16_t *seen;          // (T) its first seen_count tokens have their keys and values in memory
    int seen_count;
    int decoded;      // how many of these decode has computed, the last ones
    uint64_t example; // of the run, the first of the next micro-step
    GnsMode mode;     // the least of this step's micro-steps
    bool first;       // the next micro-step's gradients overwrite: the step's first, with shard_grads each
};

// Numbers of a step, summed on the device: loss, the same with label smoothing, <E, U>, then rows of one number a tensor:
// |g|^2, sum_b |g_b|^2, |g|^2 of this rank's own gradients, and scratch for the last.
enum { STAT_LOSS, STAT_SMOOTHED, STAT_CROSS, STAT_TENSORS };
typedef enum { STATS_GRAD_SQ, STATS_EXAMPLE_SQ, STATS_RANK_SQ, STATS_RANK_ROOM, STATS_ROWS } StatsRow;
static inline double *stats_row(double *stats, const Model *model, StatsRow row) {
    return stats + STAT_TENSORS + (int)row * (size_t)model->tensor_count;
}
static inline size_t stats_count(const Model *model) { return STAT_TENSORS + STATS_ROWS * (size_t)model->tensor_count; }

// Queue a copy between host and device.
static inline int copy_in(Engine *engine, void *to, const void *from, size_t bytes, Error *e) {
    return CUDA_CALL(cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, engine->stream), e);
}
static inline int copy_out(Engine *engine, void *to, const void *from, size_t bytes, Error *e) {
    return CUDA_CALL(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, engine->stream), e);
}

// Sets weights, gradients and moments to zero. The rows of wte after the vocabulary stay zero.
int engine_state_clear(Engine *engine, Error *e);

// Queues the copy of the step's numbers to stats_host, unless it is queued; stats_there follows it.
int engine_send_stats(Engine *engine, Error *e);

// Allocates the device memory of the engine's configuration and points the engine at it. ERR_MEMORY where there is not
// enough, with a hint of what would fit.
int engine_memory_take(Engine *engine, Error *e);

// True if weight gradients come from weight_gradient, which makes exact norms nearly free.
bool engine_fuses(const Engine *engine);

// Bytes of engine->muon.
size_t engine_muon_bytes(const EngineConfig *config);

// Examples whose logits are computed at a time.
int engine_head_examples(const EngineConfig *config);

// Functions of EngineApi outside train_gpt2.cu (engine_life.cu, engine_memory.cu, engine_state.cu).
Dtype cuda_dtype(void);
int cuda_check_dtype(Dtype dtype, Error *e);
int cuda_check(const EngineConfig *config, Error *e);
int cuda_create(Engine **out, const EngineConfig *config, Error *e);
void cuda_destroy(Engine *engine);
void cuda_describe(const Engine *engine, char *out, size_t bytes);
size_t cuda_memory_in_use(const Engine *engine);
void cuda_device(const EngineConfig *config, bool measure, EngineDevice *out);
void cuda_plan_memory(const EngineConfig *config, MemoryPlan *plan);
int cuda_load(Engine *engine, StateKind kind, Range range, const float *values, Error *e);
int cuda_store(Engine *engine, StateKind kind, Range range, float *values, Error *e);
void cuda_pin(Engine *engine, void *memory, size_t bytes);
void cuda_unpin(Engine *engine, void *memory);
int cuda_hash(Engine *engine, Range range, uint64_t *hash, Error *e);
int cuda_norms(Engine *engine, Range range, Error *e);
int cuda_trust(Engine *engine, Range range, const UpdateConfig *update, Error *e);
int cuda_update(Engine *engine, Range range, const UpdateConfig *update, Error *e);
void cuda_watch_weights(Engine *engine, const WeightsWatch *watch);
int cuda_collect(Engine *engine, Range range, bool first, Error *e);
const void *cuda_own_weights(Engine *engine, Range range);
int cuda_clear(Engine *engine, Range range, Error *e);
int cuda_rank_norms(Engine *engine, Range range, Error *e);
void *cuda_buffer(Engine *engine, EngineBuffer buffer, size_t element);
size_t cuda_weight_bytes(const Engine *engine);
void *cuda_stream(Engine *engine);
