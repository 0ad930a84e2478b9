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

int pipe_open(const char *path, int *fd, Error *e) {
    struct stat st;
    *fd = STDIN_FILENO;
    if (strcmp(path, "-") == 0) return 0;
    *fd = open(path, O_RDONLY | O_CLOEXEC | O_NOCTTY | O_NONBLOCK);
    if (*fd < 0) return FAIL(e, ERR_INPUT, "check the path", "%s: cannot open: %s", path, strerror(errno));
    if (fstat(*fd, &st) == 0 && !S_ISDIR(st.st_mode) && !S_ISBLK(st.st_mode)) return 0;
    close(*fd);
    return FAIL(e, ERR_INPUT, "name a file or a pipe", "%s: neither a file nor a pipe", path);
}

static int read_all(int fd, const char *name, size_t max_bytes, FILE *out, Error *e) {
    enum { POLL_MS = 100 };
    Wait wait = {clock_seconds(), false};
    struct pollfd ready = {fd, POLLIN, 0};
    char piece[1 << 12];
    for (size_t have = 0;;) {
        ssize_t n = -1;
        if (signals_requested())
            return FAIL(e, ERR_STOPPED, "start the same command again", "%s: stopped by %s", name, signals_requested());
        wait_note(&wait, fd, name, have);
        if (poll(&ready, 1, POLL_MS) <= 0) continue;
        n = read(fd, piece, sizeof piece);
        if (n < 0 && (errno == EINTR || errno == EAGAIN)) continue;
        if (n < 0) return FAIL(e, ERR_INPUT, "check the path", "%s: cannot read: %s", name, strerror(errno));
        if (n == 0) return 0;
        have += (size_t)n;
        if (have > max_bytes)
            return FAIL(e, ERR_INPUT, "is this the right file?", "%s: more than the %zu bytes it may have", name,
                        max_bytes);
        fwrite(piece, 1, (size_t)n, out);
    }
}

int pipe_read(const char *path, size_t max_bytes, char **out, size_t *out_bytes, Error *e) {
    int fd;
    Text text;
    *out = NULL;
    TRY(pipe_open(path, &fd, e));
    int code = text_begin(&text, e);
    if (!code) code = read_all(fd, pipe_name(path), max_bytes, text.f, e);
    if (fd != STDIN_FILENO) close(fd);
    if (!code) code = text_end(&text, e);
    if (code) return text_free(&text), code;
    *out = text.text;
    *out_bytes = text.bytes;
    return 0;
}
