// text: text written through a stream into memory, and as JSON strings of valid UTF-8.
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
int text_end(Text *text, Error *e); // ERR_MEMORY where something did not fit; the text is freed then
void text_free(Text *text);         // at any time after text_begin; an empty one is fine

// Bytes of the UTF-8 character (RFC 3629) at the beginning of `bytes` bytes; 0 where there is none.
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

// The offset of the first byte that is not part of valid UTF-8, or `bytes`.
size_t utf8_invalid_at(const char *text, size_t bytes);

// The longest prefix of text[0..bytes) that ends between two characters.
size_t utf8_boundary(const char *text, size_t bytes);

// Bytes of a byte order mark that the text begins with: 3 or 0.
static inline size_t utf8_mark(const char *text, size_t bytes) {
    return bytes >= 3 && memcmp(text, "\xef\xbb\xbf", 3) == 0 ? 3 : 0;
}

// Writes a text as a JSON string (RFC 8259), in quotes; every byte that is not UTF-8 becomes U+FFFD.
void text_write_json(FILE *f, const char *text);
