// The numbers in comments are those of saver.h's list.
#include "run/saver.h"

#include "base/thread.h"
#include "run/state.h"

#include <assert.h>
#include <errno.h>
#include <math.h>
#include <semaphore.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

static const StateKind kinds[SAVER_ARRAYS] = {STATE_PARAM, STATE_MOMENT1, STATE_MOMENT2};

struct Saver {
    SaverConfig config;
    Layout layout;
    int64_t before, after;     // steps of protected checkpoints; -1: none
    float *copy[SAVER_ARRAYS]; // (flat_count), the snapshot; NULL before saver_prepare
    bool lent;                 // another owner frees the copy
    char *state;               // text of state.json
    size_t state_bytes;
    uint64_t log_bytes; // lines of the log that wait for room
    Parallel *direct;   // saver_run: read the state from the engines; NULL: from the copy
    Parallel *copies;   // the snapshot is the ranks' copies; NULL: `copy`
    Parallel *source;   // the thread takes the snapshot from here (3); NULL: it is taken
    Parallel *served;   // the main thread itself does the save: each piece is a heartbeat (5); NULL: the thread does it
    pthread_t thread;   // runs save_all or touch_copy
    Pulse pulse;        // one beat per piece: count_piece
    SaveReport report;
    sem_t snapshot_taken;
    atomic_bool ended; // the thread's last access to this struct
    atomic_long pieces;
    // the main thread's
    bool joinable;          // `thread` was started
    bool running;           // a save is not collected yet
    bool awaiting_snapshot; // snapshot_taken has not been waited for
    double started, stalled;
};

static void count_piece(void *saver) {
    Saver *s = saver;
    atomic_fetch_add(&s->pieces, 1);
    if (s->served) parallel_beat(s->served);
}

int saver_create(Saver **out, const SaverConfig *config, Error *e) {
    TRY(memory_alloc_zero((void **)out, sizeof **out, "the saver", e));
    (*out)->config = *config;
    (*out)->pulse = (Pulse){count_piece, *out};
    saver_protect(*out, -1, -1);
    sem_init(&(*out)->snapshot_taken, 0, 0);
    return layout_create(&(*out)->layout, config->model, e);
}

static void join_thread(Saver *s) {
    if (s->joinable) pthread_join(s->thread, NULL);
    s->joinable = false;
}

void saver_destroy(Saver *s) {
    if (!s) return;
    saver_collect(s, INFINITY, NULL, NULL);
    join_thread(s);
    for (int k = 0; k < SAVER_ARRAYS; k++) {
        if (s->copy[k]) engine_unpin(s->config.engine, s->copy[k]);
        if (!s->lent) memory_free(s->copy[k]);
    }
    free(s->state);
    layout_destroy(&s->layout);
    sem_destroy(&s->snapshot_taken);
    memory_free(s);
}

// ---- The save itself, on the saver's thread; in saver_run on the main thread ----------------------------------------

static int read_state(void *saver, StateKind kind, Range range, float *values, Error *e) {
    Saver *s = saver;
    if (s->direct) return parallel_store(s->direct, kind, range, values, e);
    if (s->copies) return parallel_read_copy(s->copies, kind, range, values, e);
    const float *copy = s->copy[kind == STATE_PARAM ? 0 : kind == STATE_MOMENT1 ? 1 : 2];
    memcpy(values, copy + range.begin, range_length(range) * sizeof *values);
    return 0;
}

uint64_t saver_checkpoint_bytes(const Model *model, const Tokenizer *tokenizer) {
    const uint64_t json = 1 << 16, bpe = 2 << 20; // GPT-2's vocabulary and merges are 1.5 MB
    uint64_t rest = json + (tokenizer && !tokenizer_is_bytes(tokenizer) ? bpe : 0);
    return (model->parameters + 2 * model->flat_count) * sizeof(float) + rest;
}

// Writes the state of all ranks.
static int write_arrays(Saver *s, const char *directory, Manifest *manifest, Error *e) {
    LayoutPiece *piece;
    int pieces, fd[LAYOUT_FILES] = {-1, -1}, code = 0;
    TRY(layout_pieces(&s->layout, NULL, 0, true, &piece, &pieces, e));
    for (int f = 0; f < LAYOUT_FILES && !code; f++)
        code = manifest_create(manifest, directory, layout_names[f], &fd[f], e);
    if (!code) code = layout_write(&s->layout, piece, pieces, fd, read_state, s, &s->pulse, e);
    for (int f = 0; f < LAYOUT_FILES; f++) {
        Error ignored;
        int closed = fd[f] < 0 ? 0 : file_close(fd[f], layout_names[f], code ? &ignored : e);
        code = code ? code : closed;
    }
    if (!code) code = layout_list(&s->layout, piece, pieces, manifest, e);
    memory_free(piece);
    return code;
}

static int write_files(Saver *s, const char *directory, Manifest *manifest, Error *e) {
    const SaverConfig *c = &s->config;
    TRY(write_arrays(s, directory, manifest, e));
    TRY(manifest_save(manifest, directory, TRAINING STATE_NAME, s->state, s->state_bytes, e));
    TRY(checkpoint_save_config(directory, &c->model->config, c->text, c->dropout, manifest, e));
    return c->tokenizer ? tokenizer_save(c->tokenizer, c->model->config.context, directory, manifest, e) : 0;
}

static int make_room(Saver *s, uint64_t bytes, FILE *notes, Error *e) {
    return archive_make_room(s->config.archive, bytes, s->config.keep, s->before, &s->report.removed, notes, &s->pulse,
                             e);
}

static int write_checkpoint(Saver *s, FILE *notes, Error *e) {
    char directory[ARCHIVE_PATH];
    Manifest manifest = {.pulse = &s->pulse};
    uint64_t bytes = saver_checkpoint_bytes(s->config.model, s->config.tokenizer) + s->state_bytes;
    int full = make_room(s, bytes + s->log_bytes, notes, e);
    if (full && s->log_bytes) full = make_room(s, bytes, notes, e); // the checkpoint matters more than the log's lines
    if (full) return full;
    TRY(archive_begin(s->config.archive, s->report.step, directory, &manifest, notes, e));
    int code = write_files(s, directory, &manifest, e);
    if (!code) code = metrics_sync(s->config.metrics, e);
    count_piece(s);
    if (!code) code = archive_commit(s->config.archive, s->report.step, &manifest, s->report.directory, e);
    if (code) archive_abandon(s->config.archive, s->report.step, &manifest, notes); // frees the room it took
    manifest_free(&manifest);
    return code;
}

static int read_back(Saver *s, Error *e) {
    int code = archive_verify(s->config.archive, s->report.step, &s->pulse, e);
    if (code != ERR_INPUT) return code;
    e->code = ERR_WRITE; // the file is not an input: this program has just written it
    return error_hint(e, "the disk does not give back what was written: check it, or choose another --out");
}

static int take_snapshot(Saver *s, Parallel *source, Error *e) {
    Range all = {0, s->config.model->flat_count};
    if (s->copies) TRY(parallel_copy(source, e));
    for (int k = 0; k < SAVER_ARRAYS && !s->copies; k++) TRY(parallel_store(source, kinds[k], all, s->copy[k], e));
    s->report.snapshot_seconds = clock_seconds() - s->started;
    return 0;
}

static void *save_all(void *argument) {
    Saver *s = argument;
    SaveReport *report = &s->report;
    FILE *lines = fmemopen(report->notes, sizeof report->notes - 1, "w"), *notes = lines ? lines : stderr;
    int code = s->source ? take_snapshot(s, s->source, &report->error) : 0;
    if (s->source) sem_post(&s->snapshot_taken);
    if (!code) code = write_checkpoint(s, notes, &report->error);
    report->seconds = clock_seconds() - s->started;
    if (!code) code = read_back(s, &report->error);
    if (!code) archive_thin(s->config.archive, s->config.keep, s->after, notes, &report->note); // (6)
    if (lines) fclose(lines);
    atomic_store(&s->ended, true);
    return NULL;
}

// ---- The main thread's side -----------------------------------------------------------------------------------------

size_t saver_copy_stride(const Model *model) {
    const size_t largest_page = 64 << 10; // bytes
    return round_up(model->flat_count, largest_page / sizeof(float));
}

static void *touch_copy(void *argument) {
    Saver *s = argument;
    size_t bytes = s->config.model->flat_count * sizeof(float);
    for (int k = 0; k < SAVER_ARRAYS; k++) {
        memset(s->copy[k], 0, bytes);
        engine_pin(s->config.engine, s->copy[k], bytes);
    }
    return NULL;
}

int saver_prepare(Saver *s, float *memory, Error *e) {
    size_t stride = saver_copy_stride(s->config.model), bytes = stride * sizeof(float);
    s->lent = memory != NULL;
    for (size_t k = 0; k < SAVER_ARRAYS; k++)
        if (s->lent) s->copy[k] = memory + k * stride;
        else if (!s->copy[k]) TRY(memory_alloc((void **)&s->copy[k], bytes, "a checkpoint's copy", e));
    s->joinable = thread_start(&s->thread, touch_copy, s, "a checkpoint's copy", &(Error){0}) == 0;
    return 0;
}

void saver_protect(Saver *s, int64_t before, int64_t after) {
    assert(!s->running);
    s->before = before;
    s->after = after;
}

static void begin_save(Saver *s, int64_t step, char *state, size_t state_bytes) {
    assert(!s->running); // (1)
    free(s->state);
    s->state = state;
    s->state_bytes = state_bytes;
    s->log_bytes = metrics_waiting(s->config.metrics);
    s->direct = s->source = s->served = s->copies = NULL;
    s->report = (SaveReport){.step = step};
    s->started = clock_seconds();
    atomic_store(&s->ended, false);
}

void saver_run(Saver *s, Parallel *parallel, int64_t step, char *state, size_t state_bytes, SaveReport *report) {
    begin_save(s, step, state, state_bytes);
    s->direct = s->served = parallel;
    save_all(s);
    *report = s->report;
    report->stall_seconds = report->seconds;
}

int saver_start(Saver *s, Parallel *parallel, int64_t step, char *state, size_t state_bytes, Error *e) {
    begin_save(s, step, state, state_bytes);
    if (parallel_has_copies(parallel)) s->copies = parallel;
    else if (!s->copy[SAVER_ARRAYS - 1]) TRY(saver_prepare(s, NULL, e));
    join_thread(s); // touch_copy
    if (parallel_stores_alone(parallel)) s->source = parallel;
    else TRY(take_snapshot(s, parallel, e));
    s->running = true;
    s->awaiting_snapshot = s->source != NULL;
    s->joinable = thread_start(&s->thread, save_all, s, "a save", &(Error){0}) == 0;
    if (!s->joinable) { // at the limit on threads training waits
        s->served = parallel;
        save_all(s);
    }
    s->stalled = clock_seconds() - s->started;
    return 0;
}

void saver_await_snapshot(Saver *s) {
    if (!s || !s->awaiting_snapshot) return;
    double start = clock_seconds();
    while (sem_wait(&s->snapshot_taken) != 0 && errno == EINTR) continue;
    s->awaiting_snapshot = false;
    s->stalled += clock_seconds() - start;
}

static bool await_end(const Saver *s, double seconds, Parallel *served) {
    const struct timespec moment = {0, 10000000};
    long sent = -1;
    for (double end = clock_seconds() + seconds; !atomic_load(&s->ended); nanosleep(&moment, NULL)) {
        if (clock_seconds() > end || seconds == 0) return false;
        long pieces = atomic_load(&s->pieces);
        if (served && pieces != sent) parallel_beat(served); // (5)
        sent = pieces;
    }
    return true;
}

bool saver_collect(Saver *s, double seconds, Parallel *served, SaveReport *report) {
    if (!s || !s->running || !await_end(s, seconds, served)) return false;
    join_thread(s);
    saver_await_snapshot(s);
    s->running = false;
    s->report.stall_seconds = s->stalled;
    if (report) *report = s->report;
    return true;
}
