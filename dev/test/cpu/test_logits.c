// engine_logits reuses keys and values of earlier calls: whatever happened in between, its bits are those of a new
// engine; and where each block has its own keys and values, it computes the new tokens only.
#include "cpu/engine_cpu.h"
#include "../small_model.h"
#include "../test.h"

#include <time.h>

enum { T = 40, V = 50, C = 24, ROUNDS = 300 };

static const ModelConfig shape = {.layers = 3, .heads = 2, .channels = C, .vocab = V, .context = T};
static const struct {
    const char *name;
    EngineConfig config;
    bool reuses;
} kinds[] = {
    {"training", {.micro_batch = 2, .gns = GNS_LN}, true},
    {"training, recompute gelu", {.micro_batch = 1, .gns = GNS_OFF, .recompute = RECOMPUTE_GELU}, true},
    {"training, recompute block", {.micro_batch = 1, .gns = GNS_OFF, .recompute = RECOMPUTE_BLOCK}, false},
    {"inference", {.micro_batch = 1, .inference = true}, true},
    {"inference, several rows", {.micro_batch = 2, .inference = true}, false},
};

static uint64_t seed; // differs from run to run
static uint64_t draws;
static int draw(int n) { return (int)(rng_u32(seed, 0, draws++) % (uint32_t)n); }

typedef struct {
    Model model;
    EngineConfig config;
    Engine *engine;
    float *params;                  // the engine's
    uint16_t tokens[T], row[T + 1]; // the text so far; of an evaluation or a step
    int n;
} World;

static Engine *engine_with(const EngineConfig *config, const float *params) {
    Engine *engine = NULL;
    Error e = {0};
    CHECK_OK(engine_create(&cpu_engine, &engine, config, &e), &e);
    CHECK_OK(engine_load(engine, STATE_PARAM, (Range){0, config->model->flat_count}, params, &e), &e);
    return engine;
}

static void world_open(World *w, int kind) {
    Error e = {0};
    CHECK_OK(model_create(&w->model, &shape, &e), &e);
    CHECK_OK(memory_alloc((void **)&w->params, w->model.flat_count * sizeof(float), "parameters", &e), &e);
    small_params(&w->model, seed, w->params);
    w->config = kinds[kind].config;
    w->config.model = &w->model, w->config.seq_len = T, w->config.threads = 2;
    w->engine = engine_with(&w->config, w->params);
    w->n = 0;
}

static void world_close(World *w) {
    engine_destroy(w->engine);
    memory_free(w->params);
    model_destroy(&w->model);
}

// The same bits as from a new engine.
static void check_logits(World *w, const char *kind, const char *after) {
    float got[V], want[V];
    Error e = {0};
    Engine *fresh = engine_with(&w->config, w->params);
    CHECK_OK(engine_logits(fresh, w->tokens, w->n, want, &e), &e);
    CHECK_OK(engine_logits(w->engine, w->tokens, w->n, got, &e), &e);
    CHECK(memcmp(got, want, sizeof want) == 0, "%s, %d tokens, after %s: other logits", kind, w->n, after);
    engine_destroy(fresh);
}

static void train_a_step(World *w) {
    Error e = {0};
    UpdateConfig update = {.lr = 1e-2, .beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8, .step = 1, .batch = 1};
    Range all = {0, w->model.flat_count};
    CHECK_OK(small_batch(w->engine, w->row, 1, T, 1, GNS_OFF, &e), &e);
    CHECK_OK(engine_norms(w->engine, all, &e), &e);
    float ignored[V]; // engine_logits may come between gradients and update
    if (draw(2)) CHECK_OK(engine_logits(w->engine, w->tokens, w->n, ignored, &e), &e);
    CHECK_OK(engine_update(w->engine, all, &update, &e), &e);
    CHECK_OK(engine_store(w->engine, STATE_PARAM, all, w->params, &e), &e);
}

// One of the events that may come between two tokens.
static const char *something(World *w) {
    Error e = {0};
    float losses[T];
    small_tokens(V, seed + draws++, T + 1, w->row);
    switch (draw(w->config.inference ? 6 : 7)) {
    case 0: return "nothing";
    case 1: w->tokens[draw(w->n)] ^= 1; return "another token";
    case 2: w->n = 1 + draw(w->n); return "fewer tokens";
    case 3:
        memmove(w->tokens, w->tokens + 1, sizeof(uint16_t) * (size_t)(w->n - 1));
        w->n = w->n > 1 ? w->n - 1 : 1;
        return "a window that slides";
    case 4: CHECK_OK(engine_eval(w->engine, w->row, 1, 1 + draw(T), losses, &e), &e); return "an evaluation";
    case 5:
        small_params(&w->model, seed + draws++, w->params);
        CHECK_OK(engine_load(w->engine, STATE_PARAM, (Range){0, w->model.flat_count}, w->params, &e), &e);
        return "other weights";
    default: train_a_step(w); return "a step";
    }
}

static void test_any_order(void) {
    for (int kind = 0; kind < (int)(sizeof kinds / sizeof *kinds); kind++) {
        World w;
        world_open(&w, kind);
        for (int round = 0; round < ROUNDS; round++) {
            const char *after = w.n > 0 && draw(3) == 0 ? something(&w) : "more tokens";
            for (int more = draw(3); (more > 0 || w.n == 0) && w.n < T; more--) w.tokens[w.n++] = (uint16_t)draw(V);
            check_logits(&w, kinds[kind].name, after);
        }
        world_close(&w);
    }
}

// The last LayerNorm writes a row for every token that is computed.
static void test_computes_what_is_new(void) {
    for (int kind = 0; kind < (int)(sizeof kinds / sizeof *kinds); kind++) {
        World w;
        float logits[V];
        Error e = {0};
        world_open(&w, kind);
        small_tokens(V, seed, T, w.tokens);
        CHECK_OK(engine_logits(w.engine, w.tokens, 10, logits, &e), &e);
        float *lnf = w.engine->lnf;
        for (int i = 0; i < T * C; i++) lnf[i] = NAN;
        CHECK_OK(engine_logits(w.engine, w.tokens, 13, logits, &e), &e);
        for (int t = 0; t < T; t++) {
            bool computed = t < 13 && (t >= 10 || !kinds[kind].reuses);
            CHECK(isnan(lnf[t * C]) == !computed, "%s: token %d is %scomputed", kinds[kind].name, t,
                  computed ? "not " : "");
        }
        world_close(&w);
    }
}

int main(void) {
    seed = (uint64_t)time(NULL);
    printf("  seed %llu\n", (unsigned long long)seed);
    RUN(test_any_order);
    RUN(test_computes_what_is_new);
    return test_summary();
}
