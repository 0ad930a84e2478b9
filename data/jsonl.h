// jsonl: decodes one field of one line of JSON in place.
#pragma once

#include <stddef.h>

// Decodes the string in `field` of this line's object to the beginning of the line, and sets *out_bytes. The field
// "a.b" may also be b in the object a. Returns NULL, or what is wrong with the line.
const char *jsonl_field(char *line, size_t bytes, const char *field, size_t *out_bytes);
