// shard: which parts of the flat arrays a rank keeps, and where; the same for both engines.
#pragma once

#include "model/engine.h"

GNS_C_BEGIN

// Elements of an array for the owned ranges alone (EngineConfig.owned). It holds them one after the other.
size_t shard_elements(const EngineConfig *config);

// A piece of a range that this rank stores, and its offset in the stored array.
typedef struct {
    Range range;
    size_t place;
} Piece;

// The next piece of a range, in ascending order; false after the last. whole: this rank stores the whole array.
//     Piece piece;
//     for (int next = 0; shard_next(config, whole, range, &next, &piece);)
bool shard_next(const EngineConfig *config, bool whole, Range range, int *next, Piece *piece);

// Offset, in such an array, of a range that lies within one owned range; without owned ranges, of any range.
size_t shard_place(const EngineConfig *config, Range range);

// A micro-step's gradients in memory, and the offset of one of them. With shard_grads: the embeddings' and two slots,
// which the blocks share. Otherwise: all.
size_t shard_grad_elements(const EngineConfig *config);
size_t shard_grad_place(const EngineConfig *config, size_t element);

// Offset of a range in the step's summed gradients; with shard_grads these are of owned ranges alone.
size_t shard_grad_sum_place(const EngineConfig *config, Range range);

// The weights that forward and backward read. With shard_weights: the embeddings', and one block's in each slot, bucket i
// in slot i modulo SHARD_WEIGHT_SLOTS. Otherwise: all. With two slots a block is gathered while the one before computes.
enum { SHARD_WEIGHT_SLOTS = 2 };
size_t shard_weight_elements(const EngineConfig *config);
size_t shard_weight_place(const EngineConfig *config, size_t element);

// True if this rank keeps weights of the range: only then a load of it has an effect.
bool shard_keeps_weights(const EngineConfig *config, Range range);

GNS_C_END
