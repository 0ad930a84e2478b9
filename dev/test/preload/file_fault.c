// file_fault: a library to preload (LD_PRELOAD) into data/tokenize. It counts calls of rename, unlink and fsync; call number
// FAULT_AT, from 1, fails with EIO; with FAULT_ACTION=kill it kills the program. FAULT_NAME counts only calls whose path, or new name, contains this text (fsync has none). All other calls of
// fsync return at once: the program fails in these tests, not the machine. For test_tokenize.py and test_recipes.sh.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

// Whether this call is to fail. The program makes such calls on one thread.
static int strikes(const char *path) {
    static int calls;
    const char *at = getenv("FAULT_AT"), *action = getenv("FAULT_ACTION"), *name = getenv("FAULT_NAME");
    if (!at || (name && !strstr(path, name)) || ++calls != atoi(at)) return 0;
    if (action && strcmp(action, "kill") == 0) kill(getpid(), SIGKILL);
    errno = EIO;
    return 1;
}

int rename(const char *from, const char *to) {
    int (*next)(const char *, const char *) = (int (*)(const char *, const char *))dlsym(RTLD_NEXT, "rename");
    return strikes(to) ? -1 : next(from, to);
}

int unlink(const char *path) {
    int (*next)(const char *) = (int (*)(const char *))dlsym(RTLD_NEXT, "unlink");
    return strikes(path) ? -1 : next(path);
}

int fsync(int fd) {
    (void)fd;
    return strikes("") ? -1 : 0;
}
