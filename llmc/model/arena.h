// arena: one allocation for everything that comes and goes within a step. Each buffer says from which phase of the step
// to which it is needed; buffers whose lives do not overlap share memory. The same code plans (how many bytes?) and
// places (where?), so the plan is never wrong.
#ifndef GNS_ARENA_H
#define GNS_ARENA_H

#include "base/common.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
    const char *what; // category, for the memory report
    void **where;     // receives the buffer's address
    size_t bytes;     // rounded up to ARENA_ALIGNMENT
    int from, to;     // phases in which it holds something, both included
    size_t offset;
} ArenaBuffer;

enum { ARENA_BUFFERS_MAX = 64, ARENA_ALIGNMENT = 1024 };

typedef struct {
    int count;
    ArenaBuffer buffer[ARENA_BUFFERS_MAX];
} Arena; // all zero: an empty one

// Asks for a buffer. 0 bytes: *where becomes NULL.
void arena_add(Arena *arena, const char *what, void **where, size_t bytes, int from, int to);

// Chooses every buffer's offset; returns the bytes needed in all.
size_t arena_plan(Arena *arena);

// Gives the buffers their addresses in memory of that many bytes at base.
void arena_place(const Arena *arena, void *base);

#ifdef __cplusplus
}
#endif
#endif
