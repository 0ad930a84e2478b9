// train_gpt2: GPT-2 on an NVIDIA GPU, the model of train_gpt2.c behind the same interface (llmc/model/engine.h).
// Weights and activations are `real` (cuda_common.cuh); parameter gradients, master weights and moments are fp32.
//
// Start with llmc/cuda/engine.cuh: shapes, words, kernels of a step, the engine's state. engine_life.cu creates and
// destroys the engine and lays out its memory, engine_state.cu computes norms and updates, loads and stores,
// engine_fp8.cu decides which factors of products are in e4m3.
//
// 1. One stream orders the kernels of a step. In a step the host waits only in cuda_result, and in tokens_send until a
//    staging buffer is free.
// 2. engine->scratch and the matmul workspace are temporary: nothing in them outlives the function that uses them.
// 3. Only cuda_create allocates device memory.
// 4. Every kernel sums in a fixed order, so two runs give the same bits.
#include "cuda/attention.cuh"       // attention_forward, attention_backward
#include "cuda/crossentropy.cuh"    // crossentropy, crossentropy_targets, crossentropy_finish
#include "cuda/decode.cuh"          // decode_linear, decode_attention
#include "cuda/embedding.cuh"       // embedding_*
#include "cuda/engine.cuh"          // Engine, Block, stats_*, fp8_factors; the functions of EngineApi that are not here
#include "cuda/fp8.cuh"             // fp8_cast
#include "cuda/gelu.cuh"            // gelu_forward, bias_backward
#include "cuda/layernorm.cuh"       // layernorm_forward, layernorm_backward
#include "cuda/linear_sm90.cuh"     // Linear, linear_sm90
#include "cuda/matmul.cuh"          // matmul_run, matmul_tune
#include "cuda/reduce.cuh"          // ColumnGradient, column_finish, reduce_*
#include "cuda/weight_gradient.cuh" // weight_gradient
#include "model/arena.h"            // ARENA_ALIGNMENT
#include "model/shard.h"            // shard_weight_place, shard_grad_place

#include <assert.h>
#include <math.h>
#include <string.h>

// ---- A pass ---------------------------------------------------------------------------------------------------------

struct Pass {
    int B, T, N, C;           // B own rows, N = B T
    int first, all;           // first: index of the first own row; all: tokens of all rows (engine.cuh: `all` x T)
    AttentionShape attention; // all rows, own heads
    GnsMode mode;
    Dropout dropout = {};               // dropout of the first of all rows; the layer is not set
    bool fp8 = false, fp8_head = false; // measures amax, and rounds factors that have exponents: in blocks; of logits
};

static Pass pass_of(const Engine *engine, int rows, int T, GnsMode mode) {
    const EngineConfig *c = &engine->config;
    const RankRows own = own_rows(c, rows);
    const int B = (int)own.count, C = c->model->config.channels;
    return {B, T, B * T, C, (int)own.first, rows * T, attention_shape(c, rows, T), mode};
}

static RowDropout dropout_of_rows(const Pass *p, DropoutPlace place, int l) {
    return row_dropout(dropout_at(p->dropout, p->dropout.example + p->first, l), place, p->T);
}

// Returns attention's operands in block l, without those of the backward pass.
static Attention attention_of(Engine *engine, const Pass *p, const Block *k, int l) {
    const AttentionMasks masks = {engine->document_first, engine->document_last,
                                  dropout_at(p->dropout, p->dropout.example, l), dropout_constants(p->dropout),
                                  engine->config.model->first_head};
    return {p->attention, masks, engine->ticket, k->qkv, k->attention, k->lse};
}

// Returns the bias of a weight, or the beta of a gamma: the next tensor in the table.
static TensorKind bias_of(TensorKind w) { return (TensorKind)(w + 1); }

static real *weight(Engine *engine, TensorKind kind, int layer) {
    size_t offset = model_tensor(engine->config.model, kind, layer)->offset;
    return engine->weight + shard_weight_place(&engine->config, offset);
}
static float *grad(Engine *engine, TensorKind kind, int layer) {
    return engine->grad + shard_grad_place(&engine->config, model_tensor(engine->config.model, kind, layer)->offset);
}
static double *example_sq(Engine *engine, TensorKind kind, int layer) {
    const Model *model = engine->config.model;
    return stats_row(engine->stats, model, STATS_EXAMPLE_SQ) + (model_tensor(model, kind, layer) - model->tensors);
}

// Returns the destination of a vector's gradient: its sum, and per-example squares if `mode` measures them.
static ColumnGradient column_gradient(Engine *engine, const Pass *p, TensorKind kind, int layer) {
    const Model *model = engine->config.model;
    const Tensor *t = model_tensor(model, kind, layer);
    float *rows = engine->keeps_rows && t->group == GROUP_LN ? engine->ln_rows + t->ln_place : NULL;
    return {grad(engine, kind, layer), gns_measures(t, p->mode) ? example_sq(engine, kind, layer) : NULL, engine->first,
            rows, model->ln_parameters};
}

// Return own rows of tokens (all rows, T + 1), and of embedding_documents (all rows, T) or NULL.
static const uint16_t *own_tokens(const Pass *p, const uint16_t *tokens) {
    return tokens + (size_t)p->first * (p->T + 1);
}
static const uint16_t *own_documents(const Pass *p, const uint16_t *first) {
    return first ? first + (size_t)p->first * p->T : NULL;
}

// Copies tokens to the device; the caller may reuse their memory at once. Waits until the staging buffer's last copy is
// done. B > 0: also copies the documents and sources of B rows; 0: all tokens are one document.
static int tokens_send(Engine *engine, const uint16_t *tokens, size_t count, int B, Error *e) {
    const size_t N = B && engine->config.document_mask ? count - B : 0;
    const EngineConfig *c = &engine->config;
    const int slot = engine->slot = (engine->slot + 1) % TOKEN_SLOTS, rows = c->sources ? B : 0;
    uint16_t *staged = engine->staged[slot], *first = staged + count;
    CUDA_TRY(cudaEventSynchronize(engine->sent[slot]), e);
    memcpy(staged, tokens, count * sizeof *tokens);
    if (N) embedding_documents(first, first + N, tokens, engine->config.separator, B, (int)(N / B));
    engine->document_first = N ? engine->tokens + count : NULL;
    engine->document_last = N ? engine->document_first + N : NULL;
    for (int b = 0; b < rows; b++) first[2 * N + b] = (uint16_t)c->source(c->source_data, engine->example + b);
    engine->source = engine->tokens + count + 2 * N;
    TRY(copy_in(engine, engine->tokens, staged, (count + 2 * N + rows) * sizeof *tokens, e));
    return CUDA_CALL(cudaEventRecord(engine->sent[slot], engine->stream), e);
}

// ---- Exchanges between the ranks of a tensor group (engine.cuh) -----------------------------------------------------
// No-ops where the model is whole.

static bool is_cut(const Engine *engine) { return tensor_ranks(&engine->config) > 1; }

// Returns own rows of x (all, C).
static real *own_part(const Pass *p, real *x) { return x + (size_t)p->first * p->T * p->C; }

// Gathers all ranks' rows of x (all, C).
static int rows_gather(Engine *engine, const Pass *p, real *x, Error *e) {
    const TensorRanks *g = &engine->config.tensor;
    if (!is_cut(engine)) return 0;
    return g->gather_rows(g->context, x, p->attention.B, (size_t)p->T * p->C, REAL_DTYPE, e);
}

// own (N, C) = sum over ranks of engine->exchange (all, C).
static int rows_reduce(Engine *engine, const Pass *p, real *own, Error *e) {
    const TensorRanks *g = &engine->config.tensor;
    if (!is_cut(engine)) return 0;
    return g->reduce_rows(g->context, own, engine->exchange, p->attention.B, (size_t)p->T * p->C, REAL_DTYPE, e);
}

// ---- Linear layers: y (all, out) = x (all, in) W (in, out) + b ------------------------------------------------------

// back: y (all, in) = x (all, out) W^T instead, without the bias.
static Linear linear_of(Engine *engine, const Pass *p, LinearEpilogue epilogue, real *y, const real *x, TensorKind w,
                        int layer, bool back = false) {
    const Tensor *t = model_tensor(engine->config.model, w, layer);
    const int in = (int)t->rows, out = (int)t->columns;
    Linear l = {.epilogue = epilogue, .rows = p->all, .in = back ? out : in, .out = back ? in : out, .x = x};
    l.weight = weight(engine, w, layer), l.bias = back ? NULL : weight(engine, bias_of(w), layer);
    l.y = y, l.ticket = engine->ticket;
    fp8_factors(engine, p->fp8, &l, back ? fp8_dy_site(w) : fp8_x_site(w), layer);
    return l;
}

// Runs LINEAR_GELU, LINEAR_RESIDUAL, LINEAR_DGELU or LINEAR_BIAS, and writes l.copy. Without linear_sm90, cuBLASLt and
// the kernels of gelu.cuh run. cuBLASLt also runs input gradients (LINEAR_BIAS, back), and fcproj with its residual,
// which takes 502, 419, 549 us (d12, d24, d48; H200). With linear_sm90 it takes 503, 470, 547 us.
static int linear_run(Engine *engine, const Linear &l, Error *e) {
    const bool residual = l.epilogue == LINEAR_RESIDUAL, dgelu = l.epilogue == LINEAR_DGELU, back = !l.bias;
    const bool ours = l.x8 || (engine->fused_linear && (dgelu || !back) && !(residual && l.in > l.out));
    const size_t n = (size_t)l.rows * l.out;
    MatmulShape shape = {.m = l.rows, .n = l.out, .k = l.in, .transpose_b = back, .accumulate = residual};
    shape.bias = !back;
    if (ours) TRY(linear_sm90(l, engine->stream, e));
    else TRY(matmul_run(engine->matmul, shape, {l.y, l.x, l.weight, l.bias, 1, 1, residual ? l.extra : NULL}, e));
    if (!ours && dgelu)
        TRY(bias_backward(l.columns, l.y, l.slope, l.rows / l.T, l.T, l.out, l.jobs, engine->stream, e));
    if (!ours && l.epilogue == LINEAR_GELU) TRY(gelu_forward(l.y, l.slope, l.y, n, engine->stream, e));
    return l.x8 ? 0 : fp8_cast(l.copy, l.y, n, engine->stream, e);
}

// True if the product that ends a branch also adds the residual: the branch is neither masked nor summed over ranks.
static bool adds_residual(const Engine *engine, const Pass *p) {
    return engine->fused_linear && !p->dropout.below && !is_cut(engine);
}

// Ends a branch: sum = residual + x W + b if adds_residual; else delta = x W + b, which ln_forward adds.
static int linear_residual(Engine *engine, const Pass *p, real *sum, const real *residual, const real *x, TensorKind w,
                           int layer, Error *e) {
    const bool adds = adds_residual(engine, p);
    Linear l = linear_of(engine, p, adds ? LINEAR_RESIDUAL : LINEAR_BIAS, adds ? sum : engine->delta, x, w, layer);
    l.extra = residual;
    if (!is_cut(engine)) return linear_run(engine, l, e);
    MatmulShape shape = {.m = l.rows, .n = l.out, .k = l.in};
    shape.bias = engine->config.tensor.rank == 0; // the sum over ranks includes the bias once
    TRY(matmul_run(engine->matmul, shape, {engine->exchange, l.x, l.weight, l.bias}, e));
    return rows_reduce(engine, p, engine->delta, e);
}

// dx (N, in) = own rows of dy W^T, summed over the group.
static int linear_dinput_own(Engine *engine, const Pass *p, real *dx, const real *dy, TensorKind w, int layer,
                             Error *e) {
    real *y = is_cut(engine) ? engine->exchange : dx;
    TRY(linear_run(engine, linear_of(engine, p, LINEAR_BIAS, y, dy, w, layer, true), e));
    return rows_reduce(engine, p, dx, e);
}

// dy is the gradient of w's output. True if the kernel that writes dy also sums its columns, the gradient of w's bias.
static bool bias_is_summed(const Engine *engine, const Pass *p, TensorKind w) {
    if (w == QKV_W) return false;
    if (w == FC_W) return !engine->fused_linear || linear_sm90_sums(p->T);
    return true;
}

// True if weight_gradient computes the gradient of w, and of its bias unless bias_is_summed. Without per-example norms
// it runs only if it saves a pass over dy for the bias, and if dW's rows are whole tiles. cuBLASLt with bias sums takes
// 1.18 times as long for d12's qkv, and 0.87 times as long for d48's qkv, whose 1,600 rows are 12.5 tiles (H200).
static bool fuses(const Engine *engine, const Pass *p, TensorKind w) {
    const Tensor *t = model_tensor(engine->config.model, w, 0);
    return engine_fuses(engine) &&
           (p->mode == GNS_EXACT || (!bias_is_summed(engine, p, w) && t->rows % WEIGHT_GRADIENT_TILE == 0));
}

// g.dw += x^T dy; with GNS_EXACT also fills g.squares and g.rows. Without weight_gradient, exact norms compute every
// x_b^T dy_b: as many at a time as example_grad holds, or one at a time if g.rows is set.
static int matrix_gradient(Engine *engine, const Pass *p, TensorKind w, const WeightGradient &g, const real *x,
                           const real *dy, WeightGradientShape s, Error *e) {
    const size_t count = (size_t)s.in * s.out;
    const int most = g.rows ? 1 : (int)(model_tensor_largest(engine->config.model) / count);
    MatmulShape shape = {.m = s.in, .n = s.out, .k = s.B * s.T, .transpose_a = true, .out_float = true};
    if (fuses(engine, p, w)) return weight_gradient(g, x, dy, s, engine->pairs, engine->scratch, engine->stream, e);
    shape.accumulate = !g.first && p->mode != GNS_EXACT;
    if (p->mode != GNS_EXACT) return matmul_run(engine->matmul, shape, {g.dw, x, dy}, e);
    if (g.first) CUDA_TRY(cudaMemsetAsync(g.dw, 0, count * sizeof *g.dw, engine->stream), e);
    shape.k = s.T, shape.stride_a = (int64_t)s.T * s.in, shape.stride_b = (int64_t)s.T * s.out;
    shape.stride_out = (int64_t)count;
    for (int b = 0; b < s.B; b += most) {
        shape.batch = s.B - b < most ? s.B - b : most;
        TRY(matmul_run(engine->matmul, shape, {engine->example_grad, x + b * shape.stride_a, dy + b * shape.stride_b},
                       e));
        TRY(reduce_examples(g.dw, g.squares, engine->example_grad, shape.batch, count, engine->scratch, engine->stream,
                            e));
        if (g.rows)
            TRY(embedding_gather(g.rows + b * shape.stride_b, engine->example_grad, g.row_at + (size_t)b * s.in, s.in,
                                 s.out, engine->stream, e));
    }
    return 0;
}

// Computes w's gradient. On 16-bit factors weight_gradient also computes w's bias gradient, unless bias_is_summed.
static int linear_dweight(Engine *engine, const Pass *p, const real *x, const real *dy, TensorKind w, int layer,
                          Error *e) {
    const Tensor *t = model_tensor(engine->config.model, w, layer);
    const WeightGradientShape s = {p->attention.B, p->T, (int)t->rows, (int)t->columns};
    WeightGradient g = {grad(engine, w, layer), engine->first};
    if (p->mode == GNS_EXACT) g.squares = example_sq(engine, w, layer);
    if (fp8_dweight_rounds(engine, p->fp8, w, layer)) return fp8_dweight(engine, g, x, w, layer, s, e);
    g.jobs = &engine->columns;
    if (!bias_is_summed(engine, p, w)) g.bias = column_gradient(engine, p, bias_of(w), layer);
    return matrix_gradient(engine, p, w, g, x, dy, s, e);
}

// ---- Transfers between ranks ----------------------------------------------------------------------------------------

// Rules for the start of bucket transfers, which overlap this rank's kernels. NCCL holds 24 multiprocessors during a
// transfer. A kernel whose blocks draw tiles (attention, linear_sm90, cuBLASLt's persistent products) loses only these
// multiprocessors. A kernel with tiles assigned at launch (weight gradients on Hopper) takes 1.5 times as long. So:
// 1. Send block l + 1's gradients right before attention_backward of block l.
// 2. Request block l + 1's weights right after attention_forward of block l, before persistent products.
// 3. With shard_grads, send gradients at their block's end: the next block needs their memory.
// 4. With shard_weights, request block l - 1's weights right before attention_backward of block l. They overwrite the
//    weights of block l + 1, whose last reader is queued by then.

static int weights_await(Engine *engine, int bucket, Error *e) {
    return watch_call(&engine->weights_watch, await, model_bucket(engine->config.model, bucket), e);
}

// Awaits block l's weights. fp8 then copies the weights: once per step, or with shard_weights once per pass.
static int block_await(Engine *engine, const Pass *p, int l, Error *e) {
    TRY(weights_await(engine, 1 + l, e));
    return fp8_copy_weights(engine, p->fp8, l, e);
}

// Requests a bucket's weights; no-op unless the bucket is a block's.
static int weights_soon(Engine *engine, int bucket, Error *e) {
    const Model *model = engine->config.model;
    if (bucket <= 0 || bucket >= model_bucket_count(model)) return 0;
    return watch_call(&engine->weights_watch, soon, model_bucket(model, bucket), e);
}

// True if rule 1 sends block l's gradients; false if they are sent at the block's end, or l = L.
static bool final_comes_later(const Engine *engine, int l) {
    return l > 0 && l < engine->config.model->config.layers && !engine->config.shard_grads;
}

// ---- Forward --------------------------------------------------------------------------------------------------------

// Returns the layer of the last branch that was added to the input of LayerNorm w of block l; -1: only the embedding.
static int branch_before(const Engine *engine, TensorKind w, int l) {
    return w == LNF_W ? engine->config.model->config.layers - 1 : w == LN2_W ? l : l - 1;
}

// Returns the operands of LayerNorm w of block l for an input that is already summed.
static LayerNorm norm_of(Engine *engine, const Pass *p, TensorKind w, int l) {
    const Block *k = &engine->block[l];
    const int layer = branch_before(engine, w, l);
    const DropoutPlace place = w == LN2_W ? DROPOUT_ATTENTION : layer < 0 ? DROPOUT_EMBEDDING : DROPOUT_MLP;
    LayerNorm n = {};
    n.sum = k->x, n.out = own_part(p, k->ln1), n.mean = k->mean1, n.rstd = k->rstd1;
    if (w == LN2_W) n.sum = k->x_mid, n.out = own_part(p, k->ln2), n.mean = k->mean2, n.rstd = k->rstd2;
    if (w == LNF_W) n.sum = engine->x_final, n.out = engine->lnf, n.mean = engine->meanf, n.rstd = engine->rstdf;
    n.a = n.sum, n.gamma = weight(engine, w, l), n.beta = weight(engine, bias_of(w), l);
    n.drop = dropout_of_rows(p, place, max(layer, 0)), n.N = p->N, n.C = p->C;
    return n;
}

// residual: argument of the last linear_residual. Unless adds_residual, that call wrote delta; then this function adds
// residual and delta. residual NULL: x is already the sum.
static int ln_forward(Engine *engine, const Pass *p, TensorKind w, int l, const real *residual, Error *e) {
    LayerNorm n = norm_of(engine, p, w, l);
    const int L = engine->config.model->config.layers;
    if (residual && !adds_residual(engine, p)) n.a = residual, n.b = engine->delta;
    if (w == LNF_W) n.copy = fp8_copy_of(engine, p->fp8_head, FP8_LN2, L);
    else n.copy = fp8_copy_of(engine, p->fp8, w == LN1_W ? FP8_LN1 : FP8_LN2, l);
    return p->B ? layernorm_forward(n, engine->stream, e) : 0;
}

// Computes k->gelu from k->x and own rows of k->ln1. soon: bucket whose weights to request; 0: none.
static int block_forward(Engine *engine, const Pass *p, const Block *k, int l, int soon, Error *e) {
    const size_t n = (size_t)p->all * p->attention.C(), wide = p->all * engine->config.model->mlp_width;
    TRY(rows_gather(engine, p, k->ln1, e));
    TRY(linear_run(engine, linear_of(engine, p, LINEAR_BIAS, k->qkv, k->ln1, QKV_W, l), e));
    TRY(attention_forward(attention_of(engine, p, k, l), engine->stream, e));
    TRY(fp8_cast(fp8_copy_of(engine, p->fp8, FP8_ATTENTION, l), k->attention, n, engine->stream, e));
    TRY(weights_soon(engine, soon, e));
    TRY(linear_residual(engine, p, k->x_mid, k->x, k->attention, PROJ_W, l, e));
    TRY(ln_forward(engine, p, LN2_W, l, k->x, e));
    TRY(rows_gather(engine, p, k->ln2, e));
    Linear fc = linear_of(engine, p, k->fc ? LINEAR_BIAS : LINEAR_GELU, k->fc ? k->fc : k->gelu, k->ln2, FC_W, l);
    fc.slope = k->slope;
    const Fp8Copy copy = fp8_copy_of(engine, p->fp8, FP8_GELU, l);
    if (!k->fc) fc.copy = copy;
    TRY(linear_run(engine, fc, e));
    if (!k->fc) return 0;
    TRY(gelu_forward(k->gelu, k->slope, k->fc, wide, engine->stream, e));
    return fp8_cast(copy, k->gelu, wide, engine->stream, e);
}

// Computes lnf (B, T, C) from engine->tokens (all rows, T + 1).
static int forward(Engine *engine, const Pass *p, Error *e) {
    const int L = engine->config.model->config.layers;
    engine->seen_count = 0;
    TRY(weights_await(engine, 0, e));
    if (engine->config.shard_weights) TRY(weights_soon(engine, 1, e));
    if (p->B)
        TRY(embedding_forward(engine->block[0].x, own_tokens(p, engine->tokens),
                              own_documents(p, engine->document_first), weight(engine, WTE, 0), weight(engine, WPE, 0),
                              dropout_of_rows(p, DROPOUT_EMBEDDING, 0), p->B, p->C, engine->stream, e));
    TRY(block_await(engine, p, 0, e));
    TRY(ln_forward(engine, p, LN1_W, 0, NULL, e));
    for (int l = 0; l < L; l++) {
        const Block *k = &engine->block[l];
        real *sum = l == L - 1 ? engine->x_final : k[1].x;
        TRY(block_forward(engine, p, k, l, l + 2, e));
        TRY(linear_residual(engine, p, sum, k->x_mid, k->gelu, FCPROJ_W, l, e));
        if (l == L - 1) break;
        TRY(block_await(engine, p, l + 1, e));
        TRY(ln_forward(engine, p, LN1_W, l + 1, k->x_mid, e));
    }
    return ln_forward(engine, p, LNF_W, 0, engine->block[L - 1].x_mid, e);
}

// ---- The head: logits, loss and, in training, its gradient, chunk by chunk ------------------------------------------

// logits (Vp) of a row, in fp32.
static int row_logits(Engine *engine, size_t row, Error *e) {
    int Vp = engine->config.model->vocab_padded, C = engine->config.model->config.channels;
    const MatmulShape shape = {.m = 1, .n = Vp, .k = C, .transpose_b = true, .out_float = true};
    return matmul_run(engine->matmul, shape, {engine->logits, engine->lnf + row * C, weight(engine, WTE, 0)}, e);
}

// Returns the product k.logits (R, Vp) = lnf wte^T.
static Linear head_linear(Engine *engine, const Pass *p, LinearEpilogue epilogue, const LogitRows &k) {
    const size_t first = (size_t)k.row0 * p->C;
    Linear l = {.epilogue = epilogue, .rows = k.R, .in = p->C, .out = k.Vp, .x = engine->lnf + first};
    l.weight = weight(engine, WTE, 0), l.y = k.logits, l.ticket = engine->ticket;
    fp8_factors(engine, p->fp8_head, &l, FP8_LN2, engine->config.model->config.layers);
    if (l.x8) l.x8 += first;
    return l;
}

// Adds the head's gradient of wte over examples [b, b + n) to dwte: the sum of each example's U_i (Vp, C). With
// GNS_EXACT also adds |U_i|^2 to wte's squares, and copies U_i's rows for the tokens of example i to head_at_token.
static int head_dweight(Engine *engine, const Pass *p, int b, int n, Error *e) {
    const int T = p->T, C = p->C, Vp = (int)engine->config.model->vocab_padded;
    const size_t first = (size_t)b * T;
    WeightGradient g = {grad(engine, WTE, 0), engine->first && b == 0};
    if (p->mode == GNS_EXACT) {
        TRY(embedding_rows(engine->head_row_at, own_tokens(p, engine->tokens) + first + b, n, T, Vp, engine->stream,
                           e));
        g.squares = example_sq(engine, WTE, 0);
        g.row_at = engine->head_row_at, g.rows = engine->head_at_token + first * C;
    }
    return matrix_gradient(engine, p, WTE, g, engine->logits, engine->lnf + first * C, {n, T, Vp, C}, e);
}

// Computes the losses of k's rows; in training also dy, the gradient of lnf. On return logits hold exponentials, and
// lnf is scaled so that logits^T lnf is the gradient of wte. scratch: two values per row, then row sums by tile.
static int head_exponentials(Engine *engine, const Pass *p, const LogitRows &k, Error *e) {
    const int C = p->C;
    real *lnf = engine->lnf + (size_t)k.row0 * C, *wte = weight(engine, WTE, 0);
    float *targets = (float *)engine->scratch, *factors = targets + k.R, *sums = factors + k.R;
    Linear l = head_linear(engine, p, LINEAR_SOFTMAX, k);
    l.row_values = targets, l.row_sums = sums, l.counted = k.V;
    Linear d = {.epilogue = LINEAR_SCALED, .rows = k.R, .in = k.Vp, .out = C, .x = k.logits, .weight = wte};
    d.y = engine->dy + (size_t)k.row0 * C, d.row_values = factors;
    d.ticket = engine->ticket;
    TRY(crossentropy_targets(targets, lnf, wte, k, C, engine->stream, e));
    TRY(linear_sm90(l, engine->stream, e));
    TRY(crossentropy_finish({k, factors, lnf, sums, linear_sm90_tiles(k.Vp), C}, engine->stream, e));
    return k.scale > 0 ? linear_sm90(d, engine->stream, e) : 0;
}

// Computes the losses of k's rows; in training also the gradients of logits, in place, and of lnf (dy).
static int head_logits_loss(Engine *engine, const Pass *p, const LogitRows &k, Error *e) {
    const int C = p->C;
    TRY(linear_run(engine, head_linear(engine, p, LINEAR_BIAS, k), e));
    TRY(crossentropy(k, engine->stream, e));
    if (k.scale == 0) return 0;
    return matmul_run(engine->matmul, {.m = k.R, .n = C, .k = k.Vp}, // dlnf (R, C) = dlogits (R, Vp) wte (Vp, C)
                      {engine->dy + (size_t)k.row0 * C, k.logits, weight(engine, WTE, 0)}, e);
}

// Computes the losses of the pass; in training also dy, the gradient of lnf, and the head's gradient of wte.
static int head_pass(Engine *engine, const Pass *p, bool train, Error *e) {
    const Model *model = engine->config.model;
    const int chunk = engine_head_examples(&engine->config);
    // Storing exponentials instead of logits saves a pass. fp16 cannot hold them; label smoothing needs the logits.
    const bool exponentials = REAL_DTYPE == DTYPE_BF16 && engine->fused_linear && !(train && engine->smoothed);
    LogitRows k = {.smoothing = engine->config.label_smoothing, .logits = engine->logits};
    k.tokens = own_tokens(p, engine->tokens);
    k.T = p->T, k.V = model->config.vocab, k.Vp = (int)model->vocab_padded, k.scale = train ? engine->loss_scale : 0;
    TRY(fp8_copy_weights(engine, p->fp8_head, model->config.layers, e));
    for (int b = 0; b < p->B; b += chunk) {
        const int n = p->B - b < chunk ? p->B - b : chunk;
        k.row0 = b * p->T, k.R = n * p->T, k.losses = engine->loss + k.row0;
        if (train && engine->smoothed) k.smoothed = engine->smoothed + k.row0;
        TRY((exponentials ? head_exponentials : head_logits_loss)(engine, p, k, e));
        if (train) TRY(head_dweight(engine, p, b, n, e));
    }
    return 0;
}

// ---- Backward -------------------------------------------------------------------------------------------------------

// Returns the gradient of the branch (or embedding) that forward added last to the residual stream: dx. With dropout it
// lies in dy instead, until dy is overwritten.
static real *branch_gradient(Engine *engine, const Pass *p) { return p->dropout.below ? engine->dy : engine->dx; }

// *all = branch_gradient of all rows; valid until the next exchange.
static int branch_gather(Engine *engine, const Pass *p, real **all, Error *e) {
    *all = branch_gradient(engine, p);
    if (!is_cut(engine)) return 0;
    const size_t bytes = (size_t)p->N * p->C * sizeof(real);
    real *own = *all;
    *all = engine->exchange;
    CUDA_TRY(cudaMemcpyAsync(own_part(p, *all), own, bytes, cudaMemcpyDeviceToDevice, engine->stream), e);
    return rows_gather(engine, p, *all, e);
}

// Backpropagates dy through y = LN(x). Adds to the gradients of gamma and beta, and to dx, but ln_f overwrites dx. Also
// sums branch_gradient's columns for the bias of the preceding branch.
static int ln_backward(Engine *engine, const Pass *p, TensorKind w, int l, Error *e) {
    const LayerNorm n = norm_of(engine, p, w, l);
    const int layer = branch_before(engine, w, l);
    ColumnGradient gradients[] = {column_gradient(engine, p, w, l), column_gradient(engine, p, bias_of(w), l), {}};
    LayerNormBackward k = {engine->dx, engine->dy, n.sum, n.mean, n.rstd, n.gamma};
    if (!p->B) return 0;
    k.C = p->C, k.accumulate = w != LNF_W, k.dbranch = engine->dy, k.drop = n.drop;
    if (layer >= 0) {
        gradients[2] = column_gradient(engine, p, w == LN2_W ? PROJ_B : FCPROJ_B, layer);
        k.copy = fp8_copy_of(engine, p->fp8, w == LN2_W ? FP8_DPROJ : FP8_DFCPROJ, layer);
    }
    return layernorm_backward(k, gradients, p->B, &engine->columns, engine->stream, e);
}

// Computes the gradient of w's bias, the column sums of dwide (all, columns), unless another kernel does.
static int bias_dwide(Engine *engine, const Pass *p, TensorKind w, int l, int columns, Error *e) {
    if (bias_is_summed(engine, p, w)) return 0;
    if (fuses(engine, p, w) && !fp8_dweight_rounds(engine, p->fp8, w, l)) return 0;
    return bias_backward(column_gradient(engine, p, bias_of(w), l), engine->dwide, NULL, p->attention.B, p->T, columns,
                         &engine->columns, engine->stream, e);
}

// On entry engine->dx is the gradient of the block's output, on return the gradient of its input.
static int block_backward(Engine *engine, const Pass *p, const Block *k, int l, Error *e) {
    real *dy = engine->dy, *dwide = engine->dwide, *branch;
    const int A = p->attention.C(), F = (int)engine->config.model->mlp_width;
    // dattention lies in dy or, if dy holds branch_gradient or only own rows, behind dqkv (all, 3A) in dwide.
    const bool behind = p->dropout.below || is_cut(engine);
    real *dattention = behind ? dwide + round_up((size_t)p->all * 3 * A, ARENA_ALIGNMENT) : dy;
    // MLP
    TRY(branch_gather(engine, p, &branch, e));
    TRY(linear_dweight(engine, p, k->gelu, branch, FCPROJ_W, l, e));
    Linear wide = linear_of(engine, p, LINEAR_DGELU, dwide, branch, FCPROJ_W, l, true);
    wide.slope = k->slope, wide.T = p->T, wide.jobs = &engine->columns;
    if (bias_is_summed(engine, p, FC_W)) wide.columns = column_gradient(engine, p, FC_B, l);
    wide.copy = fp8_copy_of(engine, p->fp8, FP8_DFC, l);
    TRY(linear_run(engine, wide, e));
    TRY(bias_dwide(engine, p, FC_W, l, F, e));
    TRY(linear_dweight(engine, p, k->ln2, dwide, FC_W, l, e));
    TRY(linear_dinput_own(engine, p, dy, dwide, FC_W, l, e));
    TRY(ln_backward(engine, p, LN2_W, l, e));
    // attention
    TRY(branch_gather(engine, p, &branch, e));
    TRY(linear_dweight(engine, p, k->attention, branch, PROJ_W, l, e));
    TRY(linear_run(engine, linear_of(engine, p, LINEAR_BIAS, dattention, branch, PROJ_W, l, true), e));
    if (final_comes_later(engine, l + 1))
        TRY(watch_call(&engine->watch, final, model_bucket(engine->config.model, l + 2), e)); // sends block l + 1
    if (engine->config.shard_weights) TRY(weights_soon(engine, l, e));                        // requests block l - 1
    const bool rounded = fp8_dweight_rounds(engine, p->fp8, QKV_W, l);
    Attention attention = attention_of(engine, p, k, l);
    attention.dout = dattention, attention.dqkv = dwide, attention.workspace = engine->scratch;
    TRY(attention_backward(attention, engine->stream, e));
    if (rounded) TRY(fp8_copy_dqkv(engine, dwide, column_gradient(engine, p, QKV_B, l), l, p->B, p->T, e));
    else {
        TRY(fp8_cast(fp8_copy_of(engine, p->fp8, FP8_DQKV, l), dwide, (size_t)p->all * 3 * A, engine->stream, e));
        TRY(bias_dwide(engine, p, QKV_W, l, 3 * A, e));
    }
    TRY(linear_dweight(engine, p, k->ln1, dwide, QKV_W, l, e));
    TRY(linear_dinput_own(engine, p, dy, dwide, QKV_W, l, e));
    // ln_backward writes block l - 1's first gradient, fcproj's bias.
    if (l > 0) TRY(watch_call(&engine->watch, begins, model_bucket(engine->config.model, l), e));
    TRY(ln_backward(engine, p, LN1_W, l, e));
    return column_finish(&engine->columns, engine->stream, e);
}

// Adds branch_gradient to the gradient of w: by token for WTE, by position in the document for WPE. The host sorts
// while the device runs queued kernels.
static int rows_backward(Engine *engine, const Pass *p, TensorKind w, Error *e) {
    const int slot = engine->slot, B = p->B, T = p->T, C = p->C, N = p->N;
    const uint16_t *staged = engine->staged[slot];
    const uint16_t *first = engine->document_first ? own_documents(p, staged + p->all + p->attention.B) : NULL;
    const real *dx = branch_gradient(engine, p);
    uint32_t *sorted = engine->staged_sorted[slot] + (w == WPE ? 4 * (size_t)N : 0);
    embedding_sort(sorted, w == WTE ? own_tokens(p, staged) : NULL, first, B, T);
    TRY(copy_in(engine, engine->sorted, sorted, 4 * (size_t)N * sizeof *sorted, e));
    CUDA_TRY(cudaEventRecord(engine->sent[slot], engine->stream), e);
    TRY(embedding_backward(grad(engine, w, 0), dx, embedding_order(engine->sorted, false, N), B, T, C, engine->scratch,
                           engine->stream, e));
    if (p->mode != GNS_EXACT) return 0;
    return embedding_example_squares(example_sq(engine, w, 0), w == WTE ? engine->stats + STAT_CROSS : NULL, dx,
                                     w == WTE ? engine->head_at_token : NULL, embedding_order(engine->sorted, true, N),
                                     B, T, C, engine->scratch, engine->stream, e);
}

// Adds the gradients of wte and wpe. The head has already added U to wte's gradient and |U|^2 to its squares
// (embedding.cuh). cuda_result adds 2 <E, U>.
static int embeddings_backward(Engine *engine, const Pass *p, Error *e) {
    if (!p->B) return 0;
    if (engine->first) TRY(cuda_clear(engine, tensor_range(model_tensor(engine->config.model, WPE, 0)), e));
    TRY(rows_backward(engine, p, WPE, e));
    return rows_backward(engine, p, WTE, e);
}

static int backward(Engine *engine, const Pass *p, Error *e) {
    const Model *model = engine->config.model;
    const int L = model->config.layers;
    TRY(watch_call(&engine->watch, begins, model_bucket(model, L), e));
    TRY(block_await(engine, p, L - 1, e)); // the last block's bucket also holds ln_f
    TRY(ln_backward(engine, p, LNF_W, 0, e));
    TRY(column_finish(&engine->columns, engine->stream, e));
    for (int l = L - 1; l >= 0; l--) {
        const Block *k = &engine->block[l];
        const Recompute recompute = l < L - 1 ? engine->config.recompute : RECOMPUTE_NONE;
        TRY(block_await(engine, p, l, e));
        if (recompute == RECOMPUTE_GELU)
            TRY(gelu_forward(k->gelu, k->slope, k->fc, p->all * engine->config.model->mlp_width, engine->stream, e));
        if (recompute == RECOMPUTE_BLOCK) TRY(ln_forward(engine, p, LN1_W, l, NULL, e));
        if (recompute == RECOMPUTE_BLOCK) TRY(block_forward(engine, p, k, l, 0, e));
        TRY(block_backward(engine, p, k, l, e));
        if (!final_comes_later(engine, l)) TRY(watch_call(&engine->watch, final, model_bucket(model, 1 + l), e));
    }
    TRY(embeddings_backward(engine, p, e));
    return watch_call(&engine->watch, final, model_bucket(model, 0), e);
}

// ---- The step -------------------------------------------------------------------------------------------------------

static int cuda_begin_step(Engine *engine, Error *e) {
    const Model *model = engine->config.model;
    CUDA_TRY(cudaMemsetAsync(engine->stats, 0, stats_count(&engine->config) * sizeof(double), engine->stream), e);
    if (engine->trust)
        CUDA_TRY(cudaMemsetAsync(engine->trust, 0, 2 * model->tensor_count * sizeof(double), engine->stream), e);
    const size_t sums = engine->config.sources * model->ln_parameters;
    if (sums) CUDA_TRY(cudaMemsetAsync(engine->source_sum, 0, sums * sizeof(float), engine->stream), e);
    engine->mode = GNS_EXACT;
    engine->rows = 0;
    engine->copied = -1;
    engine->first = true;
    engine->stats_sent = engine->scaled = false;
    if (!engine->measures) return 0;
    return copy_in(engine, engine->exponent_there, engine->exponent, engine_sites(&engine->config), e);
}

// Call after the last step's result, when that step's copy of `exponent` to the device is done.
static void cuda_exponents(Engine *engine, const int8_t *k) {
    engine->measures = k != NULL;
    if (k) memcpy(engine->exponent, k, engine_sites(&engine->config));
}

static int cuda_micro_step(Engine *engine, const uint16_t *tokens, int n, GnsMode mode, Error *e) {
    const EngineConfig *c = &engine->config;
    Pass p = pass_of(engine, n, c->seq_len, mode);
    p.dropout = dropout_at(c->dropout, engine->example, 0);
    p.fp8 = engine->measures, p.fp8_head = p.fp8 && c->fp8_head;
    assert(n > 0 && n <= c->micro_batch && mode <= c->gns);
    engine->keeps_rows = engine->rows + n <= c->step_rows; // false in cuda_tune, which exceeds step_rows
    TRY(tokens_send(engine, tokens, (size_t)n * (p.T + 1), n, e));
    TRY(forward(engine, &p, e));
    TRY(watch_call(&engine->watch, begins, model_bucket(engine->config.model, 0), e));
    if (!p.B && engine->first) TRY(cuda_clear(engine, model_bucket(engine->config.model, 0), e));
    TRY(head_pass(engine, &p, true, e));
    TRY(backward(engine, &p, e));
    engine->stats_sent = engine->scaled = false;
    TRY(reduce_sum(engine->stats + STAT_LOSS, engine->loss, 1, p.N, engine->stream, e));
    if (engine->smoothed) TRY(reduce_sum(engine->stats + STAT_SMOOTHED, engine->smoothed, 1, p.N, engine->stream, e));
    if (engine->keeps_rows && p.B) { // own rows' squares and losses, and sums of LayerNorm gradients by source
        double *sq = engine->stats + stats_of_rows(c) + engine->rows + p.first;
        TRY(reduce_products(sq, engine->ln_rows, p.B, 1, c->model->ln_parameters, engine->stream, e));
        TRY(reduce_sum(sq + c->step_rows, engine->loss, p.B, p.T, engine->stream, e));
        if (c->sources)
            TRY(reduce_add(engine->source_sum, engine->ln_rows, c->model->ln_parameters, false, engine->stream, e, p.B,
                           engine->source + p.first));
    }
    engine->rows += n;
    engine->example += (uint64_t)n;
    if (mode < engine->mode) engine->mode = mode;
    engine->first = engine->config.shard_grads;
    engine->watch = {};
    return 0;
}

// Times every product of cuBLASLt in a micro-step of each kind: one overwrites the gradients, one adds to them, one
// measures exact norms. Drops the results. fp8 is off, as cuBLASLt computes no e4m3 product.
static int cuda_tune(Engine *engine, Error *e) {
    const EngineConfig *c = &engine->config;
    const size_t count = (size_t)c->micro_batch * (c->seq_len + 1), stride = 7919; // a prime
    uint16_t *tokens;
    TRY(memory_alloc((void **)&tokens, count * sizeof *tokens, "tokens", e));
    for (size_t i = 0; i < count; i++) tokens[i] = (uint16_t)(i * stride % c->model->config.vocab);
    matmul_tune(engine->matmul, true);
    engine->measures = false;
    int code = cuda_begin_step(engine, e);
    for (int i = 0; i < (c->gns == GNS_EXACT ? 3 : 2) && !code; i++)
        code = cuda_micro_step(engine, tokens, c->micro_batch, i < 2 ? GNS_OFF : GNS_EXACT, e);
    if (!code) code = cuda_begin_step(engine, e);
    matmul_tune(engine->matmul, false);
    engine->measures = engine_sites(c) > 0;
    memory_free(tokens);
    return code;
}

static_assert((int)MATMUL_CHOICES_BYTES == (int)TUNING_BYTES, "a tuning is the text of Matmul.choices");

// Reorders squared norms from segment order to tensor order.
static void by_tensor(double *out, const double *of_segment, const Model *model) {
    for (bool cut : {false, true})
        for (int i = 0; i < model->tensor_count; i++)
            if (tensor_is_cut(&model->tensors[i]) == cut) out[i] = *of_segment++;
}

static int cuda_result(Engine *engine, StepResult *result, Error *e) {
    const Model *model = engine->config.model;
    double *stats = engine->stats_host;
    TRY(engine_send_stats(engine, e));
    CUDA_TRY(cudaEventSynchronize(engine->stats_there), e);
    result->nll_sum = stats[STAT_LOSS] / engine->config.seq_len;
    result->loss_sum = engine->smoothed ? stats[STAT_SMOOTHED] / engine->config.seq_len : result->nll_sum;
    by_tensor(result->grad_sq, stats_row(stats, model, STATS_GRAD_SQ), model);
    for (int i = 0; i < model->tensor_count; i++)
        result->example_sq[i] =
            gns_measures(&model->tensors[i], engine->mode) ? stats_row(stats, model, STATS_EXAMPLE_SQ)[i] : NAN;
    result->example_sq[model_tensor(model, WTE, 0) - model->tensors] += 2 * stats[STAT_CROSS];
    if (result->amax)
        memcpy(result->amax, stats_amax(stats, &engine->config), engine_sites(&engine->config) * sizeof(float));
    const double *sq = stats + stats_of_rows(&engine->config), *losses = sq + engine->config.step_rows;
    for (int b = 0; b < engine->rows && result->row; b++)
        result->row[b] = {sq[b], losses[b] / engine->config.seq_len, 0};
    if (result->source_gram)
        memcpy(result->source_gram, stats + stats_of_sources(&engine->config),
               engine->config.sources * engine->config.sources * sizeof(double));
    step_result_unscale(result, &engine->config, engine->rows, engine->loss_scale);
    return 0;
}

// ---- Without training -----------------------------------------------------------------------------------------------

static int cuda_eval(Engine *engine, const uint16_t *tokens, int n, int T, float *loss, Error *e) {
    const Pass p = pass_of(engine, n, T, GNS_OFF);
    assert(n > 0 && n <= engine->config.micro_batch && T > 0 && T <= engine->config.seq_len);
    TRY(tokens_send(engine, tokens, (size_t)n * (T + 1), n, e));
    TRY(forward(engine, &p, e));
    TRY(head_pass(engine, &p, false, e));
    if (is_cut(engine)) memset(loss, 0, p.all * sizeof *loss);
    TRY(copy_out(engine, loss + (size_t)p.first * T, engine->loss, p.N * sizeof(float), e));
    return CUDA_CALL(cudaStreamSynchronize(engine->stream), e);
}

// y = epilogue(x W + b) for one row x. LINEAR_RESIDUAL adds to y. QKV_W and FC_W normalise x first.
static int row_product(Engine *engine, LinearEpilogue epilogue, real *y, const real *x, TensorKind w, int l, Error *e) {
    const bool normalises = w == QKV_W || w == FC_W;
    const TensorKind ln = w == QKV_W ? LN1_W : LN2_W;
    const real *gamma = normalises ? weight(engine, ln, l) : NULL;
    const real *beta = normalises ? weight(engine, bias_of(ln), l) : NULL;
    const Pass p = pass_of(engine, 1, 1, GNS_OFF);
    Linear linear = linear_of(engine, &p, epilogue, y, x, w, l);
    linear.extra = y;
    return decode_linear(linear, gamma, beta, engine->stream, e);
}

// engine->logits = logits after n tokens. Reads keys and values of the first n - 1 tokens, and stores the last token's.
static int logits_of_last(Engine *engine, const uint16_t *tokens, int n, Error *e) {
    const Pass p = pass_of(engine, 1, 1, GNS_OFF);
    const int L = engine->config.model->config.layers, row = n - 1;
    const AttentionShape *a = &p.attention;
    real *x = engine->x_final, *attention = engine->block->attention, *wide = engine->block->gelu;
    TRY(watch_call(&engine->weights_watch, await, {0, engine->config.model->flat_count}, e));
    TRY(tokens_send(engine, tokens + row, 1, 0, e));
    TRY(embedding_forward(x, engine->tokens, NULL, weight(engine, WTE, 0), weight(engine, WPE, 0) + (size_t)row * p.C,
                          dropout_of_rows(&p, DROPOUT_EMBEDDING, 0), 1, p.C, engine->stream, e));
    for (int l = 0; l < L; l++) {
        real *qkv = engine->block[l].qkv;
        TRY(row_product(engine, LINEAR_BIAS, qkv + (size_t)row * 3 * p.C, x, QKV_W, l, e));
        TRY(decode_attention(attention, qkv, row, a->NH, a->D, engine->stream, e));
        TRY(row_product(engine, LINEAR_RESIDUAL, x, attention, PROJ_W, l, e));
        TRY(row_product(engine, LINEAR_GELU, wide, x, FC_W, l, e));
        TRY(row_product(engine, LINEAR_RESIDUAL, x, wide, FCPROJ_W, l, e));
    }
    TRY(ln_forward(engine, &p, LNF_W, 0, NULL, e));
    return row_logits(engine, 0, e);
}

// engine->logits = logits after n tokens. Pads the tokens to whole tiles, so that few matmul plans serve all lengths. A
// causal model ignores padding.
static int logits_of_all(Engine *engine, const uint16_t *tokens, int n, Error *e) {
    const size_t tile = 64;
    const Pass p = pass_of(engine, 1, (int)size_min(round_up(n, tile), engine->config.seq_len), GNS_OFF);
    CUDA_TRY(cudaMemsetAsync(engine->tokens, 0, (p.T + 1) * sizeof *tokens, engine->stream), e);
    TRY(tokens_send(engine, tokens, n, 0, e)); // B = 0: cuda_logits passes a single document
    TRY(forward(engine, &p, e));
    return p.B ? row_logits(engine, n - 1, e) : 0;
}

static int cuda_logits(Engine *engine, const uint16_t *tokens, int n, float *logits, Error *e) {
    const ModelConfig *m = &engine->config.model->config;
    int first = engine->config.document_mask ? n - 1 : 0; // first token of the last token's document; 0: all tokens
    assert(n > 0 && n <= engine->config.seq_len);
    while (first > 0 && tokens[first] != engine->config.separator) first--;
    tokens += first, n -= first;
    const bool apart = m->layers == 1 || engine->block[1].qkv != engine->block[0].qkv;
    const bool seen = apart && !is_cut(engine) && !engine->config.shard_weights && m->channels / m->heads % VEC == 0 &&
                      n > 1 && engine->seen_count >= n - 1 &&
                      memcmp(engine->seen, tokens, (n - 1) * sizeof *tokens) == 0;
    const size_t bytes = m->vocab * sizeof(float);
    engine->seen_count = 0;
    TRY((seen ? logits_of_last : logits_of_all)(engine, tokens, n, e));
    if (is_cut(engine) && engine->config.tensor.rank > 0) return CUDA_CALL(cudaStreamSynchronize(engine->stream), e);
    TRY(copy_out(engine, engine->logits_host, engine->logits, bytes, e));
    CUDA_TRY(cudaStreamSynchronize(engine->stream), e);
    memcpy(logits, engine->logits_host, bytes);
    memcpy(engine->seen, tokens, n * sizeof *tokens);
    engine->seen_count = n;
    return 0;
}

const EngineApi cuda_engine = {
    .needs_loss_scale = REAL_DTYPE == DTYPE_FP16,
    .dtype = REAL_DTYPE,
    .check_dtype = cuda_check_dtype,
    .plan_memory = cuda_plan_memory,
    .device = cuda_device,
    .check = cuda_check,
    .create = cuda_create,
    .destroy = cuda_destroy,
    .describe = cuda_describe,
    .tune = cuda_tune,
    .tuning = [](const Engine *engine) -> const char * { return engine->matmul->choices; },
    .set_tuning = [](Engine *engine, const char *tuning,
                     Error *e) { return matmul_choices_load(engine->matmul, tuning, e); },
    .load = cuda_load,
    .store = cuda_store,
    .pin = cuda_pin,
    .unpin = cuda_unpin,
    .hash = cuda_hash,
    .begin_step = cuda_begin_step,
    .examples = [](Engine *engine, uint64_t first) { engine->example = first; },
    .scale_loss = [](Engine *engine, double scale) { engine->loss_scale = (float)scale; },
    .exponents = cuda_exponents,
    .micro_step = cuda_micro_step,
    .norms = cuda_norms,
    .trust = cuda_trust,
    .update = cuda_update,
    .result = cuda_result,
    .eval = cuda_eval,
    .logits = cuda_logits,
    .watch = [](Engine *engine, const GradientWatch *watch) { engine->watch = *watch; },
    .watch_weights = [](Engine *engine,
                        const WeightsWatch *watch) { engine->weights_watch = watch ? *watch : WeightsWatch{}; },
    .collect = cuda_collect,
    .own_weights = cuda_own_weights,
    .clear = cuda_clear,
    .buffer = cuda_buffer,
    .weight_bytes = [](const Engine *) { return sizeof(real); },
    .stream = [](Engine *engine) -> void * { return engine->stream; },
};
