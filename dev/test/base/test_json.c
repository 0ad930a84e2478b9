// Places of values in random JSON texts; the test knows them because it wrote the texts.
#include "base/json.h"
#include "math/rng.h"
#include "../test.h"

#include <cjson/cJSON.h>

enum { MAX_VALUES = 400, MAX_DEPTH = 6 };

static struct {
    FILE *f;
    uint64_t seed, draws;
    size_t place[MAX_VALUES]; // of each value, in the order of the text
    int count;
} text;

static uint32_t draw(uint32_t below) { return rng_u32(text.seed, 91, text.draws++) % below; }

static void put_blanks(void) {
    static const char *const blanks[] = {"", "", "", " ", "\n  ", "\t\r\n"};
    fputs(blanks[draw(sizeof blanks / sizeof *blanks)], text.f);
}

static void put_string(void) {
    static const char *const strings[] = {"\"\"",       "\"a\"",       "\"a\\\"b\"",    "\"\\\\\"",
                                          "\"{[,:]}\"", "\"\\u00e9\"", "\"\xc3\xa9 x\""};
    fputs(strings[draw(sizeof strings / sizeof *strings)], text.f);
}

static void put_value(int depth);

static void put_children(int depth, bool object) {
    fputc(object ? '{' : '[', text.f);
    for (uint32_t i = 0, n = draw(4); i < n && text.count < MAX_VALUES; i++) {
        if (i) fputc(',', text.f);
        put_blanks();
        text.place[text.count++] = (size_t)ftell(text.f);
        if (object) {
            put_string();
            put_blanks();
            fputc(':', text.f);
            put_blanks();
        }
        put_value(depth + 1);
        put_blanks();
    }
    if (draw(3) == 0) put_blanks();
    fputc(object ? '}' : ']', text.f);
}

static void put_value(int depth) {
    static const char *const scalars[] = {"0", "-1.5e3", "true", "false", "null"};
    uint32_t kind = draw(depth == 0 ? 2 : depth < MAX_DEPTH ? 5 : 3);
    if (depth == 0 || kind > 2) put_children(depth, kind % 2 == 0);
    else if (kind == 0) put_string();
    else fputs(scalars[draw(sizeof scalars / sizeof *scalars)], text.f);
}

// The tree has the order of the text.
static void compare(const JsonText *json, const cJSON *item, int *next) {
    for (const cJSON *child = item->child; child; child = child->next) {
        size_t want = text.place[(*next)++], got = json_offset(json, child);
        CHECK(got == want, "value %d is at %zu, want %zu: %s", *next - 1, got, want, json->text);
        compare(json, child, next);
    }
}

static void test_random_texts(void) {
    int values = 0;
    for (text.seed = 1; text.seed <= 2000 && !test_state.failures; text.seed++) {
        char *bytes = NULL;
        size_t count = 0;
        int next = 0;
        text.draws = 0, text.count = 0;
        text.f = open_memstream(&bytes, &count);
        if (draw(8) == 0) fputs("\xef\xbb\xbf", text.f);
        put_blanks();
        size_t root = (size_t)ftell(text.f);
        put_value(0);
        put_blanks();
        fclose(text.f);
        JsonText json = {bytes, count, cJSON_Parse(bytes), 0};
        CHECK(json.root, "no JSON: %s", bytes);
        if (json.root) {
            CHECK(json_offset(&json, json.root) == root && json_offset(&json, NULL) == 0, "the root: %s", bytes);
            compare(&json, json.root, &next);
            CHECK(next == text.count, "%d values of %d: %s", next, text.count, bytes);
        }
        values += next;
        cJSON_Delete(json.root);
        free(bytes);
    }
    CHECK(values > 5000, "%d values only", values);
}

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
    RUN(test_random_texts);
    RUN(test_malformed);
    return test_summary();
}
