// json: a parsed JSON file, and where in its text a value begins, so that errors can name the byte.
#ifndef GNS_JSON_H
#define GNS_JSON_H

#include "base/common.h"

struct cJSON;

typedef struct {
    const char *text;
    size_t bytes;
    struct cJSON *root;
} JsonText;

// Reads and parses a file; json_free it. ERR_INPUT with this hint where the text is malformed or goes beyond its value.
int json_read(JsonText *json, const char *path, size_t max_bytes, const char *hint, Error *e);

// Parses a text from file_read and takes it over, on failure too.
int json_parse_text(JsonText *json, char *text, size_t bytes, const char *path, const char *hint, Error *e);
void json_free(JsonText *json); // may be called again, and after a failure

// The byte of the text at which an item of the tree begins: at its name if it has one. 0 for NULL.
size_t json_place(const JsonText *json, const struct cJSON *item);

#endif
