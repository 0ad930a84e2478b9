// The CPU engine's updates (--optimizer): the bits do not depend on threads; a gradient that is not finite changes
// nothing; bf16 is close to fp32. dev/oracle compares the updates with the papers.
#include "arrays.h"
#include "base/float16.h"
#include "cpu/layers.h"
#include "cpu/matmul.h"
#include "world.h"

enum { ROWS = 2, T = 12, STEPS = 3 };
static const ModelConfig shape = {
    .layers = 2, .heads = 2, .channels = 96, .vocab = 70, .context = T}; // long enough for parallel loops

static Engine *optimizing_engine(const World *w, Optimizer optimizer, int threads, Dtype dtype) {
    return engine_of(w,
                     (EngineConfig){.micro_batch = ROWS, .threads = threads, .dtype = dtype, .optimizer = optimizer});
}

static void make_step(World *w, Engine *engine, Optimizer optimizer, int step) {
    UpdateConfig u = {.lr = 1e-2,
                      .muon_lr = 2e-2,
                      .beta1 = 0.9,
                      .beta2 = 0.95,
                      .eps = 1e-6,
                      .weight_decay = 0.1,
                      .momentum = 0.9,
                      .grad_clip = 1,
                      .step = step,
                      .batch = ROWS};
    const uint16_t *rows = w->tokens + (size_t)(step - 1) * ROWS * (T + 1);
    CHECK_OK(small_batch(engine, rows, ROWS, T, ROWS, GNS_OFF, &e), &e);
    CHECK_OK(engine_norms(engine, all_of(w), &e), &e);
    if (optimizer == OPTIMIZER_LAMB) CHECK_OK(engine_trust(engine, all_of(w), &u, &e), &e);
    CHECK_OK(engine_update(engine, all_of(w), &u, &e), &e);
}

static float *state_of(World *w, Engine *engine, StateKind kind) {
    float *x = floats_of(w);
    CHECK_OK(engine_store(engine, kind, all_of(w), x, &e), &e);
    return x;
}

// Checks that passes read the updated weights: an engine that loads `param` (rounded with bf16) has the same losses.
static void check_weights(World *w, Engine *engine, const float *param, Dtype dtype) {
    float loss[2][ROWS * T];
    Engine *other = optimizing_engine(w, OPTIMIZER_ADAMW, 1, dtype);
    CHECK_OK(engine_load(other, STATE_PARAM, all_of(w), param, &e), &e);
    CHECK_OK(engine_eval(engine, w->tokens, ROWS, T, loss[0], &e), &e);
    CHECK_OK(engine_eval(other, w->tokens, ROWS, T, loss[1], &e), &e);
    CHECK(memcmp(loss[0], loss[1], sizeof loss[0]) == 0, "the passes read other weights than the stored ones");
    engine_destroy(other);
}

// Returns the weights after all steps.
static float *train(World *w, Optimizer optimizer, int threads, Dtype dtype) {
    Engine *engine = optimizing_engine(w, optimizer, threads, dtype);
    for (int step = 1; step <= STEPS; step++) make_step(w, engine, optimizer, step);
    float *after = state_of(w, engine, STATE_PARAM);
    check_weights(w, engine, after, dtype);
    engine_destroy(engine);
    return after;
}

static void test_threads(void) {
    float *after[OPTIMIZERS];
    World w = world_of(shape, T, STEPS * ROWS, 1);
    size_t bytes = range_float_bytes(all_of(&w));
    for (int o = 0; o < OPTIMIZERS; o++) {
        float *more = train(&w, (Optimizer)o, 2, DTYPE_FP32);
        after[o] = train(&w, (Optimizer)o, 1, DTYPE_FP32);
        CHECK(memcmp(after[o], more, bytes) == 0, "%s: other bits on 2 threads", optimizer_names[o]);
        for (int k = 0; k < o; k++) CHECK(memcmp(after[o], after[k], bytes) != 0, "%s is another", optimizer_names[o]);
        free(more);
    }
    for (int o = 0; o < OPTIMIZERS; o++) free(after[o]);
    world_close(&w);
}

static void test_nonfinite_gradient(void) {
    World w = world_of(shape, T, STEPS * ROWS, 1);
    w.param[w.model.tensors[4].offset] = NAN;
    for (int o = 0; o < OPTIMIZERS; o++) {
        Engine *engine = optimizing_engine(&w, (Optimizer)o, 1, DTYPE_FP32);
        make_step(&w, engine, (Optimizer)o, 1);
        for (int kind = 0; kind < 3; kind++) {
            float *got = state_of(&w, engine, kind == 0 ? STATE_PARAM : kind == 1 ? STATE_MOMENT1 : STATE_MOMENT2);
            size_t moved = 0;
            for (size_t i = 0; i < w.model.flat_count; i++)
                moved += kind ? got[i] != 0 : memcmp(&got[i], &w.param[i], sizeof *got) != 0;
            CHECK(moved == 0, "%s, array %d: %zu values moved", optimizer_names[o], kind, moved);
            free(got);
        }
        engine_destroy(engine);
    }
    world_close(&w);
}

// Compares AdamW on n parameters with one parameter at a time, in double.
static void check_adamw(size_t n, bool decay) {
    enum { PARAM, GRAD, MOMENT1, MOMENT2, ARRAYS };
    const AdamWStep step = adamw_step(1e-2, 0.9, 0.95, 1e-8, 0.1, 3, 0.5);
    float *x[ARRAYS], *was[ARRAYS], *rounded = guarded_array(n); // rounded: its first half holds n bf16 values
    for (int k = 0; k < ARRAYS; k++) {
        x[k] = guarded_array(n), was[k] = guarded_array(n);
        for (size_t i = 0; i < n; i++) x[k][i] = was[k][i] = k == MOMENT2 ? fabsf(random_float()) : random_float();
    }
    adamw(x[PARAM], (uint16_t *)rounded, x[GRAD], x[MOMENT1], x[MOMENT2], n, &step, decay);
    for (size_t i = 0; i < n; i++) {
        double g = 0.5 * was[GRAD][i], m = 0.9 * was[MOMENT1][i] + 0.1 * g, v = 0.95 * was[MOMENT2][i] + 0.05 * g * g;
        double p = was[PARAM][i],
               want = p - 1e-2 * (m / (1 - 0.729) / (sqrt(v / (1 - 0.857375)) + 1e-8) + decay * 0.1 * p);
        CHECK(fabs(x[PARAM][i] - want) < 1e-6 && fabs(x[MOMENT1][i] - m) < 1e-6 && fabs(x[MOMENT2][i] - v) < 1e-6,
              "%zu of %zu: %g, not %g", i, n, x[PARAM][i], want);
        CHECK(((uint16_t *)rounded)[i] == f32_to_bf16(x[PARAM][i]), "%zu of %zu: not rounded", i, n);
    }
    for (size_t i = (n + 1) / 2; i < n; i++) CHECK(!memcmp(&rounded[i], &guard_bits, 4), "%zu wrote beyond", n);
    for (int k = 0; k < ARRAYS; k++) {
        CHECK(guards_intact(x[k], n), "%zu wrote beyond", n);
        guarded_free(x[k]), guarded_free(was[k]);
    }
    guarded_free(rounded);
}

static void test_adamw_of_any_length(void) {
    const size_t lengths[] = {1, 15, 63, 64, 65, 130, 9000, 20001};
    for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++) check_adamw(lengths[i], i % 2);
}

// Masters are fp32: after three steps they differ from an fp32 engine's weights only by the gradients' rounding.
static void test_bf16(void) {
    if (!matmul_kernel(DTYPE_BF16)) SKIP("this machine has no instructions for bf16");
    World w = world_of(shape, T, STEPS * ROWS, 1);
    for (int o = 0; o < OPTIMIZERS; o++) {
        float *want = train(&w, (Optimizer)o, 1, DTYPE_FP32), *got = train(&w, (Optimizer)o, 1, DTYPE_BF16);
        double off = 0, moved = 0;
        for (size_t i = 0; i < w.model.flat_count; i++) {
            off += pow((double)got[i] - want[i], 2);
            moved += pow((double)want[i] - w.param[i], 2);
        }
        CHECK(moved > 0 && off > 0 && sqrt(off / moved) < 0.15, "%s: %.3f of the way", optimizer_names[o],
              sqrt(off / moved));
        free(want), free(got);
    }
    world_close(&w);
}

int main(void) {
    RUN(test_threads, test_nonfinite_gradient, test_adamw_of_any_length, test_bf16);
    return test_summary();
}
