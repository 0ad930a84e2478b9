#include "base/thread.h"

#include <fcntl.h>
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

static int team_size, kept_stderr = -1; // -1: no team is starting. Globals, as an exit handler has no argument

static void on_exit_while_starting(void) {
    Error e;
    if (kept_stderr < 0) return;
    dup2(kept_stderr, STDERR_FILENO);
    FAIL(&e, ERR_MEMORY, "use fewer --threads, a smaller OMP_STACKSIZE, or raise ulimit -u and -v",
         "cannot start %d threads", team_size);
    error_print(&e);
    _exit(ERR_MEMORY);
}

void thread_start_team(int size) {
    FILE *null = fopen("/dev/null", "we"); // hides libgomp's own message
    team_size = size;
    if (atexit(on_exit_while_starting) == 0 && null) {
        fflush(stdout); // _exit does not
        kept_stderr = fcntl(STDERR_FILENO, F_DUPFD_CLOEXEC, 0);
        if (kept_stderr >= 0) dup2(fileno(null), STDERR_FILENO);
    }
#pragma omp parallel num_threads(size)
    {
#pragma omp barrier // the compiler removes an empty region
    }
    if (kept_stderr >= 0) {
        dup2(kept_stderr, STDERR_FILENO);
        close(kept_stderr);
        kept_stderr = -1;
    }
    if (null) fclose(null);
}
