// arena: one allocation for all buffers of a step. Each buffer states the phases of the step in which it is live; buffers
// that are never live together share memory. The same code plans the bytes and places the buffers, so the plan is exact.
#pragma once

#include "base/common.h"

GNS_C_BEGIN

typedef struct {
    const char *what; // category, for the memory report
    void **where;     // receives the buffer's address
    size_t bytes;     // rounded up to ARENA_ALIGNMENT
    int from, to;     // first and last phase in which it is live
    size_t offset;
} ArenaBuffer;

enum { ARENA_BUFFERS_MAX = 64, ARENA_ALIGNMENT = 1024 };

typedef struct {
    int count;
    ArenaBuffer buffer[ARENA_BUFFERS_MAX];
} Arena; // all zero: an empty one

// Adds a buffer. 0 bytes: *where becomes NULL.
void arena_add(Arena *arena, const char *what, void **where, size_t bytes, int from, int to);

// Chooses every buffer's offset; returns the bytes needed in all.
size_t arena_plan(Arena *arena);

// Gives the buffers their addresses in memory of that many bytes at base.
void arena_place(const Arena *arena, void *base);

GNS_C_END
