// thread: starts threads. The main thread handles all signals.
#pragma once

#include "base/common.h"
#include <pthread.h>

// Runs one function at a time on a thread, which its first function starts. All zero: no thread.
typedef struct {
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    void *(*run)(void *); // NULL: idle
    void *argument;
    bool exists, ends;
} Worker;

// Runs a function on the idle worker. Its thread takes no signal but SIGALRM, which ends the process on any thread
// (watchdog.c). `what` names the thread in the message. ERR_MEMORY where the limit on threads is reached.
int worker_start(Worker *w, void *(*run)(void *), void *argument, const char *what, Error *e);
void worker_join(Worker *w);    // waits until it is idle
void worker_destroy(Worker *w); // waits, and ends the thread

// A thread that calls `tick` ten times a second, with the lock held. The lock may guard the owner's data as well.
typedef struct {
    pthread_mutex_t lock; // usable after ticker_create
    pthread_cond_t ends;
    Worker worker;
    bool stop;
    void (*tick)(void *context);
    void *context;
} Ticker;

void ticker_create(Ticker *t, void (*tick)(void *context), void *context);
int ticker_start(Ticker *t, const char *what, Error *e); // as worker_start
void ticker_destroy(Ticker *t);                          // also of one that was not started

// Starts OpenMP's threads, which later parallel regions of at most `size` threads reuse. If they cannot start, libgomp
// calls exit(1); here the process then ends with a line of ours too, and ERR_MEMORY. Call this before anything is written.
void thread_start_team(int size);

// Cores that the CPU quota of this process's cgroup allows (a container's --cpus), rounded up; INT_MAX: no quota. root:
// before the paths of /proc and /sys, "" but in tests.
int thread_quota(const char *root);
