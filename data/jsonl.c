// A strict reader of RFC 8259 that builds no tree. One pass over the line decodes the field's string to the line's
// beginning; decoded text is never longer than its source. line[bytes] = 0 ends the line; an earlier zero is an error.
//
// No library both keeps the text exactly and is fast enough. cJSON ends text at \u0000 and accepts malformed \u
// escapes. json-c silently replaces half a surrogate pair; with it, tokenizing is 28% slower on lines of 100 bytes.
// jansson reads 65 MB/s. This file reads 800 to 1200 MB/s; the tokenizer encodes 100 MB/s per thread.
#include "jsonl.h"

#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { JSON_DEPTH_MAX = 512 };

typedef struct {
    char *at;
    const char *field; // name of the member to decode to `out`; NULL: none. If the name repeats, the last counts
    char *out;
    size_t out_bytes;
    bool found;
    int depth;
} Json; // the functions below return false if the text is not JSON

static bool json_accept(Json *j, char byte) { // skips the byte if it is next
    bool next = *j->at == byte;
    j->at += next;
    return next;
}

static void json_skip_blanks(Json *j) { j->at += strspn(j->at, " \t\r"); }

static bool json_accept_token(Json *j, char byte) { // json_accept, with blanks around the byte
    json_skip_blanks(j);
    bool next = json_accept(j, byte);
    json_skip_blanks(j);
    return next;
}

static bool json_hex4(Json *j, uint32_t *out) {
    char digits[5] = "";
    if (strspn(j->at, "0123456789abcdefABCDEF") < 4) return false;
    *out = (uint32_t)strtoul(memcpy(digits, j->at, 4), NULL, 16);
    j->at += 4;
    return true;
}

// Decodes an escape. A lone surrogate becomes three bytes of invalid UTF-8, which block_parse_jsonl refuses.
static bool json_escape(Json *j, char **out) {
    static const char from[] = "\"\\/bfnrt", to[] = "\"\\/\b\f\n\r\t";
    static const uint8_t leads[] = {0, 0xC0, 0xE0, 0xF0};
    char c = *j->at;
    const char *simple = c ? strchr(from, c) : NULL;
    if (!simple && c != 'u') return false;
    j->at++;
    if (simple) return *(*out)++ = to[simple - from], true;
    uint32_t high, low;
    if (!json_hex4(j, &high)) return false;
    if (high >= 0xD800 && high < 0xDC00 && j->at[0] == '\\' && j->at[1] == 'u') {
        char *second = j->at;
        j->at += 2;
        if (!json_hex4(j, &low)) return false;
        if (low >= 0xDC00 && low < 0xE000) high = 0x10000 + ((high - 0xD800) << 10) + (low - 0xDC00);
        else j->at = second; // no pair: the second escape is decoded by itself
    }
    int more = (high >= 0x80) + (high >= 0x800) + (high >= 0x10000); // bytes after the first
    *(*out)++ = (char)(leads[more] | high >> 6 * more);
    while (more-- > 0) *(*out)++ = (char)(0x80 | (high >> 6 * more & 0x3F));
    return true;
}

// Decodes a string to `out`. `out` lies in the same buffer, at or before the string's first byte.
static bool json_string(Json *j, char *out, size_t *bytes) {
    char *start = out;
    if (!json_accept(j, '"')) return false;
    for (char c; (unsigned char)(c = *j->at) >= 0x20;) {
        j->at++;
        if (c == '"') return *bytes = (size_t)(out - start), true;
        if (c != '\\') *out++ = c;
        else if (!json_escape(j, &out)) return false;
    }
    return false; // a control character, or the line's end
}

static bool json_digits(Json *j) {
    char *start = j->at;
    j->at += strspn(j->at, "0123456789");
    return j->at > start;
}

static bool json_number(Json *j) {
    json_accept(j, '-');
    if (!json_accept(j, '0') && !json_digits(j)) return false;
    if (json_accept(j, '.') && !json_digits(j)) return false;
    if (!json_accept(j, 'e') && !json_accept(j, 'E')) return true;
    if (!json_accept(j, '+')) json_accept(j, '-');
    return json_digits(j);
}

static bool json_value(Json *j);

static bool json_member(Json *j) {
    char *key = j->at;
    size_t bytes = 0;
    if (!json_string(j, key, &bytes) || !json_accept_token(j, ':')) return false;
    const char *field = j->field;
    bool begins = field && strncmp(field, key, bytes) == 0 && !memchr(key, 0, bytes);
    if (begins && !field[bytes]) {
        j->found = *j->at == '"';
        if (j->found) return json_string(j, j->out, &j->out_bytes);
    }
    j->field = begins && field[bytes] == '.' && *j->at == '{' ? field + bytes + 1 : NULL;
    bool whole = json_value(j);
    j->field = field;
    return whole;
}

// Reads the rest of an object or an array, after its opening bracket.
static bool json_nested(Json *j, char close) {
    if (++j->depth > JSON_DEPTH_MAX) return false;
    if (!json_accept_token(j, close)) {
        do
            if (!(close == '}' ? json_member(j) : json_value(j))) return false;
        while (json_accept_token(j, ','));
        if (!json_accept(j, close)) return false;
    }
    j->depth--;
    return true;
}

static bool json_value(Json *j) { // skips a value, but decodes j->field in an object
    static const char *const words[] = {"true", "false", "null"};
    size_t ignored;
    if (json_accept(j, '{')) return json_nested(j, '}');
    if (json_accept(j, '[')) return json_nested(j, ']');
    if (*j->at == '"') return json_string(j, j->at, &ignored);
    if (*j->at == '-' || (*j->at >= '0' && *j->at <= '9')) return json_number(j);
    for (int i = 0; i < 3; i++)
        if (strncmp(j->at, words[i], strlen(words[i])) == 0) return j->at += strlen(words[i]), true;
    return false;
}

const char *jsonl_field(char *line, size_t bytes, const char *field, size_t *out_bytes) {
    Json j = {.at = line, .field = field, .out = line};
    line[bytes] = 0;
    bool object = json_accept_token(&j, '{') && json_nested(&j, '}');
    json_skip_blanks(&j);
    if (!object || j.at < line + bytes) return "is not a JSON object";
    *out_bytes = j.out_bytes;
    return j.found ? NULL : "has no string in the text field";
}
