#include "base/process.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

int process_begin(void) {
    static char printed[1 << 16];   // more than --help: a full disk then shows in process_end, which reports it
    enum { STACK_BYTES = 1 << 18 }; // more than twice what any program uses
    struct rlimit stack;
    char line[120];
    for (int fd = STDIN_FILENO; fd <= STDERR_FILENO; fd++)
        if (fcntl(fd, F_GETFD) < 0) (void)!open("/dev/null", O_RDONLY); // takes the lowest free number, which is fd
    setvbuf(stdout, printed, isatty(STDOUT_FILENO) ? _IOLBF : _IOFBF, sizeof printed);
    if (getrlimit(RLIMIT_STACK, &stack) != 0 || stack.rlim_cur >= STACK_BYTES) return 0;
    // Not with error_print, which takes a third of the smallest stack that a program starts on (16 KiB).
    int n = snprintf(line, sizeof line,
                     "error: the stack is limited to %lld KiB, and %d KiB are needed. Raise it: ulimit -s 8192\n",
                     (long long)stack.rlim_cur >> 10, STACK_BYTES >> 10);
    (void)!write(STDERR_FILENO, line, (size_t)n);
    return ERR_MEMORY;
}

int process_end(Error *e) {
    errno = 0;
    if (fflush(stdout) == 0 && !ferror(stdout)) return 0;
    return FAIL(e, ERR_WRITE, "send it to a disk with free space", "standard output: %s",
                errno ? strerror(errno) : "a write failed");
}
