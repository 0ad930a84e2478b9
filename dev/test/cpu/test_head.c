// The head of the CPU engine: one chunk or several give the same losses and gradients; engine_logits and losses agree;
// logits may be far from 0. Also tests the sum of squares of an array as long as wte.
#include "cpu/layers.h"
#include "world.h"

// A chunk holds the logits of 256 tokens, 65536 per token. One micro-step of 450 tokens needs two chunks; three
// micro-steps of 150 tokens need one chunk each.

enum { MANY_T = 150, MANY_ROWS = 3 };
static const ModelConfig many_words = {1, 1, 8, 65536, MANY_T};

static void test_several_chunks(void) {
    World w = world_of(many_words, MANY_T, MANY_ROWS, 2);
    Outcome o[2]; // [0]: one row at a time; [1]: all rows at once
    for (int i = 0; i < 2; i++) {
        int micro_batch = i ? MANY_ROWS : 1;
        Engine *engine = engine_of(&w, (EngineConfig){.micro_batch = micro_batch, .threads = 2});
        o[i] = measure(&w, engine, w.tokens, 0, MANY_ROWS, micro_batch, GNS_OFF);
        engine_destroy(engine);
    }
    CHECK_CLOSE(o[1].loss, o[0].loss, 1e-6, 1.0);
    for (int k = 0; k < w.model.tensor_count; k++) {
        const Tensor *t = &w.model.tensors[k];
        double apart = relative_error(o[1].grad + t->offset, o[0].grad + t->offset, t->count);
        CHECK(apart <= 1e-5, "%s: gradients %.2g apart", t->name, apart);
    }
    free(o[0].grad), free(o[1].grad);
    world_close(&w);
}

// Returns -log softmax(x)[target], in double.
static double loss_of(const float *x, int n, int target) {
    double top = x[0], sum = 0;
    for (int i = 1; i < n; i++) top = x[i] > top ? x[i] : top; // not fmax, at which GCC 12 for Arm fails
    for (int i = 0; i < n; i++) sum += exp(x[i] - top);
    return log(sum) + top - x[target];
}

// Returns the loss with label smoothing, in double: the mean of loss_of over the smoothed target.
static double smoothed_loss_of(const float *x, int n, int target, double smoothing) {
    double sum = 0;
    for (int i = 0; i < n; i++) sum += smoothing / n * loss_of(x, n, i);
    return sum + (1 - smoothing) * loss_of(x, n, target);
}

// After any number of tokens the logits of engine_logits give engine_eval's losses.
static void test_logits_after_a_prefix(void) {
    enum { T = 13, V = 61 };
    float loss[T], logits[V];
    World w = world_of((ModelConfig){2, 2, 32, V, T}, T, 1, 3);
    Engine *engine = engine_of(&w, (EngineConfig){.micro_batch = 1, .threads = 2});
    for (int i = 0; i < T; i++) loss[i] = NAN;
    CHECK_OK(engine_eval(engine, w.tokens, 1, T, loss, &e), &e);
    for (int n = 1; n <= T; n++) {
        for (int v = 0; v < V; v++) logits[v] = NAN;
        CHECK_OK(engine_logits(engine, w.tokens, n, logits, &e), &e);
        CHECK_CLOSE(loss_of(logits, V, w.tokens[n]), loss[n - 1], 1e-5, 1.0);
    }
    engine_destroy(engine);
    world_close(&w);
}

// Checks logits whose exp is infinite or 0 in fp32.
static void check_large_logits(float smoothing) {
    enum { N = 6, V = 61, STRIDE = 128 };
    float logits[N * STRIDE], before[N * STRIDE], nll[N], loss[N];
    uint16_t target[N];
    for (int i = 0; i < N; i++) {
        target[i] = (uint16_t)(7 * i);
        nll[i] = loss[i] = NAN;
        for (int v = 0; v < STRIDE; v++) {
            double level = i % 3 == 0 ? 300 : i % 3 == 1 ? -300 : v % 2 ? 300 : -300;
            if (i == 0 && v == V - 1) level += 120; // makes the largest logit the last one, after the last whole vector
            logits[i * STRIDE + v] = v < V ? (float)(level + 4 * rng_normal(4, 5, (uint64_t)(i * STRIDE + v))) : NAN;
        }
    }
    memcpy(before, logits, sizeof logits);
    cross_entropy(nll, smoothing > 0 ? loss : NULL, logits, target, N, V, STRIDE, smoothing, 0.5f, DTYPE_FP32);
    for (int i = 0; i < N; i++) {
        const float *x = before + i * STRIDE, *gradient = logits + i * STRIDE;
        CHECK_CLOSE(nll[i], loss_of(x, V, target[i]), 1e-6, 30.0);
        if (smoothing > 0) CHECK_CLOSE(loss[i], smoothed_loss_of(x, V, target[i], smoothing), 1e-6, 30.0);
        else CHECK(isnan(loss[i]), "a loss that nobody asked for");
        for (int v = 0; v < STRIDE; v++) {
            double target_share = smoothing / V + (v == target[i] ? 1 - smoothing : 0);
            CHECK_CLOSE(gradient[v], v < V ? 0.5 * (exp(-loss_of(x, V, v)) - target_share) : 0, 1e-5, 0.1);
        }
    }
}

static void test_large_logits(void) {
    check_large_logits(0);
    check_large_logits(0.3f);
}

// Sums arrays longer than BLOCK_CHUNKS chunks of layers.c.
static void test_sums_of_large_arrays(void) {
    const size_t n = ((size_t)2 << 21) + 5000;
    float *x = malloc(n * sizeof *x), *y = malloc(n * sizeof *y);
    double want = 0;
    size_t wrong = 0;
    for (size_t i = 0; i < n; i++) {
        x[i] = (float)(i % 1000) / 512; // 1 + x is exact
        y[i] = 1;
        want += (double)x[i] * x[i];
    }
    CHECK_CLOSE(sum_squares(x, n), want, 1e-5, 0);
    CHECK_CLOSE(add_and_sum_squares(y, x, n), want, 1e-5, 0);
    for (size_t i = 0; i < n; i++) wrong += y[i] != 1 + x[i];
    CHECK(wrong == 0, "%zu of %zu sums are wrong", wrong, n);
    free(x);
    free(y);
}

int main(void) {
    RUN(test_several_chunks, test_logits_after_a_prefix, test_large_logits, test_sums_of_large_arrays);
    return test_summary();
}
