// arena: buffers that live at the same time never share memory; other buffers share nearly as much as possible.
#include "model/arena.h"

#include "../scratch.h"

enum { PHASES = 3 };

// Returns the bytes that live in the fullest phase, a lower bound of any plan.
static size_t fullest_phase(const Arena *arena) {
    size_t most = 0;
    for (int phase = 0; phase < PHASES; phase++) {
        size_t alive = 0;
        for (int i = 0; i < arena->count; i++) {
            const ArenaBuffer *b = &arena->buffer[i];
            if (b->from <= phase && phase <= b->to) alive += round_up(b->bytes, ARENA_ALIGNMENT);
        }
        most = size_max(most, alive);
    }
    return most;
}

// Checks that buffers of one phase share no byte.
static void check_apart(const Arena *arena, size_t total) {
    for (int i = 0; i < arena->count; i++) {
        const ArenaBuffer *a = &arena->buffer[i];
        CHECK(a->offset % ARENA_ALIGNMENT == 0 && a->offset + a->bytes <= total, "buffer %d lies at %zu", i, a->offset);
        for (const ArenaBuffer *b = arena->buffer; b < a; b++)
            CHECK(a->to < b->from || b->to < a->from || a->offset + a->bytes <= b->offset ||
                      b->offset + b->bytes <= a->offset,
                  "buffers %d and %d overlap", i, (int)(b - arena->buffer));
    }
}

static void test_random_lives(void) {
    enum { ROUNDS = 300 };
    double ratios = 0;
    for (int round = 0; round < ROUNDS; round++) {
        Arena arena = {0};
        void *where[ARENA_BUFFERS_MAX];
        int count = 1 + (int)draw(ARENA_BUFFERS_MAX);
        for (int i = 0; i < count; i++) {
            int from = (int)draw(PHASES), to = from + (int)draw((uint32_t)(PHASES - from));
            arena_add(&arena, "test", &where[i], draw(8) ? draw(50000) : 0, from, to);
        }
        size_t total = arena_plan(&arena), least = fullest_phase(&arena);
        CHECK(total >= least, "%zu bytes, and %zu are alive at a time", total, least);
        ratios += least ? (double)total / (double)least : 1;
        check_apart(&arena, total);
        arena_place(&arena, (void *)(uintptr_t)(1 << 20));
        for (int i = 0; i < count; i++) {
            const ArenaBuffer *b = &arena.buffer[i];
            CHECK((uintptr_t)where[i] == (b->bytes ? (1 << 20) + b->offset : 0), "buffer %d at %p", i, where[i]);
        }
    }
    // The plan is a heuristic, so in a single round total / least may reach 1.55.
    CHECK(ratios <= 1.05 * ROUNDS, "%.2f times what is alive at a time, on average", ratios / ROUNDS);
}

int main(void) {
    random_begin();
    RUN(test_random_lives);
    return test_summary();
}
