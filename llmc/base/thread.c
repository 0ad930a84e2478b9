#include "base/thread.h"

#include <limits.h>
#include <math.h>
#include <omp.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

enum { TICK_MS = 100 };

int worker_start(Worker *w, void *(*run)(void *), void *argument, const char *what, Error *e) {
    sigset_t all, before;
    sigfillset(&all);
    sigdelset(&all, SIGALRM);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int failed = pthread_create(&w->thread, NULL, run, argument); // the thread inherits the mask
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    w->runs = !failed;
    if (!failed) return 0;
    return FAIL(e, ERR_MEMORY, "raise the limit on threads", "cannot start a thread for %s: %s", what,
                strerror(failed));
}

void worker_join(Worker *w) {
    if (w->runs) pthread_join(w->thread, NULL);
    w->runs = false;
}

void ticker_create(Ticker *t, void (*tick)(void *context), void *context) {
    *t = (Ticker){.tick = tick, .context = context, .end = eventfd(0, EFD_CLOEXEC)};
    pthread_mutex_init(&t->lock, NULL);
}

static void *run_ticker(void *ticker) {
    Ticker *t = ticker;
    struct pollfd end = {t->end, POLLIN, 0};
    while (poll(&end, 1, TICK_MS) <= 0) {
        pthread_mutex_lock(&t->lock);
        t->tick(t->context);
        pthread_mutex_unlock(&t->lock);
    }
    return NULL;
}

int ticker_start(Ticker *t, const char *what, Error *e) {
    if (t->end >= 0) return worker_start(&t->worker, run_ticker, t, what, e);
    return FAIL(e, ERR_MEMORY, "raise the limit on open files", "no descriptor for %s", what);
}

void ticker_destroy(Ticker *t) {
    eventfd_write(t->end, 1);
    worker_join(&t->worker);
    close(t->end);
    pthread_mutex_destroy(&t->lock);
}

int thread_divide(int (*work)(void *context, int part, int parts, Error *e), void *context, Error *e) {
    int lowest = INT_MAX, code = 0;
#pragma omp parallel
    {
        const int part = omp_get_thread_num();
        Error mine;
        if (work(context, part, omp_get_num_threads(), &mine))
#pragma omp critical
            if (part < lowest) lowest = part, *e = mine, code = mine.code;
    }
    return code;
}

int thread_quota(const char *root) {
    char path[200];
    double quota, period;
    snprintf(path, sizeof path, "%s/sys/fs/cgroup/cpu.max", root);
    FILE *f = fopen(path, "re");
    bool limited = f && fscanf(f, "%lf %lf", &quota, &period) == 2; // without a limit the quota is "max"
    if (f) fclose(f);
    return limited ? (int)fmin(INT_MAX, fmax(1, ceil(quota / period))) : INT_MAX;
}
