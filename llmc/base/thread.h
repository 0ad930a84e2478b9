// thread: starts threads. The main thread handles all signals.
#pragma once

#include "base/common.h"
#include <pthread.h>

// A thread that runs one function. All zero: no thread.
typedef struct {
    pthread_t thread;
    bool runs;
} Worker;

// Starts a thread; an earlier thread of `w` must have been joined. The thread blocks all signals but SIGALRM, with
// which watchdog.c ends the process. `what` names the thread in the message. ERR_MEMORY at the limit on threads.
int worker_start(Worker *w, void *(*run)(void *), void *argument, const char *what, Error *e);
void worker_join(Worker *w); // waits for the thread's end

// A thread that calls `tick` ten times a second, and holds the lock during the call. The lock may also guard the
// owner's data.
typedef struct {
    pthread_mutex_t lock; // usable after ticker_create
    Worker worker;
    int end; // an eventfd that ticker_destroy writes
    void (*tick)(void *context);
    void *context;
} Ticker;

void ticker_create(Ticker *t, void (*tick)(void *context), void *context);
int ticker_start(Ticker *t, const char *what, Error *e); // see worker_start
void ticker_destroy(Ticker *t);                          // may be called without ticker_start

// Calls work(context, part, parts) on all threads of the team, one part each. If some parts fail, the others still run
// to their end. Returns the error of the failed part with the lowest number.
int thread_divide(int (*work)(void *context, int part, int parts, Error *e), void *context, Error *e);

// Returns the cores that a container's CPU quota allows (Docker's --cpus; cgroup version 2), rounded up; INT_MAX: no
// quota. root: prefix of /sys for tests, else "".
int thread_quota(const char *root);
