// Counts the work of training, kernel by kernel: floating-point operations, and the fewest bytes to read and write.
#include "plan/plan.h"

#include "math/muon.h"

#include <math.h>

// FLOPs per value of streaming kernels, counted from their formulas; an exp, tanh or root counts as one. On any machine
// these kernels are far from compute-bound, so small errors do not matter.
enum {
    LAYERNORM_FLOPS = 8,           // residual sum, mean, variance, (x - mean) rstd gamma + beta
    LAYERNORM_BACKWARD_FLOPS = 14, // two row sums, dx, and three column sums: dgamma, dbeta, a branch's dbias
    GELU_FLOPS = 9,
    GELU_BACKWARD_FLOPS = 14,
    LOSS_FLOPS = 5, // maximum, exp, sum, and the gradient p - 1[target]
    ADAMW_FLOPS = 14,
    DROPOUT_FLOPS = 13, // per element: 1/8 of a draw (7 rounds of 10 FLOPs); shift, mask, comparison, choice, product
    MUON_FLOPS = 9,     // momentum and the step; add_muon counts the products
};

static const double fp32 = sizeof(float); // bytes of a gradient, a moment, a master weight

// The sum to which kernels are added, `times` times each. batched: fraction of steps with batched exact norms.
typedef struct {
    PlanWork *work;
    const PlanDevice *device;
    double times, batched;
} Sum;

static void add(const Sum *sum, Work w) {
    const double count = sum->times * w.count, again = sum->times * w.again, launches = count + again;
    if (launches <= 0) return;
    const double seconds = plan_kernel_seconds(sum->device, &w);
    sum->work->family[w.family].flops += launches * w.flops;
    sum->work->family[w.family].bytes += launches * (w.read + w.written);
    sum->work->family[w.family].seconds += launches * seconds;
    sum->work->pass[w.pass] += count * seconds;
    sum->work->pass[PASS_BACKWARD] += again * seconds;
}

// Returns the work of a product, (rows, in) times (in, out): 2 rows in out FLOPs. The operands, of `operand` bytes per
// value (1: e4m3), are read once, and the result is written once.
static Work matmul(WorkFamily family, WorkPass pass, double operand, double result, double rows, double in, double out,
                   double count) {
    const WorkKind kind = operand == 1 ? WORK_FP8 : WORK_MATMUL;
    const double read = operand * (rows * in + in * out);
    return (Work){family, kind, pass, 2 * rows * in * out, read, result * rows * out, .count = count};
}

// Returns the work of a kernel that streams over n values. Per value: flops FLOPs, read and written bytes.
static Work stream(WorkFamily family, WorkPass pass, double n, double flops, double read, double written,
                   double count) {
    return (Work){family, WORK_STREAM, pass, flops * n, read * n, written * n, .count = count};
}

// Adds the products of `count` linear layers, over `examples` examples each: y = x W with W (in, out), dx = dy W^T, and
// dW += x^T dy, which reads and writes the sum. On a GPU the blocks' fp8 products read e4m3 (dW's
// only with fp8-dw), as do the logits with --fp8-head.
static void add_linear(const Sum *sum, const EngineConfig *shape, WorkFamily family, double examples, double in,
                       double out, double count, double again) {
    const double v = sum->device->value, rows = examples * shape->seq_len, batched = count * sum->batched;
    const bool back = family == FAMILY_BLOCK_MATMUL && dtype_is_fp8(shape->dtype) && v < fp32;
    const bool e4m3 = back || (family == FAMILY_HEAD_MATMUL && shape->fp8_head && v < fp32);
    const double factor = back && shape->dtype == DTYPE_FP8_DW ? 1 : v;
    Work y = matmul(family, PASS_FORWARD, e4m3 ? 1 : v, v, rows, in, out, count);
    Work dw = matmul(family, PASS_BACKWARD, factor, fp32, in, rows, out, count - batched);
    y.again = again, dw.read += dw.written;
    add(sum, y);
    add(sum, matmul(family, PASS_BACKWARD, back ? 1 : v, v, rows, out, in, count));
    add(sum, dw);
    // Batched exact norms write every example's gradient, then read it for its norm and for the sum.
    add(sum, matmul(family, PASS_BACKWARD, factor, examples * fp32, in, rows, out, batched));
    add(sum, stream(FAMILY_EXACT_NORMS, PASS_BACKWARD, in * out, 3 * examples, (examples + 1) * fp32, fp32, batched));
}

void plan_add_micro_steps(PlanWork *work, const PlanDevice *device, const EngineConfig *shape, int rows, double exact,
                          double times) {
    const Model *model = shape->model;
    const bool fused = plan_fuses_exact(device, &model->config);
    const Sum sum = {work, device, times, fused ? 0 : exact};
    if (rows == 0) return;
    // B: this rank's own rows (TensorRanks). n: their values. N: tokens of all rows. a, f: values of attention and MLP.
    const double B = (double)own_rows(shape, rows).count, T = shape->seq_len, N = rows * T, C = model->config.channels;
    const double A = (double)model->attention_width, F = (double)model->mlp_width, a = N * A, f = N * F;
    const double n = B * T * C, L = model->config.layers, v = device->value;
    // Blocks whose forward pass, or GELU, runs again: not the last block, whose activations are still in memory.
    const double again = shape->recompute == RECOMPUTE_BLOCK ? L - 1 : 0;
    const double gelu_again = shape->recompute != RECOMPUTE_NONE ? L - 1 : 0;
    // Attention is causal, so a token sees half of its row on average (Dao et al. 2022, arXiv 2205.14135, section 4).
    const double scores = N * (T + 1) / 2 * model->heads, product = a * (T + 1); // FLOPs of one product
    // The head computes a chunk of examples at a time, and keeps the logits of one chunk.
    const double V = model->vocab_padded, chunks = ceil(B / fmax(1, fmin(B, floor(device->head_bytes / (v * T * V)))));
    const double R = B * T / chunks; // tokens of a chunk
    // Per token the loss reads and writes V logits. In bf16 Hopper's head stores exp(logits) instead; then the loss
    // reads 3 C values and writes C, which saves 3.5% of a step. The plan assumes exp(logits) also for fp16 and label
    // smoothing, where train_gpt2.cu stores logits.
    const double read = v * R * (device->fuses_exact ? 3 * C : V), written = v * R * (device->fuses_exact ? C : V);
    const double drops = shape->dropout.below > 0, branches = drops * (2 * L + 1), copied = drops * v * n;
    const WorkPass forward = PASS_FORWARD, backward = PASS_BACKWARD;
    const Work kernels[] = {
        stream(FAMILY_EMBEDDING, forward, n, 1, 2 * v, v, 1),
        // Reads x and the output of the preceding branch; writes their sum and the sum's LayerNorm.
        {FAMILY_LAYERNORM, WORK_STREAM, forward, LAYERNORM_FLOPS * n, 2 * v * n, 2 * v * n, 2 * L + 1, 2 * again},
        {FAMILY_ATTENTION, WORK_ATTENTION_FORWARD, forward, 2 * product, v * 3 * a, v * a, L, again}, // q k^T, p v
        {FAMILY_GELU, WORK_STREAM, forward, GELU_FLOPS * f, v * f, v * f, L, gelu_again},
        {FAMILY_DROPOUT, WORK_MASKS, forward, DROPOUT_FLOPS * n, copied, copied, branches, drops * again},
        {FAMILY_DROPOUT, WORK_MASKS, forward, DROPOUT_FLOPS * scores, 0, 0, drops * L, drops * again},
        {FAMILY_CROSSENTROPY, WORK_STREAM, forward, LOSS_FLOPS * R * V, read, written, .count = chunks},
        // Five products, where the forward has two: q k^T, dp = do v^T, dv, dk, dq (Dao et al. 2022, appendix B).
        {FAMILY_ATTENTION, WORK_ATTENTION_BACKWARD, backward, 5 * product, v * 5 * a, v * 3 * a, .count = L},
        // Reads GELU's input; the CUDA engine reads GELU's slope instead, which the forward pass writes.
        stream(FAMILY_GELU, backward, f, GELU_BACKWARD_FLOPS, v, 0, L),
        stream(FAMILY_BIAS, backward, 3 * a, 1, v, 0, L), // qkv
        stream(FAMILY_BIAS, backward, f, 1, v, 0, L),     // fc; LayerNorms sum dbias of proj and fcproj
        stream(FAMILY_LAYERNORM, backward, n, LAYERNORM_BACKWARD_FLOPS, 3 * v, v, 2 * L + 1),
        {FAMILY_DROPOUT, WORK_MASKS, backward, DROPOUT_FLOPS * n, copied, copied, .count = branches},
        {FAMILY_DROPOUT, WORK_MASKS, backward, DROPOUT_FLOPS * scores, 0, 0, .count = drops * L},
        stream(FAMILY_EMBEDDING, backward, n, 2, 2 * v, fp32, 1), // repeated tokens write less
        // Fused exact norms copy rows of the head's gradient of wte, to multiply them by the embedding's gradient.
        stream(FAMILY_EXACT_NORMS, backward, n, 2, fp32, fp32, fused * exact),
    };
    for (size_t i = 0; i < sizeof kernels / sizeof *kernels; i++) add(&sum, kernels[i]);
    add_linear(&sum, shape, FAMILY_BLOCK_MATMUL, rows, C, 3 * A, L, again); // qkv
    add_linear(&sum, shape, FAMILY_BLOCK_MATMUL, rows, A, C, L, again);     // proj
    add_linear(&sum, shape, FAMILY_BLOCK_MATMUL, rows, C, F, L, again);     // fc
    add_linear(&sum, shape, FAMILY_BLOCK_MATMUL, rows, F, C, L, 0);         // fcproj
    add_linear(&sum, shape, FAMILY_HEAD_MATMUL, B / chunks, C, V, chunks, 0);
}

// Adds Muon's products for `share` of the blocks' matrices. Each of MUON_STEPS steps (math/muon.h) multiplies twice by
// the (side, longer) matrix, and squares a (side, side) matrix. Returns the elements of the matrices.
static double add_muon(const Sum *sum, const Model *model, double share, double rounded) {
    double elements = 0;
    for (int i = 0; i < model->tensor_count; i++) {
        const Tensor *t = &model->tensors[i];
        double matrices = (double)tensor_muon_matrices(t);
        if (matrices == 0) continue;
        elements += share * (double)t->count;
        if (t->layer > 0) continue; // block 0 counts for all blocks
        double rows = (double)t->rows, columns = (double)t->columns / matrices, side = fmin(rows, columns);
        double x = rows * columns, small = side * side;
        add(sum, (Work){FAMILY_OPTIMIZER, WORK_MATMUL, PASS_UPDATE, .flops = 4 * side * x + 2 * side * small,
                        .read = fp32 * (3 * x + 4 * small), .written = fp32 * (x + 3 * small),
                        .count = MUON_STEPS * matrices * model->config.layers * share});
    }
    add(sum, stream(FAMILY_OPTIMIZER, PASS_UPDATE, elements, MUON_FLOPS, 5 * fp32, 3 * fp32 + rounded, 1));
    return elements;
}

void plan_add_update(PlanWork *work, const PlanDevice *device, const Model *model, Optimizer optimizer, double owned) {
    const Sum sum = {work, device, .times = 1};
    const WorkFamily family = FAMILY_OPTIMIZER;
    const WorkPass pass = PASS_UPDATE;
    const double all = (double)model->flat_count, rounded = device->value < fp32 ? device->value : 0;
    add(&sum, stream(family, pass, all, 0, 0, fp32, 1)); // clears the gradients
    add(&sum, stream(family, pass, all, 2, fp32, 0, 1)); // norms of the gradients
    if (optimizer == OPTIMIZER_MUON) owned -= add_muon(&sum, model, owned / all, rounded);
    if (optimizer == OPTIMIZER_LAMB) // the direction's norm, before the step
        add(&sum, stream(family, pass, owned, ADAMW_FLOPS + 4, 4 * fp32, 0, 1));
    // reads weight, two moments and gradient; writes weight, moments and the rounded copy (Loshchilov and Hutter 2019)
    add(&sum, stream(family, pass, owned, ADAMW_FLOPS, 4 * fp32, 3 * fp32 + rounded, 1));
}
