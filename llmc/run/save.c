// Numbers in comments refer to the list in save.h.
#include "run/run.h"

#include "base/signals.h"
#include "checkpoint/checkpoint.h"
#include "checkpoint/layout.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <unistd.h>

enum { ARRAYS = 3 };
static const StateKind kinds[ARRAYS] = {STATE_PARAM, STATE_MOMENT1, STATE_MOMENT2};

typedef enum { IDLE, WRITING, FINISHING } Phase;

struct Saver {
    const Run *run; // the thread reads only fields that training does not change
    Layout layout;
    Range all; // the whole flat array
    const Range *owned;
    int owned_count;    // number of ranges that this rank writes
    LayoutPiece *piece; // (pieces) what this rank writes
    int pieces;
    float *copy; // (ARRAYS, stride): the owned ranges, one after another; NULL: the thread reads the engine
    size_t stride;
    bool copies; // every rank has memory for its copy
    Pulse pulse; // a call increments `done`
    Worker worker;
    atomic_bool copying; // the thread still copies from the engine
    atomic_bool ended;   // set by the thread's last access to this struct
    atomic_long done;    // progress: pieces written or read back, files closed
    // Fields of the running save:
    Phase phase;
    bool waits; // the run's last save, for whose end the run waits
    int64_t step;
    Spare spare; // checkpoints to keep, set at the save's start
    char *state; // text of state.json
    size_t state_bytes;
    Manifest manifest; // only on rank 0
    Text notes;        // lines for stderr
    Error error;       // this rank's error; code 0: none
    double started, paused, seconds; // paused: the main thread's waits; a GPU computes during await_copy
};

// ---- Ranks ----------------------------------------------------------------------------------------------------------

int compare_ranks(Run *r, Error *e) {
    if (!parallel_compare(&r->parallel, e)) return 0;
    return error_prefix(e, "step %lld", (long long)r->at.step);
}

double save_seconds(const Run *r) {
    const double disk = 1e8; // bytes per second, a guess
    double bytes = (double)saver_checkpoint_bytes(&r->model, r->tokenizer);
    return r->saving.longest_save > 0 ? r->saving.longest_save : bytes / disk;
}

const char *stop_cause(const Run *r) {
    if (r->saving.out_of_time) return "the end of --max-hours";
    return comm_asked_to_stop(r->comm) ? signals_requested() : "a signal to another rank";
}

// ---- Before the first save ------------------------------------------------------------------------------------------

uint64_t saver_checkpoint_bytes(const Model *model, const Tokenizer *tokenizer) {
    const uint64_t json = 1 << 16, bpe = 2 << 20; // GPT-2's vocabulary and merges are 1.5 MB
    uint64_t rest = json + (tokenizer && !tokenizer->is_bytes ? bpe : 0);
    return (model->parameters + 2 * model->flat_count) * sizeof(float) + rest;
}

static void count_piece(void *saver) { atomic_fetch_add(&((Saver *)saver)->done, 1); }

static void *touch_copy(void *saver) {
    Saver *s = saver;
    size_t bytes = ARRAYS * s->stride * sizeof(float);
    memset(s->copy, 0, bytes);
    engine_pin(s->run->engine, s->copy, bytes);
    return NULL;
}

int saver_create(Saver **out, const Run *r, Error *e) {
    const Parallel *p = &r->parallel;
    const bool alone = parallel_stores_alone(p), is_first = is_rank0(r);      // with --zero 0 rank 0 writes alone
    const bool writes = alone ? is_first : r->comm->rank < p->division.ranks; // --shard machine: one replica writes
    const size_t page = 64 << 10; // bytes of the largest page of any machine
    TRY(memory_alloc_zero((void **)out, sizeof **out, "the saver", e));
    Saver *s = *out;
    s->run = r;
    s->pulse = (Pulse){count_piece, s};
    s->all = (Range){0, r->model.flat_count};
    s->owned = alone ? &s->all : r->whole.part ? r->whole.part : p->owned;
    s->owned_count = alone ? is_first : writes || r->whole.part ? p->buckets : 0;
    for (int i = 0; i < s->owned_count; i++) s->stride += range_length(s->owned[i]);
    s->stride = round_up(s->stride, page / sizeof(float));
    TRY(layout_create(&s->layout, &r->model, e));
    if (writes) TRY(layout_pieces(&s->layout, s->owned, s->owned_count, is_first, &s->piece, &s->pieces, e));
    return 0;
}

int saver_prepare(Saver *s, Error *e) {
    double missing = 0;
    if (s->stride)
        missing = memory_alloc((void **)&s->copy, ARRAYS * s->stride * sizeof(float), "a copy", &(Error){0}) != 0;
    if (s->copy) worker_start(&s->worker, touch_copy, s, "a copy", &(Error){0}); // on failure the save touches the copy
    TRY(comm_sum(s->run->comm, &missing, 1, e));
    s->copies = missing == 0;
    if (s->copies || !s->run->whole.part) return 0;
    comm_settle(s->run->comm);
    return FAIL(e, ERR_MEMORY, "use more ranks, or a machine with more memory",
                "a rank has no memory for its copy of a checkpoint, which --tensor needs");
}

void saver_destroy(Saver *s) {
    if (!s) return;
    worker_join(&s->worker);
    if (s->copy) engine_unpin(s->run->engine, s->copy);
    memory_free(s->copy);
    memory_free(s->piece);
    manifest_free(&s->manifest);
    layout_destroy(&s->layout);
    text_free(&s->notes);
    free(s->state);
    memory_free(s);
}

// ---- Rank 0 begins --------------------------------------------------------------------------------------------------

// Makes the text of state.json, makes room on the disk, and creates the files.
static int begin_save(Run *r, Error *e) {
    Saver *s = r->saving.saver;
    const Pulse pulse = {comm_beat, r->comm};
    r->saving.best_before = r->at.best;
    if (r->saving.is_best) r->at.best = (BestPoint){.step = r->at.step, .loss = r->at.val_loss};
    r->at.metrics_bytes = metrics_bytes(r->metrics);
    free(s->state);
    TRY(run_state_write(r, &s->state, &s->state_bytes, e));
    TRY(text_begin(&s->notes, e));
    const uint64_t bytes =
        saver_checkpoint_bytes(&r->model, r->tokenizer) + s->state_bytes + metrics_waiting(r->metrics);
    const int64_t back = r->at.step + 1 - 2 * r->options.spike_steps;
    s->spare = (Spare){.keep = r->options.keep, .back = INT64_MAX, .best = r->options.keep_best};
    if (r->options.on_spike) s->spare.back = back > 0 ? back : 0;
    Spare room = s->spare;
    if (s->waits) room.back = INT64_MAX; // the last save may remove the checkpoint that a rollback needs
    TRY(archive_make_room(&r->archive, bytes, room, r->saving.saved_step, s->notes.f, &pulse, e));
    manifest_free(&s->manifest);
    s->manifest.pulse = &s->pulse;
    TRY(archive_begin(&r->archive, r->at.step, &s->manifest, s->notes.f, e));
    Error unwritten;
    if (r->options.outliers && row_outliers_write(r, &unwritten)) fprintf(s->notes.f, "warning: %s\n", unwritten.what);
    int code = 0;
    for (int f = 0, fd; f < LAYOUT_FILES && !code; f++) {
        code = manifest_open(&s->manifest, layout_names[f], true, s->layout.bytes[f], &fd, e);
        if (!code) close(fd);
    }
    if (code) archive_abandon(&r->archive, r->at.step, s->manifest.dir, s->notes.f, &(Error){0});
    return code;
}

// ---- Writing, on every rank's thread --------------------------------------------------------------------------------

static int read_state(void *saver, StateKind kind, Range range, float *values, Error *e) {
    Saver *s = saver;
    if (!s->copy) return engine_store(s->run->engine, kind, range, values, e);
    const float *from = s->copy;
    const Range *owned = s->owned;
    for (int k = 0; kinds[k] != kind; k++) from += s->stride;
    for (; owned->end <= range.begin; owned++) from += range_length(*owned);
    memcpy(values, from + (range.begin - owned->begin), range_length(range) * sizeof *values);
    return 0;
}

// Copies what this rank owns, opens the files, and writes to them.
static void *write_share(void *saver) {
    Saver *s = saver;
    Error *e = &s->error;
    float *to = s->copy;
    Manifest partial = {.dir = -1};
    int code = 0, fd[LAYOUT_FILES] = {-1, -1};
    for (int k = 0; k < ARRAYS && s->copy && !s->run->whole.part && !code; k++, to = s->copy + k * s->stride)
        for (int i = 0; i < s->owned_count && !code; to += range_length(s->owned[i++]))
            code = engine_store(s->run->engine, kinds[k], s->owned[i], to, e);
    atomic_store(&s->copying, false);
    if (!code && s->pieces) code = archive_join(&s->run->archive, s->step, &partial, e);
    for (int f = 0; f < LAYOUT_FILES && s->pieces && !code; f++)
        code = manifest_open(&partial, layout_names[f], false, 0, &fd[f], e);
    if (partial.dir >= 0) close(partial.dir);
    if (!code) code = layout_write(&s->layout, s->piece, s->pieces, fd, read_state, s, &s->pulse, e);
    for (int f = 0; f < LAYOUT_FILES; f++) {
        if (fd[f] >= 0 && file_close(fd[f], layout_names[f], code ? &(Error){0} : e)) code = e->code;
        count_piece(s);
    }
    atomic_store(&s->ended, true);
    return NULL;
}

// Runs a job on the thread; if no thread can start, on the main thread.
static void start_thread(Saver *s, void *(*job)(void *)) {
    atomic_store(&s->ended, false);
    if (worker_start(&s->worker, job, s, "a save", &(Error){0})) job(s);
}

void await_copy(Run *r) {
    Saver *s = r->saving.saver;
    const double start = clock_seconds();
    while (atomic_load(&s->copying)) usleep(100);
    s->paused += clock_seconds() - start;
}

double saver_writes(const Saver *s) { return s->phase == WRITING && !atomic_load(&s->ended); }

// ---- Finishing, on rank 0's thread ----------------------------------------------------------------------------------

// Writes the small files and the manifest, names the checkpoint and reads it back (6). On failure removes it.
static void *finish(void *saver) {
    Saver *s = saver;
    const Run *r = s->run;
    const int eot = checkpoint_end_of_text(r->model.config.vocab, r->tokenizer ? r->tokenizer->eot : -1);
    Error *e = &s->error, kept;
    Manifest verified;
    int code = e->code; // a rank may have failed to write
    if (!code) code = manifest_save(&s->manifest, TRAINING STATE_NAME, s->state, s->state_bytes, e);
    if (!code) code = checkpoint_save_config(&s->manifest, &r->model.config, eot, r->options.dropout, e);
    if (!code && r->tokenizer) code = tokenizer_save(r->tokenizer, r->model.config.context, &s->manifest, e);
    if (!code) code = metrics_sync(s->run->metrics, e);
    if (!code) code = archive_commit(&r->archive, s->step, &s->manifest, e);
    if (code) archive_abandon(&r->archive, s->step, s->manifest.dir, s->notes.f, &kept);
    else if (archive_verify(&r->archive, s->step, VERIFY_DISK, &s->pulse, &verified, e) == ERR_INPUT) {
        if (!e->unreadable) archive_remove(&r->archive, s->step, false, NULL, s->notes.f, &kept);
        e->code = ERR_WRITE; // not ERR_INPUT: this program has just written the file
        error_hint(e, "the disk does not give back what was written: check it, or choose another --out");
    }
    s->seconds = clock_seconds() - s->started;
    if (!e->code && archive_thin(&r->archive, &s->spare, s->notes.f, &kept))
        fprintf(s->notes.f, "warning: %s: older checkpoints are kept\n", kept.what);
    atomic_store(&s->ended, true);
    return NULL;
}

// ---- All ranks together ---------------------------------------------------------------------------------------------

static int compare_places(const void *a, const void *b) {
    const LayoutSpan *x = &((const LayoutPiece *)a)->at, *y = &((const LayoutPiece *)b)->at;
    if (x->file != y->file) return x->file - y->file;
    return x->offset < y->offset ? -1 : x->offset > y->offset;
}

// Adds the pieces of all ranks to rank 0's manifest, by file and byte. If a rank failed, sets s->error instead.
static int gather_pieces(Saver *s, Error *e) {
    Comm *comm = s->run->comm;
    double most = s->pieces; // most pieces of any rank
    LayoutPiece *all;        // (ranks + 1, most), padded with pieces of 0 bytes; the last row is this rank's
    int pieces = 0;
    TRY(comm_lowest_error(comm, &s->error, e));
    if (s->error.code) return 0;
    TRY(comm_reduce(comm, &most, 0, 1, NULL, e));
    const size_t row = (size_t)most, rows = (size_t)comm->ranks;
    TRY(memory_alloc_zero((void **)&all, (rows + 1) * row * sizeof *all, "digests", e));
    for (int i = 0; i < s->pieces; i++) all[rows * row + (size_t)i] = s->piece[i];
    int code = comm_gather(comm, all + rows * row, all, row * sizeof *all, e);
    for (size_t i = 0; i < rows * row; i++)
        if (all[i].digest.bytes) all[pieces++] = all[i];
    qsort(all, (size_t)pieces, sizeof *all, compare_places);
    if (!code && comm->rank == 0) layout_list(&s->layout, all, pieces, &s->manifest, &s->error);
    memory_free(all);
    return code;
}

// ---- Reports --------------------------------------------------------------------------------------------------------

// Adds to the error's hint that the same command resumes the run from a checkpoint.
static void hint_to_resume(const Run *r, Error *e, const char *checkpoint) {
    char remedy[sizeof e->hint];
    snprintf(remedy, sizeof remedy, "%s", e->hint);
    error_hint(e, "%s%sthe same command%s resumes from %s", remedy, *remedy ? "; " : "",
               r->options.fresh ? " without --fresh" : "", checkpoint);
}

// On rank 0: reports a save that has ended. If the run waited for the save, the caller reports a failure. After a
// failure the best checkpoint is again the previous one.
static void report(Run *r) {
    Saver *s = r->saving.saver;
    s->phase = IDLE;
    progress_break(&r->progress);
    if (s->notes.f && text_end(&s->notes, &(Error){0}) == 0) fputs(s->notes.text, stderr);
    text_free(&s->notes);
    if (s->error.code) {
        if (s->step == r->at.best.step) r->at.best = r->saving.best_before;
        if (!s->waits)
            fprintf(stderr, "warning: step %lld was not saved: %s. Training continues; %s%s\n", (long long)s->step,
                    s->error.what, r->saving.saved[0] ? "the newest checkpoint is " : "there is no checkpoint yet",
                    r->saving.saved);
        return;
    }
    r->saving.longest_save = fmax(r->saving.longest_save, s->seconds);
    r->saving.saved_step = s->step;
    archive_step_path(r->archive.path, s->step, r->saving.saved);
    printf("saved   %s in %.2f s, training paused for at most %.3f s\n", r->saving.saved, s->seconds,
           s->waits ? s->seconds : s->paused);
    fflush(stdout);
}

// ---- Saves ----------------------------------------------------------------------------------------------------------

int collect_save(Run *r, Error *e) {
    Saver *s = r->saving.saver;
    const bool warned = r->saving.log_waits;
    Error why;
    if (s->phase == WRITING && r->saving.writing == 0) {
        worker_join(&s->worker);
        TRY(gather_pieces(s, e));
        s->phase = is_rank0(r) ? FINISHING : IDLE;
        if (s->phase == FINISHING) start_thread(s, finish); // report later: `save` must set s->paused first
    } else if (s->phase == FINISHING && atomic_load(&s->ended)) {
        worker_join(&s->worker);
        report(r);
    }
    r->saving.log_waits = metrics_waiting(r->metrics) && metrics_flush(r->metrics, &why);
    if (!r->saving.log_waits || warned) return 0;
    progress_break(&r->progress);
    fprintf(stderr, "warning: %s: the log waits in memory\n", why.what);
    return 0;
}

// On all ranks: waits until no rank writes; with `whole`, until no save runs.
static int await_save(Run *r, bool whole, Error *e) {
    Saver *s = r->saving.saver;
    for (long done = -1; s->phase == WRITING || (whole && s->phase == FINISHING);) {
        const long now = atomic_load(&s->done);
        r->saving.writing = saver_writes(s);
        if (now == done && !atomic_load(&s->ended)) { // no beat or sum, so the watchdog reports a hung disk
            usleep(10000);
            continue;
        }
        done = now;
        if (s->phase == FINISHING) comm_beat(r->comm);
        else TRY(comm_sum(r->comm, &r->saving.writing, 1, e));
        TRY(collect_save(r, e));
    }
    return whole ? comm_wait_first(r->comm, NULL, NULL, e) : 0;
}

// On all ranks: waits for the previous save, then starts a save; with `waits`, also waits for the end of the new save.
// Returns 0 also if the new save fails: then s->error.code is its code on all ranks, and rank 0 has the whole error. If
// the step is saved already, nothing is saved and s->error.code is -1.
static int save(Run *r, bool waits, Error *e) {
    Saver *s = r->saving.saver;
    comm_phase(r->comm, PHASE_CHECKPOINT, r->at.step);
    progress_begin(&r->progress, "saving", 0);
    TRY(await_save(r, true, e));
    s->step = r->at.step;
    s->waits = waits;
    s->error = (Error){0};
    s->started = clock_seconds();
    if (is_rank0(r) && r->saving.saved_step == s->step) s->error.code = -1;
    else if (is_rank0(r) && begin_save(r, &s->error)) report(r);
    TRY(comm_wait_first(r->comm, NULL, NULL, e));
    TRY(comm_broadcast(r->comm, &s->error.code, sizeof s->error.code, e));
    if (s->error.code == 0) {
        worker_join(&s->worker); // touch_copy clears the copy
        for (size_t k = 0; k < ARRAYS && r->whole.part; k++)
            TRY(whole_exchange(&r->whole, r->engine, kinds[k], s->copy + k * s->stride, e));
        atomic_store(&s->copying, s->copy && !r->whole.part);
        s->phase = WRITING;
        start_thread(s, write_share);
        r->saving.writing = 1;
        if (waits || !s->copies) TRY(await_save(r, waits, e));
        if (waits) TRY(comm_broadcast(r->comm, &s->error.code, sizeof s->error.code, e));
        s->paused = clock_seconds() - s->started;
    }
    progress_end(&r->progress);
    return 0;
}

int save_in_background(Run *r, Error *e) { return save(r, false, e); }

// Fails also if the run directory was moved: the files are saved in it, but the same command would not find them.
int save_and_wait(Run *r, Error *e) {
    const char *newest = r->saving.saved;
    int code = 0;
    TRY(save(r, true, e));
    if (is_rank0(r) && r->saving.saver->error.code > 0) {
        *e = r->saving.saver->error;
        if (*newest) hint_to_resume(r, e, newest);
        code = error_prefix(e, "step %lld is not saved, and %s%s", (long long)r->at.step,
                            *newest ? "the newest checkpoint is " : "there is no checkpoint yet", newest);
    } else if (is_rank0(r) && archive_check_name(&r->archive, e))
        code = error_prefix(e, "step %lld is saved in this run's directory", (long long)r->at.step);
    return comm_agree(r->comm, code, e);
}

// `settled` is true if the ranks have agreed on training's error. Clears it for a save, as the ranks must agree on the
// save's errors too, and restores it. If they could not agree, it stays false, which ends the job.
void save_at_error(Run *r, int code, Error *e) {
    const bool settled = r->comm->settled, alone = r->comm->ranks == 1;
    const bool of_files = code == ERR_INPUT || code == ERR_WRITE;
    const int speaker = r->comm->speaker;
    char saved[PATH_MAX];
    Error failed = {0};
    if (of_files && (settled || alone) && !r->saving.saver->waits && r->at.step > 0) {
        r->comm->settled = false;
        code = parallel_send_weights(&r->parallel, &failed);
        if (!code) code = compare_ranks(r, &failed);
        if (!code) code = save_and_wait(r, &failed);
        if (!code || r->comm->settled) r->comm->settled = settled, r->comm->speaker = speaker;
        archive_step_path(r->options.out, r->at.step, saved);
        if (!code) hint_to_resume(r, e, saved);
        else if (is_rank0(r)) fprintf(stderr, "warning: the save after the error: %s\n", failed.what);
    }
    if (!r->comm->settled && !alone) return;
    comm_phase(r->comm, PHASE_CHECKPOINT, r->at.step);
    code = parallel_drain(&r->parallel, &failed);
    if (!code) code = await_save(r, true, &failed);
    if (code) r->comm->settled = false; // ends the job
}
