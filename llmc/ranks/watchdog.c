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
    SECONDS_TO_END = 5,     // MPI may take this long to end the job; then this process exits by itself
    SECONDS_FOR_OTHERS = 1, // between an unsure report and the end; meanwhile other machines report
    ORPHAN_SECONDS = 5,     // deadline of set-up once the launcher is gone; nothing else ends a hanging rank
    HANDING_MS = 1000       // an abort waits this long for a call that hands work to the device's communication
};
static const double seconds_for_other_machines = 4; // wait before an unsure report, for reports from other machines
static const double seconds_claimed = SECONDS_FOR_OTHERS + SECONDS_TO_END + 1;
static const double seconds_until_stalled = 1.5;     // a stalled rank has had no heartbeat for this long
static const double fraction_of_wait_stalled = 0.75; // and for this fraction of the wait: busy cores delay heartbeats

struct WatchdogEntry {
    atomic_int process;   // process id; 0: not started, or on another machine
    atomic_llong begun;   // collectives begun
    _Atomic double beat;  // the last heartbeat, seconds of the machine's monotonic clock
    _Atomic double claim; // when the last report began; on the line of the machine's first rank
};

size_t watchdog_board_bytes(int count) { return (size_t)count * sizeof(WatchdogEntry); }

struct Watchdog {
    WatchdogConfig config;
    Ticker ticker;
    atomic_bool handing; // becomes true only under the lock

    // Guarded by the ticker's lock:
    WatchdogPhase phase;
    int64_t step;
    double since;           // the last progress, seconds of the clock
    double checked;         // the last check
    const char *collective; // name of the last collective or wait
    WatchdogDevice device;
};

// ---- The report -----------------------------------------------------------------------------------------------------

__attribute__((format(printf, 2, 3))) static void append(Error *e, const char *format, ...) {
    size_t used = strlen(e->what);
    va_list args;
    va_start(args, format);
    vsnprintf(e->what + used, sizeof e->what - used, format, args);
    va_end(args);
}

static bool is_stalled(const Watchdog *w, const WatchdogEntry *entry, double now) {
    return now - atomic_load(&entry->beat) > fmax(seconds_until_stalled, fraction_of_wait_stalled * (now - w->since));
}

// What the board shows.
typedef struct {
    int here;              // ranks of this machine that have started
    int stalled;           // ranks without a heartbeat
    long long first, last; // fewest and most collectives begun by a rank that is not stalled
    bool unsure;           // invariant 4
} View;

static View read_board(const Watchdog *w, double now) {
    const WatchdogConfig *c = &w->config;
    View v = {.first = LLONG_MAX};
    if (!c->board) return v;
    for (WatchdogEntry *entry = c->board; entry < c->board + c->ranks; entry++) {
        if (!atomic_load(&entry->process)) continue;
        v.here++;
        if (is_stalled(w, entry, now)) {
            v.stalled++;
            continue;
        }
        long long begun = atomic_load(&entry->begun);
        if (begun < v.first) v.first = begun;
        if (begun > v.last) v.last = begun;
    }
    v.unsure = v.here < c->ranks && v.here >= c->here && !v.stalled;
    return v;
}

static void name_suspects(const Watchdog *w, const View *v, double now, Error *e) {
    const WatchdogConfig *c = &w->config;
    if (v->unsure) append(e, "; this machine's %d rank%s", v->here, v->here > 1 ? "s run" : " runs");
    for (int rank = 0; c->board && rank < c->ranks; rank++) {
        const WatchdogEntry *entry = &c->board[rank];
        const int process = atomic_load(&entry->process);
        const char *verdict = NULL;
        if (!process) verdict = c->here == c->ranks ? " has not started" : NULL; // on one machine all numbers are known
        else if (is_stalled(w, entry, now)) verdict = " is stopped or gone";
        else if (!v->stalled && v->first < v->last && atomic_load(&entry->begun) == v->first)
            verdict = v->unsure ? " is at the earliest collective" : " keeps the others waiting";
        if (!verdict) continue;
        append(e, "; rank %d", rank);
        if (process) append(e, " (process %d%s%s)", process, *c->host ? " on " : "", c->host);
        append(e, "%s", verdict);
    }
    if (v->unsure) append(e, ", collective number %lld: look at the other machines too", v->first);
    if (c->board && v->here < c->here && c->here < c->ranks)
        append(e, "; %d of this machine's %d ranks have not started", c->here - v->here, c->here);
}

static bool lost_launcher(const Watchdog *w) {
    return w->phase == PHASE_SETUP && w->config.launcher && getppid() != w->config.launcher;
}

static double phase_deadline(const Watchdog *w) {
    static const double times[PHASE_COUNT] = {[PHASE_SETUP] = 6, [PHASE_STEP] = 1, [PHASE_CHECKPOINT] = 3};
    double seconds = times[w->phase] * w->config.deadline;
    return lost_launcher(w) ? fmin(seconds, ORPHAN_SECONDS) : seconds;
}

static void describe(const Watchdog *w, const View *v, double now, Error *e) {
    bool saves = w->phase == PHASE_CHECKPOINT;
    char where[96] = "set-up";
    if (w->phase != PHASE_SETUP)
        snprintf(where, sizeof where, "%s %lld", saves ? "checkpoint" : "step", (long long)w->step);
    FAIL(e, ERR_RANK, NULL, "%s: no progress for %g s (%s)", where, phase_deadline(w),
         lost_launcher(w) ? "the launcher is gone" : "--deadline");
    error_hint(e, "look for the rank that hangs%s; start the same command again%s",
               v->unsure ? ", on the machine with the smallest number or without a report" : "",
               saves ? ", or raise --deadline" : "");
    if (w->collective) append(e, "; last collective: %s", w->collective);
    name_suspects(w, v, now, e);
}

// ---- The thread -----------------------------------------------------------------------------------------------------

static void on_alarm(int signal_number) { _exit(ERR_RANK); }

static void report_and_end(const Watchdog *w, const Error *e, int seconds_before) {
    if (w->phase == PHASE_CHECKPOINT) fputs("\n", stderr); // a sample's line may be open
    error_print_on(e, w->config.rank, w->config.ranks, w->config.host);
    signal(SIGALRM, on_alarm);
    alarm((unsigned)(seconds_before + SECONDS_TO_END));
    sleep((unsigned)seconds_before);
    for (int ms = 0; w->device.abort && atomic_load(&w->handing) && ms < HANDING_MS; ms++) usleep(1000);
    if (w->device.abort) w->device.abort(w->device.context);
    w->config.end(e->code);
}

// True for one rank of the machine (invariant 3). Another may claim the report if that rank does not end the job soon.
static bool claim_report(const Watchdog *w, double now) {
    WatchdogEntry *first = w->config.board;
    if (!first) return true;
    while (!atomic_load(&first->process)) first++;
    double before = atomic_load(&first->claim);
    return now - before > seconds_claimed && atomic_compare_exchange_strong(&first->claim, &before, now);
}

static void watch_clock(void *watchdog) {
    Watchdog *w = watchdog;
    Error e = {0};
    double now = clock_seconds();
    if (now - w->checked > seconds_until_stalled) w->since = now; // this process itself was stopped
    w->checked = now;
    if (w->config.board) atomic_store(&w->config.board[w->config.rank].beat, now);
    if (w->device.check && w->device.check(w->device.context, &e)) report_and_end(w, &e, 0);
    double over = now - w->since - phase_deadline(w);
    if (over < 0) return;
    View view = read_board(w, now);
    if (over < (view.unsure ? seconds_for_other_machines : 0) || !claim_report(w, now)) return;
    describe(w, &view, now, &e);
    report_and_end(w, &e, view.unsure ? SECONDS_FOR_OTHERS : 0);
}

int watchdog_create(Watchdog **out, const WatchdogConfig *config, Error *e) {
    TRY(memory_alloc_zero((void **)out, sizeof(Watchdog), "watchdog", e));
    Watchdog *w = *out;
    w->config = *config;
    w->since = w->checked = clock_seconds();
    if (config->board) { // overwrites a line that an earlier job of the same name may have left
        WatchdogEntry *own = &config->board[config->rank];
        atomic_store(&own->begun, 0);
        atomic_store(&own->claim, 0);
        atomic_store(&own->beat, w->checked);
        atomic_store(&own->process, (int)getpid());
    }
    ticker_create(&w->ticker, watch_clock, w);
    return ticker_start(&w->ticker, "the watchdog", e);
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

// Restarts the clock. what: name of the collective; NULL: unchanged. begun: collectives to count.
static void restart(Watchdog *w, const char *what, int begun) {
    if (!w) return;
    pthread_mutex_lock(&w->ticker.lock);
    w->since = clock_seconds();
    if (what) w->collective = what;
    if (w->config.board) atomic_fetch_add(&w->config.board[w->config.rank].begun, begun);
    pthread_mutex_unlock(&w->ticker.lock);
}

void watchdog_progress(Watchdog *w) { restart(w, NULL, 0); }
void watchdog_wait(Watchdog *w, const char *what) { restart(w, what, 0); }
void watchdog_begin(Watchdog *w, const char *collective) { restart(w, collective, 1); }

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
