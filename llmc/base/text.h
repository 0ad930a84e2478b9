// text: UTF-8 and JSON.
#pragma once

#include "base/common.h"

#include <cjson/cJSON.h>
#include <string.h>

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

// Returns the offset of the first byte that is not part of valid UTF-8; `bytes` if all bytes are valid.
size_t utf8_invalid_at(const char *text, size_t bytes);

// Returns the length of text[0..bytes) without an incomplete character at its end.
size_t utf8_boundary(const char *text, size_t bytes);

// Returns 3, the length of a byte order mark, if the text begins with one; else 0.
static inline size_t utf8_mark(const char *text, size_t bytes) {
    return bytes >= 3 && memcmp(text, "\xef\xbb\xbf", 3) == 0 ? 3 : 0;
}

// Parses `bytes` bytes and a NUL. Returns NULL if they are malformed, or hold several values, a zero byte or \u0000.
cJSON *json_parse(const char *text, size_t bytes);

// Parses a file's text with json_parse, and frees the text (memory_free). If it does not parse: ERR_INPUT with `hint`,
// and *root is NULL.
int json_parse_text(cJSON **root, char *text, size_t bytes, const char *path, const char *hint, Error *e);
int json_read(cJSON **root, int dir, const char *path, size_t max_bytes, const char *hint, Error *e); // reads the file

// Returns a field of an object; NULL if it is missing, or if `object` is not an object.
static inline cJSON *json_get(const cJSON *object, const char *name) {
    return cJSON_GetObjectItemCaseSensitive(object, name);
}

// True if the item is a whole number from `low` to `high`, exact as a double (up to 2^53).
bool json_whole(const cJSON *item, double low, double high);

// Writes a text as a JSON string (RFC 8259), in quotes. Every byte that is not UTF-8 becomes U+FFFD.
void text_write_json(FILE *f, const char *text);
