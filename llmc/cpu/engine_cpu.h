// The CPU engine's private state, shared by train_gpt2.c and engine_*.c.
//
// Shapes: B own rows, M rows of the group (TensorRanks; M = B without --tensor), T tokens a row, C channels, NH heads,
// A width of attention, F width of the MLP (model.h), L layers, V size of the vocabulary, Vp its padded size.
#pragma once

#include "cpu/attention.h"
#include "cpu/matmul.h"
#include "cpu/value.h"
#include "model/engine.h"
#include "model/shard.h"

// `void` arrays hold values of the engine's type (cpu/value.h).
//
// A block's activations, which its backward pass reads. With --recompute gelu the blocks share `gelu`; with --recompute
// block they share all arrays but x. For inference they share all arrays, but not qkv if a micro-batch is one row.
// cpu_logits then reads the qkv of its previous call.
typedef struct {
    void *x;              // (B, T, C)  input of the block
    void *ln1;            // (M, T, C)
    float *mean1, *rstd1; // (B, T)
    void *qkv;            // (M, T, 3A)
    void *attention;      // (M, T, A)
    float *lse;           // (M, NH, T)
    void *x_mid;          // (B, T, C)  the residual stream between attention and MLP
    void *ln2;            // (M, T, C)
    float *mean2, *rstd2; // (B, T)
    void *fc, *gelu;      // (M, T, F) before and after GELU
} Block;

struct Engine {
    const EngineApi *api;
    EngineConfig config;
    void *weight;             // kernels read it: the flat layout, or a few of its buckets (shard_weight_place)
    float *param;             // fp32 master weights of the owned ranges; aliases `weight` in unsharded fp32
    float *grad;              // the flat layout, or a few of its buckets (shard_grad_place)
    float *grad_sum;          // with shard_grads the step's sums for the owned ranges; otherwise aliases `grad`
    float *moment1, *moment2; // cover the owned ranges
    Block *block;             // (L)
    void *x_final;            // (B, T, C)  output of the last block
    void *lnf;                // (B, T, C)
    float *meanf, *rstdf;     // (B, T)
    void *logits;             // (head_rows, Vp), a chunk of the head
    float *nll;               // (B, T)
    float *loss;              // (B, T)     loss with label smoothing; NULL: no smoothing
    uint16_t *targets;        // (B, T)
    uint16_t *position;       // (M, T)  a token's place in its document; NULL without document_mask
    uint16_t *seen;           // (T)     tokens of the last cpu_logits; qkv still holds the first seen_count of them
    int seen_count;
    void *exchange;    // (M, T, C)  rows to gather or reduce, then room for all ranks' parts; NULL without --tensor
    void *dx;          // (B, T, C)  gradient of the residual stream
    void *dy;          // gradient of a branch (B, T, C), or of attention's output (M, T, A)
    void *dwide;       // (M, T, 3A or F) gradient of qkv or fc
    float *ln_scratch; // (B, row blocks, 2, C)  dgamma, dbeta; finally row block 0 holds the sums
    float *example_grad, *example_bias_grad; // one example's gradient of a matrix and of its bias (exact)
    float *head_at_token;                    // (B, T, C)  each example's head gradient at its own tokens (exact)
    double *ln_sq;                           // (2, B)     |dgamma_b|^2, |dbeta_b|^2
    RowResult *row;                          // (step_rows), or NULL
    float *source_sum;                       // (sources, LayerNorm parameters) v_s of StepResult.source_gram, or NULL
    double *grad_sq, *example_sq;            // one per tensor
    double *trust_sq;                        // two per tensor (LAMB): |weights|^2, |direction|^2
    float *matrix, *matrix_next;             // Muon: the matrix to orthogonalize; its next iterate
    float *gram, *poly;                      // Muon: (C, C)
    bool fp8;                                // training rounds the factors of y = x W and dx = dy W^T
    bool fp8_dweight;                        // training rounds the factors of dW = x^T dy
    int8_t *exponents;                       // (fp8_sites) exponents and channels of the following steps
    float *amax;                             // (fp8_sites) largest |x| in this step so far
    float *factor[2]; // a product's rounded factors: [0] (M, T, 4C); [1] as long as a weight, with fp8_dweight as [0]
    double loss_sum, nll_sum;
    bool first;                 // the next micro-step overwrites gradients; with shard_grads every micro-step does
    float loss_scale;           // set by scale_loss
    int rows;                   // rows of this step so far
    uint64_t example;           // index of the next micro-step's first example
    GradientWatch watch;        // for the next micro-step
    WeightsWatch weights_watch; // await NULL: no weights are in transfer
    Matmul matmul;
    Attention attention;
    char *memory; // holds all arrays above
};

// ---- Look-ups by tensor and layer -----------------------------------------------------------------------------------

static inline const Tensor *tensor(const Engine *engine, TensorKind kind, int layer) {
    return model_tensor(engine->config.model, kind, layer);
}
// Returns the address of element i of an array of values.
static inline void *at(const Engine *engine, const void *values, size_t i) {
    return value_at(values, i, engine->config.dtype);
}
// Returns the address of the kernels' weight for an element of the flat layout.
static inline void *weight_at(const Engine *engine, size_t element) {
    return at(engine, engine->weight, shard_weight_place(&engine->config, element));
}
static inline void *weight(const Engine *engine, TensorKind kind, int layer) {
    return weight_at(engine, tensor(engine, kind, layer)->offset);
}
static inline float *grad(Engine *engine, TensorKind kind, int layer) {
    return engine->grad + shard_grad_place(&engine->config, tensor(engine, kind, layer)->offset);
}
// Returns a tensor's gradients for kernels that add to them; zeroes them if this micro-step overwrites gradients.
static inline float *grad_begun(Engine *engine, TensorKind kind, int layer) {
    float *values = grad(engine, kind, layer);
    if (engine->first) memset(values, 0, sizeof(float) * tensor(engine, kind, layer)->count);
    return values;
}
static inline double *example_sq(Engine *engine, TensorKind kind, int layer) {
    return &engine->example_sq[tensor(engine, kind, layer) - engine->config.model->tensors];
}

// Returns the length of `exponents` and of `amax`.
static inline size_t fp8_sites(const Engine *engine) {
    return (size_t)fp8_entries(engine->config.model->config.layers);
}

// ---- engine_memory.c ------------------------------------------------------------------------------------------------

int engine_thread_count(const EngineConfig *config); // config->threads, or OpenMP's default

// Sets engine->config, fp8 and fp8_dweight. engine->config has DTYPE_FP32 for fp8, since values are stored in fp32.
// Allocates engine->memory and points the engine's arrays into it. Clears all but the kernels' scratch.
int engine_memory_take(Engine *engine, const EngineConfig *config, Error *e);

// Returns the tokens of a chunk of the head: as many as ENGINE_HEAD_BYTES of fp32 logits hold, but at least 64 or all.
enum { ENGINE_HEAD_BYTES = 64 << 20 };
int engine_head_rows(const EngineConfig *config);

// Functions of EngineApi outside train_gpt2.c (engine_memory.c, engine_state.c).
void cpu_plan_memory(const EngineConfig *config, MemoryPlan *plan);
int cpu_load(Engine *engine, StateKind kind, Range range, const float *values, Error *e);
int cpu_store(Engine *engine, StateKind kind, Range range, float *values, Error *e);
int cpu_hash(Engine *engine, Range range, uint64_t *hash, Error *e);
int cpu_norms(Engine *engine, Range range, Error *e);
int cpu_trust(Engine *engine, Range range, const UpdateConfig *update, Error *e);
int cpu_update(Engine *engine, Range range, const UpdateConfig *update, Error *e);
int cpu_collect(Engine *engine, Range range, bool first, Error *e);
const void *cpu_own_weights(Engine *engine, Range range);
int cpu_clear(Engine *engine, Range range, Error *e);
void *cpu_buffer(Engine *engine, EngineBuffer buffer, size_t element);
