// ranks_state: under mpirun, the gradients of a step of micro-steps, some of them without rows, that ZeRO-2 or 3 has spread
// over the ranks: each rank compares its own with those of one engine. Prints "ok" or what is wrong. For test_ranks.sh.
//
//     ranks_state WIRE ZERO
#include "ranks/parallel.h"
#include "../small_model.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    Comm comm;
    Model model;
    Parallel parallel;
    Engine *engine;
    float *want, *got; // (flat_count)
    uint16_t *tokens;  // (rows, SEQ_LEN + 1)
    WireType wire;
    ZeroStage zero;
} State;

enum { LAYERS = 3, SEQ_LEN = 8, VOCAB = 50 };

static int64_t step_rows(const State *s) { return 2 * s->comm.ranks + 1; } // one for rank 0 alone

// Calls of the engine's collect by bucket, and how many of them take over instead of adding.
static struct {
    const Model *model;
    int calls[LAYERS + 1], first[LAYERS + 1];
} collects;
static EngineApi watched; // the CPU engine, with these two in front

static int count_and_collect(Engine *engine, Range range, bool first, Error *e) {
    int bucket = model_bucket_at(collects.model, range.begin);
    collects.calls[bucket]++;
    collects.first[bucket] += first;
    return cpu_engine.collect(engine, range, first, e);
}

static int setup(State *s, Error *e) {
    ModelConfig shape = {.layers = LAYERS, .heads = 1, .channels = 20, .vocab = VOCAB, .context = SEQ_LEN};
    EngineConfig config = {.model = &s->model, .micro_batch = 1, .seq_len = SEQ_LEN, .threads = 1};
    TRY(comm_create(&s->comm, 30, e));
    TRY(model_create(&s->model, &shape, e));
    ParallelConfig sharing = {s->zero, REDUCE_MICRO_STEP, .micro_batch = 1, .batch_max = step_rows(s),
                              .transport = TRANSPORT_OR_NULL(mpi_transport)};
    collects.model = &s->model;
    TRY(parallel_create(&s->parallel, &s->comm, &s->model, &sharing, e));
    parallel_shard(&s->parallel, &config);
    TRY(engine_create(&watched, &s->engine, &config, e));
    TRY(memory_alloc((void **)&s->want, sizeof(float) * s->model.flat_count, "test", e));
    TRY(memory_alloc((void **)&s->got, sizeof(float) * s->model.flat_count, "test", e));
    size_t tokens = (size_t)step_rows(s) * (SEQ_LEN + 1);
    TRY(memory_alloc((void **)&s->tokens, sizeof *s->tokens * tokens, "test", e));
    small_tokens(VOCAB, 1, tokens, s->tokens);
    return parallel_start(&s->parallel, s->engine, s->wire, e);
}

// The step's gradients on one engine that keeps everything.
static int whole_step(State *s, Error *e) {
    Engine *whole;
    Range all = {0, s->model.flat_count};
    EngineConfig config = {.model = &s->model, .micro_batch = (int)step_rows(s), .seq_len = SEQ_LEN, .threads = 1};
    TRY(engine_create(&watched, &whole, &config, e));
    int code = engine_load(whole, STATE_PARAM, all, s->want, e);
    if (!code) code = small_batch(whole, s->tokens, config.micro_batch, SEQ_LEN, config.micro_batch, GNS_OFF, e);
    if (!code) code = engine_store(whole, STATE_GRAD, all, s->want, e);
    engine_destroy(whole);
    return code;
}

static int step_of_ranks(State *s, int micro_steps, Error *e) {
    RankRows mine = rows_of_rank(step_rows(s), s->comm.rank, s->comm.ranks);
    TRY(parallel_begin_step(&s->parallel, false, e));
    for (int i = 0; i < micro_steps; i++) {
        const uint16_t *row = s->tokens + (mine.first + i) * (SEQ_LEN + 1);
        TRY(parallel_micro_step(&s->parallel, row, i < mine.count, GNS_OFF, i == micro_steps - 1, e));
    }
    return parallel_norms(&s->parallel, e);
}

// Each bucket is collected once a micro-step, and only then.
static int check_collects(const State *s, int wanted, Error *e) {
    for (int i = 0; i < s->parallel.buckets; i++)
        if (collects.calls[i] != wanted || collects.first[i] != 1)
            return FAIL(e, ERR_INTERNAL, NULL, "bucket %d was collected %d times, not %d, taken over %d times, not 1",
                        i, collects.calls[i], wanted, collects.first[i]);
    return 0;
}

static int check_step(State *s, Error *e) {
    Range all = {0, s->model.flat_count};
    int micro_steps = (int)parallel_micro_steps(&s->parallel, step_rows(s));
    double most = 0, tolerance = s->wire == WIRE_BF16 ? 4e-3 : 1e-6;
    small_params(&s->model, 1, s->want);
    TRY(engine_load(s->engine, STATE_PARAM, all, s->want, e));
    TRY(step_of_ranks(s, micro_steps, e));
    TRY(check_collects(s, micro_steps, e));
    TRY(whole_step(s, e));
    for (size_t i = 0; i < all.end; i++) most = fmax(most, fabs(s->want[i]));
    const int own = s->parallel.buckets ? s->parallel.buckets : 1;
    for (int k = 0; k < own; k++) {
        Range part = s->parallel.buckets ? s->parallel.owned[k] : all;
        TRY(engine_store(s->engine, STATE_GRAD, part, s->got + part.begin, e));
        // Ranks add up in another order. In the gaps between tensors is what was loaded.
        for (const Tensor *t = s->model.tensors, *end = t + s->model.tensor_count; t < end; t++) {
            Range here = range_overlap(part, tensor_range(t));
            for (size_t i = here.begin; i < here.end; i++)
                if (!(fabs(s->got[i] - s->want[i]) <= tolerance * most))
                    return FAIL(e, ERR_INTERNAL, NULL, "gradient %zu of the step is %g, not %g", i, s->got[i],
                                s->want[i]);
        }
    }
    return 0;
}

int main(int argc, char **argv) {
    static State s;
    watched = cpu_engine;
    watched.collect = count_and_collect;
    s.wire = argc > 1 && strcmp(argv[1], "bf16") == 0 ? WIRE_BF16 : WIRE_FP32;
    s.zero = argc > 2 ? (ZeroStage)atoi(argv[2]) : ZERO_2;
    Error e = {0};
    int code = setup(&s, &e);
    if (!code) code = check_step(&s, &e);
    code = comm_agree(&s.comm, code, &e);
    if (!code && s.comm.rank == 0) printf("ok\n");
    memory_free(s.tokens);
    memory_free(s.want);
    memory_free(s.got);
    parallel_destroy(&s.parallel);
    engine_destroy(s.engine);
    model_destroy(&s.model);
    e.code = code;
    return comm_finish(&s.comm, &e);
}
