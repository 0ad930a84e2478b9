// world: a small model with weights and tokens; makes CPU engines and measures them.
#pragma once

#include "../small_model.h"
#include "../test.h"

static Error e;

enum { WORLD_ROWS = 64, WORLD_SOURCES = 3 }; // most rows of a step; number of sources, if an engine has sources
static int world_source(const void *data, uint64_t example) { return (void)data, (int)(example % WORLD_SOURCES); }

typedef struct {
    Model model;
    int seq_len;
    float *param;
    uint16_t *tokens;
} World;

static inline Range all_of(const World *w) { return (Range){0, w->model.flat_count}; }

static inline float *floats_of(const World *w) {
    float *x = malloc(range_float_bytes(all_of(w)));
    for (size_t i = 0; i < w->model.flat_count; i++) x[i] = NAN;
    return x;
}

// Makes a model with random weights, and `rows` rows of seq_len + 1 random tokens.
static inline World world_of(ModelConfig shape, int seq_len, int rows, uint64_t seed) {
    World w = {.seq_len = seq_len};
    size_t count = (size_t)rows * (size_t)(seq_len + 1);
    CHECK_OK(model_create(&w.model, &shape, &e), &e);
    w.param = floats_of(&w);
    w.tokens = malloc(count * sizeof *w.tokens);
    small_params(&w.model, seed, w.param);
    small_tokens(shape.vocab, seed, count, w.tokens);
    return w;
}

static inline void world_close(World *w) {
    model_destroy(&w->model);
    free(w->param), free(w->tokens);
}

// Returns an engine with the world's weights. Sets config's model, seq_len, step_rows and source.
static inline Engine *engine_of(const World *w, EngineConfig config) {
    Engine *engine = NULL;
    config.model = &w->model;
    config.seq_len = w->seq_len;
    config.step_rows = WORLD_ROWS;
    config.source = world_source;
    CHECK_OK(engine_create(&cpu_engine, &engine, &config, &e), &e);
    CHECK_OK(engine_load(engine, STATE_PARAM, all_of(w), w->param, &e), &e);
    return engine;
}

typedef struct {
    double loss, grad_sq[64], example_sq[64]; // loss: the sum over the rows
    RowResult row[WORLD_ROWS];
    double source_gram[WORLD_SOURCES * WORLD_SOURCES];
    float *grad;
} Outcome;

// Measures a step of examples first, first + 1, ..., without update.
static inline Outcome measure(const World *w, Engine *engine, const uint16_t *tokens, int first, int rows,
                              int micro_batch, GnsMode mode) {
    Error e = {0}; // test_tensor measures in several threads
    Outcome o = {.grad = floats_of(w)};
    StepResult r = {.loss_sum = NAN, .grad_sq = o.grad_sq, .example_sq = o.example_sq, .row = o.row};
    r.source_gram = o.source_gram;
    engine_examples(engine, (uint64_t)first);
    CHECK_OK(small_batch(engine, tokens, rows, w->seq_len, micro_batch, mode, &e), &e);
    CHECK_OK(engine_norms(engine, all_of(w), &e), &e);
    CHECK_OK(engine_result(engine, &r, &e), &e);
    CHECK_OK(engine_store(engine, STATE_GRAD, all_of(w), o.grad, &e), &e);
    o.loss = r.loss_sum;
    return o;
}
