// file_fault: a library to preload (LD_PRELOAD) into data/tokenize. Counts calls of renameat, unlink and fsync. Call
// number FAULT_AT, from 1, fails with EIO; with FAULT_ACTION=kill it kills the program. FAULT_NAME: count only calls
// whose path or new name contains this text; fsync has neither. Other calls of fsync return at once, since these tests
// crash the program, not the machine. For test_tokenize.py and test_recipes.sh.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

// Returns true if this call must fail. The program makes these calls on one thread.
static int strikes(const char *path) {
    static int calls;
    const char *at = getenv("FAULT_AT"), *action = getenv("FAULT_ACTION"), *name = getenv("FAULT_NAME");
    if (!at || (name && !strstr(path, name)) || ++calls != atoi(at)) return 0;
    if (action && strcmp(action, "kill") == 0) kill(getpid(), SIGKILL);
    errno = EIO;
    return 1;
}

int renameat(int from_dir, const char *from, int to_dir, const char *to) {
    return strikes(to) ? -1 : ((__typeof__(&renameat))dlsym(RTLD_NEXT, "renameat"))(from_dir, from, to_dir, to);
}

int unlink(const char *path) { return strikes(path) ? -1 : ((__typeof__(&unlink))dlsym(RTLD_NEXT, "unlink"))(path); }

int fsync(int fd) { return strikes("") ? -1 : 0; }
