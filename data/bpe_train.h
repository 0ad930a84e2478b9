// bpe_train: learns the merges of a byte-level BPE (Sennrich et al. 2016, arXiv 1508.07909, section 3.2): count the
// words of a text; then, again and again, make one token of the pair of adjacent tokens that occurs most often.
//
// Of pairs that occur equally often the one of the smaller tokens wins, and bytes are numbered as GPT-2's are, so the
// result is a function of the text alone, and the same as the package tokenizers makes (dev/test/data/compare_tokenizers.py).
#ifndef GNS_BPE_TRAIN_H
#define GNS_BPE_TRAIN_H

#include "text/tokenizer.h"

typedef struct BpeTrainer BpeTrainer;
int bpe_create(BpeTrainer **out, Error *e);
void bpe_destroy(BpeTrainer *b); // NULL is fine

// Counts the words of a text, as `words` splits it, with those of the texts before.
int bpe_add_text(BpeTrainer *b, const Tokenizer *words, const char *text, size_t bytes, Error *e);
uint32_t bpe_word_count(const BpeTrainer *b); // different ones so far

// Trains *t, which comes from tokenizer_new, on the words counted so far: at most vocab_size tokens, the last of them
// <|endoftext|>. Once for a trainer.
int bpe_train(BpeTrainer *b, Tokenizer *t, int vocab_size, Error *e);

#endif
