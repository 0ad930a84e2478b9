// json_place: where in its text a value of a parsed JSON file stands, so that an error can name the byte.
#ifndef GNS_JSON_PLACE_H
#define GNS_JSON_PLACE_H

#include <stddef.h>

struct cJSON;

// A text that cJSON has parsed, and what came of it.
typedef struct {
    const char *text;
    size_t bytes;
    const struct cJSON *root;
} JsonText;

// The byte of the text at which an item of the tree begins: with its name where it has one. 0 where it is NULL.
size_t json_place(const JsonText *json, const struct cJSON *item);

#endif
