// text: text as JSON strings.
#ifndef GNS_TEXT_H
#define GNS_TEXT_H

#include <stdio.h>

#ifdef __cplusplus
extern "C" {
#endif

// The text as a JSON string (RFC 8259), in quotes; bytes that are no UTF-8 (RFC 3629) become U+FFFD.
void text_write_json(FILE *f, const char *text);

#ifdef __cplusplus
}
#endif
#endif
