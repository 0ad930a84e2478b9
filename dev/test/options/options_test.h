// options_test: parses options from a command line in one string, and from the text of a --config file.
#pragma once

#include "options/options.h"
#include "../scratch.h"

static Options o; // set by the last parse
static Error e;   // set by the last call that failed

// Parses a command line: the program's name, then words split at blanks.
static inline int parse(Options *o, const char *words, Error *e) {
    char text[8192], *argv[128];
    int argc = 0;
    snprintf(text, sizeof text, "./train_gpt2 %s", words);
    for (char *w = strtok(text, " "); w; w = strtok(NULL, " ")) argv[argc++] = w;
    memset(o, 0xff, sizeof *o); // options_parse must set every field
    return options_parse(o, argc, argv, e);
}

static inline int resolve(Options *o, const char *words, Error *e) {
    TRY(parse(o, words, e));
    return options_resolve(o, e);
}

static inline int parse_config(Options *o, const char *text, Error *e) {
    char copy[1024];
    snprintf(copy, sizeof copy, "%s", text);
    options_defaults(o);
    const OptionTable t = options_table(o);
    return rows_read_config(&t, copy, strlen(copy), "run.cfg", e);
}

// Checks options through their JSON against the values `are`, such as "lr 0.5, model 'd12'", with single quotes.
static inline void check_options(const Options *o, const char *words, const char *are) {
    char *text = NULL, wants[512], *rest = wants, json[600];
    size_t bytes;
    FILE *f = open_memstream(&text, &bytes);
    options_write_json(f, o, NULL);
    fclose(f);
    snprintf(wants, sizeof wants, "%s", are);
    for (char *c = wants; *c; c++) *c = *c == '\'' ? '"' : *c;
    for (char *want; (want = strsep(&rest, ","));) {
        want += strspn(want, " ");
        int name = (int)strcspn(want, " "), n = snprintf(json, sizeof json, "\"%.*s\":%s", name, want, want + name);
        const char *at = strstr(text, json);
        CHECK(!*want || (at && strchr(",\n", at[n])), "%s: not %s", words, json);
    }
    free(text);
}
