// bench_step: steps of the CPU engine, kernel by kernel. Unlike bench_cpu's, whose operands are hot, these kernels find
// weights and gradients where a step leaves them. The linker's --wrap times the engine's calls.
//
//     bench_step [model (gpt2-124M) [micro-batch (4) [seq-len (64) [type (fp32) [steps (8)]]]]]
//
// A line for each kernel and shape: its calls in a step, the least time of a step's calls, and of products GFLOP/s.
#include "cpu/attention.h"
#include "cpu/layers.h"
#include "cpu/matmul.h"
#include "model/engine.h"

#include <stdlib.h>
#include <string.h>

enum { KERNELS_MAX = 64, WARM_UP = 2, STEPS_MAX = 1000 };

static struct {
    char name[40];
    int calls;
    double seconds, best, flops; // seconds and flops: of the present step
} kernel[KERNELS_MAX];
static int kernels;

static void add_call(const char *name, double flops, double start) {
    double seconds = clock_seconds() - start;
    int i = 0;
    while (i < kernels && strcmp(kernel[i].name, name) != 0) i++;
    if (i == KERNELS_MAX) return;
    if (i == kernels) snprintf(kernel[kernels++].name, sizeof kernel->name, "%s", name), kernel[i].best = 1e9;
    kernel[i].calls++, kernel[i].seconds += seconds, kernel[i].flops += flops;
}

static void add_product(const char *name, size_t M, size_t N, size_t K, double start) {
    char text[40];
    snprintf(text, sizeof text, "%s %zu x %zu x %zu", name, M, N, K);
    add_call(text, 2.0 * (double)M * (double)N * (double)K, start);
}

#define WRAP(result, function, parameters, arguments, add)                                                             \
    result __real_##function parameters;                                                                               \
    result __wrap_##function parameters;                                                                               \
    result __wrap_##function parameters {                                                                              \
        double start = clock_seconds();                                                                                \
        __real_##function arguments;                                                                                   \
        add;                                                                                                           \
    }
WRAP(void, matmul_nn,
     (Matmul mm, void *c, const void *a, const void *b, const void *bias, size_t M, size_t N, size_t K),
     (mm, c, a, b, bias, M, N, K), add_product("a b", M, N, K, start))
WRAP(void, matmul_nt, (Matmul mm, void *c, const void *a, const void *b, size_t M, size_t N, size_t K),
     (mm, c, a, b, M, N, K), add_product("a b^T", M, N, K, start))
WRAP(void, matmul_tn,
     (Matmul mm, float *c, float *sums, const void *a, const void *b, size_t M, size_t N, size_t K, bool accumulate),
     (mm, c, sums, a, b, M, N, K, accumulate), add_product("a^T b", M, N, K, start))
WRAP(void, layernorm_forward,
     (void *y, float *mean, float *rstd, void *x, const void *residual, const void *gamma, const void *beta, int N,
      int C, Dtype type),
     (y, mean, rstd, x, residual, gamma, beta, N, C, type), add_call("LayerNorm", 0, start))
WRAP(void, layernorm_backward,
     (void *dx, float *dgamma, float *dbeta, double *gamma_sq, double *beta_sq, const void *dy, const void *x,
      const float *mean, const float *rstd, const void *gamma, int B, int T, int C, float *scratch, Dtype type),
     (dx, dgamma, dbeta, gamma_sq, beta_sq, dy, x, mean, rstd, gamma, B, T, C, scratch, type),
     add_call("LayerNorm, backward", 0, start))
WRAP(void, gelu_forward, (void *y, const void *x, size_t n, Dtype type), (y, x, n, type), add_call("GELU", 0, start))
WRAP(void, gelu_backward, (void *dx, const void *dy, const void *x, size_t n, Dtype type), (dx, dy, x, n, type),
     add_call("GELU, backward", 0, start))
WRAP(void, cross_entropy,
     (float *nll, float *loss, void *logits, const uint16_t *target, int N, int V, int stride, float smoothing,
      float gradient, Dtype type),
     (nll, loss, logits, target, N, V, stride, smoothing, gradient, type), add_call("cross-entropy", 0, start))
WRAP(void, attention_forward,
     (const Attention *at, void *out, float *lse, const void *qkv, size_t B, size_t T, size_t first, size_t NH,
      size_t D),
     (at, out, lse, qkv, B, T, first, NH, D), add_call("attention", 0, start))
WRAP(void, attention_backward,
     (const Attention *at, void *dqkv, const void *dout, const void *qkv, const void *out, const float *lse, size_t B,
      size_t T, size_t NH, size_t D),
     (at, dqkv, dout, qkv, out, lse, B, T, NH, D), add_call("attention, backward", 0, start))

static int timed(const char *name, int code, double start) {
    if (!code) add_call(name, 0, start);
    return code;
}

static int step(Engine *engine, const Model *model, const uint16_t *tokens, int B, int t, StepResult *result,
                Error *e) {
    const Range all = {0, model->flat_count};
    const UpdateConfig u = {.lr = 3e-4,
                            .beta1 = 0.9,
                            .beta2 = 0.95,
                            .eps = 1e-8,
                            .weight_decay = 0.1,
                            .grad_clip = 1,
                            .step = t,
                            .batch = B};
    for (int i = 0; i < kernels; i++) kernel[i].calls = 0, kernel[i].seconds = kernel[i].flops = 0;
    TRY(engine_begin_step(engine, e));
    TRY(engine_micro_step(engine, tokens, B, GNS_LN, e));
    double start = clock_seconds();
    TRY(timed("norms", engine_norms(engine, all, e), start));
    start = clock_seconds();
    TRY(timed("update", engine_update(engine, all, &u, e), start));
    return engine_result(engine, result, e);
}

static int by_value(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void print(double *seconds, int steps) {
    double sum = 0;
    for (int i = 0; i < kernels; i++) {
        printf("%-30s %3d calls %9.2f ms", kernel[i].name, kernel[i].calls, 1e3 * kernel[i].best);
        if (kernel[i].flops > 0) printf(" %7.0f GFLOP/s", 1e-9 * kernel[i].flops / kernel[i].best);
        printf("\n");
        sum += kernel[i].best;
    }
    qsort(seconds, (size_t)steps, sizeof *seconds, by_value);
    printf("kernels %.2f ms; step: best %.2f, median %.2f ms\n", 1e3 * sum, 1e3 * seconds[0], 1e3 * seconds[steps / 2]);
}

static int load_initial(Engine *engine, const Model *model, Error *e) {
    float *values;
    int code = 0;
    TRY(memory_alloc((void **)&values, model_tensor_largest(model) * sizeof *values, "a tensor", e));
    for (int i = 0; i < model->tensor_count && !code; i++) {
        const Tensor *t = &model->tensors[i];
        model_init_values(model, t, 1, 0, t->count, values);
        code = engine_load(engine, STATE_PARAM, (Range){t->offset, t->offset + t->count}, values, e);
    }
    memory_free(values);
    return code;
}

static int run(const EngineConfig *config, int steps, Error *e) {
    const Model *model = config->model;
    Engine *engine;
    StepResult result = {0};
    uint16_t *tokens;
    double seconds[STEPS_MAX];
    size_t count = (size_t)config->micro_batch * ((size_t)config->seq_len + 1);
    TRY(memory_alloc((void **)&tokens, count * sizeof *tokens, "tokens", e));
    TRY(memory_alloc((void **)&result.grad_sq, (size_t)model->tensor_count * sizeof(double), "results", e));
    TRY(memory_alloc((void **)&result.example_sq, (size_t)model->tensor_count * sizeof(double), "results", e));
    for (size_t i = 0; i < count; i++) tokens[i] = (uint16_t)((i * 2654435761u >> 8) % (size_t)model->config.vocab);
    TRY(engine_create(&GNS_ENGINE, &engine, config, e));
    TRY(load_initial(engine, model, e));
    for (int t = 0; t < WARM_UP + steps; t++) {
        double start = clock_seconds();
        TRY(step(engine, model, tokens, config->micro_batch, t + 1, &result, e));
        if (t < WARM_UP) continue;
        seconds[t - WARM_UP] = clock_seconds() - start;
        for (int i = 0; i < kernels; i++)
            if (kernel[i].seconds < kernel[i].best) kernel[i].best = kernel[i].seconds;
    }
    print(seconds, steps);
    engine_destroy(engine);
    memory_free(tokens), memory_free(result.grad_sq), memory_free(result.example_sq);
    return 0;
}

int main(int argc, char **argv) {
    Error e = {0};
    Model model;
    ModelConfig shape = {.vocab = 50257, .context = 1024};
    EngineConfig config = {.model = &model,
                           .micro_batch = argc > 2 ? atoi(argv[2]) : 4,
                           .seq_len = argc > 3 ? atoi(argv[3]) : 64,
                           .gns = GNS_LN};
    int steps = argc > 5 ? atoi(argv[5]) : 8, code = ERR_USAGE;
    config.dtype = argc > 4 && strcmp(argv[4], "bf16") == 0 ? DTYPE_BF16 : DTYPE_FP32;
    if (!model_preset(&shape, argc > 1 ? argv[1] : "gpt2-124M") || steps < 1 || steps > STEPS_MAX)
        printf("bench_step [model [micro-batch [seq-len [fp32|bf16 [steps, at most %d]]]]]\n", STEPS_MAX);
    else code = model_create(&model, &shape, &e) ? e.code : run(&config, steps, &e);
    if (e.code) error_print(&e, 0, 1);
    return code;
}
