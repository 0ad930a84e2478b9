// tokenizer_impl: the inside of a tokenizer. For tokenizer.c (text to tokens and back), tokenizer_files.c (the files on
// disk), data/writer.c (which bytes are tokens) and tests.
#pragma once

#include "text/tokenizer.h"

enum { MERGES_MAX = 65535, PAIR_SLOTS = 2 * VOCAB_MAX, TEXT_SLOTS = 2 * VOCAB_MAX };

typedef struct {
    uint16_t left, right, merged;
} Merge;

// What the files say of a token. Added tokens are matched literally in the text: a first pass finds those that are not
// NORMALIZED, a second pass the others in the text between. NORMALIZED has no other effect: there is no normalizer.
enum {
    TOKEN_LITERAL = 1, // named by its text, not in GPT-2's alphabet
    TOKEN_ADDED = 2,
    TOKEN_NORMALIZED = 4,
    TOKEN_SPECIAL = 8 // decoders can leave it out
};
enum { ADDED_PASSES = 2 };

typedef enum {
    CLASS_OTHER,
    CLASS_LETTER,
    CLASS_NUMBER,
    CLASS_SPACE,
    CLASS_MULTI // a byte of a multi-byte character
} CharClass;
enum { UNICODE_CLASS_END = 0x31350 }; // every code point from here on is CLASS_OTHER

struct Tokenizer {
    int vocab_size, eot;
    bool is_bytes;
    uint32_t start[VOCAB_MAX + 1]; // of each token in `text`
    uint8_t flags[VOCAB_MAX];      // TOKEN_*
    uint16_t byte_token[BYTE_VALUES];
    bool lacks[BYTE_VALUES]; // true: a vocabulary of characters has no token for the byte
    bool lacks_some;
    int added_count;
    bool added_spaced;                                 // an added token has a space after another character
    uint32_t added_longest[ADDED_PASSES][BYTE_VALUES]; // bytes of the pass's longest token with this first byte
    uint32_t by_text[TEXT_SLOTS];                      // a hash table with open addressing: token + 1; 0: empty
    uint64_t pairs[PAIR_SLOTS]; // a hash table with open addressing: left << 48 | right << 32 | rank << 16 | merged;
                                // 0: empty (token 0 does not merge with itself to token 0)
    Merge merges[MERGES_MAX];   // (merge_count) by rank
    int merge_count;
    uint8_t byte_class[BYTE_VALUES];    // CharClass of every byte ...
    uint8_t classes[UNICODE_CLASS_END]; // ... and of every code point
    char text[];                        // the tokens' bytes, one token after another
};

// Creates a tokenizer that has only its character classes, and room for `text_bytes` of text.
int tokenizer_new(Tokenizer **out, size_t text_bytes, Error *e);
void tokenizer_add_merge(Tokenizer *t, Merge merge); // of the next rank
// Returns the end of the first word of the text from s to end, s < end, by GPT-2's pattern.
const uint8_t *tokenizer_word(const Tokenizer *t, const uint8_t *s, const uint8_t *end);
// Returns the slot of the token with these bytes, or the empty slot for it. hash: hash_bytes of the bytes.
uint32_t *tokenizer_slot(const Tokenizer *t, uint64_t hash, const void *text, size_t bytes);
