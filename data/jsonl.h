// jsonl: decodes one field of one line of JSON in place.
#pragma once

#include <stddef.h>

// Writes the decoded string of `field` over the beginning of `line`, and its length to *out_bytes. `a.b` names the key
// "a.b", or b in the object a. Returns NULL, or the line's fault. line[bytes] must be writable; it becomes 0.
const char *jsonl_field(char *line, size_t bytes, const char *field, size_t *out_bytes);
