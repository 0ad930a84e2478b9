// tokenizer_files: reads and writes GPT-2's vocabulary and merges. It reads three forms:
//
//     vocab.json + merges.txt      Hugging Face's: a JSON object {token: id}; one line "left right" per merge, by rank
//     encoder.json + vocab.bpe     the same files under OpenAI's names
//     tokenizer.json               both in one file: model.vocab, model.merges
//
// For all forms, tokenizer.json (added_tokens), tokenizer_config.json (added_tokens_decoder) and added_tokens.json may
// list added tokens.
//
// These files write a byte as a character of "GPT-2's alphabet". A byte that prints in Latin-1 is written as its
// Latin-1 character. The other bytes, 0x00 to 0x20, 0x7F to 0xA0 and 0xAD, are written as U+0100 to U+0143, in order.
#include "base/files.h"
#include "base/hash.h"
#include "base/text.h"
#include "text/tokenizer.h"

#include <ctype.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>

enum { FILE_BYTES_MAX = 1 << 28 };

#define EOT_NAME "<|endoftext|>"

// ---- The alphabet ---------------------------------------------------------------------------------------------------

static int alphabet_char(int byte) {
    if (byte <= 0x20) return 0x100 + byte;
    if (byte >= 0x7F && byte <= 0xA0) return 0x121 + byte - 0x7F;
    return byte == 0xAD ? 0x143 : byte;
}

// Decodes a name into `out`. Returns the number of bytes, at most `length`; -1: a character is not in the alphabet.
static int alphabet_decode(const char *name, size_t length, char *out) {
    const unsigned char *s = (const unsigned char *)name, *end = s + length;
    int bytes = 0;
    while (s < end) { // characters below U+0144 have one byte or two
        int c = *s++;
        if (c >= 0x80) {
            if (c > 0xC5 || c < 0xC2 || s == end || (*s & 0xC0) != 0x80) return -1;
            c = (c & 0x1F) << 6 | (*s++ & 0x3F);
        }
        int byte = c < 0x100 ? c : c <= 0x120 ? c - 0x100 : c <= 0x142 ? c - 0x121 + 0x7F : 0xAD;
        if (alphabet_char(byte) != c) return -1;
        out[bytes++] = (char)byte;
    }
    return bytes;
}

// ---------------------------------------------------------------------------------------------------------------------
// Loading: files name the tokens; names become the tokens' bytes; merges are pairs of these tokens

#define HINT_GET "download or copy the tokenizer's files again"

// The JSON files of a tokenizer. The first three may list added tokens, for all forms.
enum { TOKENIZER_JSON, TOKENIZER_CONFIG, ADDED_TOKENS, VOCAB, FILES };
enum { ADDED_FILES = 3 };

typedef struct {
    char path[PATH_MAX];
    cJSON *root; // NULL: the file is missing
} JsonFile;

typedef struct {
    Tokenizer *t;
    JsonFile files[FILES];
    const char *directory;
    const JsonFile *vocab;
    char merges_path[PATH_MAX], *merges; // lines "left right"; NULL: tokenizer.json has the merges
    size_t merges_bytes, bytes;          // bytes: size of all files
    const char *name[VOCAB_MAX];         // each token's name; NULL: not yet read
} VocabReader;

static bool is_text(const cJSON *item, const char *text) {
    return cJSON_IsString(item) && strcmp(item->valuestring, text) == 0;
}

// Reads the files, and creates a tokenizer with room for all names in them.
static int read_json_files(VocabReader *r, const char *directory, const char *const form[2], Error *e) {
    const char *vocab = form[0] == form[1] ? NULL : form[0];
    const char *const names[FILES] = {"tokenizer.json", "tokenizer_config.json", "added_tokens.json", vocab};
    size_t size;
    char *text;
    for (int i = 0; i < FILES && names[i]; i++) {
        JsonFile *file = &r->files[i];
        TRY(path_join(file->path, sizeof file->path, directory, names[i], e));
        if (!file_exists(file->path)) continue;
        TRY(file_read(IN_PATH, file->path, FILE_BYTES_MAX, &text, &size, e));
        TRY(json_parse_text(&file->root, text, size, file->path, HINT_GET, e));
        if (!cJSON_IsObject(file->root)) return FAIL(e, ERR_INPUT, HINT_GET, "%s: not a JSON object", file->path);
        r->bytes += size;
    }
    r->vocab = &r->files[vocab ? VOCAB : TOKENIZER_JSON];
    r->directory = directory;
    TRY(path_join(r->merges_path, sizeof r->merges_path, directory, form[1], e));
    if (vocab) TRY(file_read(IN_PATH, r->merges_path, FILE_BYTES_MAX, &r->merges, &r->merges_bytes, e));
    r->bytes += r->merges_bytes;
    return tokenizer_new(&r->t, r->bytes, e);
}

static double number_of(const cJSON *item) { return cJSON_IsNumber(item) ? item->valuedouble : -1; }

// Checks a token's number from a file, and sets *token to it. The vocabulary grows to hold the token.
static int read_number(VocabReader *r, const char *path, const char *name, double number, int *token, Error *e) {
    if (!(number >= 0 && number < VOCAB_MAX) || number != (int)number)
        return FAIL(e, ERR_INPUT, "use GPT-2's vocabulary, or one of at most 65536 tokens: shards hold 16 bits",
                    "%s: token '%s' has no number from 0 to 65535", path, name);
    *token = (int)number;
    if (r->t->vocab_size <= *token) r->t->vocab_size = *token + 1;
    return 0;
}

// Returns the name of the first member that is neither off (null, false, 0 or empty) nor in `known`; NULL: none.
// `known` has a blank before and after each name.
static const char *member_on(const cJSON *object, const char *known) {
    char name[64];
    const cJSON *item;
    cJSON_ArrayForEach(item, object) {
        bool off = cJSON_IsNull(item) || cJSON_IsFalse(item) || is_text(item, "") ||
                   (cJSON_IsNumber(item) && item->valuedouble == 0) ||
                   ((cJSON_IsObject(item) || cJSON_IsArray(item)) && !item->child);
        snprintf(name, sizeof name, " %s ", item->string);
        if (!off && !strstr(known, name)) return item->string;
    }
    return NULL;
}

// Returns `part`; if this is a Sequence whose `list` has one element, returns the element.
static const cJSON *only_part(const cJSON *part, const char *list) {
    const cJSON *parts = is_text(json_get(part, "type"), "Sequence") ? json_get(part, list) : NULL;
    return parts && cJSON_GetArraySize(parts) == 1 ? only_part(parts->child, list) : part;
}

// True if a pre-tokenizer splits text into words as GPT-2 does: ByteLevel alone; or a Split by GPT-2's pattern (in one
// of its spellings), then ByteLevel without splitting.
static bool splits_as_gpt2(const cJSON *words) {
#define REST "| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+"
    words = only_part(words, "pretokenizers");
    const cJSON *parts = is_text(json_get(words, "type"), "Sequence") ? json_get(words, "pretokenizers") : NULL;
    const cJSON *split = parts && cJSON_GetArraySize(parts) == 2 ? parts->child : NULL;
    const cJSON *bytes = split ? split->next : words, *regex = json_get(json_get(split, "pattern"), "Regex");
    bool by_pattern = is_text(regex, "'s|'t|'re|'ve|'m|'ll|'d" REST) || is_text(regex, "'(?:[sdmt]|ll|ve|re)" REST);
    if (split && !(by_pattern && is_text(json_get(split, "type"), "Split") &&
                   is_text(json_get(split, "behavior"), "Isolated") && !member_on(split, " type pattern behavior ")))
        return false;
    return is_text(json_get(bytes, "type"), "ByteLevel") &&
           cJSON_IsFalse(json_get(bytes, "use_regex")) == (split != NULL) &&
           !member_on(bytes, " type trim_offsets use_regex ");
}

// Refuses a tokenizer.json whose tokens would differ from those of GPT-2's algorithm.
static int check_kind(const cJSON *root, const char *path, Error *e) {
    const cJSON *model = json_get(root, "model"), *type = json_get(model, "type");
    const cJSON *normalizer = only_part(json_get(root, "normalizer"), "normalizers");
    const cJSON *kind = json_get(normalizer, "type"), *parts = json_get(normalizer, "normalizers");
    const char *other = member_on(model, " type vocab merges unk_token fuse_unk ");
    if (!other)
        other = member_on(root, " version truncation padding added_tokens pre_tokenizer post_processor decoder model "
                                "normalizer ");
    if (type && !is_text(type, "BPE")) other = "another model than BPE";
    else if (kind && !(is_text(kind, "Sequence") && cJSON_GetArraySize(parts) == 0)) other = "a normalizer";
    else if (!splits_as_gpt2(json_get(root, "pre_tokenizer"))) other = "another pre_tokenizer than GPT-2's ByteLevel";
    if (!other) return 0;
    return FAIL(e, ERR_INPUT, "only GPT-2's kind of tokenizer is known", "%s: it has %s", path, other);
}

static int read_vocab(VocabReader *r, Error *e) {
    const cJSON *vocab = r->vocab->root, *item;
    const char *path = r->vocab->path;
    if (!r->merges) {
        TRY(check_kind(vocab, path, e));
        vocab = json_get(json_get(vocab, "model"), "vocab");
    }
    if (!cJSON_IsObject(vocab)) return FAIL(e, ERR_INPUT, HINT_GET, "%s: it has no model.vocab", path);
    cJSON_ArrayForEach(item, vocab) {
        int token = 0;
        TRY(read_number(r, path, item->string, number_of(item), &token, e));
        if (r->name[token]) return FAIL(e, ERR_INPUT, HINT_GET, "%s: two tokens are number %d", path, token);
        r->name[token] = item->string;
    }
    return 0;
}

// Adds the tokens that a file lists as added: new tokens, or tokens of the vocabulary. The first file that lists a
// token sets its flags. tokenizer.json has an array of {id, content}; tokenizer_config.json has {number: {content}};
// added_tokens.json has {name: number}.
static int read_added(VocabReader *r, int file, Error *e) {
    static const char *const lists[ADDED_FILES] = {"added_tokens", "added_tokens_decoder", NULL};
    const char *path = r->files[file].path;
    const cJSON *list = r->files[file].root, *item;
    int token = 0;
    if (lists[file]) list = json_get(list, lists[file]);
    cJSON_ArrayForEach(item, list) {
        const char *name = file == ADDED_TOKENS ? item->string : cJSON_GetStringValue(json_get(item, "content"));
        if (!name || !*name) return FAIL(e, ERR_INPUT, HINT_GET, "%s: an added token has no text", path);
        double number = number_of(file == TOKENIZER_JSON ? json_get(item, "id") : item);
        const char *key = file == TOKENIZER_CONFIG && item->string ? item->string : "";
        if (*key) number = key[strspn(key, "0123456789")] ? -1 : strtod(key, NULL);
        TRY(read_number(r, path, name, number, &token, e));
        const char *unknown = member_on(item, " id content normalized special __type ");
        if (unknown)
            return FAIL(e, ERR_INPUT, "only added tokens that are matched literally, next to any text, are supported",
                        "%s: added token '%s' has %s", path, name, unknown);
        if (r->name[token] && strcmp(r->name[token], name) != 0)
            return FAIL(e, ERR_INPUT, HINT_GET, "%s: added token '%s' is number %d, which is another", path, name,
                        token);
        r->name[token] = name;
        if (r->t->flags[token]) continue;
        r->t->flags[token] = TOKEN_LITERAL | TOKEN_ADDED;
        if (!cJSON_IsFalse(json_get(item, "normalized"))) r->t->flags[token] |= TOKEN_NORMALIZED;
        if (cJSON_IsTrue(json_get(item, "special"))) r->t->flags[token] |= TOKEN_SPECIAL;
    }
    return 0;
}

// Fills text, start and by_text from the names. The token that ends documents is tokenizer_config.json's eos_token,
// else <|endoftext|>. This token keeps no flag but LITERAL, so that encoding never finds it.
static int spell_tokens(VocabReader *r, Error *e) {
    const cJSON *eos = json_get(r->files[TOKENIZER_CONFIG].root, "eos_token");
    const char *declared = cJSON_GetStringValue(cJSON_IsObject(eos) ? json_get(eos, "content") : eos);
    const char *const ends[] = {declared ? declared : EOT_NAME, EOT_NAME};
    Tokenizer *t = r->t;
    for (int k = 0; k < 2; k++)
        for (int i = 0; i < t->vocab_size && t->eot < 0; i++)
            if (r->name[i] && strcmp(r->name[i], ends[k]) == 0) t->eot = i;
    for (int i = 0; i < t->vocab_size; i++) {
        const char *name = r->name[i];
        char *text = t->text + t->start[i];
        if (!name) return FAIL(e, ERR_INPUT, HINT_GET, "%s: token number %d is missing", r->directory, i);
        size_t length = strlen(name);
        int bytes = t->flags[i] ? -1 : alphabet_decode(name, length, text);
        if (bytes < 0) {
            memcpy(text, name, length);
            bytes = (int)length;
            t->flags[i] |= TOKEN_LITERAL;
        }
        uint32_t *slot = tokenizer_slot(t, hash_bytes(HASH_START, text, (size_t)bytes), text, (size_t)bytes);
        if (*slot)
            return FAIL(e, ERR_INPUT, HINT_GET, "%s: tokens %u and %d are the same bytes", r->directory, *slot - 1, i);
        *slot = (uint32_t)i + 1;
        t->start[i + 1] = t->start[i] + (uint32_t)bytes;
        if (i == t->eot) t->flags[i] &= TOKEN_LITERAL;
        if (!(t->flags[i] & TOKEN_ADDED)) continue;
        t->added_count++;
        for (size_t k = 1; k < length; k++)
            t->added_spaced |= isspace((uint8_t)name[k]) && !isspace((uint8_t)name[k - 1]);
        uint32_t *longest = &t->added_longest[(t->flags[i] & TOKEN_NORMALIZED) != 0][(uint8_t)*name];
        *longest = (uint32_t)size_max(*longest, length);
    }
    return 0;
}

static int token_of(const Tokenizer *t, const char *text, size_t bytes) { // -1: none
    return (int)*tokenizer_slot(t, hash_bytes(HASH_START, text, bytes), text, bytes) - 1;
}

// Adds the merge of two names. If right is NULL, left is a line "left right". `number` counts the lines of merges.txt,
// or the elements of model.merges, from 1. text: scratch with room for both names.
static int add_merge(VocabReader *r, int number, const char *left, const char *right, char *text, Error *e) {
    const char *space = right ? left + strlen(left) : strchr(left, ' '), *second = right; // the alphabet has no blank
    if (!right && space) second = space + 1;
    int n = space ? alphabet_decode(left, (size_t)(space - left), text) : -1, first = -1, next = -1, merged = -1;
    int m = n > 0 ? alphabet_decode(second, strlen(second), text + n) : -1;
    if (m > 0) {
        first = token_of(r->t, text, (size_t)n);
        next = token_of(r->t, text + n, (size_t)m);
        merged = token_of(r->t, text, (size_t)(n + m));
    }
    if (first < 0 || next < 0 || merged < 0 || r->t->merge_count == MERGES_MAX)
        return FAIL(e, ERR_INPUT, HINT_GET, "%s %s %d: '%.100s%s%.100s' is not two tokens that merge to another one",
                    r->merges_path, r->merges ? "line" : "merge", number, left, right ? " " : "", right ? right : "");
    tokenizer_add_merge(r->t, (Merge){(uint16_t)first, (uint16_t)next, (uint16_t)merged});
    return 0;
}

// Reads the merges. A vocabulary that lacks bytes must be a vocabulary of characters, without merges.
static int read_merges(VocabReader *r, Error *e) {
    const cJSON *merges = r->merges ? NULL : json_get(json_get(r->vocab->root, "model"), "merges"), *item;
    Tokenizer *t = r->t;
    char *scratch = t->text + t->start[t->vocab_size]; // the unused rest of `text` has room for any merge
    char *line = r->merges, *end;
    int code = 0, number = 1;
    if (!r->merges && !cJSON_IsArray(merges))
        return FAIL(e, ERR_INPUT, HINT_GET, "%s: it has no model.merges", r->merges_path);
    for (item = merges ? merges->child : NULL; item && !code; item = item->next) { // "left right" or ["left", "right"]
        const cJSON *left = cJSON_IsArray(item) ? item->child : item, *right = left && left != item ? left->next : NULL;
        const char *name = cJSON_GetStringValue(left), *second = cJSON_GetStringValue(right);
        const bool whole = name && (left == item || (second && !right->next));
        code = add_merge(r, number++, whole ? name : "?", whole ? second : NULL, scratch, e);
    }
    for (line += utf8_mark(line, r->merges_bytes); line < r->merges + r->merges_bytes && !code; line = end + 1) {
        end = line + strcspn(line, "\n");
        *end = 0;
        if (end > line && end[-1] == '\r') end[-1] = 0;
        bool version = number++ == 1 && strncmp(line, "#version", 8) == 0;
        if (*line && !version) code = add_merge(r, number - 1, line, NULL, scratch, e);
    }
    t->is_bytes = t->vocab_size == BYTE_VALUES && t->merge_count == 0 && t->added_count == 0;
    for (int b = 0; b < BYTE_VALUES; b++) {
        int token = t->byte_token[b] = token_of(t, &(char){(char)b}, 1);
        t->is_bytes = t->is_bytes && token == b;
        t->lacks_bytes |= token < 0;
        if (token < 0 && (code || t->merge_count > 0))
            return FAIL(e, ERR_INPUT, "a byte-level vocabulary has all 256 bytes", "%s: byte 0x%02x is missing",
                        r->vocab->path, b);
    }
    // Merges make nearly all tokens beyond the bytes, except up to 64 special ones. With fewer than half, lines are
    // missing. A vocabulary of characters has no merges, and lacks bytes.
    const int beyond = t->vocab_size - t->added_count - BYTE_VALUES;
    if (!code && !t->lacks_bytes && t->merge_count < beyond / 2 - 64)
        return FAIL(e, ERR_INPUT, HINT_GET, "%s: cut? It has %d merges for a vocabulary of %d tokens", r->merges_path,
                    t->merge_count, t->vocab_size);
    return code;
}

// Returns the form of a directory's files, or NULL.
static const char *const *find_form(const char *directory) {
    static const char *const forms[][2] = {
        {"vocab.json", "merges.txt"}, {"encoder.json", "vocab.bpe"}, {"tokenizer.json", "tokenizer.json"}};
    for (int complete = 1; complete >= 0; complete--) // find an incomplete form, too: loading names the missing file
        for (size_t i = 0; i < sizeof forms / sizeof *forms; i++)
            if (directory_holds(directory, forms[i][0]) && (!complete || directory_holds(directory, forms[i][1])))
                return forms[i];
    return NULL;
}

bool tokenizer_exists(const char *directory) { return find_form(directory); }

int tokenizer_load(Tokenizer **out, const char *path, Error *e) {
    *out = NULL;
    if (strcmp(path, "bytes") == 0) return tokenizer_create_bytes(out, e);
    const char *const *form = find_form(path);
    if (!form)
        return FAIL(e, ERR_INPUT,
                    "say bytes, or name a directory with vocab.json + merges.txt, encoder.json + vocab.bpe "
                    "or tokenizer.json",
                    "%s: no tokenizer there", path);
    VocabReader *r;
    int code;
    TRY(memory_alloc_zero((void **)&r, sizeof *r, "vocabulary", e));
    TRY_GOTO(read_json_files(r, path, form, e));
    TRY_GOTO(read_vocab(r, e));
    for (int file = 0; file < ADDED_FILES; file++) TRY_GOTO(read_added(r, file, e));
    TRY_GOTO(spell_tokens(r, e));
    TRY_GOTO(read_merges(r, e));
done:
    for (int i = 0; i < FILES; i++) cJSON_Delete(r->files[i].root);
    memory_free(r->merges);
    if (code) memory_free(r->t);
    else *out = r->t;
    memory_free(r);
    return code;
}

// ---- Saving ---------------------------------------------------------------------------------------------------------

static void put_token(const Tokenizer *t, int token, bool json, FILE *f) {
    size_t bytes;
    const char *text = tokenizer_decode(t, token, &bytes);
    for (size_t i = 0; i < bytes; i++) {
        int c = (uint8_t)text[i];
        bool literal = t->flags[token] & TOKEN_LITERAL;
        if (!literal) c = alphabet_char(c);
        if (!literal && c >= 0x80) fputc(0xC0 | c >> 6, f), c = 0x80 | (c & 0x3F);
        if (json && (c == '"' || c == '\\')) fputc('\\', f);
        if (json && c < 0x20) fprintf(f, "\\u%04x", (unsigned)c);
        else fputc(c, f);
    }
}

static void put_vocab(const Tokenizer *t, FILE *f) {
    const char *before = "{\"";
    for (int token = 0; token < t->vocab_size; token++) {
        if (t->lacks_bytes && t->flags[token] & TOKEN_ADDED) continue; // its text could be taken for a byte's name
        fputs(before, f);
        before = ", \"";
        put_token(t, token, true, f);
        fprintf(f, "\": %d", token);
    }
    fputs("}\n", f);
}

static void put_merges(const Tokenizer *t, FILE *f) {
    fputs("#version: 0.2\n", f);
    for (int rank = 0; rank < t->merge_count; rank++) {
        put_token(t, t->merges[rank].left, false, f);
        fputc(' ', f);
        put_token(t, t->merges[rank].right, false, f);
        fputc('\n', f);
    }
}

static void put_config(const Tokenizer *t, int context, FILE *f) {
    static const char *const names[] = {"bos_token", "eos_token", "unk_token"};
    fputs("{\"tokenizer_class\": \"GPT2Tokenizer\", \"add_prefix_space\": false", f);
    for (int i = 0; i < 3; i++) {
        fprintf(f, ", \"%s\": %s", names[i], t->eot >= 0 ? "\"" : "null");
        if (t->eot >= 0) put_token(t, t->eot, true, f), fputc('"', f);
    }
    if (context) fprintf(f, ", \"model_max_length\": %d", context);
    const char *before = ", \"added_tokens_decoder\": {";
    for (int token = 0; token < t->vocab_size; token++) {
        if (!(t->flags[token] & TOKEN_ADDED)) continue;
        fprintf(f, "%s\"%d\": {\"content\": \"", before, token);
        before = ", ";
        put_token(t, token, true, f);
        fprintf(f,
                "\", \"lstrip\": false, \"normalized\": %s, \"rstrip\": false, \"single_word\": false, "
                "\"special\": %s}",
                t->flags[token] & TOKEN_NORMALIZED ? "true" : "false",
                t->flags[token] & TOKEN_SPECIAL ? "true" : "false");
    }
    fputs(t->added_count ? "}}\n" : "}\n", f);
}

int tokenizer_save(const Tokenizer *t, int context, Manifest *manifest, Error *e) {
    static const char *const names[] = {"vocab.json", "merges.txt", "tokenizer_config.json"};
    for (int i = 0; i < 3; i++) {
        Text text;
        TRY(text_begin(&text, e));
        if (i == 0) put_vocab(t, text.f);
        else if (i == 1) put_merges(t, text.f);
        else put_config(t, context, text.f);
        TRY(text_end(&text, e));
        int code = manifest_save(manifest, names[i], text.text, text.bytes, e);
        text_free(&text);
        TRY(code);
    }
    return 0;
}
