// Compares the training loop bit for bit with a plain loop on the same engine: each step's rows, batch, learning rate
// and AdamW step number, and the log. Also tests the loss scale and the ramp by the noise scale.
#include "checkpoint/checkpoint.h"
#include "cpu/matmul.h"
#include "model/engine.h"
#include "../trainer.h"

#include <signal.h>

static Error e; // set by the last call that failed

enum { T = 8, V = 256, MICRO_BATCH = 4, LOW = 3, HIGH = 11, REFERENCE = 6, TOKENS = 1600, WARMUP = 200, SEED = 31 };
enum { RAMP_LOW = 2, RAMP_HIGH = 32, RAMP_TOKENS = 6000, HALF_LIFE = 60 }; // the ramp by the noise scale
static const double peak = 1e-2, final_frac = 0.1, grad_clip = 1;

// Options for V, T and MICRO_BATCH.
#define HERE                                                                                                           \
    "train_gpt2 --train train.bin --vocab-size 256 --model d1 --layers 1 --heads 1 --channels 16 --seq-len 8 "         \
    "--threads 1 --micro-batch 4 "

// Returns the learning rate: warm-up, then linear decay, times sqrt(batch / reference batch). tokens: after the step.
static double wanted_lr(double tokens, double batch) {
    double down = 1 - (1 - final_frac) * (tokens - WARMUP) / (TOKENS - WARMUP);
    return peak * (tokens < WARMUP ? tokens / WARMUP : down) * sqrt(batch / REFERENCE);
}

// Returns a batch linear in the tokens before the step, from LOW to HIGH rows; the last step has the remaining rows.
static int wanted_batch(int tokens) {
    int batch = (int)round(LOW + (double)(HIGH - LOW) * tokens / TOKENS), left = (TOKENS - tokens) / T;
    return batch < left ? batch : left;
}

static int copy_in(void *flat, StateKind kind, Range range, const float *values, Error *e) {
    memcpy((float *)flat + range.begin, values, range_length(range) * sizeof *values);
    return 0;
}

typedef struct {
    Model model;
    Engine *engine;
    Dataset *data;
    double *grad_sq, *example_sq;      // (tensors)
    float *weights;                    // (flat_count)
    int8_t exponents[2 * FP8_ENTRIES]; // of the block and the head
    float amax[2 * FP8_ENTRIES];
    bool fp8;
    int repeats; // of steps that saturate
} World;

static void world_open(World *w, bool fp8) {
    const ModelConfig shape = {.layers = 1, .heads = 1, .channels = 16, .vocab = V, .context = T};
    *w = (World){.fp8 = fp8};
    memset(w->exponents, FP8_UNSET, sizeof w->exponents);
    CHECK_OK(model_create(&w->model, &shape, &e), &e);
    EngineConfig config = {.model = &w->model, .micro_batch = MICRO_BATCH, .seq_len = T, .threads = 1, .gns = GNS_OFF};
    if (fp8) config.dtype = DTYPE_FP8;
    CHECK_OK(engine_create(&cpu_engine, &w->engine, &config, &e), &e);
    CHECK_OK(dataset_open(&w->data, "train.bin", T, V, SEED, &e), &e);
    w->grad_sq = calloc((size_t)w->model.tensor_count, sizeof(double));
    w->example_sq = calloc((size_t)w->model.tensor_count, sizeof(double));
    w->weights = calloc(w->model.flat_count, sizeof(float));
    for (int i = 0; i < w->model.tensor_count; i++) {
        const Tensor *t = &w->model.tensors[i];
        model_init_values(&w->model, t, SEED, 0, t->count, w->weights + t->offset);
    }
    CHECK_OK(engine_load(w->engine, STATE_PARAM, (Range){0, w->model.flat_count}, w->weights, &e), &e);
}

static void world_close(World *w) {
    engine_destroy(w->engine);
    dataset_close(w->data);
    model_destroy(&w->model);
    free(w->grad_sq);
    free(w->example_sq);
    free(w->weights);
}

// Makes step `step` of `batch` rows from example `first` on, and compares it with its line of the log. updates: number
// of updates up to this step; 0: this step is skipped.
static void make_step(World *w, int step, int updates, int first, int batch, const char *line) {
    uint16_t rows[MICRO_BATCH * (T + 1)];
    const Range all = {0, w->model.flat_count};
    const int tokens = (first + batch) * T;
    StepResult result = {.grad_sq = w->grad_sq, .example_sq = w->example_sq, .amax = w->fp8 ? w->amax : NULL};
    double sq = 0;
    UpdateConfig update = {.lr = wanted_lr(tokens, batch),
                           .beta1 = 0.8,
                           .beta2 = 0.9,
                           .eps = 1e-7,
                           .weight_decay = 0.3,
                           .grad_clip = grad_clip,
                           .step = updates,
                           .batch = batch};
    if (w->fp8) engine_exponents(w->engine, w->exponents);
    CHECK_OK(engine_begin_step(w->engine, &e), &e);
    for (int done = 0; done < batch; done += MICRO_BATCH) {
        int n = batch - done < MICRO_BATCH ? batch - done : MICRO_BATCH;
        CHECK_OK(dataset_rows(w->data, (uint64_t)(first + done), n, rows, &e), &e);
        CHECK_OK(engine_micro_step(w->engine, rows, n, GNS_OFF, &e), &e);
    }
    CHECK_OK(engine_norms(w->engine, all, &e), &e);
    if (updates) CHECK_OK(engine_update(w->engine, all, &update, &e), &e);
    CHECK_OK(engine_result(w->engine, &result, &e), &e);
    fp8_adapt(w->exponents, w->amax, 1, first * T >= WARMUP); // the warm-up sets no exponents
    if (w->fp8 && isinf(*w->grad_sq)) return w->repeats++, make_step(w, step, updates, first, batch, line);
    CHECK((strstr(line, "\"skipped\": true") != NULL) == !updates, "step %d: %s", step, line);
    for (int i = 0; i < w->model.tensor_count; i++) sq += w->grad_sq[i];
    CHECK(number_in(line, "step") == step && number_in(line, "tokens") == tokens, "step %d: %s", step, line);
    CHECK(number_in(line, "examples") == first + batch && number_in(line, "batch") == batch, "step %d: %s", step, line);
    CHECK(number_in(line, "loss") == result.loss_sum / batch, "step %d: %.17g: %s", step, result.loss_sum / batch,
          line);
    CHECK_CLOSE(number_in(line, "lr"), update.lr, 1e-14, 0);
    if (updates) CHECK_CLOSE(number_in(line, "grad_norm"), sqrt(sq) / batch, 1e-14, 0);
    else CHECK(strstr(line, "\"grad_norm\": null"), "step %d: %s", step, line);
}

// Runs with options and --out `out`, then makes every step again, the first `overflows` steps without an update.
static void check_every_step(const char *out, const char *options, int overflows) {
    World w;
    size_t bytes;
    int step = 0, examples = 0, clipped = 0;
    CHECK_RUN(trainer_run(HERE
                          "--ramp linear --batch-min %d --batch-max %d --batch-tokens %d --train-tokens %d "
                          "--warmup-tokens %d --lr %g --lr-schedule linear --final-lr-frac %g --beta1 0.8 --beta2 0.9 "
                          "--eps 1e-7 --weight-decay 0.3 --grad-clip %g --gns off --seed %d --out %s %s",
                          LOW, HIGH, REFERENCE * T, TOKENS, WARMUP, peak, final_frac, grad_clip, SEED, out, options),
              0);
    char *log = read_text(path_of("%s/metrics.jsonl", out), &bytes);
    world_open(&w, strstr(options, "--dtype fp8"));
    for (char *line = log ? strtok(log, "\n") : NULL; line && examples * T < TOKENS; line = strtok(NULL, "\n")) {
        int batch = wanted_batch(examples * T);
        step++;
        make_step(&w, step, step > overflows ? step - overflows : 0, examples, batch, line);
        examples += batch;
        bool says_clipped = strstr(line, "\"clipped\": true"), is_longer = number_in(line, "grad_norm") > grad_clip;
        const double counted = strstr(line, "overflows") ? number_in(line, "overflows") : 0;
        CHECK(counted == (step < overflows ? step : overflows) + w.repeats, "step %d: %s", step, line);
        CHECK(says_clipped == is_longer, "step %d: clipped %d, grad_norm %g", step, says_clipped,
              number_in(line, "grad_norm"));
        clipped += is_longer;
    }
    CHECK(clipped > 0 && clipped < step && (w.repeats > 0) == w.fp8, "%d of %d, %d", clipped, step, w.repeats);
    CHECK(examples * T == TOKENS && step > 20, "%d steps, %d examples", step, examples);
    size_t flat = w.model.flat_count;
    float *saved = calloc(flat + RECEIVER_VALUES, sizeof *saved);
    const Receiver to = {.model = &w.model, .buffer = saved + flat, .load = copy_in, .context = saved};
    CHECK_OK(engine_store(w.engine, STATE_PARAM, (Range){0, flat}, w.weights, &e), &e);
    CHECK_OK(checkpoint_load_model(path_of("%s/step_%08d", out, step), &to, &e), &e);
    CHECK(memcmp(saved, w.weights, flat * sizeof *saved) == 0, "other weights at the end");
    free(saved);
    memory_free(log);
    world_close(&w);
}

static void test_every_step(void) {
    check_every_step("run", "", 0);
    check_every_step("fp8", "--dtype fp8", 0);
}

// ---- The loss scale -------------------------------------------------------------------------------------------------

// Faults of overflowing_engine. `step` counts begin_step, so a step that is computed again counts twice. On the last
// rank gradients overflow at loss scales above `above`, and in every `step` whose bit is set in in_steps. There the
// largest value of fp8's dfc is amax * 1000^(step - 2). loss: the loss is not a number.
static struct {
    double above, scale;
    float amax;
    unsigned in_steps;
    bool loss;
    int step, stop_in; // stop_in: the step in which a signal comes; 0: none
} overflow = {.above = INFINITY};

static void overflowing_scale(Engine *engine, double scale) {
    overflow.scale = scale;
    cpu_engine.scale_loss(engine, scale);
}

static int overflowing_begin(Engine *engine, Error *e) {
    if (++overflow.step == overflow.stop_in) raise(SIGTERM);
    if (overflow.stop_in && overflow.step > overflow.stop_in) printf("a step after the signal\n");
    return cpu_engine.begin_step(engine, e);
}

static bool is_last_rank(void) {
    const char *rank = getenv("OMPI_COMM_WORLD_RANK"), *ranks = getenv("OMPI_COMM_WORLD_SIZE");
    return !rank || atoi(rank) == atoi(ranks) - 1;
}

static bool overflows_now(void) { return overflow.step < 32 && overflow.in_steps >> overflow.step & 1; }

static int overflowing_norms(Engine *engine, Range range, Error *e) {
    if (is_last_rank() && (overflow.scale > overflow.above || overflows_now()))
        *(float *)engine_buffer(engine, BUFFER_GRAD, range.begin) = INFINITY;
    return cpu_engine.norms(engine, range, e);
}

static int overflowing_result(Engine *engine, StepResult *result, Error *e) {
    TRY(cpu_engine.result(engine, result, e));
    if (overflow.loss) result->loss_sum = NAN;
    if (!result->amax || !is_last_rank() || !overflows_now()) return 0;
    result->amax[FP8_DFC] = overflow.amax * powf(1000, (float)overflow.step - 2);
    return 0;
}

// Returns an engine that overflows. amax: for --dtype fp8; 0: for a loss scale.
static EngineApi overflowing_engine(float amax) {
    EngineApi engine = cpu_engine;
    engine.needs_loss_scale = amax == 0;
    overflow.amax = amax;
    engine.scale_loss = overflowing_scale;
    engine.begin_step = overflowing_begin;
    engine.norms = overflowing_norms;
    engine.result = overflowing_result;
    return engine;
}

// A power of two as scale keeps fp32's bits. A step that overflows makes no update and is not counted by AdamW, but its
// rows are consumed. A resumed run keeps its scale.
static void test_loss_scale(void) {
    trainer.engine = overflowing_engine(0);
    check_every_step("scaled", "", 0);
    CHECK(file_mentions("scaled/metrics.jsonl", "\"loss_scale\": 65536, \"overflows\": 0}"), "the default");
    overflow.above = 0x1p27;
    check_every_step("over", "--loss-scale 1073741824 --checkpoint-every 2 --keep 0", 3);
    CHECK_RUN(0, 0, "step 3: the gradient overflows at loss scale 268435456: update skipped, now 134217728\n",
              "  3 overflows");
    CHECK(file_mentions(path_of("over/step_%08ld/training/state.json", newest_step("over")),
                        "\"loss_scale\":\t134217728,"),
          "state.json");
    copy_tree("over/step_00000002", "part/step_00000002");
    copy_file("over/metrics.jsonl", "part/metrics.jsonl");
    check_every_step("part", "--loss-scale 1073741824 --checkpoint-every 2 --keep 0", 3);
    CHECK_RUN(0, 0, "step 3: the gradient overflows", "!step 2: the gradient");
    check_same_end("over", "part", "resumed");
    trainer.engine = cpu_engine;
    overflow.above = INFINITY;
}

static int slow_store(Engine *engine, StateKind kind, Range range, float *values, Error *e) {
    usleep(30000);
    return cpu_engine.store(engine, kind, range, values, e);
}

// The next update waits for the copy of the state.
static void test_slow_copy(void) {
    for (int slow = 0; slow < 2; slow++) {
        if (slow) trainer.engine.store = slow_store;
        CHECK_RUN(trainer_run(HERE "--steps 4 --checkpoint-every 1 --keep 0 --out %s", slow ? "slow" : "quick"), 0);
    }
    trainer.engine = cpu_engine;
    for (int step = 1; step <= 4; step++)
        check_same_files(path_of("quick/step_%08d", step), path_of("slow/step_%08d", step), "a slow copy");
}

// Runs `engine` with exact norms at every step. Returns the text of metrics.jsonl; free it with memory_free.
static char *run_exact(const char *out, EngineApi engine) {
    size_t bytes;
    trainer.engine = engine;
    CHECK_RUN(trainer_run(HERE "--steps 32 --gns exact --skip-grad-z 1e6 --out %s", out), 0);
    trainer.engine = cpu_engine;
    return read_text(path_of("%s/metrics.jsonl", out), &bytes);
}

// Norms do not depend on the loss scale. A step that overflows enters no average and no window.
static void test_overflow_measures_nothing(void) {
    int step = 0;
    double before = NAN;
    overflow.in_steps = 1 << 5 | 1 << 6 | 1 << 30;
    char *log = run_exact("noise", overflowing_engine(0)), *plain = run_exact("plain", cpu_engine);
    CHECK(number_in(log, "gns_total_s") == number_in(plain, "gns_total_s"), "%.500s", log);
    for (char *line = log ? strtok(log, "\n") : NULL; line; line = strtok(NULL, "\n")) {
        bool over = (uint64_t)overflow.in_steps >> ++step & 1;
        CHECK((number_in(line, "gns_ln_s") == before) == over, "step %d: %s", step, line);
        CHECK((strstr(line, "gns_total") == NULL) == over, "step %d: %s", step, line);
        CHECK(number_in(line, "loss_scale") == 65536 / (step > 30  ? 8
                                                        : step > 6 ? 4
                                                        : step > 5 ? 2
                                                                   : 1),
              "step %d: %s", step, line);
        before = number_in(line, "gns_ln_s");
    }
    CHECK(step == 32, "%d steps", step);
    CHECK(file_mentions("noise/step_00000032/training/state.json", "\"count\":\t29"), "the windows of outliers");
    memory_free(log);
    memory_free(plain);
    overflow.in_steps = 0;
}

// Errors: the smallest scale overflows; the loss is not a number; the scale is invalid; the engine needs no scale.
static void test_loss_scale_errors(void) {
#define BAD "--train-tokens 900 --out bad --fresh "
    trainer.engine = overflowing_engine(0);
    overflow.above = 0.5;
    CHECK_RUN(trainer_run(BAD "--loss-scale 2"), ERR_NONFINITE, "not finite; the update was not made",
              "step 1: the gradient overflows at loss scale 2");
    overflow.loss = true; // the gradient still overflows
    CHECK_RUN(trainer_run(BAD), ERR_NONFINITE, "error: step 1, ", "loss nan");
    overflow.loss = false;
    overflow.above = INFINITY;
    CHECK_RUN(trainer_run(BAD "--loss-scale 3"), ERR_USAGE);
    trainer.engine = cpu_engine;
    CHECK_RUN(trainer_run(BAD "--loss-scale 4"), ERR_USAGE, "error: --loss-scale: gradients of fp32 need none");
    CHECK_RUN(trainer_run(BAD "--dtype fp16"), ERR_USAGE, "error: --dtype fp16: only the CUDA trainer has it");
    overflow.in_steps = 1 << 2 | 1 << 3; // step 2, also when it is computed again
    trainer.engine = overflowing_engine(1e6f);
    CHECK_RUN(trainer_run(BAD "--dtype fp8"), 0, " of block 0's dfc: computed again with -13",
              "step 2: fp8 overflows at exponent -13 of block 0's dfc: computed again with -23", "!update skipped");
    const float amax[] = {0x1p110f, INFINITY, NAN}; // no exponent is small enough
    for (int i = 0; i < 3; i++) {
        trainer.engine = overflowing_engine(amax[i]);
        CHECK_RUN(trainer_run(BAD "--dtype fp8"), ERR_NONFINITE, "error: step 2, ", "gradient norm inf", "!: fp8");
    }
    trainer.engine = cpu_engine;
    overflow.in_steps = 0;
}

// If one rank's gradient overflows, all ranks skip the step.
static void test_overflow_of_one_rank(void) {
    if (getenv("GNS_RUNNER") || system("command -v mpirun > /dev/null") != 0) SKIP("no Open MPI for this program");
    trainer.ranks = trainer.batch_min = 2;
    for (int zero = 0; zero < 3; zero++)
        CHECK_RUN(trainer_run("--train-tokens 900 --out ranks%d --zero %d", zero, zero), 0,
                  "step 2: the gradient overflows at loss scale 65536");
    CHECK_RUN(trainer_run("--train-tokens 900 --out ranks3 --dtype fp8"), 0,
              " of block 0's dfc: computed again with -13");
    CHECK(file_mentions("ranks0/metrics.jsonl", "\"loss_scale\": 32768, \"overflows\": 1,"), "the log");
    check_same_end("ranks0", "ranks1", "--zero 1");
    check_same_end("ranks0", "ranks2", "--zero 2");
    trainer.ranks = 1;
}

// ---- The ramp by the noise scale ------------------------------------------------------------------------------------

// Checks that batches move towards ramp_aim by at most a factor of 2 per half-life. The target is kappa times gns_ratio
// times the LayerNorms' scale, or (`total`) kappa times the whole model's scale; the aim does not exceed the target.
static void check_ramp(const char *path, double kappa, bool total) {
    const char *name = total ? "gns_total" : "gns_ln";
    size_t bytes;
    char *log = read_text(path, &bytes);
    double rows = RAMP_LOW, most = 0;
    int sizes = 0, targets = 0;
    for (char *line = log ? strtok(log, "\n") : NULL; line; line = strtok(NULL, "\n")) {
        bool last = number_in(line, "tokens") == RAMP_TOKENS; // the horizon may cut the last step
        double batch = number_in(line, "batch");
        CHECK(last || batch == round(rows), "%g rows, want %g: %.40s", batch, rows, line);
        double aim = strstr(line, "\"ramp_aim\": null") ? NAN : number_in(line, "ramp_aim");
        if (!strstr(line, "\"ramp_target\": null")) {
            double scale = kappa * (total ? 1 : number_in(line, "gns_ratio")) * number_in(line, name);
            CHECK_CLOSE(number_in(line, "ramp_target"), scale, 1e-12, 0);
            CHECK(isnan(aim) || (aim <= scale && number_in(line, "ramp_target_lower") <= aim), "%.400s", line);
            targets++;
        }
        sizes += batch > most;
        most = fmax(most, batch);
        double factor = exp2(batch * T / HALF_LIFE);
        if (!isnan(aim)) rows = fmin(fmax(fmin(fmax(aim, rows / factor), rows * factor), RAMP_LOW), RAMP_HIGH);
    }
    CHECK(most == RAMP_HIGH && sizes > 5 && targets > 20, "up to %g rows in %d sizes, %d targets", most, sizes,
          targets);
    memory_free(log);
}

static int run_ramp(double kappa, const char *options) {
    return trainer_run(
        HERE "--ramp gns --batch-min %d --batch-max %d "
             "--train-tokens %d --gns-half-life %d --lr %g --ramp-kappa %g --ramp-waste 1 --checkpoint-every 0 %s",
        RAMP_LOW, RAMP_HIGH, RAMP_TOKENS, HALF_LIFE, peak, kappa, options);
}

// If a step's fixed cost dominates, the target is kappa * ratio * scale, so runs with equal kappa * ratio are equal.
#define STEPS_COST "--ramp-step-rows 1e9 "
static void test_ramp_target(void) {
    static const double factors[][2] = {{8, 0.5}, {1, 4}}; // kappa, ratio
    for (int i = 0; i < 2; i++)
        CHECK_RUN(
            run_ramp(factors[i][0], path_of(STEPS_COST "--gns ln --gns-ratio %g --out target%d", factors[i][1], i)), 0);
    for (int i = 0; i < 2; i++) check_ramp(path_of("target%d/metrics.jsonl", i), factors[i][0], false);
    long step = newest_step("target0");
    CHECK(newest_step("target1") == step, "kappa 8 x ratio 0.5 is not 1 x 4");
    check_same_files(path_of("target0/step_%08ld", step), path_of("target1/step_%08ld", step), "8 x 0.5, 1 x 4");
}

// With exact norms at every step the target is kappa times the whole model's scale, unless --gns-ratio is given.
static void test_ramp_of_the_whole_model(void) {
    CHECK_RUN(run_ramp(6, STEPS_COST "--gns exact --out total"), 0);
    check_ramp("total/metrics.jsonl", 6, true);
    CHECK_RUN(run_ramp(1, STEPS_COST "--gns exact --gns-ratio 4 --out given"), 0);
    check_ramp("given/metrics.jsonl", 1, false);
}

// A run that measures --ramp-step-rows has the bits of a run with the measured number as option: the timed steps change
// nothing else, even if their gradients overflow.
static void test_ramp_measures(void) {
    static const char *const options[] = {"--gns ln", "--gns exact --optimizer muon --dropout 0.1", "--dtype bf16",
                                          "--loss-scale 1073741824", "--dtype fp8"};
    overflow.above = 0x1p27;
    for (int i = 0; i < 5; i++) {
        if (i == 2 && !matmul_kernel(DTYPE_BF16)) continue; // this machine has no instructions for bf16
        if (i == 3) trainer.engine = overflowing_engine(0);
        CHECK_RUN(run_ramp(1000, path_of("%s --out measured%d", options[i], i)), 0);
        size_t bytes;
        char *json = read_text(path_of("measured%d/run.json", i), &bytes);
        const double x = json ? number_in(json, "ramp_step_rows") : NAN;
        memory_free(json);
        CHECK(x >= 0.1 && x <= 1e9 && log_mentions(path_of("a step of B rows costs as much as %g + B rows", x)), "%g",
              x);
        CHECK_RUN(run_ramp(1000, path_of("%s --ramp-step-rows %.17g --out told%d", options[i], x, i)), 0);
        check_same_end(path_of("measured%d", i), path_of("told%d", i), options[i]);
        trainer.engine = cpu_engine;
    }
    overflow.above = INFINITY;
    CHECK(file_mentions("told3/metrics.jsonl", "\"overflows\": 3"), "no overflow");
}

// A signal ends the measuring at once. Nothing is saved: the same command starts over.
static void test_stop_while_measuring(void) {
    overflow.stop_in = 3;
    trainer.engine = overflowing_engine(0);
    CHECK_RUN(run_ramp(1000, "--out stopped"), ERR_STOPPED, "stopped: SIGTERM before the first step", "!a step after");
    CHECK(count_checkpoints("stopped") == 0, "a checkpoint of step 0");
    overflow.stop_in = 0;
    trainer.engine = cpu_engine;
    CHECK_RUN(run_ramp(1000, "--out stopped"), 0, "!moved to");
}

int main(int argc, char **argv) {
    bool fp8 = false;
    if (argc > 2 && strcmp(argv[1], "rank") == 0) {
        for (int i = 0; i < argc; i++) fp8 = fp8 || strcmp(argv[i], "fp8") == 0;
        trainer.engine = overflowing_engine(fp8 ? 1e6f : 0);
        overflow.in_steps = 1 << 2;
        return trainer_rank(argc, argv);
    }
    trainer_setup();
    RUN(test_every_step, test_slow_copy, test_loss_scale, test_overflow_measures_nothing, test_loss_scale_errors,
        test_overflow_of_one_rank, test_ramp_target, test_ramp_of_the_whole_model, test_ramp_measures,
        test_stop_while_measuring);
    return trainer_end();
}
