// bench_engine: whole training steps through engine.h: time of a step, tokens a second, share of the device's peak, and
// the time in which the host queues a step (where that is nearly the whole step, the device waits for the host). Variants
// take turns of a few steps in one process, and a turn's first step does not count: it still has the clock that the
// variant before left. The result is the median of the rounds' ratios.
//
//     bench_engine [model (d12) [micro-batch (64) [seq-len (1024) [rounds (20) [word...]]]]]
//
//     model   a preset, or `demo`: that of make demo
//     words   gelu, block: recompute; exact: measure exact GNS steps too; tune: and steps with tuned matrix products;
//             lamb, muon: and steps of these, with memory of their own; accumulate: 8 micro-steps a step;
//             sample: instead, logits of a token after a short and a full text, keys and values in memory or not;
//             dropout (0.1), smoothing (0.1), documents (of 300 tokens on average): and an engine with it, of its own memory;
//             before: and an earlier build's engine, with memory of its own (dev/bench/before.sh links one)
#include "model/engine.h"
#include "plan/devices.h"
#include "math/rng.h"

#include <stdlib.h>
#include <string.h>

enum { ROUNDS_MAX = 1000, WARM_UP = 1, TURN = 4, ARMS_MAX = 8, MASKED = 3, DOCUMENT_TOKENS = 300 };

// One of the compared variants.
typedef struct {
    const char *name;
    Engine *engine;
    GnsMode mode;
    const char *tuning;  // of the matrix products; "": the heuristic's
    const char *against; // the name of the one that it is compared with, or NULL
    double seconds[ROUNDS_MAX], queued[ROUNDS_MAX];
} Arm;

typedef struct {
    EngineConfig config;
    Engine *engine, *before;   // before: NULL, or of an earlier build
    Engine *other[OPTIMIZERS]; // with another optimizer, or NULL
    Engine *masked[MASKED];    // NULL, or one for each word
    int micro_steps;           // of a step
    double peak;               // of the device, FLOP/s; 0: unknown
    uint16_t *tokens;          // (B, T + 1)
    StepResult result;
    int rounds, steps;            // to do; done
    char tuning[2][TUNING_BYTES]; // the engine's, the earlier one's
    Arm arm[ARMS_MAX];
    int arms;
} Bench;

// ---- Set-up ---------------------------------------------------------------------------------------------------------

#ifdef GNS_BEFORE
extern const EngineApi GNS_BEFORE;
#endif

// Initial values; those of the first block in all blocks, which is quicker.
static int load_initial(const Bench *b, Engine *engine, Error *e) {
    const Model *model = b->config.model;
    float *values;
    int code = 0;
    TRY(memory_alloc((void **)&values, model_tensor_largest(model) * sizeof *values, "a tensor", e));
    for (int k = 0; k < model->tensor_count && !code; k++) {
        const Tensor *first = &model->tensors[k];
        if (first->layer > 0) continue;
        model_init_values(model, first, 1, 0, first->count, values);
        for (int i = k; i < model->tensor_count && !code; i++) {
            const Tensor *t = &model->tensors[i];
            if (t->kind != first->kind) continue;
            code = engine_load(engine, STATE_PARAM, (Range){t->offset, t->offset + t->count}, values, e);
        }
    }
    memory_free(values);
    return code;
}

static int separator(const Model *model) { return model->config.vocab - 1; }

static int bench_create(Bench *b, Error *e) {
    const Model *model = b->config.model;
    size_t tensors = (size_t)model->tensor_count;
    size_t count = (size_t)b->config.micro_batch * (size_t)(b->config.seq_len + 1);
    TRY(memory_alloc((void **)&b->result.grad_sq, tensors * sizeof(double), "results", e));
    TRY(memory_alloc((void **)&b->result.example_sq, tensors * sizeof(double), "results", e));
    TRY(memory_alloc((void **)&b->tokens, count * sizeof *b->tokens, "tokens", e));
    for (size_t i = 0; i < count; i++) { // Zipf's law, as text has it
        bool opens = rng_uniform(1, 2, i) * DOCUMENT_TOKENS < 1;
        b->tokens[i] = (uint16_t)(opens ? separator(model) : pow((double)separator(model), rng_uniform(1, 1, i)) - 1);
    }
    TRY(engine_create(&GNS_ENGINE, &b->engine, &b->config, e));
    EngineDevice device;
    GNS_ENGINE.device(&b->config, false, &device);
    b->peak = device_peak_flops(&device);
    return load_initial(b, b->engine, e);
}

static int before_create(Bench *b, Error *e) {
#ifdef GNS_BEFORE
    TRY(engine_create(&GNS_BEFORE, &b->before, &b->config, e));
    return load_initial(b, b->before, e);
#else
    (void)b;
    return FAIL(e, ERR_USAGE, "dev/bench/before.sh TREE links one", "this build has no earlier engine");
#endif
}

static const char *const masked_names[MASKED] = {"dropout", "smoothing", "documents"};

static int masked_create(Bench *b, int which, Error *e) {
    EngineConfig config = b->config;
    if (which == 0) config.dropout = dropout_of(0.1, 1);
    if (which == 1) config.label_smoothing = 0.1f;
    if (which == 2) config.document_mask = true, config.separator = (uint16_t)separator(config.model);
    TRY(engine_create(&GNS_ENGINE, &b->masked[which], &config, e));
    return load_initial(b, b->masked[which], e);
}

static void bench_destroy(Bench *b) {
    for (int o = 0; o < OPTIMIZERS; o++) engine_destroy(b->other[o]);
    for (int i = 0; i < MASKED; i++) engine_destroy(b->masked[i]);
    engine_destroy(b->before);
    engine_destroy(b->engine);
    memory_free(b->tokens);
    memory_free(b->result.example_sq);
    memory_free(b->result.grad_sq);
    memory_free(b);
}

static void add_arm(Bench *b, const char *name, Engine *engine, GnsMode mode, const char *tuning, const char *against) {
    Arm *arm = &b->arm[b->arms++];
    arm->name = name;
    arm->engine = engine;
    arm->mode = mode;
    arm->tuning = tuning;
    arm->against = against;
}

// ---- Measuring ------------------------------------------------------------------------------------------------------

static int step(Bench *b, const Arm *arm, double *queued, Error *e) {
    Range all = {0, b->config.model->flat_count};
    UpdateConfig u = {.lr = 3e-4, .beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8, .weight_decay = 0.1, .momentum = 0.95};
    u.grad_clip = 1.0;
    u.step = ++b->steps;
    u.batch = (int64_t)b->micro_steps * b->config.micro_batch;
    double start = clock_seconds();
    TRY(engine_begin_step(arm->engine, e));
    for (int i = 0; i < b->micro_steps; i++)
        TRY(engine_micro_step(arm->engine, b->tokens, b->config.micro_batch, arm->mode, e));
    TRY(engine_norms(arm->engine, all, e));
    if (arm->engine == b->other[OPTIMIZER_LAMB]) TRY(engine_trust(arm->engine, all, &u, e));
    TRY(engine_update(arm->engine, all, &u, e));
    *queued = clock_seconds() - start;
    return engine_result(arm->engine, &b->result, e);
}

// The first step of a turn, which also sets up new algorithms, is not counted.
static int turn(Bench *b, Arm *arm, int round, Error *e) {
    double queued, seconds = 0, queued_sum = 0;
    if (strcmp(engine_tuning(arm->engine), arm->tuning) != 0) TRY(engine_set_tuning(arm->engine, arm->tuning, e));
    for (int i = 0; i < TURN; i++) {
        double start = clock_seconds();
        TRY(step(b, arm, &queued, e));
        if (i == 0) continue;
        seconds += clock_seconds() - start;
        queued_sum += queued;
    }
    if (round < 0) return 0;
    arm->seconds[round] = seconds / (TURN - 1);
    arm->queued[round] = queued_sum / (TURN - 1);
    return 0;
}

// Every other round runs backwards, so that no variant is always the first.
static int measure(Bench *b, Error *e) {
    for (int r = -WARM_UP; r < b->rounds; r++)
        for (int i = 0; i < b->arms; i++) TRY(turn(b, &b->arm[r % 2 ? b->arms - 1 - i : i], r, e));
    return 0;
}

// ---- Printing -------------------------------------------------------------------------------------------------------

static int by_value(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

// Sorts the values.
static double median(double *values, int n) {
    qsort(values, (size_t)n, sizeof *values, by_value);
    return n % 2 ? values[n / 2] : 0.5 * (values[n / 2 - 1] + values[n / 2]);
}

static void tell_arm(const Bench *b, const Arm *arm) {
    double sorted[ROUNDS_MAX], queued[ROUNDS_MAX], peak = b->peak;
    memcpy(sorted, arm->seconds, sizeof sorted);
    memcpy(queued, arm->queued, sizeof queued);
    double s = median(sorted, b->rounds), tokens = (double)b->micro_steps * b->config.micro_batch * b->config.seq_len;
    double flops = tokens * model_flops_per_token(b->config.model, b->config.seq_len);
    printf("%-13s %9.3f ms a step (%.3f to %.3f), %8.0f tok/s, %6.1f TFLOP/s", arm->name, 1e3 * s, 1e3 * sorted[0],
           1e3 * sorted[b->rounds - 1], tokens / s, 1e-12 * flops / s);
    if (peak > 0) printf(", MFU %.1f%%", 100 * flops / s / peak);
    printf(", queued in %.3f ms\n", 1e3 * median(queued, b->rounds));
}

// The standard error of a median is 1.2533 that of the mean of normal values, whose deviation is 1.4826 times the
// median distance from the median: an outlier, such as a step that other work delayed, counts as one value.
static void tell_ratio(const Bench *b, const Arm *arm, const Arm *other) {
    double ratio[ROUNDS_MAX], distance[ROUNDS_MAX];
    int n = b->rounds;
    for (int r = 0; r < n; r++) ratio[r] = arm->seconds[r] / other->seconds[r] - 1;
    double middle = median(ratio, n);
    for (int r = 0; r < n; r++) distance[r] = fabs(ratio[r] - middle);
    double se = 1.2533 * 1.4826 * median(distance, n) / sqrt(n);
    printf("%s against %s: %+.2f%% +- %.2f%% of a step's time (median of %d rounds)\n", arm->name, other->name,
           100 * middle, 100 * se, n);
}

static void tell(const Bench *b) {
    char line[256];
    engine_describe(b->engine, line, sizeof line);
    printf("%s\n", line);
    for (int i = 0; i < b->arms; i++) tell_arm(b, &b->arm[i]);
    for (int i = 0; i < b->arms; i++)
        for (int k = 0; k < b->arms; k++)
            if (b->arm[i].against && strcmp(b->arm[i].against, b->arm[k].name) == 0)
                tell_ratio(b, &b->arm[i], &b->arm[k]);
    printf("loss of the last step %.4f after %d steps on one batch\n",
           b->result.loss_sum / b->config.micro_batch / b->micro_steps, b->steps);
}

static void tell_memory(const Bench *b, const char *name) {
    MemoryPlan plan;
    GNS_ENGINE.plan_memory(&b->config, &plan);
    printf("%s, micro-batch %d x %d, recompute %d: %.2f GiB\n", name, b->config.micro_batch, b->config.seq_len,
           (int)b->config.recompute, (double)plan.total / (1 << 30));
    for (int i = 0; i < plan.count; i++)
        printf("  %-40s %8.3f GiB\n", plan.item[i].what, (double)plan.item[i].bytes / (1 << 30));
}

// ---- The command line -----------------------------------------------------------------------------------------------

static int argument(int argc, char **argv, int i, int otherwise) { return argc > i ? atoi(argv[i]) : otherwise; }

typedef struct {
    bool tune, before, sample, optimizer[OPTIMIZERS], masked[MASKED];
} Words;

// Is it one of the masks'?
static bool read_masked(const char *word, Words *words) {
    for (int i = 0; i < MASKED; i++)
        if (strcmp(word, masked_names[i]) == 0) return words->masked[i] = true;
    return false;
}

static int read_words(Bench *b, int argc, char **argv, Words *words, Error *e) {
    b->config.gns = GNS_LN;
    b->micro_steps = 1;
    for (int i = 5; i < argc; i++) {
        if (strcmp(argv[i], "gelu") == 0) b->config.recompute = RECOMPUTE_GELU;
        else if (strcmp(argv[i], "block") == 0) b->config.recompute = RECOMPUTE_BLOCK;
        else if (strcmp(argv[i], "exact") == 0) b->config.gns = GNS_EXACT;
        else if (strcmp(argv[i], "tune") == 0) words->tune = true;
        else if (strcmp(argv[i], "before") == 0) words->before = true;
        else if (strcmp(argv[i], "lamb") == 0) words->optimizer[OPTIMIZER_LAMB] = true;
        else if (strcmp(argv[i], "muon") == 0) words->optimizer[OPTIMIZER_MUON] = true;
        else if (strcmp(argv[i], "sample") == 0) words->sample = true;
        else if (strcmp(argv[i], "accumulate") == 0) b->micro_steps = 8;
        else if (!read_masked(argv[i], words))
            return FAIL(
                e, ERR_USAGE,
                "gelu, block, exact, tune, lamb, muon, accumulate, sample, dropout, smoothing, documents, before",
                "no word is called %s", argv[i]);
    }
    return 0;
}

// Tunes the engine, and keeps what it chose in `text`.
static int tuned(Engine *engine, char *text, Error *e) {
    double start = clock_seconds();
    TRY(engine_tune(engine, e));
    snprintf(text, TUNING_BYTES, "%s", engine_tuning(engine));
    printf("tuned in %.1f s\n", clock_seconds() - start);
    return 0;
}

// Milliseconds of a call at the end of a text of n tokens: a token longer than the last one, or of another text.
static double logits_ms(Bench *b, int n, bool seen, float *logits, Error *e) {
    enum { CALLS = 24 };
    double start = 0;
    for (int i = -1; i < CALLS; i++) {
        if (i == 0) start = clock_seconds();
        if (!seen) b->tokens[0] ^= 1;
        if (engine_logits(b->engine, b->tokens, n - CALLS + i + 1, logits, e)) return NAN;
    }
    return 1e3 * (clock_seconds() - start) / CALLS;
}

// By turns.
static int bench_sample(Bench *b, Error *e) {
    double ms[2][2][ROUNDS_MAX];
    float *logits;
    const int lengths[] = {32, b->config.seq_len};
    b->config.inference = true;
    TRY(bench_create(b, e));
    TRY(memory_alloc((void **)&logits, sizeof *logits * (size_t)b->config.model->config.vocab, "logits", e));
    for (int r = -WARM_UP; r < b->rounds; r++)
        for (int i = 0; i < 4; i++) {
            double value = logits_ms(b, lengths[i / 2], i % 2, logits, e);
            if (r >= 0) ms[i / 2][i % 2][r] = value;
        }
    memory_free(logits);
    for (int k = 0; k < 2; k++) {
        double all = median(ms[k][0], b->rounds), last = median(ms[k][1], b->rounds);
        printf("logits after %d tokens: %.3f ms, with keys and values in memory %.3f ms: %.1f times as fast\n",
               lengths[k] - 12, all, last, all / last);
    }
    return 0;
}

static int add_optimizer(Bench *b, Optimizer o, Error *e) {
    EngineConfig config = b->config;
    config.optimizer = o;
    TRY(engine_create(&GNS_ENGINE, &b->other[o], &config, e));
    TRY(load_initial(b, b->other[o], e));
    add_arm(b, optimizer_names[o], b->other[o], GNS_LN, "", "gns ln");
    return 0;
}

static int bench_run(Bench *b, Words words, const char *name, Error *e) {
    if (words.sample) return bench_sample(b, e);
    tell_memory(b, name);
    TRY(bench_create(b, e));
    if (!words.before) add_arm(b, "gns off", b->engine, GNS_OFF, "", NULL);
    add_arm(b, "gns ln", b->engine, GNS_LN, "", words.before ? "before" : "gns off");
    if (b->config.gns == GNS_EXACT)
        add_arm(b, "gns exact", b->engine, GNS_EXACT, "", words.before ? "gns ln" : "gns off");
    if (words.tune) {
        TRY(tuned(b->engine, b->tuning[0], e));
        add_arm(b, "tuned", b->engine, GNS_LN, b->tuning[0], "gns ln");
    }
    for (int o = 0; o < OPTIMIZERS; o++)
        if (words.optimizer[o]) TRY(add_optimizer(b, (Optimizer)o, e));
    if (words.before) {
        TRY(before_create(b, e));
        add_arm(b, "before", b->before, GNS_LN, "", NULL);
    }
    if (words.before && words.tune) {
        TRY(tuned(b->before, b->tuning[1], e));
        add_arm(b, "before, tuned", b->before, GNS_LN, b->tuning[1], "before");
    }
    for (int i = 0; i < MASKED; i++) {
        if (!words.masked[i]) continue;
        TRY(masked_create(b, i, e));
        add_arm(b, masked_names[i], b->masked[i], GNS_LN, "", "gns ln");
    }
    TRY(measure(b, e));
    tell(b);
    return 0;
}

static int run(int argc, char **argv, Error *e) {
    const char *name = argc > 1 ? argv[1] : "d12";
    int seq_len = argument(argc, argv, 3, 1024), rounds = argument(argc, argv, 4, 20);
    ModelConfig shape = {.vocab = 50257};
    Model model;
    Bench *b;
    Words words = {0};
    setvbuf(stdout, NULL, _IOLBF, 0);
    if (strcmp(name, "demo") == 0) shape = (ModelConfig){.layers = 2, .heads = 6, .channels = 192, .vocab = 256};
    else if (!model_preset(&shape, name)) return FAIL(e, ERR_USAGE, model_preset_help, "no model is called %s", name);
    if (rounds < 1 || rounds > ROUNDS_MAX) return FAIL(e, ERR_USAGE, "1 to 1000", "%d rounds", rounds);
    shape.context = seq_len;
    TRY(model_create(&model, &shape, e));
    TRY(memory_alloc_zero((void **)&b, sizeof *b, "the benchmark", e));
    b->config.model = &model;
    b->config.micro_batch = argument(argc, argv, 2, 64);
    b->config.seq_len = seq_len;
    b->rounds = rounds;
    int code = read_words(b, argc, argv, &words, e);
    if (!code) code = bench_run(b, words, name, e);
    bench_destroy(b);
    model_destroy(&model);
    return code;
}

int main(int argc, char **argv) {
    Error e = {0};
    int code = run(argc, argv, &e);
    if (code) error_print(&e, 0, 1);
    return code;
}
