// Finds the checkpoint that a run starts from: its own newest one (a resume), or one of the run that --model names.
//
// What makes a run resumable:
//  1. A run directory has one writer. Its lock (metrics.h) is taken before its files are read, and held to the end.
//  2. A run resumes from its newest undamaged checkpoint, which rank 0 finds. All ranks must see the same manifest.
//     Each rank verifies a share of the files; the shares cover every byte.
//  3. A checkpoint holds all that decides the next step: weights and moments, and in state.json the counts, the ramp,
//     the noise scale, the outlier windows and the tuning. The order of the data follows from the counts and the seed.
//  4. Model, --seq-len, --seed, the shards and weights of --train, and options marked of_run (rows.h) may not change
//     (state.c). Other options may change; changes are reported.
//  5. The steps after the checkpoint are written again: setup_output cuts the logs back to it, and renames newer
//     checkpoints. A rollback is a resume in the same process (train.c), and keeps the lock.
//  6. Nothing is written before setup_output, so a refused resume leaves the run as it was. Exceptions: setup_room
//     removes the files of a killed save; for a complete run `train` (program.c) cuts the logs, too.
#include "run/run.h"

#include "base/files.h"
#include "base/hash.h"
#include "base/signals.h"
#include "checkpoint/checkpoint.h"

#include <stdlib.h>
#include <unistd.h>

// On all ranks: verifies rank 0's candidate. Each rank reads a share. If --out must be the same directory on all
// machines, all ranks divide the files; otherwise each machine's ranks divide them. Damage fails rank 0 only, with
// the lowest rank's error. Any other error, such as a different manifest on some rank, fails all ranks.
static int verify_share(void *run, Error *e) {
    Run *r = run;
    Comm *comm = r->comm;
    const Pulse pulse = {comm_progress, comm};
    const char *directory = r->saving.candidate.directory;
    char path[PATH_MAX], other[PATH_MAX + 24];
    FileDigest manifest = {0}; // digest of MANIFEST.json, which holds other files' hashes; zeros without a manifest
    Error lowest = {0};
    TRY(comm_broadcast(comm, &r->saving.candidate, sizeof r->saving.candidate, e));
    const bool shared = r->saving.candidate.own && r->options.zero != ZERO_0;
    const Share share = shared ? (Share){comm->rank, comm->ranks} : (Share){comm->local_rank, comm->local_ranks};
    snprintf(other, sizeof other, "another checkpoint (%s)", directory);
    TRY(path_join(path, sizeof path, directory, MANIFEST_NAME, e));
    int code = file_digest(path, &manifest, e);
    code = comm_agree(comm, code && e->unreadable ? code : 0, e);
    const uint64_t hash = hash_bytes(HASH_START, manifest.hash, sizeof manifest.hash);
    if (!code) code = comm_same(comm, hash, 1, ERR_USAGE, other, SAME_FILES_HINT, e);
    if (code) return e->unreadable = true, code; // not damage: every rank ends
    checkpoint_verify_model(directory, true, share, &pulse, &lowest);
    TRY(comm_lowest_error(comm, &lowest, e));
    if (is_rank0(r) && lowest.code) *e = lowest;
    return is_rank0(r) ? lowest.code : 0;
}

// On rank 0: the `verify` of archive_newest. The other ranks wait in end_search, and verify with rank 0.
static int ask_all_to_verify(void *run, const char *directory, Error *e) {
    Run *r = run;
    int word = COMM_HELP;
    strcpy(r->saving.candidate.directory, directory);
    TRY(comm_broadcast(r->comm, &word, sizeof word, e));
    progress_begin(&r->progress, "reading the checkpoint", 0);
    const int code = verify_share(r, e);
    progress_end(&r->progress);
    progress_break(&r->progress); // before the notes of archive_newest
    return code;
}

static int find_newest(Run *r, const Archive *archive, Newest *newest, Error *e) {
    const int64_t latest = r->back.why.code ? r->back.latest : INT64_MAX;
    r->saving.candidate.own = archive == &r->archive;
    return archive_newest(archive, latest, stderr, ask_all_to_verify, r, newest, e);
}

// On all ranks: ranks other than 0 verify candidates until rank 0's search ends. `code`: the search's.
static int end_search(Run *r, int code, Error *e) {
    Error waiting = {0};
    int failed = r->comm->settled ? 0 : comm_wait_first(r->comm, verify_share, r, &waiting);
    if (failed && !code) *e = waiting, code = failed;
    return comm_agree(r->comm, code, e);
}

// Opens and locks an existing run (1). Waits for the lock: it may outlive a killed process by seconds, and on NFS a
// crashed machine by 90 s (metrics.h).
static int lock_run(Run *r, Error *e) {
    const double begin = clock_seconds();
    bool said = false, here;
    int code;
    for (; (code = metrics_open(&r->metrics, r->archive.dir, r->archive.path, &here, e)) == ERR_USAGE; said = true) {
        if (comm_asked_to_stop(r->comm))
            return FAIL(e, ERR_STOPPED, "start the same command again", "%s while %s was locked", signals_requested(),
                        r->archive.path);
        const double timeout = fmin(here ? 5 : 120, r->options.deadline);
        if (clock_seconds() - begin >= timeout) break;
        if (!said) fprintf(stderr, "note: %s. Waiting up to %.0f s for it to end\n", e->what, timeout);
        comm_beat(r->comm);
        usleep(20000);
    }
    return code;
}

// On rank 0: sets saving.own, this run's own newest checkpoint. Searches once, and again for a rollback. Fails if a
// rollback finds none.
static int find_own(Run *r, Error *e) {
    const bool back = r->back.why.code; // if true, archive and log are open already
    if (!is_rank0(r)) return 0;
    if ((back || !archive_is_open(&r->archive)) && directory_exists(r->options.out)) {
        TRY(back ? archive_check_name(&r->archive, e) : archive_open(&r->archive, r->options.out, e));
        if (directory_holds(r->options.out, MANIFEST_NAME))
            return FAIL(e, ERR_USAGE, "name a run, or a new directory", "--out %s is a checkpoint", r->options.out);
        if (!back && file_exists_in(r->archive.dir, "metrics.jsonl")) TRY(lock_run(r, e));
        if (!r->options.fresh || back) TRY(find_newest(r, &r->archive, &r->saving.own, e));
    }
    if (!back || r->saving.own.found) return 0;
    return *e = r->back.why, error_hint(e, "no checkpoint of this run is left to go back to");
}

// Finds a run's checkpoint by its step.
static int find_step(const char *run, int64_t step, Newest *newest, Error *e) {
    archive_step_path(run, step, newest->directory);
    newest->found = directory_exists(newest->directory);
    newest->step = step;
    if (newest->found) return 0;
    return FAIL(e, ERR_INPUT, "name another step, or the run for its newest", "%s: no such checkpoint",
                newest->directory);
}

// Finds RUN:STEP or RUN:best (of --keep-best). RUN alone means the newest checkpoint. Without training, RUN alone means
// the best checkpoint, if there is one, and a note names what was found. ERR_INPUT if the run has no such checkpoint.
// Finds nothing if the path is no run.
static int find_named(Run *r, const char *model, Newest *newest, Error *e) {
    char run[PATH_MAX], path[PATH_MAX], *which, *end, loss[60] = "";
    Archive archive;
    RunSummary s = {0};
    snprintf(run, sizeof run, "%s", model);
    which = directory_exists(run) ? NULL : strrchr(run, ':');
    if (which) *which++ = 0;
    bool best = which && strcmp(which, "best") == 0, trains = options_train(&r->options);
    int64_t step = which && *which && !best ? strtoll(which, &end, 10) : -1;
    if ((which && !best && (step < 0 || *end)) || (step < 0 && !directory_exists(run))) return 0;
    if (step >= 0) TRY(find_step(run, step, newest, e));
    else {
        TRY(archive_open(&archive, run, e));
        int code = find_newest(r, &archive, newest, e);
        archive_close(&archive);
        if (!code && !newest->found && directory_holds(run, "metrics.jsonl"))
            return FAIL(e, ERR_INPUT, "use another run, or wait for its first one: see its --checkpoint-every",
                        "--model %s: a run without a checkpoint", run);
        if (code || !newest->found) return code;
    }
    if (best || (!trains && step < 0)) TRY(run_state_summary(&s, newest->directory, e));
    if (best && !s.at.best.step)
        return FAIL(e, ERR_INPUT, "name a step, or the run for its newest", "--model %s: the run has no --keep-best",
                    model);
    archive_step_path(run, s.at.best.step, path);
    if (!best && !directory_exists(path)) s.at.best.step = 0; // it was removed
    if (s.at.best.step) TRY(find_step(run, s.at.best.step, newest, e));
    if (s.at.best.step) snprintf(loss, sizeof loss, ", the lowest validation loss: %.4f", s.at.best.loss);
    if (!trains) fprintf(stderr, "note: --model %s is %s%s\n", model, newest->directory, loss);
    return 0;
}

// On rank 0: sets r->source for a --model that is no preset. A --model that names a run becomes its checkpoint's path.
static int find_source(Run *r, Error *e) {
    const Newest *own = &r->saving.own;
    Newest named = {0};
    RunSummary summary;
    snprintf(r->source, sizeof r->source, "%s", r->options.model);
    if (checkpoint_is_model(r->options.model)) return 0;
    if (options_train(&r->options)) TRY(find_own(r, e));
    if (own->found) TRY(run_state_summary(&summary, own->directory, e));
    if (own->found && strcmp(summary.start, r->model_name) == 0 && summary.model[0]) {
        strcpy(r->source, own->directory); // the run began from this --model, and no longer needs its files
        strcpy(r->options.model, summary.model);
        return 0;
    }
    TRY(find_named(r, r->options.model, &named, e));
    if (named.found) strcpy(r->options.model, named.directory);
    strcpy(r->source, named.found ? named.directory : "");
    return 0;
}

// A run directory as --model means its newest checkpoint. Once --out holds a checkpoint, the same --model resumes from
// --out, even if the named run has written newer checkpoints.
int setup_source(Run *r, Error *e) {
    Options *o = &r->options;
    ModelConfig ignored;
    RunSummary s;
    snprintf(r->model_name, sizeof r->model_name, "%s", path_name(o->model));
    if (model_preset(&ignored, o->model)) return 0;
    TRY(end_search(r, is_rank0(r) ? find_source(r, e) : 0, e));
    const bool crosses = is_rank0(r) && o->eval_only && *o->val && !o->document_mask; // attends across documents
    if (crosses && !run_state_summary(&s, o->model, &(Error){0}) && s.document_mask)
        fprintf(stderr, "note: the run kept documents apart: --document-mask gives its validation loss\n");
    TRY(comm_broadcast(r->comm, o->model, sizeof o->model, e));
    return comm_broadcast(r->comm, r->source, sizeof r->source, e);
}

// ---- Resume ---------------------------------------------------------------------------------------------------------

int setup_resume(Run *r, Error *e) {
    const Newest *newest = &r->saving.own;
    const Rollback *back = &r->back;
    char best[PATH_MAX];
    TRY(end_search(r, find_own(r, e), e));
    TRY(comm_broadcast(r->comm, &r->saving.own, sizeof r->saving.own, e));
    r->saving.saved_step = newest->found ? newest->step : -1;
    if (!newest->found) return 0;
    strcpy(r->saving.saved, newest->directory);
    if (is_rank0(r) && back->why.code)
        fprintf(stderr, "%s: back to %s, without examples %lld to %lld\n", back->why.what, r->saving.saved,
                (long long)back->first[back->made - 1],
                (long long)(back->first[back->made - 1] + back->rows[back->made - 1] - 1));
    int code = run_state_read(r, r->saving.saved, is_rank0(r) ? stdout : NULL, e);
    if (!code) code = ramp_settle(&r->position.ramp, r->at.step, r->at.tokens, e);
    for (int i = 0; i < back->made && !code; i++)
        code = dataset_exclude(r->data.train, (uint64_t)back->first[i], (uint64_t)back->rows[i], e);
    TRY(comm_agree(r->comm, code, e));
    archive_step_path(r->archive.path, r->at.best.step, best);
    if (is_rank0(r) && file_missing(r->archive.dir, best))
        r->at.best = (BestPoint){.loss = INFINITY}; // the best checkpoint was removed
    const bool other = r->saving.changed[OPTION_val] || r->saving.changed[OPTION_val_tokens];
    if (is_rank0(r) && other && r->options.keep_best && r->at.best.step)
        printf("--keep-best and --patience compare with a loss of the earlier --val: %.4f\n", r->at.best.loss);
    return comm_broadcast(r->comm, &r->at.best, sizeof r->at.best, e);
}
