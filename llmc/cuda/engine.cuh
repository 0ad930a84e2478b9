// The CUDA engine's private state: what its model (train_gpt2.cu), memory and state (engine_*.cu) share.
//
// Shapes: B rows of T tokens, C channels, NH heads, L layers, V vocabulary (Vp: padded).
#ifndef GNS_CUDA_ENGINE_CUH
#define GNS_CUDA_ENGINE_CUH

#include "model/engine.h"
#include "cuda/device.cuh"
#include "cuda/matmul.cuh"
#include "cuda/reduce.cuh"

// A block's activations. Where recomputing, or for inference, one block's memory serves all blocks.
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

enum { TOKEN_SLOTS = 2 }; // micro-steps whose tokens may be on their way to the device at once

struct Engine {
    const EngineApi *api;
    EngineConfig config;
    Device device;
    cudaStream_t stream;
    cudaStream_t store_stream; // copies to the host: they need not wait for kernels that were queued later
    cudaEvent_t state_ready;   // behind the last update: see engine_store
    Matmul *matmul;
    void *memory; // the one device allocation, cut up by the arena

    real *weight;    // what the kernels read: flat, in the layout of the tensor table
    float *param;    // master weights: of the owned ranges (llmc/model/shard.h); where weight is fp32, the same
    float *grad;     // of the running micro-step, or since the step began: see shard_grad_place
    float *grad_sum; // of the step: grad, or with shard_grads of the owned ranges
    float *moment1, *moment2;    // of the owned ranges
    uint8_t *decay;              // optimizer_decay_map
    ReduceSegment *segment;      // (tensors) where each lies, for norms
    ReduceSegment *segment_part; // (tensors) what of each lies in the range at hand
    double *stats;               // numbers of the step, see stats_count
    GradientWatch watch;         // of the next micro-step
    WeightsWatch weights_watch;  // await NULL: all weights are there
    float *grad_scale;           // (1) optimizer_scale
    bool scaled;                 // grad_scale is this step's

    Block *block;         // (L)
    Block base;           // where each activation begins; a block has a slice of it
    real *x_final;        // (B, T, C)  output of the last block
    real *lnf;            // (B, T, C)
    float *meanf, *rstdf; // (B, T)
    real *delta;          // (B, T, C)  a branch's output on its way into the residual stream
    uint16_t *tokens;     // (B, T + 1)
    float *loss;          // (B, T)
    real *logits;         // (head_rows, Vp)  a chunk of the head
    real *dx, *dy;        // (B, T, C)  gradient of the residual stream; of a branch
    real *dwide;          // (B, T, 4C) gradient of qkv, fc
    void *sorted;         // workspace of embedding_sort
    void *scratch;        // of whichever kernel runs
    void *matmul_scratch;
    float *example_grad;  // gradients of one matrix, a few examples at a time (exact)
    float *head_at_token; // (B, T, C)  rows of the examples' head gradients (exact)

    uint16_t *staged[TOKEN_SLOTS]; // (B, T + 1) in pinned host memory
    cudaEvent_t sent[TOKEN_SLOTS]; // the slot's copy is done: it may be filled again
    int slot;
    double *stats_host;      // (stats_count), then one number of engine_hash's; pinned
    cudaEvent_t stats_there; // stats_host has the step's numbers
    bool stats_sent;         // stats_there is of the latest numbers: none has changed since
    GnsMode mode;            // the least that a micro-step of this step has measured
    bool first; // the next micro-step's gradients replace what is in memory: the step's first, with shard_grads any
};

// Numbers of a step, summed on the device: loss, <E, U>, then of every tensor |g|^2, sum_b |g_b|^2, |g|^2 of this rank's
// own gradients, and room to compute the last in.
enum { STAT_LOSS, STAT_CROSS, STAT_TENSORS };
static inline size_t stats_count(const Model *model) { return STAT_TENSORS + 4 * (size_t)model->tensor_count; }
static inline double *stats_grad_sq(double *stats) { return stats + STAT_TENSORS; }
static inline double *stats_example_sq(double *stats, const Model *model) {
    return stats + STAT_TENSORS + model->tensor_count;
}
static inline double *stats_rank_sq(double *stats, const Model *model) {
    return stats + STAT_TENSORS + 2 * model->tensor_count;
}
static inline double *stats_rank_room(double *stats, const Model *model) {
    return stats + STAT_TENSORS + 3 * model->tensor_count;
}

// ---------------------------------------------------------------------------------------------------------------------
// State (engine_state.cu), with engine_load and engine_store

// Everything starts at zero: so do the rows of wte behind the vocabulary, for good.
int engine_state_clear(Engine *engine, Error *e);

// Queues the copy of the step's numbers to stats_host, unless it has been; stats_there says when they are there.
int engine_send_stats(Engine *engine, Error *e);

// ---------------------------------------------------------------------------------------------------------------------
// Memory (engine_memory.cu)

// Takes all the device memory that the engine's configuration needs, and points the engine at it. ERR_MEMORY, with what
// would fit, where there is not enough.
int engine_memory_take(Engine *engine, Error *e);

// Examples whose logits are computed at a time.
int engine_head_examples(const EngineConfig *config);

// Functions of EngineApi beside those of train_gpt2.cu (engine_memory.cu, engine_state.cu).
void cuda_plan_memory(const EngineConfig *config, MemoryPlan *plan);
int cuda_load(Engine *engine, StateKind kind, Range range, const float *values, Error *e);
int cuda_store(Engine *engine, StateKind kind, Range range, float *values, Error *e);
void cuda_pin(Engine *engine, void *memory, size_t bytes);
void cuda_unpin(Engine *engine, void *memory);
int cuda_hash(Engine *engine, Range range, uint64_t *hash, Error *e);
int cuda_norms(Engine *engine, Range range, Error *e);
int cuda_update(Engine *engine, Range range, const UpdateConfig *update, Error *e);
void cuda_watch_weights(Engine *engine, const WeightsWatch *watch);
int cuda_collect(Engine *engine, Range range, bool first, Error *e);
int cuda_clear(Engine *engine, Range range, Error *e);
int cuda_rank_norms(Engine *engine, Range range, Error *e);
void *cuda_buffer(Engine *engine, EngineBuffer buffer, size_t element);
size_t cuda_weight_bytes(const Engine *engine);
void *cuda_stream(Engine *engine);

#endif
