#define _POSIX_C_SOURCE 200809L
#include "watchdog.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { LOOK_MS = 100 }; // from one look at the clock to the next

// Ranks that run into the same deadline do not speak all at once: each waits for those before it to end the job.
static const double seconds_between_speakers = 0.3;
// A watchdog that has not stirred for so long belongs to a process that does not run.
static const double seconds_until_still = 1.5;
// What MPI's own way of ending a job may take before this process just ends.
enum { SECONDS_TO_END = 5 };

struct WatchdogEntry {
    atomic_int process;   // process id; 0: not here
    atomic_llong begun;   // collectives
    atomic_llong stirred; // microseconds of the machine's monotonic clock
};

size_t watchdog_board_bytes(int count) { return (size_t)count * sizeof(WatchdogEntry); }

struct Watchdog {
    WatchdogConfig config;
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    bool done;
    // Below: under the lock.
    WatchdogPhase phase;
    int64_t step;
    double since; // seconds of the clock: the last sign of progress
    double looked;
    const char *collective; // that was begun or waited for last
    bool joined;
    WatchdogDevice device;
};

static const char *const phase_names[PHASE_COUNT] = {"set-up", "step", "checkpoint"};

// ---------------------------------------------------------------------------------------------------------------------
// What to say

static void append(char *text, size_t bytes, const char *format, ...) __attribute__((format(printf, 3, 4)));
static void append(char *text, size_t bytes, const char *format, ...) {
    size_t used = strlen(text);
    va_list args;
    va_start(args, format);
    vsnprintf(text + used, bytes - used, format, args);
    va_end(args);
}

static bool is_still(const WatchdogEntry *entry, double now) {
    return now - 1e-6 * (double)atomic_load(&entry->stirred) > seconds_until_still;
}

static WatchdogEntry *own_entry(const Watchdog *w) { return &w->config.board[w->config.rank]; }

// Names the ranks that are still, or those that run and are behind this one. Returns how many.
static int name_ranks(const Watchdog *w, bool still, const char *says, char *text, size_t bytes) {
    double now = clock_seconds();
    long long begun = atomic_load(&own_entry(w)->begun);
    int named = 0;
    for (int rank = 0; rank < w->config.ranks; rank++) {
        const WatchdogEntry *entry = &w->config.board[rank];
        int process = atomic_load(&entry->process);
        if (rank == w->config.rank || !process || is_still(entry, now) != still) continue;
        if (!still && atomic_load(&entry->begun) >= begun) continue;
        append(text, bytes, "; rank %d (process %d) %s", rank, process, says);
        named++;
    }
    return named;
}

// Whom this rank is waiting for, as far as the board tells: those that are behind may themselves wait for one that is
// still. Returns how many it has named.
static int name_culprits(const Watchdog *w, char *text, size_t bytes) {
    int named = name_ranks(w, true, "is stopped or gone", text, bytes);
    return named ? named : name_ranks(w, false, "has not come to it", text, bytes);
}

// Before the ranks have met: who of this machine's is not there at all. Which ranks those are is certain where all are
// on this machine.
static int name_missing(const Watchdog *w, char *text, size_t bytes) {
    int missing = w->config.here;
    for (int rank = 0; rank < w->config.ranks; rank++) missing -= atomic_load(&w->config.board[rank].process) != 0;
    if (missing <= 0) return 0;
    if (w->config.here < w->config.ranks) {
        append(text, bytes, "; %d of this machine's %d ranks have not started", missing, w->config.here);
        return missing;
    }
    for (int rank = 0; rank < w->config.ranks; rank++)
        if (!atomic_load(&w->config.board[rank].process)) append(text, bytes, "; rank %d has not started", rank);
    return missing;
}

static void name_guilty(const Watchdog *w, char *text, size_t bytes) {
    if (!w->config.board) return;
    int named = name_culprits(w, text, bytes);
    if (!w->joined) named += name_missing(w, text, bytes);
    if (!named && w->config.here && w->config.here < w->config.ranks)
        append(text, bytes, "; this machine's %d ranks are all there: look at the others", w->config.here);
}

static void describe(const Watchdog *w, Error *e) {
    static const char *const options[PHASE_COUNT] = {"--deadline-setup", "--deadline-step", "--deadline-checkpoint"};
    char where[96] = "set-up";
    if (w->phase != PHASE_SETUP) snprintf(where, sizeof where, "%s %lld", phase_names[w->phase], (long long)w->step);
    FAIL(e, ERR_RANK, "look for the rank that hangs; start the same command again",
         "%s: nothing has got on for %g s (%s)", where, w->config.deadline[w->phase], options[w->phase]);
    if (w->collective) append(e->what, sizeof e->what, "; last collective: %s", w->collective);
    name_guilty(w, e->what, sizeof e->what);
}

// How many ranks of this machine speak before this one: those that run and are ahead of it, since one that is behind has
// nobody to name, and of those that are as far the ones before it.
static int speakers_before(const Watchdog *w) {
    int n = 0;
    double now = clock_seconds();
    for (int rank = 0; w->config.board && rank < w->config.ranks; rank++) {
        const WatchdogEntry *entry = &w->config.board[rank];
        long long ahead = atomic_load(&entry->begun) - atomic_load(&own_entry(w)->begun);
        bool runs = atomic_load(&entry->process) && !is_still(entry, now);
        n += runs && (ahead > 0 || (ahead == 0 && rank < w->config.rank));
    }
    return n;
}

// ---------------------------------------------------------------------------------------------------------------------
// The thread

static void on_alarm(int signal_number) {
    (void)signal_number;
    _exit(ERR_RANK);
}

static void end_job(const Watchdog *w, const Error *e) {
    error_print(e, w->config.rank, w->config.ranks);
    signal(SIGALRM, on_alarm);
    alarm(SECONDS_TO_END);
    if (w->device.abort) w->device.abort(w->device.context);
    w->config.end(e->code);
}

static void sleep_until_next_look(Watchdog *w) {
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_nsec += LOOK_MS * 1000000L;
    until.tv_sec += until.tv_nsec / 1000000000L;
    until.tv_nsec %= 1000000000L;
    pthread_cond_timedwait(&w->changed, &w->lock, &until);
}

static void stir(Watchdog *w, double now) {
    if (w->config.board) atomic_store(&own_entry(w)->stirred, (long long)(1e6 * now));
}

static void look(Watchdog *w) {
    Error e = {0};
    double now = clock_seconds();
    if (now - w->looked > seconds_until_still) w->since = now; // it is this process that was stopped
    w->looked = now;
    stir(w, now);
    if (w->device.check && w->device.check(w->device.context, &e)) end_job(w, &e);
    double over = now - w->since - w->config.deadline[w->phase];
    if (over < 0 || over < seconds_between_speakers * speakers_before(w)) return;
    describe(w, &e);
    end_job(w, &e);
}

static void *watch(void *context) {
    Watchdog *w = context;
    pthread_mutex_lock(&w->lock);
    while (!w->done) {
        sleep_until_next_look(w);
        if (!w->done) look(w);
    }
    pthread_mutex_unlock(&w->lock);
    return NULL;
}

// On the board. What an earlier run may have left there under the same name is overwritten.
static void enter(Watchdog *w) {
    if (!w->config.board) return;
    atomic_store(&own_entry(w)->begun, 0);
    stir(w, w->looked);
    atomic_store(&own_entry(w)->process, (int)getpid());
}

int watchdog_create(Watchdog **out, const WatchdogConfig *config, Error *e) {
    TRY(memory_alloc_zero((void **)out, sizeof(Watchdog), "watchdog", e));
    Watchdog *w = *out;
    pthread_condattr_t attributes;
    sigset_t all, before;
    w->config = *config;
    w->since = w->looked = clock_seconds();
    enter(w);
    pthread_mutex_init(&w->lock, NULL);
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&w->changed, &attributes);
    pthread_condattr_destroy(&attributes);
    sigfillset(&all); // signals are for the main thread
    sigdelset(&all, SIGALRM);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int failed = pthread_create(&w->thread, NULL, watch, w);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (!failed) return 0;
    memory_free(w);
    *out = NULL;
    return FAIL(e, ERR_INTERNAL, NULL, "no thread for the watchdog: %s", strerror(failed));
}

void watchdog_destroy(Watchdog *w) {
    if (!w) return;
    pthread_mutex_lock(&w->lock);
    w->done = true;
    pthread_cond_signal(&w->changed);
    pthread_mutex_unlock(&w->lock);
    pthread_join(w->thread, NULL);
    pthread_cond_destroy(&w->changed);
    pthread_mutex_destroy(&w->lock);
    memory_free(w);
}

// ---------------------------------------------------------------------------------------------------------------------
// From the main thread

void watchdog_join(Watchdog *w, int rank, int ranks) {
    if (!w) return;
    pthread_mutex_lock(&w->lock);
    if (rank != w->config.rank || ranks != w->config.ranks) w->config.board = NULL; // a launcher that said otherwise
    w->config.rank = rank;
    w->config.ranks = ranks;
    w->joined = true;
    pthread_mutex_unlock(&w->lock);
}

void watchdog_phase(Watchdog *w, WatchdogPhase phase, int64_t step) {
    if (!w) return;
    pthread_mutex_lock(&w->lock);
    w->phase = phase;
    w->step = step;
    w->since = clock_seconds();
    pthread_mutex_unlock(&w->lock);
}

void watchdog_progress(Watchdog *w) {
    if (!w) return;
    pthread_mutex_lock(&w->lock);
    w->since = clock_seconds();
    pthread_mutex_unlock(&w->lock);
}

static void note(Watchdog *w, const char *what, int begun) {
    if (!w) return;
    pthread_mutex_lock(&w->lock);
    w->collective = what;
    w->since = clock_seconds();
    if (w->config.board) atomic_fetch_add(&own_entry(w)->begun, begun);
    pthread_mutex_unlock(&w->lock);
}

void watchdog_begin(Watchdog *w, const char *collective) { note(w, collective, 1); }

void watchdog_wait(Watchdog *w, const char *what) { note(w, what, 0); }

void watchdog_device(Watchdog *w, const WatchdogDevice *device) {
    if (!w) return;
    pthread_mutex_lock(&w->lock);
    w->device = device ? *device : (WatchdogDevice){0};
    pthread_mutex_unlock(&w->lock);
}
