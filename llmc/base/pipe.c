#include "base/pipe.h"

#include "base/text.h"

#include <errno.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

const char *pipe_name(const char *path) { return strcmp(path, "-") ? path : "standard input"; }

bool pipe_is(const char *path) {
    struct stat st;
    int failed = strcmp(path, "-") ? stat(path, &st) : fstat(STDIN_FILENO, &st);
    return !failed && !S_ISREG(st.st_mode) && !S_ISDIR(st.st_mode);
}

int pipe_read(const char *path, size_t max_bytes, char **out, size_t *out_bytes, Error *e) {
    const char *name = pipe_name(path);
    char piece[1 << 12];
    FILE *f = strcmp(path, "-") ? fopen(path, "re") : stdin;
    Text text;
    *out = NULL;
    *out_bytes = 0;
    if (!f) return FAIL(e, ERR_INPUT, "check the path", "%s: cannot open: %s", path, strerror(errno));
    int code = text_begin(&text, e);
    for (size_t n = 1; !code && n > 0 && *out_bytes <= max_bytes; *out_bytes += n) {
        n = fread(piece, 1, sizeof piece, f);
        fwrite(piece, 1, n, text.f);
    }
    if (!code && ferror(f)) code = FAIL(e, ERR_INPUT, "check the path", "%s: cannot read: %s", name, strerror(errno));
    if (!code && *out_bytes > max_bytes)
        code =
            FAIL(e, ERR_INPUT, "is this the right file?", "%s: more than the %zu bytes it may have", name, max_bytes);
    if (!code) code = text_end(&text, e);
    if (code) text_free(&text);
    else *out = text.text;
    if (f != stdin) fclose(f);
    return code;
}
