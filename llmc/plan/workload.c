#include "plan/workload.h"

#include "math/muon.h"

#include <assert.h>
#include <math.h>

const char *const work_family_names[FAMILIES] = {
    "matmul, blocks", "matmul, head", "attention",   "LayerNorm, residual",     "GELU", "bias gradients", "loss",
    "embedding",      "dropout",      "exact norms", "update, norms, clearing",
};

// FLOPs per value of streaming kernels, counted from their formulas; an exp, tanh or root counts as one. They are far
// below any machine's critical intensity, so the last digit does not matter.
enum {
    LAYERNORM_FLOPS = 8,           // residual sum, mean, variance, (x - mean) rstd gamma + beta
    LAYERNORM_BACKWARD_FLOPS = 14, // two row sums, dx, and the column sums of gamma, beta and the bias before
    GELU_FLOPS = 9,
    GELU_BACKWARD_FLOPS = 14,
    LOSS_FLOPS = 5, // maximum, exp, sum, and the gradient p - 1[target]
    ADAMW_FLOPS = 14,
    DROPOUT_FLOPS = 13, // per element: 1/8 of 7 rounds of 10 operations; shift, mask, comparison, choice, product
    MUON_FLOPS = 9,     // without its products: momentum and the step
};

static const double accumulator = sizeof(float); // bytes of a gradient

static void count_kernel(Workload *w, Work work) {
    assert(w->count < WORK_MAX);
    if (work.count > 0) w->work[w->count++] = work;
}

// ---- Matrix products: 2 m n k FLOPs, operands read once, the result written once ------------------------------------

// Adds a product. Forward: y (N, out) = x (N, in) W. Backward: dx (N, in) = dy (N, out) W^T, so in and out are swapped.
static void add_matmul(Workload *w, WorkFamily family, WorkPass pass, double rows, double in, double out,
                       double count) {
    count_kernel(w,
                 (Work){family, WORK_MATMUL, pass, .flops = 2 * rows * in * out,
                        .read = w->value * (rows * in + in * out), .written = w->value * rows * out, .count = count});
}

// Adds dW (in, out) += x^T dy over the rows of `examples`. Reads and writes the sum. Batched exact norms write every
// example's gradient, then read it for its norm and for the sum.
static void add_gradient(Workload *w, WorkFamily family, double examples, double in, double out, double count) {
    double rows = examples * w->T, gradient = accumulator * in * out;
    bool batched = w->exact == EXACT_BATCHED;
    count_kernel(w, (Work){family, WORK_MATMUL, PASS_BACKWARD, .flops = 2 * rows * in * out,
                           .read = w->value * rows * (in + out) + (batched ? 0 : gradient),
                           .written = (batched ? examples : 1) * gradient, .count = count});
    if (!batched) return;
    count_kernel(w, (Work){FAMILY_EXACT_NORMS, WORK_STREAM, PASS_BACKWARD, .flops = 3 * examples * in * out,
                           .read = (examples + 1) * gradient, .written = gradient, .count = count});
}

// ---- The parts of the model -----------------------------------------------------------------------------------------

// Adds `count` kernels that stream over n values. flops, read, written: FLOPs, values read and values written per
// value.
static void add_stream(Workload *w, WorkFamily family, WorkPass pass, double n, double flops, double read,
                       double written, double count) {
    count_kernel(w, (Work){family, WORK_STREAM, pass, .flops = flops * n, .read = read * w->value * n,
                           .written = written * w->value * n, .count = count});
}

static void add_gelu(Workload *w, WorkPass pass, double blocks) {
    add_stream(w, FAMILY_GELU, pass, w->N * 4 * w->C, GELU_FLOPS, 1, 1, blocks);
}

// Adds `count` kernels; each reads x and a branch's output, and writes their sum and its LayerNorm.
static void add_layernorms(Workload *w, WorkPass pass, double count) {
    add_stream(w, FAMILY_LAYERNORM, pass, w->N * w->C, LAYERNORM_FLOPS, 2, 2, count);
}

// Counts ln1's output to fc's output, in `blocks` blocks. Leaves out fcproj, and GELU: that may be recomputed alone.
static void add_block_forward(Workload *w, WorkPass pass, double blocks) {
    double N = w->N, C = w->C;
    add_matmul(w, FAMILY_BLOCK_MATMUL, pass, N, C, 3 * C, blocks); // qkv
    add_matmul(w, FAMILY_BLOCK_MATMUL, pass, N, C, C, blocks);     // proj
    add_matmul(w, FAMILY_BLOCK_MATMUL, pass, N, C, 4 * C, blocks); // fc
    // q k^T and p v. Causal: on average a row sees half of the rows (Dao et al. 2022, arXiv 2205.14135, section 4)
    count_kernel(w, (Work){FAMILY_ATTENTION, WORK_ATTENTION_FORWARD, pass, .flops = 2 * N * C * (w->T + 1),
                           .count = blocks, .read = w->value * N * 3 * C, .written = w->value * N * C});
}

// Adds the masks of `branches` tensors (N, C) and of the probabilities of `attentions` blocks.
static void add_dropout(Workload *w, WorkPass pass, double branches, double attentions) {
    double n = w->N * w->C, probabilities = w->N * (w->T + 1) / 2 * w->NH;
    if (!w->drops) return;
    count_kernel(w, (Work){FAMILY_DROPOUT, WORK_MASKS, pass, .flops = DROPOUT_FLOPS * n, .read = w->value * n,
                           .written = w->value * n, .count = branches});
    count_kernel(w,
                 (Work){FAMILY_DROPOUT, WORK_MASKS, pass, .flops = DROPOUT_FLOPS * probabilities, .count = attentions});
}

// Adds logits, loss and gradients, a chunk of examples at a time. The logits of a whole micro-batch are never kept.
static void add_head(Workload *w) {
    double example = w->value * w->T * w->V; // bytes
    double chunks = ceil(w->B / fmax(1, fmin(w->B, floor(w->head_bytes / example))));
    double examples = w->B / chunks, rows = examples * w->T;
    add_matmul(w, FAMILY_HEAD_MATMUL, PASS_FORWARD, rows, w->C, w->V, chunks);
    double read = w->stores_exponentials ? 3 * w->C : w->V; // values per row: logits; or lnf twice and a row of wte
    double written = w->stores_exponentials ? w->C : w->V;
    count_kernel(w, (Work){FAMILY_CROSSENTROPY, WORK_STREAM, PASS_FORWARD, .flops = LOSS_FLOPS * rows * w->V,
                           .read = w->value * rows * read, .written = w->value * rows * written, .count = chunks});
    add_matmul(w, FAMILY_HEAD_MATMUL, PASS_BACKWARD, rows, w->V, w->C, chunks);
    add_gradient(w, FAMILY_HEAD_MATMUL, examples, w->V, w->C, chunks);
}

static void add_backward(Workload *w) {
    double N = w->N, C = w->C, L = w->L, n = N * C;
    double again = L - 1; // recomputed blocks: the last block's activations are still in memory
    if (w->recompute != RECOMPUTE_NONE) add_gelu(w, PASS_BACKWARD, again);
    if (w->recompute == RECOMPUTE_BLOCK) {
        add_block_forward(w, PASS_BACKWARD, again);
        add_layernorms(w, PASS_BACKWARD, 2 * again);
        add_dropout(w, PASS_BACKWARD, again, again);
    }
    const double shape[][2] = {{C, 3 * C}, {C, C}, {C, 4 * C}, {4 * C, C}}; // (in, out) of qkv, proj, fc, fcproj
    for (int i = 0; i < 4; i++) {
        add_matmul(w, FAMILY_BLOCK_MATMUL, PASS_BACKWARD, N, shape[i][1], shape[i][0], L);
        add_gradient(w, FAMILY_BLOCK_MATMUL, w->B, shape[i][0], shape[i][1], L);
    }
    // five products where the forward has two: q k^T again, dp = do v^T, dv, dk, dq (Dao et al. 2022, appendix B)
    count_kernel(w, (Work){FAMILY_ATTENTION, WORK_ATTENTION_BACKWARD, PASS_BACKWARD, .flops = 5 * N * C * (w->T + 1),
                           .read = w->value * 5 * n, .written = w->value * 3 * n, .count = L});
    // GELU's slope reads its input; fcproj's backward product writes the result
    add_stream(w, FAMILY_GELU, PASS_BACKWARD, 4 * n, GELU_BACKWARD_FLOPS, 1, 0, L);
    add_stream(w, FAMILY_BIAS, PASS_BACKWARD, 3 * n, 1, 1, 0, L); // qkv
    add_stream(w, FAMILY_BIAS, PASS_BACKWARD, 4 * n, 1, 1, 0, L); // fc; the LayerNorms include proj's and fcproj's
    add_stream(w, FAMILY_LAYERNORM, PASS_BACKWARD, n, LAYERNORM_BACKWARD_FLOPS, 3, 1, 2 * L + 1);
    add_dropout(w, PASS_BACKWARD, 2 * L + 1, L);
    add_stream(w, FAMILY_EMBEDDING, PASS_BACKWARD, n, 2, 2, accumulator / w->value, 1); // a repeated token writes less
    if (w->exact == EXACT_FUSED) // rows of the head's gradients, for the cross term with the embedding's
        count_kernel(w, (Work){FAMILY_EXACT_NORMS, WORK_STREAM, PASS_BACKWARD, .flops = 2 * n, .read = accumulator * n,
                               .written = accumulator * n, .count = 1});
}

Workload workload_micro_step(const EngineConfig *shape, int rows, Workload w) {
    const ModelConfig *m = &shape->model->config;
    w.B = rows, w.T = shape->seq_len, w.N = w.B * w.T;
    w.C = m->channels, w.NH = m->heads, w.V = shape->model->vocab_padded, w.L = m->layers;
    w.recompute = shape->recompute, w.drops = shape->dropout.below > 0;
    add_stream(&w, FAMILY_EMBEDDING, PASS_FORWARD, w.N * w.C, 1, 2, 1, 1);
    add_block_forward(&w, PASS_FORWARD, w.L);
    add_gelu(&w, PASS_FORWARD, w.L);
    add_matmul(&w, FAMILY_BLOCK_MATMUL, PASS_FORWARD, w.N, 4 * w.C, w.C, w.L); // fcproj
    add_layernorms(&w, PASS_FORWARD, 2 * w.L + 1);
    add_dropout(&w, PASS_FORWARD, 2 * w.L + 1, w.L);
    add_head(&w);
    add_backward(&w);
    return w;
}

// Adds Muon's products for `share` of the blocks' matrices, MUON_STEPS times each (math/muon.h): two with the matrix
// x (side, longer), and the square of a (side, side) matrix. Returns the elements of the matrices.
static double add_muon(Workload *w, const Model *model, double share, double rounded) {
    const double fp32 = sizeof(float);
    double elements = 0;
    for (int i = 0; i < model->tensor_count; i++) {
        const Tensor *t = &model->tensors[i];
        double matrices = (double)tensor_muon_matrices(t);
        if (matrices == 0) continue;
        elements += share * (double)t->count;
        if (t->layer > 0) continue; // block 0 counts for all blocks
        double rows = (double)t->rows, columns = (double)t->columns / matrices, side = fmin(rows, columns);
        double x = rows * columns, small = side * side;
        count_kernel(w, (Work){FAMILY_OPTIMIZER, WORK_MATMUL, PASS_UPDATE, .flops = 4 * side * x + 2 * side * small,
                               .read = fp32 * (3 * x + 4 * small), .written = fp32 * (x + 3 * small),
                               .count = MUON_STEPS * matrices * model->config.layers * share});
    }
    count_kernel(w, (Work){FAMILY_OPTIMIZER, WORK_STREAM, PASS_UPDATE, .flops = MUON_FLOPS * elements,
                           .read = 5 * fp32 * elements, .written = (3 * fp32 + rounded) * elements, .count = 1});
    return elements;
}

Workload workload_update(const Model *model, Optimizer optimizer, double owned, double value) {
    Workload w = {0};
    double all = (double)model->flat_count, fp32 = sizeof(float), rounded = value < fp32 ? value : 0;
    double share = owned / all;
    count_kernel(&w, (Work){FAMILY_OPTIMIZER, WORK_STREAM, PASS_UPDATE, .written = fp32 * all, .count = 1}); // clearing
    count_kernel(&w,
                 (Work){FAMILY_OPTIMIZER, WORK_STREAM, PASS_UPDATE, .flops = 2 * all, .read = fp32 * all, .count = 1});
    if (optimizer == OPTIMIZER_MUON) owned -= add_muon(&w, model, share, rounded);
    if (optimizer == OPTIMIZER_LAMB) // the direction and its norm, before the step
        count_kernel(&w, (Work){FAMILY_OPTIMIZER, WORK_STREAM, PASS_UPDATE, .flops = (ADAMW_FLOPS + 4) * owned,
                                .read = 4 * fp32 * owned, .count = 1});
    // reads weight, two moments and gradient; writes weight, moments and the rounded copy (Loshchilov and Hutter 2019)
    count_kernel(&w, (Work){FAMILY_OPTIMIZER, WORK_STREAM, PASS_UPDATE, .flops = ADAMW_FLOPS * owned,
                            .read = 4 * fp32 * owned, .written = (3 * fp32 + rounded) * owned, .count = 1});
    return w;
}
