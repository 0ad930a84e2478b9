// shard: finds the parts of the flat arrays that a rank keeps, and their places in memory, for both engines.
#pragma once

#include "model/engine.h"

#include <assert.h>

// ---- Owned arrays ---------------------------------------------------------------------------------------------------

// Returns the number of elements of an owned array: the owned ranges (EngineConfig.owned), one after another.
static inline size_t shard_elements(const EngineConfig *config) {
    size_t n = config->owned_count ? 0 : config->model->flat_count;
    for (int i = 0; i < config->owned_count; i++) n += range_length(config->owned[i]);
    return n;
}

// True if the fp32 masters (STATE_PARAM) are an owned array, separate from the weights that the passes read.
static inline bool shard_masters_apart(const EngineConfig *config) {
    return config->dtype != DTYPE_FP32 || config->shard_weights;
}

// True if the array of a kind covers the whole model; false if it is an owned array.
static inline bool shard_is_whole(const EngineConfig *config, StateKind kind) {
    if (kind == STATE_PARAM && !shard_masters_apart(config)) return true;
    return config->owned_count == 0 || (kind == STATE_GRAD && !config->shard_grads);
}

// A piece of a range that this rank stores, and its offset in the stored array.
typedef struct {
    Range range;
    size_t place;
} Piece;

// Finds the next piece of a range of an array, in ascending order. False after the last.
//     Piece piece;
//     for (int next = 0; shard_next(config, kind, range, &next, &piece);)
static inline bool shard_next(const EngineConfig *config, StateKind kind, Range range, int *next, Piece *piece) {
    const Range all = {0, config->model->flat_count};
    const bool whole = shard_is_whole(config, kind);
    int count = whole ? 1 : config->owned_count;
    const Range *held = whole ? &all : config->owned;
    size_t place = 0;
    for (int i = 0; i < count && range_length(range); place += range_length(held[i++])) {
        Range part = range_overlap(range, held[i]);
        if (i < *next || !range_length(part)) continue;
        *next = i + 1;
        *piece = (Piece){part, place + (part.begin - held[i].begin)};
        return true;
    }
    return false;
}

// Returns the offset of a range in an owned array. It must lie within one owned range unless owned_count is 0.
static inline size_t shard_place(const EngineConfig *config, Range range) {
    Piece piece = {range, 0};
    int next = 0;
    bool all =
        shard_next(config, STATE_MOMENT1, range, &next, &piece) && range_length(piece.range) == range_length(range);
    assert(all || !range_length(range)), (void)all;
    return piece.place;
}

// Returns the offset of a range in the step's summed gradients; with shard_grads that is an owned array.
static inline size_t shard_grad_sum_place(const EngineConfig *config, Range range) {
    return config->shard_grads ? shard_place(config, range) : range.begin;
}

// ---- Buckets that share slots of memory -----------------------------------------------------------------------------

// The weights that forward and backward read lie in one array, gradients in another. Each holds the whole flat array.
// With shard_weights (gradients: shard_grads) it holds the embeddings, and two slots that the blocks share. Bucket i is
// in slot i modulo 2, so a block is gathered while its predecessor computes. A slot has room for the longest bucket,
// the last block's, which includes ln_f.
enum { SHARD_SLOTS = 2 };

// Returns the offset of slot i, after the embeddings.
static inline size_t shard_slot(const Model *model, int i) {
    return model_bucket(model, 0).end + (size_t)i * range_length(model_bucket(model, model->config.layers));
}

// Returns the number of elements of such an array. slots: shard_weights or shard_grads.
static inline size_t shard_slotted_elements(const Model *model, bool slots) {
    return slots ? shard_slot(model, SHARD_SLOTS) : model->flat_count;
}

// Return an element's offset in the array of weights, or of gradients. element: its index in the flat array.
static inline size_t shard_slotted_place(const Model *model, bool slots, size_t element) {
    const int bucket = slots ? model_bucket_at(model, element) : 0;
    if (bucket == 0) return element;
    return shard_slot(model, bucket % SHARD_SLOTS) + (element - model_bucket(model, bucket).begin);
}
static inline size_t shard_weight_place(const EngineConfig *config, size_t element) {
    return shard_slotted_place(config->model, config->shard_weights, element);
}
static inline size_t shard_grad_place(const EngineConfig *config, size_t element) {
    return shard_slotted_place(config->model, config->shard_grads, element);
}
