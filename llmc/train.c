#define _POSIX_C_SOURCE 200809L
#include "train.h"

#include "checkpoint.h"
#include "hash.h"
#include "inspect.h"
#include "run.h"
#include "sample.h"
#include "signals.h"

#include <errno.h>
#include <limits.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

// ---------------------------------------------------------------------------------------------------------------------
// Validation, samples, the end

static int validate(Run *r, const StepMetrics *last, Error *e) {
    Evaluation v;
    TRY(evaluate_loss(r, r->options.val_tokens, &v, e));
    r->at.val_loss = v.loss;
    if (!is_first(r)) return 0;
    progress_val(&r->progress, last, v.loss);
    return metrics_val(r->metrics, last->step, last->tokens, v.loss, e);
}

static int test_hellaswag(Run *r, const StepMetrics *last, Error *e) {
    HellaSwagScore score;
    TRY(evaluate_hellaswag(r, &score, e));
    if (!is_first(r)) return 0;
    progress_hellaswag(&r->progress, last, &score);
    return metrics_hellaswag(r->metrics, last->step, last->tokens, &score, e);
}

// Where `copy` is not NULL, the text goes there too.
static int print_sample(Run *r, FILE *copy, Error *e) {
    const Options *o = &r->options;
    SampleConfig config = {
        .tokens = (int)o->sample_tokens,
        .temperature = o->temperature,
        .top_k = (int)o->top_k,
        .seed = (uint64_t)o->seed,
        .prompt = o->prompt,
    };
    return sample_text(r->engine, &r->shape, r->tokenizer, &config, (uint64_t)r->at.step, stdout, copy, e);
}

static int sample_during(Run *r, Error *e) {
    char *text = NULL;
    size_t bytes;
    comm_phase(r->comm, PHASE_CHECKPOINT, r->at.step);
    if (!is_first(r)) return 0; // which has the same weights
    progress_break(&r->progress);
    printf("\nsample after step %lld:\n", (long long)r->at.step);
    FILE *copy = open_memstream(&text, &bytes);
    int code = copy ? print_sample(r, copy, e) : FAIL(e, ERR_MEMORY, "free some memory", "no memory for a sample");
    if (copy && fclose(copy) != 0 && !code) code = FAIL(e, ERR_MEMORY, "free some memory", "no memory for a sample");
    if (!code) code = metrics_sample(r->metrics, r->at.step, r->at.tokens, r->options.prompt, text, e);
    free(text);
    printf("\n");
    return code;
}

// ---------------------------------------------------------------------------------------------------------------------
// Checkpoints

// No run goes on, and no checkpoint is made, from weights that are not the same everywhere.
static int compare_ranks(Run *r, Error *e) {
    if (r->compared_step == r->at.step) return 0;
    if (parallel_compare(&r->parallel, e)) return error_prefix(e, "step %lld", (long long)r->at.step);
    r->compared_step = r->at.step;
    return 0;
}

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
    r->at.metrics_bytes = metrics_bytes(r->metrics);
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
    if (!code) code = saver_start(r->saver, &r->parallel, r->at.step, text, bytes, &e);
    if (!code) return;
    progress_break(&r->progress);
    save_failed(r, r->at.step, &e);
}

// While training goes on. What goes wrong is said, and training goes on.
static int save_aside(Run *r, Error *e) {
    comm_phase(r->comm, PHASE_CHECKPOINT, r->at.step);
    TRY(compare_ranks(r, e));
    if (!is_first(r)) return parallel_serve(&r->parallel, e);
    save_aside_first(r);
    return parallel_served(&r->parallel, e);
}

static int save_now_first(Run *r, Error *e) {
    SaveReport report;
    char *text;
    size_t bytes;
    if (r->saved_step == r->at.step) return 0;
    TRY(state_text(r, &text, &bytes, e));
    saver_run(r->saver, &r->parallel, r->at.step, text, bytes, &report);
    *e = report.error;
    if (e->code) return e->code;
    tell_save(r, &report);
    return 0;
}

// Before the end.
static int save_now(Run *r, Error *e) {
    Error ending = {0};
    SaveReport report;
    comm_phase(r->comm, PHASE_CHECKPOINT, r->at.step);
    TRY(compare_ranks(r, e));
    if (is_first(r) && saver_collect(r->saver, true, &report)) tell_save(r, &report);
    TRY(comm_barrier(r->comm, e)); // a deadline for each of two saves
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
    const char *hint =
        r->options.fresh ? "run the same command without --fresh to go on" : "run the same command again to go on";
    return FAIL(e, ERR_STOPPED, hint, "%s: stopped after step %lld, saved in %s",
                signal_name ? signal_name : "a signal to another rank", (long long)r->at.step, r->saved);
}

static int finish(Run *r, Error *e) {
    if (!is_first(r)) return save_now(r, e);
    progress_break(&r->progress);
    progress_curve(&r->progress);
    Error sampling = {0}; // is told when the model is safe
    int code = r->options.sample_every > 0 ? sample_during(r, &sampling) : 0;
    TRY(save_now(r, e));
    if (code) {
        *e = sampling;
        return code;
    }
    if (isfinite(r->at.val_loss)) {
        printf("validation loss %.4f nats a token", r->at.val_loss);
        if (r->tokenizer && tokenizer_is_bytes(r->tokenizer)) printf(" = %.4f bits a byte", r->at.val_loss / log(2.0));
        printf("\n");
    }
    printf("model in %s, the run's numbers in %s/metrics.jsonl\n", r->saved, r->options.out);
    return 0;
}

static bool is_due(int64_t step, int64_t every) { return every > 0 && step % every == 0; }

// Is there anything to do before the next step?
static bool is_pause(const Run *r, bool last) {
    const Options *o = &r->options;
    const int64_t every[] = {o->val_every, o->hellaswag_every, o->compare_every, o->sample_every, o->checkpoint_every};
    bool due = last || r->stop;
    for (size_t i = 0; i < sizeof every / sizeof *every; i++) due = due || is_due(r->at.step, every[i]);
    return due;
}

static int train_loop(Run *r, Error *e) {
    const Options *o = &r->options;
    SaveReport report;
    while (r->at.tokens < o->run.horizon_tokens) {
        StepMetrics metrics;
        GnsMode mode;
        if (r->comm->ranks == 1) r->stop = signals_requested() != NULL;
        if (r->stop) return stop(r, e);
        TRY(train_step(r, &metrics, &mode, e));
        bool last = r->at.tokens >= o->run.horizon_tokens;
        if (is_pause(r, last)) TRY(parallel_send_weights(&r->parallel, e));
        if (r->val && o->val_every > 0 && (last || is_due(r->at.step, o->val_every))) TRY(validate(r, &metrics, e));
        if (r->hellaswag && (last || is_due(r->at.step, o->hellaswag_every))) TRY(test_hellaswag(r, &metrics, e));
        if (is_first(r)) TRY(metrics_end_step(r->metrics, e));
        if (is_due(r->at.step, o->compare_every)) TRY(compare_ranks(r, e));
        if (is_first(r)) progress_step(&r->progress, &metrics, &r->noise, mode, last || r->at.step == 1);
        if (!last && is_due(r->at.step, o->sample_every)) {
            TRY(sample_during(r, e));
            TRY(comm_barrier(r->comm, e)); // the others wait here, with a checkpoint's patience, not a step's
        }
        if (is_first(r) && saver_collect(r->saver, false, &report)) tell_save(r, &report);
        if (!last && is_due(r->at.step, o->checkpoint_every)) TRY(save_aside(r, e));
    }
    return finish(r, e);
}

// ---------------------------------------------------------------------------------------------------------------------
// The things the program does

static bool is_complete(const Run *r) { return r->saved[0] && r->at.tokens >= r->options.run.horizon_tokens; }

static int say_complete(const Run *r) {
    if (!is_first(r)) return 0;
    printf("this run is complete: model in %s. --fresh starts over, a longer --%s goes on\n", r->saved,
           r->options.steps ? "steps" : "train-tokens");
    return 0;
}

// Has every rank rows in every step? In the horizon's last one some may have none.
static int check_shares(const Run *r, Error *e) {
    const char *replayed = r->options.run.ramp_replay;
    int64_t rows = ramp_smallest(&r->ramp);
    if (rows >= r->comm->ranks) return 0;
    FAIL(e, ERR_USAGE, NULL, "%s%sa batch of %lld rows has none for some of %d ranks", replayed ? replayed : "",
         replayed ? ": " : "", (long long)rows, r->comm->ranks);
    if (replayed) return error_hint(e, "use mpirun -np %lld, or replay a run of larger batches", (long long)rows);
    return error_hint(e, "use a larger %s, or mpirun -np %lld",
                      r->options.run.ramp_mode == RAMP_FIXED ? "--batch-tokens" : "--batch-min", (long long)rows);
}

// What this run is to go on from, on all ranks alike.
static int setup_start(Run *r, Error *e) {
    if (r->options.sample_every > 0 || r->options.prompt[0]) TRY(setup_tokenizer_needed(r, e));
    TRY(setup_schedule(r, e));
    TRY(check_shares(r, e));
    TRY(setup_data(r, e));
    TRY(setup_resume(r, e));
    return 0;
}

static int setup_training(Run *r, Error *e) {
    TRY(setup_buffers(r, e));
    return setup_engine(r, e);
}

// Training ended on an error, perhaps in the midst of a save. Where all ranks know, the others wait at the end of the
// program, with a checkpoint's patience. Where only this one does they wait in a collective, with a step's, and would end
// the job with words of their own.
static void end_save(Run *r) {
    Error ignored;
    SaveReport report;
    bool known = r->comm->settled || r->comm->ranks == 1;
    comm_phase(r->comm, PHASE_CHECKPOINT, r->at.step);
    if (known && parallel_come_to_rest(&r->parallel, &ignored)) known = r->comm->settled = false; // ends the job
    double patience = 0.5 * fmin(r->options.deadline_step, r->options.deadline_checkpoint); // the others', and our own
    if (!r->saver || !saver_wait(r->saver, known ? INFINITY : patience)) return;
    if (saver_collect(r->saver, true, &report)) tell_save(r, &report);
}

static int run_training(Run *r, Error *e) {
    TRY(comm_agree(r->comm, setup_start(r, e), e));
    TRY(setup_same_data(r, e));
    if (is_complete(r)) return say_complete(r);
    TRY(comm_agree(r->comm, setup_training(r, e), e));
    TRY(setup_tuning(r, e));
    TRY(comm_agree(r->comm, setup_output(r, e), e));
    TRY(parallel_start(&r->parallel, r->engine, r->options.comm_dtype, e));
    TRY(compare_ranks(r, e));
    if (is_first(r)) say_setup(r);
    int code = train_loop(r, e);
    if (code) end_save(r);
    return code;
}

static int run_sampling(Run *r, Error *e) {
    TRY(setup_tokenizer_needed(r, e));
    TRY(setup_engine(r, e));
    return print_sample(r, NULL, e);
}

// A run of 8 ranks is one run: the same command line, the same program, the same data.
static int check_same_options(Run *r, Error *e) {
    char *text = NULL;
    size_t bytes = 0;
    FILE *f = open_memstream(&text, &bytes);
    if (!f) return FAIL(e, ERR_MEMORY, NULL, "out of memory: options as text");
    options_write_json(f, &r->options, 0);
    fclose(f);
    int code = comm_same(r->comm, hash_bytes(HASH_START, text, bytes), ERR_USAGE, "other options",
                         "start all ranks with one command line, and the same --config file", e);
    free(text);
    return code ? code : comm_same_build(r->comm, e);
}

static int setup_options(Run *r, Error *e) {
    Options *o = &r->options;
    if (o->help || o->version) return 0;
    TRY(options_resolve(o, e));
    if (o->sample_only && !o->dry_run && r->comm->ranks > 1)
        return FAIL(e, ERR_USAGE, "start it without mpirun", "--sample-only is for one process, not %d",
                    r->comm->ranks);
    if (is_first(r)) fputs(o->notes, stderr);
    if (*o->check) return 0;
    return setup_model(r, e);
}

static int run_program(Run *r, Error *e) {
    const Options *o = &r->options;
    Error unread;
    int code = options_parse(&r->options, r->argc, r->argv, &unread); // which says how long to wait for the others
    CommDeadlines deadlines = {o->deadline_setup, o->deadline_step, o->deadline_checkpoint};
    if (options_train(o)) signals_install(); // a request to stop may come while the ranks are still meeting
    TRY(comm_create(r->comm, &deadlines, e));
    if (code) *e = unread;
    TRY(comm_agree(r->comm, code ? code : setup_options(r, e), e));
    TRY(check_same_options(r, e));
    if (options_train(o)) return run_training(r, e);
    if (o->eval_only && !(o->help || o->version || o->dry_run)) return evaluate_model(r, e);
    if (!is_first(r)) return 0;
    if (o->help) options_print_help(stdout, r->argv[0]);
    else if (o->version) printf("%s\n", version_text());
    else if (*o->check) return inspect(o->check, stdout, e);
    else return o->dry_run ? run_dry(r, e) : run_sampling(r, e);
    return 0;
}

void train_spin_briefly(char **argv) {
    if (getenv("GOMP_SPINCOUNT") || getenv("OMP_WAIT_POLICY")) return;
    char program[PATH_MAX]; // by its path: started as /proc/self/exe it would be called "exe" in ps, and by killall
    ssize_t n = readlink("/proc/self/exe", program, sizeof program - 1);
    if (n <= 0 || setenv("GOMP_SPINCOUNT", "1000", 1) != 0) return;
    program[n] = 0;
    execv(program, argv); // on failure: go on as we are
}

// What does not get into a file is missing there; a terminal or a reader that is gone misses nothing.
static bool output_is_file(void) {
    struct stat st;
    return fstat(STDOUT_FILENO, &st) == 0 && S_ISREG(st.st_mode);
}

int train_main(int argc, char **argv) {
    Error e = {0}, closing = {0};
    bool nobody_listens = false; // should writing to standard output fail
    Comm comm = {.ranks = 1, .local_ranks = 1};
    Run *r;
    int code = memory_alloc_zero((void **)&r, sizeof *r, "the run", &e);
    if (!code) {
        r->comm = &comm;
        r->argc = argc;
        r->argv = argv;
        r->at.val_loss = NAN;
        r->compared_step = -1;
        code = run_program(r, &e);
        if (code && r->metrics) progress_break(&r->progress);
        e.code = code;
        // An error of this rank's alone ends the job from here. What others say when this rank takes its end down would
        // come first; and a save may still be under way.
        if (code && comm.ranks > 1 && !comm.settled) return comm_finish(&comm, &e);
        if (metrics_close(r->metrics, &closing) && !code) code = (e = closing).code;
        nobody_listens = options_train(&r->options) && !output_is_file();
        run_destroy(r);
        memory_free(r);
    }
    if (!code && (fflush(stdout) != 0 || ferror(stdout)) && !nobody_listens)
        code = FAIL(&e, ERR_WRITE, "send it to a disk with free space", "standard output: %s", strerror(errno));
    e.code = code;
    return comm_finish(&comm, &e);
}
