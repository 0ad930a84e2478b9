// The run directory: what lies there already, and what this run writes to it.
#include "run/run.h"

#include "base/files.h"
#include "checkpoint/checkpoint.h"

#include <errno.h>
#include <stdlib.h>
#include <sys/stat.h>

// What state.json says of this run: of a path the name alone, since all files may have been moved together. `build` and
// its text belong to the caller.
RunState run_state(Run *r, const char *build) {
    return (RunState){
        .model = r->setup.model.config,
        .start = r->setup.source[0] ? r->setup.model_name : "scratch",
        .seq_len = r->setup.shape.seq_len,
        .seed = (uint64_t)r->setup.options.seed,
        .train = &r->data.shards,
        .at = &r->position.at,
        .ramp = &r->position.ramp.state,
        .noise = &r->position.noise,
        .build = build,
        .ranks = r->setup.comm->ranks,
        .options = &r->setup.options,
    };
}

// An earlier run in the same place is never overwritten: it is moved aside, and a new directory takes its place. Where
// --out is a link that is the place it leads to, which may be on another disk for a reason.
static int move_old_run(const char *out, Error *e) {
    char place[ARCHIVE_PATH], aside[ARCHIVE_PATH];
    struct stat st;
    snprintf(place, sizeof place, "%s", out);
    if (lstat(out, &st) == 0 && S_ISLNK(st.st_mode) && !realpath(out, place))
        return FAIL(e, ERR_WRITE, "choose another --out", "%s: where does it lead? %s", out, strerror(errno));
    for (int i = 1; i < 100000; i++) {
        int n = snprintf(aside, sizeof aside, "%s.%d", place, i);
        if (n < 0 || (size_t)n >= sizeof aside) return FAIL(e, ERR_USAGE, "use a shorter path", "--out: path too long");
        if (file_exists(aside)) continue;
        if (rename(place, aside) != 0)
            return FAIL(e, ERR_WRITE, "choose another --out", "%s holds an earlier run and cannot be moved aside: %s",
                        out, strerror(errno));
        fprintf(stderr, "%s held an earlier run: moved to %s\n", out, aside);
        return directory_create(place, e);
    }
    return FAIL(e, ERR_WRITE, "choose another --out", "%s: too many earlier runs beside it", out);
}

// Is there a run that this one does not go on from? One that was stopped before its first step is none.
static int holds_other_run(const Run *r, bool *holds, Error *e) {
    int checkpoints;
    TRY(archive_count(r->setup.options.out, &checkpoints, e));
    *holds = !r->saving.saved[0] && (checkpoints > 0 || metrics_bytes(r->output.metrics) > 0);
    return 0;
}

// From here on the run directory is ours.
static int setup_directory(Run *r, Error *e) {
    const char *out = r->setup.options.out;
    bool holds, may_go;
    TRY(directory_create(out, e));
    if (!r->output.metrics) TRY(metrics_open(&r->output.metrics, out, &may_go, e));
    TRY(holds_other_run(r, &holds, e));
    if (holds) {
        metrics_close(r->output.metrics, e);
        r->output.metrics = NULL;
        TRY(move_old_run(out, e));
        TRY(metrics_open(&r->output.metrics, out, &may_go, e));
    }
    if (metrics_bytes(r->output.metrics) < r->position.at.metrics_bytes)
        fprintf(stderr,
                "warning: %s/metrics.jsonl is shorter than the checkpoint says: some of its steps are missing\n", out);
    TRY(archive_tidy(out, stderr, e));
    TRY(archive_set_aside_after(out, r->position.at.step, stderr, e));
    return metrics_begin(r->output.metrics, r->position.at.step, r->position.at.metrics_bytes, e);
}

void describe_build(const Setup *setup, char *out, size_t bytes) {
    char engine[256];
    engine_describe(setup->engine, engine, sizeof engine);
    snprintf(out, bytes, "%s, %s", version_text(), engine);
}

// Can the run be long enough for a checkpoint before its end?
bool may_save_aside(const Setup *setup, const Position *position) {
    const Options *o = &setup->options;
    if (o->run.horizon_tokens == 0) return false; // a plan of no run, without a ramp
    int64_t steps = (o->run.horizon_tokens - 1) / (ramp_smallest(&position->ramp) * o->seq_len);
    return (o->checkpoint_every > 0 && steps >= o->checkpoint_every) || (best_every(o) > 0 && steps >= best_every(o));
}

int setup_output(Run *r, Error *e) {
    const Options *o = &r->setup.options;
    const bool saves_aside = may_save_aside(&r->setup, &r->position);
    float *copy = NULL;
    if (saves_aside)
        TRY(parallel_share_copy(&r->setup.parallel, SAVER_ARRAYS, saver_copy_stride(&r->setup.model), &copy, e));
    if (!is_first(&r->setup)) return 0;
    TRY(setup_directory(r, e));
    TRY(write_run_json(r, e));
    int eot = r->setup.tokenizer ? tokenizer_eot(r->setup.tokenizer) : -1;
    TextTokens text = checkpoint_text_tokens(o->model, r->setup.model.config.vocab, eot);
    SaverConfig saver = {o->out, r->setup.engine, &r->setup.model,  r->setup.tokenizer,
                         text,   o->keep,         r->output.metrics};
    TRY(saver_create(&r->saving.saver, &saver, e));
    if (saves_aside) TRY(saver_prepare(r->saving.saver, copy, e));
    TRY(progress_create(&r->output.progress, stdout, r->setup.engine, r->position.at.tokens, o->run.horizon_tokens, e));
    r->output.progress.val_loss = r->position.at.val_loss;
    if (r->position.at.step > 0) TRY(metrics_losses(r->output.metrics, progress_past, &r->output.progress, e));
    if (r->setup.comm->ranks > 1)
        r->output.progress.terminal = false; // mpirun's pseudo-terminal, which ends up in a log file
    return 0;
}
