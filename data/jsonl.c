// A strict reader of RFC 8259 that builds nothing: the line is walked once, and the string that was asked for is decoded
// over the line's own beginning (it never is longer than its source).
#include "jsonl.h"

#include <stdbool.h>
#include <stdint.h>
#include <string.h>

enum { JSON_DEPTH_MAX = 512 };

typedef struct {
    char *at, *end;
    int depth;
    const char *why; // the complaint
} Json;

static bool json_fail(Json *j, const char *why) {
    if (!j->why) j->why = why;
    return false;
}

static void json_space(Json *j) {
    while (j->at < j->end && (*j->at == ' ' || *j->at == '\t' || *j->at == '\n' || *j->at == '\r')) j->at++;
}

static bool json_byte(Json *j, char byte, const char *why) {
    json_space(j);
    if (j->at == j->end || *j->at != byte) return json_fail(j, j->at == j->end ? "ends in the middle" : why);
    j->at++;
    return true;
}

static bool json_hex4(Json *j, uint32_t *out) {
    if (j->end - j->at < 4) return json_fail(j, "ends in the middle");
    *out = 0;
    for (int i = 0; i < 4; i++) {
        char c = *j->at++;
        int digit = c >= '0' && c <= '9' ? c - '0' : (c | 32) >= 'a' && (c | 32) <= 'f' ? (c | 32) - 'a' + 10 : -1;
        if (digit < 0) return json_fail(j, "has a malformed \\u escape");
        *out = *out << 4 | (uint32_t)digit;
    }
    return true;
}

// Half of a surrogate pair alone is written as the three bytes it would have: not valid UTF-8, and found out as that.
static char *json_put_utf8(char *out, uint32_t c) {
    if (c < 0x80) *out++ = (char)c;
    else if (c < 0x800) *out++ = (char)(0xC0 | c >> 6);
    else if (c < 0x10000) {
        *out++ = (char)(0xE0 | c >> 12);
        *out++ = (char)(0x80 | (c >> 6 & 0x3F));
    } else {
        *out++ = (char)(0xF0 | c >> 18);
        *out++ = (char)(0x80 | (c >> 12 & 0x3F));
        *out++ = (char)(0x80 | (c >> 6 & 0x3F));
    }
    if (c >= 0x80) *out++ = (char)(0x80 | (c & 0x3F));
    return out;
}

static bool json_escape(Json *j, char **out) {
    static const char from[] = "\"\\/bfnrt", to[] = "\"\\/\b\f\n\r\t";
    if (j->at == j->end) return json_fail(j, "ends in the middle");
    char c = *j->at++;
    const char *simple = c ? strchr(from, c) : NULL;
    if (simple) {
        *(*out)++ = to[simple - from];
        return true;
    }
    if (c != 'u') return json_fail(j, "has an unknown escape");
    uint32_t high, low;
    if (!json_hex4(j, &high)) return false;
    if (high >= 0xD800 && high < 0xDC00 && j->end - j->at >= 6 && j->at[0] == '\\' && j->at[1] == 'u') {
        char *before = j->at;
        j->at += 2;
        if (!json_hex4(j, &low)) return false;
        if (low >= 0xDC00 && low < 0xE000) high = 0x10000 + ((high - 0xD800) << 10) + (low - 0xDC00);
        else j->at = before; // the second escape stands for itself
    }
    *out = json_put_utf8(*out, high);
    return true;
}

// A string, decoded to `out`, which may lie anywhere before it in the same buffer, or be its own first byte.
static bool json_string(Json *j, char *out, size_t *bytes) {
    char *start = out;
    if (!json_byte(j, '"', "has no string where one must be")) return false;
    while (j->at < j->end) {
        char c = *j->at++;
        if (c == '"') {
            *bytes = (size_t)(out - start);
            return true;
        }
        if ((unsigned char)c < 0x20) return json_fail(j, "has a raw control character in a string");
        if (c != '\\') *out++ = c;
        else if (!json_escape(j, &out)) return false;
    }
    return json_fail(j, "ends in the middle of a string");
}

static bool json_digits(Json *j) {
    char *start = j->at;
    while (j->at < j->end && *j->at >= '0' && *j->at <= '9') j->at++;
    return j->at > start || json_fail(j, "has a malformed number");
}

static bool json_number(Json *j) {
    if (*j->at == '-') j->at++;
    if (j->at < j->end && *j->at == '0') j->at++;
    else if (!json_digits(j)) return false;
    if (j->at < j->end && *j->at == '.') {
        j->at++;
        if (!json_digits(j)) return false;
    }
    if (j->at < j->end && (*j->at | 32) == 'e') {
        j->at++;
        if (j->at < j->end && (*j->at == '+' || *j->at == '-')) j->at++;
        return json_digits(j);
    }
    return true;
}

static bool json_word(Json *j, const char *word) {
    size_t n = strlen(word);
    if ((size_t)(j->end - j->at) < n || memcmp(j->at, word, n) != 0) return json_fail(j, "is not JSON");
    j->at += n;
    return true;
}

static bool json_value(Json *j); // skips one

static bool json_array(Json *j) {
    j->at++;
    json_space(j);
    if (j->at < j->end && *j->at == ']') return j->at++, true;
    for (;;) {
        if (!json_value(j)) return false;
        json_space(j);
        if (j->at == j->end || *j->at != ',') return json_byte(j, ']', "lacks a , or ] in an array");
        j->at++;
    }
}

// Skips an object or, where out is given, decodes the string of its member `field` to it (the last, if there are two).
static bool json_object(Json *j, const char *field, char *out, size_t *bytes, bool *found) {
    if (!json_byte(j, '{', "is not a JSON object")) return false;
    json_space(j);
    if (j->at < j->end && *j->at == '}') return j->at++, true;
    for (;;) {
        size_t key_bytes = 0;
        json_space(j);
        char *key = j->at;
        if (!json_string(j, key, &key_bytes) || !json_byte(j, ':', "lacks a : behind a key")) return false;
        json_space(j);
        if (field && key_bytes == strlen(field) && memcmp(key, field, key_bytes) == 0) {
            if (j->at < j->end && *j->at != '"') return json_fail(j, "has a value that is no string in its text field");
            if (!json_string(j, out, bytes)) return false;
            *found = true;
        } else if (!json_value(j)) return false;
        json_space(j);
        if (j->at == j->end || *j->at != ',') return json_byte(j, '}', "lacks a , or } in an object");
        j->at++;
    }
}

static bool json_value(Json *j) {
    json_space(j);
    if (j->at == j->end) return json_fail(j, "ends in the middle");
    if (++j->depth > JSON_DEPTH_MAX) return json_fail(j, "is nested too deeply");
    bool ok;
    size_t ignored;
    switch (*j->at) {
    case '{': ok = json_object(j, NULL, NULL, NULL, NULL); break;
    case '[': ok = json_array(j); break;
    case '"': ok = json_string(j, j->at, &ignored); break;
    case 't': ok = json_word(j, "true"); break;
    case 'f': ok = json_word(j, "false"); break;
    case 'n': ok = json_word(j, "null"); break;
    default: ok = (*j->at == '-' || (*j->at >= '0' && *j->at <= '9')) ? json_number(j) : json_fail(j, "is not JSON");
    }
    j->depth--;
    return ok;
}

const char *jsonl_field(char *line, size_t bytes, const char *field, size_t *out_bytes) {
    Json j = {line, line + bytes, 0, NULL};
    bool found = false;
    if (!json_object(&j, field, line, out_bytes, &found)) return j.why;
    json_space(&j);
    if (j.at < j.end) return "has something behind its JSON object";
    return found ? NULL : "lacks the text field";
}
