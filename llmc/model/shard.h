// shard: what of the flat arrays a rank keeps, and where. For the engines, which both keep it in the same way.
#ifndef GNS_SHARD_H
#define GNS_SHARD_H

#include "model/engine.h"

#ifdef __cplusplus
extern "C" {
#endif

// Arrays for the owned ranges alone (EngineConfig.owned) hold these one behind the other.
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

// The one piece of a range that lies within a single owned one, or is all there is.
size_t shard_place(const EngineConfig *config, Range range);

// The gradients of a micro-step: all of them, or, with shard_grads, those of the embeddings, which it needs from its
// beginning to its end, and of two blocks, which the others take over in turn.
size_t shard_grad_elements(const EngineConfig *config);
size_t shard_grad_place(const EngineConfig *config, size_t element);

// The step's gradients, summed: where a range begins in them. With shard_grads there are those of owned ranges alone.
size_t shard_grad_sum_place(const EngineConfig *config, Range range);

#ifdef __cplusplus
}
#endif
#endif
