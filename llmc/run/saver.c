// The numbers in comments are those of saver.h's list.
#include "run/saver.h"

#include "base/thread.h"
#include "run/state.h"

#include <assert.h>
#include <errno.h>
#include <semaphore.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { ARRAYS = 3 };
static const StateKind kinds[ARRAYS] = {STATE_PARAM, STATE_MOMENT1, STATE_MOMENT2};

typedef enum { IDLE, WRITING, FINISHING } Phase;

struct Saver {
    SaverConfig config;
    Layout layout;
    Range all; // of the flat array
    const Range *owned;
    int owned_count;    // ranges that this rank writes; 0: none
    LayoutPiece *piece; // (pieces) this rank's
    int pieces;
    float *copy; // (ARRAYS, stride): the snapshot, with the owned ranges one after the other; NULL: read the engine
    size_t elements, stride;
    int64_t before, after; // steps of protected checkpoints; -1: none
    Pulse pulse;           // one beat per piece: count_piece
    sem_t snapshot_taken;
    atomic_bool ended; // the thread's last access to this struct
    atomic_long done;  // pieces
    // a save's
    int fd[LAYOUT_FILES];
    char *state; // text of state.json
    size_t state_bytes;
    bool named;          // it gets its name before it is read back
    bool on_thread;      // the thread takes the snapshot (3)
    bool failed;         // this rank's part; after `ended`
    LayoutPiece *of_all; // rank 0: all ranks' pieces
    int of_all_count;
    Manifest manifest; // rank 0's
    char partial[ARCHIVE_PATH];
    SaveReport report;
    // the main thread's
    Worker worker;
    Phase phase;
    bool awaiting_snapshot; // snapshot_taken has not been waited for
    double started, stalled;
};

static void count_piece(void *saver) { atomic_fetch_add(&((Saver *)saver)->done, 1); }

// With --zero 0 rank 0 has all and writes alone.
static void set_owned(Saver *s) {
    const Parallel *p = s->config.parallel;
    bool alone = parallel_stores_alone(p);
    s->all = (Range){0, s->config.model->flat_count};
    s->owned = alone ? &s->all : p->owned;
    s->owned_count = !alone ? p->buckets : s->config.parallel->comm->rank == 0 ? 1 : 0;
    for (int i = 0; i < s->owned_count; i++) s->elements += range_length(s->owned[i]);
}

int saver_create(Saver **out, const SaverConfig *config, Error *e) {
    TRY(memory_alloc_zero((void **)out, sizeof **out, "the saver", e));
    Saver *s = *out;
    s->config = *config;
    s->pulse = (Pulse){count_piece, s};
    saver_protect(s, -1, -1);
    sem_init(&s->snapshot_taken, 0, 0);
    set_owned(s);
    TRY(layout_create(&s->layout, config->model, e));
    if (!s->owned_count) return 0;
    return layout_pieces(&s->layout, s->owned, s->owned_count, s->config.parallel->comm->rank == 0, &s->piece,
                         &s->pieces, e);
}

void saver_destroy(Saver *s) {
    if (!s) return;
    worker_join(&s->worker);
    if (s->copy) engine_unpin(s->config.engine, s->copy);
    memory_free(s->copy);
    memory_free(s->piece);
    memory_free(s->of_all);
    manifest_free(&s->manifest);
    layout_destroy(&s->layout);
    free(s->state);
    sem_destroy(&s->snapshot_taken);
    memory_free(s);
}

// Runs a job on the thread; at the limit on threads the main thread does it.
static void start_thread(Saver *s, void *(*job)(void *)) {
    worker_join(&s->worker);
    atomic_store(&s->ended, false);
    if (worker_start(&s->worker, job, s, "a save", &(Error){0})) job(s);
}

// ---- Snapshot -------------------------------------------------------------------------------------------------------

static void *touch_copy(void *saver) {
    Saver *s = saver;
    size_t bytes = ARRAYS * s->stride * sizeof(float);
    memset(s->copy, 0, bytes);
    engine_pin(s->config.engine, s->copy, bytes);
    return NULL;
}

void saver_prepare(Saver *s) {
    const size_t page = 64 << 10; // bytes, the largest
    s->stride = round_up(s->elements, page / sizeof(float));
    if (!s->elements ||
        memory_alloc((void **)&s->copy, ARRAYS * s->stride * sizeof(float), "a checkpoint's copy", &(Error){0}))
        return;
    worker_start(&s->worker, touch_copy, s, "a checkpoint's copy", &(Error){0}); // else the save touches it
}

static int take_snapshot(Saver *s, Error *e) {
    for (int k = 0; k < ARRAYS; k++) {
        float *to = s->copy + k * s->stride;
        for (int i = 0; i < s->owned_count; to += range_length(s->owned[i++]))
            TRY(engine_store(s->config.engine, kinds[k], s->owned[i], to, e));
    }
    s->report.snapshot_seconds = clock_seconds() - s->started;
    return 0;
}

static void snapshot_done(Saver *s) { sem_post(&s->snapshot_taken); }

static int read_state(void *saver, StateKind kind, Range range, float *values, Error *e) {
    Saver *s = saver;
    if (!s->copy) return engine_store(s->config.engine, kind, range, values, e);
    const float *from = s->copy;
    const Range *owned = s->owned;
    for (int k = 0; kinds[k] != kind; k++) from += s->stride;
    for (; owned->end <= range.begin; owned++) from += range_length(*owned);
    memcpy(values, from + (range.begin - owned->begin), range_length(range) * sizeof *values);
    return 0;
}

void saver_await_snapshot(Saver *s) {
    if (!s || !s->awaiting_snapshot) return;
    double start = clock_seconds();
    while (sem_wait(&s->snapshot_taken) != 0 && errno == EINTR) continue;
    s->awaiting_snapshot = false;
    s->stalled += clock_seconds() - start;
}

// ---- Writing, on every rank's thread --------------------------------------------------------------------------------

uint64_t saver_checkpoint_bytes(const Model *model, const Tokenizer *tokenizer) {
    const uint64_t json = 1 << 16, bpe = 2 << 20; // GPT-2's vocabulary and merges are 1.5 MB
    uint64_t rest = json + (tokenizer && !tokenizer_is_bytes(tokenizer) ? bpe : 0);
    return (model->parameters + 2 * model->flat_count) * sizeof(float) + rest;
}

static int close_files(Saver *s, int code, Error *e) {
    for (int f = 0; f < LAYOUT_FILES; f++) {
        Error ignored;
        int closed = s->fd[f] < 0 ? 0 : file_close(s->fd[f], layout_names[f], code ? &ignored : e);
        code = code ? code : closed;
        s->fd[f] = -1;
        count_piece(s);
    }
    return code;
}

static void *write_share(void *saver) {
    Saver *s = saver;
    Error *e = &s->report.error;
    int code = e->code;
    if (!code && s->copy && s->on_thread) code = take_snapshot(s, e);
    if (s->copy && s->on_thread) snapshot_done(s);
    if (!code) code = layout_write(&s->layout, s->piece, s->pieces, s->fd, read_state, s, &s->pulse, e);
    if (!s->copy) snapshot_done(s);
    s->failed = close_files(s, code, e) != 0;
    atomic_store(&s->ended, true);
    return NULL;
}

void saver_protect(Saver *s, int64_t before, int64_t after) {
    assert(s->phase == IDLE);
    s->before = before;
    s->after = after;
}

static int make_room(Saver *s, uint64_t bytes, FILE *notes, Error *e) {
    const Pulse pulse = {comm_beat, s->config.parallel->comm};
    return archive_make_room(s->config.archive, bytes, s->config.keep, s->before, &s->report.removed, notes, &pulse, e);
}

static int create_files(Saver *s, FILE *notes, Error *e) {
    uint64_t bytes = saver_checkpoint_bytes(s->config.model, s->config.tokenizer) + s->state_bytes,
             log = metrics_waiting(s->config.metrics);
    int full = make_room(s, bytes + log, notes, e);
    if (full && log) full = make_room(s, bytes, notes, e); // the checkpoint matters more than the log's lines
    if (full) return full;
    s->manifest = (Manifest){.pulse = &s->pulse};
    TRY(archive_begin(s->config.archive, s->report.step, s->partial, &s->manifest, notes, e));
    int code = 0;
    for (int f = 0; f < LAYOUT_FILES && !code; f++) {
        code = manifest_create(&s->manifest, s->partial, layout_names[f], &s->fd[f], e);
        if (!code && ftruncate(s->fd[f], (off_t)s->layout.bytes[f]) != 0)
            code =
                FAIL(e, ERR_WRITE, "free some space, or choose another --out", "%s/%s: cannot be made %llu bytes: %s",
                     s->partial, layout_names[f], (unsigned long long)s->layout.bytes[f], strerror(errno));
    }
    if (code) close_files(s, code, e), archive_abandon(s->config.archive, s->report.step, &s->manifest, notes);
    return code;
}

// Runs a part of rank 0's work whose notes go to the report.
static int with_notes(Saver *s, int (*work)(Saver *s, FILE *notes, Error *e), Error *e) {
    size_t used = strlen(s->report.notes);
    FILE *lines = fmemopen(s->report.notes + used, sizeof s->report.notes - 1 - used, "w");
    int code = work(s, lines ? lines : stderr, e);
    if (lines) fclose(lines);
    return code;
}

int saver_begin(Saver *s, int64_t step, char *state, size_t state_bytes, bool named, Error *e) {
    assert(s->phase == IDLE); // (1)
    free(s->state);
    s->state = state;
    s->state_bytes = state_bytes;
    s->named = named;
    s->report = (SaveReport){.step = step};
    s->started = clock_seconds();
    for (int f = 0; f < LAYOUT_FILES; f++) s->fd[f] = -1;
    return with_notes(s, create_files, e);
}

// Opens the files that rank 0 has created.
static int open_files(Saver *s, Error *e) {
    for (int f = 0; f < LAYOUT_FILES; f++) s->fd[f] = -1;
    for (int f = 0; f < LAYOUT_FILES && s->pieces; f++)
        TRY(archive_open_partial(s->config.archive, s->report.step, layout_names[f], &s->fd[f], e));
    return 0;
}

void saver_start(Saver *s, int64_t step) {
    Error *e = &s->report.error;
    if (s->config.parallel->comm->rank != 0) {
        s->report = (SaveReport){.step = step};
        s->started = clock_seconds();
        open_files(s, e);
    }
    s->failed = false;
    worker_join(&s->worker); // touch_copy
    s->on_thread = parallel_stores_alone(s->config.parallel);
    if (s->copy && !s->on_thread && !e->code) take_snapshot(s, e);
    s->awaiting_snapshot = s->on_thread || !s->copy;
    s->phase = WRITING;
    start_thread(s, write_share);
    s->stalled = clock_seconds() - s->started;
}

SaverCounts saver_counts(const Saver *s) {
    bool writes = saver_is_writing(s), ended = writes && atomic_load(&s->ended);
    return (SaverCounts){writes && !ended, ended && s->failed, s ? (double)atomic_load(&s->done) : 0};
}

bool saver_is_writing(const Saver *s) { return s && s->phase == WRITING; }
bool saver_is_finishing(const Saver *s) { return s && s->phase == FINISHING; }

// ---- Finishing, on rank 0's thread ----------------------------------------------------------------------------------

static int write_small_files(Saver *s, Error *e) {
    const SaverConfig *c = &s->config;
    TRY(layout_list(&s->layout, s->of_all, s->of_all_count, &s->manifest, e));
    TRY(manifest_save(&s->manifest, s->partial, TRAINING STATE_NAME, s->state, s->state_bytes, e));
    TRY(checkpoint_save_config(s->partial, &c->model->config, c->text, c->dropout, &s->manifest, e));
    if (c->tokenizer) TRY(tokenizer_save(c->tokenizer, c->model->config.context, s->partial, &s->manifest, e));
    return metrics_sync(c->metrics, e);
}

static int lies(int code, Error *e) {
    if (code != ERR_INPUT) return code;
    e->code = ERR_WRITE; // the file is not an input: this program has just written it
    return error_hint(e, "the disk does not give back what was written: check it, or choose another --out");
}

// Small files, manifest, read-back and name (7).
static int name_checkpoint(Saver *s, FILE *notes, Error *e) {
    const Archive *archive = s->config.archive;
    const int64_t step = s->report.step;
    int code = write_small_files(s, e);
    if (!code) code = manifest_write(&s->manifest, s->partial, e);
    if (!code && !s->named) code = lies(manifest_verify(&s->manifest, s->partial, NULL, VERIFY_DISK, e), e);
    if (!code) code = archive_commit(archive, step, &s->manifest, s->report.directory, e);
    if (code) return archive_abandon(archive, step, &s->manifest, notes), code; // frees the room it took
    if (s->named) TRY(lies(archive_verify(archive, step, &s->pulse, e), e));
    s->report.seconds = clock_seconds() - s->started;
    archive_thin(archive, s->config.keep, s->after, notes, &s->report.note);
    return 0;
}

static void *finish(void *saver) {
    Saver *s = saver;
    with_notes(s, name_checkpoint, &s->report.error);
    atomic_store(&s->ended, true);
    return NULL;
}

static int abandon(Saver *s, FILE *notes, Error *e) {
    (void)e;
    archive_abandon(s->config.archive, s->report.step, &s->manifest, notes);
    return 0;
}

// ---- All ranks together ---------------------------------------------------------------------------------------------

static int compare_places(const void *a, const void *b) {
    const LayoutPiece *x = a, *y = b;
    if (x->file != y->file) return x->file - y->file;
    return x->offset < y->offset ? -1 : x->offset > y->offset;
}

// Rank 0 receives every rank's pieces.
static int gather_pieces(Saver *s, Error *e) {
    Comm *comm = s->config.parallel->comm;
    int *counts, total = 0;
    TRY(memory_alloc((void **)&counts, (size_t)comm->ranks * sizeof *counts, "counts", e));
    int code = comm_gather(comm, &s->pieces, counts, sizeof s->pieces, e);
    for (int r = 0; r < comm->ranks; r++) total += counts[r];
    if (!code && comm->rank > 0 && s->pieces)
        code = comm_send(comm, 0, s->piece, (size_t)s->pieces * sizeof *s->piece, e);
    if (!code && comm->rank == 0) {
        memory_free(s->of_all);
        code = memory_alloc((void **)&s->of_all, (size_t)total * sizeof *s->of_all, "digests", e);
        s->of_all_count = s->pieces;
        if (!code) memcpy(s->of_all, s->piece, (size_t)s->pieces * sizeof *s->piece);
        for (int r = 1; r < comm->ranks && !code; s->of_all_count += counts[r++])
            if (counts[r])
                code = comm_receive(comm, r, s->of_all + s->of_all_count, (size_t)counts[r] * sizeof *s->piece, e);
        if (!code) qsort(s->of_all, (size_t)total, sizeof *s->of_all, compare_places);
    }
    memory_free(counts);
    return code;
}

// Rank 0's report gets the error of the lowest rank that failed.
static int gather_errors(Saver *s, Error *e) {
    Comm *comm = s->config.parallel->comm;
    Error mine = s->failed ? s->report.error : (Error){0}, *all;
    TRY(memory_alloc((void **)&all, (size_t)comm->ranks * sizeof *all, "errors", e));
    int code = comm_gather(comm, &mine, all, sizeof mine, e), r = 0;
    while (!code && r < comm->ranks - 1 && !all[r].code) r++;
    if (!code) s->report.error = all[r];
    if (!code && r > 0) error_prefix(&s->report.error, "rank %d", r);
    memory_free(all);
    return code;
}

int saver_advance(Saver *s, const SaverCounts *sums, Error *e) {
    if (!saver_is_writing(s) || sums->writing > 0) return 0;
    worker_join(&s->worker);
    saver_await_snapshot(s);
    TRY(sums->failed > 0 ? gather_errors(s, e) : gather_pieces(s, e));
    s->phase = s->config.parallel->comm->rank == 0 ? FINISHING : IDLE;
    if (s->phase == IDLE) return 0;
    if (sums->failed > 0) {
        with_notes(s, abandon, e);
        atomic_store(&s->ended, true);
    } else start_thread(s, finish);
    return 0;
}

bool saver_collect(Saver *s, SaveReport *report) {
    if (!saver_is_finishing(s) || !atomic_load(&s->ended)) return false;
    worker_join(&s->worker);
    s->phase = IDLE;
    manifest_free(&s->manifest);
    s->report.stall_seconds = s->named ? s->report.seconds : s->stalled;
    *report = s->report;
    return true;
}
