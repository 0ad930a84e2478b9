// Compares the CPU engine in bf16 with itself in fp32: loss, gradients, per-example norms. bf16 holds the weights exactly.
// test_masks compares bits between threads and modes of recomputation.
#include "base/float16.h"
#include "cpu/matmul_kernel.h"
#include "world.h"

enum { ROWS = 6, T = 24 };
static const ModelConfig shape = {.layers = 3, .heads = 2, .channels = 48, .vocab = 70, .context = T};

static double dropout; // of typed_engine; above 0 it also masks documents

// Makes weights nearer to GPT-2's than small_params does, like the CUDA engine's tests: rounding then matters less.
static World rounded_world(void) {
    World w = world_of(shape, T, ROWS, 1);
    for (int k = 0; k < w.model.tensor_count; k++) {
        const Tensor *t = &w.model.tensors[k];
        float mean = t->init == INIT_ONE ? 1.0f : 0.0f, share = t->group == GROUP_EMBEDDING ? 0.2f : 0.5f;
        float *p = w.param + t->offset;
        for (size_t i = 0; i < t->count; i++) p[i] = bf16_to_f32(f32_to_bf16(mean + share * (p[i] - mean)));
    }
    return w;
}

static Engine *typed_engine(const World *w, Dtype dtype, int threads, float smoothing) {
    return engine_of(w, (EngineConfig){.micro_batch = ROWS,
                                       .threads = threads,
                                       .gns = GNS_EXACT,
                                       .dtype = dtype,
                                       .document_mask = dropout > 0,
                                       .separator = 3,
                                       .dropout = dropout_of(dropout, 11),
                                       .label_smoothing = smoothing});
}

// Tolerances equal the CUDA engine's for bf16 (dev/test/cuda/test_engine_cuda.cu).
static void check_step(float smoothing) {
    World w = rounded_world();
    Engine *exact = typed_engine(&w, DTYPE_FP32, 1, smoothing), *rounded = typed_engine(&w, DTYPE_BF16, 2, smoothing);
    Outcome want = measure(&w, exact, w.tokens, 100, ROWS, ROWS, GNS_EXACT),
            got = measure(&w, rounded, w.tokens, 100, ROWS, 4, GNS_EXACT);
    CHECK(fabs(got.loss - want.loss) < 2e-3 * ROWS, "loss %.6f, want %.6f", got.loss, want.loss);
    for (int k = 0; k < w.model.tensor_count; k++) {
        const Tensor *t = &w.model.tensors[k];
        double error = difference(got.grad + t->offset, want.grad + t->offset, t->count);
        CHECK(error < 0.02, "gradient of %s: %.4f", t->name, error);
        CHECK(fabs(got.grad_sq[k] / want.grad_sq[k] - 1) < 0.02, "its norm");
        CHECK(fabs(got.example_sq[k] / want.example_sq[k] - 1) < 0.02, "examples' norms of %s: %g, want %g", t->name,
              got.example_sq[k], want.example_sq[k]);
    }
    CHECK(difference(got.grad, want.grad, 100) > 0, "nothing was rounded");
    free(want.grad), free(got.grad);
    engine_destroy(exact), engine_destroy(rounded);
    world_close(&w);
}

static void test_step(void) { check_step(0); }
static void test_step_of_smoothed_loss(void) { check_step(0.2f); }

// Master weights are fp32: store returns the loaded bits; the kernels read rounded ones.
static void test_weights(void) {
    Error e;
    uint64_t hash[2];
    World w = rounded_world();
    for (size_t i = 0; i < w.model.flat_count; i++) w.param[i] *= 1 + 1e-5f;
    Engine *engine = typed_engine(&w, DTYPE_BF16, 1, 0);
    float *back = malloc(w.model.flat_count * sizeof(float));
    CHECK(engine_store(engine, STATE_PARAM, all_of(&w), back, &e) == 0, "%s", e.what);
    CHECK(!memcmp(back, w.param, w.model.flat_count * sizeof(float)), "other weights came back");
    CHECK(engine_hash(engine, all_of(&w), &hash[0], &e) == 0, "%s", e.what);
    w.param[7] *= 1 + 1e-6f; // less than the precision of bf16
    CHECK(engine_load(engine, STATE_PARAM, all_of(&w), w.param, &e) == 0, "%s", e.what);
    CHECK(engine_hash(engine, all_of(&w), &hash[1], &e) == 0 && hash[0] != hash[1], "the hash leaves the masters out");
    free(back);
    engine_destroy(engine);
    world_close(&w);
}

int main(void) {
    if (!matmul_kernel(DTYPE_BF16)) {
        printf("SKIP test_bf16: this machine has no instructions for bf16\n");
        return ERR_SKIPPED;
    }
    RUN(test_step, test_step_of_smoothed_loss, test_weights);
    dropout = 0.2;
    RUN(test_step);
    return test_summary();
}
