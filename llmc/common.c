#define _POSIX_C_SOURCE 200809L
#include "common.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>
#ifdef __SANITIZE_ADDRESS__
#    include <sanitizer/asan_interface.h>
#endif

// ---------------------------------------------------------------------------------------------------------------------
// Errors

int error_set(Error *e, const char *file, int line, int code, const char *hint, const char *format, ...) {
    va_list args;
    va_start(args, format);
    vsnprintf(e->what, sizeof e->what, format, args);
    va_end(args);
    snprintf(e->hint, sizeof e->hint, "%s", hint ? hint : "");
    e->code = code;
    e->file = file;
    e->line = line;
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

// User input ends up in messages: a newline or a control byte in it must not break "one clear line". And the line goes
// out in one piece, whatever other ranks have to say.
void error_print(const Error *e, int rank, int ranks) {
    char line[sizeof e->what + sizeof e->hint + 256], of[32] = "", where[160] = "";
    if (ranks > 1) snprintf(of, sizeof of, " (rank %d)", rank);
    if (e->code == ERR_INTERNAL && e->file) snprintf(where, sizeof where, " [%.120s:%d]", e->file, e->line);
    int n = snprintf(line, sizeof line, "error%s: %s%s%s%s", of, e->what, where, e->hint[0] ? ". " : "", e->hint);
    for (char *c = line; *c; c++)
        if ((unsigned char)*c < 0x20 || *c == 0x7f) *c = '?';
    line[n] = '\n';
    fflush(stdout);
    fwrite(line, 1, (size_t)n + 1, stderr);
    fflush(stderr);
}

// ---------------------------------------------------------------------------------------------------------------------
// Memory

// What is asked for is rounded up below; the sanitizer is to see a step into the rest as well.
static void forbid_rest(void *block, size_t bytes, size_t rounded) {
#ifdef __SANITIZE_ADDRESS__
    ASAN_POISON_MEMORY_REGION((char *)block + bytes, rounded - bytes);
#else
    (void)block, (void)bytes, (void)rounded;
#endif
}

int memory_alloc(void **out, size_t bytes, const char *what, Error *e) {
    const size_t alignment = 64; // a cache line, and the widest vector
    size_t rounded = round_up(bytes ? bytes : 1, alignment);
    *out = bytes <= SIZE_MAX - alignment ? aligned_alloc(alignment, rounded) : NULL;
    if (!*out)
        return FAIL(e, ERR_MEMORY, "use a smaller --micro-batch, --seq-len or --model",
                    "out of memory: %s needs %.1f MiB", what, (double)bytes / (1 << 20));
    forbid_rest(*out, bytes, rounded);
    return 0;
}

int memory_alloc_zero(void **out, size_t bytes, const char *what, Error *e) {
    TRY(memory_alloc(out, bytes, what, e));
    memset(*out, 0, bytes);
    return 0;
}

void memory_free(void *p) { free(p); }

// ---------------------------------------------------------------------------------------------------------------------
// Files

int file_read(const char *path, size_t max_bytes, char **out, size_t *out_bytes, Error *e) {
    int code = 0;
    *out = NULL;
    *out_bytes = 0;
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return FAIL(e, ERR_INPUT, "check the path", "%s: cannot open: %s", path, strerror(errno));
    struct stat st;
    if (fstat(fd, &st) != 0 || !S_ISREG(st.st_mode)) {
        code = FAIL(e, ERR_INPUT, "name a regular file", "%s: not a regular file", path);
        goto done;
    }
    if ((size_t)st.st_size > max_bytes) {
        code = FAIL(e, ERR_INPUT, "is this the right file?", "%s: %lld bytes, more than the %zu it may have", path,
                    (long long)st.st_size, max_bytes);
        goto done;
    }
    TRY_GOTO(memory_alloc((void **)out, (size_t)st.st_size + 1, path, e));
    size_t have = 0;
    while (have < (size_t)st.st_size) {
        ssize_t n = read(fd, *out + have, (size_t)st.st_size - have);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) {
            code = FAIL(e, ERR_INPUT, "check the disk", "%s: read failed at byte %zu: %s", path, have,
                        n ? strerror(errno) : "file got shorter");
            goto done;
        }
        have += (size_t)n;
    }
    (*out)[have] = 0;
    *out_bytes = have;
done:
    if (code) {
        memory_free(*out);
        *out = NULL;
    }
    close(fd);
    return code;
}

int directory_create(const char *path, Error *e) {
    char partial[PATH_MAX];
    if (strlen(path) >= sizeof partial) return FAIL(e, ERR_USAGE, "use a shorter path", "%s: path too long", path);
    for (size_t i = 1; i <= strlen(path); i++) {
        if (path[i] != '/' && path[i] != 0) continue;
        memcpy(partial, path, i);
        partial[i] = 0;
        if (mkdir(partial, 0777) == 0 || errno == EEXIST) continue;
        return FAIL(e, ERR_WRITE, "choose a directory that you may write to", "%s: cannot create: %s", partial,
                    strerror(errno));
    }
    struct stat st;
    if (stat(path, &st) != 0 || !S_ISDIR(st.st_mode))
        return FAIL(e, ERR_WRITE, "choose another path", "%s: exists and is not a directory", path);
    return 0;
}

int path_join(char *out, size_t out_bytes, const char *directory, const char *name, Error *e) {
    int n = snprintf(out, out_bytes, "%s/%s", directory, name);
    if (n < 0 || (size_t)n >= out_bytes)
        return FAIL(e, ERR_USAGE, "use a shorter path", "%s: path too long", directory);
    return 0;
}

double clock_seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}
