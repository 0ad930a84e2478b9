// shared_memory: memory of one rank that others of its machine use too, so that their parts of a checkpoint need not be
// sent. Without it training would stand still several times as long for a save (dev/RESULTS.md).
#pragma once

#include "ranks/comm.h"

typedef struct {
    void *memory; // zeros at first, begins at a page; NULL: this rank does not share it
    size_t bytes;
    bool *shared_by; // (ranks): which ranks share it; none, where rank 0 does not
} SharedMemory;

// All ranks together. A rank that cannot share it (another machine, another container) is no error.
int shared_memory_create(SharedMemory *s, Comm *comm, size_t bytes, Error *e);
void shared_memory_destroy(SharedMemory *s); // of zeros is fine

// Memory of each rank that rank 0 reads, a piece at a time: no process maps another's.
typedef struct {
    void *memory; // this rank's own, zeros at first; NULL: nobody has any
    size_t bytes;
    int *file, files; // rank 0's, to read from: (ranks)
} RankMemory;

// All ranks together, each with bytes of its own. Where rank 0 cannot read all of it (another machine), nobody has any.
int rank_memory_create(RankMemory *s, Comm *comm, size_t bytes, Error *e);
int rank_memory_read(const RankMemory *s, int rank, size_t at, void *values, size_t bytes, Error *e); // on any thread
void rank_memory_destroy(RankMemory *s); // of zeros is fine

// Reads every page of [at, at + bytes): a process's first use of a page takes longer than later ones.
void shared_memory_touch(const SharedMemory *s, size_t at, size_t bytes);
