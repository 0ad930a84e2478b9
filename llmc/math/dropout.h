// dropout: which elements drop (Srivastava et al. 2014, JMLR 15), as a pure function of seed, example, layer, place, head,
// row and column. Any rank, thread or pass can ask again, so no mask is stored.
//
// An element drops where its 16 random bits are below 2^16 p; the others are multiplied by 1 / (1 - p), so p is a
// multiple of 2^-16. A block of Philox has the bits of 8 elements of a row, 16 columns apart: neighbouring columns are
// neighbouring lanes of a vector, and what a thread holds of a tensor core's tile is in one block.
//
//     stream   2^63 + the example's number: no other draw has such a stream
//     block    place 2^52 + layer 2^42 + head 2^32 + row 2^16 + c / 128 * 16 + c % 16   for column c
//     bits     half h = c / 16 % 8 of the block's four words, of each the low one first
#pragma once

#include "math/rng.h"

// GPT-2's places: the sum of the embeddings (T, C), attention's probabilities (NH, T, T), and what attention and the MLP
// add to the residual stream (T, C).
typedef enum { DROPOUT_EMBEDDING, DROPOUT_PROBABILITY, DROPOUT_ATTENTION, DROPOUT_MLP } DropoutPlace;

// Of one layer and example.
typedef struct {
    uint64_t seed, example;
    uint32_t below; // 2^16 p; 0: nothing drops
    int layer;
} Dropout;

enum { DROPOUT_ONE = 1 << 16, DROPOUT_LANES = 16, DROPOUT_HALVES = 8, DROPOUT_SPAN = DROPOUT_LANES * DROPOUT_HALVES };

GNS_HD static inline Dropout dropout_of(double p, uint64_t seed) {
    uint32_t below = (uint32_t)(p * (double)DROPOUT_ONE + 0.5);
    Dropout d = {seed, 0, below < DROPOUT_ONE ? below : DROPOUT_ONE - 1, 0};
    return d;
}

GNS_HD static inline Dropout dropout_at(Dropout d, uint64_t example, int layer) {
    d.example = example;
    d.layer = layer;
    return d;
}

GNS_HD static inline float dropout_scale(Dropout d) { return (float)DROPOUT_ONE / (float)(DROPOUT_ONE - d.below); }

GNS_HD static inline uint64_t dropout_stream(Dropout d) { return (uint64_t)1 << 63 | d.example; }

// The block of columns c, c + 16, ..., of those with one c / 128.
GNS_HD static inline uint64_t dropout_block(Dropout d, DropoutPlace place, uint32_t head, uint32_t row, uint32_t c) {
    uint32_t where = (uint32_t)place << 20 | (uint32_t)d.layer << 10 | head;
    return (uint64_t)where << 32 | row << 16 | c / DROPOUT_SPAN * DROPOUT_LANES | c % DROPOUT_LANES;
}

// What an element is multiplied by.
GNS_HD static inline float dropout_factor(Dropout d, DropoutPlace place, uint32_t head, uint32_t row, uint32_t c) {
    RngBlock block = rng_block(d.seed, dropout_stream(d), dropout_block(d, place, head, row, c));
    uint32_t half = c / DROPOUT_LANES % DROPOUT_HALVES;
    uint32_t bits = block.word[half / 2] >> 16 * (half % 2) & 0xffff;
    return bits < d.below ? 0 : dropout_scale(d);
}
