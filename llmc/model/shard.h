// shard: finds the parts of the flat arrays that a rank keeps, and their places in memory, for both engines.
#pragma once

#include "model/engine.h"

GNS_C_BEGIN

// Returns the number of elements of an owned array: the owned ranges (EngineConfig.owned), one after another.
size_t shard_elements(const EngineConfig *config);

// A piece of a range that this rank stores, and its offset in the stored array.
typedef struct {
    Range range;
    size_t place;
} Piece;

// True if the fp32 masters (STATE_PARAM) are an owned array, separate from the weights that the passes read.
bool shard_masters_apart(const EngineConfig *config);

// True if the array of a kind covers the whole model; false if it is an owned array.
bool shard_is_whole(const EngineConfig *config, StateKind kind);

// Finds the next piece of a range of an array, in ascending order. False after the last.
//     Piece piece;
//     for (int next = 0; shard_next(config, kind, range, &next, &piece);)
bool shard_next(const EngineConfig *config, StateKind kind, Range range, int *next, Piece *piece);

// Returns the offset of a range in an owned array. The range must lie within one owned range, or anywhere if
// owned_count is 0.
size_t shard_place(const EngineConfig *config, Range range);

// Return the length of the gradient buffer, and the offset in it of an element of the flat array; both count elements.
// The buffer holds all gradients; with shard_grads the embeddings' gradients and two slots that the blocks share.
enum { SHARD_SLOTS = 2 };
size_t shard_grad_elements(const EngineConfig *config);
size_t shard_grad_place(const EngineConfig *config, size_t element);

// Returns the offset of a range in the step's summed gradients; with shard_grads that is an owned array.
size_t shard_grad_sum_place(const EngineConfig *config, Range range);

// Return the length of the weight buffer that forward and backward read, and the offset in it of an element of the flat
// array; both count elements. The buffer holds all weights; with shard_weights the embeddings' weights and two slots.
// Bucket i is in slot i modulo 2, so a block is gathered while its predecessor computes.
size_t shard_weight_elements(const EngineConfig *config);
size_t shard_weight_place(const EngineConfig *config, size_t element);

GNS_C_END
