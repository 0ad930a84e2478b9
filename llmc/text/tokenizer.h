// tokenizer: turns text into tokens and back. One interface serves three kinds:
//
//   bytes     256 tokens: token b is byte b. There is no end-of-text token.
//   GPT-2 BPE byte-level byte pair encoding (Radford et al. 2019; Sennrich et al. 2016, arXiv 1508.07909), from
//             encoder.json + vocab.bpe, vocab.json + merges.txt, or tokenizer.json
//   chars     each token is a character; no merges (scripts/from_nanogpt.py). Stored as a BPE whose vocabulary has the
//             ASCII characters; other characters are added tokens
//
// Bytes and BPE encode any bytes, valid UTF-8 or not; chars refuses characters without a token. Decoding gives
// exactly the encoded bytes. Added tokens ("<|user|>") are found before the text is split into words, as in Hugging
// Face's tokenizers. "<|endoftext|>" in a document is ordinary text.
#pragma once

#include "base/manifest.h"
#include "base/text.h"

enum {
    VOCAB_MAX = 65536, // tokens are uint16
    BYTE_VALUES = 256
};
enum { MERGES_MAX = 65535, PAIR_SLOTS = 2 * VOCAB_MAX, TEXT_SLOTS = 2 * VOCAB_MAX };

typedef struct {
    uint16_t left, right, merged;
} Merge;

// Flags of a token, from the files. Added tokens are matched literally in the text. The first pass finds those that are
// not NORMALIZED, the second pass finds the others in the remaining text. NORMALIZED has no other effect.
enum {
    TOKEN_LITERAL = 1, // the files spell the token's text as it is, not in GPT-2's alphabet
    TOKEN_ADDED = 2,
    TOKEN_NORMALIZED = 4,
    TOKEN_SPECIAL = 8 // decoders can omit the token
};
enum { ADDED_PASSES = 2 };

typedef enum { CLASS_OTHER, CLASS_LETTER, CLASS_NUMBER, CLASS_SPACE } CharClass;
enum { UNICODE_CLASS_END = 0x31350 }; // this code point and all higher ones are CLASS_OTHER

typedef struct {    // immutable: threads may share it
    int vocab_size; // at most VOCAB_MAX
    int eot;        // the token that ends documents, in GPT-2 <|endoftext|>; -1: none
    bool is_bytes;
    uint32_t start[VOCAB_MAX + 1]; // where each token begins in `text`
    uint8_t flags[VOCAB_MAX];      // TOKEN_*
    int byte_token[BYTE_VALUES];   // -1: none, in a vocabulary of characters
    bool lacks_bytes;              // some byte has no token
    int added_count;
    bool added_spaced;                                 // in some added token a space follows another character
    uint32_t added_longest[ADDED_PASSES][BYTE_VALUES]; // bytes of a pass's longest added token with this first byte
    uint32_t by_text[TEXT_SLOTS];                      // a hash table with open addressing: token + 1; 0: empty
    uint64_t pairs[PAIR_SLOTS]; // a hash table with open addressing: left << 48 | right << 32 | rank << 16 | merged;
                                // 0: empty (token 0 never merges with itself to token 0)
    Merge merges[MERGES_MAX];   // (merge_count) by rank; without merges every token is a byte or a character
    int merge_count;
    uint8_t classes[UNICODE_CLASS_END]; // CharClass of each code point below UNICODE_CLASS_END
    char text[];                        // the tokens' bytes, one token after another
} Tokenizer;

int tokenizer_create_bytes(Tokenizer **out, Error *e);

// Loads a tokenizer: `path` is a directory with its files, or the word "bytes". ERR_INPUT if tokenizer_exists is false.
// Release tokenizers with memory_free.
int tokenizer_load(Tokenizer **out, const char *path, Error *e);
bool tokenizer_exists(const char *directory);

// Returns the bytes of one token, without a NUL. A token outside the vocabulary (padding) has 0 bytes.
const char *tokenizer_decode(const Tokenizer *t, int token, size_t *bytes);

// Caches the tokens of words, for bulk work with one tokenizer. Each thread needs its own. Release with memory_free.
typedef struct WordCache WordCache;
int word_cache_create(WordCache **out, Error *e);

// Encodes all of text. `out` needs room for `bytes` tokens: no token is shorter than a byte. cache: NULL is fine.
int tokenizer_encode(const Tokenizer *t, WordCache *cache, const char *text, size_t bytes, uint16_t *out, size_t *count,
                     Error *e);

// Writes vocab.json, merges.txt and tokenizer_config.json, synced to disk, for transformers' GPT2Tokenizer and for
// tokenizer_load. The byte tokenizer becomes a BPE without merges. context: tokens that the model reads; 0: unknown.
// The files lie in the manifest's directory; the manifest lists them.
int tokenizer_save(const Tokenizer *t, int context, Manifest *manifest, Error *e);

// Returns the last position in text[0..bytes) where a cut changes no tokens, whatever follows the text. Returns 0 if no
// position is safe, or if t->added_spaced.
size_t tokenizer_cut(const Tokenizer *t, const char *text, size_t bytes);

// ---- For tokenizer_files.c and tests --------------------------------------------------------------------------------

// Creates a tokenizer that has only its character classes, and room for `text_bytes` of text.
int tokenizer_new(Tokenizer **out, size_t text_bytes, Error *e);
void tokenizer_add_merge(Tokenizer *t, Merge merge); // the merge gets the next rank
// Returns the end of the first word of the text from s to end, s < end, by GPT-2's pattern.
const uint8_t *tokenizer_word(const Tokenizer *t, const uint8_t *s, const uint8_t *end);
// Returns the slot of the token with these bytes, or the empty slot for it. hash: hash_bytes of the bytes.
uint32_t *tokenizer_slot(const Tokenizer *t, uint64_t hash, const void *text, size_t bytes);
