// jsonl: one field out of one line of JSON, in place.
#ifndef GNS_JSONL_H
#define GNS_JSONL_H

#include <stddef.h>

// Decodes the string in `field` of the object on this line to the line's own beginning, *out_bytes of it. NULL, or what
// is wrong with the line.
const char *jsonl_field(char *line, size_t bytes, const char *field, size_t *out_bytes);

#endif
