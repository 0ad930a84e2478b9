// Tests the tokenizer and its files; merge_by_definition gives the expected tokens. test_words tests the steps before
// merges; compare_tokenizers.py tests GPT-2's vocabulary.
#include "text/tokenizer.h"
#include "random_text.h"

static Error e;

static FILE *create(const char *name) {
    FILE *f = fopen(name, "wb");
    CHECK(f, "cannot write %s", name);
    return f;
}

static void write_json(const char *name, const char *text) { // ' becomes "
    FILE *f = create(name);
    for (; *text; text++) fputc(*text == '\'' ? '"' : *text, f);
    fclose(f);
}

static void remove_files(void) {
    static const char *const names[] = {"vocab.json",        "merges.txt",     "tokenizer_config.json",
                                        "added_tokens.json", "tokenizer.json", "encoder.json",
                                        "vocab.bpe"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) unlink(names[i]);
}

static Tokenizer *load(void) {
    Tokenizer *t = NULL;
    CHECK_OK(tokenizer_load(&t, ".", &e), &e);
    return t;
}

static int save(const Tokenizer *t) {
    Manifest files = {.dir = IN_PATH};
    int code = tokenizer_save(t, 0, &files, &e);
    manifest_free(&files);
    return code;
}

// ---- Merges, against the definition ---------------------------------------------------------------------------------

enum { MERGES = 300, NAME = 64 };
typedef struct {
    char left[NAME], right[NAME]; // plain text, not GPT-2's alphabet
} NamedMerge;

// Makes a random vocabulary over a, b, c, space and the other bytes. As in training, each merge joins two existing
// tokens.
static int make_vocabulary(NamedMerge *merges) {
    static char names[MERGES + 4][NAME] = {"a", "b", "c", " "};
    int count = 4, made = 0;
    for (int tries = 0; made < MERGES && tries < 100000; tries++) {
        const char *left = names[draw((uint32_t)count)], *right = names[draw((uint32_t)count)];
        char joined[2 * NAME];
        snprintf(joined, sizeof joined, "%s%s", left, right);
        bool known = strlen(joined) > 12 || strchr(joined + 1, ' ');
        for (int i = 0; i < count && !known; i++) known = strcmp(names[i], joined) == 0;
        if (known) continue;
        strcpy(merges[made].left, left);
        strcpy(merges[made++].right, right);
        strcpy(names[count++], joined);
    }
    return made;
}

static void put_name(FILE *f, const char *name) { // in GPT-2's alphabet a space is U+0120
    for (; *name; name++) {
        if (*name == ' ') fputs("\xC4\xA0", f);
        else fputc(*name, f);
    }
}

// Writes the 256 bytes, with ids in another order, and the merged tokens.
static void put_vocab(FILE *f, const NamedMerge *merges, int count) {
    int id = 0, other = 256;
    fputs("{", f);
    for (int b = 0; b < 256; b++) {
        bool prints = (b >= '!' && b <= '~') || (b >= 0xA1 && b <= 0xAC) || b >= 0xAE;
        char name[4];
        size_t n = put_code_point(name, (uint32_t)(prints ? b : other++));
        fprintf(f, "%s\"%s%.*s\": %d", b ? ", " : "", b == '"' || b == '\\' ? "\\" : "", (int)n, name,
                (id++ * 77 + 5) % 256);
    }
    for (int i = 0; i < count; i++) {
        fputs(",\n\"", f);
        put_name(f, merges[i].left);
        put_name(f, merges[i].right);
        fprintf(f, "\": %d", id++);
    }
    fprintf(f, ", \"<|endoftext|>\": %d}", id);
}

static void put_merges(FILE *f, const NamedMerge *merges, int count, const char *before, const char *between,
                       const char *after, const char *separator) {
    for (int i = 0; i < count; i++) {
        fputs(before, f);
        put_name(f, merges[i].left);
        fputs(between, f);
        put_name(f, merges[i].right);
        fputs(after, f);
        if (i + 1 < count) fputs(separator, f);
    }
}

static void write_vocabulary(const NamedMerge *merges, int count) {
    FILE *f = create("vocab.json");
    put_vocab(f, merges, count);
    fclose(f);
    f = create("merges.txt");
    fputs("#version: 0.2\n", f);
    put_merges(f, merges, count, "", " ", "\n", "");
    fclose(f);
}

// Merges a string by definition: each merge, by rank, joins its occurrences from left to right.
static int merge_by_definition(const char *word, size_t bytes, const NamedMerge *merges, int count, char (*out)[NAME]) {
    int n = (int)bytes;
    for (int i = 0; i < n; i++) snprintf(out[i], NAME, "%c", word[i]);
    for (int rank = 0; rank < count; rank++) {
        int kept = 0;
        for (int i = 0; i < n; i++, kept++) {
            bool joins = i + 1 < n && !strcmp(out[i], merges[rank].left) && !strcmp(out[i + 1], merges[rank].right);
            if (kept != i) memcpy(out[kept], out[i], NAME);
            if (joins) strncat(out[kept], merges[rank].right, NAME - 1 - strlen(out[kept])), i++;
        }
        n = kept;
    }
    return n;
}

static void check_word(const Tokenizer *t, WordCache *cache, const char *word, size_t bytes, const NamedMerge *merges,
                       int count) {
    static char want[4096][NAME];
    static uint16_t got[4096], cached[4096];
    size_t tokens, again;
    int n = merge_by_definition(word, bytes, merges, count, want);
    CHECK_OK(tokenizer_encode(t, NULL, word, bytes, got, &tokens, &e), &e);
    CHECK_OK(tokenizer_encode(t, cache, word, bytes, cached, &again, &e), &e);
    CHECK(tokens == again && memcmp(got, cached, 2 * tokens) == 0, "the cache changes '%.*s'", (int)bytes, word);
    bool same = (int)tokens == n;
    for (int i = 0; i < n && same; i++) {
        size_t length;
        const char *text = tokenizer_decode(t, got[i], &length);
        same = length == strlen(want[i]) && memcmp(text, want[i], length) == 0;
    }
    CHECK(same, "'%.*s' becomes %zu tokens, want %d", (int)bytes, word, tokens, n);
}

static void test_merges(void) {
    for (int round = 0; round < 5; round++) {
        NamedMerge merges[MERGES];
        int count = make_vocabulary(merges);
        write_vocabulary(merges, count);
        Tokenizer *t = load();
        WordCache *cache;
        CHECK_OK(word_cache_create(&cache, &e), &e);
        CHECK(t->vocab_size == 257 + count && t->eot == 256 + count, "%d", t->vocab_size);
        char word[4096];
        for (int i = 0; i < 3000; i++) { // short words, words of about 64 bytes, long words
            size_t bytes = i % 300 == 0 ? 1000 + draw(2000) : i % 10 == 0 ? 55 + draw(20) : 1 + draw(40);
            for (size_t k = 0; k < bytes; k++) word[k] = (char)('a' + draw(i % 7 ? 3 : 1));
            if (i % 3 == 0) word[0] = ' ';
            if (i % 5 == 0 && bytes > 20) memcpy(word, "abcabbaccbacbcaabccb", 20); // a common beginning, for the cache
            if (bytes == 1) word[0] = 'a';
            check_word(t, cache, word, bytes, merges, count);
        }
        memory_free(cache);
        memory_free(t);
    }
}

static void check_round_trip(const Tokenizer *t, WordCache *cache, const char *text, size_t bytes) {
    uint16_t *tokens = malloc(2 * bytes + 2);
    char *back = malloc(bytes + 1);
    size_t count, at = 0, length;
    CHECK_OK(tokenizer_encode(t, cache, text, bytes, tokens, &count, &e), &e);
    for (size_t i = 0; i < count; i++) {
        const char *s = tokenizer_decode(t, tokens[i], &length);
        if (at + length <= bytes) memcpy(back + at, s, length);
        at += length;
    }
    CHECK(at == bytes && memcmp(back, text, bytes) == 0, "decoding %zu bytes gives %zu", bytes, at);
    // A text cut in two at a place that tokenizer_cut returns has the same tokens.
    uint16_t *parts = malloc(2 * bytes + 2);
    size_t cut = tokenizer_cut(t, text, bytes ? draw((uint32_t)bytes) + 1 : 0), first, second;
    CHECK(cut <= bytes, "cut %zu of %zu", cut, bytes);
    CHECK_OK(tokenizer_encode(t, cache, text, cut, parts, &first, &e), &e);
    CHECK_OK(tokenizer_encode(t, cache, text + cut, bytes - cut, parts + first, &second, &e), &e);
    CHECK(first + second == count && memcmp(parts, tokens, 2 * count) == 0, "cut at %zu of %zu shows", cut, bytes);
    free(tokens);
    free(parts);
    free(back);
}

static void check_round_trips(const Tokenizer *t, int texts) {
    WordCache *cache;
    CHECK_OK(word_cache_create(&cache, &e), &e);
    char *text = malloc(1 << 16);
    for (int i = 0; i < texts; i++) {
        size_t bytes = random_text(text, (int)draw(300));
        for (uint32_t damage = draw(3) ? 0 : draw(20); damage > 0 && bytes > 0; damage--) // random bytes
            text[draw((uint32_t)bytes)] = (char)draw(256);
        char *exact = malloc(bytes + 1); // so that a sanitizer sees reads past the end
        memcpy(exact, text, bytes);
        exact = realloc(exact, bytes ? bytes : 1);
        check_round_trip(t, cache, exact, bytes);
        free(exact);
    }
    free(text);
    memory_free(cache);
}

static void test_bytes(void) {
    Tokenizer *t, *loaded;
    uint16_t tokens[256];
    char all[256];
    size_t count;
    CHECK_OK(tokenizer_create_bytes(&t, &e), &e);
    CHECK_OK(tokenizer_load(&loaded, "bytes", &e), &e);
    CHECK(t->vocab_size == 256 && t->eot == -1 && loaded->is_bytes, "not bytes");
    for (int b = 0; b < 256; b++) all[b] = (char)b;
    CHECK_OK(tokenizer_encode(t, NULL, all, 256, tokens, &count, &e), &e);
    CHECK(count == 256, "%zu tokens", count);
    for (int b = 0; b < 256; b++) CHECK(tokens[b] == b, "byte %d is token %d", b, tokens[b]);
    CHECK(tokenizer_decode(t, 256, &count) && count == 0, "a token outside the vocabulary has %zu bytes", count);
    CHECK(tokenizer_decode(t, -1, &count) && count == 0, "token -1 has %zu bytes", count);
    check_round_trips(t, 500);
    CHECK_OK(save(t), &e);
    CHECK(tokenizer_exists("."), "saved, but not there");
    Tokenizer *saved = load();
    CHECK(saved->is_bytes, "bytes saved and loaded are no bytes");
    memory_free(t);
    memory_free(loaded);
    memory_free(saved);
}

static void check_same(const Tokenizer *a, const Tokenizer *b) {
    CHECK(a->vocab_size == b->vocab_size && a->eot == b->eot && a->merge_count == b->merge_count, "sizes differ");
    for (int token = 0; token < a->vocab_size && a->vocab_size == b->vocab_size; token++) {
        size_t n, m;
        const char *x = tokenizer_decode(a, token, &n), *y = tokenizer_decode(b, token, &m);
        CHECK(n == m && memcmp(x, y, n) == 0, "token %d differs", token);
    }
    CHECK(memcmp(a->merges, b->merges,
                 (size_t)size_min((size_t)a->merge_count, (size_t)b->merge_count) * sizeof(Merge)) == 0,
          "merges differ");
}

static void check_loads(const Tokenizer *want) {
    Tokenizer *t = load();
    if (t) check_same(want, t);
    memory_free(t);
}

// Forms of tokenizer.json with the same meaning as GPT-2's form.
#define BYTE_LEVEL(more) "{\"type\": \"ByteLevel\", \"add_prefix_space\": false, \"trim_offsets\": true" more "}"
#define SPLIT(regex)                                                                                                   \
    "{\"type\": \"Split\", \"pattern\": {\"Regex\": \"" regex "| ?\\\\p{L}+| ?\\\\p{N}+| "                             \
    "?[^\\\\s\\\\p{L}\\\\p{N}]+|\\\\s+(?!\\\\S)|\\\\s+\"}, \"behavior\": \"Isolated\", \"invert\": false}"
#define SEQUENCE(name, parts) "{\"type\": \"Sequence\", \"" name "\": [" parts "]}"
static const char *const same_kinds[] = {
    "\"normalizer\": null, \"pre_tokenizer\": " BYTE_LEVEL(""),
    "\"normalizer\": " SEQUENCE("normalizers", "") ", \"pre_tokenizer\": " BYTE_LEVEL(", \"use_regex\": true"),
    "\"normalizer\": " SEQUENCE("normalizers", SEQUENCE("normalizers", "")) ", \"pre_tokenizer\": " SEQUENCE(
        "pretokenizers", SEQUENCE("pretokenizers", BYTE_LEVEL(""))),
    "\"pre_tokenizer\": " SEQUENCE("pretokenizers",
                                   SPLIT("'s|'t|'re|'ve|'m|'ll|'d") ", " BYTE_LEVEL(", \"use_regex\": false")),
    "\"pre_tokenizer\": " SEQUENCE("pretokenizers",
                                   SPLIT("'(?:[sdmt]|ll|ve|re)") ", " BYTE_LEVEL(", \"use_regex\": false")),
};
enum { KINDS = sizeof same_kinds / sizeof *same_kinds };

// All forms give the same tokenizer: vocab.json + merges.txt, encoder.json + vocab.bpe, tokenizer.json with both forms
// of merges, tokenizer_save's files.
static void test_forms(void) {
    NamedMerge merges[MERGES];
    int count = make_vocabulary(merges);
    write_vocabulary(merges, count);
    Tokenizer *first = load();
    check_round_trips(first, 500);
    CHECK_OK(save(first), &e);
    check_loads(first);
    CHECK(rename("vocab.json", "encoder.json") == 0, "rename");
    CHECK(rename("merges.txt", "vocab.bpe") == 0, "rename");
    check_loads(first);
    remove_files();
    for (int pairs = 0; pairs < 2 * KINDS; pairs++) {
        FILE *f = create("tokenizer.json");
        fprintf(f,
                "{\"version\": \"1.0\", \"added_tokens\": [{\"id\": %d, \"content\": \"<|endoftext|>\","
                " \"special\": true}], %s, \"model\": {\"type\": \"BPE\", \"unk_token\": \"?\", \"dropout\": null,"
                " \"end_of_word_suffix\": \"\", \"vocab\": ",
                256 + count, same_kinds[pairs / 2]);
        put_vocab(f, merges, count);
        fputs(",\n\"merges\": [", f);
        put_merges(f, merges, count, pairs % 2 ? "[\"" : "\"", pairs % 2 ? "\", \"" : " ", pairs % 2 ? "\"]" : "\"",
                   ", ");
        fputs("]}}", f);
        fclose(f);
        check_loads(first);
    }
    remove_files();
    memory_free(first);
}

// ---- Added tokens; compare_tokenizers.py compares them with the Python package `tokenizers` -------------------------

static const struct {
    const char *name;
    bool normalized, special;
} ADDED[] = {{"<|u|>", false, true},    {"<|u|>x", false, false}, {"b<|", true, false}, {"ca<", true, false},
             {"\xC3\xA4", true, false}, {" <s>", false, true},    {"ab<", true, false}, {"\"\\", true, false}};
enum { ADDED_COUNT = sizeof ADDED / sizeof *ADDED };

// Writes added tokens. by_id: as in tokenizer_config.json; otherwise as in added_tokens.json, in which all tokens are
// `normalized`.
static void write_added(const char *file, int first, bool by_id) {
    FILE *f = create(file);
    fputs(by_id ? "{\"added_tokens_decoder\": {" : "{", f);
    for (int i = 0; i < ADDED_COUNT; i++) {
        fprintf(f, by_id ? "%s\"%d\": {\"content\": " : "%s", i ? ", " : "", first + i);
        text_write_json(f, ADDED[i].name);
        if (by_id)
            fprintf(f, ", \"normalized\": %s, \"special\": %s}", ADDED[i].normalized ? "true" : "false",
                    ADDED[i].special ? "true" : "false");
        else fprintf(f, ": %d", first + i);
    }
    fputs(by_id ? "}}" : "}", f);
    fclose(f);
}

// Checks that each added token is one token, that text with them decodes to itself, and that cuts change nothing.
static void check_added(const Tokenizer *t, int first) {
    static const char *const pieces[] = {"<|u|>", "x",  "b",        "<|", "<s>", " ",  "  ", "c",
                                         " a",    "ab", "\xC3\xA4", "\n", "\"",  "\\", "<"};
    WordCache *cache;
    CHECK_OK(word_cache_create(&cache, &e), &e);
    for (int i = 0; i < ADDED_COUNT; i++) {
        uint16_t got[64];
        size_t count;
        CHECK_OK(tokenizer_encode(t, cache, ADDED[i].name, strlen(ADDED[i].name), got, &count, &e), &e);
        CHECK(count == 1 && got[0] == first + i, "'%s' is %zu tokens", ADDED[i].name, count);
    }
    for (int round = 0; round < 20000; round++) {
        char text[512] = "";
        for (uint32_t n = draw(24); n > 0; n--) strcat(text, pieces[draw(sizeof pieces / sizeof *pieces)]);
        check_round_trip(t, cache, text, strlen(text));
    }
    memory_free(cache);
}

static void test_added(void) {
    NamedMerge merges[MERGES];
    int count = make_vocabulary(merges), first = 257 + count;
    write_vocabulary(merges, count);
    Tokenizer *plain = load();
    write_added("tokenizer_config.json", first, true);
    Tokenizer *t = load();
    if (!t) return;
    CHECK(t->vocab_size == first + ADDED_COUNT, "%d tokens", t->vocab_size);
    check_added(t, first);
    CHECK_OK(save(t), &e);
    Tokenizer *saved = load();
    check_added(saved, first);
    for (int i = 0; i < ADDED_COUNT; i++)
        CHECK(!(saved->flags[first + i] & TOKEN_SPECIAL) == !ADDED[i].special, "'%s' special", ADDED[i].name);
    memory_free(saved);
    memory_free(t);
    remove_files();
    write_vocabulary(merges, count);
    write_added("added_tokens.json", first, false);
    t = load();
    CHECK(t && t->added_count == ADDED_COUNT && t->flags[first] & TOKEN_NORMALIZED, "added_tokens.json");
    memory_free(t);
    char spaced[80];
    snprintf(spaced, sizeof spaced, "{'c a': %d}", first);
    write_json("added_tokens.json", spaced);
    t = load();
    CHECK(t && tokenizer_cut(plain, "c a", 3) == 1 && tokenizer_cut(t, "c a", 3) == 0, "a cut in an added token");
    memory_free(t);
    memory_free(plain);
    remove_files();
}

static void refuse(const char *text) {
    Tokenizer *t = (Tokenizer *)&e;
    CHECK_ERROR(tokenizer_load(&t, ".", &e), &e, ERR_INPUT, text);
    CHECK(t == NULL && e.hint[0], "a tokenizer, or no hint, in spite of '%s'", text);
}

typedef struct {
    const char *file, *content, *error;
} BadFile;
#define DECODER(tokens) "tokenizer_config.json", "{'added_tokens_decoder': " tokens "}"
#define ALL             "tokenizer.json"

// Checks that each file is refused, beside a vocabulary of three merges or alone.
static void refuse_each(const BadFile *bad, size_t count, bool alone) {
    const NamedMerge merges[3] = {{"a", "b"}, {"ab", "c"}, {" ", "a"}}; // ids 256 to 258; <|endoftext|>: 259
    for (size_t i = 0; i < count; i++) {
        if (!alone) write_vocabulary(merges, 3);
        write_json(bad[i].file, bad[i].content);
        refuse(bad[i].error);
        remove_files();
    }
}
#define REFUSE_EACH(bad, alone) refuse_each(bad, sizeof(bad) / sizeof *(bad), alone)

static void test_bad_files(void) {
    static const BadFile beside[] = {
        {"vocab.json", "{'a': 0,\n 'b': ", "vocab.json: malformed JSON"},
        {"vocab.json", "", "vocab.json: malformed JSON"},
        {"vocab.json", "[1, 2]", "not a JSON object"},
        {"vocab.json", "{} x", "malformed JSON"},
        {"vocab.json", "{'a\\u12g4': 0}", "malformed JSON"},
        {"vocab.json", "{'a': '0'}", "token 'a' has no number from 0 to 65535"},
        {"vocab.json", "{'a': -1}", "token 'a' has no number from 0 to 65535"},
        {"vocab.json", "{'a': 65536}", "token 'a' has no number from 0 to 65535"},
        {"vocab.json", "{'a': 0, 'b': 0}", "two tokens are number 0"},
        {"vocab.json", "{'a': 0, 'b': 2}", ".: token number 1 is missing"},
        {"vocab.json", "{'a': 0, 'a': 1}", "tokens 0 and 1 are the same bytes"},
        {"vocab.json", "{'a': 0, 'b': 1}", "byte 0x00 is missing"},
        {"merges.txt", "#version: 0.2\na b\nx y z\n", "merges.txt line 3: 'x y z' is not two tokens"},
        {"merges.txt", "a b\nab\n", "merges.txt line 2: 'ab' is not two tokens"},
        {"merges.txt", "a b\n\nqq c\n", "merges.txt line 3: 'qq c' is not two tokens"},
        {"merges.txt", "c a\n", "merges.txt line 1: 'c a' is not two tokens that merge"},
        {"merges.txt", "a b\rab c\n", "merges.txt line 1: 'a b"},
        {DECODER("[{'content': '<|x|>'}]"), "tokenizer_config.json: token '<|x|>' has no number"},
        {DECODER("{'260': '<|x|>'}"), "an added token has no text"},
        {DECODER("{'260': ['<|x|>']}"), "an added token has no text"},
        {DECODER("{'': {'content': '<|x|>'}}"), "token '<|x|>' has no number from 0 to 65535"},
        {DECODER("{'260 ': {'content': '<|x|>'}}"), "token '<|x|>' has no number from 0 to 65535"},
        {DECODER("{'-1': {'content': '<|x|>'}}"), "token '<|x|>' has no number from 0 to 65535"},
        {DECODER("{'256': {'content': 'ab c'}}"), "added token 'ab c' is number 256, which is another"},
        {DECODER("{'260': {'content': '<|x|>'}, '262': {'content': '<|y|>'}}"), ".: token number 261 is missing"},
        {DECODER("{'260': {'content': '<|x|>'}, '261': {'content': '<|x|>'}}"), "tokens 260 and 261 are the same"},
        {"added_tokens.json", "['<|x|>']", "added_tokens.json: not a JSON object"},
        {"added_tokens.json", "{'<|x|>': '260'}", "token '<|x|>' has no number from 0 to 65535"},
        {ALL, "{'added_tokens': [{'content': '<|x|>'}]}", "token '<|x|>' has no number from 0 to 65535"},
    };
    static const BadFile alone[] = {
#define WORDS                  "it has another pre_tokenizer than GPT-2's"
#define BYTES                  "'pre_tokenizer': {'type': 'ByteLevel'}"
#define ADDED_TO(vocab, added) ALL, "{" BYTES ", 'model': {'vocab': {" vocab "}}, 'added_tokens': [" added "]}"
        {ALL, "{}", WORDS},
        {ALL, "{'model': {'type': 'WordPiece'}}", "it has another model than BPE"},
        {ALL, "{'normalizer': {'type': 'NFC'}}", "it has a normalizer"},
        {ALL, "{'normalizer': {'type': 'Sequence', 'normalizers': [{'type': 'NFC'}]}}", "it has a normalizer"},
        {ALL, "{'pre_tokenizer': {'type': 'Split'}}", WORDS},
        {ALL, "{'pre_tokenizer': {'type': 'ByteLevel', 'add_prefix_space': true}}", WORDS},
        {ALL, "{'pre_tokenizer': {'type': 'ByteLevel', 'use_regex': false}}", WORDS},
        {ALL, "{'pre_tokenizer': {'type': 'ByteLevel', 'new': 1}}", WORDS},
        {ALL,
         "{'pre_tokenizer': {'type': 'Sequence', 'pretokenizers': [{'type': 'Split', 'pattern': {'Regex': ' '}, "
         "'behavior': 'Isolated'}, {'type': 'ByteLevel', 'use_regex': false}]}}",
         WORDS},
        {ALL, "{" BYTES ", 'model': {'ignore_merges': true}}", "it has ignore_merges"},
        {ALL, "{" BYTES ", 'model': {'end_of_word_suffix': '</w>'}}", "it has end_of_word_suffix"},
        {ALL, "{" BYTES ", 'model': {'dropout': 0.1}}", "it has dropout"},
        {ALL, "{" BYTES ", 'another': 1}", "it has another"},
        {ALL, "{'pre_tokenizer': {'type': 'ByteLevel'}}", "no model.vocab"},
        {ADDED_TO("", "{'id': 1}"), "an added token has no text"},
        {ADDED_TO("'a': 0", "{'id': 0, 'content': 'b'}"), "added token 'b' is number 0, which is another"},
        {ADDED_TO("", "{'id': 0, 'content': '<mask>', 'lstrip': true}"), "added token '<mask>' has lstrip"},
        {ADDED_TO("", "{'id': 0, 'content': ''}"), "an added token has no text"},
    };
    remove_files();
    CHECK(!tokenizer_exists("."), "a tokenizer in an empty directory");
    refuse("no tokenizer there");
    Tokenizer *t;
    CHECK_ERROR(tokenizer_load(&t, "no/such/directory", &e), &e, ERR_INPUT, "no/such/directory");
    write_vocabulary((NamedMerge[]){{"a", "b"}, {"ab", "c"}}, 2);
    unlink("merges.txt");
    refuse("merges.txt: cannot open");
    NamedMerge many[MERGES];
    write_vocabulary(many, make_vocabulary(many));
    write_json("merges.txt", "");
    refuse("merges.txt: cut? It has 0 merges for a vocabulary of ");
    REFUSE_EACH(beside, false);
    REFUSE_EACH(alone, true);
    static const char *const no_merges[] = {"[\"?\", \"b\", \"b\"]", "[\"? b\", 1]", "[1, \"b\"]", "1"};
    for (size_t i = 0; i < sizeof no_merges / sizeof *no_merges; i++) {
        FILE *f = create("tokenizer.json");
        fputs("{\"pre_tokenizer\": {\"type\": \"ByteLevel\"}, \"model\": {\"vocab\": ", f);
        put_vocab(f, &(NamedMerge){"?", "b"}, 1);
        fprintf(f, ", \"merges\": [%s]}}", no_merges[i]);
        fclose(f);
        refuse("tokenizer.json merge 1: '?");
        remove_files();
    }
    write_vocabulary((NamedMerge[]){{"a", "b"}, {"ab", "c"}}, 2);
    write_json("merges.txt", "\xef\xbb\xbf#version: 0.2\r\na b\r\nab c\r\n"); // a byte order mark, Windows line ends
    Tokenizer *windows = load();
    CHECK(windows && windows->merge_count == 2, "merges");
    memory_free(windows);
    remove_files();
}

// A vocabulary of characters (scripts/from_nanogpt.py) decodes what it encodes, also after it was saved and loaded.
// Errors name unknown characters. U+010D is a special case: GPT-2's name of the carriage return.
static void check_characters(void) {
    static const char text[] = "a\rb \xc4\x8d\xc3\xa9 a\xe2\x82\xac";
    static const uint16_t want[] = {2, 0, 3, 1, 5, 4, 1, 2, 6};
    Tokenizer *t = load();
    uint16_t tokens[64];
    size_t count;
    if (!t) return;
    CHECK(t->vocab_size == 7 && t->merge_count == 0 && !t->is_bytes && t->eot < 0, "kind");
    CHECK_OK(tokenizer_encode(t, NULL, text, strlen(text), tokens, &count, &e), &e);
    CHECK(count == 9 && memcmp(tokens, want, sizeof want) == 0, "%zu tokens", count);
    check_round_trip(t, NULL, text, strlen(text));
    CHECK_ERROR(tokenizer_encode(t, NULL, "ab ax", 5, tokens, &count, &e), &e, ERR_INPUT,
                "no token for 'x', byte 0x78");
    CHECK_ERROR(tokenizer_encode(t, NULL, "a\xc3\xa8", 3, tokens, &count, &e), &e, ERR_INPUT,
                "no token for '\xc3\xa8', byte 0xc3");
    CHECK_ERROR(tokenizer_encode(t, NULL, "a\xff", 2, tokens, &count, &e), &e, ERR_INPUT, "byte 0xff");
    CHECK_OK(save(t), &e);
    memory_free(t);
    char vocab[200] = "";
    FILE *f = fopen("vocab.json", "rb");
    CHECK(f && fread(vocab, 1, sizeof vocab - 1, f) > 0, "no vocab.json");
    if (f) fclose(f);
    CHECK(strcmp(vocab, "{\"\xc4\x8d\": 0, \"\xc4\xa0\": 1, \"a\": 2, \"b\": 3}\n") == 0, "a name twice? %s", vocab);
}

static void test_characters(void) {
    write_json("vocab.json", "{'\\u010d': 0, '\\u0120': 1, 'a': 2, 'b': 3}");
    write_json("merges.txt", "#version: 0.2\n");
    write_json("tokenizer_config.json",
               "{'added_tokens_decoder': {'4': {'content': '\\u00e9', 'normalized': false}, '5': {'content': "
               "'\\u010d', 'normalized': false}, '6': {'content': '\\u20ac', 'normalized': false}}}");
    check_characters();
    check_characters(); // loads what the first call saved
    write_json("merges.txt", "#version: 0.2\na b\n");
    refuse("byte 0x00 is missing");
    remove_files();
}

int main(void) {
    scratch_begin();
    RUN(test_merges, test_bytes, test_forms, test_added, test_characters, test_bad_files);
    return scratch_end();
}
