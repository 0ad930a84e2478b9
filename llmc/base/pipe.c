#include "base/pipe.h"

#include "base/signals.h"
#include "base/text.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

void wait_note(Wait *wait, int fd, const char *name, size_t have) {
    const double after = 2; // s
    const char *kind = isatty(fd) ? "a terminal: Ctrl-D ends the text" : "a pipe";
    if (wait->said || clock_seconds() - wait->since < after) return;
    wait->said = true;
    if (have) fprintf(stderr, "note: waiting for the end of %s (%s); %zu bytes so far\n", name, kind, have);
    else fprintf(stderr, "note: waiting for %s (%s), which is empty so far\n", name, kind);
}

const char *pipe_name(const char *path) { return strcmp(path, "-") ? path : "standard input"; }

bool pipe_is(const char *path) {
    struct stat st;
    int failed = strcmp(path, "-") ? stat(path, &st) : fstat(STDIN_FILENO, &st);
    return !failed && !S_ISREG(st.st_mode) && !S_ISDIR(st.st_mode);
}

int pipe_read(const char *path, size_t max_bytes, char **out, size_t *out_bytes, Error *e) {
    enum { POLL_MS = 100 };
    const char *name = pipe_name(path);
    Wait wait = {clock_seconds(), false};
    char piece[1 << 12];
    int fd = STDIN_FILENO;
    struct stat st;
    Text text;
    *out = NULL;
    *out_bytes = 0;
    // O_NONBLOCK: opening a FIFO must not wait for its writer
    if (strcmp(path, "-")) fd = open(path, O_RDONLY | O_CLOEXEC | O_NOCTTY | O_NONBLOCK);
    if (fd < 0) return FAIL(e, ERR_INPUT, "check the path", "%s: cannot open: %s", path, strerror(errno));
    bool readable = fd == STDIN_FILENO || (fstat(fd, &st) == 0 && !S_ISDIR(st.st_mode) && !S_ISBLK(st.st_mode));
    int code = readable ? text_begin(&text, e)
                        : FAIL(e, ERR_INPUT, "name a file or a pipe", "%s: neither a file nor a pipe", path);
    if (code) goto done;

    for (ssize_t n = 1; n != 0 && !code;) {
        struct pollfd ready = {fd, POLLIN, 0};
        if (signals_requested())
            code = FAIL(e, ERR_STOPPED, "start the same command again", "%s: %s", name, signals_requested());
        wait_note(&wait, fd, name, *out_bytes);
        if (code || poll(&ready, 1, POLL_MS) <= 0) continue;
        n = read(fd, piece, sizeof piece);
        if (n < 0 && (errno == EINTR || errno == EAGAIN)) continue;
        if (n < 0) code = FAIL(e, ERR_INPUT, "check the path", "%s: cannot read: %s", name, strerror(errno));
        else *out_bytes += fwrite(piece, 1, (size_t)n, text.f);
        if (*out_bytes > max_bytes)
            code = FAIL(e, ERR_INPUT, "is this the right file?", "%s: more than the %zu bytes it may have", name,
                        max_bytes);
    }
    if (!code) code = text_end(&text, e);
    if (code) text_free(&text);
    else *out = text.text;
done:
    if (fd != STDIN_FILENO) close(fd);
    return code;
}
