// The training loop, the same for every engine. All ranks run it together; rank 0 alone prints and writes.
#include "run/run.h"

#include "base/files.h"
#include "base/signals.h"
#include "base/terminal.h"

// The parts of an iteration, in the order in which the loop calls them. saver.h says what a save in flight allows.
static int stop_and_save(Run *r, Error *e); // ERR_STOPPED
static int validate(Run *r, const StepMetrics *m, Error *e);
static int test_hellaswag(Run *r, const StepMetrics *m, Error *e);
static int compare_ranks(Setup *setup, Position *position, Error *e); // ERR_RANK unless all ranks have the same weights
static int sample(Run *r, Error *e);
static int save_here(Run *r, Error *e);
static void collect_save(Run *r, double seconds, Parallel *served); // reports a save that ends within `seconds`
static int save_in_background(Run *r, Error *e);                    // reports its own failure: training continues
static int save_for_log(Run *r, Error *e);                          // for log lines that wait because the disk is full
static int finish(Run *r, Error *e);

static bool is_due(int64_t step, int64_t every) { return every > 0 && step % every == 0; }

static int train_loop(Run *r, Error *e) {
    const Options *o = &r->setup.options;
    const RunPoint *at = &r->position.at;
    StepMetrics m;
    for (bool last = false; !last;) {
        if (r->setup.comm->ranks == 1)
            r->position.stop = comm_asked_to_stop(r->setup.comm); // more ranks agree in train_step
        if (r->position.stop) return stop_and_save(r, e);
        TRY(train_step(r, &m, e));
        last = at->tokens >= o->run.horizon_tokens; // then finish samples and saves
        const bool validates = r->data.val && o->val_every > 0 && (last || is_due(at->step, o->val_every));
        const bool compares = is_due(at->step, o->compare_every);
        const bool saves = is_due(at->step, o->checkpoint_every), samples = is_due(at->step, o->sample_every);
        if (last || r->position.stop || r->position.save || validates || compares || samples || saves ||
            is_due(at->step, o->hellaswag_every))
            TRY(parallel_send_weights(&r->setup.parallel, e));
        r->saving.is_best = false;
        if (validates) TRY(validate(r, &m, e));
        last = last || out_of_patience(r);
        if (r->data.hellaswag && (last || is_due(at->step, o->hellaswag_every))) TRY(test_hellaswag(r, &m, e));
        if (compares) TRY(compare_ranks(&r->setup, &r->position, e));
        progress_step(&r->output.progress, &m, &r->position.noise, last || at->step == 1);
        if (samples && !last) TRY(sample(r, e));
        collect_save(r, 0, NULL);
        if (r->position.save && !last) TRY(save_for_log(r, e));
        if ((saves || r->saving.is_best) && !last) TRY(save_in_background(r, e));
    }
    return finish(r, e);
}

// ---- Validation, samples --------------------------------------------------------------------------------------------

static int validate(Run *r, const StepMetrics *m, Error *e) {
    Evaluation v;
    TRY(evaluate_loss(&r->setup, &r->data, r->setup.options.val_tokens, &r->output.progress, &v, e));
    r->position.at.val_loss = v.loss;
    r->position.val_bytes = v.bytes / (double)v.tokens;
    if (r->setup.options.keep_best) { // only rank 0 knows whether the best so far was saved
        TRY(comm_broadcast(r->setup.comm, &r->position.at.best, sizeof r->position.at.best, e));
        r->saving.is_best = v.loss < r->position.at.best.loss;
        if (!r->saving.is_best && r->setup.options.patience) r->position.at.best.stale++;
    }
    if (!is_first(&r->setup)) return 0;
    progress_val(&r->output.progress, m, v.loss);
    return metrics_val(r->output.metrics, m->step, m->tokens, v.loss, e);
}

static int test_hellaswag(Run *r, const StepMetrics *m, Error *e) {
    HellaSwagScore score;
    TRY(evaluate_hellaswag(&r->setup, &r->data, &r->output.progress, &score, e));
    if (!is_first(&r->setup)) return 0;
    progress_hellaswag(&r->output.progress, m, &score);
    return metrics_hellaswag(r->output.metrics, m->step, m->tokens, &score, e);
}

// Rank 0 does `work`; the other ranks wait, and serve it their parts of the state if it asks.
static int on_rank_0(Run *r, int (*work)(Run *r, Error *e), Error *e) {
    Parallel *parallel = &r->setup.parallel;
    Error ignored;
    if (!is_first(&r->setup)) return parallel_serve(parallel, e);
    int code = work(r, e), ended = parallel_serve_end(parallel, code ? &ignored : e);
    return code ? code : ended;
}

static int sample_here(Run *r, Error *e) {
    printf("\nsample%s after step %lld:\n", r->setup.options.samples > 1 ? "s" : "", (long long)r->position.at.step);
    int code = print_samples(r, e);
    printf("\n");
    return code;
}

static int sample(Run *r, Error *e) {
    comm_phase(r->setup.comm, PHASE_CHECKPOINT, r->position.at.step);
    progress_break(&r->output.progress);
    progress_begin(&r->output.progress, STAGE_SAMPLE, NULL, 0, 0);
    int code = on_rank_0(r, sample_here, e);
    progress_end(&r->output.progress);
    return code;
}

static int compare_ranks(Setup *setup, Position *position, Error *e) {
    if (position->compared_step == position->at.step) return 0;
    if (parallel_compare(&setup->parallel, e)) return error_prefix(e, "step %lld", (long long)position->at.step);
    position->compared_step = position->at.step;
    return 0;
}

// ---- Reports of saves -----------------------------------------------------------------------------------------------

static const char *stop_cause(const Run *r) {
    return comm_asked_to_stop(r->setup.comm) ? signals_requested() : "a signal to another rank";
}

// Reports a failed save, during training or at an error that ends it. The best checkpoint is again the previous one, or
// none if that was removed meanwhile.
static void report_failure(Run *r, int64_t step, const Error *why, bool ends) {
    BestPoint *best = &r->position.at.best;
    if (step == best->step) *best = r->saving.best_before;
    if (!archive_has(r->setup.options.out, best->step)) *best = (BestPoint){.loss = INFINITY};
    print_folded(stderr, 9, "warning: step %lld was not saved: %s. %she newest checkpoint is %s\n", (long long)step,
                 why->what, ends ? "T" : "Training continues; t", r->saving.saved[0] ? r->saving.saved : "none yet");
}

// The save before the run's end failed: adds the unsaved step, and the checkpoint to resume from, to the error.
static int report_unsaved(const Run *r, Error *e) {
    char step[100], remedy[sizeof e->hint];
    if (r->position.stop && r->position.at.tokens < r->setup.options.run.horizon_tokens) {
        snprintf(step, sizeof step, "%s: stopped after step %lld, which", stop_cause(r),
                 (long long)r->position.at.step);
    } else snprintf(step, sizeof step, "step %lld", (long long)r->position.at.step);
    if (!r->saving.saved[0]) return error_prefix(e, "%s is not saved, and there is no checkpoint yet", step);
    snprintf(remedy, sizeof remedy, "%s", e->hint);
    error_hint(e, "%s%sthe same command%s resumes from there", remedy, *remedy ? "; then " : "",
               r->setup.options.fresh ? " without --fresh" : "");
    return error_prefix(e, "%s is not saved, and the newest checkpoint is %s", step, r->saving.saved);
}

static void report_removed(const char *out, const Removed *removed) {
    char newest[40];
    archive_name(newest, sizeof newest, removed->last);
    if (removed->count > 0)
        print_folded(stdout, 6, "note: removed %d checkpoint%s of %s, up to %s, to make room on the disk\n",
                     removed->count, removed->count > 1 ? "s" : "", out, newest);
}

static void report_save(Run *r, const SaveReport *report) {
    progress_break(&r->output.progress);
    report_removed(r->setup.options.out, &report->removed);
    fputs(report->notes, stderr);
    if (report->error.code) {
        report_failure(r, report->step, &report->error, false);
        return;
    }
    snprintf(r->saving.saved, sizeof r->saving.saved, "%s", report->directory);
    r->saving.saved_step = report->step;
    print_folded(stdout, 8, "saved   %s in %.2f s, training paused for %.3f s\n", r->saving.saved, report->seconds,
                 report->stall_seconds);
    if (report->note.code) print_folded(stderr, 9, "warning: %s: older checkpoints are kept\n", report->note.what);
    fflush(stdout);
}

// ---- Saves ----------------------------------------------------------------------------------------------------------

static void collect_save(Run *r, double seconds, Parallel *served) {
    SaveReport report;
    if (saver_collect(r->saving.saver, seconds, served, &report)) report_save(r, &report);
}

static int await_save(Run *r, Error *e) {
    (void)e;
    collect_save(r, INFINITY, &r->setup.parallel);
    return 0;
}

// Recreates removed or moved files of the run directory. A removed checkpoint is no longer the newest or the best.
static int restore_directory(Run *r, Error *e) {
    const char *out = r->setup.options.out;
    bool recreated;
    TRY(metrics_restore(r->output.metrics, &recreated, e));
    if (!archive_has(out, r->saving.saved_step)) r->saving.saved_step = -1, r->saving.saved[0] = 0;
    if (!archive_has(out, r->position.at.best.step)) r->position.at.best = (BestPoint){.loss = INFINITY};
    if (!recreated) return 0;
    progress_break(&r->output.progress);
    fprintf(stderr, "warning: %s/metrics.jsonl was removed or moved: written again\n", out);
    return directory_holds(out, "run.json") ? 0 : write_run_json(r, e);
}

// Writes the text of state.json for a checkpoint of this step, and protects the best checkpoints from removal.
static int prepare_save(Run *r, char **text, size_t *bytes, Error *e) {
    RunPoint *at = &r->position.at;
    const BestPoint before = at->best;
    bool keeps = r->setup.options.keep_best;
    r->saving.best_before = before;
    if (r->saving.is_best) at->best = (BestPoint){.step = at->step, .loss = at->val_loss};
    saver_protect(r->saving.saver, keeps && before.step ? before.step : -1,
                  keeps && at->best.step ? at->best.step : -1);
    at->metrics_bytes = metrics_bytes(r->output.metrics);
    return run_state_write(r, text, bytes, e);
}

static int start_save(Run *r, Error *e) {
    Error why;
    char *text;
    size_t bytes;
    if (r->setup.shape.shard_weights && !parallel_has_copies(&r->setup.parallel)) { // training waits
        if (!save_here(r, &why)) return 0;
        progress_break(&r->output.progress);
        report_failure(r, r->position.at.step, &why, false);
        return 0;
    }
    await_save(r, e);
    int code = restore_directory(r, &why);
    if (!code && r->saving.saved_step == r->position.at.step) return 0; // for the log
    if (!code) code = prepare_save(r, &text, &bytes, &why);
    if (!code) code = saver_start(r->saving.saver, &r->setup.parallel, r->position.at.step, text, bytes, &why);
    if (!code) return 0;
    progress_break(&r->output.progress);
    report_failure(r, r->position.at.step, &why, false);
    return 0;
}

static int save_here(Run *r, Error *e) {
    SaveReport report;
    char *text;
    size_t bytes;
    await_save(r, e);
    TRY(restore_directory(r, e));
    if (r->saving.saved_step == r->position.at.step) return 0;
    TRY(prepare_save(r, &text, &bytes, e));
    saver_run(r->saving.saver, &r->setup.parallel, r->position.at.step, text, bytes, &report);
    if (report.error.code) {
        report_removed(r->setup.options.out, &report.removed);
        *e = report.error;
        return e->code;
    }
    report_save(r, &report);
    return 0;
}

// The last save: the run ends after it, even if it fails.
static int save_last_here(Run *r, Error *e) {
    r->saving.last = true;
    return save_here(r, e) ? report_unsaved(r, e) : 0;
}

// The disk is full and lines of the log wait. A save makes room for itself and the lines. If it fails too, training
// continues until more than LOG_WAITS_MAX bytes wait. ERR_WRITE: the lines cannot be written, and the run ends.
static int save_log_here(Run *r, Error *e) {
    Error why = {0};
    bool first = !r->saving.log_save_tried;
    r->saving.log_save_tried = true;
    if (metrics_flush(r->output.metrics, e) == 0) return 0;
    progress_break(&r->output.progress);
    if (first) fprintf(stderr, "warning: %s: the log waits in memory\n", e->what);
    int unsaved = save_here(r, &why);
    if (unsaved) report_failure(r, r->position.at.step, &why, metrics_waiting(r->output.metrics) > LOG_WAITS_MAX);
    if (metrics_flush(r->output.metrics, e) == 0) {
        if (first) printf("note: the log is written again\n");
        return 0;
    }
    if (unsaved && metrics_waiting(r->output.metrics) <= LOG_WAITS_MAX) return 0;
    r->saving.last = unsaved;
    return unsaved ? report_unsaved(r, e) : e->code;
}

// No checkpoint is written of weights that differ between ranks.
static int save(Run *r, int (*save_on_rank_0)(Run *r, Error *e), Error *e) {
    comm_phase(r->setup.comm, PHASE_CHECKPOINT, r->position.at.step);
    TRY(compare_ranks(&r->setup, &r->position, e));
    progress_begin(&r->output.progress, STAGE_SAVE, "saving", 0, 0);
    int code = on_rank_0(r, save_on_rank_0, e);
    progress_end(&r->output.progress);
    return code;
}

static int save_in_background(Run *r, Error *e) { return save(r, start_save, e); }
static int save_and_wait(Run *r, Error *e) { return save(r, save_last_here, e); }
static int save_for_log(Run *r, Error *e) {
    int code = save(r, save_log_here, e);
    return comm_agree(r->setup.comm, code, e);
}

// ---- The end --------------------------------------------------------------------------------------------------------

static int stop_and_save(Run *r, Error *e) {
    const char *cause = stop_cause(r);
    progress_break(&r->output.progress);
    TRY(save_and_wait(r, e));
    comm_settle(r->setup.comm);
    const char *hint = r->setup.options.fresh ? "run the same command without --fresh to resume"
                                              : "run the same command again to resume";
    return FAIL(e, ERR_STOPPED, hint, "%s after step %lld, saved in %s", cause, (long long)r->position.at.step,
                r->saving.saved);
}

static void print_end(const Run *r) {
    const Options *o = &r->setup.options;
    const RunPoint *at = &r->position.at;
    if (out_of_patience(r) && at->tokens < o->run.horizon_tokens)
        print_folded(stdout, 4,
                     "ended early, after step %lld: %lld validations without a new lowest loss (--patience %lld)\n",
                     (long long)at->step, (long long)at->best.stale, (long long)o->patience);
    if (isfinite(at->val_loss)) {
        char bits[40] = "";
        if (r->position.val_bytes > 0)
            snprintf(bits, sizeof bits, " = %.4f bits a byte", at->val_loss / log(2.0) / r->position.val_bytes);
        print_folded(stdout, 4, "validation loss %.4f nats a token%s\n", at->val_loss, bits);
    }
    if (o->keep_best && at->best.step && at->best.step != at->step)
        print_folded(stdout, 4, "lowest validation loss %.4f after step %lld, in %s/step_%08lld\n", at->best.loss,
                     (long long)at->best.step, o->out, (long long)at->best.step);
    print_folded(stdout, 4, "model in %s, the run's numbers in %s/metrics.jsonl\n", r->saving.saved, o->out);
}

// Samples of the finished model, and its checkpoint. An error in sampling must not prevent the save.
static int finish(Run *r, Error *e) {
    Error sampling;
    progress_break(&r->output.progress);
    if (is_first(&r->setup)) progress_curve(&r->output.progress);
    int code = r->setup.options.sample_every > 0 ? sample(r, &sampling) : 0;
    TRY(save_and_wait(r, e));
    if (code) *e = sampling;
    else if (is_first(&r->setup)) print_end(r);
    return code;
}

// Training ended between two steps at a file that cannot be read or written: saves, and adds the checkpoint to e.
static int save_at_error(Run *r, Error *e) {
    Comm *comm = r->setup.comm;
    char directory[ARCHIVE_PATH], name[40], remedy[sizeof e->hint];
    Error why = {0};
    int code = parallel_send_weights(&r->setup.parallel, &why), saved;
    if (!code) code = save(r, save_here, &why);
    if (code && is_first(&r->setup)) report_failure(r, r->position.at.step, &why, true);
    saved = !code;
    TRY(comm_broadcast(comm, &saved, sizeof saved, &why)); // this rank may be the one that reports the error
    if (!saved) return 0;
    archive_name(name, sizeof name, r->position.at.step);
    snprintf(remedy, sizeof remedy, "%s", e->hint);
    TRY(path_join(directory, sizeof directory, r->setup.options.out, name, &why));
    error_hint(e, "%s%sstep %lld is saved in %s: the same command%s resumes there", remedy, *remedy ? "; " : "",
               (long long)r->position.at.step, directory, r->setup.options.fresh ? " without --fresh" : "");
    return 0;
}

// Training ended on an error; a save may still run. If all ranks know the error, the other ranks wait for the save. If
// only this rank does, they wait in a collective: this rank waits half their timeout, to report the error before it.
static void end_save(Run *r) {
    Setup *setup = &r->setup;
    Error ignored;
    bool all_know = setup->comm->settled || setup->comm->ranks == 1;
    comm_phase(setup->comm, PHASE_CHECKPOINT, r->position.at.step);
    int failed = all_know ? parallel_drain(&setup->parallel, &ignored) : 0;
    if (all_know && !failed) failed = on_rank_0(r, await_save, &ignored);
    else collect_save(r, 0.5 * fmin(setup->options.deadline_step, setup->options.deadline_checkpoint), NULL);
    if (failed) setup->comm->settled = false; // ends the job
}

// A run that had another type and resumes in fp16 begins with the initial scale.
static void begin_loss_scale(const Setup *setup, LossScale *s) {
    if (!setup->engine_api->needs_loss_scale) s->scale = 0;
    else if (s->scale == 0) s->scale = setup->options.loss_scale > 0 ? setup->options.loss_scale : LOSS_SCALE_START;
}

int train_run(Run *r, Error *e) {
    begin_loss_scale(&r->setup, &r->position.at.loss_scale);
    TRY(parallel_start(&r->setup.parallel, r->setup.engine, r->setup.options.comm_dtype, e));
    TRY(compare_ranks(&r->setup, &r->position, e));
    if (is_first(&r->setup)) TRY(print_setup(r, e));
    int code = train_loop(r, e);
    bool all_know = r->setup.comm->settled || r->setup.comm->ranks == 1,
         of_files = code == ERR_INPUT || code == ERR_WRITE;
    if (of_files && all_know && !r->saving.last && r->position.at.step > 0) save_at_error(r, e);
    if (!code) return parallel_drain(&r->setup.parallel, e);
    end_save(r);
    return code;
}
