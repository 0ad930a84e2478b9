#include "base/common.h"

#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

// ---- Errors ---------------------------------------------------------------------------------------------------------

int error_set(Error *e, const char *file, int line, int code, const char *hint, const char *format, ...) {
    va_list args;
    va_start(args, format);
    vsnprintf(e->what, sizeof e->what, format, args);
    va_end(args);
    if (strstr(e->what, strerror(EMFILE))) hint = "raise the limit on open files: ulimit -n 4096";
    if (strstr(e->what, strerror(EFBIG))) hint = "raise the limit on the size of a file: ulimit -f unlimited";
    snprintf(e->hint, sizeof e->hint, "%s", hint ? hint : "");
    e->code = code;
    e->file = file;
    e->line = line;
    e->unreadable = false;
    return code;
}

int error_hint(Error *e, const char *format, ...) {
    va_list args;
    va_start(args, format);
    vsnprintf(e->hint, sizeof e->hint, format, args);
    va_end(args);
    return e->code;
}

int error_prefix(Error *e, const char *format, ...) {
    char old[sizeof e->what];
    snprintf(old, sizeof old, "%s", e->what);
    va_list args;
    va_start(args, format);
    vsnprintf(e->what, sizeof e->what, format, args);
    va_end(args);
    size_t used = strlen(e->what);
    snprintf(e->what + used, sizeof e->what - used, ": %s", old);
    return e->code;
}

// Control bytes become '?': messages quote user input. One write per line keeps the lines of several ranks apart.
void error_print_on(const Error *e, int rank, int ranks, const char *host) {
    char line[sizeof e->what + sizeof e->hint + 512], of[128] = "", where[160] = "";
    bool named = host && *host;
    if (ranks > 1) snprintf(of, sizeof of, " (rank %d%s%.64s)", rank, named ? " on " : "", named ? host : "");
    if (e->code == ERR_INTERNAL && e->file) snprintf(where, sizeof where, " [%.120s:%d]", e->file, e->line);
    int n = snprintf(line, sizeof line - 1, "%s%s: %s%s%s%s", e->code == ERR_STOPPED ? "stopped" : "error", of, e->what,
                     where, e->hint[0] ? ". " : "", e->hint);
    for (char *c = line; *c; c++)
        if ((unsigned char)*c < 0x20 || *c == 0x7f) *c = '?';
    strcpy(line + n, "\n");
    fflush(stdout);
    fputs(line, stderr);
    fflush(stderr);
}

// ---- Memory ---------------------------------------------------------------------------------------------------------

int memory_alloc(void **out, size_t bytes, const char *what, Error *e) {
    const size_t alignment = 64; // a cache line, and the widest vector
    if (posix_memalign(out, alignment, size_max(bytes, 1)) == 0) return 0;
    *out = NULL;
    return FAIL(e, ERR_MEMORY, "use a smaller --micro-batch, --seq-len or --model", "out of memory: %s needs %.1f MiB",
                what, (double)bytes / (1 << 20));
}

int memory_alloc_zero(void **out, size_t bytes, const char *what, Error *e) {
    TRY(memory_alloc(out, bytes, what, e));
    memset(*out, 0, bytes);
    return 0;
}

void memory_free(void *p) { free(p); }

static int text_failed(Text *text, Error *e) {
    text_free(text);
    return FAIL(e, ERR_MEMORY, "free some memory", "out of memory: a text");
}

int text_begin(Text *text, Error *e) {
    *text = (Text){0};
    text->f = open_memstream(&text->text, &text->bytes);
    return text->f ? 0 : text_failed(text, e);
}

int text_end(Text *text, Error *e) {
    bool failed = ferror(text->f);
    failed |= fclose(text->f) != 0;
    text->f = NULL;
    return failed ? text_failed(text, e) : 0;
}

void text_free(Text *text) {
    if (text->f) fclose(text->f);
    free(text->text);
    *text = (Text){0};
}

double clock_seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

void process_begin(void) {
    static char printed[1 << 16]; // holds all of --help: process_end then writes it, and reports a full disk
    for (int fd = STDIN_FILENO; fd <= STDERR_FILENO; fd++)
        if (fcntl(fd, F_GETFD) < 0) (void)!open("/dev/null", O_RDONLY); // open returns the lowest free number: fd
    setvbuf(stdout, printed, isatty(STDOUT_FILENO) ? _IOLBF : _IOFBF, sizeof printed);
}

int process_end(Error *e) {
    errno = 0;
    if (fflush(stdout) == 0 && !ferror(stdout)) return 0;
    return FAIL(e, ERR_WRITE, "send it to a disk with free space", "standard output: %s",
                errno ? strerror(errno) : "a write failed");
}
