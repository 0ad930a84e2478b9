// dropout: chooses the elements that drop (Srivastava et al. 2014, JMLR 15). The choice is a pure function of seed,
// example, layer, place, head, row and column. Any rank, thread or pass can compute it again, so no mask is stored.
//
// An element drops if its 15 random bits are below 2^15 p, so p is a multiple of 2^-15. Other elements are multiplied
// by 1 / (1 - p). Philox has 7 rounds here, the fewest that pass BigCrush (Salmon et al. 2011, table 2). A block of
// four words serves 8 elements, two per word: the element in the even column uses the low half. Element (row, c) has
//
//     stream   2^63 + the example's number; no other draw uses such a stream
//     block    place 2^52 + layer 2^42 + head 2^32 + r 2^16 + k
//     (T, C)   r = row, k = c / 8, word c % 8 / 2. A block serves 8 neighbouring columns
//     (T, T)   r = row / 16 * 8 + row % 8, k = c / 16 * 4 + c % 8 / 2, word c / 8 % 2 * 2 + row / 8 % 2. A block serves
//              one lane's elements of a tensor core's 16 x 16 result
#pragma once

#include "math/rng.h"

// Where GPT-2 drops: the sum of the embeddings (T, C), attention's probabilities (NH, T, T), and the outputs of
// attention and MLP (T, C), before they are added to the residual stream.
typedef enum { DROPOUT_EMBEDDING, DROPOUT_PROBABILITY, DROPOUT_ATTENTION, DROPOUT_MLP } DropoutPlace;

// Dropout of one layer and example.
typedef struct {
    uint64_t seed, example;
    uint32_t below; // 2^15 p; 0: nothing drops
    int layer;
} Dropout;

// DROPOUT_MOST, the largest `below`, is fp16's infinity, because the GPU compares the random bits as fp16 numbers.
enum { DROPOUT_ONE = 1 << 15, DROPOUT_MOST = 0x7c00, DROPOUT_BITS = DROPOUT_ONE - 1, DROPOUT_ROUNDS = 7 };

GNS_HD static inline Dropout dropout_of(double p, uint64_t seed) {
    const uint32_t below = (uint32_t)(p * (double)DROPOUT_ONE + 0.5), most = DROPOUT_MOST;
    Dropout d = {seed, 0, below < most ? below : most, 0};
    return d;
}

GNS_HD static inline Dropout dropout_at(Dropout d, uint64_t example, int layer) {
    d.example = example;
    d.layer = layer;
    return d;
}

GNS_HD static inline float dropout_scale(Dropout d) { return (float)DROPOUT_ONE / (float)(DROPOUT_ONE - d.below); }

// Philox's counter for block (r, k).
GNS_HD static inline RngBlock dropout_counter(Dropout d, DropoutPlace place, uint32_t head, uint32_t r, uint32_t k) {
    RngBlock counter = {{r << 16 | k, (uint32_t)place << 20 | (uint32_t)d.layer << 10 | head, (uint32_t)d.example,
                         (uint32_t)1 << 31 | (uint32_t)(d.example >> 32)}};
    return counter;
}

// The factor of an element: 0 or dropout_scale.
GNS_HD static inline float dropout_factor(Dropout d, DropoutPlace place, uint32_t head, uint32_t row, uint32_t c) {
    bool pair = place == DROPOUT_PROBABILITY; // (T, T), else (T, C)
    uint32_t r = pair ? row / 16 * 8 + row % 8 : row, k = pair ? c / 16 * 4 + c % 8 / 2 : c / 8;
    uint32_t word = pair ? c / 8 % 2 * 2 + row / 8 % 2 : c % 8 / 2;
    RngBlock block =
        rng_rounds(dropout_counter(d, place, head, r, k), (uint32_t)d.seed, (uint32_t)(d.seed >> 32), DROPOUT_ROUNDS);
    uint32_t bits = block.word[word] >> 16 * (c % 2) & DROPOUT_BITS;
    return bits < d.below ? 0 : dropout_scale(d);
}
