// whole: a checkpoint holds the whole model, but with --tensor an engine holds only its rank's local model. Each rank
// writes one part of every bucket of the whole model. whole_exchange copies values from the engines to these parts.
#pragma once

#include "ranks/parallel.h"

typedef struct {
    const Parallel *parallel;
    const Model *model; // the whole model
    Model *local;       // (K) local models of a group's ranks
    Range *part;        // (buckets) this rank's parts of the whole model, in ascending order; NULL: without --tensor
} Whole;

int whole_create(Whole *whole, const Parallel *parallel, const Model *model, Error *e);
void whole_destroy(Whole *whole); // {0} is fine

// All ranks call it together. Fills `parts` with values from the engines that own them.
int whole_exchange(const Whole *whole, Engine *engine, StateKind kind, float *parts, Error *e);
