// bench_step: times steps of the CPU engine, kernel by kernel. Each kernel runs with the cache contents that it has in
// training; bench_cpu times kernels with cached operands. The linker's --wrap redirects the engine's calls to timers.
//
//     bench_step [model (gpt2-124M) [micro-batch (4) [seq-len (64) [type (fp32) [steps (8)]]]]]
//
// Prints a line for each kernel and shape: calls per step, least time of a step's calls, GFLOP/s of products, and the
// medians over steps of the shares of peak and roofline. The peak is the higher of two probes, before and after each
// call, so shares are valid even if cores are busy at times, or share a physical core. The memory's speed is
// taken from the fastest copy so far. Probes hardly change the caches; their time is subtracted from the step's.
#include "cpu/attention.h"
#include "cpu/calibrate.c" // multiply
#include "cpu/layers.h"
#include "cpu/matmul.h"
#include "cpu/value.h"
#include "bench.h"

#include <math.h>
#include <omp.h>
#include <stdlib.h>
#include <string.h>

enum { KERNELS_MAX = 64, WARM_UP = 2, STEPS_MAX = 1000 };

typedef struct {
    char name[40];
    int calls;
    double seconds, flops, bytes; // sums over the present step
    double possible, roofline;    // FLOPs that the peak allows in `seconds`; least seconds for flops and bytes
    double best, *of_peak, *of_roofline;
} Kernel;
static Kernel kernel[KERNELS_MAX];
static int kernels;
static Dtype dtype;
static double peak, copy, probing; // FLOP/s; B/s; seconds of the step's probes

// Returns FLOP/s of all threads at this moment, from about 50 microseconds of multiply-adds. Each thread times its own
// work, and the rates are added.
static double probe(void) {
    const MatmulKernel *kernel = matmul_kernel(dtype);
    double start = clock_seconds(), rate = 0;
#pragma omp parallel reduction(+ : rate)
    {
        double begin = clock_seconds(), work = multiply(kernel, dtype == DTYPE_BF16 ? STEPS : STEPS / 10);
        rate += work / (clock_seconds() - begin);
    }
    probing += clock_seconds() - start;
    return rate;
}

static void add_call(const char *name, double flops, double bytes, double start) {
    double seconds = clock_seconds() - start, now = probe(), higher = fmax(peak, now);
    int i = 0;
    peak = now;
    while (i < kernels && strcmp(kernel[i].name, name) != 0) i++;
    if (i == KERNELS_MAX) return;
    Kernel *k = &kernel[i];
    if (i == kernels) {
        snprintf(kernel[kernels++].name, sizeof k->name, "%s", name);
        k->best = 1e9;
        k->of_peak = calloc(2 * STEPS_MAX, sizeof *k->of_peak);
        k->of_roofline = k->of_peak + STEPS_MAX;
    }
    k->calls++, k->seconds += seconds, k->flops += flops, k->bytes += bytes;
    k->possible += seconds * higher;
    k->roofline += fmax(flops / higher, bytes / copy);
}

static void add_product(const char *name, size_t M, size_t N, size_t K, Dtype type, bool c_float, double start) {
    char text[40];
    double size = (double)value_bytes(type), m = (double)M, n = (double)N, k = (double)K;
    snprintf(text, sizeof text, "%s %zu x %zu x %zu", name, M, N, K);
    add_call(text, 2 * m * n * k, size * (m * k + k * n) + (c_float ? sizeof(float) : size) * m * n, start);
}

// Adds a pass over rows x columns. values: number of values read and written per element.
static void add_pass(const char *name, double values, double rows, double columns, Dtype type, double start) {
    add_call(name, 0, values * rows * columns * (double)value_bytes(type), start);
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
     (mm, c, a, b, bias, M, N, K), add_product("a b", M, N, K, dtype, false, start))
WRAP(void, matmul_nt, (Matmul mm, void *c, const void *a, const void *b, size_t M, size_t N, size_t K),
     (mm, c, a, b, M, N, K), add_product("a b^T", M, N, K, dtype, false, start))
WRAP(void, matmul_tn,
     (Matmul mm, float *c, float *sums, const void *a, const void *b, size_t M, size_t N, size_t K, bool accumulate),
     (mm, c, sums, a, b, M, N, K, accumulate), add_product("a^T b", M, N, K, dtype, true, start))
WRAP(void, layernorm_forward,
     (void *y, float *mean, float *rstd, void *x, const void *residual, const void *gamma, const void *beta, int N,
      int C, Dtype type),
     (y, mean, rstd, x, residual, gamma, beta, N, C, type), add_pass("LayerNorm", residual ? 4 : 2, N, C, type, start))
WRAP(void, layernorm_backward,
     (void *dx, float *dgamma, float *dbeta, double *gamma_sq, double *beta_sq, const void *dy, const void *x,
      const float *mean, const float *rstd, const void *gamma, int B, int T, int C, float *scratch, Dtype type),
     (dx, dgamma, dbeta, gamma_sq, beta_sq, dy, x, mean, rstd, gamma, B, T, C, scratch, type),
     add_pass("LayerNorm, backward", 4, (double)B *T, C, type, start))
WRAP(void, gelu_forward, (void *y, const void *x, size_t n, Dtype type), (y, x, n, type),
     add_pass("GELU", 2, 1, (double)n, type, start))
WRAP(void, gelu_backward, (void *dx, const void *dy, const void *x, size_t n, Dtype type), (dx, dy, x, n, type),
     add_pass("GELU, backward", 3, 1, (double)n, type, start))
WRAP(void, cross_entropy,
     (float *nll, float *loss, void *logits, const uint16_t *target, int N, int V, int stride, float smoothing,
      float gradient, Dtype type),
     (nll, loss, logits, target, N, V, stride, smoothing, gradient, type),
     add_pass("cross-entropy", 2, N, V, type, start))

// Counts causal products only: two forward, five backward.
static void add_attention(const char *name, int products, int values, size_t B, size_t T, size_t C, double start) {
    double rows = (double)(B * T), columns = (double)C;
    add_call(name, products * rows * (double)(T + 1) * columns, values * rows * columns * (double)value_bytes(dtype),
             start);
}
WRAP(void, attention_forward,
     (const Attention *at, void *out, float *lse, const void *qkv, size_t B, size_t T, size_t first, size_t NH,
      size_t D),
     (at, out, lse, qkv, B, T, first, NH, D), add_attention("attention", 2, 4, B, T, NH *D, start))
WRAP(void, attention_backward,
     (const Attention *at, void *dqkv, const void *dout, const void *qkv, const void *out, const float *lse, size_t B,
      size_t T, size_t NH, size_t D),
     (at, dqkv, dout, qkv, out, lse, B, T, NH, D), add_attention("attention, backward", 5, 8, B, T, NH *D, start))

static int timed(const char *name, int code, double bytes, double start) {
    if (!code) add_call(name, 0, bytes, start);
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
    const double parameters = (double)model->flat_count, rounded = dtype == DTYPE_FP32 ? 0 : 2;
    for (Kernel *k = kernel; k < kernel + kernels; k++)
        k->calls = 0, k->seconds = k->flops = k->bytes = k->possible = k->roofline = 0;
    probing = 0, peak = probe();
    TRY(engine_begin_step(engine, e));
    TRY(engine_micro_step(engine, tokens, B, GNS_LN, e));
    double start = clock_seconds();
    TRY(timed("norms", engine_norms(engine, all, e), 4 * parameters, start));
    start = clock_seconds();
    TRY(timed("update", engine_update(engine, all, &u, e), (28 + rounded) * parameters, start));
    return engine_result(engine, result, e);
}

// Stores the shares of peak and roofline of step `at`: for each kernel, and for the step with its time outside kernels.
static void add_shares(int at, double seconds, Kernel *whole) {
    double possible = 0, flops = 0, roofline = 0, timed = 0;
    for (Kernel *k = kernel; k < kernel + kernels; k++) {
        k->best = fmin(k->best, k->seconds);
        k->of_peak[at] = k->flops / k->possible, k->of_roofline[at] = k->roofline / k->seconds;
        possible += k->possible, flops += k->flops, roofline += k->roofline, timed += k->seconds;
    }
    whole->of_peak[at] = flops / (possible * seconds / timed);
    whole->of_roofline[at] = roofline / seconds;
}

static void print(double *seconds, Kernel *whole, int steps) {
    double sum = 0;
    for (Kernel *k = kernel; k < kernel + kernels; k++) {
        printf("%-26s %3d calls %9.2f ms", k->name, k->calls, 1e3 * k->best);
        if (k->flops > 0)
            printf(" %6.0f GFLOP/s, %5.1f%% of the peak,", 1e-9 * k->flops / k->best,
                   100 * bench_median(k->of_peak, steps));
        else printf("%34s", "");
        printf(" %5.1f%% of the roofline\n", 100 * bench_median(k->of_roofline, steps));
        sum += k->best;
    }
    double middle = bench_median(seconds, steps);
    printf("kernels %.2f ms; step: best %.2f, median %.2f ms; %.1f%% of the peak, %.1f%% of the roofline\n", 1e3 * sum,
           1e3 * seconds[0], 1e3 * middle, 100 * bench_median(whole->of_peak, steps),
           100 * bench_median(whole->of_roofline, steps));
}

static int run(const EngineConfig *config, int steps, Error *e) {
    const Model *model = config->model;
    Engine *engine;
    StepResult result = {0};
    uint16_t *tokens;
    static double seconds[STEPS_MAX], of_peak[STEPS_MAX], of_roofline[STEPS_MAX], peaks[STEPS_MAX], copies[STEPS_MAX];
    Kernel whole = {.of_peak = of_peak, .of_roofline = of_roofline};
    size_t count = (size_t)config->micro_batch * ((size_t)config->seq_len + 1);
    TRY(memory_alloc((void **)&tokens, count * sizeof *tokens, "tokens", e));
    TRY(bench_results(&result, model, e));
    for (size_t i = 0; i < count; i++) tokens[i] = (uint16_t)((i * 2654435761u >> 8) % (size_t)model->config.vocab);
    TRY(engine_create(&GNS_ENGINE, &engine, config, e));
    TRY(bench_load_initial(engine, model, e));
    copy = calibrate_copy(omp_get_max_threads());
    for (int t = 0; t < WARM_UP + steps; t++) {
        double start = clock_seconds();
        TRY(step(engine, model, tokens, config->micro_batch, t + 1, &result, e));
        if (t < WARM_UP) continue;
        int at = t - WARM_UP;
        seconds[at] = clock_seconds() - start - probing, peaks[at] = peak;
        add_shares(at, seconds[at], &whole);
        copy = fmax(copy, copies[at] = calibrate_copy(omp_get_max_threads()));
    }
    print(seconds, &whole, steps);
    printf("peak %.0f GFLOP/s (median), copy %.1f GB/s (median %.1f)\n", 1e-9 * bench_median(peaks, steps), 1e-9 * copy,
           1e-9 * bench_median(copies, steps));
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
    config.dtype = dtype = argc > 4 && strcmp(argv[4], "bf16") == 0 ? DTYPE_BF16 : DTYPE_FP32;
    if (!model_preset(&shape, argc > 1 ? argv[1] : "gpt2-124M") || steps < 1 || steps > STEPS_MAX)
        printf("bench_step [model [micro-batch [seq-len [fp32|bf16 [steps, at most %d]]]]]\n", STEPS_MAX);
    else code = model_create(&model, &shape, &e) ? e.code : run(&config, steps, &e);
    if (e.code) error_print(&e);
    return code;
}
