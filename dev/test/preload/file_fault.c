// file_fault: a library to preload (LD_PRELOAD) into data/tokenize, whose calls of rename, unlink and fsync it counts.
// Call number FAULT_AT, from 1, is not made: it fails with EIO or, with FAULT_ACTION=kill, is where the program dies.
// FAULT_NAME counts only calls whose path, or new name, holds this text (of fsync, none). Other calls of fsync are not
// made either: it is the program that comes to harm here, not the machine. For test_tokenize.py.
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
