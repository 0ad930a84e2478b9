// text: text written through a stream into memory, and as JSON strings of valid UTF-8.
#ifndef GNS_TEXT_H
#define GNS_TEXT_H

#include "base/common.h"

// A text that grows: text_begin, write to f, text_end, use `text`, text_free.
typedef struct {
    FILE *f;
    char *text; // after text_end: `bytes` bytes and a NUL, from malloc
    size_t bytes;
} Text;

int text_begin(Text *text, Error *e);
int text_end(Text *text, Error *e); // ERR_MEMORY where something did not fit; the text is freed then
void text_free(Text *text);         // at any time after text_begin; also of {0}

// Bytes of the UTF-8 character (RFC 3629) at the beginning of `bytes` bytes; 0 where there is none.
size_t utf8_character(const void *at, size_t bytes);

// Writes a text as a JSON string (RFC 8259), in quotes; every byte that is not UTF-8 becomes U+FFFD.
void text_write_json(FILE *f, const char *text);
#endif
