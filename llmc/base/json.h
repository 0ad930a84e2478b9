// json: parses a JSON file.
#pragma once

#include "base/common.h"
#include <cjson/cJSON.h>

typedef struct {
    const char *text;
    size_t bytes;
    cJSON *root;
} JsonText;

// Reads and parses a file (release: json_free). ERR_INPUT with `hint` if the text is malformed or holds several values.
int json_read(JsonText *json, const char *path, size_t max_bytes, const char *hint, Error *e);

// Parses a text: `bytes` bytes and a NUL. The text begins at byte `offset` of its file. Takes over `text` (from
// memory_alloc): frees it on failure; otherwise json_free does.
int json_parse_text(JsonText *json, char *text, size_t bytes, size_t offset, const char *path, const char *hint,
                    Error *e);
void json_free(JsonText *json); // may be called again, and after a failure

// Returns a field of an object; NULL if it is missing, or if `object` is not an object.
static inline cJSON *json_get(const cJSON *object, const char *name) {
    return cJSON_GetObjectItemCaseSensitive(object, name);
}

// True if the item is a whole number from `low` to `high`, exact as a double (up to 2^53).
bool json_whole(const cJSON *item, double low, double high);
