#include "text/sources.h"
#include "base/files.h"

#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#define BLANKS " \t\n"

// Cuts the next word off a value in place. Returns NULL if no word is left.
static char *next_word(char **rest) {
    char *word = *rest + strspn(*rest, BLANKS), *from = word, *to = word;
    if (!*word) return NULL;
    for (; *from && !strchr(BLANKS, *from); from++) {
        if (from[0] == '\\' && from[1] == ' ') from++;
        *to++ = *from;
    }
    *rest = from + (*from != 0);
    *to = 0;
    return word;
}

// Adds the files that match a pattern. The name of an existing file is no pattern, even with '*' or '['.
static int add_matches(DatasetSource *s, const char *pattern, Error *e) {
    struct stat st;
    char literal[2 * PATH_MAX], *to = literal; // a pattern that matches only this name
    bool exists = stat(pattern, &st) == 0;
    for (const char *c = pattern; exists && *c; *to++ = *c++)
        if (strchr("*?[\\", *c)) *to++ = '\\';
    *to = 0;
    int failure = glob(exists ? literal : pattern, s->found.gl_pathv ? GLOB_APPEND : 0, NULL, &s->found);
    if (failure == GLOB_NOMATCH)
        return FAIL(e, ERR_INPUT, "check the path; make shards with data/tokenize (or llm.c's scripts)",
                    "%s: no such file", pattern);
    if (failure)
        return FAIL(e, failure == GLOB_NOSPACE ? ERR_MEMORY : ERR_INPUT, "check its permissions", "%s: cannot list",
                    pattern);
    return 0;
}

static int compare_paths(const void *a, const void *b) { return strcmp(*(char *const *)a, *(char *const *)b); }

// ---- The value ------------------------------------------------------------------------------------------------------

// Adds the files of a word: WORD or WORD:WEIGHT.
static int add_word(Sources *out, char *word, Error *e) {
    char *colon = file_exists(word) ? NULL : strrchr(word, ':'), *end;
    double weight = colon ? strtod(colon + 1, &end) : 0;
    bool weighted = colon && end > colon + 1 && !*end; // false: a colon is part of the name
    if (weighted && !(weight > 0 && weight < 1e300))   // the sum must not overflow
        return FAIL(e, ERR_USAGE, "give a number above 0, or leave that source out",
                    "%s: the weight of a source is not above 0, or too large", word);
    if (weighted) *colon = 0;
    if (out->count && weighted != (out->source[0].weight > 0))
        return FAIL(e, ERR_USAGE, "give each a weight, as in 'a*.bin:0.7 b*.bin:0.3', or none",
                    "%s: it has %s weight, and the sources before it have %s", word, weighted ? "a" : "no",
                    weighted ? "none" : "one");
    DatasetSource *s = weighted ? &out->source[out->count++] : out->source;
    if (!weighted) out->count = 1;
    s->files = weighted ? word : out->value;
    s->weight = weighted ? weight : 0;
    return add_matches(s, word, e);
}

int sources_find(Sources *out, const char *value, Error *e) {
    int code = 0;
    *out = (Sources){0};
    size_t bytes = strlen(value) + 1;
    TRY_GOTO(memory_alloc((void **)&out->value, 2 * bytes, "the names of shards", e));
    TRY_GOTO(memory_alloc_zero((void **)&out->source, (bytes / 2 + 1) * sizeof(DatasetSource), "sources", e));
    char *rest = out->value + bytes, *word;
    memcpy(out->value, value, bytes);
    memcpy(rest, value, bytes);
    out->source->files = out->value;
    out->count = 1;
    code = add_matches(out->source, value, e); // first try the value as one word
    if (code && (word = next_word(&rest))) {
        out->count = 0;
        for (code = 0; word && !code; word = next_word(&rest)) code = add_word(out, word, e);
    }
    if (code == ERR_INPUT && strpbrk(value, BLANKS))
        error_hint(e, "check the path; a blank in a name is written '\\ '");
    for (int i = 0; i < out->count && !code; i++) { // sort the paths; move duplicates to the end
        DatasetSource *s = &out->source[i];
        s->path = s->found.gl_pathv;
        out->weights += s->weight;
        qsort(s->path, s->found.gl_pathc, sizeof *s->path, compare_paths);
        for (size_t k = 0; k < s->found.gl_pathc; k++) {
            char *path = s->path[k];
            if (s->shards && strcmp(s->path[s->shards - 1], path) == 0) continue;
            s->path[k] = s->path[s->shards];
            s->path[s->shards++] = path;
        }
    }
done:
    if (code) sources_free(out);
    return code;
}

void sources_free(Sources *sources) {
    for (int i = 0; i < sources->count; i++) globfree(&sources->source[i].found);
    memory_free(sources->source);
    memory_free(sources->value);
    *sources = (Sources){0};
}
