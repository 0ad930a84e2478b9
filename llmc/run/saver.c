#include "run/saver.h"

#include "base/thread.h"
#include "run/state.h"

#include <assert.h>
#include <errno.h>
#include <semaphore.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

static const StateKind kinds[SAVER_ARRAYS] = {STATE_PARAM, STATE_MOMENT1, STATE_MOMENT2};

struct Saver {
    SaverConfig config;
    int64_t before; // steps whose checkpoints are not to go (saver_stay); -1: none
    int64_t after;
    float *copy[SAVER_ARRAYS]; // (flat_count), the snapshot; NULL before saver_prepare
    bool lent;                 // its memory is not the saver's
    Parallel *parallel;        // to read from instead; NULL: from the copy
    Parallel *source;          // what the thread is to take the snapshot of; NULL: it is taken
    sem_t taken;               // posted when it has done so
    bool snapping;             // main thread's: that has not been waited for
    double stalled;            // main thread's, seconds
    char *state;               // text of state.json
    size_t state_bytes;
    double started;
    SaveReport report;
    pthread_t thread;
    bool threaded, running; // main thread's: a save is under way
    bool touching;          // `thread` is at work on the fresh memory of `copy`
    atomic_bool ended;      // the writing thread's last word
    Pulse pulse;            // of a save: got_on
    atomic_long pieces;     // that it has done
    Parallel *served;       // whom the writing thread itself tells of each; NULL: it must not speak with other ranks
};

static void got_on(void *saver) {
    Saver *s = saver;
    atomic_fetch_add(&s->pieces, 1);
    if (s->served) parallel_beat(s->served);
}

int saver_create(Saver **out, const SaverConfig *config, Error *e) {
    TRY(memory_alloc_zero((void **)out, sizeof **out, "the saver", e));
    (*out)->config = *config;
    saver_stay(*out, -1, -1);
    (*out)->pulse = (Pulse){got_on, *out};
    sem_init(&(*out)->taken, 0, 0);
    return 0;
}

void saver_destroy(Saver *saver) {
    if (!saver) return;
    saver_collect(saver, true, NULL);
    if (saver->touching) pthread_join(saver->thread, NULL);
    for (int k = 0; k < SAVER_ARRAYS; k++) {
        if (saver->copy[k]) engine_unpin(saver->config.engine, saver->copy[k]);
        if (!saver->lent) memory_free(saver->copy[k]);
    }
    free(saver->state);
    sem_destroy(&saver->taken);
    memory_free(saver);
}

// ---------------------------------------------------------------------------------------------------------------------
// Writing it down

static int read_state(Saver *s, int k, Range range, float *values, Error *e) {
    got_on(s); // what was read before is written
    if (s->parallel) return parallel_store(s->parallel, kinds[k], range, values, e);
    memcpy(values, s->copy[k] + range.begin, range_length(range) * sizeof *values);
    return 0;
}

static int read_param(void *s, Range range, float *values, Error *e) { return read_state(s, 0, range, values, e); }
static int read_moment1(void *s, Range range, float *values, Error *e) { return read_state(s, 1, range, values, e); }
static int read_moment2(void *s, Range range, float *values, Error *e) { return read_state(s, 2, range, values, e); }

uint64_t saver_checkpoint_bytes(const Model *model, const Tokenizer *tokenizer) {
    const uint64_t json = 1 << 16, bpe = 2 << 20; // GPT-2's vocabulary and merges are 1.5 MB
    uint64_t rest = json + (tokenizer && !tokenizer_is_bytes(tokenizer) ? bpe : 0);
    return (model->parameters + 2 * model->flat_count) * sizeof(float) + rest;
}

static int write_files(Saver *s, const char *directory, Manifest *manifest, Error *e) {
    const Model *model = s->config.model;
    TRY(checkpoint_save_model(directory, model, s->config.text, read_param, s, manifest, e));
    TRY(checkpoint_save_optimizer(directory, model, read_moment1, read_moment2, s, manifest, e));
    TRY(manifest_save(manifest, directory, STATE_NAME, s->state, s->state_bytes, e));
    return s->config.tokenizer ? tokenizer_save(s->config.tokenizer, directory, manifest, e) : 0;
}

static int write_checkpoint(Saver *s, FILE *notes, Error *e) {
    char directory[ARCHIVE_PATH];
    Manifest manifest = {.pulse = &s->pulse};
    uint64_t bytes = saver_checkpoint_bytes(s->config.model, s->config.tokenizer) + s->state_bytes;
    TRY(archive_make_room(s->config.out, bytes, s->config.keep, s->before, &s->report.removed, notes, &s->pulse, e));
    TRY(archive_begin(s->config.out, s->report.step, directory, notes, e));
    int code = write_files(s, directory, &manifest, e);
    if (!code) code = metrics_sync(s->config.metrics, e);
    got_on(s);
    if (!code) code = archive_commit(s->config.out, s->report.step, &manifest, s->report.directory, e);
    if (code) archive_abandon(s->config.out, s->report.step, notes); // gives back the room it took
    return code;
}

// Only a checkpoint that reads back as it was written may replace an older one.
static int read_back(const char *directory, const Pulse *pulse, Error *e) {
    int code = archive_verify(directory, pulse, e);
    if (code != ERR_INPUT) return code;
    e->code = ERR_WRITE; // not somebody's input: what was written just now
    return error_hint(e, "the disk does not give back what it was given: look at it, or choose another --out");
}

static int take_snapshot(Saver *s, Parallel *source, Error *e) {
    Range all = {0, s->config.model->flat_count};
    for (int k = 0; k < SAVER_ARRAYS; k++) TRY(parallel_store(source, kinds[k], all, s->copy[k], e));
    s->report.snapshot_seconds = clock_seconds() - s->started;
    return 0;
}

static void *save_all(void *argument) {
    Saver *s = argument;
    SaveReport *report = &s->report;
    FILE *lines = fmemopen(report->notes, sizeof report->notes - 1, "w"), *notes = lines ? lines : stderr;
    int code = s->source ? take_snapshot(s, s->source, &report->error) : 0;
    if (s->source) sem_post(&s->taken);
    if (!code) code = write_checkpoint(s, notes, &report->error);
    report->seconds = clock_seconds() - s->started;
    if (!code) code = read_back(report->directory, &s->pulse, &report->error);
    if (!code) archive_thin(s->config.out, s->config.keep, s->after, notes, &report->note);
    if (lines) fclose(lines);
    atomic_store(&s->ended, true);
    return NULL;
}

// ---------------------------------------------------------------------------------------------------------------------
// The main thread's side

size_t saver_copy_stride(const Model *model) {
    const size_t page = (64 << 10) / sizeof(float); // the largest there is
    return (model->flat_count + page - 1) / page * page;
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
        else if (!s->copy[k])
            TRY(memory_alloc((void **)&s->copy[k], bytes, "the copy that a checkpoint is made of", e));
    s->touching = thread_start(&s->thread, touch_copy, s, "a save's memory", &(Error){0}) == 0;
    return 0;
}

static int wait_for_copy_memory(Saver *s, Error *e) {
    if (!s->copy[SAVER_ARRAYS - 1]) TRY(saver_prepare(s, NULL, e));
    if (s->touching) pthread_join(s->thread, NULL);
    s->touching = false;
    return 0;
}

void saver_stay(Saver *s, int64_t before, int64_t after) {
    assert(!s->running);
    s->before = before;
    s->after = after;
}

static void begin(Saver *s, Parallel *parallel, int64_t step, char *state, size_t state_bytes) {
    assert(!s->running);
    free(s->state);
    s->state = state;
    s->state_bytes = state_bytes;
    s->parallel = parallel;
    s->source = NULL;
    s->served = NULL;
    s->report = (SaveReport){.step = step};
    s->started = clock_seconds();
    atomic_store(&s->ended, false);
}

void saver_run(Saver *s, Parallel *parallel, int64_t step, char *state, size_t state_bytes, SaveReport *report) {
    begin(s, parallel, step, state, state_bytes);
    s->served = parallel;
    save_all(s);
    *report = s->report;
    report->stall_seconds = report->seconds;
}

int saver_start(Saver *s, Parallel *parallel, int64_t step, char *state, size_t state_bytes, Error *e) {
    begin(s, NULL, step, state, state_bytes);
    TRY(wait_for_copy_memory(s, e));
    if (parallel_stores_alone(parallel)) s->source = parallel;
    else TRY(take_snapshot(s, parallel, e));
    s->running = true;
    s->snapping = s->source != NULL;
    s->threaded = thread_start(&s->thread, save_all, s, "a save", &(Error){0}) == 0;
    if (!s->threaded) { // no thread to be had: training waits
        s->served = parallel;
        save_all(s);
    }
    s->stalled = clock_seconds() - s->started;
    return 0;
}

void saver_settle(Saver *s) {
    if (!s || !s->snapping) return;
    double start = clock_seconds();
    while (sem_wait(&s->taken) != 0 && errno == EINTR) continue;
    s->snapping = false;
    s->stalled += clock_seconds() - start;
}

bool saver_wait(const Saver *s, double seconds, Parallel *served) {
    const struct timespec moment = {0, 10000000};
    long told = -1;
    for (double end = clock_seconds() + seconds; s->running && !atomic_load(&s->ended); nanosleep(&moment, NULL)) {
        if (clock_seconds() > end) return false;
        long pieces = atomic_load(&s->pieces);
        if (served && pieces != told) parallel_beat(served);
        told = pieces;
    }
    return true;
}

bool saver_collect(Saver *s, bool wait, SaveReport *report) {
    if (!s->running || (!wait && !atomic_load(&s->ended))) return false;
    if (s->threaded) pthread_join(s->thread, NULL);
    saver_settle(s);
    s->running = false;
    s->report.stall_seconds = s->stalled;
    if (report) *report = s->report;
    return true;
}
