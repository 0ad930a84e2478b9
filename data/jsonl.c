// A strict reader of RFC 8259 that builds nothing: one pass over the line, and the string in question is decoded over the
// beginning of the line (decoded text is never longer than its source).
//
// Why not a library. A text must be kept exactly: cJSON ends it at \u0000 and reads a malformed \u escape as one; json-c
// replaces half a surrogate pair without a word, and on lines of 100 bytes costs 28% of the tokenizing speed; jansson
// reads 65 MB/s (this file 800 to 1200, one thread encodes 100).
#include "jsonl.h"

#include <stdbool.h>
#include <stdint.h>
#include <string.h>

enum { JSON_DEPTH_MAX = 512 };

typedef struct {
    char *at, *end;
    int depth;
    const char *why; // the first complaint
} Json;

static bool json_fail(Json *j, const char *why) {
    if (!j->why) j->why = j->at == j->end ? "ends in the middle" : why;
    return false;
}

static char json_peek(const Json *j) { return j->at < j->end ? *j->at : 0; }

static bool json_take(Json *j, char byte) { // if it is next
    bool taken = j->at < j->end && *j->at == byte;
    j->at += taken;
    return taken;
}

static void json_space(Json *j) {
    while (j->at < j->end && (*j->at == ' ' || *j->at == '\t' || *j->at == '\n' || *j->at == '\r')) j->at++;
}

static bool json_hex4(Json *j, uint32_t *out) {
    *out = 0;
    for (int i = 0; i < 4; i++, j->at++) {
        char c = json_peek(j);
        int digit = c >= '0' && c <= '9' ? c - '0' : (c | 32) >= 'a' && (c | 32) <= 'f' ? (c | 32) - 'a' + 10 : -1;
        if (digit < 0) return json_fail(j, "has a malformed \\u escape");
        *out = *out << 4 | (uint32_t)digit;
    }
    return true;
}

// Half of a surrogate pair becomes the three bytes that it would have: not valid UTF-8, and refused as that later.
static char *json_put_utf8(char *out, uint32_t c) {
    static const uint8_t leads[] = {0, 0xC0, 0xE0, 0xF0};
    int more = (c >= 0x80) + (c >= 0x800) + (c >= 0x10000); // bytes after the first
    *out++ = (char)(leads[more] | c >> 6 * more);
    while (more-- > 0) *out++ = (char)(0x80 | (c >> 6 * more & 0x3F));
    return out;
}

static bool json_escape(Json *j, char **out) {
    static const char from[] = "\"\\/bfnrt", to[] = "\"\\/\b\f\n\r\t";
    char c = json_peek(j);
    const char *simple = c ? strchr(from, c) : NULL;
    if (!simple && c != 'u') return json_fail(j, "has an unknown escape");
    j->at++;
    if (simple) {
        *(*out)++ = to[simple - from];
        return true;
    }
    uint32_t high, low;
    if (!json_hex4(j, &high)) return false;
    if (high >= 0xD800 && high < 0xDC00 && j->end - j->at >= 6 && j->at[0] == '\\' && j->at[1] == 'u') {
        char *second = j->at;
        j->at += 2;
        if (!json_hex4(j, &low)) return false;
        if (low >= 0xDC00 && low < 0xE000) high = 0x10000 + ((high - 0xD800) << 10) + (low - 0xDC00);
        else j->at = second; // it stands for itself
    }
    *out = json_put_utf8(*out, high);
    return true;
}

// Decodes a string to `out`, at or before the string's own first byte in the same buffer.
static bool json_string(Json *j, char *out, size_t *bytes) {
    char *start = out;
    if (!json_take(j, '"')) return json_fail(j, "has no string where one must be");
    while (j->at < j->end) {
        char c = *j->at;
        if ((unsigned char)c < 0x20) return json_fail(j, "has a raw control character in a string");
        j->at++;
        if (c == '"') {
            *bytes = (size_t)(out - start);
            return true;
        }
        if (c != '\\') *out++ = c;
        else if (!json_escape(j, &out)) return false;
    }
    return json_fail(j, NULL);
}

static bool json_digits(Json *j) {
    char *start = j->at;
    while (json_peek(j) >= '0' && json_peek(j) <= '9') j->at++;
    return j->at > start || json_fail(j, "has a malformed number");
}

static bool json_number(Json *j) {
    json_take(j, '-');
    if (!json_take(j, '0') && !json_digits(j)) return false;
    if (json_take(j, '.') && !json_digits(j)) return false;
    if (!json_take(j, 'e') && !json_take(j, 'E')) return true;
    if (!json_take(j, '+')) json_take(j, '-');
    return json_digits(j);
}

static bool json_word(Json *j, const char *word) {
    size_t n = strlen(word);
    if ((size_t)(j->end - j->at) < n || memcmp(j->at, word, n) != 0) return json_fail(j, "is not JSON");
    j->at += n;
    return true;
}

static bool json_value(Json *j); // skips one

// After an element: true where another follows, else the closing bracket is taken, or that fails.
static bool json_continues(Json *j, char close) {
    json_space(j);
    if (json_take(j, ',')) return true;
    if (!json_take(j, close)) json_fail(j, close == ']' ? "lacks a , or ] in an array" : "lacks a , or } in an object");
    return false;
}

static bool json_array(Json *j) {
    json_take(j, '[');
    json_space(j);
    if (json_take(j, ']')) return true;
    while (json_value(j) && json_continues(j, ']')) {
    }
    return !j->why;
}

// Skips an object. Where `field` is given, decodes its string to `out`; of several fields of this name, the last.
static bool json_object(Json *j, const char *field, char *out, size_t *bytes, bool *found) {
    if (!json_take(j, '{')) return json_fail(j, "is not a JSON object");
    json_space(j);
    if (json_take(j, '}')) return true;
    do {
        size_t key_bytes = 0;
        json_space(j);
        char *key = j->at;
        if (!json_string(j, key, &key_bytes)) return false;
        json_space(j);
        if (!json_take(j, ':')) return json_fail(j, "lacks a : after a key");
        json_space(j);
        if (!field || key_bytes != strlen(field) || memcmp(key, field, key_bytes) != 0) {
            if (!json_value(j)) return false;
        } else {
            if (json_peek(j) != '"') return json_fail(j, "has a value that is no string in its text field");
            if (!json_string(j, out, bytes)) return false;
            *found = true;
        }
    } while (json_continues(j, '}'));
    return !j->why;
}

static bool json_value(Json *j) {
    json_space(j);
    if (++j->depth > JSON_DEPTH_MAX) return json_fail(j, "is nested too deeply");
    char c = json_peek(j);
    size_t ignored;
    bool ok = c == '{'   ? json_object(j, NULL, NULL, NULL, NULL)
              : c == '[' ? json_array(j)
              : c == '"' ? json_string(j, j->at, &ignored)
              : c == 't' ? json_word(j, "true")
              : c == 'f' ? json_word(j, "false")
              : c == 'n' ? json_word(j, "null")
                         : (c == '-' || (c >= '0' && c <= '9') ? json_number(j) : json_fail(j, "is not JSON"));
    j->depth--;
    return ok;
}

const char *jsonl_field(char *line, size_t bytes, const char *field, size_t *out_bytes) {
    Json j = {.at = line, .end = line + bytes};
    bool found = false;
    json_space(&j);
    if (!json_object(&j, field, line, out_bytes, &found)) return j.why;
    json_space(&j);
    if (j.at < j.end) return "has something after its JSON object";
    return found ? NULL : "lacks the text field";
}
