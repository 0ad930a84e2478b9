// jsonl: one field of one line of JSON, in place.
#pragma once

#include <stddef.h>

// Decodes the string in `field` of the object on this line to the beginning of the line, *out_bytes of it. "a.b" is also
// b in the object a. Returns NULL, or what is wrong with the line.
const char *jsonl_field(char *line, size_t bytes, const char *field, size_t *out_bytes);
