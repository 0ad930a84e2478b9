// json_place: a JSON file parsed, and where in its text a value stands, so that an error can name the byte.
#ifndef GNS_JSON_PLACE_H
#define GNS_JSON_PLACE_H

#include "base/common.h"

struct cJSON;

// A text that cJSON has parsed, and what came of it.
typedef struct {
    const char *text;
    size_t bytes;
    struct cJSON *root;
} JsonText;

// A file read and parsed; json_free when it is done with. ERR_INPUT where it is malformed, with the hint.
int json_read(JsonText *json, const char *path, size_t max_bytes, const char *hint, Error *e);

// The same of a text that file_read has read already, which is this function's from here on.
int json_parse_text(JsonText *json, char *text, size_t bytes, const char *path, const char *hint, Error *e);
void json_free(JsonText *json); // of one that was freed before, or could not be parsed: nothing happens

// The byte of the text at which an item of the tree begins: with its name where it has one. 0 where it is NULL.
size_t json_place(const JsonText *json, const struct cJSON *item);

#endif
