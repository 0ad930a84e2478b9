// train_gpt2: GPT-2 on the CPU. Read from top to bottom: the forward pass, the backward pass, and the functions that
// the training loop calls (model/engine.h).
//
// cpu/engine_cpu.h defines the engine's state, cpu/engine_memory.c lays out its memory; cpu/engine_state.c loads,
// stores and updates parameters, gradients and moments.
//
// The model (Radford et al. 2019): x = wte[token] + wpe[position]; then L blocks of
//     x += proj(attention(qkv(ln_1(x))))      x += fcproj(gelu(fc(ln_2(x))))
// and logits = ln_f(x) wte^T. Weights are (in, out), so that y = x W + b.
//
// Weights and activations are values of one type, fp32 or bf16 (cpu/value.h); sums, statistics, master weights,
// gradients of weights and moments are fp32. With --dtype fp8 values are fp32, but training rounds the factors of the
// blocks' products y = x W + b and dx = dy W^T to e4m3 (factors_of). fp8-dw also rounds the factors of the blocks'
// dW = x^T dy (dweight_factors); --fp8-head the factors of the logits (head_factors).
//
// Shapes: B rows of T tokens, C channels, NH heads, L layers, V vocabulary (Vp: padded), N = B T; widths A = C of
// attention and F = 4 C of the MLP. With --tensor this rank computes B own rows of its group's M rows (TensorRanks);
// NH, A and F count this rank's heads and columns only.
#include "cpu/attention.h"     // attention_forward, attention_backward
#include "cpu/calibrate.h"     // calibrate_flops, calibrate_copy
#include "cpu/engine_cpu.h"    // Engine, Block, weight, grad, example_sq
#include "cpu/layers.h"        // embedding_*, layernorm_*, gelu_*, cross_entropy, dropout_apply
#include "cpu/matmul_kernel.h" // matmul_nn, matmul_nt, matmul_tn; the kernels' names

#include <assert.h>
#include <math.h>
#include <omp.h>
#include <string.h>
#include <unistd.h>

// The rows and the mode of a pass.
typedef struct {
    const uint16_t *tokens; // (B, stride): the inputs are the first T of a row
    size_t stride, B, T, C;
    size_t first; // first token to compute: 0, or with one row the first whose keys and values are not in memory
    size_t N;     // tokens to compute, B (T - first)
    // The group's rows; without --tensor this rank's rows.
    struct {
        const uint16_t *tokens; // (M, stride)
        size_t M, N;            // M rows; N = M (T - first) tokens to compute
        size_t own;             // index of the first own row
    } all;
    Dtype type;      // type of values
    GnsMode mode;    // training only
    Dropout dropout; // dropout of the first row; attention_of and drop set the layer
    bool fp8;        // training only: round factors to e4m3
} Batch;

// Returns a pass over M rows without training; for training also set `mode`, `fp8` and `dropout`.
static Batch batch_of(const Engine *engine, const uint16_t *tokens, size_t stride, size_t M, size_t T, size_t first) {
    const RankRows own = own_rows(&engine->config, (int64_t)M);
    const size_t C = (size_t)engine->config.model->config.channels, B = (size_t)own.count, at = (size_t)own.first;
    return (Batch){
        .tokens = tokens + at * stride,
        .stride = stride,
        .B = B,
        .T = T,
        .C = C,
        .first = first,
        .N = B * (T - first),
        .all = {tokens, M, M * (T - first), at},
        .type = engine->config.dtype,
    };
}

// ---- Between the ranks of a group (--tensor) ------------------------------------------------------------------------

// Returns the place of this rank's rows in an array (all rows, C).
static void *own_place(const Engine *engine, const Batch *batch, void *all) {
    return at(engine, all, batch->all.own * (batch->T - batch->first) * batch->C);
}

// Gathers an array (all rows, C) in place: each rank holds its own rows at first, all rows on return.
static int gather_rows(Engine *engine, const Batch *batch, void *all, Error *e) {
    const TensorRanks *t = &engine->config.tensor;
    if (t->ranks < 2) return 0;
    return t->gather_rows(t->context, all, (int)batch->all.M, (batch->T - batch->first) * batch->C, batch->type, e);
}

// Returns the array to which a product writes partial sums (all rows, C): `exchange`; without --tensor `own`.
static void *partial_sums(const Engine *engine, void *own) { return engine->exchange ? engine->exchange : own; }

// own (N, C) = sum over the ranks of partial_sums.
static int reduce_rows(Engine *engine, const Batch *batch, void *own, Error *e) {
    const TensorRanks *t = &engine->config.tensor;
    if (t->ranks < 2) return 0;
    return t->reduce_rows(t->context, own, engine->exchange, (int)batch->all.M, (batch->T - batch->first) * batch->C,
                          batch->type, e);
}

// ---- Forward --------------------------------------------------------------------------------------------------------

// Returns the number of matrix w within its block, 0 to 3; wte has fc's. The x of w has site FP8_LN1 + number, its dy
// FP8_DQKV - number (math/fp8.h).
static int linear_number(TensorKind w) { return w == QKV_W ? 0 : w == PROJ_W ? 1 : w == FCPROJ_W ? 3 : 2; }

typedef struct {
    const void *left, *right;
} Factors;

// Returns x (n values of `site`) and the weights w of block l; l = L: wte. With fp8 also raises both sites' amax. If
// both have exponents, the returned arrays are copies rounded to e4m3, x with its low parts.
static Factors factors_of(Engine *engine, const Batch *batch, const void *x, size_t n, int site, TensorKind w, int l) {
    const Tensor *t = tensor(engine, w, w == WTE ? 0 : l);
    const void *W = weight(engine, w, w == WTE ? 0 : l);
    if (!batch->fp8 || (w == WTE && !engine->config.fp8_head)) return (Factors){x, W};
    const int weight_site = FP8_QKV_WEIGHT + linear_number(w);
    const int8_t *k = engine->exponents + l * FP8_ENTRIES;
    float *amax = engine->amax + l * FP8_ENTRIES;
    raise_amax(amax + site, x, n);
    raise_amax(amax + weight_site, W, t->count);
    if (k[site] == FP8_UNSET || k[weight_site] == FP8_UNSET) return (Factors){x, W};
    fp8_round_values(engine->factor[0], x, n, k[site]);
    fp8_round_values(engine->factor[1], W, t->count, k[weight_site]);
    const int group = fp8_group_length(k, site), low = fp8_channels_at(site);
    if (group) fp8_add_low(engine->factor[0], x, n / t->rows, t->rows, group, k[site], k + low, amax + low);
    return (Factors){engine->factor[0], engine->factor[1]};
}

// True if this rank adds the bias of a product with w; only rank 0 adds it to partial sums.
static bool adds_bias(const Engine *engine, const Tensor *w) {
    return w->rows == w->whole_rows || engine->config.tensor.rank == 0;
}

// y (all rows, out) = x (all rows, in) W + b
static void linear_forward(Engine *engine, const Batch *batch, void *y, const void *x, TensorKind w, TensorKind b,
                           int l) {
    const Tensor *t = tensor(engine, w, l);
    const Factors f = factors_of(engine, batch, x, batch->all.N * t->rows, FP8_LN1 + linear_number(w), w, l);
    matmul_nn(engine->matmul, y, f.left, f.right, adds_bias(engine, t) ? weight(engine, b, l) : NULL, batch->all.N,
              t->columns, t->rows);
}

// y (N, C) = LN(x). Unless residual (N, C) is NULL, first adds it to x in place.
static void ln_forward(Engine *engine, const Batch *batch, void *y, float *mean, float *rstd, void *x,
                       const void *residual, TensorKind w, TensorKind b, int l) {
    layernorm_forward(y, mean, rstd, x, residual, weight(engine, w, l), weight(engine, b, l), batch->N, batch->C,
                      batch->type);
}

// to (B, T, C) = dropout of x (math/dropout.h). x is the output of a branch or of the embeddings, or that output's
// gradient, which needs the same mask. `to` may be x, and without dropout must be x, as nothing is copied.
static void drop(const Batch *batch, void *to, const void *x, DropoutPlace place, int l) {
    if (!batch->dropout.below) return;
    dropout_apply(to, x, dropout_at(batch->dropout, batch->dropout.example, l), place, batch->B, batch->T, batch->C,
                  batch->type);
}

static Attention attention_of(const Engine *engine, const Batch *batch, int l) {
    Attention attention = engine->attention;
    attention.dropout = dropout_at(batch->dropout, batch->dropout.example - batch->all.own, l);
    attention.position = engine->position;
    return attention;
}

// Each LayerNorm first adds the residual: ln_1 adds the previous block's x_mid (`residual`; NULL: no-op) to x, ln_2
// adds x to x_mid. Writes fcproj's output to `out`, to which the next LayerNorm adds x_mid. Arrays begin with token
// `first`, except that qkv, attention and lse hold all tokens.
static int block_forward(Engine *engine, const Batch *batch, Block *k, const void *residual, void *out, int l,
                         Error *e) {
    const Model *model = engine->config.model;
    const size_t A = model->attention_width, NH = (size_t)model->heads, first = batch->first;
    const Attention attention = attention_of(engine, batch, l);
    ln_forward(engine, batch, own_place(engine, batch, k->ln1), k->mean1, k->rstd1, k->x, residual, LN1_W, LN1_B, l);
    TRY(gather_rows(engine, batch, k->ln1, e));
    linear_forward(engine, batch, at(engine, k->qkv, first * 3 * A), k->ln1, QKV_W, QKV_B, l);
    attention_forward(&attention, k->attention, k->lse, k->qkv, batch->all.M, batch->T, first, NH, A / NH);
    linear_forward(engine, batch, partial_sums(engine, k->x_mid), at(engine, k->attention, first * A), PROJ_W, PROJ_B,
                   l);
    TRY(reduce_rows(engine, batch, k->x_mid, e));
    drop(batch, k->x_mid, k->x_mid, DROPOUT_ATTENTION, l);
    ln_forward(engine, batch, own_place(engine, batch, k->ln2), k->mean2, k->rstd2, k->x_mid, k->x, LN2_W, LN2_B, l);
    TRY(gather_rows(engine, batch, k->ln2, e));
    linear_forward(engine, batch, k->fc, k->ln2, FC_W, FC_B, l);
    gelu_forward(k->gelu, k->fc, batch->all.N * model->mlp_width, batch->type);
    if (!out) return 0; // recomputing: the backward pass needs no more
    linear_forward(engine, batch, partial_sums(engine, out), k->gelu, FCPROJ_W, FCPROJ_B, l);
    TRY(reduce_rows(engine, batch, out, e));
    drop(batch, out, out, DROPOUT_MLP, l);
    return 0;
}

// Writes x, from token `first` on. With document_mask a separator or a row's first token opens a document.
static void embeddings_forward(Engine *engine, const Batch *batch, void *x) {
    size_t C = batch->C, first = batch->first, T = batch->T;
    const uint16_t *position = engine->position ? engine->position + batch->all.own * T + first : NULL;
    for (size_t i = 0; i < batch->all.M * T && position; i++) {
        bool opens = i % T == 0 || batch->all.tokens[i / T * batch->stride + i % T] == engine->config.separator;
        engine->position[i] = opens ? 0 : (uint16_t)(engine->position[i - 1] + 1);
    }
    embedding_forward(x, batch->tokens + first, batch->stride, position, weight(engine, WTE, 0),
                      at(engine, weight(engine, WPE, 0), position ? 0 : first * C), batch->B, T - first, C,
                      batch->type);
    drop(batch, x, x, DROPOUT_EMBEDDING, 0);
}

// Waits for block l's weights. With shard_weights, also starts to gather the weights of block `after`, which runs next.
static int next_weights(Engine *engine, int l, int after, Error *e) {
    const Model *model = engine->config.model;
    TRY(watch_call(&engine->weights_watch, await, model_bucket(model, 1 + l), e));
    if (!engine->config.shard_weights || after < 0 || after == model->config.layers) return 0;
    return watch_call(&engine->weights_watch, soon, model_bucket(model, 1 + after), e);
}

// Writes lnf, from token `first` on. Writes the targets if the rows hold T + 1 tokens.
static int forward(Engine *engine, const Batch *batch, Error *e) {
    const Model *model = engine->config.model;
    int L = model->config.layers;
    const void *residual = NULL;
    engine->seen_count = 0;
    // Request all weights at once, since transfers slow down no CPU kernel.
    if (!engine->config.shard_weights) TRY(watch_call(&engine->weights_watch, soon, (Range){0, model->flat_count}, e));
    TRY(watch_call(&engine->weights_watch, await, model_bucket(model, 0), e));
    if (engine->config.shard_weights) TRY(watch_call(&engine->weights_watch, soon, model_bucket(model, 1), e));
    embeddings_forward(engine, batch, engine->block[0].x);
    for (size_t b = 0; b < batch->B && batch->stride > batch->T; b++) // the targets: columns [1, T + 1)
        memcpy(engine->targets + b * batch->T, batch->tokens + b * batch->stride + 1, sizeof(uint16_t) * batch->T);
    for (int l = 0; l < L; l++) {
        void *out = l + 1 < L ? engine->block[l + 1].x : engine->x_final;
        TRY(next_weights(engine, l, l + 1, e));
        TRY(block_forward(engine, batch, &engine->block[l], residual, out, l, e));
        residual = engine->block[l].x_mid;
    }
    ln_forward(engine, batch, engine->lnf, engine->meanf, engine->rstdf, engine->x_final, residual, LNF_W, LNF_B, 0);
    return 0;
}

// ---- The head: logits, loss and, in training, gradients, by chunks of tokens. Here `rows` are tokens ----------------

// Returns lnf and wte, the factors of the logits.
static Factors head_factors(Engine *engine, const Batch *batch) {
    const int L = engine->config.model->config.layers;
    return factors_of(engine, batch, engine->lnf, batch->N * batch->C, FP8_LN2, WTE, L);
}

// logits (rows, Vp) = lnf (rows, C) wte^T, for rows [first, first + rows) of the pass
static void head_logits(Engine *engine, Factors f, size_t first, size_t rows) {
    size_t C = (size_t)engine->config.model->config.channels, Vp = (size_t)engine->config.model->vocab_padded;
    matmul_nt(engine->matmul, engine->logits, at(engine, f.left, first * C), f.right, rows, Vp, C);
}

// Writes the losses of rows [first, end). Unless dwte is NULL, also writes dy (rows, C), the gradient of lnf, and dwte
// (Vp, C), the gradient of wte; with `add`, adds to dwte. f: head_factors.
static void head_rows(Engine *engine, const Batch *batch, Factors f, size_t first, size_t end, float *dwte, bool add) {
    const Model *model = engine->config.model;
    size_t C = batch->C, Vp = (size_t)model->vocab_padded, rows;
    const float smoothing = engine->config.label_smoothing;
    // seed: gradient of an example's loss (the mean over its tokens) with respect to one token's loss
    const float seed = dwte ? engine->loss_scale / (float)engine->config.seq_len : 0.0f;
    for (; first < end; first += rows, add = true) {
        rows = size_min((size_t)engine_head_rows(&engine->config), end - first);
        float *loss = dwte && engine->loss ? engine->loss + first : NULL;
        head_logits(engine, f, first, rows);
        cross_entropy(engine->nll + first, loss, engine->logits, engine->targets + first, rows, model->config.vocab, Vp,
                      loss ? smoothing : 0, seed, batch->type);
        if (!dwte) continue;
        matmul_nn(engine->matmul, at(engine, engine->dy, first * C), engine->logits, weight(engine, WTE, 0), NULL, rows,
                  C, Vp);
        matmul_tn(engine->matmul, dwte, NULL, engine->logits, at(engine, engine->lnf, first * C), Vp, C, rows, add);
    }
}

// Runs head_rows for example b alone; U_b is its gradient of wte. Adds |U_b|^2 to the norms. Stores U_b's rows for the
// tokens of example b in head_at_token, for the cross term (embeddings_backward).
static void head_example_exact(Engine *engine, const Batch *batch, Factors f, size_t b) {
    size_t C = batch->C, first = b * batch->T;
    const uint16_t *inputs = batch->tokens + b * batch->stride;
    head_rows(engine, batch, f, first, first + batch->T, engine->example_grad, false);
    for (size_t t = 0; t < batch->T; t++)
        memcpy(engine->head_at_token + (first + t) * C, engine->example_grad + inputs[t] * C, sizeof(float) * C);
    float *dwte = b == 0 ? grad_begun(engine, WTE, 0) : grad(engine, WTE, 0);
    *example_sq(engine, WTE, 0) +=
        add_and_sum_squares(dwte, engine->example_grad, (size_t)engine->config.model->vocab_padded * C);
}

// ---- Backward -------------------------------------------------------------------------------------------------------

// Returns x (all rows, in) and dy (all rows, out). Once all exponents are set, fp8-dw returns copies rounded to e4m3.
static Factors dweight_factors(Engine *engine, const Batch *batch, const void *x, const void *dy, TensorKind w, int l) {
    const Tensor *t = tensor(engine, w, l);
    if (!batch->fp8 || !engine->fp8_dweight) return (Factors){x, dy};
    const int number = linear_number(w);
    const int8_t *k = engine->exponents + l * FP8_ENTRIES, kx = k[FP8_LN1 + number], ky = k[FP8_DQKV - number];
    if (kx == FP8_UNSET || ky == FP8_UNSET || k[FP8_QKV_WEIGHT + number] == FP8_UNSET) return (Factors){x, dy};
    fp8_round_values(engine->factor[0], x, batch->all.N * t->rows, kx);
    fp8_round_values(engine->factor[1], dy, batch->all.N * t->columns, ky);
    return (Factors){engine->factor[0], engine->factor[1]};
}

// dw (in, out) = x^T dy, db (out) = column sums of unrounded dy, both over `rows` rows from `first` on. With `add`,
// adds to dw and db. db may be NULL.
static void dweight(Engine *engine, float *dw, float *db, Factors f, const void *dy, const Tensor *t, size_t first,
                    size_t rows, bool add) {
    const void *x = at(engine, f.left, first * t->rows), *y = at(engine, f.right, first * t->columns);
    const bool rounded = f.right != dy;
    matmul_tn(engine->matmul, dw, rounded ? NULL : db, x, y, t->rows, t->columns, rows, add);
    if (rounded && db) sum_columns(db, (const float *)dy + first * t->columns, rows, t->columns, add);
}

// Gradients of y = x W + b over all rows: dW += x^T dy, db += column sums of dy. The step's first micro-step assigns.
// GNS_EXACT also adds each example's squared norms to example_sq. If another rank adds the bias (adds_bias), db is 0.
static void linear_dweight(Engine *engine, const Batch *batch, const void *x, const void *dy, TensorKind w,
                           TensorKind b, int l) {
    const Tensor *t = tensor(engine, w, l);
    const Factors f = dweight_factors(engine, batch, x, dy, w, l);
    const bool bias = adds_bias(engine, t);
    if (!bias) grad_begun(engine, b, l);
    if (batch->mode != GNS_EXACT) {
        dweight(engine, grad(engine, w, l), bias ? grad(engine, b, l) : NULL, f, dy, t, 0, batch->all.N,
                !engine->first);
        return;
    }
    float *dw = grad_begun(engine, w, l), *db = bias ? grad_begun(engine, b, l) : NULL;
    for (size_t i = 0; i < batch->all.M; i++) {
        dweight(engine, engine->example_grad, bias ? engine->example_bias_grad : NULL, f, dy, t, i * batch->T, batch->T,
                false);
        *example_sq(engine, w, l) += add_and_sum_squares(dw, engine->example_grad, t->count);
        if (bias) *example_sq(engine, b, l) += add_and_sum_squares(db, engine->example_bias_grad, t->columns);
    }
}

// dx (all rows, in) = dy (all rows, out) W^T
static void linear_dinput(Engine *engine, const Batch *batch, void *dx, const void *dy, TensorKind w, int l) {
    const Tensor *t = tensor(engine, w, l);
    const Factors f = factors_of(engine, batch, dy, batch->all.N * t->columns, FP8_DQKV - linear_number(w), w, l);
    matmul_nt(engine->matmul, dx, f.left, f.right, batch->all.N, t->rows, t->columns);
}

// Backpropagates dy through y = LN(x). Adds to dx and to the gradients of gamma (w) and beta (b). Also adds to these
// gradients' per-example norms, and to source_sum.
static void ln_backward(Engine *engine, const Batch *batch, const void *x, const float *mean, const float *rstd,
                        TensorKind w, TensorKind b, int l) {
    double *gamma_sq = engine->ln_sq, *beta_sq = engine->ln_sq + batch->B;
    const EngineConfig *c = &engine->config;
    const size_t stride = layernorm_scratch(1, batch->T, batch->C);
    layernorm_backward(engine->dx, grad_begun(engine, w, l), grad_begun(engine, b, l), gamma_sq, beta_sq, engine->dy, x,
                       mean, rstd, weight(engine, w, l), batch->B, batch->T, batch->C, engine->ln_scratch, batch->type);
    for (size_t i = 0; i < batch->B && batch->mode != GNS_OFF; i++) {
        *example_sq(engine, w, l) += gamma_sq[i];
        *example_sq(engine, b, l) += beta_sq[i];
        if (engine->row) engine->row[(size_t)engine->rows + batch->all.own + i].sq += gamma_sq[i] + beta_sq[i];
        if (!engine->source_sum) continue;
        const int source = c->source(c->source_data, engine->example + batch->all.own + i);
        float *sum = engine->source_sum + (size_t)source * c->model->ln_parameters + tensor(engine, w, l)->ln_place;
        for (size_t k = 0; k < 2 * batch->C; k++) sum[k] += engine->ln_scratch[i * stride + k]; // dgamma, then dbeta
    }
}

// *branch (all rows, C) = the gradient of a branch's output before dropout: dx, or with dropout a masked copy of dx in
// `scratch`. With --tensor, a copy in `exchange`, gathered from the ranks.
static int branch_gradient(Engine *engine, const Batch *batch, void *scratch, DropoutPlace place, int l,
                           const void **branch, Error *e) {
    void *own = engine->exchange ? own_place(engine, batch, engine->exchange) : scratch;
    if (batch->dropout.below) drop(batch, own, engine->dx, place, l);
    else if (engine->exchange) memcpy(own, engine->dx, value_bytes(batch->type) * batch->N * batch->C);
    else own = engine->dx;
    *branch = engine->exchange ? engine->exchange : own;
    return gather_rows(engine, batch, engine->exchange, e);
}

// On entry engine->dx is the gradient of the block's output, on return the gradient of its input.
static int block_backward(Engine *engine, const Batch *batch, Block *k, int l, Error *e) {
    const Model *model = engine->config.model;
    void *dy = engine->dy, *dwide = engine->dwide;
    const void *branch;
    const size_t A = model->attention_width, NH = (size_t)model->heads, wide = batch->all.N * model->mlp_width;
    const Attention attention = attention_of(engine, batch, l);
    // Recompute what the forward pass did not keep; it kept all of the last block. x already includes the residual.
    const bool last = l == model->config.layers - 1;
    if (engine->config.recompute == RECOMPUTE_BLOCK && !last) TRY(block_forward(engine, batch, k, NULL, NULL, l, e));
    if (engine->config.recompute == RECOMPUTE_GELU && !last) gelu_forward(k->gelu, k->fc, wide, batch->type);
    // MLP
    TRY(branch_gradient(engine, batch, dy, DROPOUT_MLP, l, &branch, e));
    linear_dweight(engine, batch, k->gelu, branch, FCPROJ_W, FCPROJ_B, l);
    linear_dinput(engine, batch, dwide, branch, FCPROJ_W, l);
    gelu_backward(dwide, dwide, k->fc, wide, batch->type);
    linear_dweight(engine, batch, k->ln2, dwide, FC_W, FC_B, l);
    linear_dinput(engine, batch, partial_sums(engine, dy), dwide, FC_W, l);
    TRY(reduce_rows(engine, batch, dy, e));
    ln_backward(engine, batch, k->x_mid, k->mean2, k->rstd2, LN2_W, LN2_B, l);
    // attention
    TRY(branch_gradient(engine, batch, dwide, DROPOUT_ATTENTION, l, &branch, e));
    linear_dweight(engine, batch, k->attention, branch, PROJ_W, PROJ_B, l);
    linear_dinput(engine, batch, dy, branch, PROJ_W, l); // dy (all rows, A)
    attention_backward(&attention, dwide, dy, k->qkv, k->attention, k->lse, batch->all.M, batch->T, NH, A / NH);
    linear_dweight(engine, batch, k->ln1, dwide, QKV_W, QKV_B, l);
    linear_dinput(engine, batch, partial_sums(engine, dy), dwide, QKV_W, l);
    TRY(reduce_rows(engine, batch, dy, e));
    ln_backward(engine, batch, k->x, k->mean1, k->rstd1, LN1_W, LN1_B, l);
    return 0;
}

// Adds dx (B, T, C) to the gradients of wte and wpe. wte is both the embedding, with gradient E, and the head, with
// gradient U; grad(WTE) already holds U. |E + U|^2 = |E|^2 + |U|^2 + 2 <E, U>; head_example_exact has added |U|^2.
static void embeddings_backward(Engine *engine, const Batch *batch) {
    size_t C = batch->C, T = batch->T;
    const uint16_t *position = engine->position ? engine->position + batch->all.own * T : NULL;
    drop(batch, engine->dx, engine->dx, DROPOUT_EMBEDDING, 0);
    embedding_backward(grad(engine, WTE, 0), grad_begun(engine, WPE, 0), engine->dx, batch->tokens, batch->stride,
                       position, batch->B, T, C, batch->type);
    for (size_t b = 0; b < batch->B && batch->mode == GNS_EXACT; b++)
        embedding_example_norms(example_sq(engine, WTE, 0), example_sq(engine, WPE, 0),
                                at(engine, engine->dx, b * T * C), engine->head_at_token + b * T * C,
                                batch->tokens + b * batch->stride, position ? position + b * T : NULL, T, C,
                                engine->dwide /* free now */, batch->type);
}

static int backward(Engine *engine, const Batch *batch, Error *e) {
    const Model *model = engine->config.model;
    int L = model->config.layers;
    memset(engine->dx, 0, value_bytes(batch->type) * batch->N * batch->C);
    for (int l = L - 1; l >= 0; l--) {
        TRY(watch_call(&engine->watch, begins, model_bucket(model, 1 + l), e));
        TRY(next_weights(engine, l, l - 1, e));
        if (l == L - 1) ln_backward(engine, batch, engine->x_final, engine->meanf, engine->rstdf, LNF_W, LNF_B, 0);
        TRY(block_backward(engine, batch, &engine->block[l], l, e));
        TRY(watch_call(&engine->watch, final, model_bucket(model, 1 + l), e));
    }
    embeddings_backward(engine, batch);
    return watch_call(&engine->watch, final, model_bucket(model, 0), e);
}

// ---- The step -------------------------------------------------------------------------------------------------------

static int cpu_begin_step(Engine *engine, Error *e) {
    size_t bytes = (size_t)engine->config.model->tensor_count * sizeof(double);
    memset(engine->grad_sq, 0, bytes);
    memset(engine->example_sq, 0, bytes);
    if (engine->trust_sq) memset(engine->trust_sq, 0, 2 * bytes);
    if (engine->row) memset(engine->row, 0, sizeof *engine->row * (size_t)engine->config.step_rows);
    const size_t sums = (size_t)engine->config.sources * engine->config.model->ln_parameters;
    if (sums) memset(engine->source_sum, 0, sums * sizeof *engine->source_sum);
    if (engine->fp8) memset(engine->amax, 0, fp8_sites(engine) * sizeof *engine->amax);
    engine->loss_sum = engine->nll_sum = 0;
    engine->rows = 0;
    engine->first = true;
    return 0;
}

// Adds each row's mean of loss (B, T) to *sum, and writes it to rows (B) unless `rows` is NULL.
static void add_losses(double *sum, RowResult *rows, const float *loss, size_t B, size_t T) {
    for (size_t b = 0; b < B; b++) {
        double row = 0;
        for (size_t t = 0; t < T; t++) row += loss[b * T + t];
        *sum += row / (double)T;
        if (rows) rows[b].nll = row / (double)T;
    }
}

static int cpu_micro_step(Engine *engine, const uint16_t *tokens, int n, GnsMode mode, Error *e) {
    const Model *model = engine->config.model;
    size_t T = (size_t)engine->config.seq_len;
    Batch batch = batch_of(engine, tokens, T + 1, (size_t)n, T, 0);
    batch.mode = mode, batch.fp8 = engine->fp8;
    batch.dropout = dropout_at(engine->config.dropout, engine->example + batch.all.own, 0);
    assert(n > 0 && n <= engine->config.micro_batch && mode <= engine->config.gns);
    assert(!engine->row || engine->rows + n <= engine->config.step_rows);
    TRY(forward(engine, &batch, e));
    TRY(watch_call(&engine->watch, begins, model_bucket(model, 0), e));
    if (batch.B == 0) grad_begun(engine, WTE, 0);
    const Factors f = head_factors(engine, &batch);
    for (size_t b = 0; b < batch.B && mode == GNS_EXACT; b++) head_example_exact(engine, &batch, f, b);
    if (mode != GNS_EXACT) head_rows(engine, &batch, f, 0, batch.N, grad(engine, WTE, 0), !engine->first);
    TRY(backward(engine, &batch, e));
    RowResult *rows = engine->row ? engine->row + (size_t)engine->rows + batch.all.own : NULL;
    add_losses(&engine->nll_sum, rows, engine->nll, batch.B, T);
    add_losses(&engine->loss_sum, NULL, engine->loss ? engine->loss : engine->nll, batch.B, T);
    engine->rows += n;
    for (int i = 0; i < model->tensor_count; i++)
        if (!gns_measures(&model->tensors[i], mode)) engine->example_sq[i] = NAN;
    engine->first = engine->config.shard_grads;
    engine->example += (uint64_t)n;
    engine->watch = (GradientWatch){NULL, NULL, NULL};
    return 0;
}

static int cpu_result(Engine *engine, StepResult *result, Error *e) {
    size_t bytes = (size_t)engine->config.model->tensor_count * sizeof(double);
    result->loss_sum = engine->loss_sum;
    result->nll_sum = engine->nll_sum;
    memcpy(result->grad_sq, engine->grad_sq, bytes);
    memcpy(result->example_sq, engine->example_sq, bytes);
    if (result->amax) memcpy(result->amax, engine->amax, fp8_sites(engine) * sizeof *engine->amax);
    if (result->row) memcpy(result->row, engine->row, sizeof *engine->row * (size_t)engine->rows);
    const size_t sources = (size_t)engine->config.sources, n = engine->config.model->ln_parameters;
    const float *v = engine->source_sum;
    for (size_t i = 0; i < sources * sources && result->source_gram; i++)
        result->source_gram[i] = dot(v + i / sources * n, v + i % sources * n, n);
    step_result_unscale(result, &engine->config, engine->rows, engine->loss_scale);
    return 0;
}

// ---- Without training -----------------------------------------------------------------------------------------------

static int cpu_eval(Engine *engine, const uint16_t *tokens, int n, int T, float *loss, Error *e) {
    const Batch batch = batch_of(engine, tokens, (size_t)T + 1, (size_t)n, (size_t)T, 0);
    assert(n > 0 && n <= engine->config.micro_batch && T > 0 && T <= engine->config.seq_len);
    TRY(forward(engine, &batch, e));
    head_rows(engine, &batch, head_factors(engine, &batch), 0, batch.N, NULL, false);
    if (batch.N < batch.all.N) memset(loss, 0, batch.all.N * sizeof(float));
    memcpy(loss + batch.all.own * batch.T, engine->nll, batch.N * sizeof(float));
    return 0;
}

static int cpu_logits(Engine *engine, const uint16_t *tokens, int n, float *logits, Error *e) {
    size_t count = (size_t)n, seen = 0;
    // Skip leading tokens that the last call also saw: their keys and values are in memory, unless blocks share qkv.
    // Always compute the last token.
    bool shared = engine->config.model->config.layers > 1 && engine->block[1].qkv == engine->block[0].qkv;
    while (!shared && seen + 1 < count && (int)seen < engine->seen_count && tokens[seen] == engine->seen[seen]) seen++;
    const Batch batch = batch_of(engine, tokens, count, 1, count, seen);
    assert(n > 0 && n <= engine->config.seq_len);
    TRY(forward(engine, &batch, e));
    memcpy(engine->seen, tokens, sizeof *tokens * count);
    engine->seen_count = n;
    if (batch.B == 0) return 0;
    head_logits(engine, head_factors(engine, &batch), count - 1 - seen, 1);
    for (size_t v = 0; v < (size_t)engine->config.model->config.vocab; v++)
        logits[v] = value_get(engine->logits, v, engine->config.dtype);
    return 0;
}

// ---- The engine's life ----------------------------------------------------------------------------------------------

// Measures the CPU. Its speed depends on clock, vector width and other programs, so no table lists it.
static void cpu_device(const EngineConfig *config, bool measure, EngineDevice *device) {
    int threads = engine_thread_count(config);
    *device = (EngineDevice){
        .is_cpu = true,
        .value_bytes = value_bytes(config->dtype),
        .head_bytes = ENGINE_HEAD_BYTES,
        .flops = measure ? calibrate_flops(threads, config->dtype) : 0,
        .bandwidth = measure ? calibrate_copy(threads) : 0,
        .memory_bytes = (double)sysconf(_SC_PHYS_PAGES) * (double)sysconf(_SC_PAGESIZE),
    };
    snprintf(device->name, sizeof device->name, "CPU, %d thread%s", threads, threads == 1 ? "" : "s");
}

static void cpu_destroy(Engine *engine) {
    memory_free(engine->memory);
    memory_free(engine);
}

static int cpu_create(Engine **out, const EngineConfig *config, Error *e) {
    assert(config->seq_len <= config->model->config.context && config->micro_batch > 0);
    TRY(memory_alloc_zero((void **)out, sizeof(Engine), "the engine", e));
    Engine *engine = *out;
    engine->loss_scale = 1;
    omp_set_num_threads(engine_thread_count(config));
    int code = engine_memory_take(engine, config, e);
    if (!code && engine->fp8) memset(engine->exponents, FP8_UNSET, fp8_sites(engine));
    if (!code) return 0;
    cpu_destroy(engine);
    *out = NULL;
    return code;
}

static void cpu_describe(const Engine *engine, char *out, size_t bytes) {
    const char *type = engine->fp8_dweight                  ? "fp8-dw emulated in "
                       : engine->fp8                        ? "fp8 emulated in "
                       : engine->config.dtype == DTYPE_BF16 ? "bf16 by "
                                                            : "";
    snprintf(out, bytes, "CPU, %s%s, %d thread%s, vectors of %d bits", type, engine->matmul.kernel->name,
             engine->matmul.threads, engine->matmul.threads == 1 ? "" : "s", 32 * VEC);
}

static int cpu_check_dtype(Dtype dtype, Error *e) {
    if (dtype == DTYPE_FP16)
        return FAIL(e, ERR_USAGE, "use --dtype bf16 or fp32",
                    "--dtype fp16: only the CUDA trainer has it, made with PRECISION=FP16");
    if (matmul_kernel(dtype)) return 0;
    return FAIL(e, ERR_UNAVAILABLE, "use --dtype fp32",
                "--dtype bf16: this machine lacks the instructions (AVX512-BF16 or AMX of x86-64, BF16 of Armv8.6)");
}

static void cpu_examples(Engine *engine, uint64_t first) { engine->example = first; }
static void cpu_scale_loss(Engine *engine, double scale) { engine->loss_scale = (float)scale; }
static void cpu_exponents(Engine *engine, const int8_t *k) { memcpy(engine->exponents, k, fp8_sites(engine)); }
static void cpu_watch(Engine *engine, const GradientWatch *watch) { engine->watch = *watch; }
static void cpu_watch_weights(Engine *engine, const WeightsWatch *watch) { engine->weights_watch = *watch; }
static size_t cpu_weight_bytes(const Engine *engine) { return value_bytes(engine->config.dtype); }

// The engine that main (run/main_cpu.c) hands to the program. It has no check, tune, tuning, set_tuning, pin, unpin and
// stream: it computes any model, its products have one algorithm, it needs no pinned memory, and its calls return when
// they are done.
const EngineApi cpu_engine = {
    .dtype = DTYPE_FP32,
    .check_dtype = cpu_check_dtype,
    .plan_memory = cpu_plan_memory,
    .device = cpu_device,
    .create = cpu_create,
    .destroy = cpu_destroy,
    .describe = cpu_describe,
    .load = cpu_load,
    .store = cpu_store,
    .hash = cpu_hash,
    .begin_step = cpu_begin_step,
    .examples = cpu_examples,
    .scale_loss = cpu_scale_loss, // only tests call it
    .exponents = cpu_exponents,
    .micro_step = cpu_micro_step,
    .norms = cpu_norms,
    .trust = cpu_trust,
    .update = cpu_update,
    .result = cpu_result,
    .eval = cpu_eval,
    .logits = cpu_logits,
    .watch = cpu_watch,
    .watch_weights = cpu_watch_weights,
    .collect = cpu_collect,
    .own_weights = cpu_own_weights,
    .clear = cpu_clear,
    .buffer = cpu_buffer,
    .weight_bytes = cpu_weight_bytes,
};
