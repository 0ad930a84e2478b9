// arena: one allocation for all buffers of a step. Each buffer is live in some phases of the step; buffers that are
// never live together share memory. arena_plan serves both --dry-run and the run, so plans are exact.
#pragma once

#include "base/common.h"

#include <assert.h>

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
static inline void arena_add(Arena *arena, const char *what, void **where, size_t bytes, int from, int to) {
    assert(arena->count < ARENA_BUFFERS_MAX && from <= to);
    arena->buffer[arena->count++] = (ArenaBuffer){what, where, round_up(bytes, ARENA_ALIGNMENT), from, to, 0};
}

// Returns the lowest offset at which `b` overlaps no placed buffer that is live at the same time.
static inline size_t arena_lowest_offset(const ArenaBuffer *b, ArenaBuffer *const *placed, int count) {
    size_t offset = 0;
    for (int i = 0; i < count; i++) {
        const ArenaBuffer *p = placed[i];
        bool live_together = b->from <= p->to && p->from <= b->to;
        if (!live_together || offset >= p->offset + p->bytes || p->offset >= offset + b->bytes) continue;
        offset = p->offset + p->bytes;
        i = -1; // the offset grew: check all buffers again
    }
    return offset;
}

// Chooses every buffer's offset. Returns the bytes of the whole arena.
static inline size_t arena_plan(Arena *arena) {
    ArenaBuffer *order[ARENA_BUFFERS_MAX]; // larger buffers first; buffers of equal size in the order of arena_add
    size_t total = 0;
    for (int i = 0, at; i < arena->count; i++) {
        for (at = i; at > 0 && order[at - 1]->bytes < arena->buffer[i].bytes; at--) order[at] = order[at - 1];
        order[at] = &arena->buffer[i];
    }
    for (int i = 0; i < arena->count; i++) {
        order[i]->offset = arena_lowest_offset(order[i], order, i);
        total = size_max(total, order[i]->offset + order[i]->bytes);
    }
    return total;
}

// Writes every buffer's address. base: memory of arena_plan's bytes.
static inline void arena_place(const Arena *arena, void *base) {
    for (int i = 0; i < arena->count; i++) {
        const ArenaBuffer *b = &arena->buffer[i];
        *b->where = b->bytes ? (char *)base + b->offset : NULL;
    }
}
