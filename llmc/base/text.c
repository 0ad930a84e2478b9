#include "base/text.h"

#include "base/signals.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static int no_memory(Text *text, Error *e) {
    text_free(text);
    return FAIL(e, ERR_MEMORY, "free some memory", "out of memory: a text");
}

int text_begin(Text *text, Error *e) {
    *text = (Text){0};
    text->f = open_memstream(&text->text, &text->bytes);
    return text->f ? 0 : no_memory(text, e);
}

int text_end(Text *text, Error *e) {
    bool failed = ferror(text->f);
    failed |= fclose(text->f) != 0;
    text->f = NULL;
    return failed ? no_memory(text, e) : 0;
}

void text_free(Text *text) {
    if (text->f) fclose(text->f);
    free(text->text);
    *text = (Text){0};
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
    char piece[1 << 12];
    int fd = STDIN_FILENO;
    Text text;
    *out = NULL;
    *out_bytes = 0;
    // O_NONBLOCK: opening a FIFO must not wait for its writer. A signal interrupts poll, but neither open nor read.
    if (strcmp(path, "-")) fd = open(path, O_RDONLY | O_CLOEXEC | O_NOCTTY | O_NONBLOCK);
    if (fd < 0) return FAIL(e, ERR_INPUT, "check the path", "%s: cannot open: %s", path, strerror(errno));
    int code = text_begin(&text, e);
    for (ssize_t n = 1; !code && n != 0;) {
        struct pollfd ready = {fd, POLLIN, 0};
        const char *stop = signals_requested();
        if (stop) code = FAIL(e, ERR_STOPPED, "start the same command again", "%s: %s", name, stop);
        if (stop || poll(&ready, 1, POLL_MS) <= 0) continue;
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
    if (fd != STDIN_FILENO) close(fd);
    return code;
}

size_t utf8_invalid_at(const char *text, size_t bytes) {
    const uint64_t high_bits = 0x8080808080808080u;
    for (size_t at = 0, length; at < bytes; at += length) {
        uint64_t eight;
        while (at + sizeof eight <= bytes && (memcpy(&eight, text + at, sizeof eight), !(eight & high_bits)))
            at += sizeof eight;
        if (at == bytes) break;
        length = utf8_character(text + at, bytes - at);
        if (length == 0) return at;
    }
    return bytes;
}

size_t utf8_boundary(const char *text, size_t bytes) {
    size_t n = bytes;
    while (n > 0 && bytes - n < 3 && ((uint8_t)text[n - 1] & 0xC0) == 0x80) n--;
    if (n == 0 || (uint8_t)text[n - 1] < 0xC0) return bytes; // ASCII, or not UTF-8
    uint8_t lead = (uint8_t)text[n - 1];
    size_t length = lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : 4;
    return n - 1 + length <= bytes ? bytes : n - 1;
}

void text_write_json(FILE *f, const char *text) {
    fputc('"', f);
    for (size_t left = strlen(text), length; left > 0; text += length, left -= length) {
        length = utf8_character(text, left);
        if (!length) fputs("\\ufffd", f), length = 1;
        else if (*text == '"' || *text == '\\') fprintf(f, "\\%c", *text);
        else if ((unsigned char)*text < 0x20) fprintf(f, "\\u%04x", *text);
        else fwrite(text, 1, length, f);
    }
    fputc('"', f);
}
