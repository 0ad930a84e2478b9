#include "ranks/watchdog.h"

#include "base/thread.h"

#include <limits.h>
#include <math.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <string.h>
#include <unistd.h>

enum {
    SECONDS_TO_END = 5,    // for MPI to end the job; then this process exits by itself
    HANDING_MS = 1000,     // for the main thread to return from the device's communication before that is aborted
    SECONDS_FOR_OTHERS = 1 // after a report that blames no rank, for reports of other machines (invariant 4)
};
static const double seconds_for_other_machines = 4; // before such a report: their ranks began to wait later or earlier
static const double seconds_claimed = SECONDS_FOR_OTHERS + SECONDS_TO_END + 1;
static const double seconds_until_stalled = 1.5;  // a rank is stalled after this long without a heartbeat,
static const double share_of_wait_stalled = 0.75; // and this share of the wait: a busy machine may delay a heartbeat

struct WatchdogEntry {
    atomic_int process; // process id; 0: not here
    atomic_llong begun; // collectives
    atomic_llong beat;  // microseconds of the machine's monotonic clock: the last heartbeat
    atomic_llong claim; // likewise, on the line of this machine's first rank: when the last report began
};

size_t watchdog_board_bytes(int count) { return (size_t)count * sizeof(WatchdogEntry); }

struct Watchdog {
    WatchdogConfig config;
    Ticker ticker;
    atomic_bool handing; // becomes true under the lock alone
    // Below: under the ticker's lock.
    WatchdogPhase phase;
    int64_t step;
    double since;           // seconds of the clock: the last progress
    double checked;         // likewise: the last check
    const char *collective; // begun or waited for last
    bool joined;
    WatchdogDevice device;
};

static const char *const phase_names[PHASE_COUNT] = {"set-up", "step", "checkpoint"};

// ---- The report -----------------------------------------------------------------------------------------------------

__attribute__((format(printf, 2, 3))) static void append(Error *e, const char *format, ...) {
    size_t used = strlen(e->what);
    va_list args;
    va_start(args, format);
    vsnprintf(e->what + used, sizeof e->what - used, format, args);
    va_end(args);
}

static WatchdogEntry *own_entry(const Watchdog *w) { return &w->config.board[w->config.rank]; }

static long long microseconds(double seconds) { return (long long)(1e6 * seconds); }
static double seconds_since(atomic_llong *moment, double now) { return now - 1e-6 * (double)atomic_load(moment); }

static bool has_started(const Watchdog *w, int rank) { return atomic_load(&w->config.board[rank].process); }

static bool is_stalled(const Watchdog *w, int rank, double now) {
    double stalled = seconds_since(&w->config.board[rank].beat, now);
    return has_started(w, rank) && stalled > fmax(seconds_until_stalled, share_of_wait_stalled * (now - w->since));
}

// What the board shows.
typedef struct {
    int here;              // ranks of this machine that have started
    int missing;           // ranks of this machine that have not, until all ranks have joined
    int stalled;           // ranks without a heartbeat
    long long first, last; // fewest and most collectives begun, of the other ranks
    bool unsure;           // all ranks run, and there are other machines (invariant 4)
} View;

static View read_board(const Watchdog *w, double now) {
    View v = {.first = LLONG_MAX};
    for (int rank = 0; w->config.board && rank < w->config.ranks; rank++) {
        if (!has_started(w, rank)) continue;
        v.here++;
        if (is_stalled(w, rank, now)) {
            v.stalled++;
            continue;
        }
        long long begun = atomic_load(&w->config.board[rank].begun);
        if (begun < v.first) v.first = begun;
        if (begun > v.last) v.last = begun;
    }
    if (!w->joined && v.here < w->config.here) v.missing = w->config.here - v.here;
    v.unsure = w->config.board && v.here < w->config.ranks && !v.stalled && !v.missing;
    return v;
}

// stalled: ranks without a heartbeat; else those at the earliest collective.
static void name_ranks(const Watchdog *w, const View *v, double now, bool stalled, const char *what, Error *e) {
    const char *host = w->config.host;
    for (int rank = 0; rank < w->config.ranks; rank++) {
        WatchdogEntry *entry = &w->config.board[rank];
        if (!has_started(w, rank) || is_stalled(w, rank, now) != stalled) continue;
        if (stalled || atomic_load(&entry->begun) == v->first)
            append(e, "; rank %d (process %d%s%s)%s", rank, atomic_load(&entry->process), *host ? " on " : "", host,
                   what);
    }
}

// Before all ranks have joined. Which ranks are missing is certain only if all are on this machine.
static void name_missing(const Watchdog *w, const View *v, Error *e) {
    if (w->config.here < w->config.ranks)
        append(e, "; %d of this machine's %d ranks have not started", v->missing, w->config.here);
    for (int rank = 0; rank < w->config.ranks && w->config.here == w->config.ranks; rank++)
        if (!has_started(w, rank)) append(e, "; rank %d has not started", rank);
}

static void name_suspects(const Watchdog *w, const View *v, double now, Error *e) {
    if (!w->config.board) return;
    if (v->unsure)
        append(e, "; this machine's %d rank%s run%s", v->here, v->here > 1 ? "s" : "", v->here > 1 ? "" : "s");
    if (v->stalled) name_ranks(w, v, now, true, " is stopped or gone", e);
    else if (v->first < v->last)
        name_ranks(w, v, now, false, v->unsure ? " is at the earliest collective" : " keeps the others waiting", e);
    if (v->unsure) append(e, ", collective number %lld: look at the other machines too", v->first);
    if (v->missing) name_missing(w, v, e);
}

static bool is_orphan(const Watchdog *w) {
    return w->phase == PHASE_SETUP && w->config.orphaned && w->config.orphaned(w->config.launchers);
}

static double deadline(const Watchdog *w) {
    static const double times[PHASE_COUNT] = {[PHASE_SETUP] = 6, [PHASE_STEP] = 1, [PHASE_CHECKPOINT] = 3};
    double seconds = times[w->phase] * w->config.deadline;
    return is_orphan(w) ? fmin(seconds, WATCHDOG_ORPHAN_SECONDS) : seconds;
}

static void describe(const Watchdog *w, const View *v, double now, Error *e) {
    char where[96] = "set-up";
    if (w->phase != PHASE_SETUP) snprintf(where, sizeof where, "%s %lld", phase_names[w->phase], (long long)w->step);
    FAIL(e, ERR_RANK, NULL, "%s: no progress for %g s (%s)", where, deadline(w),
         is_orphan(w) ? "the launcher is gone" : "--deadline");
    error_hint(e, "look for the rank that hangs%s; start the same command again%s",
               v->unsure ? ", on the machine with the smallest number or without a report" : "",
               w->phase == PHASE_CHECKPOINT ? ", or raise --deadline" : "");
    if (w->collective) append(e, "; last collective: %s", w->collective);
    name_suspects(w, v, now, e);
}

// ---- The thread -----------------------------------------------------------------------------------------------------

static void on_alarm(int signal_number) {
    (void)signal_number;
    _exit(ERR_RANK);
}

static void end_job(const Watchdog *w, const Error *e, int seconds_before) {
    error_print_on(e, w->config.rank, w->config.ranks, w->config.host);
    signal(SIGALRM, on_alarm);
    alarm((unsigned)(seconds_before + SECONDS_TO_END));
    sleep((unsigned)seconds_before);
    for (int ms = 0; w->device.abort && atomic_load(&w->handing) && ms < HANDING_MS; ms++) usleep(1000);
    if (w->device.abort) w->device.abort(w->device.context);
    w->config.end(e->code);
}

// True for one rank of the machine. If it does not end the job in time, another may claim the report.
static bool claim_report(const Watchdog *w, double now) {
    int first = 0;
    if (!w->config.board) return true;
    while (!has_started(w, first)) first++;
    atomic_llong *claim = &w->config.board[first].claim;
    long long before = atomic_load(claim);
    return now - 1e-6 * (double)before > seconds_claimed &&
           atomic_compare_exchange_strong(claim, &before, microseconds(now));
}

static void check(void *watchdog) {
    Watchdog *w = watchdog;
    Error e = {0};
    double now = clock_seconds();
    if (now - w->checked > seconds_until_stalled) w->since = now; // this process itself was stopped
    w->checked = now;
    if (w->config.board) atomic_store(&own_entry(w)->beat, microseconds(now));
    if (w->device.check && w->device.check(w->device.context, &e)) end_job(w, &e, 0);
    double over = now - w->since - deadline(w);
    if (over < 0) return;
    View view = read_board(w, now);
    if (over < (view.unsure ? seconds_for_other_machines : 0) || !claim_report(w, now)) return;
    describe(w, &view, now, &e);
    end_job(w, &e, view.unsure ? SECONDS_FOR_OTHERS : 0);
}

// Overwrites this rank's line on the board, which an earlier run of the same name may have left.
static void board_enter(Watchdog *w) {
    if (!w->config.board) return;
    atomic_store(&own_entry(w)->begun, 0);
    atomic_store(&own_entry(w)->claim, 0);
    atomic_store(&own_entry(w)->beat, microseconds(w->checked));
    atomic_store(&own_entry(w)->process, (int)getpid());
}

int watchdog_create(Watchdog **out, const WatchdogConfig *config, Error *e) {
    TRY(memory_alloc_zero((void **)out, sizeof(Watchdog), "watchdog", e));
    Watchdog *w = *out;
    w->config = *config;
    w->since = w->checked = clock_seconds();
    board_enter(w);
    ticker_create(&w->ticker, check, w);
    int code = ticker_start(&w->ticker, "the watchdog", e);
    if (code) {
        memory_free(w);
        *out = NULL;
    }
    return code;
}

void watchdog_destroy(Watchdog *w) {
    if (!w) return;
    ticker_destroy(&w->ticker);
    memory_free(w);
}

// ---- From the main thread -------------------------------------------------------------------------------------------

void watchdog_join(Watchdog *w, int rank, int ranks) {
    if (!w) return;
    pthread_mutex_lock(&w->ticker.lock);
    if (rank != w->config.rank || ranks != w->config.ranks) w->config.board = NULL; // the launcher was wrong
    w->config.rank = rank;
    w->config.ranks = ranks;
    w->joined = true;
    pthread_mutex_unlock(&w->ticker.lock);
}

void watchdog_phase(Watchdog *w, WatchdogPhase phase, int64_t step) {
    if (!w) return;
    pthread_mutex_lock(&w->ticker.lock);
    w->phase = phase;
    w->step = step;
    w->since = clock_seconds();
    pthread_mutex_unlock(&w->ticker.lock);
}

void watchdog_progress(Watchdog *w) {
    if (!w) return;
    pthread_mutex_lock(&w->ticker.lock);
    w->since = clock_seconds();
    pthread_mutex_unlock(&w->ticker.lock);
}

static void note(Watchdog *w, const char *what, int begun) {
    if (!w) return;
    pthread_mutex_lock(&w->ticker.lock);
    w->collective = what;
    w->since = clock_seconds();
    if (w->config.board) atomic_fetch_add(&own_entry(w)->begun, begun);
    pthread_mutex_unlock(&w->ticker.lock);
}

void watchdog_begin(Watchdog *w, const char *collective) { note(w, collective, 1); }
void watchdog_wait(Watchdog *w, const char *what) { note(w, what, 0); }

void watchdog_handing(Watchdog *w, bool handing) {
    if (!w) return;
    if (handing) pthread_mutex_lock(&w->ticker.lock);
    atomic_store(&w->handing, handing);
    if (handing) pthread_mutex_unlock(&w->ticker.lock);
}

void watchdog_device(Watchdog *w, const WatchdogDevice *device) {
    if (!w) return;
    pthread_mutex_lock(&w->ticker.lock);
    w->device = device ? *device : (WatchdogDevice){0};
    pthread_mutex_unlock(&w->ticker.lock);
}
