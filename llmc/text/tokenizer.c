#include "text/tokenizer.h"
#include "base/hash.h"
#include "text/unicode_class.h"

#include <assert.h>
#include <ctype.h>
#include <string.h>

#define XXH_INLINE_ALL // xxHash as a header, nothing to link
#include <xxhash.h>

// ---------------------------------------------------------------------------------------------------------------------
// Pre-tokenisation splits text into words by GPT-2's pattern:
//
//     's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
//
// No engine for regular expressions is used, since it would need several times as long as the rest of encoding.
// test_words compares the words with PCRE2's. An ill-formed byte is one character: no letter, number or space.

// Returns the class of the character at s < end, and sets its length.
static inline CharClass char_class(const Tokenizer *t, const uint8_t *s, const uint8_t *end, size_t *length) {
    *length = 1;
    if (*s < 0x80) return (CharClass)t->classes[*s];
    size_t n = utf8_character(s, (size_t)(end - s));
    if (n == 0) return CLASS_OTHER;
    *length = n;
    uint32_t c = s[0] & 0x7Fu >> n;
    for (size_t i = 1; i < n; i++) c = c << 6 | (s[i] & 0x3F);
    return c < UNICODE_CLASS_END ? (CharClass)t->classes[c] : CLASS_OTHER;
}

// Returns the end of the run of characters of `class` at s.
static inline const uint8_t *scan_run(const Tokenizer *t, const uint8_t *s, const uint8_t *end, CharClass class) {
    for (size_t length; s < end; s += length) {
        while (s < end && *s < 0x80 && t->classes[*s] == class) s++;
        if (s == end || *s < 0x80 || char_class(t, s, end, &length) != class) break;
    }
    return s;
}

const uint8_t *tokenizer_word(const Tokenizer *t, const uint8_t *s, const uint8_t *end) {
    size_t length, left = (size_t)(end - s);
    if (*s == '\'' && left > 1) { // 's|'t|'re|'ve|'m|'ll|'d
        if (s[1] == 's' || s[1] == 't' || s[1] == 'm' || s[1] == 'd') return s + 2;
        bool two = left > 2 && (((s[1] == 'r' || s[1] == 'v') && s[2] == 'e') || (s[1] == 'l' && s[2] == 'l'));
        if (two) return s + 3;
    }
    const uint8_t *first = s + (*s == ' ' && s + 1 < end); // a space belongs to the word after it
    CharClass class = char_class(t, first, end, &length);
    if (class != CLASS_SPACE) return scan_run(t, first + length, end, class);

    // White space at the end of the text is one word. Before other text it leaves its last character to the next match.
    const uint8_t *start = s, *last = s;
    for (; s < end && char_class(t, s, end, &length) == CLASS_SPACE; s += length) last = s;
    return s == end || last == start ? s : last;
}

size_t tokenizer_cut(const Tokenizer *t, const char *text, size_t bytes) {
    const uint8_t *s = (const uint8_t *)text;
    if (t->is_bytes) return utf8_boundary(text, bytes);
    // Find the last space that follows a character other than a space. A cut between them is safe: no alternative of
    // the pattern matches across the cut or looks back; only (?!\S) looks ahead, and it follows a space. Added tokens
    // cross the cut only if added_spaced.
    for (size_t i = t->added_spaced ? 0 : bytes; i-- > 1;) {
        if (!isspace(s[i]) || isspace(s[i - 1])) continue;
        size_t first = i - 1, length; // the beginning of the character before i
        while (first > 0 && i - first < 4 && (s[first] & 0xC0) == 0x80) first--;
        if (char_class(t, s + first, s + i, &length) != CLASS_SPACE || first + length != i) return i;
    }
    return 0;
}

// ---- Added tokens ---------------------------------------------------------------------------------------------------

uint32_t *tokenizer_slot(const Tokenizer *t, uint64_t hash, const void *text, size_t bytes) {
    for (uint64_t i = hash_finish(hash);; i++) {
        const uint32_t *slot = &t->by_text[i % TEXT_SLOTS];
        size_t length;
        const char *name = *slot ? tokenizer_decode(t, (int)*slot - 1, &length) : NULL;
        if (!name || (length == bytes && memcmp(name, text, bytes) == 0)) return (uint32_t *)(uintptr_t)slot;
    }
}

// Returns the longest of the pass's added tokens that stands at s, and sets *longest to its length; -1: none.
static int added_here(const Tokenizer *t, int pass, const uint8_t *s, const uint8_t *end, size_t *longest) {
    int found = -1, wanted = pass ? TOKEN_ADDED | TOKEN_NORMALIZED : TOKEN_ADDED;
    *longest = 0;
    size_t most = size_min(t->added_longest[pass][*s], (size_t)(end - s));
    uint64_t hash = HASH_START;
    for (size_t bytes = 1; bytes <= most; bytes++) {
        hash = hash_bytes(hash, s + bytes - 1, 1);
        int token = (int)*tokenizer_slot(t, hash, s, bytes) - 1;
        bool here = token >= 0 && (t->flags[token] & (TOKEN_ADDED | TOKEN_NORMALIZED)) == wanted;
        if (here) found = token, *longest = bytes;
    }
    return found;
}

// ---- Merges ---------------------------------------------------------------------------------------------------------

// Returns the slot of a pair, or the empty slot for it. Fibonacci hashing.
static inline uint64_t *pair_slot(const Tokenizer *t, uint16_t left, uint16_t right) {
    uint32_t pair = (uint32_t)left << 16 | right;
    for (uint64_t i = (pair * HASH_GOLDEN) >> 32;; i++) {
        const uint64_t *slot = &t->pairs[i % PAIR_SLOTS];
        if (*slot == 0 || *slot >> 32 == pair) return (uint64_t *)(uintptr_t)slot;
    }
}

// Returns a merge's rank in the upper half, the merged token in the lower half; RANK_NONE if the pair does not merge.
#define RANK_NONE UINT32_MAX
static inline uint32_t pair_find(const Tokenizer *t, uint16_t left, uint16_t right) {
    uint64_t slot = *pair_slot(t, left, right);
    return slot ? (uint32_t)slot : RANK_NONE;
}

void tokenizer_add_merge(Tokenizer *t, Merge merge) {
    uint64_t *slot = pair_slot(t, merge.left, merge.right), rank = (uint64_t)t->merge_count;
    t->merges[t->merge_count++] = merge;
    if (!*slot) // of equal merges the first is used
        *slot = (uint64_t)merge.left << 48 | (uint64_t)merge.right << 32 | rank << 16 | merge.merged;
}

enum { SHORT_WORD = 64 }; // bytes of the longest word whose merges lie on the stack

// Byte pair encoding. While an adjacent pair has a merge, a pass merges all pairs of the lowest rank, from left to
// right. A word needs one pass per distinct merge that it uses (more only if two merges give one token). A megabyte
// without a space needs 0.1 s if it is DNA, 6 s if it is random letters.
static int merge_word(const Tokenizer *t, const uint8_t *word, size_t bytes, uint16_t *out, size_t *count, Error *e) {
    uint32_t few[SHORT_WORD], *found = few; // found[i]: pair_find of tokens i and i + 1
    size_t n = bytes;
    for (size_t i = 0; i < n; i++) {
        if (t->byte_token[word[i]] < 0)
            return FAIL(e, ERR_INPUT, "it knows the characters of the text that it was made of, and no others",
                        "the tokenizer has no token for '%.*s', byte 0x%02x", (int)utf8_character(word + i, bytes - i),
                        (const char *)word + i, word[i]);
        out[i] = (uint16_t)t->byte_token[word[i]];
    }
    if (bytes > SHORT_WORD) TRY(memory_alloc((void **)&found, bytes * sizeof *found, "a long word", e));
    for (size_t i = 0; i + 1 < n; i++) found[i] = pair_find(t, out[i], out[i + 1]);
    found[n - 1] = RANK_NONE;
    for (;;) {
        size_t best = 0;
        for (size_t i = 1; i < n; i++)
            if (found[i] < found[best]) best = i;
        uint64_t lowest = found[best];
        if (lowest == RANK_NONE) break;
        size_t kept = best;
        for (size_t i = best; i < n; i++, kept++) {
            if (found[i] != lowest) {
                out[kept] = out[i];
                found[kept] = found[i];
                continue;
            }
            out[kept] = (uint16_t)lowest;
            i++;
            found[kept] = i + 1 < n ? pair_find(t, out[kept], out[i + 1]) : RANK_NONE;
            if (kept > 0) found[kept - 1] = pair_find(t, out[kept - 1], out[kept]);
            if (found[kept] < lowest || (kept > 0 && found[kept - 1] < lowest))
                lowest = UINT64_MAX; // this pass merges no more: the next one merges the new pair first
        }
        n = kept;
    }
    if (found != few) memory_free(found);
    *count = n;
    return 0;
}

// ---- Encoding: a direct-mapped cache holds the tokens of words ------------------------------------------------------

enum { CACHE_BITS = 16, CACHE_WORD_BYTES = 32, CACHE_TOKENS = 15 };

typedef struct {
    uint8_t word[CACHE_WORD_BYTES];
    uint16_t tokens[CACHE_TOKENS];
    uint8_t bytes; // length of the word; 0: an empty line
    uint8_t count;
} WordLine;
_Static_assert(sizeof(WordLine) == 64, "one cache line");

struct WordCache {
    _Alignas(64) WordLine line[1 << CACHE_BITS];
};

int word_cache_create(WordCache **out, Error *e) {
    return memory_alloc_zero((void **)out, sizeof **out, "the cache of words", e);
}

static int encode_word(const Tokenizer *t, WordCache *cache, const uint8_t *word, size_t bytes, uint16_t *out,
                       size_t *count, Error *e) {
    if (!cache || bytes > CACHE_WORD_BYTES) return merge_word(t, word, bytes, out, count, e);
    WordLine *line = &cache->line[XXH3_64bits(word, bytes) >> (64 - CACHE_BITS)];
    if (line->bytes == bytes && memcmp(line->word, word, bytes) == 0) {
        *count = line->count;
        out[0] = line->tokens[0]; // most words are one token
        for (size_t i = 1; i < *count; i++) out[i] = line->tokens[i];
        return 0;
    }
    TRY(merge_word(t, word, bytes, out, count, e));
    if (*count > CACHE_TOKENS) return 0;
    memcpy(line->word, word, bytes);
    memcpy(line->tokens, out, *count * sizeof *out);
    line->bytes = (uint8_t)bytes;
    line->count = (uint8_t)*count;
    return 0;
}

// Encodes text in passes, as AddedVocabulary in Hugging Face's tokenizers does. A pass finds its added tokens from left
// to right, the longest at each place. The next pass gets the text between them. After the last pass the remaining text
// is split into words.
static int encode_text(const Tokenizer *t, WordCache *cache, const uint8_t *s, const uint8_t *end, int pass,
                       uint16_t **out, Error *e) {
    const uint8_t *text = s;
    for (size_t bytes, tokens; pass == ADDED_PASSES && s < end; s += bytes, *out += tokens) {
        bytes = (size_t)(tokenizer_word(t, s, end) - s);
        TRY(encode_word(t, cache, s, bytes, *out, &tokens, e));
    }
    if (pass == ADDED_PASSES) return 0;
    while (s < end) {
        size_t length;
        int added = t->added_longest[pass][*s] ? added_here(t, pass, s, end, &length) : -1;
        if (added < 0) s++;
        else {
            TRY(encode_text(t, cache, text, s, pass + 1, out, e));
            *(*out)++ = (uint16_t)added;
            text = s += length;
        }
    }
    return encode_text(t, cache, text, end, pass + 1, out, e);
}

int tokenizer_encode(const Tokenizer *t, WordCache *cache, const char *text, size_t bytes, uint16_t *out, size_t *count,
                     Error *e) {
    const uint8_t *s = (const uint8_t *)text;
    uint16_t *next = out;
    for (size_t i = 0; t->is_bytes && i < bytes; i++) *next++ = s[i];
    if (!t->is_bytes) TRY(encode_text(t, cache, s, s + bytes, t->added_count ? 0 : ADDED_PASSES, &next, e));
    *count = (size_t)(next - out);
    return 0;
}

// ---- The tokenizer --------------------------------------------------------------------------------------------------

static void classes_set(Tokenizer *t, const uint16_t *runs, size_t count, CharClass class) {
    size_t c = 0;
    for (size_t i = 0; i < count; i += 2) {
        c += runs[i];
        assert(c + runs[i + 1] <= UNICODE_CLASS_END);
        memset(t->classes + c, class, runs[i + 1]);
        c += runs[i + 1];
    }
}

int tokenizer_new(Tokenizer **out, size_t text_bytes, Error *e) {
    TRY(memory_alloc_zero((void **)out, sizeof **out + text_bytes, "tokenizer", e));
    Tokenizer *t = *out;
    t->eot = -1;
    classes_set(t, UNICODE_LETTERS, sizeof UNICODE_LETTERS / sizeof *UNICODE_LETTERS, CLASS_LETTER);
    classes_set(t, UNICODE_NUMBERS, sizeof UNICODE_NUMBERS / sizeof *UNICODE_NUMBERS, CLASS_NUMBER);
    classes_set(t, UNICODE_SPACES, sizeof UNICODE_SPACES / sizeof *UNICODE_SPACES, CLASS_SPACE);
    return 0;
}

int tokenizer_create_bytes(Tokenizer **out, Error *e) {
    TRY(tokenizer_new(out, BYTE_VALUES, e));
    Tokenizer *t = *out;
    t->is_bytes = true;
    t->vocab_size = BYTE_VALUES;
    for (int b = 0; b < BYTE_VALUES; b++) {
        t->text[b] = (char)b;
        t->byte_token[b] = b;
        t->start[b + 1] = (uint32_t)b + 1;
    }
    return 0;
}

const char *tokenizer_decode(const Tokenizer *t, int token, size_t *bytes) {
    bool known = token >= 0 && token < t->vocab_size;
    *bytes = known ? t->start[token + 1] - t->start[token] : 0;
    return known ? t->text + t->start[token] : "";
}
