// text: text as other programs want to read it: UTF-8 without faults, and JSON strings.
#ifndef GNS_TEXT_H
#define GNS_TEXT_H

#include <stdio.h>

// Bytes that are no UTF-8 (RFC 3629) become U+FFFD.
void text_write_utf8(FILE *f, const char *text);

// The same as a JSON string (RFC 8259), in quotes.
void text_write_json(FILE *f, const char *text);
#endif
