// json: a parsed JSON file, and where in its text a value begins, so that errors can name the byte.
#pragma once

#include "base/common.h"
#include <cjson/cJSON.h>

typedef struct {
    const char *text;
    size_t bytes;
    cJSON *root;
    size_t offset; // of the text in its file
} JsonText;

// Reads and parses a file; json_free it. ERR_INPUT with this hint where the text is malformed or goes beyond its value.
int json_read(JsonText *json, const char *path, size_t max_bytes, const char *hint, Error *e);

// Parses a text from memory_alloc, which a NUL follows, and takes it over, on failure too.
int json_parse_text(JsonText *json, char *text, size_t bytes, size_t offset, const char *path, const char *hint,
                    Error *e);
void json_free(JsonText *json); // may be called again, and after a failure

// The byte of the file at which an item of the tree begins: at its name if it has one. `offset` for NULL.
size_t json_place(const JsonText *json, const cJSON *item);

// The field of an object; NULL where there is none, or the object is none.
static inline cJSON *json_get(const cJSON *object, const char *name) {
    return cJSON_GetObjectItemCaseSensitive(object, name);
}

// Is the item a whole number from `low` to `high`, and exact as a double (up to 2^53)?
bool json_whole(const cJSON *item, double low, double high);
