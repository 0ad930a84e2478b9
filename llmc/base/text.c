#include "base/text.h"

#include "base/files.h"

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
    if (n == 0 || (uint8_t)text[n - 1] < 0xC0) return bytes; // the text ends with ASCII, or is not UTF-8
    uint8_t lead = (uint8_t)text[n - 1];
    size_t length = lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : 4;
    return n - 1 + length <= bytes ? bytes : n - 1;
}

cJSON *json_parse(const char *text, size_t bytes) {
    // cJSON ends a string at \u0000, and reads malformed escapes as \u0000.
    for (const char *at = text; (at = strchr(at, '\\')) && at[1]; at += 2)
        if (strncmp(at, "\\u0000", 6) == 0 || (at[1] == 'u' && strspn(at + 2, "0123456789abcdefABCDEF") < 4))
            return NULL;
    return strlen(text) < bytes ? NULL : cJSON_ParseWithOpts(text, NULL, true);
}

int json_parse_text(cJSON **root, char *text, size_t bytes, const char *path, const char *hint, Error *e) {
    *root = json_parse(text, bytes);
    memory_free(text);
    return *root ? 0 : FAIL(e, ERR_INPUT, hint, "%s: malformed JSON", path);
}

int json_read(cJSON **root, int dir, const char *path, size_t max_bytes, const char *hint, Error *e) {
    char *text;
    size_t bytes;
    *root = NULL;
    TRY(file_read(dir, path, max_bytes, &text, &bytes, e));
    return json_parse_text(root, text, bytes, path, hint, e);
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
