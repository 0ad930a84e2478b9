#define _POSIX_C_SOURCE 200809L
#include "base/text.h"

#include <stdlib.h>
#include <string.h>

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

size_t utf8_character(const void *at, size_t bytes) {
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
