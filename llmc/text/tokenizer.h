// tokenizer: turns text into tokens and back. One interface serves three kinds:
//
//   bytes     256 tokens: token b is byte b. There is no end-of-text token.
//   GPT-2 BPE byte-level byte pair encoding (Radford et al. 2019; Sennrich et al. 2016, arXiv 1508.07909), from
//             encoder.json + vocab.bpe, vocab.json + merges.txt, or tokenizer.json
//   chars     each token is a character; no merges (scripts/from_nanogpt.py). Stored as a BPE whose vocabulary has the
//             ASCII characters; other characters are added tokens
//
// The first two encode any bytes, valid UTF-8 or not; the third refuses characters without a token. Decoding gives
// exactly the encoded bytes. Added tokens ("<|user|>") are found before the text is split into words, as in Hugging
// Face's tokenizers. "<|endoftext|>" in a document is ordinary text.
#pragma once

#include "base/manifest.h"
#include "base/text.h"

enum {
    VOCAB_MAX = 65536, // tokens are uint16
    BYTE_VALUES = 256
};

typedef struct Tokenizer Tokenizer; // immutable: any number of threads may use one

int tokenizer_create_bytes(Tokenizer **out, Error *e);

// Loads a tokenizer: `path` is a directory with its files, or the word "bytes". ERR_INPUT if tokenizer_exists is false.
int tokenizer_load(Tokenizer **out, const char *path, Error *e);
bool tokenizer_exists(const char *directory);
void tokenizer_destroy(Tokenizer *t); // NULL is fine

int tokenizer_vocab_size(const Tokenizer *t); // at most VOCAB_MAX
int tokenizer_eot(const Tokenizer *t);        // the token that ends documents, <|endoftext|> in GPT-2's; -1: none
bool tokenizer_is_bytes(const Tokenizer *t);
bool tokenizer_has_merges(const Tokenizer *t); // false: every token is a byte or a character

// Returns the bytes of one token, without a NUL. A token outside the vocabulary (padding) has 0 bytes.
const char *tokenizer_decode(const Tokenizer *t, int token, size_t *bytes);

// Encodes all of text. `out` has room for `bytes` tokens: no token is shorter than a byte.
int tokenizer_encode(const Tokenizer *t, const char *text, size_t bytes, uint16_t *out, size_t *count, Error *e);

// Writes vocab.json, merges.txt and tokenizer_config.json, synced to disk, for transformers' GPT2Tokenizer and for
// tokenizer_load. The byte tokenizer becomes a BPE without merges. context: tokens that the model reads; 0: unknown.
// The files lie in the manifest's directory; the manifest lists them.
int tokenizer_save(const Tokenizer *t, int context, Manifest *manifest, Error *e);

// An encoder caches the tokens of words, for bulk work. Each thread needs its own.
typedef struct Encoder Encoder;
int encoder_create(Encoder **out, const Tokenizer *t, Error *e);
void encoder_destroy(Encoder *encoder); // NULL is fine
int encoder_run(Encoder *encoder, const char *text, size_t bytes, uint16_t *out, size_t *count, Error *e);

// Returns the last position in text[0..bytes) where a cut changes no tokens, whatever follows the text. Returns 0 if
// there is none, or if some added token contains a space after another character.
size_t tokenizer_cut(const Tokenizer *t, const char *text, size_t bytes);
