// The CUDA engine against the CPU engine, through engine.h, on the same weights and tokens: both are linked in, the CPU
// engine's functions under the names cpu_engine_*. Built twice, with -DGNS_FP32 for the fp32 engine, where the two
// agree up to rounding, and without for bf16, where the CPU computes in fp32 on the same bf16-rounded weights. And what
// the CUDA engine promises about itself: the same bits whatever is recomputed, kept, or run twice.
//
//     test_engine_cuda [seed [small]]      (0, or no seed: a fresh one is drawn, and printed; small: a few cases and
//                                          steps that run every kernel all the same, for tools that slow it all down)
#include "test.h"

#include "../../llmc/common.h"
#include "../../llmc/cuda/engine.cuh"
#include "../../llmc/cuda/optimizer.cuh"
#include "../../llmc/hash.h"
#include "small_model.h"

#include <atomic>
#include <time.h>
#include <vector>

#ifdef GNS_FP32
enum { FP32 = 1 };
static const double LOSS = 1e-5, GRADIENT = 1e-4, NORM = 1e-4, COSINE = 0.999999, TRAINED = 1e-4, LOGIT = 1e-4;
#else
enum { FP32 = 0 };
static const double LOSS = 5e-3, GRADIENT = 2e-2, NORM = 4e-2, COSINE = 0.999, TRAINED = 2e-2, LOGIT = 3e-2;
#endif

// ---------------------------------------------------------------------------------------------------------------------
// Two engines behind one set of pointers

typedef struct {
    int (*create)(Engine **, const EngineConfig *, Error *);
    void (*destroy)(Engine *);
    int (*load)(Engine *, StateKind, Range, const float *, Error *);
    int (*store)(Engine *, StateKind, Range, float *, Error *);
    int (*begin_step)(Engine *, Error *);
    int (*micro_step)(Engine *, const uint16_t *, int, GnsMode, Error *);
    int (*norms)(Engine *, Range, Error *);
    int (*update)(Engine *, Range, const UpdateConfig *, Error *);
    int (*result)(Engine *, StepResult *, Error *);
    int (*eval)(Engine *, const uint16_t *, int, int, float *, Error *);
    int (*logits)(Engine *, const uint16_t *, int, float *, Error *);
} Api;

extern "C" {
int cpu_engine_create(Engine **, const EngineConfig *, Error *);
void cpu_engine_destroy(Engine *);
int cpu_engine_load(Engine *, StateKind, Range, const float *, Error *);
int cpu_engine_store(Engine *, StateKind, Range, float *, Error *);
int cpu_engine_begin_step(Engine *, Error *);
int cpu_engine_micro_step(Engine *, const uint16_t *, int, GnsMode, Error *);
int cpu_engine_norms(Engine *, Range, Error *);
int cpu_engine_update(Engine *, Range, const UpdateConfig *, Error *);
int cpu_engine_result(Engine *, StepResult *, Error *);
int cpu_engine_eval(Engine *, const uint16_t *, int, int, float *, Error *);
int cpu_engine_logits(Engine *, const uint16_t *, int, float *, Error *);
}

static const Api gpu = {engine_create,     engine_destroy,    engine_load,  engine_store,
                        engine_begin_step, engine_micro_step, engine_norms, engine_update,
                        engine_result,     engine_eval,       engine_logits};
static const Api cpu = {cpu_engine_create,     cpu_engine_destroy,    cpu_engine_load,  cpu_engine_store,
                        cpu_engine_begin_step, cpu_engine_micro_step, cpu_engine_norms, cpu_engine_update,
                        cpu_engine_result,     cpu_engine_eval,       cpu_engine_logits};

// ---------------------------------------------------------------------------------------------------------------------
// Cases

enum { STEPS = 20 };

static uint64_t seed;
static int steps = STEPS; // that are trained

typedef struct {
    const char *name;
    ModelConfig config; // layers, heads, channels, vocab, context
    int seq_len, batch, micro_batch;
} Case;

static const Case cases[] = {
    {"odd", {2, 2, 32, 61, 13}, 13, 3, 2},           {"no multiple of anything", {2, 3, 27, 31, 35}, 33, 4, 3},
    {"heads of 64", {2, 2, 128, 300, 80}, 65, 3, 2}, {"heads of 128", {2, 2, 256, 100, 130}, 130, 2, 2},
    {"one row", {1, 1, 24, 37, 16}, 7, 1, 1},        {"even", {3, 4, 64, 256, 32}, 32, 4, 4},
    {"one token", {2, 3, 48, 50, 17}, 1, 2, 2},      {"few words", {2, 3, 48, 11, 17}, 5, 5, 1},
    {"long", {1, 2, 128, 97, 1024}, 1024, 2, 2},     {"micro-batch 1", {2, 2, 128, 1000, 64}, 64, 8, 1},
};
enum { CASES = sizeof cases / sizeof *cases, SMALL_CASES = 4 }; // the first of them take every path

static bool small;
static int case_count = CASES;

// Of a step: one micro-step will do for the tools.
static int rows_of(const Case *c) { return small ? c->micro_batch : c->batch; }

typedef struct {
    const Case *c;
    Model model;
    float *param;     // flat
    uint16_t *tokens; // (steps, batch, T + 1)
} World;

static Range all_of(const Model *model) { return Range{0, model->flat_count}; }

static float round_bf16(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    bits = (bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000u; // to nearest, ties to even
    memcpy(&x, &bits, sizeof bits);
    return x;
}

template <typename X> static X *take(size_t n) {
    X *p = (X *)malloc(n * sizeof(X));
    if (!p) abort();
    memset(p, 0xff, n * sizeof(X)); // NaN, for whoever does not write it
    return p;
}

static void world_open(World *w, const Case *c, int steps) {
    Error e = {};
    *w = {};
    w->c = c;
    CHECK_OK(model_create(&w->model, &c->config, &e), &e);
    w->param = take<float>(w->model.flat_count);
    small_params(&w->model, seed, w->param);
    // bf16's errors are judged nearer to GPT-2's own values, of which rounding takes a smaller share of the gradient
    for (int k = 0; k < w->model.tensor_count && !FP32; k++) {
        const Tensor *t = &w->model.tensors[k];
        float mean = t->init == INIT_ONE ? 1.0f : 0.0f, share = t->group == GROUP_EMBEDDING ? 0.2f : 0.5f;
        float *p = w->param + t->offset;
        for (size_t i = 0; i < t->count; i++) p[i] = round_bf16(mean + share * (p[i] - mean));
    }
    size_t count = (size_t)steps * (size_t)c->batch * (size_t)(c->seq_len + 1);
    w->tokens = take<uint16_t>(count);
    small_tokens(c->config.vocab, seed, count, w->tokens);
}

static void world_close(World *w) {
    free(w->param);
    free(w->tokens);
    model_destroy(&w->model);
}

static Engine *engine_of(const Api *api, const World *w, int micro_batch, Recompute recompute) {
    Error e = {};
    Engine *engine = NULL;
    EngineConfig config = {};
    config.model = &w->model;
    config.micro_batch = micro_batch;
    config.seq_len = w->c->seq_len;
    config.gns = GNS_EXACT;
    config.recompute = recompute;
    CHECK_OK(api->create(&engine, &config, &e), &e);
    if (engine) CHECK_OK(api->load(engine, STATE_PARAM, all_of(&w->model), w->param, &e), &e);
    return engine;
}

// What one step over a batch leaves behind.
typedef struct {
    double loss;
    float *grad; // flat
    double *grad_sq, *example_sq;
} Outcome;

static void outcome_free(Outcome *o) {
    free(o->grad);
    free(o->grad_sq);
    free(o->example_sq);
}

// `rows` of the batch, from cleared gradients, micro_batch at a time.
static Outcome measure(const Api *api, Engine *engine, const World *w, const uint16_t *tokens, int rows,
                       int micro_batch, GnsMode mode) {
    Error e = {};
    Outcome o = {NAN, take<float>(w->model.flat_count), take<double>(w->model.tensor_count),
                 take<double>(w->model.tensor_count)};
    StepResult r = {NAN, o.grad_sq, o.example_sq, NULL};
    CHECK_OK(api->begin_step(engine, &e), &e);
    for (int b = 0; b < rows; b += micro_batch) {
        int n = rows - b < micro_batch ? rows - b : micro_batch;
        CHECK_OK(api->micro_step(engine, tokens + (size_t)b * (size_t)(w->c->seq_len + 1), n, mode, &e), &e);
    }
    CHECK_OK(api->norms(engine, all_of(&w->model), &e), &e);
    CHECK_OK(api->result(engine, &r, &e), &e);
    CHECK_OK(api->store(engine, STATE_GRAD, all_of(&w->model), o.grad, &e), &e);
    o.loss = r.loss_sum;
    return o;
}

static double worst_seen[3]; // gradient error, norm error, 1 - cosine: of the test under way

static void check_gradients(const World *w, const Outcome *got, const Outcome *want) {
    for (int k = 0; k < w->model.tensor_count; k++) {
        const Tensor *t = &w->model.tensors[k];
        const float *a = got->grad + t->offset, *b = want->grad + t->offset;
        double diff = 0, aa = 0, bb = 0, ab = 0;
        for (size_t i = 0; i < t->count; i++) {
            diff += ((double)a[i] - b[i]) * ((double)a[i] - b[i]);
            aa += (double)a[i] * a[i];
            bb += (double)b[i] * b[i];
            ab += (double)a[i] * b[i];
        }
        double error = sqrt(diff / bb), cosine = ab / sqrt(aa * bb);
        CHECK(error <= GRADIENT, "%s, %s: relative error %.2e", w->c->name, t->name, error);
        CHECK(cosine >= COSINE, "%s, %s: cosine %.7f", w->c->name, t->name, cosine);
        worst_seen[0] = fmax(worst_seen[0], error);
        worst_seen[2] = fmax(worst_seen[2], 1 - cosine);
        size_t end = k + 1 < w->model.tensor_count ? w->model.tensors[k + 1].offset : w->model.flat_count;
        for (size_t i = t->offset + t->count; i < end; i++)
            CHECK(got->grad[i] == 0, "%s: gradient %g in the padding behind %s", w->c->name, got->grad[i], t->name);
    }
}

static void check_norms(const World *w, const double *got, const double *want, const char *what) {
    for (int k = 0; k < w->model.tensor_count; k++) {
        double error = fabs(got[k] - want[k]) / want[k];
        CHECK(error <= NORM, "%s, %s of %s: %.9g, want %.9g", w->c->name, what, w->model.tensors[k].name, got[k],
              want[k]);
        worst_seen[1] = fmax(worst_seen[1], error);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Against the CPU

static void compare_batch(const World *w, Engine *a, Engine *b) {
    int batch = rows_of(w->c), micro = w->c->micro_batch;
    Outcome got = measure(&gpu, a, w, w->tokens, batch, micro, GNS_EXACT);
    Outcome want = measure(&cpu, b, w, w->tokens, batch, micro, GNS_EXACT);
    CHECK_CLOSE(got.loss, want.loss, LOSS, 0);
    check_gradients(w, &got, &want);
    check_norms(w, got.grad_sq, want.grad_sq, "|g|^2");
    check_norms(w, got.example_sq, want.example_sq, "sum |g_b|^2");
    outcome_free(&got);
    outcome_free(&want);
    // the same without the exact norms takes other paths to the same gradient
    got = measure(&gpu, a, w, w->tokens, batch, micro, GNS_LN);
    want = measure(&cpu, b, w, w->tokens, batch, micro, GNS_LN);
    check_gradients(w, &got, &want);
    for (int k = 0; k < w->model.tensor_count; k++) {
        const char *name = w->model.tensors[k].name;
        if (w->model.tensors[k].group != GROUP_LN)
            CHECK(isnan(got.example_sq[k]), "%s: %s was not measured", w->c->name, name);
        else CHECK_CLOSE(got.example_sq[k], want.example_sq[k], NORM, 0);
    }
    outcome_free(&got);
    outcome_free(&want);
}

static void compare_rows(const World *w, Engine *a, Engine *b) {
    for (int row = 0; row < w->c->batch; row++) {
        const uint16_t *tokens = w->tokens + (size_t)row * (size_t)(w->c->seq_len + 1);
        Outcome got = measure(&gpu, a, w, tokens, 1, 1, GNS_EXACT);
        Outcome want = measure(&cpu, b, w, tokens, 1, 1, GNS_EXACT);
        CHECK_CLOSE(got.loss, want.loss, LOSS, 0);
        check_norms(w, got.example_sq, want.example_sq, "|g_b|^2");
        outcome_free(&got);
        outcome_free(&want);
    }
}

static void compare_inference(const World *w, Engine *a, Engine *b) {
    Error e = {};
    size_t V = (size_t)w->c->config.vocab, T = (size_t)w->c->seq_len, n = (size_t)w->c->micro_batch;
    float *got = take<float>(size_max(V, n * T)), *want = take<float>(size_max(V, n * T));
    for (size_t length = T; length > 0; length = small ? length / 8 : length * 2 / 3) { // and rows shorter than T
        for (size_t i = 0; i < n * length; i++) got[i] = want[i] = NAN;
        CHECK_OK(gpu.eval(a, w->tokens, (int)n, (int)length, got, &e), &e);
        CHECK_OK(cpu.eval(b, w->tokens, (int)n, (int)length, want, &e), &e);
        for (size_t i = 0; i < n * length; i++) CHECK_CLOSE(got[i], want[i], 10 * LOSS, 1.0);
    }
    for (int length = 1; length <= (int)T; length += (int)T / 3 + 1) {
        CHECK_OK(gpu.logits(a, w->tokens, length, got, &e), &e);
        CHECK_OK(cpu.logits(b, w->tokens, length, want, &e), &e);
        double diff = 0, square = 0;
        for (size_t v = 0; v < V; v++) {
            diff += ((double)got[v] - want[v]) * ((double)got[v] - want[v]);
            square += (double)want[v] * want[v];
        }
        CHECK(sqrt(diff / square) <= LOGIT, "%s: logits of %d tokens off by %.2e", w->c->name, length,
              sqrt(diff / square));
    }
    free(got);
    free(want);
}

static void test_against_cpu(void) {
    memset(worst_seen, 0, sizeof worst_seen);
    for (int i = 0; i < case_count; i++) {
        World w;
        world_open(&w, &cases[i], 1);
        printf("  %s\n", w.c->name);
        Engine *a = engine_of(&gpu, &w, w.c->micro_batch, RECOMPUTE_NONE);
        Engine *b = engine_of(&cpu, &w, w.c->micro_batch, RECOMPUTE_NONE);
        if (a && b) {
            compare_batch(&w, a, b);
            if (!small) compare_rows(&w, a, b);
            compare_inference(&w, a, b);
        }
        gpu.destroy(a);
        cpu.destroy(b);
        world_close(&w);
    }
    printf("  largest relative error of a gradient %.1e, of a norm %.1e; 1 - cosine %.1e\n", worst_seen[0],
           worst_seen[1], worst_seen[2]);
}

static UpdateConfig update_config(const Case *c, int step) {
    UpdateConfig u = {};
    u.lr = 1e-3, u.beta1 = 0.9, u.beta2 = 0.95, u.eps = 1e-8, u.weight_decay = 0.1;
    u.grad_clip = 1.0;
    u.step = step;
    u.batch = rows_of(c);
    return u;
}

static void train(const Api *api, Engine *engine, const World *w, double *losses) {
    Error e = {};
    size_t step_tokens = (size_t)rows_of(w->c) * (size_t)(w->c->seq_len + 1);
    for (int step = 1; step <= steps; step++) {
        UpdateConfig update = update_config(w->c, step);
        Outcome o = measure(api, engine, w, w->tokens + (size_t)(step - 1) * step_tokens, rows_of(w->c),
                            w->c->micro_batch, GNS_LN);
        losses[step - 1] = o.loss / rows_of(w->c);
        CHECK_OK(api->update(engine, all_of(&w->model), &update, &e), &e);
        outcome_free(&o);
    }
}

static void test_training_against_cpu(void) {
    for (int i = 0; i < case_count; i++) {
        World w;
        double got[STEPS], want[STEPS];
        world_open(&w, &cases[i], steps);
        Engine *a = engine_of(&gpu, &w, w.c->micro_batch, RECOMPUTE_NONE);
        Engine *b = engine_of(&cpu, &w, w.c->micro_batch, RECOMPUTE_NONE);
        if (a && b) {
            train(&gpu, a, &w, got);
            train(&cpu, b, &w, want);
            for (int s = 0; s < steps; s++)
                CHECK(fabs(got[s] - want[s]) <= TRAINED * fabs(want[s]), "%s, step %d: loss %.7f, want %.7f", w.c->name,
                      s + 1, got[s], want[s]);
        }
        gpu.destroy(a);
        cpu.destroy(b);
        world_close(&w);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// What the engine promises about itself

// Two trained engines must have the same bits everywhere.
static void check_same_bits(const World *w, Engine *a, Engine *b, const char *what) {
    Error e = {};
    size_t bytes = w->model.flat_count * sizeof(float);
    float *x = take<float>(w->model.flat_count), *y = take<float>(w->model.flat_count);
    for (int kind = STATE_PARAM; kind <= STATE_MOMENT2; kind++) {
        CHECK_OK(gpu.store(a, (StateKind)kind, all_of(&w->model), x, &e), &e);
        CHECK_OK(gpu.store(b, (StateKind)kind, all_of(&w->model), y, &e), &e);
        CHECK(memcmp(x, y, bytes) == 0, "%s: %s, array %d differs", w->c->name, what, kind);
    }
    free(x);
    free(y);
}

static void compare_with(const World *w, Recompute recompute, const char *what) {
    double losses[2][STEPS];
    Engine *a = engine_of(&gpu, w, w->c->micro_batch, RECOMPUTE_NONE);
    Engine *b = engine_of(&gpu, w, w->c->micro_batch, recompute);
    if (a && b) {
        train(&gpu, a, w, losses[0]);
        train(&gpu, b, w, losses[1]);
        CHECK(memcmp(losses[0], losses[1], steps * sizeof(double)) == 0, "%s: %s, losses differ", w->c->name, what);
        check_same_bits(w, a, b, what);
    }
    gpu.destroy(a);
    gpu.destroy(b);
}

static void test_same_bits(void) {
    for (int i = 0; i < case_count; i++) {
        World w;
        world_open(&w, &cases[i], steps);
        if (!small) compare_with(&w, RECOMPUTE_NONE, "two runs");
        compare_with(&w, RECOMPUTE_GELU, "recompute gelu");
        compare_with(&w, RECOMPUTE_BLOCK, "recompute block");
        world_close(&w);
    }
}

// Memory that is read before it is written would show here: an engine whose whole memory was filled with a byte when it
// was created, except for the tables that are written then and the state that is loaded.
static Engine *engine_filled(const World *w, int byte, Recompute recompute) {
    Error e = {};
    const size_t n = w->model.flat_count;
    std::vector<uint8_t> decay(n / DECAY_GRANULE);
    std::vector<ReduceSegment> segment(w->model.tensor_count);
    std::vector<float> zero(n);
    MemoryPlan plan;
    Engine *engine = engine_of(&gpu, w, w->c->micro_batch, recompute);
    if (!engine) return NULL;
    engine_plan_memory(&engine->config, &plan);
    cudaMemcpy(decay.data(), engine->decay, decay.size(), cudaMemcpyDeviceToHost);
    cudaMemcpy(segment.data(), engine->segment, segment.size() * sizeof(ReduceSegment), cudaMemcpyDeviceToHost);
    cudaMemset(engine->memory, byte, plan.total);
    cudaMemcpy(engine->decay, decay.data(), decay.size(), cudaMemcpyHostToDevice);
    cudaMemcpy(engine->segment, segment.data(), segment.size() * sizeof(ReduceSegment), cudaMemcpyHostToDevice);
    cudaError_t status = cudaDeviceSynchronize();
    CHECK(status == cudaSuccess, "%s", cudaGetErrorString(status));
    CHECK_OK(gpu.load(engine, STATE_PARAM, all_of(&w->model), w->param, &e), &e);
    CHECK_OK(gpu.load(engine, STATE_MOMENT1, all_of(&w->model), zero.data(), &e), &e);
    CHECK_OK(gpu.load(engine, STATE_MOMENT2, all_of(&w->model), zero.data(), &e), &e);
    return engine;
}

static void check_same_outcome(const World *w, const Outcome *a, const Outcome *b, const char *what) {
    size_t tensors = (size_t)w->model.tensor_count;
    CHECK(isfinite(a->loss) && a->loss == b->loss, "%s, %s: loss %.9g and %.9g", w->c->name, what, a->loss, b->loss);
    for (size_t i = 0; i < w->model.flat_count; i++)
        CHECK(isfinite(a->grad[i]) && a->grad[i] == b->grad[i], "%s, %s: gradient %zu: %g and %g", w->c->name, what, i,
              a->grad[i], b->grad[i]);
    for (size_t k = 0; k < tensors; k++)
        CHECK(isfinite(a->grad_sq[k]), "%s, %s: |g|^2 of tensor %zu", w->c->name, what, k);
    CHECK(memcmp(a->grad_sq, b->grad_sq, tensors * sizeof(double)) == 0, "%s, %s: |g|^2 differ", w->c->name, what);
    CHECK(memcmp(a->example_sq, b->example_sq, tensors * sizeof(double)) == 0, "%s, %s: |g_b|^2 differ", w->c->name,
          what);
}

static void check_same_inference(const World *w, Engine *a, Engine *b, const char *what) {
    Error e = {};
    size_t V = (size_t)w->c->config.vocab, T = (size_t)w->c->seq_len, n = (size_t)w->c->micro_batch * T;
    size_t most = size_max(V, n);
    float *x = take<float>(most), *y = take<float>(most);
    CHECK_OK(gpu.eval(a, w->tokens, w->c->micro_batch, (int)T, x, &e), &e);
    CHECK_OK(gpu.eval(b, w->tokens, w->c->micro_batch, (int)T, y, &e), &e);
    for (size_t i = 0; i < n; i++)
        CHECK(isfinite(x[i]) && x[i] == y[i], "%s, %s: loss of token %zu: %g and %g", w->c->name, what, i, x[i], y[i]);
    CHECK_OK(gpu.logits(a, w->tokens, (int)(T + 1) / 2, x, &e), &e);
    CHECK_OK(gpu.logits(b, w->tokens, (int)(T + 1) / 2, y, &e), &e);
    for (size_t v = 0; v < V; v++)
        CHECK(isfinite(x[v]) && x[v] == y[v], "%s, %s: logit %zu: %g and %g", w->c->name, what, v, x[v], y[v]);
    free(x);
    free(y);
}

// The same bits over memory full of NaN (0xff in bf16, fp32 and fp64) as over zeros, in every way through a step. For
// what compute-sanitizer's initcheck cannot say: it does not see the bulk stores of cuBLASLt's kernels.
static void compare_filled(const World *w, Recompute recompute, const char *what) {
    Error e = {};
    Engine *a = engine_filled(w, 0xff, recompute), *b = engine_filled(w, 0, recompute);
    if (a && b) {
        check_same_inference(w, a, b, what);
        for (GnsMode mode : {GNS_EXACT, GNS_LN, GNS_OFF}) {
            UpdateConfig update = update_config(w->c, mode == GNS_EXACT ? 1 : mode == GNS_LN ? 2 : 3);
            Outcome x = measure(&gpu, a, w, w->tokens, rows_of(w->c), w->c->micro_batch, mode);
            Outcome y = measure(&gpu, b, w, w->tokens, rows_of(w->c), w->c->micro_batch, mode);
            check_same_outcome(w, &x, &y, what);
            CHECK_OK(gpu.update(a, all_of(&w->model), &update, &e), &e);
            CHECK_OK(gpu.update(b, all_of(&w->model), &update, &e), &e);
            outcome_free(&x);
            outcome_free(&y);
        }
        check_same_bits(w, a, b, what);
    }
    gpu.destroy(a);
    gpu.destroy(b);
}

static void test_filled_memory(void) {
    for (int i = 0; i < case_count; i++) {
        World w;
        world_open(&w, &cases[i], 1);
        compare_filled(&w, RECOMPUTE_NONE, "memory filled");
        compare_filled(&w, RECOMPUTE_BLOCK, "memory filled, recompute block");
        world_close(&w);
    }
}

// 8 rows at once, one at a time, and in pieces that differ.
static void test_accumulation(void) {
    World w;
    world_open(&w, &cases[CASES - 1], 1);
    Engine *engine = engine_of(&gpu, &w, 8, RECOMPUTE_NONE);
    const double tolerance = FP32 ? 1e-5 : 1e-2;
    if (engine) {
        Outcome whole = measure(&gpu, engine, &w, w.tokens, 8, 8, GNS_EXACT);
        for (int micro = 1; micro < 8; micro += 2) {
            Outcome parts = measure(&gpu, engine, &w, w.tokens, 8, micro, GNS_EXACT);
            CHECK_CLOSE(parts.loss, whole.loss, tolerance, 0);
            for (int k = 0; k < w.model.tensor_count; k++) {
                CHECK_CLOSE(parts.grad_sq[k], whole.grad_sq[k], tolerance, 0);
                CHECK_CLOSE(parts.example_sq[k], whole.example_sq[k], tolerance, 0);
            }
            outcome_free(&parts);
        }
        outcome_free(&whole);
    }
    gpu.destroy(engine);
    world_close(&w);
}

// What was tuned on one engine and taken over by another gives the same bits there; and what was tuned elsewhere is
// refused, and leaves an engine as it was. Tuning itself trains nothing.
static void test_tuning(void) {
    World w;
    Error e = {};
    double losses[3][STEPS];
    char elsewhere[TUNING_BYTES];
    world_open(&w, &cases[CASES - 1], steps);
    Engine *a = engine_of(&gpu, &w, w.c->micro_batch, RECOMPUTE_NONE);
    Engine *b = engine_of(&gpu, &w, w.c->micro_batch, RECOMPUTE_NONE);
    CHECK(engine_tuning(a)[0] == 0, "tuned unasked: %s", engine_tuning(a));
    CHECK_OK(engine_tune(a, &e), &e);
    printf("  %.400s...\n", engine_tuning(a));
    CHECK(strlen(engine_tuning(a)) > 100, "'%s'", engine_tuning(a));
    CHECK_OK(engine_set_tuning(b, engine_tuning(a), &e), &e);
    CHECK(strcmp(engine_tuning(a), engine_tuning(b)) == 0, "'%s'", engine_tuning(b));
    train(&gpu, a, &w, losses[0]);
    train(&gpu, b, &w, losses[1]);
    CHECK(memcmp(losses[0], losses[1], steps * sizeof(double)) == 0, "losses differ");
    check_same_bits(&w, a, b, "tuned, and a tuning taken over");
    snprintf(elsewhere, sizeof elsewhere, "x%s", engine_tuning(a));
    CHECK_ERROR(engine_set_tuning(b, elsewhere, &e), &e, ERR_INPUT, "tuned for x");
    CHECK(engine_tuning(b)[0] == 0, "'%s' is left", engine_tuning(b));
    gpu.destroy(a);
    a = engine_of(&gpu, &w, w.c->micro_batch, RECOMPUTE_NONE);
    CHECK_OK(gpu.load(b, STATE_PARAM, all_of(&w.model), w.param, &e), &e);
    Outcome untuned = measure(&gpu, a, &w, w.tokens, rows_of(w.c), w.c->micro_batch, GNS_OFF);
    Outcome refused = measure(&gpu, b, &w, w.tokens, rows_of(w.c), w.c->micro_batch, GNS_OFF);
    CHECK(!memcmp(untuned.grad, refused.grad, w.model.flat_count * sizeof(float)),
          "a refused tuning changed something");
    outcome_free(&untuned);
    outcome_free(&refused);
    gpu.destroy(a);
    gpu.destroy(b);
    world_close(&w);
}

// Norms add up over ranges, and an update in pieces is the update.
static void test_ranges(void) {
    World w;
    Error e = {};
    world_open(&w, &cases[2], 1);
    Engine *a = engine_of(&gpu, &w, w.c->micro_batch, RECOMPUTE_NONE);
    Engine *b = engine_of(&gpu, &w, w.c->micro_batch, RECOMPUTE_NONE);
    UpdateConfig update = update_config(w.c, 1);
    size_t cut[] = {0, 64 * 7, w.model.flat_count / 3 / 64 * 64, w.model.flat_count};
    Outcome whole = measure(&gpu, a, &w, w.tokens, rows_of(w.c), w.c->micro_batch, GNS_OFF);
    Outcome other = measure(&gpu, b, &w, w.tokens, rows_of(w.c), w.c->micro_batch, GNS_OFF);
    CHECK_OK(gpu.update(a, all_of(&w.model), &update, &e), &e);
    for (int i = 0; i < 3; i++) CHECK_OK(gpu.update(b, Range{cut[i], cut[i + 1]}, &update, &e), &e);
    check_same_bits(&w, a, b, "update in pieces");
    double *sum = take<double>(w.model.tensor_count);
    for (int k = 0; k < w.model.tensor_count; k++) sum[k] = 0;
    StepResult r = {NAN, other.grad_sq, other.example_sq, NULL};
    for (int i = 0; i < 3; i++) {
        CHECK_OK(gpu.norms(b, Range{cut[i], cut[i + 1]}, &e), &e);
        CHECK_OK(gpu.result(b, &r, &e), &e);
        for (int k = 0; k < w.model.tensor_count; k++) { // tensors outside keep what they had
            const Tensor *t = &w.model.tensors[k];
            if (t->offset < cut[i + 1] && t->offset + t->count > cut[i]) sum[k] += r.grad_sq[k];
        }
    }
    for (int k = 0; k < w.model.tensor_count; k++) CHECK_CLOSE(sum[k], whole.grad_sq[k], 1e-6, 0);
    free(sum);
    outcome_free(&whole);
    outcome_free(&other);
    gpu.destroy(a);
    gpu.destroy(b);
    world_close(&w);
}

// The hash that replicas compare, against a loop over the weights as they are stored: the working weights, and the fp32
// masters behind them where they are not the same.
static uint64_t hash_of(const float *param, size_t all, Range range) {
    uint64_t sum = 0;
    for (size_t i = range.begin; i < range.end; i++) {
        uint32_t bits, rounded;
        float working = FP32 ? param[i] : round_bf16(param[i]);
        memcpy(&bits, &param[i], sizeof bits);
        memcpy(&rounded, &working, sizeof rounded);
        sum += hash_element(i, FP32 ? rounded : rounded >> 16);
        if (!FP32) sum += hash_element(all + i, bits);
    }
    return sum;
}

static void test_hash(void) {
    World w;
    Error e = {};
    world_open(&w, &cases[2], 1);
    size_t n = w.model.flat_count;
    Engine *engine = engine_of(&gpu, &w, w.c->micro_batch, RECOMPUTE_NONE);
    float *param = take<float>(n);
    uint64_t hash, again;
    CHECK_OK(gpu.store(engine, STATE_PARAM, all_of(&w.model), param, &e), &e);
    for (size_t cut = 0; cut < n; cut = 3 * cut + 1) {
        Range range = {cut, n - cut / 2 > cut ? n - cut / 2 : n};
        CHECK_OK(engine_hash(engine, range, &hash, &e), &e);
        CHECK(hash == hash_of(param, n, range), "from %zu to %zu", range.begin, range.end);
    }
    CHECK_OK(engine_hash(engine, all_of(&w.model), &hash, &e), &e);
    for (size_t i = 0; i < n; i += n / 20) { // the last bit of one weight, which bf16 does not see
        uint32_t bits;
        memcpy(&bits, &param[i], sizeof bits);
        bits ^= 1;
        memcpy(&param[i], &bits, sizeof bits);
        CHECK_OK(gpu.load(engine, STATE_PARAM, Range{i, i + 1}, &param[i], &e), &e);
        CHECK_OK(engine_hash(engine, all_of(&w.model), &again, &e), &e);
        CHECK(again != hash && again == hash_of(param, n, all_of(&w.model)), "element %zu", i);
        hash = again;
    }
    free(param);
    gpu.destroy(engine);
    world_close(&w);
}

// Keeps the engine's stream from going on for a while.
typedef struct {
    double seconds;
    std::atomic<bool> ended;
} Hold;

static void hold_stream(void *context) {
    Hold *hold = (Hold *)context;
    for (double start = clock_seconds(); clock_seconds() - start < hold->seconds;) continue;
    hold->ended = true;
}

static void hold_engine(Engine *engine, Hold *hold) {
    hold->seconds = 1;
    hold->ended = false;
    CHECK(cudaLaunchHostFunc((cudaStream_t)engine_stream(engine), hold_stream, hold) == cudaSuccess, "not held");
}

// got: (flat_count), pinned, as a checkpoint's copy is.
static void check_stored(Engine *engine, const World *w, StateKind kind, float *got, const float *want) {
    Error e = {};
    size_t bytes = w->model.flat_count * sizeof(float);
    memset(got, 0xff, bytes);
    CHECK_OK(gpu.store(engine, kind, all_of(&w->model), got, &e), &e);
    CHECK(memcmp(got, want, bytes) == 0, "%s, array %d differs", w->c->name, kind);
}

// Weights and moments are copied when the update that made them is over, whatever is queued behind it, so that a
// snapshot is taken while the next step is under way; gradients are what all that is queued makes of them.
static void test_store_beside_step(void) {
    static const StateKind kinds[] = {STATE_MOMENT1, STATE_PARAM, STATE_MOMENT2, STATE_GRAD};
    World w;
    Error e = {};
    world_open(&w, &cases[3], 1);
    Engine *a = engine_of(&gpu, &w, w.c->batch, RECOMPUTE_NONE), *b = engine_of(&gpu, &w, w.c->batch, RECOMPUTE_NONE);
    UpdateConfig update = update_config(w.c, 1);
    float *want[4], *got; // by StateKind: what b keeps, which nobody holds up
    Hold hold;
    CHECK(cudaMallocHost(&got, w.model.flat_count * sizeof(float)) == cudaSuccess, "no pinned memory");
    for (Engine *engine : {b, a}) {
        Outcome o = measure(&gpu, engine, &w, w.tokens, w.c->batch, w.c->batch, GNS_LN);
        outcome_free(&o);
        if (engine == a) hold_engine(a, &hold);
        CHECK_OK(gpu.update(engine, all_of(&w.model), &update, &e), &e);
    }
    CHECK_OK(gpu.begin_step(b, &e), &e);
    CHECK_OK(gpu.micro_step(b, w.tokens, w.c->batch, GNS_LN, &e), &e);
    for (StateKind kind : kinds) {
        want[kind] = take<float>(w.model.flat_count);
        CHECK_OK(gpu.store(b, kind, all_of(&w.model), want[kind], &e), &e);
    }
    check_stored(a, &w, STATE_MOMENT1, got, want[STATE_MOMENT1]);
    CHECK(hold.ended, "copied before the update");
    hold_engine(a, &hold);
    CHECK_OK(gpu.begin_step(a, &e), &e);
    CHECK_OK(gpu.micro_step(a, w.tokens, w.c->batch, GNS_LN, &e), &e);
    for (StateKind kind : kinds) {
        if (kind == STATE_GRAD) CHECK(!hold.ended, "the copies waited for the next step");
        check_stored(a, &w, kind, got, want[kind]);
        free(want[kind]);
    }
    CHECK(hold.ended, "gradients were copied before the step that makes them");
    cudaFreeHost(got);
    gpu.destroy(a);
    gpu.destroy(b);
    world_close(&w);
}

// A gradient that is not a number moves nothing.
static void test_nonfinite(void) {
    World w;
    Error e = {};
    world_open(&w, &cases[2], 1);
    const Tensor *gamma = model_tensor(&w.model, LN2_W, 1);
    w.param[gamma->offset + 5] = NAN;
    Engine *a = engine_of(&gpu, &w, w.c->micro_batch, RECOMPUTE_NONE);
    UpdateConfig update = update_config(w.c, 1);
    Outcome o = measure(&gpu, a, &w, w.tokens, rows_of(w.c), w.c->micro_batch, GNS_LN);
    double square = 0;
    for (int k = 0; k < w.model.tensor_count; k++) square += o.grad_sq[k];
    CHECK(!isfinite(square) && !isfinite(o.loss), "norm %g, loss %g", square, o.loss);
    CHECK_OK(gpu.update(a, all_of(&w.model), &update, &e), &e);
    float *after = take<float>(w.model.flat_count);
    CHECK_OK(gpu.store(a, STATE_PARAM, all_of(&w.model), after, &e), &e);
    CHECK(memcmp(after, w.param, w.model.flat_count * sizeof(float)) == 0, "parameters moved");
    CHECK_OK(gpu.store(a, STATE_MOMENT2, all_of(&w.model), after, &e), &e);
    for (size_t i = 0; i < w.model.flat_count; i++) CHECK(after[i] == 0, "second moment %g", after[i]);
    free(after);
    outcome_free(&o);
    gpu.destroy(a);
    world_close(&w);
}

static size_t planned(const Model *model, int micro_batch, Recompute recompute) {
    MemoryPlan plan;
    EngineConfig config = {};
    config.model = model;
    config.micro_batch = micro_batch;
    config.seq_len = 1024;
    config.recompute = recompute;
    engine_plan_memory(&config, &plan);
    size_t sum = 0;
    for (int i = 0; i < plan.count; i++) sum += plan.item[i].bytes;
    CHECK(sum == plan.total, "parts %zu, total %zu", sum, plan.total);
    return plan.total;
}

static void test_memory(void) {
    Error e = {};
    Model model;
    ModelConfig config = {0, 0, 0, 50257, 1024};
    CHECK(model_preset(&config, "gpt2-124M"), "preset");
    CHECK_OK(model_create(&model, &config, &e), &e);
    size_t none = planned(&model, 64, RECOMPUTE_NONE), gelu = planned(&model, 64, RECOMPUTE_GELU);
    size_t block = planned(&model, 64, RECOMPUTE_BLOCK);
    const double gib = 1 << 30;
    printf("  124M, micro-batch 64 x 1024: %.1f GiB; recompute gelu %.1f, block %.1f\n", (double)none / gib,
           (double)gelu / gib, (double)block / gib);
    CHECK(none > gelu && gelu > block, "recomputing must save memory");
    if (!FP32) CHECK((double)none <= 25 * gib, "%.1f GiB", (double)none / gib);
    Engine *engine = NULL;
    EngineConfig huge = {};
    huge.model = &model;
    huge.micro_batch = 4096;
    huge.seq_len = 1024;
    CHECK_ERROR(engine_create(&engine, &huge, &e), &e, ERR_MEMORY, "--micro-batch 4096");
    CHECK(engine == NULL, "no engine");
    CHECK(strstr(e.hint, "--micro-batch ") && strstr(e.hint, "would fit"), "hint: %s", e.hint);
    printf("  %s. %s\n", e.what, e.hint);
    model_destroy(&model);
}

int main(int argc, char **argv) {
    Error e = {};
    small = argc > 2 && strcmp(argv[2], "small") == 0;
    seed = argc > 1 ? strtoull(argv[1], NULL, 10) : 0;
    if (!seed) seed = (uint64_t)time(NULL);
    if (small) case_count = SMALL_CASES, steps = 1;
    setvbuf(stdout, NULL, _IOLBF, 0);
    printf("test_engine_cuda %s, seed %llu\n", FP32 ? "fp32" : "bf16", (unsigned long long)seed);
    World w;
    Engine *engine = NULL;
    if (model_create(&w.model, &cases[1].config, &e)) return 1;
    EngineConfig config = {};
    config.model = &w.model;
    config.micro_batch = 1;
    config.seq_len = cases[1].seq_len;
    int code = engine_create(&engine, &config, &e);
    if (code) error_print(&e, 0, 1);
    if (code == ERR_NO_GPU) return ERR_SKIPPED;
    char line[256];
    if (engine) {
        engine_describe(engine, line, sizeof line);
        printf("%s, peak %.0f TFLOP/s\n", line, 1e-12 * engine_peak_flops(engine));
    }
    engine_destroy(engine);
    model_destroy(&w.model);
    RUN(test_against_cpu);
    if (!small) RUN(test_training_against_cpu);
    RUN(test_same_bits);
    if (!small) RUN(test_filled_memory); // the tools see for themselves
    if (!small) RUN(test_accumulation);
    if (!small) RUN(test_tuning); // runs cuBLASLt's kernels, not ours
    RUN(test_ranges);
    RUN(test_hash);
    if (!small) RUN(test_store_beside_step); // the tools wait for every kernel
    RUN(test_nonfinite);
    if (!small) RUN(test_memory); // asks for more than there is
    return test_summary();
}
