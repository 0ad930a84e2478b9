// The head of the CPU engine: the same losses and gradients in one chunk as in several, the same distribution from
// engine_logits as from the losses, logits far from 0; and sums of squares of arrays as long as wte.
#include "cpu/layers.h"
#include "../small_model.h"
#include "../test.h"

typedef struct {
    Model model;
    Engine *engine;
    float *param, *grad;
} Setup;

static Range all_of(const Model *model) { return (Range){0, model->flat_count}; }

static void setup_create(Setup *s, ModelConfig shape, int seq_len, int micro_batch) {
    Error e = {0};
    *s = (Setup){0};
    CHECK_OK(model_create(&s->model, &shape, &e), &e);
    size_t bytes = s->model.flat_count * sizeof(float);
    CHECK_OK(memory_alloc((void **)&s->param, bytes, "parameters", &e), &e);
    CHECK_OK(memory_alloc((void **)&s->grad, bytes, "gradients", &e), &e);
    EngineConfig config = {.model = &s->model, .micro_batch = micro_batch, .seq_len = seq_len, .threads = 2};
    CHECK_OK(engine_create(&cpu_engine, &s->engine, &config, &e), &e);
    small_params(&s->model, 1, s->param);
    CHECK_OK(engine_load(s->engine, STATE_PARAM, all_of(&s->model), s->param, &e), &e);
}

static void setup_destroy(Setup *s) {
    engine_destroy(s->engine);
    model_destroy(&s->model);
    memory_free(s->param);
    memory_free(s->grad);
}

// ---------------------------------------------------------------------------------------------------------------------
// A chunk of 65536 logits has 256 rows. One micro-step of 450 rows takes two chunks, three micro-steps of 150 one each.

enum { MANY_T = 150, MANY_ROWS = 3 };
static const ModelConfig many_words = {1, 1, 8, 65536, MANY_T};

static double many_run(Setup *s, int micro_batch, const uint16_t *tokens) {
    Error e = {0};
    double grad_sq[TENSOR_KINDS], example_sq[TENSOR_KINDS];
    StepResult result = {.loss_sum = NAN, .grad_sq = grad_sq, .example_sq = example_sq};
    setup_create(s, many_words, MANY_T, micro_batch);
    for (size_t i = 0; i < s->model.flat_count; i++) s->grad[i] = NAN;
    CHECK_OK(small_batch(s->engine, tokens, MANY_ROWS, MANY_T, micro_batch, GNS_OFF, &e), &e);
    CHECK_OK(engine_norms(s->engine, all_of(&s->model), &e), &e);
    CHECK_OK(engine_result(s->engine, &result, &e), &e);
    CHECK_OK(engine_store(s->engine, STATE_GRAD, all_of(&s->model), s->grad, &e), &e);
    return result.loss_sum;
}

static void test_several_chunks(void) {
    Setup one, several; // of an engine that takes one row at a time, and all at once
    uint16_t tokens[MANY_ROWS * (MANY_T + 1)];
    small_tokens(many_words.vocab, 2, sizeof tokens / sizeof *tokens, tokens);
    double want = many_run(&one, 1, tokens), got = many_run(&several, MANY_ROWS, tokens);
    CHECK_CLOSE(got, want, 1e-6, 1.0);
    for (int k = 0; k < one.model.tensor_count; k++) {
        const Tensor *t = &one.model.tensors[k];
        double difference = 0, square = 0;
        for (size_t i = t->offset; i < t->offset + t->count; i++) {
            double d = (double)several.grad[i] - one.grad[i];
            difference += d * d;
            square += (double)one.grad[i] * one.grad[i];
        }
        CHECK(sqrt(difference) <= 1e-5 * sqrt(square), "%s: gradients %.2g apart", t->name, sqrt(difference / square));
    }
    setup_destroy(&one);
    setup_destroy(&several);
}

// ---------------------------------------------------------------------------------------------------------------------

// -log softmax(x)[target], in double.
static double loss_of(const float *x, int n, int target) {
    double top = x[0], sum = 0;
    for (int i = 1; i < n; i++) top = x[i] > top ? x[i] : top; // fmax: an internal error of GCC 12 for Arm
    for (int i = 0; i < n; i++) sum += exp(x[i] - top);
    return log(sum) + top - x[target];
}

// With label smoothing, in double: the mean over a smoothed target of -log softmax(x).
static double smoothed_loss_of(const float *x, int n, int target, double smoothing) {
    double sum = 0;
    for (int i = 0; i < n; i++) sum += smoothing / n * loss_of(x, n, i);
    return sum + (1 - smoothing) * loss_of(x, n, target);
}

// Samples are drawn from the distribution that the loss is taken of, after any number of tokens.
static void test_logits_after_a_prefix(void) {
    enum { T = 13, V = 61 };
    Setup s;
    Error e = {0};
    uint16_t tokens[T + 1];
    float loss[T], logits[V];
    setup_create(&s, (ModelConfig){2, 2, 32, V, T}, T, 1);
    small_tokens(V, 3, T + 1, tokens);
    for (int i = 0; i < T; i++) loss[i] = NAN;
    CHECK_OK(engine_eval(s.engine, tokens, 1, T, loss, &e), &e);
    for (int n = 1; n <= T; n++) {
        for (int v = 0; v < V; v++) logits[v] = NAN;
        CHECK_OK(engine_logits(s.engine, tokens, n, logits, &e), &e);
        CHECK_CLOSE(loss_of(logits, V, tokens[n]), loss[n - 1], 1e-5, 1.0);
    }
    setup_destroy(&s);
}

// exp of such logits is infinite, or 0, in fp32.
static void check_large_logits(float smoothing) {
    enum { N = 6, V = 61, STRIDE = 128 };
    float logits[N * STRIDE], before[N * STRIDE], nll[N], loss[N];
    uint16_t target[N];
    for (int i = 0; i < N; i++) {
        target[i] = (uint16_t)(7 * i);
        nll[i] = loss[i] = NAN;
        for (int v = 0; v < STRIDE; v++) {
            double level = i % 3 == 0 ? 300 : i % 3 == 1 ? -300 : v % 2 ? 300 : -300;
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
            double want = v < V ? 0.5 * (exp(-loss_of(x, V, v)) - target_share) : 0;
            CHECK_CLOSE(gradient[v], want, 1e-5, 0.1);
        }
    }
}

static void test_large_logits(void) {
    check_large_logits(0);
    check_large_logits(0.3f);
}

// The largest logit is the last, <|endoftext|>'s, beyond the last whole vector.
static void test_large_last_logit(void) {
    enum { V = 49 };
    float logits[V] = {0}, loss;
    const uint16_t last = V - 1;
    logits[V - 1] = 120; // exp: infinite in fp32
    cross_entropy(&loss, NULL, logits, &last, 1, V, V, 0, 1, DTYPE_FP32);
    CHECK(fabsf(loss) < 1e-6f, "%g", loss);
}

// Of more elements than one block of sums.
static void test_sums_of_large_arrays(void) {
    const size_t n = ((size_t)2 << 21) + 5000;
    float *x = malloc(n * sizeof *x), *y = malloc(n * sizeof *y);
    double want = 0;
    size_t wrong = 0;
    for (size_t i = 0; i < n; i++) {
        x[i] = (float)(i % 1000) / 512; // so that 1 + x is exact
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
    RUN(test_several_chunks);
    RUN(test_logits_after_a_prefix);
    RUN(test_large_logits);
    RUN(test_large_last_logit);
    RUN(test_sums_of_large_arrays);
    return test_summary();
}
