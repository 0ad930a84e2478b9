// The run directory: what an earlier run left there, and what this run writes.
#include "run/run.h"

#include "base/files.h"
#include "base/terminal.h"
#include "checkpoint/checkpoint.h"
#include "plan/plan.h"

#include <errno.h>
#include <stdlib.h>
#include <sys/stat.h>

// Renames an earlier run and creates a new directory. Where --out is a link, this happens at its target, which may be
// on another disk.
static int move_old_run(const char *out, Error *e) {
    char place[ARCHIVE_PATH], aside[ARCHIVE_PATH + 16];
    struct stat st;
    int i = 0;
    snprintf(place, sizeof place, "%s", out);
    if (lstat(out, &st) == 0 && S_ISLNK(st.st_mode) && !realpath(out, place))
        return FAIL(e, ERR_WRITE, "choose another --out", "%s: cannot resolve the link: %s", out, strerror(errno));
    do snprintf(aside, sizeof aside, "%s.%d", place, ++i);
    while (file_exists(aside));
    if (rename(place, aside) != 0)
        return FAIL(e, ERR_WRITE, "choose another --out", "%s holds an earlier run and cannot be moved aside: %s", out,
                    strerror(errno));
    fprintf(stderr, "%s held an earlier run: moved to %s\n", out, aside);
    return directory_create(place, e);
}

// Fails unless the disk has room for a save, which needs it for the old checkpoint and the new one.
static int check_room(const Run *r, int present, Error *e) {
    const Archive *archive = &r->saving.archive;
    uint64_t left, one = saver_checkpoint_bytes(&r->setup.model, r->setup.tokenizer);
    int needed = present || plan_checkpoints(&r->position.ramp, &r->setup.options) > 1 ? 2 : 1;
    TRY(disk_free(archive->dir, archive->path, &left, e));
    if (left + (uint64_t)present * one >= (uint64_t)needed * one) return 0;
    return FAIL(e, ERR_WRITE, "free some space, or choose another --out",
                "--out %s: a save needs room for %d checkpoint%s of %llu bytes, and the disk has %llu bytes left",
                archive->path, needed, needed > 1 ? "s, the old one and the new," : "", (unsigned long long)one,
                (unsigned long long)left);
}

// Locks the run directory, moves an earlier run aside, and cuts logs and checkpoints back to this run's step.
static int setup_directory(Run *r, Error *e) {
    const char *out = r->setup.options.out;
    Archive *archive = &r->saving.archive;
    LockHolder ignored;
    int checkpoints;
    TRY(directory_create(out, e));
    if (!archive_is_open(archive)) TRY(archive_open(archive, out, e));
    if (!r->output.metrics) TRY(metrics_open(&r->output.metrics, archive->dir, out, &ignored, e));
    TRY(archive_count(archive, &checkpoints, e));
    // Move an earlier run aside. A run that stopped before its first step left neither checkpoints nor lines.
    if (!r->saving.saved[0] && (checkpoints > 0 || metrics_bytes(r->output.metrics) > 0)) {
        metrics_close(r->output.metrics, e);
        r->output.metrics = NULL;
        archive_close(archive);
        TRY(move_old_run(out, e));
        TRY(archive_open(archive, out, e));
        TRY(metrics_open(&r->output.metrics, archive->dir, out, &ignored, e));
        checkpoints = 0;
    }
    TRY(check_room(r, checkpoints, e));
    if (metrics_bytes(r->output.metrics) < r->position.at.metrics_bytes)
        print_folded(stderr, 9,
                     "warning: %s/metrics.jsonl is shorter than at the checkpoint: some of its steps are missing\n",
                     out);
    TRY(run_lock_sign(archive->dir, out, e));
    TRY(archive_tidy(archive, stderr, e));
    TRY(write_run_json(r, e)); // before any change to the run's data: it reads the old run.json
    TRY(archive_set_aside_after(archive, r->position.at.step, stderr, e));
    return metrics_begin(r->output.metrics, r->position.at.step, r->position.at.metrics_bytes, e);
}

bool saves_in_background(const Setup *setup, const Position *position) {
    const Options *o = &setup->options;
    if (o->run.horizon_tokens == 0) return false; // --dry-run without a run's length
    int64_t steps = (o->run.horizon_tokens - 1) / (ramp_smallest(&position->ramp) * o->seq_len);
    return (o->checkpoint_every > 0 && steps >= o->checkpoint_every) || (best_every(o) > 0 && steps >= best_every(o));
}

// Every rank that writes its own state must see the run directory: the one whose run.json has this run's id.
static int share_directory(Run *r, Error *e) {
    Archive *archive = &r->saving.archive;
    char id[HASH_TEXT], *text;
    size_t bytes;
    if (parallel_stores_alone(&r->setup.parallel)) return 0;
    strcpy(id, archive->id);
    TRY(comm_broadcast(r->setup.comm, id, sizeof id, e));
    if (is_rank0(&r->setup)) return 0;
    bool seen = archive_open(archive, r->setup.options.out, e) == 0 &&
                file_read_in(archive->dir, "run.json", RUN_JSON_MAX_BYTES, &text, &bytes, e) == 0;
    bool same = seen && strstr(text, id);
    if (seen) memory_free(text);
    if (same) return 0;
    return FAIL(e, ERR_USAGE, "give a directory that all machines share, or --zero 0, where rank 0 writes alone",
                "--out %s: is not rank 0's directory here", r->setup.options.out);
}

int setup_output(Run *r, Error *e) {
    const Options *o = &r->setup.options;
    r->saving.first_step = r->position.at.step + 1;
    TRY(comm_agree(r->setup.comm, is_rank0(&r->setup) ? setup_directory(r, e) : 0, e));
    TRY(comm_agree(r->setup.comm, share_directory(r, e), e));
    TRY(saver_create(&r->saving.saver, r, e));
    if (!is_rank0(&r->setup)) return 0;
    progress_run(&r->output.progress, r->setup.engine, r->setup.shape.seq_len, r->position.at.step,
                 r->position.at.tokens, o->run.horizon_tokens);
    r->output.progress.val_loss = r->position.at.val_loss;
    return 0;
}
