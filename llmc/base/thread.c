#include "base/thread.h"

#include <signal.h>
#include <string.h>

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
