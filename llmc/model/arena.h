// arena: one allocation for all buffers of a step. Each buffer is live in some phases of the step; buffers that are
// never live together share memory. arena_plan serves both --dry-run and the run, so plans are exact.
#pragma once

#include "base/common.h"

GNS_C_BEGIN

typedef struct {
    const char *what; // category in the memory report
    void **where;     // receives the buffer's address
    size_t bytes;     // rounded up to ARENA_ALIGNMENT
    int from, to;     // first and last live phase
    size_t offset;
} ArenaBuffer;

enum { ARENA_BUFFERS_MAX = 64, ARENA_ALIGNMENT = 1024 };

typedef struct {
    int count;
    ArenaBuffer buffer[ARENA_BUFFERS_MAX];
} Arena; // empty if all zero

// Adds a buffer. 0 bytes: *where becomes NULL.
void arena_add(Arena *arena, const char *what, void **where, size_t bytes, int from, int to);

// Chooses every buffer's offset. Returns the bytes of the whole arena.
size_t arena_plan(Arena *arena);

// Writes every buffer's address. base: memory of arena_plan's bytes.
void arena_place(const Arena *arena, void *base);

GNS_C_END
