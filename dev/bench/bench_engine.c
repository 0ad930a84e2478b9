// bench_engine: whole training steps through engine.h, on whichever engine it is linked with: time of a step, tokens a
// second, share of the device's peak. Steps of the modes given alternate, so that their times can be compared.
//
//     bench_engine [model (d12) [micro-batch (64) [seq-len (1024) [rounds (20) [recompute (0, 1, 2) [exact (0, 1)]]]]]]
#define _POSIX_C_SOURCE 200809L
#include "../../llmc/engine.h"
#include "../../llmc/rng.h"

#include <stdlib.h>
#include <string.h>

enum { ROUNDS_MAX = 1000, WARM_UP = 3 };

static int argument(int argc, char **argv, int i, int otherwise) { return argc > i ? atoi(argv[i]) : otherwise; }

static int load_initial(Engine *engine, const Model *model, Error *e) {
    float *values;
    TRY(memory_alloc_zero((void **)&values, model->flat_count * sizeof *values, "parameters", e));
    for (int k = 0; k < model->tensor_count; k++) {
        const Tensor *t = &model->tensors[k];
        model_init_values(model, t, 1, 0, t->count, values + t->offset);
    }
    int code = engine_load(engine, STATE_PARAM, (Range){0, model->flat_count}, values, e);
    memory_free(values);
    return code;
}

static int step(Engine *engine, const EngineConfig *c, const uint16_t *tokens, GnsMode mode, int number,
                StepResult *result, Error *e) {
    Range all = {0, c->model->flat_count};
    UpdateConfig u = {.lr = 3e-4, .beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8, .weight_decay = 0.1, .grad_clip = 1.0};
    u.step = number;
    u.batch = c->micro_batch;
    TRY(engine_begin_step(engine, e));
    TRY(engine_micro_step(engine, tokens, c->micro_batch, mode, e));
    TRY(engine_norms(engine, all, e));
    TRY(engine_update(engine, all, &u, e));
    return engine_result(engine, result, e);
}

static int by_value(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static int bench(const EngineConfig *c, int rounds, StepResult *result, uint16_t *tokens, Error *e) {
    static const char *const names[] = {"gns off", "gns ln", "gns exact"};
    static double seconds[GNS_EXACT + 1][ROUNDS_MAX];
    Engine *engine;
    char line[256];
    int number = 0;
    size_t row = (size_t)c->micro_batch * (size_t)(c->seq_len + 1);
    for (size_t i = 0; i < row; i++) { // Zipf's law, as text has it
        double u = rng_uniform(1, 1, i);
        double rank = pow((double)c->model->config.vocab, u) - 1;
        tokens[i] = (uint16_t)rank;
    }
    TRY(engine_create(&engine, c, e));
    int code = 0;
    TRY_GOTO(load_initial(engine, c->model, e));
    for (int r = -WARM_UP; r < rounds; r++)
        for (int mode = GNS_OFF; mode <= (int)c->gns; mode++) {
            double start = clock_seconds();
            TRY_GOTO(step(engine, c, tokens, (GnsMode)mode, ++number, result, e));
            if (r >= 0) seconds[mode][r] = clock_seconds() - start;
        }
    engine_describe(engine, line, sizeof line);
    printf("%s\n", line);
    double n = (double)c->micro_batch * c->seq_len, flops = model_flops_per_token(c->model, c->seq_len);
    for (int mode = GNS_OFF; mode <= (int)c->gns; mode++) {
        qsort(seconds[mode], (size_t)rounds, sizeof(double), by_value);
        double s = seconds[mode][rounds / 2], peak = engine_peak_flops(engine);
        printf("%-10s %9.3f ms a step (%.3f to %.3f), %8.0f tok/s, %6.1f TFLOP/s", names[mode], 1e3 * s,
               1e3 * seconds[mode][0], 1e3 * seconds[mode][rounds - 1], n / s, 1e-12 * flops * n / s);
        if (peak > 0) printf(", MFU %.1f%%", 100 * flops * n / s / peak);
        printf("\n");
    }
    printf("loss of the last step %.4f after %d steps on one batch\n", result->loss_sum / c->micro_batch, number);
done:
    engine_destroy(engine);
    return code;
}

static int run(int argc, char **argv, Error *e) {
    const char *name = argc > 1 ? argv[1] : "d12";
    int seq_len = argument(argc, argv, 3, 1024), rounds = argument(argc, argv, 4, 20);
    ModelConfig shape = {.vocab = 50257, .context = seq_len};
    Model model;
    MemoryPlan plan;
    if (!model_preset(&shape, name)) return FAIL(e, ERR_USAGE, model_preset_help, "no model is called %s", name);
    if (rounds < 1 || rounds > ROUNDS_MAX) return FAIL(e, ERR_USAGE, "1 to 1000", "%d rounds", rounds);
    TRY(model_create(&model, &shape, e));
    EngineConfig c = {.model = &model, .micro_batch = argument(argc, argv, 2, 64), .seq_len = seq_len};
    c.recompute = (Recompute)argument(argc, argv, 5, 0);
    c.gns = argument(argc, argv, 6, 0) ? GNS_EXACT : GNS_LN;
    engine_plan_memory(&c, &plan);
    printf("%s, micro-batch %d x %d, recompute %d: %.2f GiB\n", name, c.micro_batch, seq_len, (int)c.recompute,
           (double)plan.total / (1 << 30));
    for (int i = 0; i < plan.count; i++)
        printf("  %-40s %8.3f GiB\n", plan.item[i].what, (double)plan.item[i].bytes / (1 << 30));
    size_t tensors = (size_t)model.tensor_count, row = (size_t)c.micro_batch * (size_t)(seq_len + 1);
    StepResult result = {0};
    void *memory;
    TRY(memory_alloc(&memory, 2 * tensors * sizeof(double) + row * sizeof(uint16_t), "results", e));
    result.grad_sq = memory;
    result.example_sq = result.grad_sq + tensors;
    int code = bench(&c, rounds, &result, (uint16_t *)(result.example_sq + tensors), e);
    memory_free(memory);
    model_destroy(&model);
    return code;
}

int main(int argc, char **argv) {
    Error e = {0};
    int code = run(argc, argv, &e);
    if (code) error_print(&e, 0, 1);
    return code;
}
