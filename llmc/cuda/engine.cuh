// engine: the CUDA engine's private state, for train_gpt2.cu, engine_life.cu, engine_state.cu and engine_fp8.cu.
//
// Shapes: B rows of T tokens, N = B T, C channels, NH heads of D = C / NH, L layers, V vocabulary (Vp: padded).
//
// With EngineConfig.tensor (model/engine.h) B counts own rows, and `all` counts all rows. Attention has A = (own heads)
// D columns instead of C, the MLP F own columns instead of 4C.
//
// Streams. The host queues work; each stream runs its queue in order; events make one stream wait for another.
//
//     engine->stream         tokens -> forward -> head -> backward -> norms -> update    kernels and cuBLASLt
//     transport's stream     gradients of a bucket, weights of a bucket                  NCCL (transport_nccl.cu)
//     engine->store_stream   weights, moments or gradients to the host, for saves        copies (engine_state.cu)
//
// Main kernels of a micro-step. A product is linear_sm90 or cuBLASLt (matmul): see Engine.fused_linear.
//
//     forward       embedding_forward, layernorm_forward
//       per block   product qkv, attention_forward, product proj, layernorm_forward, product fc with GELU,
//                   product fcproj, layernorm_forward
//     head          per chunk of examples: product logits, crossentropy, product dlnf, weight gradient of wte
//     backward      layernorm_backward
//       per block   weight gradient fcproj, product dfc with GELU', weight gradient fc, product dln2,
//                   layernorm_backward, weight gradient proj, product dattention, attention_backward,
//                   weight gradient qkv, product dln1, layernorm_backward, column_finish (biases, gammas, betas)
//     embeddings    embedding_sort (on the host), embedding_backward
//
//     weight_gradient computes dW if `fuses` (train_gpt2.cu). Else cuBLASLt does; for norms, one product per example.
//
// --dtype fp8 (math/fp8.h). The kernels that write x and dy of a block's products also write their e4m3 copies.
// fp8_cast copies attention's output and dqkv. A copy lasts until the product that reads it (writer -> reader):
//     copy_x       (N, C)   ln1 -> qkv, attention -> proj, ln2 -> fc
//     copy_wide    (N, 4C)  gelu -> fcproj; dfc -> dln2, dqkv -> dln1
//     copy_low     (N, FP8_GROUPS)  low parts of ln1 -> qkv, of gelu -> fcproj
//     copy_branch  (N, C)   gradient of the MLP branch -> dfc, gradient of the attention branch -> dattention
//     copy_weight           fp8_copy_weights -> products; once per block and step, with shard_weights once per pass
// The head is block L (math/fp8.h): copy_x holds lnf, and copy_weight ends with wte.
//
// --dtype fp8-dw. weight_gradient reads e4m3, too, from transposed copies made right before the call. Where nothing
// reads ln1, ln2, gelu or dfc in bf16, only their e4m3 copies are stored (is_alone in engine_fp8.cu). Then the products
// that compute gelu and dfc write the transposed copies of these.
//
// Words of this room, besides those of dev/docs/code.md:
//     granule      64 elements of the flat arrays, all of one tensor and one update rule (DECAY_GRANULE)
//     slope        GELU's derivative as forward keeps it: a byte, in fp32 a float (gelu.cuh)
//     pack         W neighbouring values of a row, loaded at once (vec.cuh)
//     tile         rows x columns of a matrix that a block holds in shared memory or registers at once
//     stage, ring  a buffer in shared memory; several stages, which copies fill in turn (sm90.cuh, Ring)
//     panel        64 columns of a tile, swizzled (sm90.cuh)
//     box          what one instruction of the copy engine moves (sm90.cuh)
//     feeder       the warp that copies tiles in (linear_sm90: producer) for the workers, warpgroups of 128 threads
//     pair         two blocks of one cluster, which share an operand
//     ticket       a counter in device memory from which blocks draw tiles
//     run          rows that one block sums (reduce.cuh)
//     slot         memory for the sum of the rows that one run shares with one example (reduce.cuh)
//     set          one column gradient (reduce.cuh)
//     job          the sets that one kernel leaves for column_finish (reduce.cuh)
//     code         an e4m3 number as a byte (fp8.cuh); in gelu.cuh the byte of a slope
//     part         a sum over some of a tile's examples (weight_gradient.cu)
//     share        every n-th row of an example, summed by one block (weight_gradient.cu)
#pragma once

#include "model/engine.h"
#include "cuda/attention.cuh"
#include "cuda/device.cuh"
#include "cuda/gelu.cuh"
#include "cuda/linear_sm90.cuh"
#include "cuda/matmul.cuh"
#include "cuda/optimizer.cuh"
#include "cuda/reduce.cuh"
#include "cuda/weight_gradient.cuh"

// Activations of a block. With --recompute and for inference, all blocks share some arrays (each_activation).
typedef struct {
    real *x;              // (B, T, C)  input of the block
    real *ln1;            // (all, T, C)
    float *mean1, *rstd1; // (B, T)
    real *qkv;            // (all, T, 3A)
    real *attention;      // (all, T, A)
    float *lse;           // (all, heads, T)
    real *x_mid;          // (B, T, C)  residual stream between attention and MLP
    real *ln2;            // (all, T, C)
    float *mean2, *rstd2; // (B, T)
    real *gelu;           // (all, T, F)
    GeluSlope *slope;     // (all, T, F) GELU's derivative
    real *fc;             // (all, T, F) GELU's input; NULL unless RECOMPUTE_GELU
} Block;

enum { TOKEN_SLOTS = 2 }; // staging buffers; each holds a micro-step's tokens while their copy is in flight

struct Engine {
    const EngineApi *api;
    EngineConfig config;
    Device device;
    cudaStream_t stream;
    cudaStream_t store_stream; // copies to the host, for saves, which later kernels do not delay
    cudaEvent_t state_ready;   // recorded after the last update (engine_state.cu)
    Matmul *matmul;
    bool fused_linear; // linear_sm90 computes qkv, proj, fc and dfc; with dropout also fcproj; in bf16 also the head
    WeightGradientPairs pairs;
    void *memory; // the one device allocation

    real *weight;     // working weights: all, in the flat layout, or a few buckets (shard_weight_place)
    real *own_weight; // owned ranges of the working weights, which ranks gather; NULL unless shard_weights in 16 bits
    float *param;     // master weights of the owned ranges; aliases `weight` in unsharded fp32
    float *grad;      // gradient of the step so far; with shard_grads, of the micro-step (shard_grad_place)
    float *grad_sum;  // gradient of the step; aliases `grad`, or with shard_grads holds the owned ranges
    float *moment1, *moment2;   // moments of the owned ranges
    UpdateRule *rule;           // (granules)
    uint16_t *tensor;           // (granules) LAMB: index in `segment` of the granule's tensor
    double *trust;              // (2, tensors) LAMB: squared norms of the weights; of the step's direction
    void *muon;                 // Muon's scratch, in the activations' memory
    Range *segment;             // (tensors) ranges of whole tensors, ascending; then of cut ones, ascending
    double *stats;              // (stats_count) statistics of the step
    float *source_sum;          // (sources, LayerNorm parameters) v_s of StepResult.source_gram; NULL: no sources
    GradientWatch watch;        // notified of the next micro-step's gradients
    WeightsWatch weights_watch; // weights_watch.await NULL: no weights are in transfer
    float *grad_scale;          // (1) from optimizer_scale
    bool scaled;                // grad_scale is set for this step
    float loss_scale;

    Block *block;                             // (L)
    Block base;                               // activations of all blocks, one after another
    real *x_final;                            // (B, T, C)  output of the last block
    real *lnf;                                // (B, T, C)
    float *meanf, *rstdf;                     // (B, T)
    real *delta;                              // (B, T, C)  branch output, not yet added to the residual stream
    uint16_t *tokens;                         // (all, T + 1), then the documents, then the sources of the rows
    uint16_t *source;                         // (all) each row's source; after the documents in `tokens`
    uint16_t *document_first, *document_last; // (all, T) from embedding_documents; NULL: a row is one document
    unsigned *ticket;                         // (1) next work item of attention and linear_sm90; 0 between kernels
    float *loss;                              // (B, T)
    float *smoothed;                          // (B, T) loss with label smoothing, or NULL
    real *logits;                             // (rows of a chunk, Vp)
    real *dx, *dy;                            // (B, T, C)  gradient of the residual stream; of a branch
    real *dwide;                              // (all, T, F) gradient of qkv; of fc
    real *exchange;                           // (all, T, C) rows to gather or reduce, then room for other ranks' parts
    uint8_t *copy_x, *copy_wide;              // (B, T, C), (B, T, 4C) in e4m3: see above
    uint8_t *copy_branch;                     // (B, T, C)
    uint8_t *copy_transposed;                 // x, then dy of a weight gradient: (B, in, T), (B, out, T)
    uint8_t *copy_weight;     // (L, 2, 12 C C) plain, then transposed weights; wte (Vp, C). shard_weights: L = 1
    uint8_t *copy_low;        // (B, T, FP8_GROUPS)
    uint8_t *copy_low_weight; // (L, 4C, FP8_GROUPS) of qkv (3C), then of fcproj. shard_weights: L = 1
    int copied;               // last block (L: the head) whose weights were copied in this step; -1: none
    int8_t *exponent, *exponent_there; // (engine_sites) in pinned host memory; on the device
    bool measures;                     // steps measure amax, and round factors that have exponents
    uint32_t *sorted;                  // (4, B T) from embedding_sort
    void *scratch;                     // temporary memory (train_gpt2.cu, 2)
    ColumnJobs columns;                // column gradients of the block whose backward runs
    float *ln_rows;                    // (B, LayerNorm parameters) g_b of own rows, if a step keeps rows
    void *matmul_scratch;
    float *example_grad;  // gradients of one matrix, a few examples at a time; for exact norms if not fused
    float *head_at_token; // (B, T, C)  each example's head gradient at its own tokens; for exact norms
    int *head_row_at;     // (examples of a chunk, Vp)  position of each token, from embedding_rows; for exact norms

    uint16_t *staged[TOKEN_SLOTS];        // what is copied to `tokens`, in pinned host memory
    uint32_t *staged_sorted[TOKEN_SLOTS]; // (2, 4, B T) by token; by position in the document. Pinned
    cudaEvent_t sent[TOKEN_SLOTS];        // recorded after the last copy from the slot's buffers
    int slot;                             // token slot of the present pass
    float *logits_host;                   // (V), pinned
    double *stats_host;                   // (stats_count), then one number of cuda_hash; pinned
    cudaEvent_t stats_there;              // recorded after the copy of stats to stats_host
    bool stats_sent;                      // the copy is queued and stats has not changed since
    uint16_t *seen;                       // (T) tokens; keys and values of the first seen_count of them are in memory
    int seen_count;
    uint64_t example; // number (in the run) of the next micro-step's first example
    GnsMode mode;     // least mode of this step's micro-steps
    int rows;         // rows that this step has computed so far
    bool keeps_rows;  // this micro-step writes ln_rows and stats_of_rows
    bool first;       // the next micro-step overwrites gradients: true at a step's start; with shard_grads always
};

// Returns the most own rows that a micro-step has on any rank.
static inline int own_rows_most(const EngineConfig *c) {
    return (int)rows_of_rank(c->micro_batch, 0, tensor_ranks(c)).count;
}

// Attention over `rows` rows with this rank's heads.
static inline AttentionShape attention_shape(const EngineConfig *c, int rows, int T) {
    return {rows, T, c->model->heads, c->model->config.channels / c->model->config.heads};
}

// Engine.stats, in order:
//     (STAT_TENSORS)                     loss, smoothed loss, <E, U> (embedding.cuh)
//     (STATS_ROWS, tensors)              |g|^2 by `segment`; sum_b |g_b|^2 by tensor
//     (2, step_rows)                     each row's |g_b|^2 over the LayerNorms; each row's sum of losses
//     (sources, sources)                 StepResult.source_gram
//     (engine_sites)                     amax in fp32, with --dtype fp8
enum { STAT_LOSS, STAT_SMOOTHED, STAT_CROSS, STAT_TENSORS };
typedef enum { STATS_GRAD_SQ, STATS_EXAMPLE_SQ, STATS_ROWS } StatsRow;
static inline double *stats_row(double *stats, const Model *model, StatsRow row) {
    return stats + STAT_TENSORS + (int)row * (size_t)model->tensor_count;
}
static inline size_t stats_of_rows(const EngineConfig *c) {
    return STAT_TENSORS + STATS_ROWS * (size_t)c->model->tensor_count;
}
static inline size_t stats_of_sources(const EngineConfig *c) { return stats_of_rows(c) + 2 * (size_t)c->step_rows; }
static inline size_t engine_sites(const EngineConfig *c) {
    return dtype_is_fp8(c->dtype) && !c->inference ? (size_t)fp8_entries(c->model->config.layers) : 0;
}
static inline size_t stats_of_amax(const EngineConfig *c) { return stats_of_sources(c) + c->sources * c->sources; }
static inline float *stats_amax(double *stats, const EngineConfig *c) { return (float *)(stats + stats_of_amax(c)); }
static inline size_t stats_count(const EngineConfig *c) { return stats_of_amax(c) + engine_sites(c) / 2; }

// Queue a copy between host and device.
static inline int copy_in(Engine *engine, void *to, const void *from, size_t bytes, Error *e) {
    return CUDA_CALL(cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, engine->stream), e);
}
static inline int copy_out(Engine *engine, void *to, const void *from, size_t bytes, Error *e) {
    return CUDA_CALL(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, engine->stream), e);
}

// Sets weights, gradients and moments to zero. The rows of wte after the vocabulary stay zero.
int engine_state_clear(Engine *engine, Error *e);

// Queues the copy of stats to stats_host, then stats_there; no-op if stats_sent.
int engine_send_stats(Engine *engine, Error *e);

// True if weight_gradient runs here, so that exact norms are nearly free.
bool engine_fuses(const Engine *engine);

// Bytes of engine->muon.
size_t engine_muon_bytes(const EngineConfig *config);

// Examples per chunk of the head.
int engine_head_examples(const EngineConfig *config);

// e4m3 factors of a pass, for block l; L is the head (engine_fp8.cu). fp8 is Pass.fp8; if false, these do nothing.
Fp8Site fp8_x_site(TensorKind w), fp8_dy_site(TensorKind w); // the site of a weight's x; of its dy
// Returns the copy of a site of activations. Its codes are NULL unless the product is in e4m3.
Fp8Copy fp8_copy_of(const Engine *engine, bool fp8, Fp8Site s, int l);
// Sets the e4m3 factors of a product with site s, if the product rounds them.
void fp8_factors(const Engine *engine, bool fp8, Linear *linear, Fp8Site s, int l);
// Copies block l's weights. No-op if this step has copied them; with shard_weights, if it copied block l last.
int fp8_copy_weights(Engine *engine, bool fp8, int l, Error *e);
// True if w's gradient rounds both factors: the type is DTYPE_FP8_DW, and w's forward and dx products round, too.
bool fp8_dweight_rounds(const Engine *engine, bool fp8, TensorKind w, int l);
// Copies dqkv (B, T, 3C) for fp8_dweight and the product dln1, and sums its columns.
int fp8_copy_dqkv(Engine *engine, const real *dqkv, const ColumnGradient &bias, int l, int B, int T, Error *e);
// Computes g, the gradient of w, if fp8_dweight_rounds. Reads x only if x was stored in bf16.
int fp8_dweight(Engine *engine, WeightGradient g, const real *x, TensorKind w, int l, WeightGradientShape s, Error *e);

// Functions of EngineApi outside train_gpt2.cu (engine_life.cu, engine_state.cu).
int cuda_check_dtype(Dtype dtype, Error *e);
int cuda_create(Engine **out, const EngineConfig *config, Error *e);
void cuda_destroy(Engine *engine);
void cuda_describe(const Engine *engine, char *out, size_t bytes);
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
int cuda_collect(Engine *engine, Range range, bool first, Error *e);
const void *cuda_own_weights(Engine *engine, Range range);
int cuda_clear(Engine *engine, Range range, Error *e);
void *cuda_buffer(Engine *engine, EngineBuffer buffer, size_t element);
