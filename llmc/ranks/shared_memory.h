// shared_memory: memory of rank 0's that the ranks of its machine see too, so that what they have for it need not travel.
#ifndef GNS_SHARED_MEMORY_H
#define GNS_SHARED_MEMORY_H

#include "ranks/comm.h"

typedef struct {
    void *memory; // zeros at first, begins at a page; NULL: this rank does not share it
    size_t bytes;
    bool *shared_by; // (ranks): who does. Where rank 0 does not, nobody does
} SharedMemory;

// All ranks together. That a rank has no part in it, being on another machine or because the system does not let it, is
// no error.
int shared_memory_create(SharedMemory *s, Comm *comm, size_t bytes, Error *e);
void shared_memory_destroy(SharedMemory *s); // of zeros is fine

// Looks at every page from `at` on, bytes: a process's first use of a page takes longer than later ones.
void shared_memory_touch(const SharedMemory *s, size_t at, size_t bytes);

#endif
