#include "base/json.h"

#include "base/files.h"

#include <cjson/cJSON.h>
#include <string.h>

int json_parse_text(JsonText *json, char *text, size_t bytes, const char *path, const char *hint, Error *e) {
    const char *end = text;
    *json = (JsonText){text, bytes, cJSON_ParseWithLengthOpts(text, bytes + 1, &end, true)};
    if (json->root) return 0;
    FAIL(e, ERR_INPUT, hint, "%s: malformed JSON at byte %zu", path, end ? (size_t)(end - text) : 0);
    json_free(json);
    return e->code;
}

int json_read(JsonText *json, const char *path, size_t max_bytes, const char *hint, Error *e) {
    char *text;
    size_t bytes;
    TRY(file_read(path, max_bytes, &text, &bytes, e));
    return json_parse_text(json, text, bytes, path, hint, e);
}

void json_free(JsonText *json) {
    cJSON_Delete(json->root);
    memory_free((char *)json->text);
    *json = (JsonText){0}; // free again without harm
}

// A walk through the text beside the tree. The text is known to be well-formed, as cJSON sees it; all the same nothing
// behind its end is looked at.
typedef struct {
    const char *at, *end;
    const cJSON *wanted;
    const char *found; // where the wanted item begins
} Walk;

static bool is_at(const Walk *w, const char *any_of) { return w->at < w->end && *w->at && strchr(any_of, *w->at); }

// cJSON takes every control byte for a blank.
static void skip_blanks(Walk *w) {
    while (w->at < w->end && (unsigned char)*w->at <= ' ') w->at++;
}

static void skip_string(Walk *w) {
    for (w->at++; w->at < w->end && *w->at != '"'; w->at++)
        if (*w->at == '\\') w->at++;
    w->at++;
}

static void walk_value(Walk *w, const cJSON *item);

// Behind the bracket that opens it.
static void walk_children(Walk *w, const cJSON *item) {
    for (const cJSON *child = item->child; child && !w->found; child = child->next) {
        skip_blanks(w);
        if (child == w->wanted) w->found = w->at;
        if (cJSON_IsObject(item)) {
            skip_string(w);
            skip_blanks(w);
            w->at++; // the colon
        }
        walk_value(w, child);
        skip_blanks(w);
        w->at++; // the comma, or the bracket that closes it
    }
    if (!item->child) skip_blanks(w), w->at++;
}

static void walk_value(Walk *w, const cJSON *item) {
    skip_blanks(w);
    if (w->found || w->at >= w->end) return;
    if (is_at(w, "{[")) {
        w->at++;
        walk_children(w, item);
    } else if (is_at(w, "\"")) skip_string(w);
    else
        while (w->at < w->end && !is_at(w, ",]} \t\r\n")) w->at++;
}

size_t json_place(const JsonText *json, const cJSON *item) {
    static const char byte_order_mark[] = "\xef\xbb\xbf"; // cJSON passes over it
    size_t mark = strlen(byte_order_mark);
    Walk w = {json->text, json->text + json->bytes, item, NULL};
    if (json->bytes >= mark && memcmp(json->text, byte_order_mark, mark) == 0) w.at += mark;
    skip_blanks(&w);
    if (item == json->root) return (size_t)(w.at - json->text);
    if (item && json->root) walk_value(&w, json->root);
    return w.found ? (size_t)(w.found - json->text) : 0;
}
