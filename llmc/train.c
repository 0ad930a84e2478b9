#define _POSIX_C_SOURCE 200809L
#include "train.h"

#include "archive.h"
#include "batch_ramp.h"
#include "checkpoint.h"
#include "comm.h"
#include "data.h"
#include "engine.h"
#include "files.h"
#include "guard.h"
#include "inspect.h"
#include "metrics.h"
#include "noise.h"
#include "options.h"
#include "parallel.h"
#include "progress.h"
#include "run_state.h"
#include "sample.h"
#include "saver.h"
#include "schedule.h"
#include "signals.h"
#include "tokenizer.h"

#include <assert.h>
#include <errno.h>
#include <limits.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#ifndef GNS_VERSION
#    define GNS_VERSION "0.1"
#endif

typedef struct {
    Comm *comm;
    Options options;
    Model model;
    EngineConfig shape;
    Parallel parallel;
    Engine *engine;
    Tokenizer *tokenizer; // NULL: none known for this vocabulary
    DataSet *train, *val; // val may be NULL
    Schedule schedule;
    Ramp ramp;
    Noise noise;
    Metrics *metrics; // NULL but on rank 0, which alone writes and prints
    Progress progress;
    uint16_t *rows; // (micro_batch, T + 1)
    float *losses;  // (micro_batch, T)
    StepResult result;
    int64_t step, tokens, examples; // done
    int64_t batch;                  // rows of the last step
    int64_t log_bytes;              // of metrics.jsonl, where this part of the run begins
    double val_loss;                // the latest; NaN before the first
    bool uneven;                    // the shares of some step differed, and that has been said
    bool stop;                      // a signal asked some rank to; all know
    Outliers loss_window, grad_window;
    ShardList shards; // of `train`
    Saver *saver;
    char saved[ARCHIVE_PATH]; // the newest checkpoint; "" before the first
    int64_t saved_step;       // its step; -1 before the first
} Run;

static bool is_first(const Run *r) { return r->comm->rank == 0; }

// ---------------------------------------------------------------------------------------------------------------------
// Set-up: the model

static int shape_from_files(const Options *o, ModelConfig *config, Error *e) {
    static const char *const settled[] = {"--layers", "--heads", "--channels"};
    for (size_t i = 0; i < sizeof settled / sizeof *settled; i++)
        if (options_given(o, settled[i]))
            return FAIL(e, ERR_USAGE, "leave it out", "%s: the shape is settled by --model %s", settled[i], o->model);
    TRY(checkpoint_read_config(o->model, config, e));
    if (options_given(o, "--vocab-size") && o->vocab_size != config->vocab)
        return FAIL(e, ERR_USAGE, "leave it out", "--vocab-size %lld: --model %s has %d", (long long)o->vocab_size,
                    o->model, config->vocab);
    bool shorten = o->sample_only && !options_given(o, "--seq-len"); // to what the model can see
    if (o->seq_len > config->context && !shorten)
        return FAIL(e, ERR_USAGE, "use a smaller --seq-len", "--seq-len %lld: --model %s sees %d tokens at most",
                    (long long)o->seq_len, o->model, config->context);
    return 0;
}

static int shape_from_preset(const Options *o, ModelConfig *config, Error *e) {
    if (!model_preset(config, o->model)) {
        FAIL(e, file_exists(o->model) ? ERR_INPUT : ERR_USAGE, NULL,
             "--model %s: neither a preset, nor a directory with config.json, nor llm.c's .bin", o->model);
        return error_hint(e, "presets: %s", model_preset_help);
    }
    if (options_given(o, "--layers")) config->layers = (int)o->layers;
    if (options_given(o, "--heads")) config->heads = (int)o->heads;
    if (options_given(o, "--channels")) config->channels = (int)o->channels;
    config->vocab = options_given(o, "--vocab-size") ? (int)o->vocab_size : 50257; // GPT-2's
    config->context = (int)o->seq_len;
    return 0;
}

static int setup_model(Run *r, Error *e) {
    const Options *o = &r->options;
    ModelConfig config = {0};
    bool from_file = checkpoint_is_model(o->model);
    TRY(from_file ? shape_from_files(o, &config, e) : shape_from_preset(o, &config, e));
    if (model_create(&r->model, &config, e)) {
        if (!from_file) return e->code;
        e->code = ERR_INPUT; // the file's fault, not the command line's
        return error_prefix(e, "%s%s", o->model, directory_exists(o->model) ? "/config.json" : "");
    }
    r->shape = (EngineConfig){
        .model = &r->model,
        .micro_batch = o->sample_only ? 1 : (int)o->micro_batch,
        .seq_len = (int)(o->seq_len < config.context ? o->seq_len : config.context),
        .threads = o->threads ? (int)o->threads : comm_threads(r->comm),
        .gns = (GnsMode)o->gns,
        .inference = o->sample_only,
    };
    if (o->run.gns_exact_interval > 0) r->shape.gns = GNS_EXACT;
    if (from_file && tokenizer_exists(o->model)) return tokenizer_load(&r->tokenizer, o->model, e);
    if (config.vocab == 256) return tokenizer_create_bytes(&r->tokenizer, e);
    return 0;
}

static int setup_tokenizer_needed(const Run *r, Error *e) {
    if (r->tokenizer) return 0;
    const char *flag = r->options.sample_only ? "--sample-only" : r->options.prompt[0] ? "--prompt" : "--sample-every";
    return FAIL(e, ERR_USAGE, "use --vocab-size 256 for bytes, or a --model directory with the tokenizer's files",
                "%s: no tokenizer for a vocabulary of %d", flag, r->model.config.vocab);
}

static int range_to_engine(void *engine, Range range, const float *values, Error *e) {
    return engine_load(engine, STATE_PARAM, range, values, e);
}

static int init_parameters(Run *r, Error *e) {
    enum { CHUNK = 1 << 20 };
    float *buffer;
    int code = 0;
    TRY(memory_alloc((void **)&buffer, CHUNK * sizeof(float), "initial weights", e));
    for (int i = 0; i < r->model.tensor_count; i++) {
        const Tensor *t = &r->model.tensors[i];
        for (size_t first = 0; first < t->count; first += CHUNK) {
            size_t n = size_min(CHUNK, t->count - first);
            model_init_values(&r->model, t, (uint64_t)r->options.seed, first, n, buffer);
            TRY_GOTO(engine_load(r->engine, STATE_PARAM, (Range){t->offset + first, t->offset + first + n}, buffer, e));
        }
    }
done:
    memory_free(buffer);
    return code;
}

static int moment1_to_engine(void *engine, Range range, const float *values, Error *e) {
    return engine_load(engine, STATE_MOMENT1, range, values, e);
}

static int moment2_to_engine(void *engine, Range range, const float *values, Error *e) {
    return engine_load(engine, STATE_MOMENT2, range, values, e);
}

static int setup_engine(Run *r, Error *e) {
    TRY(parallel_create(&r->parallel, r->comm, &r->model, (ZeroStage)r->options.zero, e));
    parallel_shard(&r->parallel, &r->shape);
    TRY(engine_create(&r->engine, &r->shape, e));
    if (r->saved[0]) {
        TRY(checkpoint_load_model(r->saved, &r->model, range_to_engine, r->engine, e));
        return checkpoint_load_optimizer(r->saved, &r->model, moment1_to_engine, moment2_to_engine, r->engine, e);
    }
    if (checkpoint_is_model(r->options.model))
        return checkpoint_load_model(r->options.model, &r->model, range_to_engine, r->engine, e);
    return init_parameters(r, e);
}

// ---------------------------------------------------------------------------------------------------------------------
// Set-up: what training needs besides

static int setup_data(Run *r, Error *e) {
    const Options *o = &r->options;
    int T = r->shape.seq_len, V = r->model.config.vocab;
    TRY(data_open(&r->train, o->train, T, V, (uint64_t)o->seed, e));
    if (o->val[0]) TRY(data_open(&r->val, o->val, T, V, (uint64_t)o->seed, e));
    return shard_list_create(&r->shards, r->train, e);
}

static int setup_schedule(Run *r, Error *e) {
    const Options *o = &r->options;
    r->schedule = (Schedule){
        .kind = (ScheduleKind)o->lr_schedule,
        .lr = o->lr,
        .warmup_tokens = (double)o->warmup_tokens,
        .train_tokens = (double)o->run.horizon_tokens,
        .final_frac = o->final_lr_frac,
    };
    RampConfig ramp = {
        .mode = o->run.ramp_mode,
        .batch_min = o->run.batch_min_rows,
        .batch_max = o->run.batch_max_rows,
        .batch_ref = o->run.batch_ref_rows,
        .seq_len = o->seq_len,
        .kappa = o->ramp_kappa,
        .lr_power = o->ramp_lr_power,
        .half_life_tokens = o->run.gns_half_life_tokens,
        .train_tokens = (double)o->run.horizon_tokens,
        .schedule = r->schedule,
    };
    TRY(ramp_create(&r->ramp, &ramp, o->run.ramp_replay, e));
    return noise_create(&r->noise, &r->model, o->run.gns_half_life_tokens, o->gns_ratio, e);
}

static int setup_buffers(Run *r, Error *e) {
    size_t rows = (size_t)r->shape.micro_batch, T = (size_t)r->shape.seq_len, n = (size_t)r->model.tensor_count;
    TRY(memory_alloc((void **)&r->rows, rows * (T + 1) * sizeof(uint16_t), "token rows", e));
    TRY(memory_alloc((void **)&r->losses, rows * T * sizeof(float), "losses", e));
    TRY(memory_alloc((void **)&r->result.rank_sq, n * sizeof(double), "norms", e));
    TRY(memory_alloc((void **)&r->result.grad_sq, n * sizeof(double), "norms", e));
    return memory_alloc((void **)&r->result.example_sq, n * sizeof(double), "norms", e);
}

// What state.json says of this run. `build` and its text belong to the caller.
static RunState run_state(Run *r, const char *build) {
    return (RunState){
        .model = r->model.config,
        .start = checkpoint_is_model(r->options.model) ? r->options.model : "scratch",
        .seq_len = r->shape.seq_len,
        .seed = (uint64_t)r->options.seed,
        .train = &r->shards,
        .step = r->step,
        .tokens = r->tokens,
        .examples = r->examples,
        .batch = r->batch,
        .metrics_bytes = r->metrics ? metrics_bytes(r->metrics) : 0,
        .val_loss = r->val_loss,
        .ramp = &r->ramp.state,
        .noise = &r->noise,
        .loss_window = &r->loss_window,
        .grad_window = &r->grad_window,
        .build = build,
        .options = &r->options,
    };
}

// Finds the newest checkpoint of an earlier part of this run, and takes up where it stands. Writes nothing.
static int setup_resume(Run *r, Error *e) {
    const char *out = r->options.out;
    bool found;
    char *changes;
    r->saved_step = -1;
    if (r->options.fresh || !directory_exists(out)) return 0;
    FILE *notes = is_first(r) ? stderr : fopen("/dev/null", "we");
    if (!notes) return FAIL(e, ERR_INTERNAL, NULL, "/dev/null: %s", strerror(errno));
    int code = archive_newest(out, notes, &found, &r->saved_step, r->saved, e);
    if (notes != stderr) fclose(notes);
    TRY(code);
    if (!found) {
        r->saved[0] = 0, r->saved_step = -1;
        return 0;
    }
    RunState state = run_state(r, "");
    TRY(run_state_read(&state, r->saved, &changes, e));
    r->step = state.step;
    r->tokens = state.tokens;
    r->examples = state.examples;
    r->batch = state.batch;
    r->log_bytes = state.metrics_bytes;
    r->val_loss = state.val_loss;
    ramp_settle(&r->ramp);
    if (is_first(r))
        printf("resuming from %s: %lld steps, %lld tokens done\n", r->saved, (long long)r->step, (long long)r->tokens);
    if (is_first(r)) fputs(changes, stdout);
    free(changes);
    return 0;
}

// An earlier run in the same place is never overwritten: it is moved aside.
static int move_old_run(const char *out, Error *e) {
    char aside[ARCHIVE_PATH];
    for (int i = 1; i < 100000; i++) {
        int n = snprintf(aside, sizeof aside, "%s.%d", out, i);
        if (n < 0 || (size_t)n >= sizeof aside) return FAIL(e, ERR_USAGE, "use a shorter path", "--out: path too long");
        if (file_exists(aside)) continue;
        if (rename(out, aside) != 0)
            return FAIL(e, ERR_WRITE, "choose another --out", "%s holds an earlier run and cannot be moved aside: %s",
                        out, strerror(errno));
        fprintf(stderr, "%s held an earlier run: moved to %s\n", out, aside);
        return 0;
    }
    return FAIL(e, ERR_WRITE, "choose another --out", "%s: too many earlier runs beside it", out);
}

// Is there a run that this one does not go on from? One that was stopped before its first step is none.
static int holds_other_run(const Run *r, bool *holds, Error *e) {
    char path[ARCHIVE_PATH];
    int checkpoints;
    TRY(path_join(path, sizeof path, r->options.out, "run.json", e));
    TRY(archive_count(r->options.out, &checkpoints, e));
    *holds = !r->saved[0] && (checkpoints > 0 || (file_exists(path) && metrics_bytes(r->metrics) > 0));
    return 0;
}

// From here on the run directory is ours.
static int setup_directory(Run *r, Error *e) {
    const char *out = r->options.out;
    bool holds;
    TRY(directory_create(out, e));
    TRY(metrics_open(&r->metrics, out, e));
    TRY(holds_other_run(r, &holds, e));
    if (holds) {
        metrics_close(r->metrics, e);
        r->metrics = NULL;
        TRY(move_old_run(out, e));
        TRY(directory_create(out, e));
        TRY(metrics_open(&r->metrics, out, e));
    }
    if (metrics_bytes(r->metrics) < r->log_bytes)
        fprintf(stderr,
                "warning: %s/metrics.jsonl is shorter than the checkpoint says: some of its steps are missing\n", out);
    TRY(archive_tidy(out, e));
    TRY(archive_set_aside_after(out, r->step, stderr, e));
    return metrics_cut(r->metrics, r->log_bytes, e);
}

static void put_data_json(FILE *f, const char *name, const DataSet *data) {
    if (!data) return;
    DataInfo info = data_describe(data);
    fprintf(f, "  \"%s\": {\"shards\": %d, \"tokens\": %llu, \"windows\": %llu},\n", name, info.shards,
            (unsigned long long)info.tokens, (unsigned long long)info.windows);
}

static void describe_build(const Run *r, char *out, size_t bytes) {
    char engine[256];
    engine_describe(r->engine, engine, sizeof engine);
    snprintf(out, bytes, "gns.c " GNS_VERSION ", %s", engine);
}

static void put_run_json(FILE *f, const Run *r) {
    char engine[256];
    engine_describe(r->engine, engine, sizeof engine);
    const ModelConfig *c = &r->model.config;
    fprintf(f, "{\n  \"program\": \"gns.c " GNS_VERSION "\",\n  \"engine\": \"%s\",\n", engine);
    fprintf(f,
            "  \"model\": {\"layers\": %d, \"heads\": %d, \"channels\": %d, \"vocab\": %d, \"context\": %d, "
            "\"parameters\": %zu, \"flops_per_token\": %.17g},\n",
            c->layers, c->heads, c->channels, c->vocab, c->context, r->model.parameters,
            model_flops_per_token(&r->model, r->shape.seq_len));
    put_data_json(f, "train_data", r->train);
    put_data_json(f, "val_data", r->val);
    fprintf(f, "  \"options\": ");
    options_write_json(f, &r->options, 2);
    fprintf(f, "\n}\n");
}

static int write_run_json(const Run *r, Error *e) {
    char path[ARCHIVE_PATH], *text;
    size_t bytes;
    TRY(path_join(path, sizeof path, r->options.out, "run.json", e));
    FILE *f = open_memstream(&text, &bytes);
    if (!f) return FAIL(e, ERR_MEMORY, "free some memory", "no memory for run.json");
    put_run_json(f, r);
    fclose(f);
    int code = file_replace(path, text, bytes, e);
    free(text);
    return code;
}

// Can the run be long enough for a checkpoint before its end?
static bool may_save_aside(const Options *o) {
    int64_t smallest = o->run.batch_min_rows * o->seq_len;
    return o->checkpoint_every > 0 && (o->run.horizon_tokens - 1) / smallest >= o->checkpoint_every;
}

static int setup_output(Run *r, Error *e) {
    if (!is_first(r)) return 0;
    const Options *o = &r->options;
    TRY(setup_directory(r, e));
    TRY(write_run_json(r, e));
    SaverConfig saver = {o->out, &r->model, r->tokenizer, o->keep, metrics_descriptor(r->metrics)};
    TRY(saver_create(&r->saver, &saver, e));
    if (may_save_aside(o)) TRY(saver_prepare(r->saver, e));
    TRY(progress_create(&r->progress, stdout, r->tokens, o->run.horizon_tokens, e));
    r->progress.val_loss = r->val_loss;
    if (r->comm->ranks > 1) r->progress.terminal = false; // mpirun's pseudo-terminal, which ends up in a log file
    return 0;
}

static void say_setup(const Run *r) {
    char engine[256];
    MemoryPlan plan;
    const ModelConfig *c = &r->model.config;
    DataInfo data = data_describe(r->train);
    engine_describe(r->engine, engine, sizeof engine);
    engine_plan_memory(&r->shape, &plan);
    printf("model   %.2fM parameters: %d layers, %d heads, %d channels, vocabulary %d, T %d\n",
           1e-6 * (double)r->model.parameters, c->layers, c->heads, c->channels, c->vocab, r->shape.seq_len);
    printf("data    %llu tokens, %llu windows of T\n", (unsigned long long)data.tokens,
           (unsigned long long)data.windows);
    printf("engine  %s, %.0f MiB\n", engine, (double)plan.total / (1 << 20));
    if (r->comm->ranks > 1) printf("ranks   %d, each with such an engine\n", r->comm->ranks);
    fflush(stdout);
}

// ---------------------------------------------------------------------------------------------------------------------
// One optimizer step

// What this step measures: the first and every gns_exact_interval-th after it are exact.
static GnsMode step_mode(const Run *r) {
    int64_t every = r->options.run.gns_exact_interval;
    if (r->options.gns == GNS_OFF) return GNS_OFF;
    return every > 0 && r->step % every == 0 ? GNS_EXACT : GNS_LN;
}

// Rows of the next step; the last one is cut short to end on the horizon.
static int64_t step_batch(const Run *r) {
    int64_t left = (r->options.run.horizon_tokens - r->tokens) / r->shape.seq_len;
    int64_t batch = ramp_batch(&r->ramp, r->step, (double)r->tokens);
    return batch < left ? batch : left;
}

// This rank's share of the step's rows.
static int run_micro_steps(Run *r, int64_t B, GnsMode mode, Error *e) {
    Share share = parallel_share(B, r->comm->rank, r->comm->ranks);
    int64_t first = r->examples + share.first;
    TRY(parallel_begin_step(&r->parallel, mode != GNS_OFF, e));
    for (int64_t done = 0; done < share.count;) {
        int n = (int)(share.count - done < r->shape.micro_batch ? share.count - done : r->shape.micro_batch);
        TRY(data_rows(r->train, (uint64_t)(first + done), n, r->rows, e));
        if (done + n == share.count) parallel_last(&r->parallel);
        TRY(engine_micro_step(r->engine, r->rows, n, mode, e));
        comm_progress(r->comm);
        done += n;
    }
    return 0;
}

static double grad_norm(const Run *r, int64_t B) {
    double sq = 0;
    for (int i = 0; i < r->model.tensor_count; i++) sq += r->result.grad_sq[i];
    return sqrt(sq) / (double)B;
}

static int fail_nonfinite(Run *r, int64_t B, Error *e) {
    comm_settle(r->comm); // the numbers are those of all ranks
    char tensors[256] = "";
    for (int i = 0, n = 0; i < r->model.tensor_count && n < 4; i++) {
        if (isfinite(r->result.grad_sq[i])) continue;
        size_t used = strlen(tensors);
        snprintf(tensors + used, sizeof tensors - used, "%s%s", n++ ? ", " : " of ", r->model.tensors[i].name);
    }
    return FAIL(e, ERR_NONFINITE, "try a lower --lr, a longer --warmup-tokens or --grad-clip 1",
                "step %lld, examples %lld to %lld: loss %g, gradient norm %g, not finite%s%s; the update was not made",
                (long long)r->step + 1, (long long)r->examples, (long long)(r->examples + B - 1),
                r->result.loss_sum / (double)B, grad_norm(r, B), tensors[0] ? ": gradient" : "", tensors);
}

static UpdateConfig update_config(const Run *r, int64_t B) {
    const Options *o = &r->options;
    double after = (double)(r->tokens + B * r->shape.seq_len);
    return (UpdateConfig){
        .lr = ramp_lr(&r->ramp, schedule_lr(&r->schedule, after), B),
        .beta1 = o->beta1,
        .beta2 = o->beta2,
        .eps = o->eps,
        .weight_decay = o->weight_decay,
        .grad_clip = o->grad_clip,
        .step = r->step + 1,
        .batch = B,
    };
}

static int observe_ranks(Run *r, int64_t B, double rank_sq, double step_tokens, Error *e) {
    int64_t *rows;
    double batch_sq = 0;
    if (r->comm->ranks == 1) return 0;
    TRY(memory_alloc((void **)&rows, sizeof(int64_t) * (size_t)r->comm->ranks, "shares", e));
    for (int i = 0; i < r->comm->ranks; i++) rows[i] = parallel_share(B, i, r->comm->ranks).count;
    for (int i = 0; i < r->model.tensor_count; i++) batch_sq += r->result.grad_sq[i];
    noise_observe_ranks(&r->noise, rows, r->comm->ranks, rank_sq, batch_sq, step_tokens);
    memory_free(rows);
    return 0;
}

static void observe_noise(Run *r, int64_t B, double step_tokens, GnsMode mode) {
    noise_observe(&r->noise, &r->model, &r->result, B, step_tokens, mode);
    if (mode == GNS_OFF) return;
    GnsEstimate ln = gns_estimate(&r->noise.ln);
    ramp_observe(&r->ramp, step_tokens, ramp_target(&r->ramp, noise_ratio(&r->noise), ln.valid ? ln.lower : NAN));
}

static StepMetrics step_metrics(const Run *r, int64_t B, double lr, double seconds) {
    double tok_per_s = (double)(B * r->shape.seq_len) / seconds, peak = engine_peak_flops(r->engine);
    return (StepMetrics){
        .step = r->step,
        .tokens = r->tokens,
        .examples = r->examples,
        .batch = B,
        .loss = r->result.loss_sum / (double)B,
        .lr = lr,
        .grad_norm = grad_norm(r, B),
        .tok_per_s = tok_per_s,
        .mfu = peak > 0 ? tok_per_s * model_flops_per_token(&r->model, r->shape.seq_len) / peak : NAN,
    };
}

// Rank 0 decides, all follow.
static int agree_batch(Run *r, int64_t *B, Error *e) {
    *B = step_batch(r);
    TRY(comm_broadcast(r->comm, B, sizeof *B, e));
    if (*B % r->comm->ranks == 0 || r->uneven || !is_first(r)) return 0;
    r->uneven = true;
    progress_break(&r->progress);
    fprintf(stderr, "note: step %lld has %lld rows for %d ranks: some wait for those that have one more\n",
            (long long)r->step + 1, (long long)*B, r->comm->ranks);
    return 0;
}

// The step's numbers, over all ranks.
static int step_result(Run *r, StepSums *sums, Error *e) {
    *sums = (StepSums){.result = &r->result, .stop = signals_requested() != NULL};
    TRY(engine_result(r->engine, &r->result, e));
    TRY(parallel_sums(&r->parallel, sums, e));
    r->stop = sums->stop;
    return 0;
}

// Is this step to be left out? Asking means waiting for the device before the update, so it is not done unasked.
static bool is_outlier(Run *r, int64_t B) {
    const Options *o = &r->options;
    double loss = r->result.loss_sum / (double)B, norm = grad_norm(r, B);
    double loss_z = outliers_z(&r->loss_window, loss), norm_z = outliers_z(&r->grad_window, norm);
    bool loss_out = o->skip_loss_z > 0 && loss_z > o->skip_loss_z,
         norm_out = o->skip_grad_z > 0 && norm_z > o->skip_grad_z;
    if (!loss_out && !norm_out) return false;
    if (!is_first(r)) return true;
    progress_break(&r->progress);
    fprintf(stderr, "step %lld: %s is an outlier (loss %.4g, z %.3g; gradient norm %.4g, z %.3g): update skipped\n",
            (long long)r->step + 1, loss_out ? "the loss" : "the gradient norm", loss, loss_z, norm, norm_z);
    return true;
}

static int update_unless_outlier(Run *r, int64_t B, const UpdateConfig *update, bool *skipped, Error *e) {
    const Options *o = &r->options;
    StepSums sums;
    *skipped = false;
    if (o->skip_loss_z > 0 || o->skip_grad_z > 0) {
        TRY(step_result(r, &sums, e));
        if (!isfinite(r->result.loss_sum) || !isfinite(grad_norm(r, B))) return fail_nonfinite(r, B, e);
        *skipped = is_outlier(r, B);
    }
    return *skipped ? 0 : parallel_update(&r->parallel, update, e);
}

static int train_step(Run *r, StepMetrics *metrics, GnsMode *mode, Error *e) {
    int64_t B;
    comm_phase(r->comm, PHASE_STEP, r->step + 1);
    TRY(agree_batch(r, &B, e));
    UpdateConfig update = update_config(r, B);
    bool skipped;
    *mode = step_mode(r);
    double start = clock_seconds();
    TRY(run_micro_steps(r, B, *mode, e));
    TRY(parallel_norms(&r->parallel, e));
    TRY(update_unless_outlier(r, B, &update, &skipped, e));
    StepSums sums;
    TRY(step_result(r, &sums, e));
    if (!isfinite(r->result.loss_sum) || !isfinite(grad_norm(r, B))) return fail_nonfinite(r, B, e);
    double step_tokens = (double)(B * r->shape.seq_len);
    observe_noise(r, B, step_tokens, *mode);
    if (*mode != GNS_OFF) TRY(observe_ranks(r, B, sums.rank_sq, step_tokens, e));
    r->step++;
    r->batch = B;
    r->examples += B;
    r->tokens += B * r->shape.seq_len;
    *metrics = step_metrics(r, B, update.lr, clock_seconds() - start);
    metrics->skipped = skipped;
    return is_first(r) ? metrics_step(r->metrics, metrics, &r->noise, *mode, e) : 0;
}

// ---------------------------------------------------------------------------------------------------------------------
// Validation, samples, the end

// Rows done .. done + n of `rows` windows spread evenly over the validation set.
static int read_val_rows(Run *r, int64_t done, int n, int64_t rows, Error *e) {
    uint64_t windows = data_windows(r->val);
    for (int i = 0; i < n; i++) {
        uint64_t window = (uint64_t)(done + i) * windows / (uint64_t)rows;
        TRY(data_rows_sequential(r->val, window, 1, r->rows + (size_t)i * ((size_t)r->shape.seq_len + 1), e));
    }
    return 0;
}

// Mean loss over --val-tokens of the validation set, in whole rows: the same ones every time. They are spread over the
// whole set, because its beginning may be a single document, and shared out to the ranks.
static int validate(Run *r, const StepMetrics *last, Error *e) {
    int64_t T = r->shape.seq_len, rows = (r->options.val_tokens + T - 1) / T;
    int64_t windows = (int64_t)data_windows(r->val);
    if (rows > windows) rows = windows;
    double sum = 0;
    Share share = parallel_share(rows, r->comm->rank, r->comm->ranks);
    for (int64_t done = 0; done < share.count;) {
        int n = (int)(share.count - done < r->shape.micro_batch ? share.count - done : r->shape.micro_batch);
        TRY(read_val_rows(r, share.first + done, n, rows, e));
        TRY(engine_eval(r->engine, r->rows, n, r->losses, e));
        for (int64_t i = 0; i < n * T; i++) sum += r->losses[i];
        comm_progress(r->comm);
        done += n;
    }
    TRY(comm_sum(r->comm, &sum, 1, e));
    r->val_loss = sum / (double)(rows * T);
    if (!is_first(r)) return 0;
    progress_val(&r->progress, last, r->val_loss);
    return metrics_val(r->metrics, last->step, last->tokens, r->val_loss, e);
}

static int print_sample(Run *r, Error *e) {
    const Options *o = &r->options;
    SampleConfig config = {
        .tokens = (int)o->sample_tokens,
        .temperature = o->temperature,
        .top_k = (int)o->top_k,
        .seed = (uint64_t)o->seed,
        .prompt = o->prompt,
    };
    return sample_text(r->engine, &r->shape, r->tokenizer, &config, (uint64_t)r->step, stdout, e);
}

static int sample_during(Run *r, Error *e) {
    comm_phase(r->comm, PHASE_CHECKPOINT, r->step);
    if (!is_first(r)) return 0; // which has the same weights
    progress_break(&r->progress);
    printf("\nsample after step %lld:\n", (long long)r->step);
    TRY(print_sample(r, e));
    printf("\n");
    return 0;
}

// ---------------------------------------------------------------------------------------------------------------------
// Checkpoints

static void save_failed(Run *r, int64_t step, const Error *why) {
    fprintf(stderr, "warning: step %lld was not saved: %s. Training goes on; the newest checkpoint is %s\n",
            (long long)step, why->what, r->saved[0] ? r->saved : "none yet");
}

// Tells of a save that has ended; its error, if it has one, is in report->error.
static void tell_save(Run *r, const SaveReport *report) {
    progress_break(&r->progress);
    if (report->error.code) {
        save_failed(r, report->step, &report->error);
        return;
    }
    snprintf(r->saved, sizeof r->saved, "%s", report->directory);
    r->saved_step = report->step;
    printf("saved   %s in %.2f s, training stood still for %.3f s\n", r->saved, report->seconds, report->stall_seconds);
    if (report->note.code) fprintf(stderr, "warning: %s: older checkpoints stay\n", report->note.what);
    fflush(stdout);
}

static int state_text(Run *r, char **text, size_t *bytes, Error *e) {
    char build[300];
    describe_build(r, build, sizeof build);
    RunState state = run_state(r, build);
    return run_state_write(&state, text, bytes, e);
}

static void save_aside_first(Run *r) {
    SaveReport report;
    Error e = {0};
    char *text;
    size_t bytes;
    if (saver_collect(r->saver, true, &report)) tell_save(r, &report);
    int code = state_text(r, &text, &bytes, &e);
    if (!code) code = saver_start(r->saver, &r->parallel, r->step, text, bytes, &e);
    if (!code) return;
    progress_break(&r->progress);
    save_failed(r, r->step, &e);
}

// While training goes on. What goes wrong is said, and training goes on.
static int save_aside(Run *r, Error *e) {
    comm_phase(r->comm, PHASE_CHECKPOINT, r->step);
    if (!is_first(r)) return parallel_serve(&r->parallel, e);
    save_aside_first(r);
    return parallel_served(&r->parallel, e);
}

static int save_now_first(Run *r, Error *e) {
    SaveReport report;
    char *text;
    size_t bytes;
    if (saver_collect(r->saver, true, &report)) tell_save(r, &report);
    if (r->saved_step == r->step) return 0;
    TRY(state_text(r, &text, &bytes, e));
    saver_run(r->saver, &r->parallel, r->step, text, bytes, &report);
    if (report.error.code) return *e = report.error, e->code;
    tell_save(r, &report);
    return 0;
}

// Before the end.
static int save_now(Run *r, Error *e) {
    Error ending = {0};
    comm_phase(r->comm, PHASE_CHECKPOINT, r->step);
    if (!is_first(r)) return parallel_serve(&r->parallel, e);
    int code = save_now_first(r, e), ended = parallel_served(&r->parallel, &ending);
    if (!code && ended) *e = ending;
    return code ? code : ended;
}

// All ranks come here after the same step.
static int stop(Run *r, Error *e) {
    const char *signal_name = signals_requested();
    if (is_first(r)) progress_break(&r->progress);
    TRY(save_now(r, e));
    comm_settle(r->comm);
    return FAIL(e, ERR_STOPPED, "run the same command again to go on", "%s: stopped after step %lld, saved in %s",
                signal_name ? signal_name : "a signal to another rank", (long long)r->step, r->saved);
}

static int finish(Run *r, Error *e) {
    if (!is_first(r)) return save_now(r, e);
    progress_break(&r->progress);
    progress_curve(&r->progress);
    if (r->options.sample_every > 0) TRY(sample_during(r, e));
    TRY(save_now(r, e));
    if (isfinite(r->val_loss)) {
        printf("validation loss %.4f nats a token", r->val_loss);
        if (r->tokenizer && tokenizer_is_bytes(r->tokenizer)) printf(" = %.4f bits a byte", r->val_loss / log(2.0));
        printf("\n");
    }
    printf("model in %s, the run's numbers in %s/metrics.jsonl\n", r->saved, r->options.out);
    return 0;
}

static bool is_due(int64_t step, int64_t every) { return every > 0 && step % every == 0; }

static int train_loop(Run *r, Error *e) {
    const Options *o = &r->options;
    SaveReport report;
    while (r->tokens < o->run.horizon_tokens) {
        StepMetrics metrics;
        GnsMode mode;
        if (r->comm->ranks == 1) r->stop = signals_requested() != NULL;
        if (r->stop) return stop(r, e);
        TRY(train_step(r, &metrics, &mode, e));
        bool last = r->tokens >= o->run.horizon_tokens;
        if (r->val && o->val_every > 0 && (last || is_due(r->step, o->val_every))) TRY(validate(r, &metrics, e));
        if (is_first(r)) progress_step(&r->progress, &metrics, &r->noise, mode, last || r->step == 1);
        if (!last && is_due(r->step, o->sample_every)) TRY(sample_during(r, e));
        if (is_first(r) && saver_collect(r->saver, false, &report)) tell_save(r, &report);
        if (!last && is_due(r->step, o->checkpoint_every)) TRY(save_aside(r, e));
    }
    return finish(r, e);
}

// ---------------------------------------------------------------------------------------------------------------------
// The things the program does

static void say_complete(const Run *r) {
    if (!is_first(r)) return;
    printf("this run is complete: model in %s. --fresh starts over, a longer --%s goes on\n", r->saved,
           r->options.steps ? "steps" : "train-tokens");
}

// What this run is to go on from, on all ranks alike.
static int setup_start(Run *r, Error *e) {
    if (r->options.sample_every > 0 || r->options.prompt[0]) TRY(setup_tokenizer_needed(r, e));
    TRY(setup_data(r, e));
    TRY(setup_schedule(r, e));
    TRY(setup_resume(r, e));
    if (r->saved[0] && r->tokens >= r->options.run.horizon_tokens) return say_complete(r), 0;
    TRY(setup_buffers(r, e));
    return 0;
}

static int setup_training(Run *r, Error *e) {
    TRY(setup_buffers(r, e));
    return setup_engine(r, e);
}

static int check_same_data(const Run *r, Error *e) {
    const DataSet *sets[] = {r->train, r->val};
    uint64_t counts[7] = {[6] = (uint64_t)r->step};
    for (int i = 0; i < 2 && sets[i]; i++) {
        DataInfo info = data_describe(sets[i]);
        memcpy(counts + 3 * i, (uint64_t[]){(uint64_t)info.shards, info.tokens, info.windows}, 3 * sizeof *counts);
    }
    return comm_same(r->comm, comm_hash(counts, sizeof counts), ERR_INPUT, "other data or another checkpoint",
                     "all ranks must find the same files under --train, --val and --out", e);
}

static int run_training(Run *r, Error *e) {
    signals_install();
    TRY(comm_agree(r->comm, setup_start(r, e), e));
    TRY(check_same_data(r, e));
    if (r->saved[0] && r->tokens >= r->options.run.horizon_tokens) return say_complete(r), 0;
    TRY(comm_agree(r->comm, setup_training(r, e), e));
    TRY(comm_agree(r->comm, setup_output(r, e), e));
    TRY(parallel_start(&r->parallel, r->engine, (WireType)r->options.comm_dtype, e));
    if (is_first(r)) say_setup(r);
    int code = train_loop(r, e);
    SaveReport report;
    if (r->saver && saver_collect(r->saver, true, &report)) tell_save(r, &report); // under way when the loop failed
    return code;
}

static int run_sampling(Run *r, Error *e) {
    TRY(setup_tokenizer_needed(r, e));
    TRY(setup_engine(r, e));
    return print_sample(r, e);
}

static int run_dry(Run *r, Error *e) {
    const Options *o = &r->options;
    if (o->train[0]) TRY(setup_data(r, e));
    MemoryPlan plan;
    engine_plan_memory(&r->shape, &plan);
    printf("parameters       %zu\n", r->model.parameters);
    printf("FLOPs a token    %.4g (6 N + 6 L C T, N without position embeddings)\n",
           model_flops_per_token(&r->model, r->shape.seq_len));
    if (o->run.horizon_tokens > 0)
        printf("training         %.4g tokens, %.4g FLOPs\n", (double)o->run.horizon_tokens,
               (double)o->run.horizon_tokens * model_flops_per_token(&r->model, r->shape.seq_len));
    for (int i = 0; i < plan.count; i++)
        printf("%-36s %10.1f MiB\n", plan.item[i].what, (double)plan.item[i].bytes / (1 << 20));
    size_t copy = may_save_aside(o) ? saver_copy_bytes(&r->model) : 0;
    if (copy) printf("%-36s %10.1f MiB\n", "copy for checkpoints, on the host", (double)copy / (1 << 20));
    printf("%-36s %10.1f MiB\n", "memory in all", (double)(plan.total + copy) / (1 << 20));
    return 0;
}

static void run_destroy(Run *r) {
    progress_destroy(&r->progress);
    saver_destroy(r->saver);
    parallel_destroy(&r->parallel);
    engine_destroy(r->engine);
    memory_free(r->result.rank_sq);
    memory_free(r->result.example_sq);
    memory_free(r->result.grad_sq);
    memory_free(r->losses);
    memory_free(r->rows);
    noise_destroy(&r->noise);
    ramp_destroy(&r->ramp);
    shard_list_destroy(&r->shards);
    data_close(r->val);
    data_close(r->train);
    tokenizer_destroy(r->tokenizer);
    model_destroy(&r->model);
}

// A run of 8 ranks is one run: the same command line, the same program, the same data.
static int check_same_options(Run *r, Error *e) {
    char *text = NULL;
    size_t bytes = 0;
    FILE *f = open_memstream(&text, &bytes);
    if (!f) return FAIL(e, ERR_MEMORY, NULL, "out of memory: options as text");
    options_write_json(f, &r->options, 0);
    fclose(f);
    int code = comm_same(r->comm, comm_hash(text, bytes), ERR_USAGE, "other options",
                         "start all ranks with one command line, and the same --config file", e);
    free(text);
    return code ? code : comm_same_build(r->comm, e);
}

static int check_shares(const Run *r, Error *e) {
    int64_t rows = r->options.run.batch_min_rows;
    if (r->options.sample_only || r->options.dry_run || rows >= r->comm->ranks) return 0;
    FAIL(e, ERR_USAGE, NULL, "a batch of %lld rows has none for some of %d ranks", (long long)rows, r->comm->ranks);
    return error_hint(e, "use a larger %s, or mpirun -np %lld",
                      r->options.run.ramp_mode == RAMP_FIXED ? "--batch-tokens" : "--batch-min", (long long)rows);
}

static int setup_options(Run *r, Error *e) {
    Options *o = &r->options;
    if (o->help || o->version) return 0;
    if (is_first(r)) fputs(o->notes, stderr);
    TRY(options_resolve(o, e));
    if (*o->check) return 0;
    TRY(check_shares(r, e));
    return setup_model(r, e);
}

static int run_program(Run *r, int argc, char **argv, Error *e) {
    const Options *o = &r->options;
    Error unread;
    int code = options_parse(&r->options, argc, argv, &unread); // which says how long to wait for the others
    CommDeadlines deadlines = {o->deadline_setup, o->deadline_step, o->deadline_checkpoint};
    TRY(comm_create(r->comm, &deadlines, e));
    if (code) *e = unread;
    TRY(comm_agree(r->comm, code ? code : setup_options(r, e), e));
    TRY(check_same_options(r, e));
    bool trains = !(o->help || o->version || o->dry_run || o->sample_only || *o->check);
    if (trains) return run_training(r, e);
    if (!is_first(r)) return 0;
    if (o->help) options_print_help(stdout, argv[0]);
    else if (o->version) printf("gns.c " GNS_VERSION "\n");
    else if (*o->check) return inspect(o->check, stdout, e);
    else return o->dry_run ? run_dry(r, e) : run_sampling(r, e);
    return 0;
}

int train_main(int argc, char **argv) {
    Error e = {0}, closing = {0};
    Comm comm = {.ranks = 1, .local_ranks = 1};
    Run *r;
    int code = memory_alloc_zero((void **)&r, sizeof *r, "the run", &e);
    if (!code) {
        r->comm = &comm;
        r->val_loss = NAN;
        code = run_program(r, argc, argv, &e);
        if (code && r->metrics) progress_break(&r->progress);
        if (metrics_close(r->metrics, &closing) && !code) code = (e = closing).code;
        run_destroy(r);
        memory_free(r);
    }
    if (!code && (fflush(stdout) != 0 || ferror(stdout)))
        code = FAIL(&e, ERR_WRITE, "where does standard output go?", "standard output: %s", strerror(errno));
    e.code = code;
    return comm_finish(&comm, &e);
}
