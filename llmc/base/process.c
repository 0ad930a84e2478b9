#include "base/process.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <unistd.h>

void process_begin(void) {
    static char printed[1 << 16]; // more than --help: a full disk then shows in process_end, which reports it
    for (int fd = STDIN_FILENO; fd <= STDERR_FILENO; fd++)
        if (fcntl(fd, F_GETFD) < 0) (void)!open("/dev/null", O_RDONLY); // takes the lowest free number, which is fd
    setvbuf(stdout, printed, isatty(STDOUT_FILENO) ? _IOLBF : _IOFBF, sizeof printed);
}

int process_end(Error *e) {
    errno = 0;
    if (fflush(stdout) == 0 && !ferror(stdout)) return 0;
    return FAIL(e, ERR_WRITE, "send it to a disk with free space", "standard output: %s",
                errno ? strerror(errno) : "a write failed");
}
