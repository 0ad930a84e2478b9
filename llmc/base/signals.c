#include "base/signals.h"

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>

static const struct {
    int signal;
    const char *name;
} stopping[] = {
    {SIGUSR1, "SIGUSR1"}, {SIGTERM, "SIGTERM"}, {SIGINT, "SIGINT"}, {SIGHUP, "SIGHUP"}, {SIGXCPU, "SIGXCPU"}};

// Globals: a signal handler and a thread of Open MPI have no other way to pass a value.
static volatile sig_atomic_t requested;
static _Atomic(double) requested_at; // time of the request (clock_seconds)
static _Atomic(const char *) orphaned;

static void on_signal(int signal_number) {
    if (requested && (signal_number == SIGHUP || signal_number == SIGXCPU)) return; // systems repeat these two
    if (requested && clock_seconds() - atomic_load(&requested_at) < SIGNALS_TOGETHER) return;
    if (requested) {
        signal(signal_number, SIG_DFL);
        raise(signal_number); // takes effect when the handler returns
    }
    atomic_store(&requested_at, clock_seconds());
    requested = signal_number;
}

void signals_install(void) {
    struct sigaction action = {.sa_handler = on_signal, .sa_flags = SA_RESTART}, before;
    sigset_t all;
    sigemptyset(&action.sa_mask);
    sigemptyset(&all);
    for (size_t i = 0; i < sizeof stopping / sizeof *stopping; i++) {
        sigaction(stopping[i].signal, NULL, &before);
        if (stopping[i].signal == SIGHUP && before.sa_handler == SIG_IGN) continue; // nohup
        sigaction(stopping[i].signal, &action, NULL);
        sigaddset(&all, stopping[i].signal);
    }
    signal(SIGPIPE, SIG_IGN);                 // Ctrl-C also ends a `tee` on our output; the run must still save
    signal(SIGXFSZ, SIG_IGN);                 // a write past the limit on a file's size fails as on a full disk
    pthread_sigmask(SIG_UNBLOCK, &all, NULL); // the parent process may have blocked these signals
}

void signals_orphaned(const char *why) { atomic_store(&orphaned, why); }

bool signals_is_orphan(void) { return atomic_load(&orphaned) != NULL; }

const char *signals_requested(void) {
    int signal_number = requested;
    for (size_t i = 0; i < sizeof stopping / sizeof *stopping; i++)
        if (stopping[i].signal == signal_number) return stopping[i].name;
    return atomic_load(&orphaned);
}
