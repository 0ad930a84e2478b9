// Malformed JSON.
#include "base/json.h"
#include "../test.h"

// A failed parse frees its text; json_free may follow.
static void test_malformed(void) {
    static const char *const texts[] = {"{\"a\": ", "{} x", ""};
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
        JsonText json;
        Error e = {0};
        char *text;
        CHECK_OK(memory_alloc((void **)&text, 8, "a text", &e), &e);
        strcpy(text, texts[i]);
        CHECK_ERROR(json_parse_text(&json, text, strlen(text), 0, "it", NULL, &e), &e, ERR_INPUT,
                    "malformed JSON at byte");
        CHECK(!json.root && !json.text && json.bytes == 0, "something is left");
        json_free(&json);
    }
}

int main(void) {
    RUN(test_malformed);
    return test_summary();
}
