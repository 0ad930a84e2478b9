#define _POSIX_C_SOURCE 200809L
#include "ranks/watchdog.h"

#include "base/thread.h"

#include <errno.h>
#include <limits.h>
#include <math.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { LOOK_MS = 100 }; // from one look at the clock to the next

// Ranks that run into the same deadline do not speak all at once: each waits for those before it to end the job.
static const double seconds_between_speakers = 0.3;
// Nor do machines: one whose board does not tell who is to blame waits for one whose does; so long, as their ranks did
// not begin to wait at the same moment. What it says in the end is of use beside what the others say: it gives them time.
static const double seconds_for_those_who_know = 4;
enum { SECONDS_FOR_OTHERS_LINES = 1 };
// A watchdog that has not stirred for so long belongs to a process that does not run.
static const double seconds_until_still = 1.5;
// Who is to blame for a wait has been still for most of it. One that a busy machine has just held up has not.
static const double share_of_wait_still = 0.75;
// What MPI's own way of ending a job may take before this process just ends.
enum { SECONDS_TO_END = 5 };
// A rank that ends the job has the word, on its machine, for so long.
static const double seconds_of_silence = SECONDS_FOR_OTHERS_LINES + SECONDS_TO_END + 1;

struct WatchdogEntry {
    atomic_int process;   // process id; 0: not here
    atomic_llong begun;   // collectives
    atomic_llong stirred; // microseconds of the machine's monotonic clock
    atomic_llong spoke;   // likewise: when it said why it ends the job
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

static WatchdogEntry *own_entry(const Watchdog *w) { return &w->config.board[w->config.rank]; }

static double seconds_since(atomic_llong *moment, double now) { return now - 1e-6 * (double)atomic_load(moment); }

// Another rank, from this one's place.
typedef enum { ABSENT, STILL, BEHIND, LEVEL, AHEAD, STANDINGS } Standing;

static Standing standing_of(const Watchdog *w, int rank, double now) {
    WatchdogEntry *entry = &w->config.board[rank];
    long long ahead = atomic_load(&entry->begun) - atomic_load(&own_entry(w)->begun);
    if (!atomic_load(&entry->process)) return ABSENT;
    if (seconds_since(&entry->stirred, now) > fmax(seconds_until_still, share_of_wait_still * (now - w->since)))
        return STILL;
    return ahead < 0 ? BEHIND : ahead > 0 ? AHEAD : LEVEL;
}

// What the board shows.
typedef struct {
    int here;             // ranks of this machine that have come
    int missing;          // that have not, where the ranks have not met
    int count[STANDINGS]; // of the others
    long long least;      // collectives that any of them has begun, of those that run
    int before;           // how many of them speak before this one
    bool told;            // one of them ends the job just now
    bool unsure;          // for all that this shows, a rank of another machine is to blame
} View;

// Those that run and are ahead speak first, since one that is behind has nobody to name; of those that are as far, the
// ones before this one.
static View look_around(const Watchdog *w, double now) {
    View v = {.here = 1, .least = LLONG_MAX};
    if (!w->config.board) return v;
    for (int rank = 0; rank < w->config.ranks; rank++) {
        if (rank == w->config.rank) continue;
        Standing standing = standing_of(w, rank, now);
        v.count[standing]++;
        v.here += standing != ABSENT;
        v.before += standing == AHEAD || (standing == LEVEL && rank < w->config.rank);
        long long begun = atomic_load(&w->config.board[rank].begun);
        if (standing > STILL && begun < v.least) v.least = begun;
        v.told |= standing != ABSENT && seconds_since(&w->config.board[rank].spoke, now) < seconds_of_silence;
    }
    if (!w->joined && v.here < w->config.here) v.missing = w->config.here - v.here;
    v.unsure = v.here < w->config.ranks && !v.count[STILL] && !v.missing;
    return v;
}

// Those that have begun no more than `most` collectives.
static void name_ranks(const Watchdog *w, double now, Standing which, long long most, const char *before,
                       const char *after, char *text, size_t bytes) {
    for (int rank = 0; rank < w->config.ranks; rank++)
        if (rank != w->config.rank && standing_of(w, rank, now) == which &&
            atomic_load(&w->config.board[rank].begun) <= most)
            append(text, bytes, "%srank %d (process %d%s%s)%s", before, rank,
                   atomic_load(&w->config.board[rank].process), *w->config.host ? " on " : "", w->config.host, after);
}

// Before the ranks have met: who of this machine's is not there at all. Which ranks those are is certain where all are
// on this machine.
static void name_missing(const Watchdog *w, const View *v, char *text, size_t bytes) {
    if (w->config.here < w->config.ranks) {
        append(text, bytes, "; %d of this machine's %d ranks have not started", v->missing, w->config.here);
        return;
    }
    for (int rank = 0; rank < w->config.ranks; rank++)
        if (!atomic_load(&w->config.board[rank].process)) append(text, bytes, "; rank %d has not started", rank);
}

// Whom this rank is waiting for, as far as the board tells: those that are behind may themselves wait for one that is
// still, or that is further behind.
static void name_guilty(const Watchdog *w, const View *v, double now, char *text, size_t bytes) {
    if (!w->config.board) return;
    if (v->unsure) {
        append(text, bytes, " (number %lld); this machine's %d %s", (long long)atomic_load(&own_entry(w)->begun),
               v->here, v->here > 1 ? "ranks run" : "rank runs");
        name_ranks(w, now, BEHIND, v->least, ", ", " behind", text, bytes);
        append(text, bytes, ": look at the other machines too");
        return;
    }
    if (v->count[STILL]) name_ranks(w, now, STILL, LLONG_MAX, "; ", " is stopped or gone", text, bytes);
    else name_ranks(w, now, BEHIND, v->least, "; ", " has not come to it", text, bytes);
    if (v->missing) name_missing(w, v, text, bytes);
}

static void describe(const Watchdog *w, const View *v, double now, Error *e) {
    static const char *const options[PHASE_COUNT] = {"--deadline-setup", "--deadline-step", "--deadline-checkpoint"};
    char where[96] = "set-up";
    if (w->phase != PHASE_SETUP) snprintf(where, sizeof where, "%s %lld", phase_names[w->phase], (long long)w->step);
    FAIL(e, ERR_RANK, NULL, "%s: nothing has got on for %g s (%s)", where, w->config.deadline[w->phase],
         options[w->phase]);
    error_hint(e, "look for the rank that hangs%s; start the same command again%s",
               v->unsure ? ", where the number is smallest or nothing is said" : "",
               w->phase == PHASE_CHECKPOINT ? ", or raise --deadline-checkpoint" : "");
    if (w->collective) append(e->what, sizeof e->what, "; last collective: %s", w->collective);
    name_guilty(w, v, now, e->what, sizeof e->what);
}

// ---------------------------------------------------------------------------------------------------------------------
// The thread

static void on_alarm(int signal_number) {
    (void)signal_number;
    _exit(ERR_RANK);
}

static void end_job(const Watchdog *w, const Error *e, int seconds_before) {
    if (w->config.board) atomic_store(&own_entry(w)->spoke, (long long)(1e6 * clock_seconds()));
    error_print_on(e, w->config.rank, w->config.ranks, w->config.host);
    signal(SIGALRM, on_alarm);
    alarm((unsigned)(seconds_before + SECONDS_TO_END));
    sleep((unsigned)seconds_before);
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
    if (w->device.check && w->device.check(w->device.context, &e)) end_job(w, &e, 0);
    double over = now - w->since - w->config.deadline[w->phase];
    if (over < 0) return;
    View view = look_around(w, now);
    double wait = seconds_between_speakers * view.before + (view.unsure ? seconds_for_those_who_know : 0);
    if (over < wait || view.told) return;
    describe(w, &view, now, &e);
    end_job(w, &e, view.unsure ? SECONDS_FOR_OTHERS_LINES : 0);
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
    atomic_store(&own_entry(w)->spoke, 0);
    stir(w, w->looked);
    atomic_store(&own_entry(w)->process, (int)getpid());
}

int watchdog_create(Watchdog **out, const WatchdogConfig *config, Error *e) {
    TRY(memory_alloc_zero((void **)out, sizeof(Watchdog), "watchdog", e));
    Watchdog *w = *out;
    pthread_condattr_t attributes;
    w->config = *config;
    w->since = w->looked = clock_seconds();
    enter(w);
    pthread_mutex_init(&w->lock, NULL);
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&w->changed, &attributes);
    pthread_condattr_destroy(&attributes);
    int code = thread_start(&w->thread, watch, w, "the watchdog", e);
    if (code) {
        memory_free(w);
        *out = NULL;
    }
    return code;
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
