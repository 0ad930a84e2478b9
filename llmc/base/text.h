// text: a text that grows through a FILE *; files and pipes that the user names; UTF-8 checks; JSON strings.
#pragma once

#include "base/common.h"

#include <string.h>

// A text that grows: text_begin, write to f, text_end, use `text`, text_free.
typedef struct {
    FILE *f;
    char *text; // after text_end: `bytes` bytes and a NUL, from malloc
    size_t bytes;
} Text;

int text_begin(Text *text, Error *e);
int text_end(Text *text, Error *e); // ERR_MEMORY if it did not fit; frees the text then
void text_free(Text *text);         // at any time after text_begin; all zero is fine

// A file or a pipe that the user names; "-" is standard input.
const char *pipe_name(const char *path); // for messages

// True if the path exists and is neither a regular file nor a directory.
bool pipe_is(const char *path);

// Reads a whole file or pipe of at most max_bytes and adds a NUL (release *out: memory_free). Waits for its end;
// ERR_STOPPED if a stop is requested meanwhile (signals.h).
int pipe_read(const char *path, size_t max_bytes, char **out, size_t *out_bytes, Error *e);

// Returns the length of the UTF-8 character (RFC 3629) at `at`, where `bytes` bytes are readable; 0: not valid.
static inline size_t utf8_character(const void *at, size_t bytes) {
    const unsigned char *s = at;
    if (bytes == 0 || (s[0] >= 0x80 && s[0] < 0xc2) || s[0] > 0xf4) return 0;
    size_t length = s[0] < 0x80 ? 1 : s[0] < 0xe0 ? 2 : s[0] < 0xf0 ? 3 : 4;
    if (length > bytes) return 0;
    for (size_t i = 1; i < length; i++)
        if ((s[i] & 0xc0) != 0x80) return 0;
    bool overlong = (s[0] == 0xe0 && s[1] < 0xa0) || (s[0] == 0xf0 && s[1] < 0x90);
    bool surrogate = s[0] == 0xed && s[1] > 0x9f, beyond = s[0] == 0xf4 && s[1] > 0x8f;
    return overlong || surrogate || beyond ? 0 : length;
}

// Returns the offset of the first byte that is not part of valid UTF-8; `bytes` if all are.
size_t utf8_invalid_at(const char *text, size_t bytes);

// Returns the length of text[0..bytes) without an incomplete character at its end.
size_t utf8_boundary(const char *text, size_t bytes);

// Returns 3, the length of a byte order mark, if the text begins with one; else 0.
static inline size_t utf8_mark(const char *text, size_t bytes) {
    return bytes >= 3 && memcmp(text, "\xef\xbb\xbf", 3) == 0 ? 3 : 0;
}

// Writes a text as a JSON string (RFC 8259), in quotes. Every byte that is not UTF-8 becomes U+FFFD.
void text_write_json(FILE *f, const char *text);
