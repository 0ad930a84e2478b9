#include "base/json.h"

#include "base/files.h"
#include "base/text.h"

#include <string.h>

int json_parse_text(JsonText *json, char *text, size_t bytes, size_t offset, const char *path, const char *hint,
                    Error *e) {
    // Find the first NUL, raw or as \u0000. cJSON would end a string there.
    const char *end = text;
    while (end < text + bytes && *end && strncmp(end, "\\u0000", 6) != 0) end += *end == '\\' ? 2 : 1;
    *json = (JsonText){text, bytes, NULL};
    if (end >= text + bytes) json->root = cJSON_ParseWithLengthOpts(text, bytes + 1, &end, true);
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

bool json_whole(const cJSON *item, double low, double high) {
    const double exact = 9007199254740992; // 2^53
    if (!cJSON_IsNumber(item)) return false;
    double x = item->valuedouble;
    return x >= low && x <= high && x >= -exact && x <= exact && x == (double)(int64_t)x;
}
