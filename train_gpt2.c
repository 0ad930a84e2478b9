// train_gpt2: GPT-2 on the CPU. The forward and the backward pass, readable from top to bottom, behind the interface
// that the training loop asks for (llmc/model/engine.h).
//
// The engine's state is in llmc/cpu/engine.h, what it takes of the machine's memory in llmc/cpu/engine_memory.c, what
// becomes of parameters, gradients and moments behind the backward pass in llmc/cpu/engine_state.c.
//
// The model (Radford et al. 2019): x = wte[token] + wpe[position]; then L blocks of
//     x += proj(attention(qkv(ln_1(x))))      x += fcproj(gelu(fc(ln_2(x))))
// and logits = ln_f(x) wte^T. Weights are (in, out), so that y = x W + b. fp32 throughout.
//
// Shapes: B rows of T tokens, C channels, NH heads, L layers, V vocabulary (Vp: padded), N = B T.
#define _POSIX_C_SOURCE 200809L // sysconf
#include "cpu/attention.h"
#include "cpu/calibrate.h"
#include "cpu/engine.h"
#include "cpu/layers.h"
#include "cpu/matmul.h"
#include "cpu/vector_math.h"
#include "model/shard.h"

#include <assert.h>
#include <math.h>
#include <omp.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

// ---------------------------------------------------------------------------------------------------------------------
// Life

// CPUs are in no table: what the cores reach depends on clock, width and neighbours, so it is measured.
static void cpu_device(const EngineConfig *config, bool measure, EngineDevice *device) {
    const double seconds = 0.05; // for each of the two
    int threads = engine_thread_count(config);
    *device = (EngineDevice){
        .value_bytes = sizeof(float),
        .head_bytes = ENGINE_HEAD_BYTES,
        .flops = measure ? calibrate_flops(threads, seconds) : 0,
        .bandwidth = measure ? calibrate_copy(threads, seconds) : 0,
        .memory_bytes = (double)sysconf(_SC_PHYS_PAGES) * (double)sysconf(_SC_PAGESIZE),
    };
    snprintf(device->name, sizeof device->name, "CPU, %d thread%s", threads, threads == 1 ? "" : "s");
}

static int cpu_check(const EngineConfig *config, Error *e) {
    (void)config, (void)e; // there are kernels for any model there may be
    return 0;
}

static void cpu_destroy(Engine *engine) {
    attention_free(engine->attention_scratch);
    matmul_free(engine->matmul);
    engine_memory_free(engine);
    memory_free(engine);
}

static int cpu_create(Engine **out, const EngineConfig *config, Error *e) {
    const ModelConfig *m = &config->model->config;
    int code = 0;
    assert(config->seq_len <= m->context && config->micro_batch > 0);
    TRY(memory_alloc_zero((void **)out, sizeof(Engine), "the engine", e));
    Engine *engine = *out;
    engine->config = *config;
    engine->threads = engine_thread_count(config);
    omp_set_num_threads(engine->threads);
    TRY_GOTO(engine_memory_take(engine, e));
    TRY_GOTO(matmul_create(&engine->matmul, engine->threads, e));
    TRY_GOTO(attention_create(&engine->attention_scratch, engine->threads, (size_t)config->seq_len,
                              (size_t)(m->channels / m->heads), e));
done:
    if (code) {
        cpu_destroy(engine);
        *out = NULL;
    }
    return code;
}

static void cpu_describe(const Engine *engine, char *out, size_t bytes) {
    snprintf(out, bytes, "CPU, fp32, %d thread%s, vectors of %d bits", engine->threads, engine->threads == 1 ? "" : "s",
             32 * VEC);
}

// Pages, the second number of /proc/self/statm (proc(5)).
static size_t cpu_memory_in_use(const Engine *engine) {
    (void)engine;
    long long pages = 0;
    FILE *f = fopen("/proc/self/statm", "re");
    if (!f) return 0;
    if (fscanf(f, "%*d %lld", &pages) != 1) pages = 0;
    fclose(f);
    return (size_t)pages * (size_t)sysconf(_SC_PAGESIZE);
}

// There is one algorithm, our own.
static int cpu_tune(Engine *engine, Error *e) {
    (void)engine;
    return FAIL(e, ERR_USAGE, "leave it out", "--tune is for GPUs: on the CPU a matrix product has one algorithm");
}

static const char *cpu_tuning(const Engine *engine) {
    (void)engine;
    return "";
}

static int cpu_set_tuning(Engine *engine, const char *tuning, Error *e) {
    (void)engine;
    if (!*tuning) return 0;
    return FAIL(e, ERR_INPUT, NULL, "matrix products were tuned for %.*s, and this is the CPU",
                (int)strcspn(tuning, ":"), tuning);
}

static float *weight(Engine *engine, TensorKind kind, int layer) {
    return engine->param + model_tensor(engine->config.model, kind, layer)->offset;
}
static float *grad(Engine *engine, TensorKind kind, int layer) {
    return engine->grad + shard_grad_place(&engine->config, model_tensor(engine->config.model, kind, layer)->offset);
}
// The same, for what can only add to it: 0 where this micro-step's gradient is the first.
static float *grad_begun(Engine *engine, TensorKind kind, int layer) {
    float *values = grad(engine, kind, layer);
    if (engine->first) memset(values, 0, sizeof(float) * model_tensor(engine->config.model, kind, layer)->count);
    return values;
}
static double *example_sq(Engine *engine, TensorKind kind, int layer) {
    return &engine->example_sq[model_tensor(engine->config.model, kind, layer) - engine->config.model->tensors];
}

// ---------------------------------------------------------------------------------------------------------------------
// Forward

// y (N, out) = x (N, in) W + b
static void linear_forward(Engine *engine, float *y, const float *x, TensorKind w, TensorKind b, int layer, int N) {
    const Tensor *t = model_tensor(engine->config.model, w, layer);
    matmul_forward(engine->matmul, y, x, weight(engine, w, layer), weight(engine, b, layer), N, (int)t->rows,
                   (int)t->columns);
}

// The block's activations from row `first` on. (lse is not cut by rows.)
static Block block_from(const Block *k, size_t first, size_t C) {
    return (Block){k->x + first * C,       k->ln1 + first * C,       k->mean1 + first, k->rstd1 + first,
                   k->qkv + first * 3 * C, k->attention + first * C, k->lse,           k->x_mid + first * C,
                   k->ln2 + first * C,     k->mean2 + first,         k->rstd2 + first, k->fc + first * 4 * C,
                   k->gelu + first * 4 * C};
}

// The block's input is x, to which the first LayerNorm adds what the block before left in its own x_mid (residual;
// NULL for the first block); the output of fcproj goes to `out` and misses x_mid, which the next LayerNorm adds. Of one
// example the rows before `first` may be there already; of these only keys and values are read.
static void block_forward(Engine *engine, Block *all, const float *residual, float *out, int l, int B, int T,
                          int first) {
    int C = engine->config.model->config.channels, NH = engine->config.model->config.heads, N = B * T - first;
    Block from = block_from(all, (size_t)first, (size_t)C), *k = &from;
    layernorm_forward(k->ln1, k->mean1, k->rstd1, k->x, residual, weight(engine, LN1_W, l), weight(engine, LN1_B, l), N,
                      C);
    linear_forward(engine, k->qkv, k->ln1, QKV_W, QKV_B, l, N);
    attention_forward(engine->attention_scratch, all->attention, all->lse, all->qkv, B, T, first, NH, C / NH);
    linear_forward(engine, k->x_mid, k->attention, PROJ_W, PROJ_B, l, N);
    layernorm_forward(k->ln2, k->mean2, k->rstd2, k->x_mid, k->x, weight(engine, LN2_W, l), weight(engine, LN2_B, l), N,
                      C);
    linear_forward(engine, k->fc, k->ln2, FC_W, FC_B, l, N);
    gelu_forward(k->gelu, k->fc, (size_t)N * 4 * (size_t)C);
    if (!out) return; // recomputing: the rest is known
    linear_forward(engine, out, k->gelu, FCPROJ_W, FCPROJ_B, l, N);
}

// tokens: (B, stride), of which T a row are read -> lnf (B, T, C); of one example perhaps from row `first` on only.
static int forward(Engine *engine, const uint16_t *tokens, size_t stride, int B, int T, int first, Error *e) {
    const Model *model = engine->config.model;
    int C = model->config.channels, L = model->config.layers;
    size_t at = (size_t)first * (size_t)C;
    engine->seen_count = 0;
    // All at once: the CPU has no kernels that a transfer could slow down.
    TRY(watch_soon(&engine->weights_watch, (Range){0, model->flat_count}, e));
    TRY(watch_await(&engine->weights_watch, model_bucket(model, 0), e));
    embedding_forward(engine->block[0].x + at, tokens + first, stride, weight(engine, WTE, 0),
                      weight(engine, WPE, 0) + at, B, T - first, C);
    const float *residual = NULL;
    for (int l = 0; l < L; l++) {
        TRY(watch_await(&engine->weights_watch, model_bucket(model, 1 + l), e));
        block_forward(engine, &engine->block[l], residual, (l + 1 < L ? engine->block[l + 1].x : engine->x_final) + at,
                      l, B, T, first);
        residual = engine->block[l].x_mid + at;
    }
    layernorm_forward(engine->lnf + at, engine->meanf + first, engine->rstdf + first, engine->x_final + at, residual,
                      weight(engine, LNF_W, 0), weight(engine, LNF_B, 0), B * T - first, C);
    return 0;
}

// ---------------------------------------------------------------------------------------------------------------------
// The head: logits, loss and, in training, the gradient on the spot, a chunk of rows at a time

// lnf (rows, C) from row `first` on -> logits (rows, Vp)
static void head_logits(Engine *engine, size_t first, int rows) {
    const Model *model = engine->config.model;
    int C = model->config.channels;
    matmul_head_forward(engine->matmul, engine->logits, engine->lnf + first * (size_t)C, weight(engine, WTE, 0), rows,
                        C, model->vocab_padded);
}

// Loss of rows [first, first + rows), and, where dwte is given, their gradient: dy (rows, C) and dwte (Vp, C), += (add)
// or =.
static void head_chunk(Engine *engine, size_t first, int rows, float *dwte, bool add) {
    const Model *model = engine->config.model;
    int C = model->config.channels, Vp = model->vocab_padded;
    head_logits(engine, first, rows);
    float seed = dwte ? 1.0f / (float)engine->config.seq_len : 0.0f; // of L_b, the mean over T
    cross_entropy(engine->loss + first, engine->logits, engine->targets + first, rows, model->config.vocab, Vp, seed);
    if (!dwte) return;
    matmul_head_dinput(engine->matmul, engine->dy + first * (size_t)C, engine->logits, weight(engine, WTE, 0), rows, C,
                       Vp, false);
    matmul_head_dweight(engine->matmul, dwte, engine->logits, engine->lnf + first * (size_t)C, rows, C, Vp, add);
}

static void head_rows(Engine *engine, size_t first, size_t end, float *dwte, bool add) {
    size_t chunk = (size_t)engine_head_rows(&engine->config);
    for (; first < end; first += chunk, add = true)
        head_chunk(engine, first, (int)size_min(chunk, end - first), dwte, add);
}

// The same for one example on its own, for |U_b|^2 and the rows of U_b that the cross term will need.
static void head_example_exact(Engine *engine, const uint16_t *inputs, int b, int T) {
    size_t C = (size_t)engine->config.model->config.channels;
    size_t count = (size_t)engine->config.model->vocab_padded * C, first = (size_t)b * (size_t)T;
    head_rows(engine, first, first + (size_t)T, engine->example_grad, false);
    for (int t = 0; t < T; t++)
        memcpy(engine->head_at_token + (first + (size_t)t) * C, engine->example_grad + inputs[t] * C,
               sizeof(float) * C);
    float *dwte = b == 0 ? grad_begun(engine, WTE, 0) : grad(engine, WTE, 0);
    *example_sq(engine, WTE, 0) += add_and_sum_squares(dwte, engine->example_grad, count);
}

// Loss of B examples and the gradients of lnf (into dy) and of wte.
static void head_train(Engine *engine, const uint16_t *tokens, int B, int T, GnsMode mode) {
    if (mode == GNS_EXACT)
        for (int b = 0; b < B; b++) head_example_exact(engine, tokens + (size_t)b * ((size_t)T + 1), b, T);
    else head_rows(engine, 0, (size_t)B * (size_t)T, grad(engine, WTE, 0), !engine->first);
}

// Row b of tokens predicts its own tail: inputs are columns [0, T), targets columns [1, T + 1).
static void set_targets(Engine *engine, const uint16_t *tokens, int B, int T) {
    for (int b = 0; b < B; b++)
        memcpy(engine->targets + (size_t)b * (size_t)T, tokens + (size_t)b * ((size_t)T + 1) + 1,
               sizeof(uint16_t) * (size_t)T);
}

// ---------------------------------------------------------------------------------------------------------------------
// Backward

// Of y = x W + b: dW += x^T dy, db += column sums (= where they are the first), and, in exact mode, the norms of every
// example's share.
static void linear_dweight(Engine *engine, const float *x, const float *dy, TensorKind w, TensorKind b, int layer,
                           int B, int T, GnsMode mode) {
    const Tensor *t = model_tensor(engine->config.model, w, layer);
    int in = (int)t->rows, out = (int)t->columns;
    if (mode != GNS_EXACT) {
        matmul_dweight(engine->matmul, grad(engine, w, layer), grad(engine, b, layer), x, dy, B * T, in, out,
                       !engine->first);
        return;
    }
    float *dw = grad_begun(engine, w, layer), *db = grad_begun(engine, b, layer);
    for (int i = 0; i < B; i++) {
        size_t row = (size_t)i * (size_t)T;
        matmul_dweight(engine->matmul, engine->example_grad, engine->example_bias_grad, x + row * (size_t)in,
                       dy + row * (size_t)out, T, in, out, false);
        *example_sq(engine, w, layer) += add_and_sum_squares(dw, engine->example_grad, t->count);
        *example_sq(engine, b, layer) += add_and_sum_squares(db, engine->example_bias_grad, (size_t)out);
    }
}

// dx (N, in) = dy (N, out) W^T
static void linear_dinput(Engine *engine, float *dx, const float *dy, TensorKind w, int layer, int N) {
    const Tensor *t = model_tensor(engine->config.model, w, layer);
    matmul_dinput(engine->matmul, dx, dy, weight(engine, w, layer), N, (int)t->rows, (int)t->columns, false);
}

// dx += backward of y = LN(x) from dy; the norms of the parameters' per-example gradients come with it.
static void ln_backward(Engine *engine, const float *x, const float *mean, const float *rstd, TensorKind w,
                        TensorKind b, int l, int B, int T, GnsMode mode) {
    int C = engine->config.model->config.channels;
    double *gamma_sq = engine->ln_sq, *beta_sq = engine->ln_sq + B;
    layernorm_backward(engine->dx, grad_begun(engine, w, l), grad_begun(engine, b, l), gamma_sq, beta_sq, engine->dy, x,
                       mean, rstd, weight(engine, w, l), B, T, C, engine->ln_scratch);
    if (mode == GNS_OFF) return;
    for (int i = 0; i < B; i++) {
        *example_sq(engine, w, l) += gamma_sq[i];
        *example_sq(engine, b, l) += beta_sq[i];
    }
}

// dx: gradient of the block's output on entry, of its input on return.
static void block_backward(Engine *engine, Block *k, int l, int B, int T, GnsMode mode) {
    int C = engine->config.model->config.channels, NH = engine->config.model->config.heads, N = B * T;
    float *dx = engine->dx, *dy = engine->dy, *dwide = engine->dwide;
    // Put back what the forward pass did not keep; x has its residual already.
    if (engine->config.recompute == RECOMPUTE_BLOCK) block_forward(engine, k, NULL, NULL, l, B, T, 0);
    if (engine->config.recompute == RECOMPUTE_GELU) gelu_forward(k->gelu, k->fc, (size_t)N * 4 * (size_t)C);
    // MLP
    linear_dweight(engine, k->gelu, dx, FCPROJ_W, FCPROJ_B, l, B, T, mode);
    linear_dinput(engine, dwide, dx, FCPROJ_W, l, N);
    gelu_backward(dwide, dwide, k->fc, (size_t)N * 4 * (size_t)C);
    linear_dweight(engine, k->ln2, dwide, FC_W, FC_B, l, B, T, mode);
    linear_dinput(engine, dy, dwide, FC_W, l, N);
    ln_backward(engine, k->x_mid, k->mean2, k->rstd2, LN2_W, LN2_B, l, B, T, mode);
    // attention
    linear_dweight(engine, k->attention, dx, PROJ_W, PROJ_B, l, B, T, mode);
    linear_dinput(engine, dy, dx, PROJ_W, l, N);
    attention_backward(engine->attention_scratch, dwide, dy, k->qkv, k->attention, k->lse, B, T, NH, C / NH);
    linear_dweight(engine, k->ln1, dwide, QKV_W, QKV_B, l, B, T, mode);
    linear_dinput(engine, dy, dwide, QKV_W, l, N);
    ln_backward(engine, k->x, k->mean1, k->rstd1, LN1_W, LN1_B, l, B, T, mode);
}

// dx (B, T, C) -> wte and wpe. wte is one tensor in two roles, E (embedding) and U (head), whose gradient is there:
// |E + U|^2 = |E|^2 + |U|^2 + 2 <E, U>; the head has left |U|^2.
static void embeddings_backward(Engine *engine, const uint16_t *tokens, int B, int T, GnsMode mode) {
    int C = engine->config.model->config.channels;
    embedding_backward(grad(engine, WTE, 0), grad_begun(engine, WPE, 0), engine->dx, tokens, (size_t)T + 1, B, T, C);
    if (mode != GNS_EXACT) return;
    for (int b = 0; b < B; b++) {
        size_t first = (size_t)b * (size_t)T * (size_t)C;
        EmbeddingNorms n = embedding_example_norms(engine->dx + first, engine->head_at_token + first,
                                                   tokens + (size_t)b * ((size_t)T + 1), T, C, engine->dwide);
        *example_sq(engine, WTE, 0) += n.embedding_sq + 2 * n.cross;
        *example_sq(engine, WPE, 0) += n.position_sq;
    }
}

static int backward(Engine *engine, const uint16_t *tokens, int B, int T, GnsMode mode, Error *e) {
    const Model *model = engine->config.model;
    int C = model->config.channels, L = model->config.layers;
    memset(engine->dx, 0, sizeof(float) * (size_t)B * (size_t)T * (size_t)C);
    for (int l = L - 1; l >= 0; l--) {
        TRY(watch_begins(&engine->watch, engine->config.model, 1 + l, e));
        if (l == L - 1) ln_backward(engine, engine->x_final, engine->meanf, engine->rstdf, LNF_W, LNF_B, 0, B, T, mode);
        block_backward(engine, &engine->block[l], l, B, T, mode);
        TRY(watch_final(&engine->watch, engine->config.model, 1 + l, e));
    }
    embeddings_backward(engine, tokens, B, T, mode);
    return watch_final(&engine->watch, engine->config.model, 0, e);
}

// ---------------------------------------------------------------------------------------------------------------------
// The step

static int cpu_begin_step(Engine *engine, Error *e) {
    const Model *model = engine->config.model;
    size_t tensors = (size_t)model->tensor_count;
    (void)e;
    memset(engine->grad_sq, 0, tensors * sizeof(double));
    memset(engine->rank_sq, 0, tensors * sizeof(double));
    memset(engine->example_sq, 0, tensors * sizeof(double));
    engine->loss_sum = 0;
    engine->first = true;
    return 0;
}

static void cpu_watch(Engine *engine, const GradientWatch *watch) { engine->watch = *watch; }

static int cpu_micro_step(Engine *engine, const uint16_t *tokens, int n, GnsMode mode, Error *e) {
    const Model *model = engine->config.model;
    int T = engine->config.seq_len;
    assert(n > 0 && n <= engine->config.micro_batch && mode <= engine->config.gns);
    set_targets(engine, tokens, n, T);
    TRY(forward(engine, tokens, (size_t)T + 1, n, T, 0, e));
    TRY(watch_begins(&engine->watch, engine->config.model, 0, e));
    head_train(engine, tokens, n, T, mode);
    TRY(backward(engine, tokens, n, T, mode, e));
    for (int b = 0; b < n; b++) {
        double sum = 0;
        for (int t = 0; t < T; t++) sum += engine->loss[(size_t)b * (size_t)T + (size_t)t];
        engine->loss_sum += sum / T;
    }
    for (int i = 0; i < model->tensor_count; i++)
        if (!gns_measures(&model->tensors[i], mode)) engine->example_sq[i] = NAN;
    engine->first = engine->config.shard_grads;
    engine->watch = (GradientWatch){NULL, NULL, NULL};
    return 0;
}

static int cpu_result(Engine *engine, StepResult *result, Error *e) {
    (void)e;
    size_t n = (size_t)engine->config.model->tensor_count;
    result->loss_sum = engine->loss_sum;
    memcpy(result->grad_sq, engine->grad_sq, n * sizeof(double));
    memcpy(result->example_sq, engine->example_sq, n * sizeof(double));
    if (result->rank_sq) memcpy(result->rank_sq, engine->rank_sq, n * sizeof(double));
    return 0;
}

// ---------------------------------------------------------------------------------------------------------------------
// Without training

static int cpu_eval(Engine *engine, const uint16_t *tokens, int n, int T, float *loss, Error *e) {
    size_t rows = (size_t)n * (size_t)T;
    assert(n > 0 && n <= engine->config.micro_batch && T > 0 && T <= engine->config.seq_len);
    set_targets(engine, tokens, n, T);
    TRY(forward(engine, tokens, (size_t)T + 1, n, T, 0, e));
    head_rows(engine, 0, rows, NULL, false);
    memcpy(loss, engine->loss, rows * sizeof(float));
    return 0;
}

// How many of the tokens, short of the last, the last engine_logits was about: their keys and values are still there,
// unless all blocks share one's memory.
static int tokens_seen(const Engine *engine, const uint16_t *tokens, int n) {
    int L = engine->config.model->config.layers, i = 0;
    if (L > 1 && engine->block[1].qkv == engine->block[0].qkv) return 0;
    while (i < n - 1 && i < engine->seen_count && tokens[i] == engine->seen[i]) i++;
    return i;
}

static int cpu_logits(Engine *engine, const uint16_t *tokens, int n, float *logits, Error *e) {
    assert(n > 0 && n <= engine->config.seq_len);
    TRY(forward(engine, tokens, (size_t)n, 1, n, tokens_seen(engine, tokens, n), e));
    memcpy(engine->seen, tokens, sizeof *tokens * (size_t)n);
    engine->seen_count = n;
    head_logits(engine, (size_t)n - 1, 1);
    memcpy(logits, engine->logits, sizeof(float) * (size_t)engine->config.model->config.vocab);
    return 0;
}

// The engine, as main (llmc/run/main_cpu.c) hands it to the program.
const EngineApi cpu_engine = {
    .plan_memory = cpu_plan_memory,
    .device = cpu_device,
    .check = cpu_check,
    .create = cpu_create,
    .destroy = cpu_destroy,
    .describe = cpu_describe,
    .memory_in_use = cpu_memory_in_use,
    .tune = cpu_tune,
    .tuning = cpu_tuning,
    .set_tuning = cpu_set_tuning,
    .load = cpu_load,
    .store = cpu_store,
    .pin = cpu_pin,
    .unpin = cpu_unpin,
    .hash = cpu_hash,
    .begin_step = cpu_begin_step,
    .micro_step = cpu_micro_step,
    .norms = cpu_norms,
    .update = cpu_update,
    .result = cpu_result,
    .eval = cpu_eval,
    .logits = cpu_logits,
    .watch = cpu_watch,
    .watch_weights = cpu_watch_weights,
    .collect = cpu_collect,
    .clear = cpu_clear,
    .rank_norms = cpu_rank_norms,
    .buffer = cpu_buffer,
    .weight_bytes = cpu_weight_bytes,
    .stream = cpu_stream,
};
