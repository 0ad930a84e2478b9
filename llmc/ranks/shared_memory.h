// shared_memory: memory of one rank that other ranks of its machine write or read, so that their parts of a checkpoint
// need not be sent. Without it training would stop several times as long for a save (dev/RESULTS.md).
#pragma once

#include "ranks/comm.h"

typedef struct {
    void *memory; // zeros at first, begins at a page; NULL: this rank does not share it
    size_t bytes;
    bool *shared_by; // (ranks): which ranks share it; none if rank 0 has none
} SharedMemory;

// All ranks together. A rank that cannot share it (another machine, another container) is no error.
int shared_memory_create(SharedMemory *s, Comm *comm, size_t bytes, Error *e);
void shared_memory_destroy(SharedMemory *s); // all zeros is fine

// Memory of each rank that rank 0 reads, a piece at a time: no process maps another's.
typedef struct {
    void *memory; // this rank's, zeros at first; NULL: no rank has any
    size_t bytes;
    int *file, files; // on rank 0: (ranks) descriptors of all ranks' memory
} RankMemory;

// All ranks together; `bytes` may differ. If rank 0 cannot read all ranks' memory (another machine), no rank has any.
int rank_memory_create(RankMemory *s, Comm *comm, size_t bytes, Error *e);
int rank_memory_read(const RankMemory *s, int rank, size_t at, void *values, size_t bytes, Error *e); // on any thread
void rank_memory_destroy(RankMemory *s); // all zeros is fine

// Reads every page of [at, at + bytes): a process's first use of a page takes longer than later ones.
void shared_memory_touch(const SharedMemory *s, size_t at, size_t bytes);
