#include "model/shard.h"

#include <assert.h>

size_t shard_elements(const EngineConfig *config) {
    size_t n = config->owned_count ? 0 : config->model->flat_count;
    for (int i = 0; i < config->owned_count; i++) n += range_length(config->owned[i]);
    return n;
}

bool shard_masters_apart(const EngineConfig *config) { return config->dtype != DTYPE_FP32 || config->shard_weights; }

bool shard_is_whole(const EngineConfig *config, StateKind kind) {
    if (kind == STATE_PARAM && !shard_masters_apart(config)) return true;
    return config->owned_count == 0 || (kind == STATE_GRAD && !config->shard_grads);
}

bool shard_next(const EngineConfig *config, StateKind kind, Range range, int *next, Piece *piece) {
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

size_t shard_place(const EngineConfig *config, Range range) {
    Piece piece = {range, 0};
    int next = 0;
    bool all =
        shard_next(config, STATE_MOMENT1, range, &next, &piece) && range_length(piece.range) == range_length(range);
    assert(all || !range_length(range)), (void)all;
    return piece.place;
}

// ---- Buckets that share slots of memory -----------------------------------------------------------------------------

// Returns the offset of slot i, behind the embeddings. A slot holds the last block's bucket, the longest, since it
// includes ln_f.
static size_t slot_begin(const Model *model, int i) {
    return model_bucket(model, 0).end + (size_t)i * range_length(model_bucket(model, model->config.layers));
}

static size_t slotted_place(const Model *model, size_t element) {
    int bucket = model_bucket_at(model, element);
    if (bucket == 0) return element;
    return slot_begin(model, bucket % SHARD_SLOTS) + (element - model_bucket(model, bucket).begin);
}

size_t shard_grad_elements(const EngineConfig *config) {
    return config->shard_grads ? slot_begin(config->model, SHARD_SLOTS) : config->model->flat_count;
}

size_t shard_grad_place(const EngineConfig *config, size_t element) {
    return config->shard_grads ? slotted_place(config->model, element) : element;
}

size_t shard_weight_elements(const EngineConfig *config) {
    return config->shard_weights ? slot_begin(config->model, SHARD_SLOTS) : config->model->flat_count;
}

size_t shard_weight_place(const EngineConfig *config, size_t element) {
    return config->shard_weights ? slotted_place(config->model, element) : element;
}

size_t shard_grad_sum_place(const EngineConfig *config, Range range) {
    return config->shard_grads ? shard_place(config, range) : range.begin;
}
