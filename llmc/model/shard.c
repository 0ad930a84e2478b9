#include "model/shard.h"

#include <assert.h>

// The ranges that an array holds.
static int held_count(const EngineConfig *config, bool whole) {
    return whole || !config->owned_count ? 1 : config->owned_count;
}

static Range held(const EngineConfig *config, bool whole, int i) {
    return whole || !config->owned_count ? (Range){0, config->model->flat_count} : config->owned[i];
}

static size_t elements_before(const EngineConfig *config, bool whole, int i) {
    size_t n = 0;
    for (int k = 0; k < i; k++) n += range_length(held(config, whole, k));
    return n;
}

size_t shard_elements(const EngineConfig *config) { return elements_before(config, false, held_count(config, false)); }

bool shard_next(const EngineConfig *config, bool whole, Range range, int *next, Piece *piece) {
    while (*next < held_count(config, whole)) {
        int i = (*next)++;
        Range there = held(config, whole, i), part = range_overlap(range, there);
        if (!range_length(part)) continue;
        *piece = (Piece){part, elements_before(config, whole, i) + (part.begin - there.begin)};
        return true;
    }
    return false;
}

size_t shard_place(const EngineConfig *config, Range range) {
    Piece piece = {range, 0};
    int next = 0;
    bool all = shard_next(config, false, range, &next, &piece) && range_length(piece.range) == range_length(range);
    assert(all || !range_length(range)), (void)all;
    return piece.place;
}

// ---- Buckets that take turns in memory ------------------------------------------------------------------------------

// The last block is the longest: ln_f comes with it.
static size_t block_elements(const Model *model) { return range_length(model_bucket(model, model->config.layers)); }

// Elements of an array of the embeddings and `slots` blocks; 0 slots: of the whole model.
static size_t slotted_elements(const Model *model, int slots) {
    if (!slots) return model->flat_count;
    return range_length(model_bucket(model, 0)) + (size_t)slots * block_elements(model);
}

static size_t slotted_place(const Model *model, int slots, size_t element) {
    int bucket = model_bucket_at(model, element);
    if (!slots || bucket == 0) return element;
    size_t first = range_length(model_bucket(model, 0)) + (size_t)(bucket % slots) * block_elements(model);
    return first + (element - model_bucket(model, bucket).begin);
}

static int grad_slots(const EngineConfig *config) { return config->shard_grads ? 2 : 0; }
static int weight_slots(const EngineConfig *config) { return config->shard_weights ? SHARD_WEIGHT_SLOTS : 0; }

size_t shard_grad_elements(const EngineConfig *config) { return slotted_elements(config->model, grad_slots(config)); }

size_t shard_grad_place(const EngineConfig *config, size_t element) {
    return slotted_place(config->model, grad_slots(config), element);
}

size_t shard_weight_elements(const EngineConfig *config) {
    return slotted_elements(config->model, weight_slots(config));
}

size_t shard_weight_place(const EngineConfig *config, size_t element) {
    return slotted_place(config->model, weight_slots(config), element);
}

bool shard_keeps_weights(const EngineConfig *config, Range range) {
    Piece piece;
    int next = 0;
    bool whole = !config->shard_weights || model_bucket_at(config->model, range.begin) == 0;
    return whole || shard_next(config, false, range, &next, &piece);
}

size_t shard_grad_sum_place(const EngineConfig *config, Range range) {
    return config->shard_grads ? shard_place(config, range) : range.begin;
}
