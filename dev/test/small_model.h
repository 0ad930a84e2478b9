// small_model: a small GPT-2 in which the parameters make every part matter, to test an engine through engine.h.
#pragma once

#include "model/engine.h"
#include "math/rng.h"

// Streams of rng.h that the trainer does not use.
enum { SMALL_PARAMS = 1000, SMALL_TOKENS = 2000, SMALL_DIRECTIONS = 3000 };

// Draws parameters far from the initial ones, since a new GPT-2 has almost linear softmax and GELU, biases of 0 and
// gammas of 1. flat: (model->flat_count), zero outside the tensors.
static inline void small_params(const Model *model, uint64_t seed, float *flat) {
    for (size_t i = 0; i < model->flat_count; i++) flat[i] = 0;
    for (int k = 0; k < model->tensor_count; k++) {
        const Tensor *t = &model->tensors[k];
        double deviation = t->dimensions == 1 ? 0.2 : t->group == GROUP_EMBEDDING ? 0.3 : 1 / sqrt((double)t->rows);
        double mean = t->init == INIT_ONE ? 1 : 0;
        for (size_t i = 0; i < t->count; i++)
            flat[t->offset + i] = (float)(mean + deviation * rng_normal(seed, SMALL_PARAMS + (uint64_t)k, i));
    }
}

// Draws uniform tokens. In a small vocabulary tokens recur within a row, so the tied weight's cross term is large.
static inline void small_tokens(int vocab, uint64_t seed, size_t n, uint16_t *tokens) {
    for (size_t i = 0; i < n; i++)
        tokens[i] = (uint16_t)(rng_block(seed, SMALL_TOKENS, i / 4).word[i % 4] % (uint32_t)vocab);
}

// Clears gradients, then runs forward and backward over rows of seq_len + 1 tokens, micro_batch rows at a time.
static inline int small_batch(Engine *engine, const uint16_t *tokens, int rows, int seq_len, int micro_batch,
                              GnsMode mode, Error *e) {
    TRY(engine_begin_step(engine, e));
    for (int b = 0; b < rows; b += micro_batch) {
        int n = rows - b < micro_batch ? rows - b : micro_batch;
        TRY(engine_micro_step(engine, tokens + (size_t)b * (size_t)(seq_len + 1), n, mode, e));
    }
    return 0;
}

// Returns |a - b| / |b| in the Euclidean norm.
static inline double relative_error(const float *a, const float *b, size_t n) {
    double off = 0, square = 0;
    for (size_t i = 0; i < n; i++) off += pow((double)a[i] - b[i], 2), square += pow((double)b[i], 2);
    return sqrt(off / square);
}

static inline double cosine_of(const float *a, const float *b, size_t n) {
    double aa = 0, bb = 0, ab = 0;
    for (size_t i = 0; i < n; i++) aa += (double)a[i] * a[i], bb += (double)b[i] * b[i], ab += (double)a[i] * b[i];
    return ab / sqrt(aa * bb);
}
