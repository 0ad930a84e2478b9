// tokenizer_impl: the inside of a tokenizer, for tokenizer.c (text to tokens and back), tokenizer_files.c (the files on
// disk), data/writer.c (which bytes are tokens) and tests.
#pragma once

#include "text/tokenizer.h"

// A slot of the hash table of merges, with open addressing: left << 48 | right << 32 | rank << 16 | merged token. No
// merge has rank 65535, so all ones is an empty slot.
#define MERGE_EMPTY UINT64_MAX
enum { MERGES_MAX = 65535 };

typedef struct {
    uint16_t left, right, merged;
} Merge;

// A token that is matched literally in the text. A first pass finds those that are not `normalized`, a second pass the
// others in the text between. (There is no normalizer, so `normalized` has no other effect.)
typedef struct {
    uint16_t token;
    bool normalized, special; // special: decoders can leave it out
} AddedToken;
enum { ADDED_PASSES = 2, TEXT_SLOTS = 2 * VOCAB_MAX };

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
    char *text;       // the tokens' bytes, one token after another
    uint32_t *start;  // (vocab_size + 1) the first byte of each token
    uint8_t *literal; // (vocab_size) whether the files name the token by its text, not in GPT-2's alphabet
    uint16_t byte_token[BYTE_VALUES];
    bool lacks[BYTE_VALUES]; // bytes without a token, in a vocabulary of characters
    bool lacks_some;
    AddedToken *added; // (added_count) by number
    int added_count;
    uint8_t *added_pass; // (vocab_size) 1 + the pass that finds the token; 0: it is not added
    uint32_t added_longest[ADDED_PASSES][BYTE_VALUES]; // bytes of that pass's longest one that begins with this byte
    uint32_t by_text[TEXT_SLOTS];                      // a hash table with open addressing: token + 1, or 0
    Merge *merges;                                     // (merge_count) by rank
    int merge_count;
    uint64_t *pairs; // (pair_mask + 1) the hash table
    uint32_t pair_mask;
    uint8_t byte_class[BYTE_VALUES];    // CharClass of every byte
    uint8_t classes[UNICODE_CLASS_END]; // and of every code point
};

// A tokenizer with its character classes and nothing else.
int tokenizer_new(Tokenizer **out, Error *e);
// Memory for the tokens: text, literal, added_pass and start, the last three cleared.
int tokenizer_room(Tokenizer *t, int vocab_size, size_t text_bytes, Error *e);
// The length of the first word of text[0..bytes), bytes > 0, as GPT-2's pattern splits it.
size_t tokenizer_word(const Tokenizer *t, const char *text, size_t bytes);
// Builds the hash table of merges.
int tokenizer_index_merges(Tokenizer *t, Error *e);
// The slot of the token with these bytes, or the empty one for it. hash: hash_bytes of them.
uint32_t *tokenizer_slot(const Tokenizer *t, uint64_t hash, const void *text, size_t bytes);
