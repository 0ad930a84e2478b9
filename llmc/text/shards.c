#include "text/shards.h"
#include "math/mixture.h"
#include "math/permutation.h"

#include <assert.h>
#include <limits.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "shards are little-endian and read as they are");

enum {
    KEEP_OPEN_MAX = 256,                // with more shards every read opens its file, since descriptors are limited
    CHECK_AT_OPEN_BYTES = 64 * 1000000, // check all tokens of smaller files when they are opened
    SCAN_TOKENS = 1 << 18               // tokens that shard_check reads at a time
};

#define HINT_TOKENIZE "make shards with data/tokenize (or llm.c's scripts)"
#define HINT_WEIGHTS  "'a*.bin:0.7 b*.bin:0.3'"
#define BLANKS        " \t\n"

// ---- The files that --train or --val names --------------------------------------------------------------------------

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
    const char *colon = strrchr(path_name(pattern), ':');
    if (failure == GLOB_NOMATCH && colon)
        return FAIL(e, ERR_INPUT, "check the path; a weight is a number above 0, as in " HINT_WEIGHTS,
                    "%s: no such file, and '%s' is no weight", pattern, colon + 1);
    if (failure == GLOB_NOMATCH)
        return FAIL(e, ERR_INPUT, "check the path; " HINT_TOKENIZE, "%s: no such file", pattern);
    if (failure)
        return FAIL(e, failure == GLOB_NOSPACE ? ERR_MEMORY : ERR_INPUT, "check its permissions", "%s: cannot list",
                    pattern);
    return 0;
}

static int compare_paths(const void *a, const void *b) { return strcmp(*(char *const *)a, *(char *const *)b); }

// Adds the files of a word: WORD or WORD:WEIGHT.
static int add_word(Dataset *data, char *word, Error *e) {
    char *colon = file_exists(word) ? NULL : strrchr(word, ':'), *end;
    double weight = colon ? strtod(colon + 1, &end) : 0;
    bool weighted = colon && end > colon + 1 && !*end; // false: a colon is part of the name
    if (weighted && !(weight > 0 && weight < 1e300))   // the sum must not overflow
        return FAIL(e, ERR_USAGE, "give a number above 0, or leave that source out",
                    "%s: the weight of a source is not above 0, or too large", word);
    if (weighted) *colon = 0;
    if (data->info.sources && weighted != (data->info.weights > 0))
        return FAIL(e, ERR_USAGE, "give each a weight, as in " HINT_WEIGHTS ", or none",
                    "%s: it has %s weight, and the sources before it have %s", word, weighted ? "a" : "no",
                    weighted ? "none" : "one");
    DatasetSource *s = weighted ? &data->source[data->info.sources++] : data->source;
    if (!weighted) data->info.sources = 1;
    s->files = weighted ? word : data->value;
    s->weight = weighted ? weight : 0;
    data->info.weights += s->weight;
    return add_matches(s, word, e);
}

// Finds the sources that a value names.
static int sources_find(Dataset *data, const char *value, Error *e) {
    size_t bytes = strlen(value) + 1;
    TRY(memory_alloc((void **)&data->value, 2 * bytes, "the names of shards", e));
    TRY(memory_alloc_zero((void **)&data->source, (bytes / 2 + 1) * sizeof *data->source, "sources", e));
    char *rest = data->value + bytes, *word;
    memcpy(data->value, value, bytes);
    memcpy(rest, value, bytes);
    data->source->files = data->value;
    data->info.sources = 1;
    int code = add_matches(data->source, value, e); // first try the value as one word
    if (code && (word = next_word(&rest))) {
        data->info.sources = 0;
        for (code = 0; word && !code; word = next_word(&rest)) code = add_word(data, word, e);
    }
    if (code == ERR_INPUT && strpbrk(value, BLANKS))
        error_hint(e, "check the path; a blank in a name is written '\\ '");
    for (int i = 0; i < data->info.sources && !code; i++) { // sort the paths; move duplicates to the end
        DatasetSource *s = &data->source[i];
        char **path = s->found.gl_pathv;
        qsort(path, s->found.gl_pathc, sizeof *path, compare_paths);
        for (size_t k = 0; k < s->found.gl_pathc; k++) {
            char *found = path[k];
            if (s->shards && strcmp(path[s->shards - 1], found) == 0) continue;
            path[k] = path[s->shards];
            path[s->shards++] = found;
        }
    }
    return code;
}

// ---- A shard --------------------------------------------------------------------------------------------------------

// Reads tokens [at, at + count). If the file has shrunk, this fails; a memory map would raise SIGBUS.
static int shard_read(const Shard *shard, uint64_t at, size_t count, uint16_t *out, Error *e) {
    int fd = shard->fd;
    uint64_t bytes;
    if (fd < 0) TRY(file_open_input(IN_PATH, shard->path, &fd, &bytes, e));
    int code = file_read_range(fd, shard->path, SHARD_HEADER_BYTES + 2 * at, out, 2 * count, e);
    if (fd != shard->fd) close(fd);
    return code;
}

// Reads tokens [at, at + count), and raises *largest to their maximum. Fails if one is outside the vocabulary.
static int tokens_read(const Dataset *data, const Shard *shard, uint64_t at, size_t count, uint16_t *out, int *largest,
                       Error *e) {
    uint16_t most = 0;
    TRY(shard_read(shard, at, count, out, e));
    for (size_t i = 0; i < count; i++) most = out[i] > most ? out[i] : most; // compilers vectorise this loop
    if (most > *largest) *largest = most;
    if (most < data->vocab_size) return 0;
    for (; *out < data->vocab_size; out++) at++;
    return FAIL(e, ERR_INPUT,
                "the shard was made with another tokenizer, or is damaged: see --vocab-size, or tokenize again",
                "%s: token %d at position %llu, byte %llu, is outside the vocabulary of %d", shard->path, *out,
                (unsigned long long)at, (unsigned long long)(SHARD_HEADER_BYTES + 2 * at), data->vocab_size);
}

// Checks the first `end` tokens (tokens_read).
static int shard_check(const Dataset *data, const Shard *shard, uint64_t end, int *largest, Error *e) {
    uint16_t tokens[SCAN_TOKENS];
    for (uint64_t at = 0; at < end; at += SCAN_TOKENS)
        TRY(tokens_read(data, shard, at, size_min(end - at, SCAN_TOKENS), tokens, largest, e));
    return 0;
}

// ---- Opening --------------------------------------------------------------------------------------------------------

// Opens a shard. Fails if its header is wrong, or does not fit the file's size.
static int shard_open(Dataset *data, Shard *shard, Error *e) {
    const char *path = shard->path;
    int32_t header[SHARD_HEADER_INTS] = {0};
    uint64_t bytes;
    if (file_open_input(IN_PATH, path, &shard->fd, &bytes, e))
        return error_hint(e, "name the shards, for example 'DIR/*_train_*.bin'; " HINT_TOKENIZE);
    TRY(file_read_range(shard->fd, path, 0, header, size_min(bytes, sizeof header), e));
    if (header[0] != SHARD_MAGIC || header[1] != SHARD_VERSION || header[2] <= 0)
        return FAIL(
            e, ERR_INPUT, HINT_TOKENIZE,
            "%s: not a token shard (magic %d, version %d, %d tokens; want magic %d, version %d, 1 token or more)", path,
            header[0], header[1], header[2], SHARD_MAGIC, SHARD_VERSION);
    shard->tokens = (uint64_t)header[2];
    uint64_t want = SHARD_HEADER_BYTES + 2 * shard->tokens;
    if (bytes != want)
        return FAIL(e, ERR_INPUT, "copy or make the shard again",
                    "%s: %s: it ends at byte %llu, but %d tokens make %llu", path,
                    bytes < want ? "truncated" : "longer than its header says", (unsigned long long)bytes, header[2],
                    (unsigned long long)want);
    TRY(file_digest(path, &shard->digest, e));
    const uint64_t some = shard == data->shards ? 4 * SCAN_TOKENS : 0; // tokens to check in a large file
    TRY(shard_check(data, shard, bytes < CHECK_AT_OPEN_BYTES ? shard->tokens : some, &data->info.largest, e));

    uint64_t windows = (shard->tokens - 1) / (uint64_t)data->seq_len;
    shard->first_window = data->info.windows;
    data->info.windows += windows;
    data->info.tokens += shard->tokens;
    if (data->info.shards <= KEEP_OPEN_MAX) return 0;
    close(shard->fd);
    shard->fd = -1;
    return 0;
}

// Opens the shards of a source into shard[0], shard[1], ...
static int source_open(Dataset *data, DatasetSource *source, Shard *shard, Error *e) {
    uint64_t tokens = data->info.tokens;
    source->first_window = data->info.windows;
    source->share = source->weight > 0 ? source->weight / data->info.weights : 1;
    for (int i = 0; i < source->shards; i++, shard++) {
        shard->path = source->found.gl_pathv[i];
        TRY(shard_open(data, shard, e));
    }
    source->windows = data->info.windows - source->first_window;
    source->tokens = data->info.tokens - tokens;
    data->info.epoch = fmin(data->info.epoch, (double)source->windows / source->share);
    if (source->windows > 0) return 0;
    return FAIL(e, ERR_INPUT, "use a shorter --seq-len or more text",
                "%s: %llu tokens in %d file%s are too few for one window of %d + 1", source->files,
                (unsigned long long)source->tokens, source->shards, source->shards == 1 ? "" : "s", data->seq_len);
}

int dataset_open(Dataset **out, const char *files, int seq_len, int vocab_size, uint64_t seed, Error *e) {
    assert(seq_len > 0 && vocab_size > 0);
    Dataset *data;
    int code;
    size_t shards = 0, first = 0;
    double sum = 0;
    *out = NULL;
    TRY(memory_alloc_zero((void **)&data, sizeof *data, "data set", e));
    *data = (Dataset){.info.epoch = INFINITY, .seq_len = seq_len, .vocab_size = vocab_size, .seed = seed};
    TRY_GOTO(sources_find(data, files, e));
    const size_t sources = (size_t)data->info.sources;
    for (size_t s = 0; s < sources; s++) shards += (size_t)data->source[s].shards;
    size_t bytes = shards * sizeof(Shard) + sources * sizeof(double) + (sources + 1) * sizeof(uint64_t);
    TRY_GOTO(memory_alloc_zero((void **)&data->shards, bytes, "data set", e));
    data->info.shards = (int)shards;
    data->share_end = (double *)(data->shards + shards);
    data->counts = (uint64_t *)(data->share_end + sources);
    for (size_t i = 0; i < shards; i++) data->shards[i].fd = -1;
    for (size_t s = 0; s < sources; s++) {
        TRY_GOTO(source_open(data, &data->source[s], &data->shards[first], e));
        first += (size_t)data->source[s].shards;
        sum += data->source[s].weight;
        data->share_end[s] = s + 1 < sources ? sum / data->info.weights : 1;
    }
    *out = data;
done:
    if (code) dataset_close(data);
    return code;
}

void dataset_close(Dataset *data) {
    if (!data) return;
    for (int i = 0; i < data->info.shards; i++)
        if (data->shards[i].fd >= 0) close(data->shards[i].fd);
    for (int i = 0; i < data->info.sources; i++) globfree(&data->source[i].found);
    memory_free(data->shards);
    memory_free(data->source);
    memory_free(data->value);
    memory_free(data->excluded);
    memory_free(data);
}

// ---- Examples -------------------------------------------------------------------------------------------------------

// Returns n(e), the number of examples before e that belong to this source (math/mixture.h). Calls come in nearly
// ascending order, so `counts` moves from the last call's example to this one.
static uint64_t number_in_source(const Dataset *data, uint64_t example, int source) {
    uint64_t *counts = data->counts, *at = &counts[data->info.sources];
    for (; *at < example; ++*at) counts[mixture_source(data->share_end, data->seed, *at)]++;
    for (; *at > example; --*at) counts[mixture_source(data->share_end, data->seed, *at - 1)]--;
    return counts[source];
}

int dataset_example_source(const void *dataset, uint64_t example) {
    const Dataset *data = dataset;
    return data->info.sources > 1 ? mixture_source(data->share_end, data->seed, example) : 0;
}

uint64_t dataset_window_at(const Dataset *data, uint64_t example, uint64_t *shift) {
    const int most = 64; // search this many later epochs for a window that is not excluded; then accept an excluded one
    int s = dataset_example_source(data, example);
    const DatasetSource *source = &data->source[s];
    uint64_t n = data->info.sources > 1 ? number_in_source(data, example, s) : example, N = source->windows, window;
    for (int i = 0;; i++, n += N) {
        uint64_t key = permutation_key(data->seed + (uint64_t)s, n / N);
        *shift = data->shifts ? permutation_shift((uint64_t)data->seq_len, key) : 0;
        window = source->first_window + permutation_at(N, key, n % N);
        if (!data->excluded || !data->excluded[window] || i == most) return window;
    }
}

int dataset_exclude(Dataset *data, uint64_t first, uint64_t count, Error *e) {
    uint64_t shift;
    if (!data->excluded) TRY(memory_alloc_zero((void **)&data->excluded, data->info.windows, "excluded rows", e));
    for (uint64_t i = 0; i < count; i++) data->excluded[dataset_window_at(data, first + i, &shift)] = true;
    return 0;
}

// Returns where a window's tokens begin. The place's document is unknown (-1).
static ExamplePlace window_find(const Dataset *data, uint64_t window, uint64_t shift) {
    // Find the last shard with first_window <= window. It has windows: an empty shard has its successor's first_window.
    const Shard *shard = &data->shards[data->info.shards - 1];
    while (shard->first_window > window) shard--;
    const uint64_t at = (window - shard->first_window) * (uint64_t)data->seq_len + shift;
    return (ExamplePlace){shard, size_min(at, shard->tokens - (uint64_t)data->seq_len - 1), -1};
}

int dataset_place(const Dataset *data, uint64_t example, int separator, ExamplePlace *place, Error *e) {
    uint16_t tokens[1 << 17]; // the last tokens up to the example's first token
    uint64_t shift, window = dataset_window_at(data, example, &shift);
    *place = window_find(data, window, shift);
    const uint64_t end = place->offset + 1, n = size_min(end, sizeof tokens / sizeof *tokens);
    place->document = separator < 0 || n < end ? -1 : 0; // the result if no separator is among the tokens
    TRY(shard_read(place->shard, end - n, n, tokens, e));
    for (uint64_t i = 0; i < n; i++)
        if (tokens[i] == separator) place->document = (int64_t)(end - n + i);
    return 0;
}

int dataset_window(const Dataset *data, uint64_t window, uint64_t shift, uint16_t *out, Error *e) {
    assert(window < data->info.windows);
    const ExamplePlace at = window_find(data, window, shift);
    return tokens_read(data, at.shard, at.offset, (size_t)data->seq_len + 1, out, &(int){0}, e);
}

int dataset_rows(const Dataset *data, uint64_t first_example, int count, uint16_t *out, Error *e) {
    for (int i = 0; i < count; i++, out += data->seq_len + 1) {
        uint64_t shift, window = dataset_window_at(data, first_example + (uint64_t)i, &shift);
        TRY(dataset_window(data, window, shift, out, e));
    }
    return 0;
}

int dataset_check(const Dataset *data, Error *e) {
    int largest = 0;
    for (int i = 0; i < data->info.shards; i++)
        TRY(shard_check(data, &data->shards[i], data->shards[i].tokens, &largest, e));
    return 0;
}
