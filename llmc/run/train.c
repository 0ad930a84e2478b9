// THE training loop. One for every engine: a program is this loop, linked with one implementation of engine.h.
#include "run/run.h"

#include "run/sample.h"
#include "base/signals.h"

#include <stdlib.h>

// ---------------------------------------------------------------------------------------------------------------------
// Validation, samples, the end

static int validate(Run *r, const StepMetrics *last, Error *e) {
    Evaluation v;
    TRY(evaluate_loss(&r->setup, &r->data, r->setup.options.val_tokens, &v, e));
    r->position.at.val_loss = v.loss;
    if (r->setup.options.keep_best) { // whether the best so far was saved in the end rank 0 alone knows
        TRY(comm_broadcast(r->setup.comm, &r->position.at.best, sizeof r->position.at.best, e));
        r->saving.is_best = v.loss < r->position.at.best.loss;
    }
    if (!is_first(&r->setup)) return 0;
    progress_val(&r->output.progress, last, v.loss);
    return metrics_val(r->output.metrics, last->step, last->tokens, v.loss, e);
}

static int test_hellaswag(Run *r, const StepMetrics *last, Error *e) {
    HellaSwagScore score;
    TRY(evaluate_hellaswag(&r->setup, &r->data, &score, e));
    if (!is_first(&r->setup)) return 0;
    progress_hellaswag(&r->output.progress, last, &score);
    return metrics_hellaswag(r->output.metrics, last->step, last->tokens, &score, e);
}

static int draw_sample(Run *r, int64_t number, FILE *copy, Error *e) {
    const Options *o = &r->setup.options;
    const Pulse pulse = {parallel_beat, &r->setup.parallel};
    const uint64_t beyond_any_step = (uint64_t)1 << 40;
    SampleConfig config = {
        .tokens = (int)o->sample_tokens,
        .temperature = o->temperature,
        .top_k = (int)o->top_k,
        .seed = (uint64_t)o->seed,
        .prompt = r->setup.prompt_file ? r->setup.prompt_file : o->prompt,
        .shown = r->output.metrics ? 200 : 0, // bytes: in a run's log it stands before every sample
        .copy_prompt = !r->setup.prompt_file, // which may be long, and is there
        .pulse = &pulse,
    };
    uint64_t stream = (uint64_t)r->position.at.step + (uint64_t)number * beyond_any_step;
    return sample_text(r->setup.engine, &r->setup.shape, r->setup.tokenizer, &config, stream, stdout, copy, e);
}

// The number-th of those that are printed at a time.
static int print_sample(Run *r, int64_t number, Error *e) {
    char *text = NULL;
    size_t bytes;
    if (r->setup.options.samples > 1)
        printf("--- sample %lld of %lld\n", (long long)number + 1, (long long)r->setup.options.samples);
    FILE *copy = open_memstream(&text, &bytes);
    int code =
        copy ? draw_sample(r, number, copy, e) : FAIL(e, ERR_MEMORY, "free some memory", "no memory for a sample");
    if (copy && fclose(copy) != 0 && !code) code = FAIL(e, ERR_MEMORY, "free some memory", "no memory for a sample");
    if (!code && r->output.metrics)
        code = metrics_sample(r->output.metrics, r->position.at.step, r->position.at.tokens, r->setup.options.prompt,
                              text, e);
    free(text);
    return code;
}

int print_samples(Run *r, Error *e) {
    for (int64_t i = 0; i < r->setup.options.samples; i++) TRY(print_sample(r, i, e));
    return 0;
}

// What rank 0 did while the others served is done, with this code.
static int let_go(Setup *setup, int code, Error *e) {
    Error ignored;
    int ended = parallel_serve_end(&setup->parallel, code ? &ignored : e);
    return code ? code : ended;
}

static int sample_first(Run *r, Error *e) {
    progress_break(&r->output.progress);
    printf("\nsample%s after step %lld:\n", r->setup.options.samples > 1 ? "s" : "", (long long)r->position.at.step);
    int code = print_samples(r, e);
    printf("\n");
    return code;
}

static int sample_during(Run *r, Error *e) {
    comm_phase(r->setup.comm, PHASE_CHECKPOINT, r->position.at.step);
    if (!is_first(&r->setup)) return parallel_serve(&r->setup.parallel, e); // which has the same weights
    return let_go(&r->setup, sample_first(r, e), e);
}

// ---------------------------------------------------------------------------------------------------------------------
// Checkpoints

// No run goes on, and no checkpoint is made, from weights that are not the same everywhere.
static int compare_ranks(Setup *setup, Position *position, Error *e) {
    if (position->compared_step == position->at.step) return 0;
    if (parallel_compare(&setup->parallel, e)) return error_prefix(e, "step %lld", (long long)position->at.step);
    position->compared_step = position->at.step;
    return 0;
}

// The best is again the one before, unless somebody has taken that away.
static void forget_unsaved(Run *r, int64_t step) {
    if (step == r->position.at.best.step) r->position.at.best = r->saving.best_before;
    if (!archive_has(r->setup.options.out, r->position.at.best.step))
        r->position.at.best = (BestPoint){.loss = INFINITY};
}

static void save_failed(Run *r, int64_t step, const Error *why) {
    forget_unsaved(r, step);
    fprintf(stderr, "warning: step %lld was not saved: %s. Training goes on; the newest checkpoint is %s\n",
            (long long)step, why->what, r->saving.saved[0] ? r->saving.saved : "none yet");
}

static void tell_removed(const Setup *setup, const Removed *removed) {
    char first[40], last[40];
    archive_name(first, sizeof first, removed->first);
    archive_name(last, sizeof last, removed->last);
    if (removed->count == 1) printf("note: %s/%s went to make room on the disk\n", setup->options.out, first);
    if (removed->count > 1)
        printf("note: %d checkpoints in %s, the oldest %s and the newest %s, went to make room on the disk\n",
               removed->count, setup->options.out, first, last);
}

// Tells of a save that has ended; its error, if it has one, is in report->error.
static void tell_save(Run *r, const SaveReport *report) {
    progress_break(&r->output.progress);
    tell_removed(&r->setup, &report->removed);
    fputs(report->notes, stderr);
    if (report->error.code) {
        save_failed(r, report->step, &report->error);
        return;
    }
    snprintf(r->saving.saved, sizeof r->saving.saved, "%s", report->directory);
    r->saving.saved_step = report->step;
    printf("saved   %s in %.2f s, training stood still for %.3f s\n", r->saving.saved, report->seconds,
           report->stall_seconds);
    if (report->note.code) fprintf(stderr, "warning: %s: older checkpoints stay\n", report->note.what);
    fflush(stdout);
}

static int64_t stays(const Setup *setup, const BestPoint *best) {
    return setup->options.keep_best && best->step ? best->step : -1;
}

// state.json of the checkpoint that is written next.
static int state_text(Run *r, char **text, size_t *bytes, Error *e) {
    char build[300];
    r->saving.best_before = r->position.at.best;
    if (r->saving.is_best) r->position.at.best = (BestPoint){r->position.at.step, r->position.at.val_loss};
    saver_stay(r->saving.saver, stays(&r->setup, &r->saving.best_before), stays(&r->setup, &r->position.at.best));
    describe_build(&r->setup, build, sizeof build);
    r->position.at.metrics_bytes = metrics_bytes(r->output.metrics);
    RunState state = run_state(r, build);
    return run_state_write(&state, text, bytes, e);
}

// The save under way, if there is one.
static void await_save(Run *r) {
    SaveReport report;
    saver_wait(r->saving.saver, INFINITY, &r->setup.parallel);
    if (saver_collect(r->saving.saver, true, &report)) tell_save(r, &report);
}

static void save_aside_first(Run *r) {
    Error e = {0};
    char *text;
    size_t bytes;
    await_save(r);
    int code = state_text(r, &text, &bytes, &e);
    if (!code) code = saver_start(r->saving.saver, &r->setup.parallel, r->position.at.step, text, bytes, &e);
    if (!code) return;
    progress_break(&r->output.progress);
    save_failed(r, r->position.at.step, &e);
}

// While training goes on. What goes wrong is said, and training goes on.
static int save_aside(Run *r, Error *e) {
    comm_phase(r->setup.comm, PHASE_CHECKPOINT, r->position.at.step);
    TRY(compare_ranks(&r->setup, &r->position, e));
    if (!is_first(&r->setup)) return parallel_serve(&r->setup.parallel, e);
    save_aside_first(r);
    return let_go(&r->setup, 0, e);
}

// The last save failed: what is lost, and what there is to go on from.
static int tell_loss(const Setup *setup, const Saving *saving, const char *step, Error *e) {
    char remedy[sizeof e->hint];
    if (!saving->saved[0]) return error_prefix(e, "%s is not saved, and there is no checkpoint yet", step);
    snprintf(remedy, sizeof remedy, "%s", e->hint);
    error_hint(e, "%s%sthe same command%s goes on from there", remedy, *remedy ? "; then " : "",
               setup->options.fresh ? " without --fresh" : "");
    return error_prefix(e, "%s is not saved, and the newest checkpoint is %s", step, saving->saved);
}

static int save_now_first(Run *r, const char *step, Error *e) {
    SaveReport report;
    char *text;
    size_t bytes;
    if (r->saving.saved_step == r->position.at.step) return 0;
    if (state_text(r, &text, &bytes, e)) return tell_loss(&r->setup, &r->saving, step, e);
    saver_run(r->saving.saver, &r->setup.parallel, r->position.at.step, text, bytes, &report);
    if (!report.error.code) {
        tell_save(r, &report);
        return 0;
    }
    tell_removed(&r->setup, &report.removed);
    *e = report.error;
    return tell_loss(&r->setup, &r->saving, step, e);
}

// Before the end. step: what to call the step where it cannot be saved.
static int save_now(Run *r, const char *step, Error *e) {
    comm_phase(r->setup.comm, PHASE_CHECKPOINT, r->position.at.step);
    TRY(compare_ranks(&r->setup, &r->position, e));
    if (!is_first(&r->setup)) return parallel_serve(&r->setup.parallel, e);
    await_save(r);
    return let_go(&r->setup, save_now_first(r, step, e), e);
}

// All ranks come here after the same step.
static int stop(Run *r, Error *e) {
    const char *signal_name = signals_requested();
    char stopped[80], lost[100];
    snprintf(stopped, sizeof stopped, "%s: stopped after step %lld",
             signal_name ? signal_name : "a signal to another rank", (long long)r->position.at.step);
    snprintf(lost, sizeof lost, "%s, which", stopped);
    if (is_first(&r->setup)) progress_break(&r->output.progress);
    TRY(save_now(r, lost, e));
    comm_settle(r->setup.comm);
    const char *hint = r->setup.options.fresh ? "run the same command without --fresh to go on"
                                              : "run the same command again to go on";
    return FAIL(e, ERR_STOPPED, hint, "%s, saved in %s", stopped, r->saving.saved);
}

static void say_end(const Run *r) {
    if (isfinite(r->position.at.val_loss)) {
        printf("validation loss %.4f nats a token", r->position.at.val_loss);
        if (r->setup.tokenizer && tokenizer_is_bytes(r->setup.tokenizer))
            printf(" = %.4f bits a byte", r->position.at.val_loss / log(2.0));
        printf("\n");
    }
    if (r->setup.options.keep_best && r->position.at.best.step && r->position.at.best.step != r->position.at.step)
        printf("lowest validation loss %.4f after step %lld, in %s/step_%08lld\n", r->position.at.best.loss,
               (long long)r->position.at.best.step, r->setup.options.out, (long long)r->position.at.best.step);
    printf("model in %s, the run's numbers in %s/metrics.jsonl\n", r->saving.saved, r->setup.options.out);
}

static int finish(Run *r, Error *e) {
    char step[40];
    snprintf(step, sizeof step, "step %lld", (long long)r->position.at.step);
    if (is_first(&r->setup)) {
        progress_break(&r->output.progress);
        progress_curve(&r->output.progress);
    }
    Error sampling = {0}; // is told when the model is safe
    int code = r->setup.options.sample_every > 0 ? sample_during(r, &sampling) : 0;
    TRY(save_now(r, step, e));
    if (code) {
        *e = sampling;
        return code;
    }
    if (is_first(&r->setup)) say_end(r);
    return 0;
}

static bool is_due(int64_t step, int64_t every) { return every > 0 && step % every == 0; }

// Is there anything to do before the next step?
static bool is_pause(const Setup *setup, const Position *position, bool last) {
    const Options *o = &setup->options;
    const int64_t every[] = {o->val_every, o->hellaswag_every, o->compare_every, o->sample_every, o->checkpoint_every};
    bool due = last || position->stop;
    for (size_t i = 0; i < sizeof every / sizeof *every; i++) due = due || is_due(position->at.step, every[i]);
    return due;
}

static int train_loop(Run *r, Error *e) {
    const Options *o = &r->setup.options;
    SaveReport report;
    while (r->position.at.tokens < o->run.horizon_tokens) {
        StepMetrics metrics;
        GnsMode mode;
        if (r->setup.comm->ranks == 1) r->position.stop = signals_requested() != NULL;
        if (r->position.stop) return stop(r, e);
        r->saving.is_best = false;
        TRY(train_step(r, &metrics, &mode, e));
        bool last = r->position.at.tokens >= o->run.horizon_tokens;
        if (is_pause(&r->setup, &r->position, last)) TRY(parallel_send_weights(&r->setup.parallel, e));
        if (r->data.val && o->val_every > 0 && (last || is_due(r->position.at.step, o->val_every)))
            TRY(validate(r, &metrics, e));
        if (r->data.hellaswag && (last || is_due(r->position.at.step, o->hellaswag_every)))
            TRY(test_hellaswag(r, &metrics, e));
        if (is_due(r->position.at.step, o->compare_every)) TRY(compare_ranks(&r->setup, &r->position, e));
        if (is_first(&r->setup))
            progress_step(&r->output.progress, &metrics, &r->position.noise, mode, last || r->position.at.step == 1);
        if (!last && is_due(r->position.at.step, o->sample_every)) TRY(sample_during(r, e));
        if (is_first(&r->setup) && saver_collect(r->saving.saver, false, &report)) tell_save(r, &report);
        if (!last && (r->saving.is_best || is_due(r->position.at.step, o->checkpoint_every))) TRY(save_aside(r, e));
    }
    return finish(r, e);
}

static void end_save_first(Run *r, bool others_wait) {
    SaveReport report;
    double patience =
        0.5 * fmin(r->setup.options.deadline_step, r->setup.options.deadline_checkpoint); // the others', and our own
    if (!r->saving.saver) return;
    if (!saver_wait(r->saving.saver, others_wait ? INFINITY : patience, others_wait ? &r->setup.parallel : NULL))
        return;
    if (saver_collect(r->saving.saver, true, &report)) tell_save(r, &report);
}

// Training ended on an error, perhaps in the midst of a save. Where all ranks know, the others wait for it. Where only
// this one does they wait in a collective, with a step's patience, and would end the job with words of their own.
static void end_save(Run *r) {
    Error ignored;
    bool known = r->setup.comm->settled || r->setup.comm->ranks == 1;
    comm_phase(r->setup.comm, PHASE_CHECKPOINT, r->position.at.step);
    int failed = known ? parallel_drain(&r->setup.parallel, &ignored) : 0;
    if (is_first(&r->setup)) end_save_first(r, known && !failed);
    if (known && !failed)
        failed = is_first(&r->setup) ? parallel_serve_end(&r->setup.parallel, &ignored)
                                     : parallel_serve(&r->setup.parallel, &ignored);
    if (failed) r->setup.comm->settled = false; // ends the job
}

int train_run(Run *r, Error *e) {
    TRY(parallel_start(&r->setup.parallel, r->setup.engine, r->setup.options.comm_dtype, e));
    TRY(compare_ranks(&r->setup, &r->position, e));
    if (is_first(&r->setup)) say_setup(r);
    int code = train_loop(r, e);
    if (code) end_save(r);
    return code;
}
