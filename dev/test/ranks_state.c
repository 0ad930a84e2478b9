// ranks_state: under mpirun, rank 0 collects the gradients and moments that ZeRO-2 has spread over the ranks, in ranges of
// every kind, and compares it with what was loaded. Prints "ok" or what is wrong. For test_ranks.sh.
#include "../../llmc/parallel.h"
#include "../../llmc/rng.h"

#include <math.h>
#include <string.h>

typedef struct {
    Comm comm;
    Model model;
    Parallel parallel;
    Engine *engine;
    float *want, *got; // (flat_count)
} State;

static int setup(State *s, Error *e) {
    ModelConfig shape = {.layers = 3, .heads = 1, .channels = 20, .vocab = 50, .context = 8};
    EngineConfig config = {.model = &s->model, .micro_batch = 1, .seq_len = 8, .threads = 1};
    CommDeadlines deadlines = {30, 30, 30};
    TRY(comm_create(&s->comm, &deadlines, e));
    TRY(model_create(&s->model, &shape, e));
    ParallelConfig sharing = {.zero = ZERO_2, .micro_batch = 1, .batch_max = s->comm.ranks};
    TRY(parallel_create(&s->parallel, &s->comm, &s->model, &sharing, e));
    parallel_shard(&s->parallel, &config);
    TRY(engine_create(&s->engine, &config, e));
    TRY(memory_alloc((void **)&s->want, sizeof(float) * s->model.flat_count, "test", e));
    TRY(memory_alloc((void **)&s->got, sizeof(float) * s->model.flat_count, "test", e));
    return parallel_start(&s->parallel, s->engine, WIRE_FP32, e);
}

static int compare(State *s, StateKind kind, Range range, Error *e) {
    size_t n = range.end - range.begin;
    for (size_t i = 0; i < n; i++) s->got[i] = NAN;
    TRY(parallel_store(&s->parallel, kind, range, s->got, e));
    for (size_t i = 0; i < n; i++)
        if (!(s->got[i] == s->want[range.begin + i]))
            return FAIL(e, ERR_INTERNAL, NULL, "kind %d, range %zu to %zu: element %zu is %g, not %g", kind,
                        range.begin, range.end, range.begin + i, s->got[i], s->want[range.begin + i]);
    return 0;
}

static int collect(State *s, StateKind kind, uint64_t seed, Error *e) {
    size_t count = s->model.flat_count;
    for (size_t i = 0; i < count; i++) s->want[i] = (float)rng_u32(seed, kind, i);
    TRY(engine_load(s->engine, kind, (Range){0, count}, s->want, e)); // of which a rank keeps its share
    if (s->comm.rank > 0) return parallel_serve(&s->parallel, e);
    TRY(compare(s, kind, (Range){0, count}, e));
    for (uint64_t i = 0; i < 30; i++) {
        size_t a = rng_u32(seed, 10, 2 * i) % count, b = rng_u32(seed, 10, 2 * i + 1) % count;
        TRY(compare(s, kind, (Range){size_min(a, b), size_max(a, b)}, e));
    }
    return parallel_served(&s->parallel, e);
}

int main(void) {
    static State s;
    Error e = {0};
    const uint64_t seed = 20240520;
    int code = setup(&s, &e);
    if (!code) code = collect(&s, STATE_MOMENT1, seed, &e);
    if (!code) code = collect(&s, STATE_MOMENT2, seed, &e);
    if (!code) code = collect(&s, STATE_PARAM, seed, &e);
    if (!code) code = collect(&s, STATE_GRAD, seed, &e);
    if (!code && s.comm.rank == 0) printf("ok\n");
    memory_free(s.want);
    memory_free(s.got);
    parallel_destroy(&s.parallel);
    engine_destroy(s.engine);
    model_destroy(&s.model);
    e.code = code;
    return comm_finish(&s.comm, &e);
}
