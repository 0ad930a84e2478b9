#include "base/thread.h"

#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

int thread_start(pthread_t *thread, void *(*run)(void *), void *argument, const char *what, Error *e) {
    sigset_t all, before;
    sigfillset(&all);
    sigdelset(&all, SIGALRM);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int failed = pthread_create(thread, NULL, run, argument); // inherits the mask
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (!failed) return 0;
    return FAIL(e, ERR_MEMORY, "raise the limit on threads", "cannot start a thread for %s: %s", what,
                strerror(failed));
}

static int starting; // threads of a team. A global, as an exit handler has no argument

static void on_exit_while_starting(void) {
    Error e;
    if (!starting) return;
    FAIL(&e, ERR_MEMORY, "use fewer --threads, a smaller OMP_STACKSIZE, or raise ulimit -u and -v",
         "cannot start %d threads", starting);
    error_print(&e);
    _exit(ERR_MEMORY);
}

void thread_start_team(int size) {
    starting = atexit(on_exit_while_starting) == 0 ? size : 0;
#pragma omp parallel num_threads(size)
    {
#pragma omp barrier // the compiler removes an empty region
    } starting = 0;
}
