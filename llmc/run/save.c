#include "run/save.h"

#include "base/files.h"
#include "base/signals.h"
#include "base/terminal.h"

// ---- Ranks ----------------------------------------------------------------------------------------------------------

int on_rank_0(Run *r, int (*work)(Run *r, Error *e), Error *e) {
    Parallel *parallel = &r->setup.parallel;
    Error ignored;
    if (!is_first(&r->setup)) return parallel_serve(parallel, e);
    int code = work(r, e), ended = parallel_serve_end(parallel, code ? &ignored : e);
    return code ? code : ended;
}

int compare_ranks(Setup *setup, Position *position, Error *e) {
    if (position->compared_step == position->at.step) return 0;
    if (parallel_compare(&setup->parallel, e)) return error_prefix(e, "step %lld", (long long)position->at.step);
    position->compared_step = position->at.step;
    return 0;
}

double save_seconds(const Run *r) {
    const double disk = 1e8; // bytes a second: a guess
    double bytes = (double)saver_checkpoint_bytes(&r->setup.model, r->setup.tokenizer);
    return r->saving.longest_save > 0 ? r->saving.longest_save : bytes / disk;
}

const char *stop_cause(const Run *r) {
    if (r->saving.out_of_time) return "the end of --max-hours";
    return comm_asked_to_stop(r->setup.comm) ? signals_requested() : "a signal to another rank";
}

// ---- Reports of saves -----------------------------------------------------------------------------------------------

// Reports a failed save, during training or at an error that ends it. The best checkpoint is again the previous one, or
// none if that was removed meanwhile.
static void report_failure(Run *r, int64_t step, const Error *why, bool ends) {
    BestPoint *best = &r->position.at.best;
    if (step == best->step) *best = r->saving.best_before;
    if (!archive_has(&r->saving.archive, best->step)) *best = (BestPoint){.loss = INFINITY};
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
    r->saving.longest_save = fmax(r->saving.longest_save, report->seconds);
    snprintf(r->saving.saved, sizeof r->saving.saved, "%s", report->directory);
    r->saving.saved_step = report->step;
    print_folded(stdout, 8, "saved   %s in %.2f s, training paused for %.3f s\n", r->saving.saved, report->seconds,
                 report->stall_seconds);
    if (report->note.code) print_folded(stderr, 9, "warning: %s: older checkpoints are kept\n", report->note.what);
    fflush(stdout);
}

// ---- Saves ----------------------------------------------------------------------------------------------------------

void collect_save(Run *r, double seconds, Parallel *served) {
    SaveReport report;
    if (saver_collect(r->saving.saver, seconds, served, &report)) report_save(r, &report);
}

static int await_save(Run *r, Error *e) {
    (void)e;
    collect_save(r, INFINITY, &r->setup.parallel);
    return 0;
}

// A checkpoint that somebody removed is no longer the newest or the best.
static void forget_removed(Run *r) {
    if (!archive_has(&r->saving.archive, r->saving.saved_step)) r->saving.saved_step = -1, r->saving.saved[0] = 0;
    if (!archive_has(&r->saving.archive, r->position.at.best.step)) r->position.at.best = (BestPoint){.loss = INFINITY};
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

static int save_here(Run *r, Error *e) {
    SaveReport report;
    char *text;
    size_t bytes;
    await_save(r, e);
    forget_removed(r);
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

// Training waits only where its weights cannot be copied: ZeRO-3 without room for copies.
static int begin_save(Run *r, Error *e) {
    char *text;
    size_t bytes;
    if (r->setup.shape.shard_weights && !parallel_has_copies(&r->setup.parallel)) return save_here(r, e);
    await_save(r, e);
    forget_removed(r);
    if (r->saving.saved_step == r->position.at.step) return 0; // for the log
    TRY(prepare_save(r, &text, &bytes, e));
    return saver_start(r->saving.saver, &r->setup.parallel, r->position.at.step, text, bytes, e);
}

static int start_save(Run *r, Error *e) {
    Error why;
    (void)e;
    if (begin_save(r, &why) == 0) return 0;
    progress_break(&r->output.progress);
    report_failure(r, r->position.at.step, &why, false);
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

static int check_names(const Run *r, Error *e) {
    TRY(archive_check_name(&r->saving.archive, e));
    return metrics_check_name(r->output.metrics, e);
}

// A name no longer leads to what this run writes: saves where that is now.
static int save_apart(Run *r, Error *e) {
    Error why;
    int unsaved = save_here(r, &why);
    check_names(r, e);
    return error_prefix(e, "step %lld is %s%s", (long long)r->position.at.step,
                        unsaved ? "not saved: " : "saved in this run's directory", unsaved ? why.what : "");
}

static int save(Run *r, int (*save_on_rank_0)(Run *r, Error *e), Error *e) {
    Comm *comm = r->setup.comm;
    comm_phase(comm, PHASE_CHECKPOINT, r->position.at.step);
    TRY(compare_ranks(&r->setup, &r->position, e));
    int apart = is_first(&r->setup) && check_names(r, &(Error){0});
    TRY(comm_broadcast(comm, &apart, sizeof apart, e));
    r->saving.last = r->saving.last || apart;
    progress_begin(&r->output.progress, STAGE_SAVE, "saving", 0, 0);
    int code = on_rank_0(r, apart ? save_apart : save_on_rank_0, e);
    progress_end(&r->output.progress);
    return apart ? comm_agree(comm, code, e) : code;
}

int save_in_background(Run *r, Error *e) { return save(r, start_save, e); }
int save_and_wait(Run *r, Error *e) { return save(r, save_last_here, e); }
int save_for_log(Run *r, Error *e) {
    int code = save(r, save_log_here, e);
    return comm_agree(r->setup.comm, code, e);
}

// ---- The run ends ----------------------------------------------------------------------------------------------------

int save_at_error(Run *r, Error *e) {
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

void end_save(Run *r) {
    Setup *setup = &r->setup;
    Error ignored;
    bool all_know = setup->comm->settled || setup->comm->ranks == 1;
    comm_phase(setup->comm, PHASE_CHECKPOINT, r->position.at.step);
    int failed = all_know ? parallel_drain(&setup->parallel, &ignored) : 0;
    if (all_know && !failed) failed = on_rank_0(r, await_save, &ignored);
    else collect_save(r, 0.5 * setup->options.deadline, NULL);
    if (failed) setup->comm->settled = false; // ends the job
}
