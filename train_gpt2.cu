// train_gpt2: GPT-2 on an NVIDIA GPU. The same model as train_gpt2.c, behind the same interface (llmc/engine.h), with
// bf16 weights, activations and matrix products, and fp32 master weights, statistics, gradients and moments.
//
// Everything of a step is queued on one stream and nothing waits for it but engine_result. Nothing is allocated after
// engine_create. Every kernel sums in a fixed order: two runs give the same bits.
//
// Shapes: B rows of T tokens, C channels, NH heads, L layers, V vocabulary (Vp: padded), N = B T.
#include "llmc/adamw.h"
#include "llmc/cuda/arena.h"
#include "llmc/cuda/attention.cuh"
#include "llmc/cuda/crossentropy.cuh"
#include "llmc/cuda/device.cuh"
#include "llmc/cuda/embedding.cuh"
#include "llmc/cuda/gelu.cuh"
#include "llmc/cuda/layernorm.cuh"
#include "llmc/cuda/matmul.cuh"
#include "llmc/cuda/optimizer.cuh"
#include "llmc/cuda/reduce.cuh"
#include "llmc/engine.h"
#include "llmc/train.h"

#include <assert.h>
#include <math.h>
#include <string.h>

// ---------------------------------------------------------------------------------------------------------------------
// State

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
    EngineConfig config;
    Device device;
    cudaStream_t stream;
    Matmul *matmul;
    void *memory; // the one device allocation, cut up by the arena

    float *param, *grad, *moment1, *moment2; // flat, in the layout of the tensor table
    real *weight;                            // what the kernels read: the rounded copy of param, or param itself
    uint8_t *decay;                          // optimizer_decay_map
    ReduceSegment *segment;                  // (tensors) the table's places, for norms
    ReduceSegment *segment_part;             // (tensors) of which this much lies in a range
    double *stats;                           // numbers of the step, see stats_count
    GradientFinal final;                     // for the next micro-step; NULL: nobody asked
    void *final_context;
    float *grad_scale;                       // (1) optimizer_scale

    Block *block;         // (L)
    Block base;           // of the first
    real *x_final;        // (B, T, C)  output of the last block
    real *lnf;            // (B, T, C)
    float *meanf, *rstdf; // (B, T)
    real *delta;          // (B, T, C)  a branch's output on its way into the residual stream
    uint16_t *tokens;     // (B, T + 1)
    float *loss;          // (B, T)
    real *logits;         // (head_rows, Vp)  a chunk of the head
    real *dx, *dy;        // (B, T, C)  gradient of the residual stream; of a branch
    real *dwide;          // (B, T, 4C) gradient of qkv, fc
    void *sorted;         // embedding_sort
    void *scratch;        // of whichever kernel runs
    void *matmul_scratch;
    float *example_grad;  // gradients of one matrix, a few examples at a time (exact)
    float *head_at_token; // (B, T, C)  rows of the examples' head gradients (exact)

    uint16_t *staged[TOKEN_SLOTS]; // (B, T + 1) in pinned host memory
    cudaEvent_t sent[TOKEN_SLOTS]; // the slot's copy is done: it may be filled again
    int slot;
    double *stats_host; // pinned
    GnsMode mode;       // the least that a micro-step of this step has measured
    int micro_steps;    // of this step
};

// Numbers of a step, summed on the device: loss, <E, U>, then |g|^2 and sum_b |g_b|^2 of every tensor.
enum { STAT_LOSS, STAT_CROSS, STAT_TENSORS };
static size_t stats_count(const Model *model) { return STAT_TENSORS + 3 * (size_t)model->tensor_count; }
static double *stats_grad_sq(double *stats) { return stats + STAT_TENSORS; }
static double *stats_example_sq(double *stats, const Model *model) {
    return stats + STAT_TENSORS + model->tensor_count;
}
static double *stats_rank_sq(double *stats, const Model *model) {
    return stats + STAT_TENSORS + 2 * model->tensor_count;
}

// ---------------------------------------------------------------------------------------------------------------------
// Memory: who needs what, from when to when

enum { FORWARD, HEAD, BACKWARD }; // the phases of a micro-step

// Examples whose logits are computed at a time. The logits of a whole micro-batch would be most of the memory; chunks
// of 8k rows are as fast as larger ones (16k: +5% on the head's products at d12), of 4k rows slower.
static int head_examples(const EngineConfig *config) {
    const size_t most_bytes = (size_t)800 << 20; // 8k rows of GPT-2's vocabulary in bf16
    size_t one = (size_t)config->seq_len * config->model->vocab_padded * sizeof(real);
    int most = (int)size_min(size_max(most_bytes / one, 1), config->micro_batch);
    int chunks = (config->micro_batch + most - 1) / most;
    return (config->micro_batch + chunks - 1) / chunks; // of equal size
}

// Elements of the exact mode's scratch: one example of the largest tensor.
static size_t example_count(const Model *model) {
    size_t most = (size_t)model->vocab_padded * model->config.channels;
    for (int i = 0; i < model->tensor_count; i++) most = size_max(most, model->tensors[i].count);
    return most;
}

// What kernels may ask for at any micro-batch up to the configured one: their needs do not grow steadily with it.
static size_t scratch_bytes(const EngineConfig *config) {
    const ModelConfig *m = &config->model->config;
    int T = config->seq_len, C = m->channels, NH = m->heads;
    size_t most = reduce_squares_workspace_bytes(config->model->tensor_count);
    for (int B = 1; B <= config->micro_batch; B++) {
        most = size_max(most, attention_workspace_bytes(B, T, NH, C / NH));
        most = size_max(most, layernorm_backward_workspace_bytes(B, T, C));
        most = size_max(most, bias_backward_workspace_bytes(B, T, 3 * C));
        most = size_max(most, bias_backward_workspace_bytes(B, T, 4 * C));
        most = size_max(most, embedding_backward_workspace_bytes(B, T, C));
        if (config->gns != GNS_EXACT) continue;
        most = size_max(most, embedding_example_squares_workspace_bytes(B, T, C));
        most = size_max(most, reduce_examples_workspace_bytes(B));
    }
    return most;
}

#define ADD(what, pointer, n, from, to)                                                                                \
    arena_add(a, (what), (void **)&(pointer), (size_t)(n) * sizeof(*(pointer)), (from), (to))

static void layout_state(Engine *e, Arena *a) {
    const Model *model = e->config.model;
    size_t n = model->flat_count;
    ADD("master weights, fp32", e->param, n, FORWARD, BACKWARD);
    if (sizeof(real) < sizeof(float)) ADD("working weights, bf16", e->weight, n, FORWARD, BACKWARD);
    ADD("small tables", e->stats, stats_count(model), FORWARD, BACKWARD);
    ADD("small tables", e->grad_scale, 1, FORWARD, BACKWARD);
    ADD("small tables", e->segment, model->tensor_count, FORWARD, BACKWARD);
    ADD("small tables", e->segment_part, model->tensor_count, FORWARD, BACKWARD);
    ADD("small tables", e->decay, n / DECAY_GRANULE, FORWARD, BACKWARD);
    arena_add(a, "matmul workspace", &e->matmul_scratch, MATMUL_WORKSPACE_BYTES, FORWARD, BACKWARD);
    if (e->config.inference) return;
    ADD("gradients, fp32", e->grad, n, FORWARD, BACKWARD);
    ADD("AdamW moments, fp32", e->moment1, n, FORWARD, BACKWARD);
    ADD("AdamW moments, fp32", e->moment2, n, FORWARD, BACKWARD);
}

// Elements from one block's share of an activation to the next: every share begins as aligned as the whole.
static size_t share_stride(size_t count) { return round_up(count, ARENA_ALIGNMENT / sizeof(real)); }

// How many blocks' worth of an activation is kept.
typedef struct {
    size_t x, gelu, rest;
} Kept;

static Kept blocks_kept(const EngineConfig *config) {
    size_t L = config->model->config.layers;
    if (config->inference) return {1, 1, 1};
    if (config->recompute == RECOMPUTE_BLOCK) return {L, 1, 1};
    if (config->recompute == RECOMPUTE_GELU) return {L, 1, L};
    return {L, L, L};
}

static void layout_activations(Engine *e, Arena *a) {
    const ModelConfig *m = &e->config.model->config;
    size_t N = (size_t)e->config.micro_batch * e->config.seq_len, C = m->channels, NH = m->heads;
    Kept kept = blocks_kept(&e->config);
    const char *what = "activations";
    Block *b = &e->base;
    ADD(what, b->x, kept.x * share_stride(N * C), FORWARD, BACKWARD);
    ADD(what, b->ln1, kept.rest * share_stride(N * C), FORWARD, BACKWARD);
    ADD(what, b->mean1, kept.rest * share_stride(N), FORWARD, BACKWARD);
    ADD(what, b->rstd1, kept.rest * share_stride(N), FORWARD, BACKWARD);
    ADD(what, b->qkv, kept.rest * share_stride(N * 3 * C), FORWARD, BACKWARD);
    ADD(what, b->attention, kept.rest * share_stride(N * C), FORWARD, BACKWARD);
    ADD(what, b->lse, kept.rest * share_stride(N * NH), FORWARD, BACKWARD);
    ADD(what, b->x_mid, kept.rest * share_stride(N * C), FORWARD, BACKWARD);
    ADD(what, b->ln2, kept.rest * share_stride(N * C), FORWARD, BACKWARD);
    ADD(what, b->mean2, kept.rest * share_stride(N), FORWARD, BACKWARD);
    ADD(what, b->rstd2, kept.rest * share_stride(N), FORWARD, BACKWARD);
    ADD(what, b->fc, kept.rest * share_stride(N * 4 * C), FORWARD, BACKWARD);
    ADD(what, b->gelu, kept.gelu * share_stride(N * 4 * C), FORWARD, BACKWARD);
    ADD(what, e->x_final, N * C, FORWARD, BACKWARD);
    ADD(what, e->lnf, N * C, FORWARD, HEAD);
    ADD(what, e->meanf, N, FORWARD, BACKWARD);
    ADD(what, e->rstdf, N, FORWARD, BACKWARD);
    ADD(what, e->tokens, N + e->config.micro_batch, FORWARD, BACKWARD);
    ADD(what, e->loss, N, HEAD, BACKWARD);
}

static void layout_scratch(Engine *e, Arena *a) {
    const EngineConfig *c = &e->config;
    size_t N = (size_t)c->micro_batch * c->seq_len, C = c->model->config.channels;
    size_t head_rows = (size_t)head_examples(c) * c->seq_len;
    const char *what = "scratch of the step";
    ADD(what, e->delta, N * C, FORWARD, c->recompute == RECOMPUTE_BLOCK ? BACKWARD : FORWARD);
    ADD(what, e->logits, size_max(head_rows, 2) * c->model->vocab_padded, HEAD, HEAD); // at least one row of fp32
    if (c->inference) return;
    ADD(what, e->dx, N * C, BACKWARD, BACKWARD);
    ADD(what, e->dy, N * C, HEAD, BACKWARD);
    ADD(what, e->dwide, N * 4 * C, BACKWARD, BACKWARD);
    arena_add(a, what, &e->scratch, scratch_bytes(c), HEAD, BACKWARD);
    arena_add(a, what, &e->sorted, embedding_sort_workspace_bytes(c->micro_batch, c->seq_len), BACKWARD, BACKWARD);
    if (c->gns != GNS_EXACT) return;
    ADD("exact per-example norms", e->example_grad, example_count(c->model), FORWARD, BACKWARD);
    ADD("exact per-example norms", e->head_at_token, N * C, FORWARD, BACKWARD);
}

// Fills an empty arena with all that an engine of this configuration needs; returns the bytes in all.
static size_t engine_layout(Engine *e, Arena *a) {
    layout_state(e, a);
    layout_activations(e, a);
    layout_scratch(e, a);
    return arena_plan(a);
}

// Where block l finds its part of what the base points to.
template <typename X> static X *share(X *base, size_t kept, int l, size_t count) {
    return kept > 1 ? base + l * share_stride(count) : base;
}

static void blocks_place(Engine *e) {
    const ModelConfig *m = &e->config.model->config;
    size_t N = (size_t)e->config.micro_batch * e->config.seq_len, C = m->channels;
    Kept kept = blocks_kept(&e->config);
    const Block *b = &e->base;
    for (int l = 0; l < m->layers; l++) {
        Block *k = &e->block[l];
        k->x = share(b->x, kept.x, l, N * C);
        k->ln1 = share(b->ln1, kept.rest, l, N * C);
        k->mean1 = share(b->mean1, kept.rest, l, N);
        k->rstd1 = share(b->rstd1, kept.rest, l, N);
        k->qkv = share(b->qkv, kept.rest, l, N * 3 * C);
        k->attention = share(b->attention, kept.rest, l, N * C);
        k->lse = share(b->lse, kept.rest, l, N * m->heads);
        k->x_mid = share(b->x_mid, kept.rest, l, N * C);
        k->ln2 = share(b->ln2, kept.rest, l, N * C);
        k->mean2 = share(b->mean2, kept.rest, l, N);
        k->rstd2 = share(b->rstd2, kept.rest, l, N);
        k->fc = share(b->fc, kept.rest, l, N * 4 * C);
        k->gelu = share(b->gelu, kept.gelu, l, N * 4 * C);
    }
}

void engine_plan_memory(const EngineConfig *config, MemoryPlan *plan) {
    Engine sketch = {};
    Arena arena = {};
    sketch.config = *config;
    size_t own = 0;
    memset(plan, 0, sizeof *plan);
    plan->total = engine_layout(&sketch, &arena);
    for (int i = 0; i < arena.count; i++) {
        const ArenaBuffer *b = &arena.buffer[i];
        if (b->from != FORWARD || b->to != BACKWARD) continue; // shares its memory
        int k = 0;
        while (k < plan->count && strcmp(plan->item[k].what, b->what) != 0) k++;
        if (k == plan->count) plan->item[plan->count++].what = b->what;
        plan->item[k].bytes += b->bytes;
        own += b->bytes;
    }
    plan->item[plan->count].what = "logits and gradients, sharing memory";
    plan->item[plan->count++].bytes = plan->total - own;
}

// What would fit into `available` bytes: a smaller micro-batch as it is, or the most that recomputing allows.
static void suggest_fit(const EngineConfig *config, size_t available, char *out, size_t bytes) {
    static const char *const names[] = {"none", "gelu", "block"};
    MemoryPlan plan;
    for (int B = config->micro_batch; B >= 1; B = B / 2)
        for (int r = config->recompute; r <= (config->inference ? config->recompute : RECOMPUTE_BLOCK); r++) {
            EngineConfig smaller = *config;
            smaller.micro_batch = B;
            smaller.recompute = (Recompute)r;
            engine_plan_memory(&smaller, &plan);
            if (plan.total > available) continue;
            int n = snprintf(out, bytes, "--micro-batch %d", B);
            if (r != config->recompute) snprintf(out + n, bytes - n, " --recompute %s", names[r]);
            snprintf(out + strlen(out), bytes - strlen(out), " would fit (%.1f GiB)", (double)plan.total / (1 << 30));
            return;
        }
    snprintf(out, bytes, "not even one row fits: choose a smaller model or a shorter --seq-len");
}

static int memory_take(Engine *engine, Error *e) {
    Arena arena = {};
    size_t bytes = engine_layout(engine, &arena), available = 0, all = 0;
    CUDA_TRY(cudaMemGetInfo(&available, &all), e);
    cudaError_t status = cudaMalloc(&engine->memory, bytes);
    if (status == cudaErrorMemoryAllocation) {
        char fit[128];
        (void)cudaGetLastError(); // the failed allocation is dealt with here
        suggest_fit(&engine->config, available, fit, sizeof fit);
        FAIL(e, ERR_MEMORY, NULL,
             "out of GPU memory: --micro-batch %d of %d tokens needs %.1f GiB, %.1f of the %s's %.1f are free",
             engine->config.micro_batch, engine->config.seq_len, (double)bytes / (1 << 30),
             (double)available / (1 << 30), engine->device.name, (double)all / (1 << 30));
        return error_hint(e, "%s", fit);
    }
    CUDA_TRY(status, e);
    arena_place(&arena, engine->memory);
    if (!engine->weight) engine->weight = (real *)engine->param;
    blocks_place(engine);
    return 0;
}

// ---------------------------------------------------------------------------------------------------------------------
// Life and state

static int pinned_take(Engine *engine, Error *e) {
    const EngineConfig *c = &engine->config;
    size_t bytes = (size_t)c->micro_batch * (c->seq_len + 1) * sizeof(uint16_t);
    for (int i = 0; i < TOKEN_SLOTS; i++) {
        CUDA_TRY(cudaMallocHost(&engine->staged[i], bytes), e);
        CUDA_TRY(cudaEventCreateWithFlags(&engine->sent[i], cudaEventDisableTiming), e);
    }
    CUDA_TRY(cudaMallocHost(&engine->stats_host, stats_count(c->model) * sizeof(double)), e);
    return 0;
}

static int tables_load(Engine *engine, Error *e) {
    const Model *model = engine->config.model;
    size_t decay_bytes = model->flat_count / DECAY_GRANULE, segment_bytes = model->tensor_count * sizeof(ReduceSegment);
    void *host;
    TRY(memory_alloc(&host, size_max(decay_bytes, segment_bytes), "tables", e));
    optimizer_decay_map((uint8_t *)host, model);
    cudaError_t status = cudaMemcpy(engine->decay, host, decay_bytes, cudaMemcpyHostToDevice);
    for (int i = 0; i < model->tensor_count; i++)
        ((ReduceSegment *)host)[i] = {model->tensors[i].offset, model->tensors[i].count};
    if (status == cudaSuccess) status = cudaMemcpy(engine->segment, host, segment_bytes, cudaMemcpyHostToDevice);
    memory_free(host);
    CUDA_TRY(status, e);
    return 0;
}

// Everything starts at zero: so do the rows of wte behind the vocabulary, for good.
static int state_clear(Engine *engine, Error *e) {
    size_t bytes = engine->config.model->flat_count * sizeof(float);
    float *arrays[] = {engine->param, engine->grad, engine->moment1, engine->moment2};
    for (float *array : arrays)
        if (array) CUDA_TRY(cudaMemsetAsync(array, 0, bytes, engine->stream), e);
    CUDA_TRY(cudaMemsetAsync(engine->weight, 0, engine->config.model->flat_count * sizeof(real), engine->stream), e);
    return 0;
}

static int engine_open(Engine *engine, Error *e) {
    TRY(device_open(&engine->device, e));
    TRY(memory_alloc_zero((void **)&engine->block, engine->config.model->config.layers * sizeof(Block), "blocks", e));
    TRY(memory_alloc_zero((void **)&engine->matmul, sizeof(Matmul), "matmul plans", e));
    TRY(memory_take(engine, e));
    CUDA_TRY(cudaStreamCreateWithFlags(&engine->stream, cudaStreamNonBlocking), e);
    TRY(matmul_create(engine->matmul, engine->matmul_scratch, e));
    TRY(pinned_take(engine, e));
    TRY(tables_load(engine, e));
    TRY(state_clear(engine, e));
    CUDA_TRY(cudaStreamSynchronize(engine->stream), e);
    return 0;
}

int engine_create(Engine **out, const EngineConfig *config, Error *e) {
    assert(config->seq_len <= config->model->config.context && config->micro_batch > 0);
    TRY(memory_alloc_zero((void **)out, sizeof(Engine), "the engine", e));
    (*out)->config = *config;
    int code = engine_open(*out, e);
    if (!code) return 0;
    engine_destroy(*out);
    *out = NULL;
    return code;
}

void engine_destroy(Engine *engine) {
    if (!engine) return;
    if (engine->stream) cudaStreamSynchronize(engine->stream);
    if (engine->stats_host) cudaFreeHost(engine->stats_host);
    for (int i = 0; i < TOKEN_SLOTS; i++) {
        if (engine->sent[i]) cudaEventDestroy(engine->sent[i]);
        if (engine->staged[i]) cudaFreeHost(engine->staged[i]);
    }
    if (engine->matmul) matmul_destroy(engine->matmul);
    if (engine->stream) cudaStreamDestroy(engine->stream);
    if (engine->memory) cudaFree(engine->memory);
    memory_free(engine->matmul);
    memory_free(engine->block);
    memory_free(engine);
}

void engine_describe(const Engine *engine, char *out, size_t bytes) {
    const Device *d = &engine->device;
    snprintf(out, bytes, "%s, %s, %d multiprocessors, %.0f GiB", d->name, sizeof(real) == 4 ? "fp32" : "bf16",
             d->multiprocessors, (double)d->memory_bytes / (1 << 30));
}

double engine_peak_flops(const Engine *engine) { return device_peak_flops(&engine->device); }

static float *state_array(Engine *engine, StateKind kind) {
    float *const arrays[] = {engine->param, engine->grad, engine->moment1, engine->moment2};
    return arrays[kind];
}

int engine_load(Engine *engine, StateKind kind, Range range, const float *values, Error *e) {
    assert(range.begin <= range.end && range.end <= engine->config.model->flat_count);
    size_t bytes = (range.end - range.begin) * sizeof(float);
    float *to = state_array(engine, kind) + range.begin;
    CUDA_TRY(cudaMemcpyAsync(to, values, bytes, cudaMemcpyHostToDevice, engine->stream), e);
    if (kind == STATE_PARAM && (float *)engine->weight != engine->param)
        TRY(optimizer_round(engine->weight, engine->param, range, engine->stream, e));
    CUDA_TRY(cudaStreamSynchronize(engine->stream), e); // the caller may reuse `values`
    return 0;
}

int engine_store(Engine *engine, StateKind kind, Range range, float *values, Error *e) {
    assert(range.begin <= range.end && range.end <= engine->config.model->flat_count);
    size_t bytes = (range.end - range.begin) * sizeof(float);
    const float *from = state_array(engine, kind) + range.begin;
    CUDA_TRY(cudaMemcpyAsync(values, from, bytes, cudaMemcpyDeviceToHost, engine->stream), e);
    CUDA_TRY(cudaStreamSynchronize(engine->stream), e);
    return 0;
}

static real *weight(Engine *engine, TensorKind kind, int layer) {
    return engine->weight + model_tensor(engine->config.model, kind, layer)->offset;
}
static float *grad(Engine *engine, TensorKind kind, int layer) {
    return engine->grad + model_tensor(engine->config.model, kind, layer)->offset;
}
static double *example_sq(Engine *engine, TensorKind kind, int layer) {
    const Model *model = engine->config.model;
    return stats_example_sq(engine->stats, model) + (model_tensor(model, kind, layer) - model->tensors);
}

static bool measured(const Tensor *tensor, GnsMode mode) {
    return mode == GNS_EXACT || (mode == GNS_LN && tensor->group == GROUP_LN);
}

// Where a vector's gradient goes, and its per-example squares where the mode wants them.
static ColumnGradient column_gradient(Engine *engine, TensorKind kind, int layer, GnsMode mode) {
    bool wanted = measured(model_tensor(engine->config.model, kind, layer), mode);
    return {grad(engine, kind, layer), wanted ? example_sq(engine, kind, layer) : NULL, NULL};
}

// Through pinned memory, so that the caller's tokens are free on return and the device is not waited for; only a slot
// whose own copy, two micro-steps ago, is still under way holds us up.
static int tokens_send(Engine *engine, const uint16_t *tokens, size_t count, Error *e) {
    int slot = engine->slot;
    engine->slot = (slot + 1) % TOKEN_SLOTS;
    CUDA_TRY(cudaEventSynchronize(engine->sent[slot]), e);
    memcpy(engine->staged[slot], tokens, count * sizeof *tokens);
    CUDA_TRY(cudaMemcpyAsync(engine->tokens, engine->staged[slot], count * sizeof *tokens, cudaMemcpyHostToDevice,
                             engine->stream),
             e);
    CUDA_TRY(cudaEventRecord(engine->sent[slot], engine->stream), e);
    return 0;
}

// ---------------------------------------------------------------------------------------------------------------------
// Linear layers: y (N, out) = x (N, in) W (in, out) + b

static int linear_forward(Engine *engine, real *y, const real *x, TensorKind w, TensorKind b, int layer, int N,
                          Error *e) {
    const Tensor *t = model_tensor(engine->config.model, w, layer);
    MatmulShape shape = {};
    shape.m = N, shape.n = (int)t->columns, shape.k = (int)t->rows;
    shape.epilogue = MATMUL_BIAS;
    return matmul_run(engine->matmul, &shape, y, x, weight(engine, w, layer), weight(engine, b, layer), engine->stream,
                      e);
}

// dx (N, in) = dy (N, out) W^T
static int linear_dinput(Engine *engine, real *dx, const real *dy, TensorKind w, int layer, int N, Error *e) {
    const Tensor *t = model_tensor(engine->config.model, w, layer);
    MatmulShape shape = {};
    shape.m = N, shape.n = (int)t->rows, shape.k = (int)t->columns;
    shape.transpose_b = true;
    return matmul_run(engine->matmul, &shape, dx, dy, weight(engine, w, layer), NULL, engine->stream, e);
}

// dW (in, out) += x (rows, in)^T dy (rows, out), fp32
static int dweight(Engine *engine, float *dw, const real *x, const real *dy, int rows, int in, int out, Error *e) {
    MatmulShape shape = {};
    shape.m = in, shape.n = out, shape.k = rows;
    shape.transpose_a = shape.out_float = shape.accumulate = true;
    return matmul_run(engine->matmul, &shape, dw, x, dy, NULL, engine->stream, e);
}

// The same, by example: g_b (in, out) = x_b (T, in)^T dy_b (T, out), of which sum and sum of squares are kept. A few
// examples at a time, as many as the scratch holds.
static int dweight_exact(Engine *engine, float *dw, double *squares, const real *x, const real *dy, int B, int T,
                         int in, int out, Error *e) {
    size_t count = (size_t)in * out;
    int most = (int)(example_count(engine->config.model) / count);
    for (int b = 0; b < B; b += most) {
        MatmulShape shape = {};
        shape.m = in, shape.n = out, shape.k = T;
        shape.transpose_a = shape.out_float = true;
        shape.batch = B - b < most ? B - b : most;
        shape.stride_a = (int64_t)T * in, shape.stride_b = (int64_t)T * out, shape.stride_out = (int64_t)count;
        TRY(matmul_run(engine->matmul, &shape, engine->example_grad, x + b * shape.stride_a, dy + b * shape.stride_b,
                       NULL, engine->stream, e));
        TRY(reduce_examples(dw, squares, NULL, engine->example_grad, shape.batch, count, engine->scratch,
                            engine->stream, e));
    }
    return 0;
}

static int linear_dweight(Engine *engine, const real *x, const real *dy, TensorKind w, int layer, int B, int T,
                          GnsMode mode, Error *e) {
    const Tensor *t = model_tensor(engine->config.model, w, layer);
    int in = (int)t->rows, out = (int)t->columns;
    if (mode != GNS_EXACT) return dweight(engine, grad(engine, w, layer), x, dy, B * T, in, out, e);
    return dweight_exact(engine, grad(engine, w, layer), example_sq(engine, w, layer), x, dy, B, T, in, out, e);
}

// ---------------------------------------------------------------------------------------------------------------------
// Forward

// From ln1 to gelu; k->x and k->ln1 are there already.
static int block_forward(Engine *engine, const Block *k, int l, int B, int T, Error *e) {
    int C = engine->config.model->config.channels, NH = engine->config.model->config.heads, N = B * T;
    cudaStream_t stream = engine->stream;
    TRY(linear_forward(engine, k->qkv, k->ln1, QKV_W, QKV_B, l, N, e));
    TRY(attention_forward(k->attention, k->lse, k->qkv, B, T, NH, C / NH, stream, e));
    TRY(linear_forward(engine, engine->delta, k->attention, PROJ_W, PROJ_B, l, N, e));
    TRY(residual_layernorm_forward(k->x_mid, k->ln2, k->mean2, k->rstd2, k->x, engine->delta, weight(engine, LN2_W, l),
                                   weight(engine, LN2_B, l), N, C, stream, e));
    TRY(linear_forward(engine, k->fc, k->ln2, FC_W, FC_B, l, N, e));
    return gelu_forward(k->gelu, k->fc, (size_t)N * 4 * C, stream, e);
}

static int block_ln1(Engine *engine, const Block *k, int l, int N, Error *e) {
    return layernorm_forward(k->ln1, k->mean1, k->rstd1, k->x, weight(engine, LN1_W, l), weight(engine, LN1_B, l), N,
                             engine->config.model->config.channels, engine->stream, e);
}

// engine->tokens (B, T + 1) -> lnf (B, T, C). A block's output and the sum with the residual stream are the business
// of the LayerNorm that comes next.
static int forward(Engine *engine, int B, int T, Error *e) {
    int C = engine->config.model->config.channels, L = engine->config.model->config.layers, N = B * T;
    const Block *block = engine->block;
    TRY(embedding_forward(block[0].x, engine->tokens, weight(engine, WTE, 0), weight(engine, WPE, 0), B, T, C,
                          engine->stream, e));
    TRY(block_ln1(engine, &block[0], 0, N, e));
    for (int l = 0; l < L; l++) {
        const Block *k = &block[l], *next = &block[l + 1];
        bool last = l == L - 1;
        TRY(block_forward(engine, k, l, B, T, e));
        TRY(linear_forward(engine, engine->delta, k->gelu, FCPROJ_W, FCPROJ_B, l, N, e));
        TRY(residual_layernorm_forward(last ? engine->x_final : next->x, last ? engine->lnf : next->ln1,
                                       last ? engine->meanf : next->mean1, last ? engine->rstdf : next->rstd1, k->x_mid,
                                       engine->delta, weight(engine, last ? LNF_W : LN1_W, l + 1),
                                       weight(engine, last ? LNF_B : LN1_B, l + 1), N, C, engine->stream, e));
    }
    return 0;
}

// ---------------------------------------------------------------------------------------------------------------------
// The head: logits, loss and, in training, the gradient on the spot, a chunk of examples at a time

// lnf (rows, C) from row `first` on -> logits (rows, Vp), real or fp32
static int head_logits(Engine *engine, size_t first, int rows, bool in_float, Error *e) {
    const Model *model = engine->config.model;
    MatmulShape shape = {};
    shape.m = rows, shape.n = model->vocab_padded, shape.k = model->config.channels;
    shape.transpose_b = true; // wte is (Vp, C)
    shape.out_float = in_float;
    return matmul_run(engine->matmul, &shape, engine->logits, engine->lnf + first * shape.k, weight(engine, WTE, 0),
                      NULL, engine->stream, e);
}

// dwte (Vp, C) += U_b of examples [b, b + n), by example, of which also the rows at the examples' tokens are kept.
static int head_dweight_exact(Engine *engine, int b, int n, int T, Error *e) {
    int C = engine->config.model->config.channels, Vp = engine->config.model->vocab_padded;
    for (int i = 0; i < n; i++) {
        size_t row = (size_t)(b + i) * T;
        TRY(dweight_exact(engine, grad(engine, WTE, 0), example_sq(engine, WTE, 0), engine->logits + (size_t)i * T * Vp,
                          engine->lnf + row * C, 1, T, Vp, C, e));
        TRY(embedding_gather(engine->head_at_token + row * C, engine->example_grad,
                             engine->tokens + (size_t)(b + i) * (T + 1), 1, T, Vp, C, engine->stream, e));
    }
    return 0;
}

// Loss of examples [b, b + n) and the gradients of lnf (into dy) and of wte.
static int head_train(Engine *engine, int b, int n, GnsMode mode, Error *e) {
    const Model *model = engine->config.model;
    int T = engine->config.seq_len, C = model->config.channels, Vp = model->vocab_padded, rows = n * T;
    size_t first = (size_t)b * T;
    TRY(head_logits(engine, first, rows, false, e));
    TRY(crossentropy_gradient(engine->loss + first, engine->logits, engine->tokens, (int)first, rows, T,
                              model->config.vocab, Vp, engine->stream, e));
    MatmulShape shape = {}; // dlnf (rows, C) = dlogits (rows, Vp) wte (Vp, C)
    shape.m = rows, shape.n = C, shape.k = Vp;
    TRY(matmul_run(engine->matmul, &shape, engine->dy + first * C, engine->logits, weight(engine, WTE, 0), NULL,
                   engine->stream, e));
    if (mode == GNS_EXACT) return head_dweight_exact(engine, b, n, T, e);
    return dweight(engine, grad(engine, WTE, 0), engine->logits, engine->lnf + first * C, rows, Vp, C, e);
}

// ---------------------------------------------------------------------------------------------------------------------
// Backward

// dx += backward of y = LN(x) from dy (= where first). The bias of the projection that was added to the residual stream
// just before x has the column sums of the new dx for a gradient: they come with it.
static int ln_backward(Engine *engine, bool first, const real *x, const float *mean, const float *rstd, TensorKind w,
                       TensorKind b, int l, TensorKind bias, int bias_layer, int B, int T, GnsMode mode, Error *e) {
    ColumnGradient before = {};
    if (bias_layer >= 0) before = column_gradient(engine, bias, bias_layer, mode);
    return layernorm_backward(engine->dx, !first, column_gradient(engine, w, l, mode),
                              column_gradient(engine, b, l, mode), before, engine->dy, x, mean, rstd,
                              weight(engine, w, l), B, T, engine->config.model->config.channels, engine->scratch,
                              engine->stream, e);
}

// Through the MLP's second half: dwide (N, 4C) = dx fcproj^T x gelu'(fc), and fc's bias gradient. Where cuBLASLt can,
// it takes the slope along with the product, which saves two passes over dwide.
static int gelu_backward_wide(Engine *engine, const Block *k, int l, int B, int T, GnsMode mode, Error *e) {
    int C = engine->config.model->config.channels, N = B * T;
    ColumnGradient dbias = column_gradient(engine, FC_B, l, mode);
    real *dwide = engine->dwide;
    bool fused = sizeof(real) < sizeof(float) && C % 2 == 0;
    if (!fused) {
        TRY(linear_dinput(engine, dwide, engine->dx, FCPROJ_W, l, N, e));
        return gelu_backward_bias(dwide, dbias, dwide, k->fc, B, T, 4 * C, engine->scratch, engine->stream, e);
    }
    MatmulShape shape = {};
    shape.m = N, shape.n = 4 * C, shape.k = C;
    shape.transpose_b = true;
    shape.epilogue = MATMUL_DGELU;
    TRY(matmul_run(engine->matmul, &shape, dwide, engine->dx, weight(engine, FCPROJ_W, l), k->fc, engine->stream, e));
    return bias_backward(dbias, dwide, B, T, 4 * C, engine->scratch, engine->stream, e);
}

// Puts back what the forward did not keep of block l. The last block's is still there: nothing ran since.
static int block_recompute(Engine *engine, const Block *k, int l, int B, int T, Error *e) {
    if (l == engine->config.model->config.layers - 1) return 0;
    int N = B * T, C = engine->config.model->config.channels;
    if (engine->config.recompute == RECOMPUTE_GELU)
        return gelu_forward(k->gelu, k->fc, (size_t)N * 4 * C, engine->stream, e);
    if (engine->config.recompute == RECOMPUTE_NONE) return 0;
    TRY(block_ln1(engine, k, l, N, e));
    return block_forward(engine, k, l, B, T, e);
}

// dx: gradient of the block's output on entry, of its input on return.
static int block_backward(Engine *engine, const Block *k, int l, int B, int T, GnsMode mode, Error *e) {
    int C = engine->config.model->config.channels, NH = engine->config.model->config.heads, N = B * T;
    real *dx = engine->dx, *dy = engine->dy, *dwide = engine->dwide;
    // MLP
    TRY(linear_dweight(engine, k->gelu, dx, FCPROJ_W, l, B, T, mode, e));
    TRY(gelu_backward_wide(engine, k, l, B, T, mode, e));
    TRY(linear_dweight(engine, k->ln2, dwide, FC_W, l, B, T, mode, e));
    TRY(linear_dinput(engine, dy, dwide, FC_W, l, N, e));
    TRY(ln_backward(engine, false, k->x_mid, k->mean2, k->rstd2, LN2_W, LN2_B, l, PROJ_B, l, B, T, mode, e));
    // attention
    TRY(linear_dweight(engine, k->attention, dx, PROJ_W, l, B, T, mode, e));
    TRY(linear_dinput(engine, dy, dx, PROJ_W, l, N, e));
    TRY(attention_backward(dwide, dy, k->qkv, k->attention, k->lse, engine->scratch, B, T, NH, C / NH, engine->stream,
                           e));
    TRY(bias_backward(column_gradient(engine, QKV_B, l, mode), dwide, B, T, 3 * C, engine->scratch, engine->stream, e));
    TRY(linear_dweight(engine, k->ln1, dwide, QKV_W, l, B, T, mode, e));
    TRY(linear_dinput(engine, dy, dwide, QKV_W, l, N, e));
    return ln_backward(engine, false, k->x, k->mean1, k->rstd1, LN1_W, LN1_B, l, FCPROJ_B, l - 1, B, T, mode, e);
}

// dx (B, T, C) -> wte and wpe. wte is one tensor in two roles, E (embedding) and U (head):
// |E + U|^2 = |E|^2 + |U|^2 + 2 <E, U>; the head has left |U|^2, and engine_result doubles the cross term.
static int embeddings_backward(Engine *engine, int B, int T, GnsMode mode, Error *e) {
    int C = engine->config.model->config.channels;
    EmbeddingOrder order;
    TRY(embedding_sort(&order, engine->tokens, false, B, T, engine->sorted, engine->stream, e));
    TRY(embedding_backward(grad(engine, WTE, 0), grad(engine, WPE, 0), engine->dx, order, B, T, C, engine->scratch,
                           engine->stream, e));
    if (mode != GNS_EXACT) return 0;
    TRY(embedding_sort(&order, engine->tokens, true, B, T, engine->sorted, engine->stream, e));
    return embedding_example_squares(example_sq(engine, WTE, 0), engine->stats + STAT_CROSS, example_sq(engine, WPE, 0),
                                     NULL, engine->dx, engine->head_at_token, order, B, T, C, engine->scratch,
                                     engine->stream, e);
}

// Tells whoever asked that all gradients from flat element `begin` up to *end are final, in the stream's order.
static int gradient_final(Engine *engine, size_t begin, size_t *end, Error *e) {
    Range range = {begin, *end};
    *end = begin;
    return engine->final ? engine->final(engine->final_context, range, e) : 0;
}

static int backward(Engine *engine, int B, int T, GnsMode mode, Error *e) {
    const Model *model = engine->config.model;
    int L = model->config.layers;
    size_t end = model->flat_count;
    TRY(ln_backward(engine, true, engine->x_final, engine->meanf, engine->rstdf, LNF_W, LNF_B, 0, FCPROJ_B, L - 1, B, T,
                    mode, e));
    for (int l = L - 1; l >= 0; l--) {
        TRY(block_recompute(engine, &engine->block[l], l, B, T, e));
        TRY(block_backward(engine, &engine->block[l], l, B, T, mode, e));
        TRY(gradient_final(engine, model_tensor(model, LN1_W, l)->offset, &end, e));
    }
    TRY(embeddings_backward(engine, B, T, mode, e));
    return gradient_final(engine, 0, &end, e);
}

// ---------------------------------------------------------------------------------------------------------------------
// The step

int engine_begin_step(Engine *engine, Error *e) {
    const Model *model = engine->config.model;
    CUDA_TRY(cudaMemsetAsync(engine->grad, 0, model->flat_count * sizeof(float), engine->stream), e);
    CUDA_TRY(cudaMemsetAsync(engine->stats, 0, stats_count(model) * sizeof(double), engine->stream), e);
    engine->mode = GNS_EXACT;
    engine->micro_steps = 0;
    return 0;
}

void engine_call_when_final(Engine *engine, GradientFinal final, void *context) {
    engine->final = final;
    engine->final_context = context;
}

int engine_micro_step(Engine *engine, const uint16_t *tokens, int n, GnsMode mode, Error *e) {
    int T = engine->config.seq_len, chunk = head_examples(&engine->config);
    assert(n > 0 && n <= engine->config.micro_batch && mode <= engine->config.gns);
    TRY(tokens_send(engine, tokens, (size_t)n * (T + 1), e));
    TRY(forward(engine, n, T, e));
    for (int b = 0; b < n; b += chunk) TRY(head_train(engine, b, n - b < chunk ? n - b : chunk, mode, e));
    TRY(backward(engine, n, T, mode, e));
    engine_call_when_final(engine, NULL, NULL);
    TRY(reduce_sum(engine->stats + STAT_LOSS, engine->loss, (size_t)n * T, engine->stream, e));
    if (mode < engine->mode) engine->mode = mode;
    engine->micro_steps++;
    return 0;
}

// Times the algorithms on offer for every matrix product of a whole micro-step and keeps the fastest. What it computes
// on the way is of no account: gradients are cleared again. Not between begin_step and result.
extern "C" int engine_tune(Engine *engine, Error *e) {
    const EngineConfig *c = &engine->config;
    size_t count = (size_t)c->micro_batch * (c->seq_len + 1);
    uint16_t *tokens;
    TRY(memory_alloc((void **)&tokens, count * sizeof *tokens, "tokens", e));
    const size_t stride = 7919; // a prime: all sorts of tokens
    for (size_t i = 0; i < count; i++) tokens[i] = (uint16_t)(i * stride % c->model->config.vocab);
    matmul_tune(engine->matmul, true);
    int code = engine_begin_step(engine, e);
    if (!code) code = engine_micro_step(engine, tokens, c->micro_batch, GNS_OFF, e);
    matmul_tune(engine->matmul, false);
    memory_free(tokens);
    TRY(code);
    return engine_begin_step(engine, e);
}

// What tuning chose, a line of text for run.json and checkpoints ("": nothing); and the same back, so that a run that
// goes on computes the same bits.
extern "C" const char *engine_tuning(const Engine *engine) { return engine->matmul->choices; }
extern "C" int engine_set_tuning(Engine *engine, const char *tuning, Error *e) {
    return matmul_choices_load(engine->matmul, tuning, e);
}

// What of each segment lies in the range, counted from the range's beginning.
__global__ static void clip_segments_kernel(ReduceSegment *part, const ReduceSegment *segment, int count, Range range) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= count) return;
    size_t begin = segment[i].offset, end = begin + segment[i].count;
    begin = min(max(begin, range.begin), range.end);
    end = min(max(end, range.begin), range.end);
    part[i] = {begin - range.begin, end - begin};
}

// Squares of the tensors that have elements in the range, which follow one another in the table, into sq[tensor].
static int norms(Engine *engine, Range range, double *sq, Error *e) {
    const unsigned threads = 128;
    const Model *model = engine->config.model;
    int first = 0, end = model->tensor_count;
    while (first < end && model->tensors[first].offset + model->tensors[first].count <= range.begin) first++;
    while (end > first && model->tensors[end - 1].offset >= range.end) end--;
    if (first == end) return 0;
    clip_segments_kernel<<<(end - first + threads - 1) / threads, threads, 0, engine->stream>>>(
        engine->segment_part, engine->segment + first, end - first, range);
    CUDA_LAUNCHED(e);
    return reduce_squares(sq + first, engine->grad + range.begin, range.end - range.begin, engine->segment_part,
                          end - first, engine->scratch, engine->stream, e);
}

int engine_norms(Engine *engine, Range range, Error *e) {
    return norms(engine, range, stats_grad_sq(engine->stats), e);
}

int engine_rank_norms(Engine *engine, Range range, Error *e) {
    return norms(engine, range, stats_rank_sq(engine->stats, engine->config.model), e);
}

void *engine_buffer(Engine *engine, EngineBuffer buffer, size_t element) {
    switch (buffer) {
    case BUFFER_GRAD: return engine->grad + element;
    case BUFFER_WEIGHT: return engine->weight + element;
    case BUFFER_NORMS: return stats_grad_sq(engine->stats) + element;
    }
    assert(0);
    return NULL;
}

size_t engine_weight_bytes(const Engine *) { return sizeof(real); }

void *engine_stream(Engine *engine) { return engine->stream; }

int engine_update(Engine *engine, Range range, const UpdateConfig *u, Error *e) {
    OptimizerArrays arrays = {engine->param,   (float *)engine->weight == engine->param ? NULL : engine->weight,
                              engine->moment1, engine->moment2,
                              engine->grad,    engine->decay};
    AdamWStep step = adamw_step(u->lr, u->beta1, u->beta2, u->eps, u->weight_decay, u->step, 1.0);
    TRY(optimizer_scale(engine->grad_scale, stats_grad_sq(engine->stats), engine->config.model->tensor_count,
                        (double)u->batch, u->grad_clip, engine->stream, e));
    return optimizer_update(&arrays, range, step, engine->grad_scale, engine->stream, e);
}

int engine_result(Engine *engine, StepResult *result, Error *e) {
    const Model *model = engine->config.model;
    double *stats = engine->stats_host;
    CUDA_TRY(cudaMemcpyAsync(stats, engine->stats, stats_count(model) * sizeof(double), cudaMemcpyDeviceToHost,
                             engine->stream),
             e);
    CUDA_TRY(cudaStreamSynchronize(engine->stream), e);
    result->loss_sum = stats[STAT_LOSS] / engine->config.seq_len;
    memcpy(result->grad_sq, stats_grad_sq(stats), model->tensor_count * sizeof(double));
    if (result->rank_sq) memcpy(result->rank_sq, stats_rank_sq(stats, model), model->tensor_count * sizeof(double));
    for (int i = 0; i < model->tensor_count; i++)
        result->example_sq[i] = measured(&model->tensors[i], engine->mode) ? stats_example_sq(stats, model)[i] : NAN;
    result->example_sq[model_tensor(model, WTE, 0) - model->tensors] += 2 * stats[STAT_CROSS];
    return 0;
}

// ---------------------------------------------------------------------------------------------------------------------
// Without training

int engine_eval(Engine *engine, const uint16_t *tokens, int n, float *loss, Error *e) {
    const Model *model = engine->config.model;
    int T = engine->config.seq_len, chunk = head_examples(&engine->config);
    assert(n > 0 && n <= engine->config.micro_batch);
    TRY(tokens_send(engine, tokens, (size_t)n * (T + 1), e));
    TRY(forward(engine, n, T, e));
    for (int b = 0; b < n; b += chunk) {
        int rows = (n - b < chunk ? n - b : chunk) * T, first = b * T;
        TRY(head_logits(engine, first, rows, false, e));
        TRY(crossentropy_loss(engine->loss + first, engine->logits, engine->tokens, first, rows, T, model->config.vocab,
                              model->vocab_padded, engine->stream, e));
    }
    CUDA_TRY(cudaMemcpyAsync(loss, engine->loss, (size_t)n * T * sizeof(float), cudaMemcpyDeviceToHost, engine->stream),
             e);
    CUDA_TRY(cudaStreamSynchronize(engine->stream), e);
    return 0;
}

// What follows a token does not change its logits (the model is causal), so n is rounded up to a whole tile: text that
// grows a token at a time needs few matmul plans.
int engine_logits(Engine *engine, const uint16_t *tokens, int n, float *logits, Error *e) {
    const size_t tile = 64;
    int T = (int)size_min(round_up(n, tile), engine->config.seq_len);
    assert(n > 0 && n <= engine->config.seq_len);
    CUDA_TRY(cudaMemsetAsync(engine->tokens, 0, (T + 1) * sizeof *tokens, engine->stream), e);
    TRY(tokens_send(engine, tokens, n, e));
    TRY(forward(engine, 1, T, e));
    TRY(head_logits(engine, n - 1, 1, true, e));
    CUDA_TRY(cudaMemcpyAsync(logits, engine->logits, engine->config.model->config.vocab * sizeof(float),
                             cudaMemcpyDeviceToHost, engine->stream),
             e);
    CUDA_TRY(cudaStreamSynchronize(engine->stream), e);
    return 0;
}

#ifndef GNS_NO_MAIN
int main(int argc, char **argv) { return train_main(argc, argv); }
#endif
