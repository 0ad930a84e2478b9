// shard: which parts of the flat arrays a rank keeps, and where, alike for both engines.
#pragma once

#include "model/engine.h"

GNS_C_BEGIN

// Elements of an array for the owned ranges alone (EngineConfig.owned), which lie one after the other.
size_t shard_elements(const EngineConfig *config);

// A piece of a range that this rank stores, and its offset in the stored array.
typedef struct {
    Range range;
    size_t place;
} Piece;

// The pieces of a range in ascending order; false when there is none left. whole: the array is there as a whole.
//     Piece piece;
//     for (int next = 0; shard_next(config, whole, range, &next, &piece);)
bool shard_next(const EngineConfig *config, bool whole, Range range, int *next, Piece *piece);

// Offset of a range that lies within a single owned range, or of all there is.
size_t shard_place(const EngineConfig *config, Range range);

// The gradients of a micro-step: all of them; or, with shard_grads, those of the embeddings, kept during the whole
// micro-step, and of two blocks, whose memory the other blocks reuse in turn.
size_t shard_grad_elements(const EngineConfig *config);
size_t shard_grad_place(const EngineConfig *config, size_t element);

// Offset of a range in the step's summed gradients; with shard_grads these are of owned ranges alone.
size_t shard_grad_sum_place(const EngineConfig *config, Range range);

// The weights that forward and backward read: all of them; or, with shard_weights, those of the embeddings, and of a few
// blocks, one in each slot: bucket i in slot i modulo SHARD_WEIGHT_SLOTS. Two slots suffice for a gathering beside the
// arithmetic of the block before it.
enum { SHARD_WEIGHT_SLOTS = 2 };
size_t shard_weight_elements(const EngineConfig *config);
size_t shard_weight_place(const EngineConfig *config, size_t element);

// Does a load of the range's weights reach anything that this rank keeps?
bool shard_keeps_weights(const EngineConfig *config, Range range);

GNS_C_END
