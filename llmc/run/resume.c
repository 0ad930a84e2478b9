// Which checkpoint a run starts from: that of the run that --model names, or its own newest, from which it goes on.
#include "run/run.h"

#include "checkpoint/checkpoint.h"
#include "base/files.h"
#include "base/hash.h"
#include "base/signals.h"

#include <stdlib.h>
#include <unistd.h>

// Rank 0 looks, which takes reading all of it, and tells of damaged ones.
static int find_newest(const Setup *setup, const char *out, Newest *newest, Error *e) {
    const Pulse pulse = {comm_beat, setup->comm};
    return archive_newest(out, stderr, &pulse, &newest->found, &newest->step, newest->directory, e);
}

// The others take its word. All ranks must call this; code: what rank 0's search came to.
static int share_newest(const Setup *setup, int code, Newest *newest, Error *e) {
    Error waiting = {0};
    int failed = comm_wait_first(setup->comm, &waiting);
    if (failed && !code) *e = waiting, code = failed;
    TRY(comm_agree(setup->comm, code, e));
    return comm_broadcast(setup->comm, newest, sizeof *newest, e);
}

// Where a run is to be gone on with, whoever began it may have died just now, on another machine, and its lock outlives it
// for a while. A start that is nobody's restart is not kept waiting, nor whoever asks for a stop.
static int wait_for_lock(const Setup *setup, Output *output, Error *e) {
    enum { LEASE = 120 }; // s: longer than a server of NFSv4 keeps locks (90 s)
    const char *out = setup->options.out;
    double most = fmin(LEASE, setup->options.deadline_setup), begin = clock_seconds();
    bool may_go, told = false;
    int code;
    while ((code = metrics_open(&output->metrics, out, &may_go, e)) && may_go && !setup->options.fresh) {
        if (signals_requested())
            return FAIL(e, ERR_STOPPED, "start the same command again", "%s: stopped while %s was locked",
                        signals_requested(), out);
        if (clock_seconds() - begin >= most) return code;
        if (!told)
            fprintf(stderr, "note: %s. Waiting for it, up to %.0f s: a lock may outlive the machine that held it\n",
                    e->what, most);
        told = true;
        comm_beat(setup->comm);
        sleep(1);
    }
    return code;
}

// A run that is there already is ours before we look at it: one that another program is still at would go on, and what
// it saves after we have looked would seem to be in our way.
static int lock_run(const Setup *setup, Output *output, Error *e) {
    char path[ARCHIVE_PATH];
    TRY(path_join(path, sizeof path, setup->options.out, "metrics.jsonl", e));
    return file_exists(path) ? wait_for_lock(setup, output, e) : 0;
}

// Looks once.
static int find_saved(Run *r, Newest *newest, Error *e) {
    const char *out = r->setup.options.out;
    if (!is_first(&r->setup)) return 0;
    if (!r->saving.own.looked) {
        TRY(lock_run(&r->setup, &r->output, e));
        if (!r->setup.options.fresh && directory_exists(out))
            TRY(find_newest(&r->setup, out, &r->saving.own.newest, e));
    }
    r->saving.own.looked = true;
    *newest = r->saving.own.newest;
    return 0;
}

// The newest of another run, which must have one. What is no run is none of ours here.
static int find_model(const Setup *setup, const char *path, Newest *newest, Error *e) {
    char metrics[ARCHIVE_PATH];
    int checkpoints;
    if (checkpoint_is_model(path) || !directory_exists(path)) return 0;
    TRY(find_newest(setup, path, newest, e));
    TRY(path_join(metrics, sizeof metrics, path, "metrics.jsonl", e));
    if (newest->found || !file_exists(metrics)) return 0;
    TRY(archive_count(path, &checkpoints, e));
    return FAIL(e, ERR_INPUT, checkpoints ? "use another run" : "wait for its first one: see its --checkpoint-every",
                "--model %s: a run without a checkpoint%s", path, checkpoints ? " that is whole" : " yet");
}

// Our own newest checkpoint, where the run was begun from --model: that has all that is needed of it.
static int find_begun(Run *r, Newest *newest, Error *e) {
    Newest own = {0};
    RunSummary begun;
    TRY(find_saved(r, &own, e));
    if (!own.found) return 0;
    TRY(run_state_summary(&begun, own.directory, e));
    if (strcmp(begun.start, r->setup.model_name) != 0 || !begun.model[0]) return 0;
    *newest = own;
    snprintf(r->setup.options.model, sizeof r->setup.options.model, "%s", begun.model);
    return 0;
}

// Where --model names neither a preset nor a model's files: a checkpoint to read.
static int find_source(Run *r, Newest *newest, Error *e) {
    Options *o = &r->setup.options;
    if (checkpoint_is_model(o->model)) return 0;
    if (options_train(o)) TRY(find_begun(r, newest, e));
    if (newest->found) return 0;
    TRY(find_model(&r->setup, o->model, newest, e));
    if (newest->found) snprintf(o->model, sizeof o->model, "%s", newest->directory);
    return 0;
}

// Where a model is to be started from or looked at, a run directory stands for its newest checkpoint. A run that is begun
// so goes on under the run's name, whatever has become of it by then.
int setup_source(Run *r, Error *e) {
    Options *o = &r->setup.options;
    ModelConfig ignored;
    Newest newest = {0};
    snprintf(r->setup.model_name, sizeof r->setup.model_name, "%s", path_name(o->model));
    if (model_preset(&ignored, o->model)) return 0;
    TRY(share_newest(&r->setup, is_first(&r->setup) ? find_source(r, &newest, e) : 0, &newest, e));
    TRY(comm_broadcast(r->setup.comm, o->model, sizeof o->model, e));
    if (newest.found) snprintf(r->setup.source, sizeof r->setup.source, "%s", newest.directory);
    else if (checkpoint_is_model(o->model)) snprintf(r->setup.source, sizeof r->setup.source, "%s", o->model);
    return 0;
}

// ---------------------------------------------------------------------------------------------------------------------
// Going on

// Do all ranks see the checkpoint that rank 0 has read? It is told by its manifest, and that has the hashes of the rest.
static int same_checkpoint(const Setup *setup, const Saving *saving, Error *e) {
    char path[ARCHIVE_PATH];
    FileDigest manifest = {0}; // where there is none
    TRY(path_join(path, sizeof path, saving->saved, MANIFEST_NAME, e));
    (void)file_digest(path, DIGEST_ALL, NULL, &manifest, &(Error){0});
    return comm_same(setup->comm, hash_bytes(HASH_START, manifest.hash, sizeof manifest.hash), ERR_INPUT,
                     "another checkpoint (--out)", SAME_FILES_HINT, e);
}

static int take_up(Run *r, Error *e) {
    char *changes;
    RunState state = run_state(r, "");
    TRY(run_state_read(&state, r->saving.saved, &changes, r->saving.changed, e));
    int code = ramp_settle(&r->position.ramp, r->position.at.step, r->position.at.tokens, e);
    if (!code && is_first(&r->setup))
        printf("resuming from %s: %lld steps, %lld tokens done\n%s", r->saving.saved, (long long)r->position.at.step,
               (long long)r->position.at.tokens, changes);
    free(changes);
    return code;
}

// Finds the newest checkpoint of an earlier part of this run, and takes up where it stands. Writes nothing.
int setup_resume(Run *r, Error *e) {
    Newest newest = {0};
    TRY(share_newest(&r->setup, find_saved(r, &newest, e), &newest, e));
    r->saving.saved_step = newest.found ? newest.step : -1;
    if (!newest.found) return 0;
    strcpy(r->saving.saved, newest.directory);
    TRY(same_checkpoint(&r->setup, &r->saving, e));
    TRY(comm_agree(r->setup.comm, take_up(r, e), e));
    if (!archive_has(r->setup.options.out, r->position.at.best.step))
        r->position.at.best = (BestPoint){.loss = INFINITY};                                   // taken away
    return comm_broadcast(r->setup.comm, &r->position.at.best, sizeof r->position.at.best, e); // from rank 0's disk
}
