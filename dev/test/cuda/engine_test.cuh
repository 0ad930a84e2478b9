// engine_test: what tests of the CUDA engine share: both engines, small models, the results of a step over a batch.
// Each test is built in every precision of the CUDA engine.
//
// Arguments of each test: [seed [small]]. A seed repeats a run (0: from the clock). `small`, for slow tools, runs every
// kernel in fewer cases and steps.
#pragma once

#include "cuda_test.cuh"

#include "base/common.h"
#include "cuda/fp8.cuh"
#include "cuda/linear_sm90.cuh"
#include "cuda/sm90.cuh"
#include "model/cuda_sizes.h"
#include "model/engine.h"
#include "../small_model.h"

#include <time.h>
#include <utility>
#include <vector>

typedef EngineApi Api;
static const Api &gpu = cuda_engine, &cpu = cpu_engine;

// ---- Cases ----------------------------------------------------------------------------------------------------------

enum { STEPS = 20 };

static uint64_t seed;
static int steps = STEPS; // steps to train
static Optimizer optimizer = OPTIMIZER_ADAMW;

struct Case {
    const char *name;
    ModelConfig config; // layers, heads, channels, vocab, context
    int seq_len, batch, micro_batch;
};

static const Case cases[] = {
    {"odd", {2, 2, 32, 61, 13}, 13, 3, 2},
    {"no multiple of anything", {2, 3, 27, 31, 35}, 33, 4, 3},
    {"heads of 64", {2, 2, 128, 300, 80}, 65, 3, 2},
    {"heads of 128", {2, 2, 256, 100, 130}, 130, 2, 2},
    {"for fp8-dw", {2, 2, 128, 90, 144}, 144, 3, 2},
    {"one row", {1, 1, 24, 37, 16}, 7, 1, 1},
    {"even", {3, 4, 64, 256, 32}, 32, 4, 4},
    {"one token", {2, 3, 48, 50, 17}, 1, 2, 2},
    {"few words", {2, 3, 48, 11, 17}, 5, 5, 1},
    {"long", {1, 2, 128, 97, 1024}, 1024, 2, 2},
    {"micro-batch 1", {2, 2, 128, 1000, 64}, 64, 8, 1},
};
enum { CASES = sizeof cases / sizeof *cases, SMALL_CASES = 5 }; // the first SMALL_CASES cover every path

enum { SEPARATOR = 1, SOURCES = 3 };
static const uint64_t FIRST_EXAMPLE = (uint64_t)1 << 40;

// Settings of new engines:
static int sources = SOURCES; // example e has source e % SOURCES
static Dtype fp8;             // a type of fp8, used with `exponents`; 0: the build's type
static bool fp8_head = true;  // with fp8
static bool masked;           // dropout, documents and label smoothing
static bool small;
static int case_count = CASES;

// Returns the rows of a step. One micro-step is enough for slow tools.
static int rows_of(const Case *c) { return small ? c->micro_batch : c->batch; }

// A vector that converts to a pointer.
template <typename X> struct Array : std::vector<X> {
    using std::vector<X>::vector;
    operator X *() { return this->data(); }
    operator const X *() const { return this->data(); }
};

// A model with parameters and tokens. Owns the engines of engine_of and world_engine.
struct World {
    const Case *c;
    Model model = {};
    Array<float> param;     // flat
    Array<uint16_t> tokens; // (steps, batch, T + 1)
    mutable std::vector<std::pair<const Api *, Engine *>> engines;

    World(const Case *c, int steps);
    ~World() {
        for (auto [api, engine] : engines) api->destroy(engine);
        model_destroy(&model);
    }
};

static Range all_of(const Model *model) { return Range{0, model->flat_count}; }

static inline float round_real(float x) {
    uint32_t bits;
    if (FP16) return __half2float(__float2half_rn(x));
    memcpy(&bits, &x, sizeof bits);
    bits = (bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000u; // rounds to nearest, ties to even
    memcpy(&x, &bits, sizeof bits);
    return x;
}

inline World::World(const Case *c_, int steps) : c(c_) {
    CALL_OK(model_create(&model, &c->config, &e));
    param.assign(model.flat_count, NAN); // unwritten values stay NaN
    small_params(&model, seed, param);
    // In 16 bits, move parameters towards GPT-2's values. There rounding errors are a smaller share of the gradient.
    for (int k = 0; k < model.tensor_count && !FP32; k++) {
        const Tensor *t = &model.tensors[k];
        float mean = t->init == INIT_ONE ? 1.0f : 0.0f, share = t->group == GROUP_EMBEDDING ? 0.2f : 0.5f;
        float *p = param + t->offset;
        for (size_t i = 0; i < t->count; i++) p[i] = round_real(mean + share * (p[i] - mean));
    }
    tokens.resize((size_t)steps * (size_t)c->batch * (size_t)(c->seq_len + 1));
    small_tokens(c->config.vocab, seed, tokens.size(), tokens);
}

// True if this build and GPU run this type of fp8 for this case.
static inline bool fp8_runs(Dtype type, const Case *c) {
    Error ignored;
    return FP8_BUILT && sm90_runs() && !fp8_check(type, c->config.channels, c->seq_len, &ignored);
}
static const Dtype fp8_types[] = {DTYPE_FP8, DTYPE_FP8_DW};
static const Case *const case_for_dw = &cases[4];

// Creates an engine with the world's parameters; NULL on failure.
static inline Engine *world_engine(const Api *api, const World *w, const EngineConfig &config) {
    Engine *engine = NULL;
    CALL_OK(engine_create(api, &engine, &config, &e));
    if (!engine) return NULL;
    w->engines.push_back({api, engine});
    CALL_OK(api->load(engine, STATE_PARAM, all_of(&w->model), w->param, &e));
    return engine;
}

// Returns a power of two that keeps small and large gradients within fp16's range.
static inline double loss_scale(const World *w) { return exp2(8 + floor(log2(w->c->seq_len))); }

static inline EngineConfig config_of(const World *w, int micro_batch, Recompute recompute) {
    EngineConfig config = {};
    config.model = &w->model;
    config.micro_batch = micro_batch;
    config.seq_len = w->c->seq_len;
    config.gns = GNS_EXACT;
    config.step_rows = w->c->batch;
    config.sources = sources;
    config.source = [](const void *, uint64_t example) { return (int)(example % SOURCES); };
    config.recompute = recompute;
    config.optimizer = optimizer;
    config.dtype = fp8, config.fp8_head = fp8_head;
    if (masked) {
        config.dropout = dropout_of(0.2, seed);
        config.document_mask = true;
        config.separator = SEPARATOR;
        config.label_smoothing = 0.4f; // large enough to change even the smallest terms of exact norms
    }
    return config;
}

// Uses the case's micro-batch if micro_batch is 0.
static inline Engine *engine_of(const Api *api, const World *w, Recompute recompute = RECOMPUTE_NONE,
                                int micro_batch = 0) {
    Engine *engine = world_engine(api, w, config_of(w, micro_batch ? micro_batch : w->c->micro_batch, recompute));
    if (engine) api->scale_loss(engine, loss_scale(w));
    return engine;
}

// fp8 exponents of the next step. train() unsets them before its first step; measure() does not change them.
static Array<int8_t> exponents;

static inline void exponents_begin(const World *w) {
    exponents.assign((size_t)fp8_entries(w->c->config.layers), (int8_t)FP8_UNSET);
}
static inline void exponents_next(const float *amax) {
    fp8_adapt(exponents, amax, (int)exponents.size() / FP8_ENTRIES - 1, true);
}

// The results of one step over a batch.
struct Outcome {
    double loss, nll;
    Array<float> grad, amax; // grad: flat
    Array<double> grad_sq, example_sq;
    Array<RowResult> row;
    double source_gram[SOURCES][SOURCES] = {};
};

// Clears gradients, then measures `rows` rows of the batch, micro_batch rows at a time.
static Outcome measure(const Api *api, Engine *engine, const World *w, const uint16_t *tokens, int rows,
                       int micro_batch, GnsMode mode) {
    const size_t tensors = w->model.tensor_count;
    Outcome o = {NAN,
                 NAN,
                 Array<float>(w->model.flat_count, NAN),
                 Array<float>(exponents.size(), NAN),
                 Array<double>(tensors, NAN),
                 Array<double>(tensors, NAN),
                 Array<RowResult>(w->c->batch, RowResult{NAN, NAN, NAN})};
    StepResult r = {NAN, o.grad_sq, o.example_sq, NAN, o.row, *o.source_gram, fp8 ? (float *)o.amax : NULL};
    if (fp8) api->exponents(engine, exponents);
    CALL_OK(api->begin_step(engine, &e));
    api->examples(engine, FIRST_EXAMPLE + (size_t)(tokens - w->tokens) / (size_t)(w->c->seq_len + 1));
    for (int b = 0; b < rows; b += micro_batch) {
        int n = rows - b < micro_batch ? rows - b : micro_batch;
        CALL_OK(api->micro_step(engine, tokens + (size_t)b * (size_t)(w->c->seq_len + 1), n, mode, &e));
    }
    CALL_OK(api->norms(engine, all_of(&w->model), &e));
    CALL_OK(api->result(engine, &r, &e));
    CALL_OK(api->store(engine, STATE_GRAD, all_of(&w->model), o.grad, &e));
    for (size_t i = 0; i < w->model.flat_count; i++) o.grad[i] /= (float)loss_scale(w);
    o.loss = r.loss_sum;
    o.nll = r.nll_sum;
    return o;
}

// Measures the rows of the first step.
static inline Outcome measure_batch(const Api *api, Engine *engine, const World *w, GnsMode mode) {
    return measure(api, engine, w, w->tokens, rows_of(w->c), w->c->micro_batch, mode);
}

static inline UpdateConfig update_config(const Case *c, int step) {
    UpdateConfig u = {};
    u.lr = 1e-3, u.beta1 = 0.9, u.beta2 = 0.95, u.eps = 1e-8, u.weight_decay = 0.1;
    u.muon_lr = 2e-3, u.momentum = 0.95; // muon_lr differs from lr, so that tests see a use of the wrong one
    u.grad_clip = 1.0;
    u.step = step;
    u.batch = rows_of(c);
    return u;
}

static inline void train(const Api *api, Engine *engine, const World *w, double *losses) {
    size_t step_tokens = (size_t)rows_of(w->c) * (size_t)(w->c->seq_len + 1);
    exponents_begin(w);
    for (int step = 1; step <= steps; step++) {
        UpdateConfig update = update_config(w->c, step);
        Outcome o = measure(api, engine, w, w->tokens + (size_t)(step - 1) * step_tokens, rows_of(w->c),
                            w->c->micro_batch, GNS_LN);
        losses[step - 1] = o.loss / rows_of(w->c);
        if (fp8) exponents_next(o.amax);
        if (optimizer == OPTIMIZER_LAMB) CALL_OK(api->trust(engine, all_of(&w->model), &update, &e));
        CALL_OK(api->update(engine, all_of(&w->model), &update, &e));
    }
}

// main calls this first. Exits if no GPU can run this build.
static inline void engine_test_begin(const char *name, int argc, char **argv) {
    Error e = {};
    Model model;
    Engine *engine = NULL;
    EngineConfig config = {.model = &model, .micro_batch = 1, .seq_len = cases[1].seq_len};
    char line[256];
    small = argc > 2 && strcmp(argv[2], "small") == 0;
    seed = argc > 1 ? strtoull(argv[1], NULL, 10) : 0;
    if (!seed) seed = (uint64_t)time(NULL);
    if (small) case_count = SMALL_CASES, steps = 2; // fp8 rounds from the second step on
    setvbuf(stdout, NULL, _IOLBF, 0);
    printf("%s %s, seed %llu\n", name, REAL_NAME, (unsigned long long)seed);
    if (model_create(&model, &cases[1].config, &e)) exit(1);
    int code = engine_create(&cuda_engine, &engine, &config, &e);
    if (code) error_print(&e);
    if (code == ERR_UNAVAILABLE) exit(ERR_SKIPPED);
    if (engine) {
        engine_describe(engine, line, sizeof line);
        puts(line);
    }
    engine_destroy(engine);
    model_destroy(&model);
}
