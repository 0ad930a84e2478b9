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
