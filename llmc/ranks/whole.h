// whole: a checkpoint holds the whole model, and with --tensor each rank a local one. In a checkpoint every rank reads
// or writes one part of each bucket of the whole model. whole_exchange moves the values between parts and engines.
#pragma once

#include "ranks/parallel.h"

typedef struct {
    const Parallel *parallel;
    const Model *model; // the whole one
    Model *local;       // (K) local models of a group's ranks
    Range *part;        // (buckets) this rank's parts of the whole model, in ascending order; NULL: without --tensor
    size_t elements;    // of all parts
    float *loaded;      // (elements) one array's parts, in a load
} Whole;

int whole_create(Whole *whole, const Parallel *parallel, const Model *model, Error *e);
void whole_destroy(Whole *whole); // {0} is fine

// Copies values of a range of the whole model to `loaded`. Skips other ranks' parts.
void whole_put(const Whole *whole, Range range, const float *values);

// All ranks together. to_parts: fills `parts` (elements) with the values of the engines that own them; else loads
// them into these engines.
int whole_exchange(const Whole *whole, Engine *engine, StateKind kind, bool to_parts, float *parts, Error *e);
