// thread: starts threads. The main thread handles all signals.
#pragma once

#include "base/common.h"
#include <pthread.h>

// A thread that runs one function. All zero: none.
typedef struct {
    pthread_t thread;
    bool runs;
} Worker;

// Starts a thread; an earlier thread of `w` must be joined. The thread blocks all signals but SIGALRM, by which
// watchdog.c ends the process on any thread. `what` names the thread in the message. ERR_MEMORY if the limit on threads
// is reached.
int worker_start(Worker *w, void *(*run)(void *), void *argument, const char *what, Error *e);
void worker_join(Worker *w); // waits for its end

// A thread that calls `tick` ten times a second, and holds the lock during the call. The lock may also guard the
// owner's data.
typedef struct {
    pthread_mutex_t lock; // usable after ticker_create
    Worker worker;
    int end; // an eventfd that ticker_destroy writes
    bool stop;
    void (*tick)(void *context);
    void *context;
} Ticker;

void ticker_create(Ticker *t, void (*tick)(void *context), void *context);
int ticker_start(Ticker *t, const char *what, Error *e); // see worker_start
void ticker_destroy(Ticker *t);                          // may be called without ticker_start

// Starts OpenMP's threads, which later parallel regions of at most `size` threads reuse. If they cannot start, libgomp
// calls exit(1): an exit handler then prints an error and ends the process with ERR_MEMORY. Call it before anything is
// written.
void thread_start_team(int size);

// Calls work(context, part, parts) on all threads of the team, one part each. If parts fail, runs the other parts to
// their end, and returns the error of the lowest failed part.
int thread_divide(int (*work)(void *context, int part, int parts, Error *e), void *context, Error *e);

// Returns the cores that a container's CPU quota allows (Docker's --cpus; cgroup version 2), rounded up; INT_MAX: no
// quota. root: prefix of /sys for tests, else "".
int thread_quota(const char *root);
