#include "plan/workload.h"

#include <assert.h>
#include <math.h>

const char *const work_family_names[FAMILIES] = {
    "matmul, blocks", "matmul, head", "attention", "LayerNorm, residual", "GELU",
    "bias gradients", "loss",         "embedding", "exact norms",         "AdamW, norms, clearing",
};

// Arithmetic of the kernels that only stream, FLOPs a value, counted from their formulas to the nearest few; an exp,
// tanh or root as one. They are far below any machine's critical intensity, so nothing hangs on the last digit.
enum {
    LAYERNORM_FLOPS = 8,           // residual sum, mean, variance, (x - mean) rstd gamma + beta
    LAYERNORM_BACKWARD_FLOPS = 14, // two row sums, dx, and the column sums of gamma, beta and the bias before
    GELU_FLOPS = 9,
    GELU_BACKWARD_FLOPS = 14,
    LOSS_FLOPS = 5, // maximum, exp, sum, and the gradient p - 1[target]
    ADAMW_FLOPS = 14,
};

// The sizes that everything below is made of.
typedef struct {
    double N, C, T, V, L;      // N = B T
    double value, accumulator; // bytes: of what kernels read, of gradients (fp32)
} Sizes;

static Sizes sizes_of(const WorkShape *s) {
    const ModelConfig *m = &s->model->config;
    return (Sizes){
        .N = (double)s->rows * s->seq_len,
        .C = m->channels,
        .T = s->seq_len,
        .V = s->model->vocab_padded,
        .L = m->layers,
        .value = s->value,
        .accumulator = sizeof(float),
    };
}

static void add(Workload *w, Work work) {
    assert(w->count < WORK_MAX);
    if (work.count > 0) w->work[w->count++] = work;
}

// ---------------------------------------------------------------------------------------------------------------------
// Matrix products: 2 m n k FLOPs, operands read once, the result written once

// y (N, out) = x (N, in) W, forward; dx (N, in) = dy (N, out) W^T, backward: out and in change places.
static void add_product(Workload *w, const Sizes *z, WorkFamily family, WorkPass pass, double rows, double in,
                        double out, double count) {
    add(w, (Work){family, WORK_MATMUL, pass, .flops = 2 * rows * in * out, .read = z->value * (rows * in + in * out),
                  .written = z->value * rows * out, .count = count});
}

// dW (in, out) += x^T dy over rows: the sum is read and written, in fp32.
static void add_weight_gradient(Workload *w, const Sizes *z, WorkFamily family, double rows, double in, double out,
                                double count) {
    add(w, (Work){family, WORK_MATMUL, PASS_BACKWARD, .flops = 2 * rows * in * out,
                  .read = z->value * rows * (in + out) + z->accumulator * in * out,
                  .written = z->accumulator * in * out, .count = count});
}

// By example (--gns exact): every example's gradient is written down, and read for its norm and the sum.
static void add_exact_gradient(Workload *w, const Sizes *z, WorkFamily family, double examples, double in, double out,
                               double count) {
    double rows = examples * z->T, gradient = z->accumulator * in * out;
    add(w, (Work){family, WORK_MATMUL, PASS_BACKWARD, .flops = 2 * rows * in * out,
                  .read = z->value * rows * (in + out), .written = examples * gradient, .count = count});
    add(w, (Work){FAMILY_EXACT_NORMS, WORK_STREAM, PASS_BACKWARD, .flops = 3 * examples * in * out,
                  .read = (examples + 1) * gradient, .written = gradient, .count = count});
}

static void add_gradient(Workload *w, const WorkShape *s, WorkFamily family, double examples, double in, double out,
                         double count) {
    Sizes z = sizes_of(s);
    if (s->exact) add_exact_gradient(w, &z, family, examples, in, out, count);
    else add_weight_gradient(w, &z, family, examples * z.T, in, out, count);
}

// ---------------------------------------------------------------------------------------------------------------------
// The parts of the model

// From ln1's output to GELU's, in `blocks` blocks; fcproj is apart, since recomputing leaves it out.
static void add_block_forward(Workload *w, const WorkShape *s, WorkPass pass, double blocks) {
    Sizes z = sizes_of(s);
    double N = z.N, C = z.C;
    add_product(w, &z, FAMILY_BLOCK_MATMUL, pass, N, C, 3 * C, blocks); // qkv
    add_product(w, &z, FAMILY_BLOCK_MATMUL, pass, N, C, C, blocks);     // proj
    add_product(w, &z, FAMILY_BLOCK_MATMUL, pass, N, C, 4 * C, blocks); // fc
    // q k^T and p v, causal: each row sees half of the others (Dao et al. 2022, arXiv 2205.14135, section 4)
    add(w, (Work){FAMILY_ATTENTION, WORK_ATTENTION_FORWARD, pass, .flops = 2 * N * C * (z.T + 1), .count = blocks,
                  .read = z.value * N * 3 * C, .written = z.value * N * C});
}

static void add_gelu(Workload *w, const Sizes *z, WorkPass pass, double blocks) {
    double n = z->N * 4 * z->C;
    add(w, (Work){FAMILY_GELU, WORK_STREAM, pass, .flops = GELU_FLOPS * n, .read = z->value * n,
                  .written = z->value * n, .count = blocks});
}

// x and a branch's output -> their sum and its LayerNorm.
static void add_layernorms(Workload *w, const Sizes *z, WorkPass pass, double count) {
    double n = z->N * z->C;
    add(w, (Work){FAMILY_LAYERNORM, WORK_STREAM, pass, .flops = LAYERNORM_FLOPS * n, .read = 2 * z->value * n,
                  .written = 2 * z->value * n, .count = count});
}

static void add_forward(Workload *w, const WorkShape *s) {
    Sizes z = sizes_of(s);
    double n = z.N * z.C;
    add(w, (Work){FAMILY_EMBEDDING, WORK_STREAM, PASS_FORWARD, .flops = n, .read = 2 * z.value * n,
                  .written = z.value * n, .count = 1});
    add_block_forward(w, s, PASS_FORWARD, z.L);
    add_gelu(w, &z, PASS_FORWARD, z.L);
    add_product(w, &z, FAMILY_BLOCK_MATMUL, PASS_FORWARD, z.N, 4 * z.C, z.C, z.L); // fcproj
    add_layernorms(w, &z, PASS_FORWARD, 2 * z.L + 1);
}

// Logits, loss and their gradient, a chunk of examples at a time: the logits of a whole micro-batch are never kept.
static void add_head(Workload *w, const WorkShape *s) {
    Sizes z = sizes_of(s);
    double example = z.value * z.T * z.V; // bytes
    double chunks = ceil(s->rows / fmax(1, fmin(s->rows, floor(s->head_bytes / example))));
    double examples = s->rows / chunks, rows = examples * z.T;
    add_product(w, &z, FAMILY_HEAD_MATMUL, PASS_FORWARD, rows, z.C, z.V, chunks);
    add(w, (Work){FAMILY_CROSSENTROPY, WORK_STREAM, PASS_FORWARD, .flops = LOSS_FLOPS * rows * z.V,
                  .read = z.value * rows * z.V, .written = z.value * rows * z.V, .count = chunks});
    add_product(w, &z, FAMILY_HEAD_MATMUL, PASS_BACKWARD, rows, z.V, z.C, chunks);
    add_gradient(w, s, FAMILY_HEAD_MATMUL, examples, z.V, z.C, chunks);
}

static void add_recomputing(Workload *w, const WorkShape *s) {
    Sizes z = sizes_of(s);
    double blocks = z.L - 1; // the last block's is still there
    if (s->recompute == RECOMPUTE_NONE) return;
    add_gelu(w, &z, PASS_BACKWARD, blocks);
    if (s->recompute == RECOMPUTE_GELU) return;
    add_block_forward(w, s, PASS_BACKWARD, blocks);
    add_layernorms(w, &z, PASS_BACKWARD, 2 * blocks);
}

static void add_bias(Workload *w, const Sizes *z, double columns) {
    double n = z->N * columns;
    add(w, (Work){FAMILY_BIAS, WORK_STREAM, PASS_BACKWARD, .flops = n, .read = z->value * n, .count = z->L});
}

static void add_backward(Workload *w, const WorkShape *s) {
    Sizes z = sizes_of(s);
    double N = z.N, C = z.C, n = N * C, rows = s->rows;
    add_recomputing(w, s);
    const double shape[][2] = {{C, 3 * C}, {C, C}, {C, 4 * C}, {4 * C, C}}; // (in, out) of qkv, proj, fc, fcproj
    for (int i = 0; i < 4; i++) {
        add_product(w, &z, FAMILY_BLOCK_MATMUL, PASS_BACKWARD, N, shape[i][1], shape[i][0], z.L);
        add_gradient(w, s, FAMILY_BLOCK_MATMUL, rows, shape[i][0], shape[i][1], z.L);
    }
    // five products where the forward has two: q k^T again, dp = do v^T, dv, dk, dq (Dao et al. 2022, appendix B)
    add(w, (Work){FAMILY_ATTENTION, WORK_ATTENTION_BACKWARD, PASS_BACKWARD, .flops = 5 * N * C * (z.T + 1),
                  .read = z.value * 5 * n, .written = z.value * 3 * n, .count = z.L});
    // the slope of GELU: its input is read, and what it multiplies is read and written where a product has not done it
    add(w, (Work){FAMILY_GELU, WORK_STREAM, PASS_BACKWARD, .flops = GELU_BACKWARD_FLOPS * 4 * n,
                  .read = z.value * 4 * n, .count = z.L});
    add_bias(w, &z, 3 * C); // qkv
    add_bias(w, &z, 4 * C); // fc; those of proj and fcproj come with the LayerNorms
    add(w, (Work){FAMILY_LAYERNORM, WORK_STREAM, PASS_BACKWARD, .flops = LAYERNORM_BACKWARD_FLOPS * n,
                  .read = 3 * z.value * n, .written = z.value * n, .count = 2 * z.L + 1});
    add(w, (Work){FAMILY_EMBEDDING, WORK_STREAM, PASS_BACKWARD, .flops = 2 * n, .read = 2 * z.value * n,
                  .written = z.accumulator * n, .count = 1}); // at most: a token that recurs is written once
}

void workload_micro_step(Workload *w, const WorkShape *shape) {
    add_forward(w, shape);
    add_head(w, shape);
    add_backward(w, shape);
}

void workload_update(Workload *w, const Model *model, double owned, double value) {
    double all = (double)model->flat_count, fp32 = sizeof(float), rounded = value < fp32 ? value : 0;
    add(w, (Work){FAMILY_OPTIMIZER, WORK_STREAM, PASS_UPDATE, .written = fp32 * all, .count = 1}); // clearing
    add(w, (Work){FAMILY_OPTIMIZER, WORK_STREAM, PASS_UPDATE, .flops = 2 * all, .read = fp32 * all, .count = 1});
    // weight, two moments and gradient in; weight, moments and the rounded copy out (Loshchilov and Hutter 2019)
    add(w, (Work){FAMILY_OPTIMIZER, WORK_STREAM, PASS_UPDATE, .flops = ADAMW_FLOPS * owned, .read = 4 * fp32 * owned,
                  .written = (3 * fp32 + rounded) * owned, .count = 1});
}
