#include "run/save.h"

#include "base/files.h"
#include "base/signals.h"
#include "base/terminal.h"

#include <time.h>

// ---- Ranks ----------------------------------------------------------------------------------------------------------

int on_rank_0(Run *r, int (*work)(Run *r, Error *e), Error *e) {
    Parallel *parallel = &r->setup.parallel;
    Error ignored;
    if (!is_rank0(&r->setup)) return parallel_serve(parallel, e);
    int code = work(r, e), ended = parallel_serve(parallel, code ? &ignored : e);
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

int collect_save(Run *r, Error *e) {
    SaveReport report;
    TRY(saver_advance(r->saving.saver, &r->saving.sums, e));
    if (saver_collect(r->saving.saver, &report)) report_save(r, &report);
    return 0;
}

// Waits until no save runs. *unsaved: the code of the one that ended, whose error becomes *why on rank 0; where these are
// NULL, a failure is printed.
static int await_save(Run *r, int *unsaved, Error *why, Error *e) {
    const struct timespec moment = {0, 10000000};
    Comm *comm = r->setup.comm;
    Saver *saver = r->saving.saver;
    double done = -1;
    while (saver_is_writing(saver)) {
        SaverCounts sums = saver_counts(saver);
        if (sums.writing && sums.done == done) { // a rank whose disk hangs keeps the others waiting: the watchdog tells
            nanosleep(&moment, NULL);
            continue;
        }
        done = sums.done;
        TRY(comm_sum(comm, &sums.writing, sizeof sums / sizeof(double), e));
        TRY(saver_advance(saver, &sums, e));
    }
    for (SaveReport report; saver_is_finishing(saver);) {
        if (saver_collect(saver, &report)) {
            if (unsaved && report.error.code)
                report_removed(r->setup.options.out, &report.removed), *why = report.error;
            else report_save(r, &report);
            if (unsaved) *unsaved = report.error.code;
            break;
        }
        double now = saver_counts(saver).done;
        if (now != done) comm_beat(comm);
        done = now;
        nanosleep(&moment, NULL);
    }
    TRY(comm_wait_first(comm, e));
    return unsaved ? comm_broadcast(comm, unsaved, sizeof *unsaved, e) : 0;
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

static int begin_save(Run *r, bool waits, int *skip, Error *e) {
    char *text;
    size_t bytes;
    forget_removed(r);
    *skip = r->saving.saved_step == r->position.at.step;
    if (*skip) return 0;
    TRY(prepare_save(r, &text, &bytes, e));
    return saver_begin(r->saving.saver, r->position.at.step, text, bytes, waits, e);
}

static int check_names(const Run *r, Error *e) {
    TRY(archive_check_name(&r->saving.archive, e));
    return metrics_check_name(r->output.metrics, e);
}

// All ranks together: starts a save, after the one before; waits: until it is done. *unsaved: the code of a failure, which
// is no error of this function; *why on rank 0. Where a name no longer leads to what this run writes, the save goes where
// that is now, and the run ends with ERR_WRITE.
static int save(Run *r, bool waits, int *unsaved, Error *why, Error *e) {
    Comm *comm = r->setup.comm;
    struct {
        int code, skip, apart;
    } begun = {0};
    comm_phase(comm, PHASE_CHECKPOINT, r->position.at.step);
    TRY(compare_ranks(&r->setup, &r->position, e));
    progress_begin(&r->output.progress, "saving", 0);
    TRY(await_save(r, NULL, NULL, e));
    if (is_rank0(&r->setup)) {
        begun.apart = check_names(r, &(Error){0}) != 0;
        waits = waits || begun.apart;
        begun.code = begin_save(r, waits, &begun.skip, why);
    }
    TRY(comm_wait_first(comm, e));
    TRY(comm_broadcast(comm, &begun, sizeof begun, e));
    *unsaved = begun.code;
    if (!begun.code && !begun.skip) {
        saver_start(r->saving.saver, r->position.at.step);
        r->saving.sums = (SaverCounts){.writing = 1};
        if (waits || begun.apart) TRY(await_save(r, unsaved, why, e));
    }
    progress_end(&r->output.progress);
    if (!begun.apart) return 0;
    r->saving.last = true;
    if (is_rank0(&r->setup)) {
        check_names(r, e);
        error_prefix(e, "step %lld is %s%s", (long long)r->position.at.step,
                     *unsaved ? "not saved: " : "saved in this run's directory", *unsaved ? why->what : "");
    }
    return comm_agree(comm, is_rank0(&r->setup) ? e->code : 0, e);
}

int save_in_background(Run *r, Error *e) {
    Error why = {0};
    int unsaved;
    TRY(save(r, false, &unsaved, &why, e));
    if (!unsaved || !is_rank0(&r->setup)) return 0;
    progress_break(&r->output.progress);
    report_failure(r, r->position.at.step, &why, false);
    return 0;
}

int save_and_wait(Run *r, Error *e) {
    Error why = {0};
    int unsaved;
    r->saving.last = true;
    TRY(save(r, true, &unsaved, &why, e));
    if (unsaved && is_rank0(&r->setup)) *e = why, report_unsaved(r, e);
    return comm_agree(r->setup.comm, unsaved && is_rank0(&r->setup) ? e->code : 0, e);
}

// The disk is full and lines of the log wait. A save makes room for itself and the lines. If it fails too, training
// continues until more than LOG_WAITS_MAX bytes wait. ERR_WRITE: the lines cannot be written, and the run ends.
int save_for_log(Run *r, Error *e) {
    Metrics *m = r->output.metrics;
    Error why = {0};
    const bool first_try = !r->saving.log_save_tried, is_rank_0 = is_rank0(&r->setup);
    int full = is_rank_0 && metrics_flush(m, e), unsaved, code = 0;
    r->saving.log_save_tried = true;
    if (full) progress_break(&r->output.progress);
    if (full && first_try) fprintf(stderr, "warning: %s: the log waits in memory\n", e->what);
    TRY(comm_broadcast(r->setup.comm, &full, sizeof full, e));
    if (!full) return 0;
    TRY(save(r, true, &unsaved, &why, e));
    if (is_rank_0) {
        bool too_long = metrics_waiting(m) > LOG_WAITS_MAX;
        if (unsaved) report_failure(r, r->position.at.step, &why, too_long);
        code = metrics_flush(m, e);
        if (!code && first_try) printf("note: the log is written again\n");
        if (code && unsaved) code = metrics_waiting(m) > LOG_WAITS_MAX ? report_unsaved(r, e) : 0;
    }
    code = comm_agree(r->setup.comm, code, e);
    if (code) r->saving.last = unsaved != 0;
    return code;
}

// ---- The run ends ----------------------------------------------------------------------------------------------------

int save_at_error(Run *r, Error *e) {
    char directory[ARCHIVE_PATH], name[40], remedy[sizeof e->hint];
    Error why = {0}, failed = {0};
    int unsaved = 1, code = parallel_send_weights(&r->setup.parallel, &failed);
    if (!code) code = save(r, true, &unsaved, &why, &failed);
    if (code) why = failed;
    if ((code || unsaved) && is_rank0(&r->setup)) report_failure(r, r->position.at.step, &why, true);
    if (code || unsaved) return 0;
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
    const struct timespec moment = {0, 10000000};
    bool all_know = setup->comm->settled || setup->comm->ranks == 1;
    comm_phase(setup->comm, PHASE_CHECKPOINT, r->position.at.step);
    int failed = all_know ? parallel_drain(&setup->parallel, &ignored) : 0;
    if (all_know && !failed) failed = await_save(r, NULL, NULL, &ignored);
    for (double end = clock_seconds() + 0.5 * setup->options.deadline;
         saver_is_finishing(r->saving.saver) && clock_seconds() < end; nanosleep(&moment, NULL))
        collect_save(r, &ignored);
    if (failed) setup->comm->settled = false; // ends the job
}
