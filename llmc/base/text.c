#include "base/text.h"

#include "base/files.h"
#include "base/signals.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

const char *pipe_name(const char *path) { return strcmp(path, "-") ? path : "standard input"; }

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

cJSON *json_parse(const char *text, size_t bytes, const char **end) {
    // cJSON ends a string at \u0000, and reads malformed escapes as that.
    for (*end = text; (*end = strchr(*end, '\\')) && (*end)[1]; *end += 2)
        if (strncmp(*end, "\\u0000", 6) == 0 || ((*end)[1] == 'u' && strspn(*end + 2, "0123456789abcdefABCDEF") < 4))
            return NULL;
    *end = text + strlen(text);
    return *end < text + bytes ? NULL : cJSON_ParseWithOpts(text, end, true);
}

int json_parse_text(JsonText *json, char *text, size_t bytes, size_t offset, const char *path, const char *hint,
                    Error *e) {
    const char *end;
    *json = (JsonText){text, bytes, json_parse(text, bytes, &end)};
    if (json->root) return 0;
    FAIL(e, ERR_INPUT, hint, "%s: malformed JSON at byte %zu", path, offset + (end ? (size_t)(end - text) : 0));
    json_free(json);
    return e->code;
}

int json_read(JsonText *json, const char *path, size_t max_bytes, const char *hint, Error *e) {
    char *text;
    size_t bytes;
    TRY(file_read(IN_PATH, path, max_bytes, &text, &bytes, e));
    return json_parse_text(json, text, bytes, 0, path, hint, e);
}

void json_free(JsonText *json) {
    cJSON_Delete(json->root);
    memory_free((char *)json->text);
    *json = (JsonText){0};
}

bool json_whole(const cJSON *item, double low, double high) {
    const double exact = 9007199254740992; // 2^53
    if (!cJSON_IsNumber(item)) return false;
    double x = item->valuedouble;
    return x >= low && x <= high && x >= -exact && x <= exact && x == (double)(int64_t)x;
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
