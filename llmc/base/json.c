#include "base/json.h"

#include "base/files.h"

#include <string.h>

int json_parse_text(JsonText *json, char *text, size_t bytes, size_t offset, const char *path, const char *hint,
                    Error *e) {
    const char *end = text;
    *json = (JsonText){text, bytes, cJSON_ParseWithLengthOpts(text, bytes + 1, &end, true), offset};
    if (json->root) return 0;
    FAIL(e, ERR_INPUT, hint, "%s: malformed JSON at byte %zu", path, offset + (end ? (size_t)(end - text) : 0));
    json_free(json);
    return e->code;
}

int json_read(JsonText *json, const char *path, size_t max_bytes, const char *hint, Error *e) {
    char *text;
    size_t bytes;
    TRY(file_read(path, max_bytes, &text, &bytes, e));
    return json_parse_text(json, text, bytes, 0, path, hint, e);
}

void json_free(JsonText *json) {
    cJSON_Delete(json->root);
    memory_free((char *)json->text);
    *json = (JsonText){0};
}

// Walks through the text and its tree side by side. Reads nothing beyond `end`, whatever the text.
typedef struct {
    const char *at, *end;
    const cJSON *wanted;
    const char *found; // where the wanted item begins
} Walk;

static void skip_blanks(Walk *w) {
    while (w->at < w->end && (unsigned char)*w->at <= ' ') w->at++; // cJSON takes every control byte for a blank
}

static void skip_string(Walk *w) {
    for (w->at++; w->at < w->end && *w->at != '"'; w->at++)
        if (*w->at == '\\') w->at++;
    w->at++;
}

static void walk_value(Walk *w, const cJSON *item);

static void walk_child(Walk *w, const cJSON *child, bool named) {
    skip_blanks(w);
    if (child == w->wanted) w->found = w->at;
    if (named) {
        skip_string(w);
        skip_blanks(w);
        w->at++; // the colon
    }
    walk_value(w, child);
    skip_blanks(w);
}

static void walk_value(Walk *w, const cJSON *item) {
    skip_blanks(w);
    if (w->found || w->at >= w->end) return;
    if (*w->at == '{' || *w->at == '[') {
        if (!item->child) w->at++, skip_blanks(w);
        for (const cJSON *child = item->child; child && !w->found; child = child->next) {
            w->at++; // the bracket or the comma before the child
            walk_child(w, child, cJSON_IsObject(item));
        }
        w->at++; // the closing bracket
    } else if (*w->at == '"') skip_string(w);
    else
        while (w->at < w->end && (unsigned char)*w->at > ' ' && !strchr(",]}", *w->at)) w->at++;
}

size_t json_place(const JsonText *json, const cJSON *item) {
    static const char byte_order_mark[] = "\xef\xbb\xbf"; // cJSON passes over it
    const size_t mark = sizeof byte_order_mark - 1;
    Walk w = {json->text, json->text + json->bytes, item, NULL};
    if (json->bytes >= mark && memcmp(json->text, byte_order_mark, mark) == 0) w.at += mark;
    skip_blanks(&w);
    if (item == json->root) w.found = w.at;
    else if (item && json->root) walk_value(&w, json->root);
    return json->offset + (w.found ? (size_t)(w.found - json->text) : 0);
}

bool json_whole(const cJSON *item, double low, double high) {
    const double exact = 9007199254740992; // 2^53
    if (!cJSON_IsNumber(item)) return false;
    double x = item->valuedouble;
    return x >= low && x <= high && x >= -exact && x <= exact && x == (double)(int64_t)x;
}
