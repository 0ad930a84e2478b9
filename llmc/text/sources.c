#include "text/sources.h"
#include "base/files.h"

#include <glob.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#define BLANKS " \t\n"

// ---- Words ----------------------------------------------------------------------------------------------------------

static int copy_string(char **out, const char *text, Error *e) {
    TRY(memory_alloc((void **)out, strlen(text) + 1, "the names of shards", e));
    strcpy(*out, text);
    return 0;
}

// Cuts the next word off a value in place. NULL: no more words.
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

// Cuts ":WEIGHT" off a word. *weight is 0 if the word has none.
static int cut_weight(char *word, double *weight, Error *e) {
    char *colon = strrchr(word, ':'), *end;
    *weight = 0;
    if (!colon || file_exists(word)) return 0;
    double x = strtod(colon + 1, &end);
    if (end == colon + 1 || *end) return 0; // the colon is part of the name
    if (!(x > 0) || !isfinite(x))
        return FAIL(e, ERR_USAGE, "give a number above 0, or leave that source out",
                    "%s: the weight of a source is not above 0", word);
    *colon = 0;
    *weight = x;
    return 0;
}

// ---- Files ----------------------------------------------------------------------------------------------------------

static int add_path(Source *s, const char *path, Error *e) {
    char **grown = realloc(s->path, ((size_t)s->count + 1) * sizeof *grown);
    if (!grown) return FAIL(e, ERR_MEMORY, NULL, "out of memory: the names of shards");
    s->path = grown;
    TRY(copy_string(&s->path[s->count], path, e));
    s->count++;
    return 0;
}

// Adds the files that match a pattern. The name of an existing file is no pattern, even with '*' or '['.
static int add_matches(Source *s, const char *pattern, Error *e) {
    struct stat st;
    glob_t found = {0};
    if (stat(pattern, &st) == 0) return add_path(s, pattern, e);
    int failure = glob(pattern, 0, NULL, &found), code = 0;
    if (failure == GLOB_NOMATCH)
        code = FAIL(e, ERR_INPUT, "check the path; make shards with data/tokenize (or llm.c's scripts)",
                    "%s: no such file", pattern);
    else if (failure)
        code = FAIL(e, failure == GLOB_NOSPACE ? ERR_MEMORY : ERR_INPUT, "check its permissions", "%s: cannot list",
                    pattern);
    for (size_t i = 0; i < found.gl_pathc && !code; i++) code = add_path(s, found.gl_pathv[i], e);
    globfree(&found);
    return code;
}

static int compare_paths(const void *a, const void *b) { return strcmp(*(char *const *)a, *(char *const *)b); }

// ---- The value ------------------------------------------------------------------------------------------------------

static int add_word(Sources *out, char *word, Error *e) {
    double weight;
    TRY(cut_weight(word, &weight, e));
    if (out->count && (weight > 0) != (out->source[0].weight > 0))
        return FAIL(e, ERR_USAGE, "give each a weight, as in 'a*.bin:0.7 b*.bin:0.3', or none",
                    "%s: it has %s weight, and the sources before it have %s", word, weight > 0 ? "a" : "no",
                    weight > 0 ? "none" : "one");
    Source *s = weight > 0 ? &out->source[out->count++] : out->source;
    if (!(weight > 0)) out->count = 1;
    s->text = weight > 0 ? word : out->value;
    s->weight = weight;
    return add_matches(s, word, e);
}

int sources_find(Sources *out, const char *value, Error *e) {
    int code = 0;
    double total = 0;
    *out = (Sources){0};
    TRY_GOTO(copy_string(&out->value, value, e));
    TRY_GOTO(copy_string(&out->words, value, e));
    TRY_GOTO(memory_alloc_zero((void **)&out->source, (strlen(value) / 2 + 1) * sizeof(Source), "sources", e));
    out->source->text = out->value;
    code = add_matches(out->source, value, e); // first try the value as one word
    if (!code) out->count = 1;
    char *rest = out->words, *word = code ? next_word(&rest) : NULL;
    for (code = word ? 0 : code; word && !code; word = next_word(&rest)) code = add_word(out, word, e);
    if (code == ERR_INPUT && strpbrk(value, BLANKS)) error_hint(e, "check the path; a blank in a name is written '\\ '");
    for (int i = 0; i < out->count && !code; i++) { // sort the paths and remove duplicates
        Source *s = &out->source[i];
        int kept = 0;
        total += s->weight;
        qsort(s->path, (size_t)s->count, sizeof *s->path, compare_paths);
        for (int k = 0; k < s->count; k++)
            if (kept && strcmp(s->path[kept - 1], s->path[k]) == 0) memory_free(s->path[k]);
            else s->path[kept++] = s->path[k];
        s->count = kept;
    }
    if (!code && !isfinite(total))
        code = FAIL(e, ERR_USAGE, "use smaller ones", "%s: the sum of the weights is too large", value);
done:
    if (code) sources_free(out);
    return code;
}

void sources_free(Sources *sources) {
    for (int i = 0; i < sources->count; i++) {
        for (int k = 0; k < sources->source[i].count; k++) memory_free(sources->source[i].path[k]);
        memory_free(sources->source[i].path);
    }
    memory_free(sources->source);
    memory_free(sources->value);
    memory_free(sources->words);
    *sources = (Sources){0};
}
