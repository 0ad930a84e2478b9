// tokenizer_files: GPT-2's vocabulary and merges, from and to the three forms that they are found in:
//
//     vocab.json + merges.txt      Hugging Face: a JSON object {token: id}, and a line "left right" a merge, by rank
//     encoder.json + vocab.bpe     the same under OpenAI's names
//     tokenizer.json               both in one file: model.vocab, model.merges, added_tokens
//
// Tokens that were added to a vocabulary stand in tokenizer.json (added_tokens), in tokenizer_config.json
// (added_tokens_decoder) or in added_tokens.json, whatever the form of the rest.
//
// In these files a byte is written as a character of "GPT-2's alphabet": bytes that print stand for themselves (in
// Latin-1), the others, in order, for U+0100, U+0101, ...
#define _POSIX_C_SOURCE 200809L
#include "base/files.h"
#include "base/hash.h"
#include "base/json.h"
#include "text/tokenizer_impl.h"

#include <cjson/cJSON.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>

enum { FILE_BYTES_MAX = 1 << 28, ALPHABET_END = 256 + 68 }; // 68 bytes do not print

#define EOT_NAME "<|endoftext|>"

static const char *const FORMS[][2] = {
    {"vocab.json", "merges.txt"}, {"encoder.json", "vocab.bpe"}, {"tokenizer.json", "tokenizer.json"}};
enum { FORM_COUNT = sizeof FORMS / sizeof *FORMS, FORM_ONE_FILE = 2 };

// ---------------------------------------------------------------------------------------------------------------------
// The alphabet

typedef struct {
    uint16_t char_of[BYTE_VALUES];
    int16_t byte_of[ALPHABET_END]; // -1: no byte
} Alphabet;

static bool byte_prints(int b) {
    return (b >= '!' && b <= '~') || (b >= 0xA1 && b <= 0xAC) || (b >= 0xAE && b <= 0xFF);
}

static Alphabet alphabet_make(void) {
    Alphabet a;
    int next = 256;
    memset(a.byte_of, 0xFF, sizeof a.byte_of);
    for (int b = 0; b < BYTE_VALUES; b++) {
        a.char_of[b] = (uint16_t)(byte_prints(b) ? b : next++);
        a.byte_of[a.char_of[b]] = (int16_t)b;
    }
    return a;
}

// The bytes that a name stands for, in `out` (as long as the name, at most). False if a character is not of the
// alphabet: then the name is a special token's.
static bool alphabet_decode(const Alphabet *a, const char *name, size_t length, char *out, size_t *bytes) {
    const unsigned char *s = (const unsigned char *)name, *end = s + length;
    *bytes = 0;
    while (s < end) { // characters below U+0144 have one byte or two
        int c = *s++;
        if (c >= 0x80) {
            if (c > 0xC5 || c < 0xC2 || s == end || (*s & 0xC0) != 0x80) return false;
            c = (c & 0x1F) << 6 | (*s++ & 0x3F);
        }
        if (c >= ALPHABET_END || a->byte_of[c] < 0) return false;
        out[(*bytes)++] = (char)a->byte_of[c];
    }
    return true;
}

// ---------------------------------------------------------------------------------------------------------------------
// Loading

typedef struct {
    char *bytes; // NULL: no such token yet
    uint32_t length;
    uint8_t literal;
    bool added; // and to be found in text, then
    bool normalized, special;
} Entry;

// Where added tokens stand, in the order in which they are read.
static const char *const ADDED_FILES[] = {"tokenizer.json", "tokenizer_config.json", "added_tokens.json"};
static const char *const ADDED_LISTS[] = {"added_tokens", "added_tokens_decoder", NULL}; // NULL: the whole file
enum { ADDED_ARRAY, ADDED_BY_ID, ADDED_BY_NAME, ADDED_FILE_COUNT };

typedef struct {
    Tokenizer *t;
    Alphabet alphabet;
    char vocab_path[PATH_MAX], merges_path[PATH_MAX];
    char *vocab_text, *merges_text;
    size_t vocab_bytes, merges_bytes;
    cJSON *json;
    JsonText added[ADDED_FILE_COUNT]; // root NULL: no such file
    char added_path[ADDED_FILE_COUNT][PATH_MAX];
    Entry *entries; // (VOCAB_MAX)
    char *arena;    // the entries' bytes; no longer than the files together
    size_t arena_used;
    int vocab_end; // the vocabulary's own numbers are below it, and below these those of the added tokens so far
    int added_end[ADDED_FILE_COUNT];
    uint32_t *by_name; // open addressing: token + 1, or 0
    uint32_t name_mask;
} Loader;

#define HINT_GET "get the files again from where they came"

static int json_parse(Loader *l, Error *e) {
    const char *end = l->vocab_text;
    l->json = cJSON_ParseWithLengthOpts(l->vocab_text, l->vocab_bytes + 1, &end, 1);
    if (l->json && cJSON_IsObject(l->json)) return 0;
    int line = 1;
    for (const char *s = l->vocab_text; !l->json && s < end && s < l->vocab_text + l->vocab_bytes; s++)
        line += *s == '\n';
    return FAIL(e, ERR_INPUT, HINT_GET, "%s line %d: not a JSON object", l->vocab_path, line);
}

static int entry_of_number(Loader *l, const char *path, const char *name, double number, Entry **entry, Error *e) {
    if (!(number >= 0 && number < 1e9) || number != (int)number)
        return FAIL(e, ERR_INPUT, HINT_GET, "%s: the number of token '%s' is malformed", path, name);
    if (number >= VOCAB_MAX)
        return FAIL(e, ERR_INPUT, "use GPT-2's vocabulary, or one of at most 65536 tokens",
                    "%s: token '%s' is number %.0f, and shards hold 16 bits", path, name, number);
    *entry = &l->entries[(int)number];
    if ((int)number >= l->t->vocab_size) l->t->vocab_size = (int)number + 1;
    return 0;
}

static int add_entry(Loader *l, const cJSON *item, Error *e) {
    const char *name = item->string;
    Entry *entry;
    TRY(entry_of_number(l, l->vocab_path, name, cJSON_IsNumber(item) ? item->valuedouble : -1, &entry, e));
    if (entry->bytes)
        return FAIL(e, ERR_INPUT, HINT_GET, "%s: two tokens are number %.0f", l->vocab_path, item->valuedouble);
    size_t length = strlen(name), bytes = 0;
    entry->bytes = l->arena + l->arena_used;
    entry->literal = !alphabet_decode(&l->alphabet, name, length, entry->bytes, &bytes);
    if (entry->literal) memcpy(entry->bytes, name, bytes = length);
    entry->length = (uint32_t)bytes;
    l->arena_used += length;
    return 0;
}

// tokenizer.json can say more than we can do: whatever is not GPT-2's way is refused by name.
static int check_kind(const Loader *l, Error *e) {
    const cJSON *model = cJSON_GetObjectItemCaseSensitive(l->json, "model");
    const cJSON *type = cJSON_GetObjectItemCaseSensitive(model, "type");
    const cJSON *normalizer = cJSON_GetObjectItemCaseSensitive(l->json, "normalizer");
    const cJSON *before = cJSON_GetObjectItemCaseSensitive(l->json, "pre_tokenizer");
    const cJSON *kind = cJSON_GetObjectItemCaseSensitive(before, "type");
    const char *why = NULL;
    if (type && !(cJSON_IsString(type) && strcmp(type->valuestring, "BPE") == 0)) why = "its model is not BPE";
    else if (normalizer && !cJSON_IsNull(normalizer)) why = "it has a normalizer";
    else if (!cJSON_IsString(kind) || strcmp(kind->valuestring, "ByteLevel"))
        why = "its pre_tokenizer is not ByteLevel";
    else if (cJSON_IsTrue(cJSON_GetObjectItemCaseSensitive(before, "add_prefix_space"))) why = "it adds a prefix space";
    else if (cJSON_IsFalse(cJSON_GetObjectItemCaseSensitive(before, "use_regex")))
        why = "it does not split by GPT-2's pattern";
    else if (cJSON_IsTrue(cJSON_GetObjectItemCaseSensitive(model, "ignore_merges"))) why = "it ignores merges";
    return why ? FAIL(e, ERR_INPUT, "only GPT-2's kind of tokenizer is known", "%s: %s", l->vocab_path, why) : 0;
}

// Is this the name that the entry was made of?
static bool entry_has_name(const Loader *l, const Entry *entry, const char *name) {
    char decoded[1024];
    size_t length = strlen(name), bytes;
    if (length > sizeof decoded) return false;
    bool plain = !entry->literal && alphabet_decode(&l->alphabet, name, length, decoded, &bytes);
    return entry->length == (plain ? bytes : length) &&
           memcmp(entry->bytes, plain ? decoded : name, entry->length) == 0;
}

// A token behind the vocabulary, or one of it, that is found in text. flags: NULL, or the fields that say how.
static int add_added(Loader *l, const char *path, const char *name, double number, const cJSON *flags, Error *e) {
    static const char *const unknown[] = {"lstrip", "rstrip", "single_word"};
    size_t length = strlen(name);
    Entry *entry;
    TRY(entry_of_number(l, path, name, number, &entry, e));
    if (length == 0) return FAIL(e, ERR_INPUT, HINT_GET, "%s: added token %.0f has no text", path, number);
    for (size_t i = 0; i < sizeof unknown / sizeof *unknown; i++)
        if (cJSON_IsTrue(cJSON_GetObjectItemCaseSensitive(flags, unknown[i])))
            return FAIL(e, ERR_INPUT,
                        "only tokens that are found as they are written, whatever stands beside, are known",
                        "%s: added token '%s' has %s", path, name, unknown[i]);
    if (entry->bytes && !entry_has_name(l, entry, name))
        return FAIL(e, ERR_INPUT, HINT_GET, "%s: added token '%s' is number %.0f, which is another", path, name,
                    number);
    if (entry->added) return 0; // the first file that has it says how
    if (!entry->bytes) entry->bytes = l->arena + l->arena_used, l->arena_used += length;
    memcpy(entry->bytes, name, entry->length = (uint32_t)length);
    entry->literal = true;
    entry->added = strcmp(name, EOT_NAME) != 0;
    entry->normalized = !cJSON_IsFalse(cJSON_GetObjectItemCaseSensitive(flags, "normalized"));
    entry->special = cJSON_IsTrue(cJSON_GetObjectItemCaseSensitive(flags, "special"));
    return 0;
}

static double number_of(const cJSON *item) { return cJSON_IsNumber(item) ? item->valuedouble : -1; }

static double number_of_key(const char *key) {
    size_t digits = strspn(key, "0123456789");
    return digits > 0 && !key[digits] ? strtod(key, NULL) : -1;
}

// An entry of tokenizer.json's array, or of tokenizer_config.json's object, where the number is the entry's name.
static int read_added_entry(Loader *l, int file, const cJSON *item, Error *e) {
    const cJSON *content = cJSON_GetObjectItemCaseSensitive(item, "content");
    const cJSON *id = cJSON_GetObjectItemCaseSensitive(item, "id");
    if (!cJSON_IsString(content))
        return FAIL(e, ERR_INPUT, HINT_GET, "%s: an entry of %s lacks its content", l->added_path[file],
                    ADDED_LISTS[file]);
    double number = file == ADDED_BY_ID ? number_of_key(item->string) : number_of(id);
    return add_added(l, l->added_path[file], content->valuestring, number, item, e);
}

static int read_added(Loader *l, int file, Error *e) {
    const cJSON *list = l->added[file].root, *item;
    const char *path = l->added_path[file], *name = ADDED_LISTS[file];
    if (name) list = cJSON_GetObjectItemCaseSensitive(list, name);
    if (list && file == ADDED_ARRAY && !cJSON_IsArray(list))
        return FAIL(e, ERR_INPUT, HINT_GET, "%s: its %s is not an array", path, name);
    if (list && file == ADDED_BY_ID && !cJSON_IsObject(list))
        return FAIL(e, ERR_INPUT, HINT_GET, "%s: its %s is not an object", path, name);
    cJSON_ArrayForEach(item, list) {
        if (file == ADDED_BY_NAME) TRY(add_added(l, path, item->string, number_of(item), NULL, e));
        else TRY(read_added_entry(l, file, item, e));
    }
    l->added_end[file] = l->t->vocab_size;
    return 0;
}

// The files that are there, parsed.
static int open_added(Loader *l, const char *directory, Error *e) {
    for (int i = 0; i < ADDED_FILE_COUNT; i++) {
        TRY(path_join(l->added_path[i], PATH_MAX, directory, ADDED_FILES[i], e));
        if (!file_exists(l->added_path[i])) continue;
        TRY(json_read(&l->added[i], l->added_path[i], FILE_BYTES_MAX, HINT_GET, e));
        if (!cJSON_IsObject(l->added[i].root))
            return FAIL(e, ERR_INPUT, HINT_GET, "%s: not a JSON object", l->added_path[i]);
    }
    return 0;
}

static int read_vocab(Loader *l, bool one_file, Error *e) {
    const cJSON *vocab = l->json, *item;
    if (one_file) {
        TRY(check_kind(l, e));
        vocab = cJSON_GetObjectItemCaseSensitive(cJSON_GetObjectItemCaseSensitive(l->json, "model"), "vocab");
    }
    if (!cJSON_IsObject(vocab)) return FAIL(e, ERR_INPUT, HINT_GET, "%s: it has no model.vocab", l->vocab_path);
    cJSON_ArrayForEach(item, vocab) TRY(add_entry(l, item, e));
    l->vocab_end = l->t->vocab_size;
    for (int file = 0; file < ADDED_FILE_COUNT; file++) TRY(read_added(l, file, e));
    return 0;
}

// Of a name in two parts.
static uint32_t name_hash(const char *a, size_t a_bytes, const char *b, size_t b_bytes) {
    uint64_t hash = hash_bytes(hash_bytes(HASH_START, a, a_bytes), b, b_bytes);
    return (uint32_t)(hash ^ hash >> 32);
}

// The token that is a followed by b, or -1. *slot: where it is in by_name, or would be.
static int find_name(const Loader *l, const char *a, size_t a_bytes, const char *b, size_t b_bytes, uint32_t *slot) {
    for (uint32_t i = name_hash(a, a_bytes, b, b_bytes);; i++) {
        *slot = i & l->name_mask;
        if (l->by_name[*slot] == 0) return -1;
        int token = (int)l->by_name[*slot] - 1;
        const Entry *entry = &l->entries[token];
        if (entry->length == a_bytes + b_bytes && memcmp(entry->bytes, a, a_bytes) == 0 &&
            memcmp(entry->bytes + a_bytes, b, b_bytes) == 0)
            return token;
    }
}

// Of the files, the first that gives so high a number: where it is missing or a second one, that file is at fault.
static const char *path_of_token(const Loader *l, int token) {
    const char *path = l->vocab_path;
    for (int file = 0, end = l->vocab_end; end <= token; end = l->added_end[file++]) path = l->added_path[file];
    return path;
}

static int index_names(Loader *l, Error *e) {
    uint32_t slot;
    for (int token = 0; token < l->t->vocab_size; token++) {
        const Entry *entry = &l->entries[token];
        const char *path = path_of_token(l, token);
        if (!entry->bytes) return FAIL(e, ERR_INPUT, HINT_GET, "%s: token number %d is missing", path, token);
        int other = find_name(l, entry->bytes, entry->length, "", 0, &slot);
        if (other >= 0)
            return FAIL(e, ERR_INPUT, HINT_GET, "%s: tokens %d and %d are the same bytes", path, other, token);
        l->by_name[slot] = (uint32_t)token + 1;
    }
    for (int b = 0; b < BYTE_VALUES; b++) {
        char byte = (char)b;
        int token = find_name(l, &byte, 1, "", 0, &slot);
        if (token < 0)
            return FAIL(e, ERR_INPUT, "a byte-level vocabulary has all 256 bytes", "%s: byte 0x%02x is missing",
                        l->vocab_path, b);
        l->t->byte_token[b] = (uint16_t)token;
    }
    l->t->eot = find_name(l, EOT_NAME, strlen(EOT_NAME), "", 0, &slot);
    return 0;
}

// `number` counts from 1: lines of merges.txt, or elements of model.merges.
static int fail_merge(const Loader *l, int number, const char *what, const char *name, size_t length, Error *e) {
    bool lines = strcmp(l->vocab_path, l->merges_path) != 0;
    return FAIL(e, ERR_INPUT, HINT_GET, "%s %s %d: '%.*s' %s", l->merges_path, lines ? "line" : "merge", number,
                (int)size_min(length, 100), name, what);
}

static int merge_part(const Loader *l, int number, const char *name, size_t length, int *token, Error *e) {
    char decoded[1024];
    size_t bytes;
    uint32_t slot;
    bool known = length > 0 && length <= sizeof decoded && alphabet_decode(&l->alphabet, name, length, decoded, &bytes);
    *token = known ? find_name(l, decoded, bytes, "", 0, &slot) : -1;
    return *token < 0 ? fail_merge(l, number, "is not in the vocabulary", name, length, e) : 0;
}

static int add_merge(Loader *l, int number, const char *left, size_t left_length, const char *right,
                     size_t right_length, Error *e) {
    int a, b;
    uint32_t slot;
    TRY(merge_part(l, number, left, left_length, &a, e));
    TRY(merge_part(l, number, right, right_length, &b, e));
    const Entry *x = &l->entries[a], *y = &l->entries[b];
    int merged = find_name(l, x->bytes, x->length, y->bytes, y->length, &slot);
    if (merged < 0) return fail_merge(l, number, "merges to a token that the vocabulary lacks", left, left_length, e);
    if (l->t->merge_count == MERGES_MAX) return fail_merge(l, number, "is one merge too many", left, left_length, e);
    l->t->merges[l->t->merge_count++] = (Merge){(uint16_t)a, (uint16_t)b, (uint16_t)merged};
    return 0;
}

static int add_merge_line(Loader *l, int number, const char *line, size_t length, Error *e) {
    const char *space = memchr(line, ' ', length);
    if (!space || memchr(space + 1, ' ', (size_t)(line + length - space - 1)))
        return fail_merge(l, number, "is not two tokens and a space between", line, length, e);
    return add_merge(l, number, line, (size_t)(space - line), space + 1, (size_t)(line + length - space - 1), e);
}

static int read_merges_text(Loader *l, Error *e) {
    const char *line = l->merges_text, *end = line + l->merges_bytes;
    for (int number = 1; line < end; number++) {
        const char *newline = memchr(line, '\n', (size_t)(end - line));
        size_t length = (size_t)((newline ? newline : end) - line);
        if (length > 0 && line[length - 1] == '\r') length--;
        bool version = number == 1 && length >= 8 && memcmp(line, "#version", 8) == 0;
        if (length > 0 && !version) TRY(add_merge_line(l, number, line, length, e));
        line = newline ? newline + 1 : end;
    }
    return 0;
}

static int read_merges_json(Loader *l, Error *e) { // "left right", or ["left", "right"]
    const cJSON *model = cJSON_GetObjectItemCaseSensitive(l->json, "model"), *item;
    const cJSON *merges = cJSON_GetObjectItemCaseSensitive(model, "merges");
    int number = 1;
    if (!cJSON_IsArray(merges)) return FAIL(e, ERR_INPUT, HINT_GET, "%s: it has no model.merges", l->merges_path);
    cJSON_ArrayForEach(item, merges) {
        const cJSON *left = cJSON_IsArray(item) ? item->child : NULL, *right = left ? left->next : NULL;
        if (cJSON_IsString(item)) TRY(add_merge_line(l, number, item->valuestring, strlen(item->valuestring), e));
        else if (cJSON_IsString(left) && cJSON_IsString(right) && !right->next)
            TRY(add_merge(l, number, left->valuestring, strlen(left->valuestring), right->valuestring,
                          strlen(right->valuestring), e));
        else return fail_merge(l, number, "is not two tokens", "", 0, e);
        number++;
    }
    return 0;
}

static int copy_added(Loader *l, Error *e) {
    Tokenizer *t = l->t;
    for (int i = 0; i < t->vocab_size; i++) t->added_count += l->entries[i].added;
    if (t->added_count == 0) return 0;
    TRY(memory_alloc((void **)&t->added, (size_t)t->added_count * sizeof *t->added, "vocabulary", e));
    AddedToken *next = t->added;
    for (int i = 0; i < t->vocab_size; i++) {
        const Entry *entry = &l->entries[i];
        if (!entry->added) continue;
        *next++ = (AddedToken){(uint16_t)i, entry->normalized, entry->special};
        t->added_begins[entry->normalized][(uint8_t)entry->bytes[0]] = true;
    }
    return 0;
}

static int copy_tokens(Loader *l, Error *e) {
    Tokenizer *t = l->t;
    size_t at = 0, count = (size_t)t->vocab_size;
    TRY(memory_alloc((void **)&t->text, l->arena_used, "vocabulary", e));
    TRY(memory_alloc((void **)&t->start, (count + 1) * sizeof *t->start, "vocabulary", e));
    TRY(memory_alloc((void **)&t->literal, count, "vocabulary", e));
    for (size_t i = 0; i < count; i++) {
        t->start[i] = (uint32_t)at;
        t->literal[i] = l->entries[i].literal;
        memcpy(t->text + at, l->entries[i].bytes, l->entries[i].length);
        at += l->entries[i].length;
    }
    t->start[count] = (uint32_t)at;
    TRY(copy_added(l, e));
    t->is_bytes = count == BYTE_VALUES && t->merge_count == 0 && t->added_count == 0;
    for (int b = 0; b < BYTE_VALUES; b++) t->is_bytes = t->is_bytes && t->byte_token[b] == b;
    return 0;
}

static int loader_run(Loader *l, const char *directory, bool one_file, Error *e) {
    TRY(tokenizer_new(&l->t, e));
    TRY(file_read(l->vocab_path, FILE_BYTES_MAX, &l->vocab_text, &l->vocab_bytes, e));
    if (!one_file) TRY(file_read(l->merges_path, FILE_BYTES_MAX, &l->merges_text, &l->merges_bytes, e));
    TRY(json_parse(l, e));
    TRY(open_added(l, directory, e));
    TRY(memory_alloc_zero((void **)&l->entries, VOCAB_MAX * sizeof *l->entries, "vocabulary", e));
    size_t bytes = l->vocab_bytes;
    for (int i = 0; i < ADDED_FILE_COUNT; i++) bytes += l->added[i].bytes;
    TRY(memory_alloc((void **)&l->arena, bytes, "vocabulary", e));
    l->name_mask = 2 * VOCAB_MAX - 1;
    TRY(memory_alloc_zero((void **)&l->by_name, ((size_t)l->name_mask + 1) * sizeof *l->by_name, "vocabulary", e));
    TRY(memory_alloc((void **)&l->t->merges, MERGES_MAX * sizeof(Merge), "merges", e));
    TRY(read_vocab(l, one_file, e));
    TRY(index_names(l, e));
    TRY(one_file ? read_merges_json(l, e) : read_merges_text(l, e));
    TRY(copy_tokens(l, e));
    return tokenizer_index_merges(l->t, e);
}

// Which of FORMS a directory holds; a vocabulary without its merges counts, and fails with the name of what is missing.
static int find_form(const char *directory) {
    for (int pass = 0; pass < 2; pass++)
        for (int form = 0; form < FORM_COUNT; form++)
            if (directory_holds(directory, FORMS[form][0]) && (pass == 1 || directory_holds(directory, FORMS[form][1])))
                return form;
    return -1;
}

bool tokenizer_exists(const char *directory) { return find_form(directory) >= 0; }

int tokenizer_load(Tokenizer **out, const char *path, Error *e) {
    *out = NULL;
    if (strcmp(path, "bytes") == 0) return tokenizer_create_bytes(out, e);
    int form = find_form(path);
    if (form < 0)
        return FAIL(e, ERR_INPUT,
                    "say bytes, or name a directory with vocab.json + merges.txt, encoder.json + vocab.bpe "
                    "or tokenizer.json",
                    "%s: no tokenizer there", path);
    Loader l = {.alphabet = alphabet_make()};
    int code = path_join(l.vocab_path, sizeof l.vocab_path, path, FORMS[form][0], e);
    if (!code) code = path_join(l.merges_path, sizeof l.merges_path, path, FORMS[form][1], e);
    if (!code) code = loader_run(&l, path, form == FORM_ONE_FILE, e);
    cJSON_Delete(l.json);
    for (int i = 0; i < ADDED_FILE_COUNT; i++) json_free(&l.added[i]);
    memory_free(l.vocab_text);
    memory_free(l.merges_text);
    memory_free(l.entries);
    memory_free(l.arena);
    memory_free(l.by_name);
    if (code) tokenizer_destroy(l.t);
    else *out = l.t;
    return code;
}

// ---------------------------------------------------------------------------------------------------------------------
// Saving

static void put_json_byte(FILE *f, unsigned char c) {
    if (c == '"' || c == '\\') fputc('\\', f);
    if (c < 0x20) fprintf(f, "\\u%04x", c);
    else fputc(c, f);
}

static void put_token(const Tokenizer *t, const Alphabet *a, int token, bool json, FILE *f) {
    size_t bytes;
    const char *text = tokenizer_decode(t, token, &bytes);
    for (size_t i = 0; i < bytes; i++) {
        int c = t->literal[token] ? (uint8_t)text[i] : a->char_of[(uint8_t)text[i]];
        if (!t->literal[token] && c >= 0x80) fputc(0xC0 | c >> 6, f), c = 0x80 | (c & 0x3F);
        if (json) put_json_byte(f, (unsigned char)c);
        else fputc(c, f);
    }
}

static void put_vocab(const Tokenizer *t, const Alphabet *a, FILE *f) {
    for (int token = 0; token < t->vocab_size; token++) {
        fputs(token ? ", \"" : "{\"", f);
        put_token(t, a, token, true, f);
        fprintf(f, "\": %d", token);
    }
    fputs("}\n", f);
}

static void put_merges(const Tokenizer *t, const Alphabet *a, FILE *f) {
    fputs("#version: 0.2\n", f);
    for (int rank = 0; rank < t->merge_count; rank++) {
        put_token(t, a, t->merges[rank].left, false, f);
        fputc(' ', f);
        put_token(t, a, t->merges[rank].right, false, f);
        fputc('\n', f);
    }
}

static const char *json_bool(bool value) { return value ? "true" : "false"; }

static void put_added(const Tokenizer *t, const Alphabet *a, FILE *f) {
    for (int i = 0; i < t->added_count; i++) {
        const AddedToken *added = &t->added[i];
        fprintf(f, "%s\"%d\": {\"content\": \"", i ? ", " : "", added->token);
        put_token(t, a, added->token, true, f);
        fprintf(f,
                "\", \"lstrip\": false, \"normalized\": %s, \"rstrip\": false, \"single_word\": false, "
                "\"special\": %s}",
                json_bool(added->normalized), json_bool(added->special));
    }
}

static void put_config(const Tokenizer *t, const Alphabet *a, FILE *f) {
    const char *eot = t->eot >= 0 ? "\"" EOT_NAME "\"" : "null";
    fprintf(f,
            "{\"tokenizer_class\": \"GPT2Tokenizer\", \"add_prefix_space\": false, \"bos_token\": %s, "
            "\"eos_token\": %s, \"unk_token\": %s",
            eot, eot, eot);
    if (t->added_count) {
        fputs(", \"added_tokens_decoder\": {", f);
        put_added(t, a, f);
        fputs("}", f);
    }
    fputs("}\n", f);
}

typedef void (*PutFile)(const Tokenizer *, const Alphabet *, FILE *);

static int file_text(const Tokenizer *t, PutFile put, char **text, size_t *bytes, Error *e) {
    Alphabet alphabet = alphabet_make();
    FILE *f = open_memstream(text, bytes);
    if (!f) return FAIL(e, ERR_MEMORY, "free some memory", "no memory for the tokenizer's files");
    put(t, &alphabet, f);
    bool bad = ferror(f);
    if (fclose(f) == 0 && !bad) return 0;
    free(*text);
    return FAIL(e, ERR_MEMORY, "free some memory", "no memory for the tokenizer's files");
}

static int save_file(const Tokenizer *t, const char *directory, const char *name, PutFile put, Manifest *manifest,
                     Error *e) {
    char path[PATH_MAX], *text;
    size_t bytes;
    FileDigest digest;
    TRY(path_join(path, sizeof path, directory, name, e));
    TRY(file_text(t, put, &text, &bytes, e));
    int code = file_save(path, text, bytes, &digest, e);
    free(text);
    if (!code && manifest) manifest_add(manifest, name, digest);
    return code;
}

int tokenizer_save(const Tokenizer *t, const char *directory, Manifest *manifest, Error *e) {
    TRY(save_file(t, directory, "vocab.json", put_vocab, manifest, e));
    TRY(save_file(t, directory, "merges.txt", put_merges, manifest, e));
    return save_file(t, directory, "tokenizer_config.json", put_config, manifest, e);
}
