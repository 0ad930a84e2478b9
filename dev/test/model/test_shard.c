// Engines that keep only the owned ranges (test_shard_cuda is the CUDA build of this file). The ranks are engines of
// one process. Each computes the whole batch, so nothing is reduced. The ranks' bits must equal the bits of an engine
// that keeps everything, also after ranks exchanged weights.
#include "../test.h"

#include "ranks/transport.h"
#include "../small_model.h"

#include <time.h>

#ifdef GNS_CUDA
#    include <cuda_runtime_api.h>
#endif

enum { RANKS = 3, ROWS = 3, STEPS = 2 };

static const ModelConfig shapes[] = {
    {.layers = 1, .heads = 1, .channels = 24, .vocab = 37, .context = 7},
    {.layers = 2, .heads = 2, .channels = 32, .vocab = 61, .context = 13},
    {.layers = 5, .heads = 2, .channels = 128, .vocab = 300, .context = 65},
};
enum { SHAPES = sizeof shapes / sizeof *shapes };

static uint64_t seed;
static Error e;
static const float POISON = -7.25f;

// What ranks shard: each value includes the values before it.
typedef enum { SHARED_MOMENTS, SHARED_GRADS, SHARED_WEIGHTS } Shared;

typedef struct {
    Engine *engine;
    EngineConfig config;
    struct World *world;
    Range owned[8];
    int pending;       // buckets [0, pending) are in memory
    int micro_steps;   // number begun in this step
    int soon, awaited; // buckets of the last calls of `soon` and `await`
} Rank;

typedef struct World {
    Model model;
    int T;
    float *param;     // (flat_count)
    uint16_t *tokens; // (STEPS, ROWS, T + 1)
    Engine *whole;
    Rank rank[RANKS];
    float *x, *y;                 // (flat_count)
    double *grad_sq, *example_sq; // (tensors)
} World;

static void *take(size_t bytes) {
    void *p;
    if (memory_alloc(&p, bytes, "test", &e)) abort();
    memset(p, 0xff, bytes); // NaN
    return p;
}

static Range all_of(const World *w) { return (Range){0, w->model.flat_count}; }

static const uint16_t *rows_of(const World *w, int step, int row) {
    return w->tokens + ((size_t)step * ROWS + (size_t)row) * ((size_t)w->T + 1);
}

enum { SOURCES = 2 };
static int source_of(const void *data, uint64_t example) { return (void)data, (int)(example % SOURCES); }

static EngineConfig config_of(const World *w) {
    return (EngineConfig){.model = &w->model,
                          .micro_batch = ROWS,
                          .seq_len = w->T,
                          .threads = 1,
                          .gns = GNS_EXACT,
                          .step_rows = ROWS,
                          .sources = SOURCES,
                          .source = source_of};
}

// ---- Weights that are gathered for each pass ------------------------------------------------------------------------

static size_t bucket_bytes(const Rank *rank, Range range) {
    return range_length(range) * engine_weight_bytes(rank->engine);
}

// Writes NaN into an engine's memory, after the engine's queued work.
#ifdef GNS_CUDA
static void poison(const Rank *rank, void *to, size_t bytes) {
    cudaError_t status = cudaMemsetAsync(to, 0xff, bytes, engine_stream(rank->engine)); // NaN
    CHECK(status == cudaSuccess, "%s", cudaGetErrorString(status));
}
static void copy_from(const Rank *rank, void *to, const Rank *other, const void *from, size_t bytes) {
    cudaError_t status = cudaStreamSynchronize(engine_stream(other->engine));
    CHECK(status == cudaSuccess, "%s", cudaGetErrorString(status));
    status = cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, engine_stream(rank->engine));
    CHECK(status == cudaSuccess, "%s", cudaGetErrorString(status));
}
#else
static void poison(const Rank *rank, void *to, size_t bytes) { (void)rank, memset(to, 0xff, bytes); }
static void copy_from(const Rank *rank, void *to, const Rank *other, const void *from, size_t bytes) {
    (void)rank, (void)other, memcpy(to, from, bytes);
}
#endif

// Poisons the block's slot, whose old content the engine no longer needs. The block must be the one right before or
// after the last awaited one: ranks without rows start their transfers in that order.
static int soon_weights(void *context, Range range, Error *e) {
    Rank *rank = context;
    int i = model_bucket_at(rank->config.model, range.begin);
    CHECK(i > 0 && abs(i - rank->awaited) == 1, "soon bucket %d, after %d", i, rank->awaited);
    if (i == rank->soon || i == rank->awaited) return 0; // already in its slot
    rank->soon = i;
    poison(rank, engine_buffer(rank->engine, BUFFER_WEIGHT, range.begin), bucket_bytes(rank, range));
    return 0;
}

// Copies every rank's part, except a part that the engine wrote in place.
static int await_weights(void *context, Range range, Error *e) {
    Rank *rank = context;
    int i = model_bucket_at(rank->config.model, range.begin);
    CHECK(i == 0 || i == rank->soon || i == rank->awaited, "block %d is needed, and was not named before", i);
    for (Rank *from = rank->world->rank; from < rank->world->rank + RANKS; from++) {
        Range part = from->owned[i];
        const void *own = engine_own_weights(from->engine, part);
        void *to = engine_buffer(rank->engine, BUFFER_WEIGHT, part.begin);
        if (own != to) copy_from(rank, to, from, own, bucket_bytes(rank, part));
    }
    rank->awaited = i;
    return 0;
}

static void rank_open(World *w, int r, Shared shared, Recompute recompute) {
    Rank *rank = &w->rank[r];
    const WeightsWatch watch = {soon_weights, await_weights, rank};
    *rank = (Rank){.config = config_of(w), .world = w};
    rank->config.recompute = recompute;
    int buckets = model_bucket_count(&w->model);
    for (int i = 0; i < buckets; i++) rank->owned[i] = division_part(&(Division){.ranks = RANKS, .tensor = 1}, model_bucket(&w->model, i), r);
    rank->config.owned = rank->owned;
    rank->config.owned_count = buckets;
    rank->config.shard_grads = shared >= SHARED_GRADS;
    rank->config.shard_weights = shared == SHARED_WEIGHTS;
    CHECK_OK(engine_create(&GNS_ENGINE, &rank->engine, &rank->config, &e), &e);
    if (rank->config.shard_weights) engine_watch_weights(rank->engine, &watch);
    for (const Tensor *t = w->model.tensors; t < w->model.tensors + w->model.tensor_count; t++)
        CHECK_OK(engine_load(rank->engine, STATE_PARAM, tensor_range(t), w->param + t->offset, &e), &e);
}

// The whole engine recomputes nothing.
static void world_open(World *w, const ModelConfig *shape, Shared shared, Recompute recompute) {
    size_t tokens = (size_t)STEPS * ROWS * ((size_t)shape->context + 1);
    CHECK_OK(model_create(&w->model, shape, &e), &e);
    size_t n = w->model.flat_count, tensors = (size_t)w->model.tensor_count;
    w->T = shape->context;
    w->param = take(n * sizeof(float)), w->x = take(n * sizeof(float)), w->y = take(n * sizeof(float));
    w->grad_sq = take(tensors * sizeof(double)), w->example_sq = take(tensors * sizeof(double));
    w->tokens = take(tokens * sizeof(uint16_t));
    small_params(&w->model, seed, w->param);
    small_tokens(shape->vocab, seed, tokens, w->tokens);
    EngineConfig config = config_of(w);
    CHECK_OK(engine_create(&GNS_ENGINE, &w->whole, &config, &e), &e);
    CHECK_OK(engine_load(w->whole, STATE_PARAM, all_of(w), w->param, &e), &e);
    for (int r = 0; r < RANKS; r++) rank_open(w, r, shared, recompute);
}

static void world_close(World *w) {
    for (int r = 0; r < RANKS; r++) engine_destroy(w->rank[r].engine);
    engine_destroy(w->whole);
    void *memory[] = {w->param, w->x, w->y, w->grad_sq, w->example_sq, w->tokens};
    for (size_t i = 0; i < sizeof memory / sizeof *memory; i++) memory_free(memory[i]);
    model_destroy(&w->model);
}

// ---- A rank's step --------------------------------------------------------------------------------------------------

static int collect_from(Rank *rank, int i, Error *e) {
    for (; rank->config.shard_grads && rank->pending > i; rank->pending--)
        TRY(engine_collect(rank->engine, rank->owned[rank->pending - 1], rank->micro_steps == 1, e));
    return 0;
}

static int begins(void *context, Range range, Error *e) {
    Rank *rank = context;
    int i = model_bucket_at(rank->config.model, range.begin);
    TRY(collect_from(rank, i == 0 ? 0 : i + 2, e)); // bucket 0 begins: collect the last micro-step
    if (i == 0) rank->micro_steps++, rank->pending = model_bucket_count(rank->config.model);
    return 0;
}

static int rank_micro_step(Rank *rank, const uint16_t *tokens, int n, GnsMode mode, Error *e) {
    GradientWatch watch = {begins, NULL, rank};
    engine_watch(rank->engine, &watch);
    return engine_micro_step(rank->engine, tokens, n, mode, e);
}

static int rank_begin_step(Rank *rank, Error *e) {
    rank->micro_steps = rank->pending = 0;
    return engine_begin_step(rank->engine, e);
}

static int rank_norms(Rank *rank, Error *e) {
    TRY(collect_from(rank, 0, e));
    for (int i = 0; i < rank->config.owned_count; i++) TRY(engine_norms(rank->engine, rank->owned[i], e));
    return 0;
}

static UpdateConfig update_config(int step) { // no clipping, since a rank has only its part of the norm
    return (UpdateConfig){.lr = 1e-2,
                          .muon_lr = 2e-2,
                          .beta1 = 0.9,
                          .beta2 = 0.95,
                          .eps = 1e-8,
                          .weight_decay = 0.1,
                          .step = step,
                          .batch = ROWS};
}

// Ends an engine's turn: engines of one device run one at a time (engine.h).
static int turn_ends(World *w, Engine *engine, Error *e) {
    StepResult ignored = {.grad_sq = w->grad_sq, .example_sq = w->example_sq};
    return engine_result(engine, &ignored, e);
}

// Computes a rank's gradients of a step, in one micro-step.
static int rank_gradients(World *w, Rank *rank, int step, Error *e) {
    TRY(rank_begin_step(rank, e));
    TRY(rank_micro_step(rank, rows_of(w, step, 0), ROWS, GNS_EXACT, e));
    TRY(rank_norms(rank, e));
    return turn_ends(w, rank->engine, e);
}

static int whole_gradients(World *w, int step, Error *e) {
    TRY(engine_begin_step(w->whole, e));
    TRY(engine_micro_step(w->whole, rows_of(w, step, 0), ROWS, GNS_EXACT, e));
    TRY(engine_norms(w->whole, all_of(w), e));
    return turn_ends(w, w->whole, e);
}

// ---- What must be equal ---------------------------------------------------------------------------------------------

// Checks that a rank stores the whole engine's bits in its owned ranges, and no other bits. others: the rank may also
// store the whole engine's bits outside its owned ranges.
static void check_state(World *w, const Rank *rank, StateKind kind, bool others) {
    size_t wrong = 0;
    for (size_t i = 0; i < w->model.flat_count; i++) w->y[i] = POISON;
    CHECK_OK(engine_store(w->whole, kind, all_of(w), w->x, &e), &e);
    CHECK_OK(engine_store(rank->engine, kind, all_of(w), w->y, &e), &e);
    const Range *owned = rank->owned, *end = owned + rank->config.owned_count;
    for (size_t i = 0; i < w->model.flat_count; i++) {
        while (owned < end && i >= owned->end) owned++;
        bool stored = (owned < end && i >= owned->begin) || (others && w->y[i] != POISON);
        wrong += memcmp(&w->y[i], stored ? &w->x[i] : &POISON, sizeof POISON) != 0;
    }
    CHECK(wrong == 0, "kind %d: %zu elements differ", kind, wrong);
}

static void check_norms(World *w) {
    size_t tensors = (size_t)w->model.tensor_count;
    double sum[200] = {0}, whole_gram[SOURCES * SOURCES], gram[SOURCES * SOURCES];
    StepResult want = {.grad_sq = w->grad_sq, .example_sq = w->example_sq};
    want.source_gram = whole_gram;
    CHECK_OK(engine_result(w->whole, &want, &e), &e);
    for (int r = 0; r < RANKS; r++) {
        double grad_sq[200], example_sq[200];
        StepResult got = {.loss_sum = NAN, .grad_sq = grad_sq, .example_sq = example_sq};
        got.source_gram = gram;
        CHECK_OK(engine_result(w->rank[r].engine, &got, &e), &e);
        CHECK(got.loss_sum == want.loss_sum, "loss %.9g, not %.9g", got.loss_sum, want.loss_sum);
        CHECK(gram[0] > 0 && memcmp(gram, whole_gram, sizeof gram) == 0, "rank %d: sums by source differ", r);
        CHECK(memcmp(example_sq, w->example_sq, tensors * sizeof(double)) == 0, "rank %d: examples' norms differ", r);
        for (size_t k = 0; k < tensors; k++) sum[k] += grad_sq[k];
    }
    for (size_t k = 0; k < tensors; k++) CHECK_CLOSE(sum[k], w->grad_sq[k], 1e-6, 1e-30);
}

// Compares losses, since engine.h does not return the weights that passes read.
static void check_losses(World *w, int step) {
    size_t n = ROWS * (size_t)w->T;
    float *want = take(n * sizeof(float)), *got = take(n * sizeof(float));
    CHECK_OK(engine_eval(w->whole, rows_of(w, step, 0), ROWS, w->T, want, &e), &e);
    for (int r = 0; r < RANKS; r++) {
        CHECK_OK(engine_eval(w->rank[r].engine, rows_of(w, step, 0), ROWS, w->T, got, &e), &e);
        CHECK(memcmp(got, want, n * sizeof(float)) == 0, "rank %d: losses differ after step %d", r, step);
    }
    memory_free(want);
    memory_free(got);
}

// Loads every rank's weights into the other ranks.
static void exchange(World *w) {
    for (int r = 0; r < RANKS; r++)
        for (int i = 0; i < w->rank[r].config.owned_count; i++) {
            Range range = w->rank[r].owned[i];
            CHECK_OK(engine_store(w->rank[r].engine, STATE_PARAM, range, w->x, &e), &e);
            for (int to = 0; to < RANKS; to++)
                if (to != r) CHECK_OK(engine_load(w->rank[to].engine, STATE_PARAM, range, w->x, &e), &e);
        }
}

static void train(const ModelConfig *shape, Shared shared, Recompute recompute) {
    World w;
    world_open(&w, shape, shared, recompute);
    for (int step = 0; step < STEPS; step++) {
        UpdateConfig update = update_config(step + 1);
        CHECK_OK(whole_gradients(&w, step, &e), &e);
        for (int r = 0; r < RANKS; r++) CHECK_OK(rank_gradients(&w, &w.rank[r], step, &e), &e);
        check_norms(&w);
        CHECK_OK(engine_update(w.whole, all_of(&w), &update, &e), &e);
        for (int r = 0; r < RANKS; r++) CHECK_OK(engine_update(w.rank[r].engine, all_of(&w), &update, &e), &e);
        for (int r = 0; r < RANKS; r++) {
            check_state(&w, &w.rank[r], STATE_GRAD, shared < SHARED_GRADS);
            check_state(&w, &w.rank[r], STATE_MOMENT1, false);
            check_state(&w, &w.rank[r], STATE_MOMENT2, false);
        }
        exchange(&w);
        for (int r = 0; r < RANKS; r++) check_state(&w, &w.rank[r], STATE_PARAM, shared < SHARED_WEIGHTS);
        check_losses(&w, step);
    }
    world_close(&w);
}

static void test_shards(void) {
    for (int i = 0; i < SHAPES; i++)
        for (int shared = SHARED_MOMENTS; shared <= SHARED_WEIGHTS; shared++)
            train(&shapes[i], (Shared)shared, RECOMPUTE_NONE);
}

static void test_shares_that_recompute(void) {
    train(&shapes[1], SHARED_MOMENTS, RECOMPUTE_BLOCK);
    train(&shapes[2], SHARED_GRADS, RECOMPUTE_GELU);
    train(&shapes[2], SHARED_WEIGHTS, RECOMPUTE_BLOCK);
}

// ---- Weights in transfer --------------------------------------------------------------------------------------------

typedef struct {
    World *w;
    int next; // first bucket that has not arrived
} Arrivals;

// Loads the buckets of a range that have not arrived.
static int arrive(void *context, Range range, Error *e) {
    Arrivals *a = context;
    const Model *model = &a->w->model;
    for (; a->next < model_bucket_count(model) && model_bucket(model, a->next).begin < range.end; a->next++) {
        Range bucket = model_bucket(model, a->next);
        TRY(engine_load(a->w->whole, STATE_PARAM, bucket, a->w->param + bucket.begin, e));
    }
    return 0;
}

// Poisons all weights; none has arrived.
static void depart(Arrivals *a) {
    World *w = a->w;
    for (size_t i = 0; i < w->model.flat_count; i++) w->x[i] = POISON;
    CHECK_OK(engine_load(w->whole, STATE_PARAM, all_of(w), w->x, &e), &e);
    a->next = 0;
}

enum { READERS = 4 };
// Calls every function that reads weights. Writes the results to `out`.
static void read_weights(World *w, Arrivals *a, float *out[READERS]) {
    StepResult r = {.grad_sq = w->grad_sq, .example_sq = w->example_sq};
    uint64_t hash = 0;
    for (int i = 0; i < READERS; i++) {
        if (a) depart(a);
        switch (i) {
        case 0: CHECK_OK(engine_eval(w->whole, rows_of(w, 0, 0), ROWS, w->T, out[i], &e), &e); break;
        case 1: CHECK_OK(engine_logits(w->whole, rows_of(w, 0, 0), w->T, out[i], &e), &e); break;
        case 2:
            CHECK_OK(engine_hash(w->whole, all_of(w), &hash, &e), &e);
            memcpy(out[i], &hash, sizeof hash);
            break;
        default:
            CHECK_OK(whole_gradients(w, 0, &e), &e);
            CHECK_OK(engine_result(w->whole, &r, &e), &e);
            CHECK_OK(engine_store(w->whole, STATE_GRAD, all_of(w), out[i], &e), &e);
        }
        if (a) CHECK(a->next == model_bucket_count(&w->model), "reader %d asked for %d buckets", i, a->next);
    }
}

static void test_awaited_weights(void) {
    static const char *const readers[READERS] = {"eval", "logits", "hash", "micro-step"};
    World w;
    float *want[READERS], *got[READERS];
    world_open(&w, &shapes[1], SHARED_MOMENTS, RECOMPUTE_NONE);
    Arrivals arrivals = {&w, 0};
    size_t bytes = sizeof(float) * size_max(w.model.flat_count, ROWS * (size_t)w.T);
    for (int i = 0; i < READERS; i++) want[i] = take(bytes), got[i] = take(bytes);
    read_weights(&w, NULL, want);
    engine_watch_weights(w.whole, &(WeightsWatch){.await = arrive, .context = &arrivals});
    read_weights(&w, &arrivals, got);
    for (int i = 0; i < READERS; i++) {
        CHECK(memcmp(got[i], want[i], bytes) == 0, "%s: reads weights that are not there yet", readers[i]);
        memory_free(want[i]);
        memory_free(got[i]);
    }
    world_close(&w);
}

int main(int argc, char **argv) {
    World w = {0};
    Engine *engine = NULL;
    seed = argc > 1 ? strtoull(argv[1], NULL, 10) : (uint64_t)time(NULL);
    printf("test_shard: seed %llu\n", (unsigned long long)seed);
    if (model_create(&w.model, &shapes[0], &e)) return 1;
    w.T = shapes[0].context;
    EngineConfig config = config_of(&w);
    int code = engine_create(&GNS_ENGINE, &engine, &config, &e);
    if (code) error_print(&e);
    if (code == ERR_UNAVAILABLE) return ERR_SKIPPED;
    engine_destroy(engine);
    model_destroy(&w.model);
    RUN(test_shards, test_shares_that_recompute, test_awaited_weights);
    return test_summary();
}
