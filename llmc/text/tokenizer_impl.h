// tokenizer_impl: a tokenizer's inside, for tokenizer.c (text to tokens and back), tokenizer_files.c (the files on disk) and
// data/shards.c (the fingerprint of a vocabulary).
#ifndef GNS_TOKENIZER_IMPL_H
#define GNS_TOKENIZER_IMPL_H

#include "text/tokenizer.h"

// The merges, an open-addressing hash table keyed by a pair of tokens. One slot: left << 48 | right << 32 | rank << 16
// | merged token. No merge has rank 65535, so all ones is an empty slot.
#define MERGE_EMPTY UINT64_MAX
enum { MERGES_MAX = 65535 };

typedef struct {
    uint16_t left, right, merged;
} Merge;

// A token that is found in the text as it is written. Those that are not `normalized` are looked for first, through all
// of the text, then the others in what is left; nothing else comes of the word, there being no normalizer.
typedef struct {
    uint16_t token;
    bool normalized, special; // special: left out by decoders that are asked to
} AddedToken;
enum { ADDED_PASSES = 2 };

typedef enum {
    CLASS_OTHER,
    CLASS_LETTER,
    CLASS_NUMBER,
    CLASS_SPACE,
    CLASS_MULTI // a byte of a character of several bytes
} CharClass;
enum { UNICODE_CLASS_END = 0x31350 }; // from here on every code point is CLASS_OTHER

struct Tokenizer {
    int vocab_size, eot;
    bool is_bytes;
    char *text;       // all tokens' bytes, one behind the other
    uint32_t *start;  // (vocab_size + 1) where each begins in text
    uint8_t *literal; // (vocab_size) a special token: its name, not bytes in GPT-2's alphabet
    uint16_t byte_token[BYTE_VALUES];
    AddedToken *added; // (added_count)
    int added_count;
    bool added_begins[ADDED_PASSES][BYTE_VALUES]; // whether an added token of that pass begins with the byte
    Merge *merges;                                // (merge_count) by rank
    int merge_count;
    uint64_t *pairs; // (pair_mask + 1) the hash table
    uint32_t pair_mask;
    uint8_t byte_class[BYTE_VALUES];    // CharClass of every byte
    uint8_t classes[UNICODE_CLASS_END]; // and of every code point
};

// An empty tokenizer with its character classes; the caller fills in the rest.
int tokenizer_new(Tokenizer **out, Error *e);
// The length of the first word of text[0..bytes), bytes > 0, as GPT-2's pattern splits it.
size_t tokenizer_word(const Tokenizer *t, const char *text, size_t bytes);
// Builds the hash table from merges.
int tokenizer_index_merges(Tokenizer *t, Error *e);

#endif
