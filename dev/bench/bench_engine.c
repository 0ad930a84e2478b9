// bench_engine: times whole training steps through engine.h. Prints the time of a step, tokens per second, the share of
// the device's peak, and the time in which the host queues a step. (If queueing takes nearly the whole step, the device
// waits for the host.) Variants take turns of a few steps in one process. A turn's first step does not count, because
// the GPU still has the clock of the previous variant. The result is the median of the rounds' ratios. The model learns
// for LEARNING steps only, because a step needs more power the more the model has learnt. turns.py compares builds and
// settings.
//
//     bench_engine [model (d12) [micro-batch (64) [seq-len (1024) [rounds (20) [word...]]]]]
//
//     model   a preset; `demo`: the model of make demo; `study`: the first size of dev/docs/gns-study.md
//     word    adds a variant: exact (GNS), tune (tuned matrix products), fp8 or fp8-dw (this --dtype), head (--fp8-head).
//             Changes all variants: gelu, block (--recompute), lamb, muon (--optimizer), accumulate (8 micro-steps per
//             step), dropout (0.1), smoothing (0.1), documents (of 300 tokens on average), sources (two in turn),
//             outliers (statistics of each row, as for --outliers).
//             Replaces the variants: `sample` times logits after a short and a full text, with and without stored keys
//             and values. `turns`, for turns.py, reads lines "off|ln|exact|fp8 ROWS MICRO_STEPS SKIPPED STEPS" and
//             answers each with a step's milliseconds and tokens. ROWS: rows per micro-step; 0: micro-batch
#include "bench.h"
#include "plan/devices.h"
#include "math/rng.h"

#include <stdlib.h>
#include <string.h>

enum { ROUNDS_MAX = 1000, WARM_UP = 1, TURN = 4, LEARNING = 15, ARMS_MAX = 6, DOCUMENT_TOKENS = 300 };
enum { MICRO_STEPS_MAX = 64 }; // per step

// One of the compared variants.
typedef struct {
    const char *name;
    GnsMode mode;
    bool fp8;
    const char *tuning;  // Matmul.choices; "": the heuristic's algorithms
    const char *against; // name of the variant that this one is compared with; or NULL
    double seconds[ROUNDS_MAX], queued[ROUNDS_MAX];
} Arm;

typedef struct {
    EngineConfig config;
    Engine *engine;
    int rows, micro_steps; // rows per micro-step; micro-steps per step
    double peak;           // FLOP/s of the device; 0: unknown
    uint16_t *tokens;      // (B, T + 1)
    StepResult result;
    bool fp8;          // the next steps are in fp8
    int8_t *exponent;  // (fp8_entries) exponents of the next step; NULL: the engine has no fp8
    int rounds, steps; // rounds to do; steps done so far
    char tuning[TUNING_BYTES];
    Arm arm[ARMS_MAX];
    int arms;
} Bench;

// ---- Set-up ---------------------------------------------------------------------------------------------------------

static int separator(const Model *model) { return model->config.vocab - 1; }

static int bench_create(Bench *b, Error *e) {
    const Model *model = b->config.model;
    size_t count = (size_t)b->config.micro_batch * (size_t)(b->config.seq_len + 1);
    TRY(bench_results(&b->result, model, e));
    TRY(memory_alloc((void **)&b->tokens, count * sizeof *b->tokens, "tokens", e));
    if (b->config.step_rows) {
        size_t rows = (size_t)b->config.step_rows * sizeof *b->result.row;
        TRY(memory_alloc((void **)&b->result.row, rows, "rows", e));
    }
    if (b->config.sources) {
        const size_t products = (size_t)b->config.sources * (size_t)b->config.sources * sizeof(double);
        TRY(memory_alloc((void **)&b->result.source_gram, products, "products", e));
    }
    for (size_t i = 0; i < count; i++) { // by Zipf's law, as in text
        bool opens = rng_uniform(1, 2, i) * DOCUMENT_TOKENS < 1;
        b->tokens[i] = (uint16_t)(opens ? separator(model) : pow((double)separator(model), rng_uniform(1, 1, i)) - 1);
    }
    if (dtype_is_fp8(b->config.dtype)) {
        const size_t sites = (size_t)fp8_entries(model->config.layers);
        TRY(memory_alloc((void **)&b->exponent, sites, "exponents", e));
        TRY(memory_alloc((void **)&b->result.amax, sites * sizeof(float), "exponents", e));
        memset(b->exponent, FP8_UNSET, sites);
    }
    TRY(engine_create(&GNS_ENGINE, &b->engine, &b->config, e));
    EngineDevice device;
    GNS_ENGINE.device(&b->config, false, &device);
    b->peak = device_peak_flops(&device);
    if (b->exponent && device.is_cpu) return FAIL(e, ERR_USAGE, "leave it out", "fp8: only a GPU alternates with bf16");
    return bench_load_initial(b->engine, model, e);
}

static void bench_destroy(Bench *b) {
    engine_destroy(b->engine);
    memory_free(b->tokens);
    memory_free(b->exponent);
    memory_free(b->result.row);
    memory_free(b->result.source_gram);
    memory_free(b->result.amax);
    memory_free(b->result.example_sq);
    memory_free(b->result.grad_sq);
    memory_free(b);
}

static void add_arm(Bench *b, const char *name, GnsMode mode, const char *tuning, const char *against) {
    Arm *arm = &b->arm[b->arms++];
    arm->name = name;
    arm->mode = mode;
    arm->tuning = tuning;
    arm->against = against;
}

// ---- Measuring ------------------------------------------------------------------------------------------------------

static int step(Bench *b, GnsMode mode, double *queued, Error *e) {
    Range all = {0, b->config.model->flat_count};
    UpdateConfig u = {.lr = b->steps < LEARNING ? 1e-3 : 0,
                      .beta1 = 0.9,
                      .beta2 = 0.95,
                      .eps = 1e-8,
                      .weight_decay = 0.1,
                      .momentum = 0.95};
    u.muon_lr = u.lr;
    u.grad_clip = 1.0;
    u.step = ++b->steps;
    u.batch = (int64_t)b->micro_steps * b->rows;
    double start = clock_seconds();
    if (b->exponent) engine_exponents(b->engine, b->fp8 ? b->exponent : NULL);
    TRY(engine_begin_step(b->engine, e));
    for (int i = 0; i < b->micro_steps; i++) TRY(engine_micro_step(b->engine, b->tokens, b->rows, mode, e));
    TRY(engine_norms(b->engine, all, e));
    if (b->config.optimizer == OPTIMIZER_LAMB) TRY(engine_trust(b->engine, all, &u, e));
    TRY(engine_update(b->engine, all, &u, e));
    *queued = clock_seconds() - start;
    TRY(engine_result(b->engine, &b->result, e));
    if (b->exponent && b->fp8) fp8_adapt(b->exponent, b->result.amax, b->config.model->config.layers, true);
    return 0;
}

// Runs `skipped` steps, then times `count` steps. Sets mean seconds of a step, and of queueing a step.
static int steps_time(Bench *b, GnsMode mode, int skipped, int count, double *seconds, double *queued, Error *e) {
    double start = 0, one;
    *queued = 0;
    for (int i = -skipped; i < count; i++) {
        if (i == 0) start = clock_seconds();
        TRY(step(b, mode, &one, e));
        if (i >= 0) *queued += one / count;
    }
    *seconds = (clock_seconds() - start) / count;
    return 0;
}

static int turn(Bench *b, Arm *arm, int round, Error *e) {
    double seconds, queued;
    b->fp8 = arm->fp8;
    if (strcmp(engine_tuning(b->engine), arm->tuning) != 0) TRY(engine_set_tuning(b->engine, arm->tuning, e));
    // The first turn skips two steps, because the first step in fp8 does not round.
    TRY(steps_time(b, arm->mode, 1 + (round < 0), TURN - 1, &seconds, &queued, e));
    if (round < 0) return 0;
    arm->seconds[round] = seconds;
    arm->queued[round] = queued;
    return 0;
}

// Every other round runs backwards, so that no variant is always the first.
static int measure(Bench *b, Error *e) {
    double unused[2];
    TRY(steps_time(b, GNS_OFF, LEARNING, 1, &unused[0], &unused[1], e));
    for (int r = -WARM_UP; r < b->rounds; r++)
        for (int i = 0; i < b->arms; i++) TRY(turn(b, &b->arm[r % 2 ? b->arms - 1 - i : i], r, e));
    return 0;
}

// ---- Printing -------------------------------------------------------------------------------------------------------

static void tell_arm(const Bench *b, const Arm *arm) {
    double sorted[ROUNDS_MAX], queued[ROUNDS_MAX], peak = b->peak;
    memcpy(sorted, arm->seconds, sizeof sorted);
    memcpy(queued, arm->queued, sizeof queued);
    double s = bench_median(sorted, b->rounds), tokens = (double)b->micro_steps * b->rows * b->config.seq_len;
    double flops = tokens * model_flops_per_token(b->config.model, b->config.seq_len);
    printf("%-13s %9.3f ms a step (%.3f to %.3f), %8.0f tok/s, %6.1f TFLOP/s", arm->name, 1e3 * s, 1e3 * sorted[0],
           1e3 * sorted[b->rounds - 1], tokens / s, 1e-12 * flops / s);
    if (peak > 0) printf(", MFU %.1f%%", 100 * flops / s / peak);
    printf(", queued in %.3f ms\n", 1e3 * bench_median(queued, b->rounds));
}

// For normal values the median's standard error is 1.2533 times the mean's, and the standard deviation is 1.4826 times
// the median distance from the median. Both change little with an outlier, such as a step that other work delayed.
static void tell_ratio(const Bench *b, const Arm *arm, const Arm *other) {
    double ratio[ROUNDS_MAX], distance[ROUNDS_MAX];
    int n = b->rounds;
    for (int r = 0; r < n; r++) ratio[r] = arm->seconds[r] / other->seconds[r] - 1;
    double middle = bench_median(ratio, n);
    for (int r = 0; r < n; r++) distance[r] = fabs(ratio[r] - middle);
    double se = 1.2533 * 1.4826 * bench_median(distance, n) / sqrt(n);
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
    printf("loss of the last step %.4f after %d steps on one batch\n", b->result.loss_sum / b->rows / b->micro_steps,
           b->steps);
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
    bool tune, sample, turns;
} Words;

static int source_of(const void *data, uint64_t example) { return (void)data, (int)(example % 2); }

// True for a word that changes the engine's configuration.
static bool read_setting(Bench *b, const char *word) {
    EngineConfig *c = &b->config;
    const int rows = MICRO_STEPS_MAX * c->micro_batch;
    if (strcmp(word, "gelu") == 0) c->recompute = RECOMPUTE_GELU;
    else if (strcmp(word, "block") == 0) c->recompute = RECOMPUTE_BLOCK;
    else if (strcmp(word, "exact") == 0) c->gns = GNS_EXACT;
    else if (strcmp(word, "lamb") == 0) c->optimizer = OPTIMIZER_LAMB;
    else if (strcmp(word, "muon") == 0) c->optimizer = OPTIMIZER_MUON;
    else if (strcmp(word, "fp8") == 0) c->dtype = DTYPE_FP8;
    else if (strcmp(word, "fp8-dw") == 0) c->dtype = DTYPE_FP8_DW;
    else if (strcmp(word, "head") == 0) c->fp8_head = true;
    else if (strcmp(word, "dropout") == 0) c->dropout = dropout_of(0.1, 1);
    else if (strcmp(word, "smoothing") == 0) c->label_smoothing = 0.1f;
    else if (strcmp(word, "outliers") == 0) c->step_rows = rows;
    else if (strcmp(word, "sources") == 0) c->sources = 2, c->source = source_of, c->step_rows = rows;
    else if (strcmp(word, "documents") == 0) c->document_mask = true, c->separator = (uint16_t)separator(c->model);
    else return false;
    return true;
}

static int read_words(Bench *b, int argc, char **argv, Words *words, Error *e) {
    b->config.gns = GNS_LN;
    b->micro_steps = 1;
    b->rows = b->config.micro_batch;
    for (int i = 5; i < argc; i++) {
        if (strcmp(argv[i], "tune") == 0) words->tune = true;
        else if (strcmp(argv[i], "sample") == 0) words->sample = true;
        else if (strcmp(argv[i], "turns") == 0) words->turns = true;
        else if (strcmp(argv[i], "accumulate") == 0) b->micro_steps = 8;
        else if (!read_setting(b, argv[i]))
            return FAIL(e, ERR_USAGE, "they are at the head of dev/bench/bench_engine.c", "no word is called %s",
                        argv[i]);
    }
    return 0;
}

// Tunes the engine and stores its choices.
static int tuned(Bench *b, Error *e) {
    double start = clock_seconds();
    if (!engine_api(b->engine)->tune) return FAIL(e, ERR_USAGE, "leave it out", "tune: only a GPU chooses algorithms");
    TRY(engine_tune(b->engine, e));
    snprintf(b->tuning, TUNING_BYTES, "%s", engine_tuning(b->engine));
    fprintf(stderr, "tuned in %.1f s\n", clock_seconds() - start);
    return 0;
}

// Runs the steps that stdin asks for.
static int bench_turns(Bench *b, Words words, Error *e) {
    const char *const names[] = {"off", "ln", "exact"};
    char line[64], mode[16];
    int skipped, count;
    double seconds, queued;
    TRY(bench_create(b, e));
    if (words.tune) TRY(tuned(b, e));
    TRY(steps_time(b, GNS_OFF, LEARNING, 1, &seconds, &queued, e));
    printf("ready\n");
    while (fgets(line, sizeof line, stdin)) {
        int m = -1;
        if (sscanf(line, "%15s %d %d %d %d", mode, &b->rows, &b->micro_steps, &skipped, &count) == 5)
            for (m = (int)b->config.gns; m >= 0 && strcmp(mode, names[m]) != 0;) m--;
        b->fp8 = b->exponent && strcmp(mode, "fp8") == 0;
        if (b->fp8) m = GNS_LN;
        if (b->rows == 0) b->rows = b->config.micro_batch;
        if (m < 0 || count < 1 || b->micro_steps < 1 || b->micro_steps > MICRO_STEPS_MAX || b->rows < 0 ||
            b->rows > b->config.micro_batch)
            return FAIL(e, ERR_USAGE, "off|ln|exact|fp8 ROWS MICRO_STEPS SKIPPED STEPS", "no turn of this engine: %s",
                        line);
        TRY(steps_time(b, (GnsMode)m, skipped, count, &seconds, &queued, e));
        printf("%.4f %d\n", 1e3 * seconds, b->micro_steps * b->rows * b->config.seq_len);
    }
    return 0;
}

// Returns the milliseconds of a call for logits after about n tokens. Each call appends a token to
// the previous call's text. If not `seen`, it also changes the first token, so no stored keys and values fit.
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

// Times logits at both lengths, with and without stored keys and values. The four cases take turns.
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
        double all = bench_median(ms[k][0], b->rounds), last = bench_median(ms[k][1], b->rounds);
        printf("logits after %d tokens: %.3f ms, with keys and values in memory %.3f ms: %.1f times as fast\n",
               lengths[k] - 12, all, last, all / last);
    }
    return 0;
}

static int bench_run(Bench *b, Words words, const char *name, Error *e) {
    if (words.sample) return bench_sample(b, e);
    if (words.turns) return bench_turns(b, words, e);
    tell_memory(b, name);
    TRY(bench_create(b, e));
    if (!b->exponent) add_arm(b, "gns off", GNS_OFF, "", NULL);
    add_arm(b, "gns ln", GNS_LN, "", "gns off");
    if (b->config.gns == GNS_EXACT) add_arm(b, "gns exact", GNS_EXACT, "", "gns off");
    const char *rounded = dtype_names[b->config.dtype];
    const bool dw = b->config.dtype == DTYPE_FP8_DW;
    if (b->exponent) add_arm(b, rounded, GNS_LN, "", "gns ln"), b->arm[b->arms - 1].fp8 = true;
    if (b->exponent && b->config.gns == GNS_EXACT)
        add_arm(b, dw ? "fp8-dw-exact" : "fp8-exact", GNS_EXACT, "", rounded), b->arm[b->arms - 1].fp8 = true;
    if (words.tune) {
        TRY(tuned(b, e));
        if (b->exponent) add_arm(b, "fp8, tuned", GNS_LN, b->tuning, "tuned"), b->arm[b->arms - 1].fp8 = true;
        add_arm(b, "tuned", GNS_LN, b->tuning, "gns ln");
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
    else if (strcmp(name, "study") == 0) shape = (ModelConfig){.layers = 6, .heads = 6, .channels = 384, .vocab = 256};
    else if (!model_preset(&shape, name)) return FAIL(e, ERR_USAGE, MODEL_PRESET_HELP, "no model is called %s", name);
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
    if (code) error_print(&e);
    return code;
}
