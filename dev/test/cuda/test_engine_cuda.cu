// Compares the CUDA engine with the CPU engine on the same weights and tokens, up to rounding. Against a 16-bit build
// the CPU computes in fp32, with weights rounded to 16 bits. Arguments: engine_test.cuh.
#include "engine_test.cuh"

// In 16 bits GRADIENT and NORM are at most the sum of two errors: rounding (fp16: 3e-3 and 6e-3; bf16: eight times as
// much), and GELU's slopes as codes (up to 6.4e-3 and 7e-3 in the CPU engine on these cases, 100 seeds). In bf16 a
// gradient of one row erred by 2.2e-2. 1 - cosine is half the square of the gradient's error.
static const double LOSS = by_type(1e-5, 7e-4, 5e-3), GRADIENT = by_type(1e-4, 8e-3, 3e-2);
static const double NORM = by_type(1e-4, 1.3e-2, 4e-2), COSINE = by_type(0.999999, 0.99996, 0.999);
static const double TRAINED = by_type(1e-4, 3e-3, 2e-2), LOGIT = by_type(1e-4, 4e-3, 3e-2);

// With fp8, bf16's rounding moves a few percent of the factors to the next e4m3 number, 6 to 12% away, so that factors
// err by about 2%. A wrong exponent changes a factor by at least 50%. 1 - cosine is half the square of the error.
static const double FP8_GRADIENT = 0.16, FP8_NORM = 0.08, FP8_COSINE = 0.987;

static const double OWN_NORM = 1e-3; // in a step of one row: |g_b|^2 against |g|^2, whose roundings are the same

static double worst_seen[4]; // this test's largest gradient error, norm error, 1 - cosine, error of a row's own norm

static void check_gradients(const World *w, const Outcome *got, const Outcome *want) {
    for (int k = 0; k < w->model.tensor_count; k++) {
        const Tensor *t = &w->model.tensors[k];
        const float *a = got->grad + t->offset, *b = want->grad + t->offset;
        const double error = relative_error(a, b, t->count), cosine = cosine_of(a, b, t->count);
        CHECK(error <= (fp8 ? FP8_GRADIENT : GRADIENT), "%s, %s: relative error %.2e", w->c->name, t->name, error);
        CHECK(cosine >= (fp8 ? FP8_COSINE : COSINE), "%s, %s: cosine %.7f", w->c->name, t->name, cosine);
        worst_seen[0] = fmax(worst_seen[0], error);
        worst_seen[2] = fmax(worst_seen[2], 1 - cosine);
        size_t end = k + 1 < w->model.tensor_count ? w->model.tensors[k + 1].offset : w->model.flat_count;
        for (size_t i = t->offset + t->count; i < end; i++)
            CHECK(got->grad[i] == 0, "%s: gradient %g in the padding after %s", w->c->name, got->grad[i], t->name);
    }
}

static void check_norms(const World *w, const double *got, const double *want, const char *what) {
    for (int k = 0; k < w->model.tensor_count; k++) {
        double error = got[k] == want[k] ? 0 : fabs(got[k] - want[k]) / want[k];
        CHECK(error <= (fp8 ? FP8_NORM : NORM), "%s, %s of %s: %.9g, want %.9g", w->c->name, what,
              w->model.tensors[k].name, got[k], want[k]);
        worst_seen[1] = fmax(worst_seen[1], error);
    }
}

// Compares each RowResult with the CPU's. Compares sums over the rows with the step's results.
static void check_rows(const World *w, const Outcome *got, const Outcome *want) {
    double sq = 0, nll = 0, all = 0;
    for (int b = 0; b < rows_of(w->c); b++) {
        CHECK_CLOSE(got->row[b].sq, want->row[b].sq, NORM, 0);
        CHECK_CLOSE(got->row[b].nll, want->row[b].nll, LOSS, 0);
        sq += got->row[b].sq, nll += got->row[b].nll;
    }
    for (int k = 0; k < w->model.tensor_count; k++)
        if (w->model.tensors[k].group == GROUP_LN) all += got->example_sq[k];
    CHECK_CLOSE(sq, all, 1e-6, 0); // sq: squares in fp64; all: in fp32
    CHECK_CLOSE(nll, got->nll, 1e-12, 0);
    double trace = 0; // equals sq if every source has at most one row
    for (int s = 0; s < SOURCES; s++) trace += got->source_gram[s][s];
    if (rows_of(w->c) <= SOURCES) CHECK_CLOSE(trace, sq, 1e-5, 0);
    for (int s = 0; s < SOURCES; s++)
        for (int t = 0; t < SOURCES; t++) {
            double a = got->source_gram[s][t], b = want->source_gram[s][t];
            double unit = sqrt(want->source_gram[s][s] * want->source_gram[t][t]);
            CHECK(fabs(a - b) <= NORM * unit, "%s, sources %d, %d: %.9g, want %.9g of %g", w->c->name, s, t, a, b,
                  unit);
        }
}

// Checks that an engine without sources has the same bits, and that a second step has the same sums by source.
static void check_sources(const World *w, Engine *a, Engine *without, const Outcome *got, GnsMode mode) {
    Outcome again = measure_batch(&gpu, a, w, mode);
    Outcome off = measure_batch(&gpu, without, w, mode);
    const size_t rows = rows_of(w->c) * sizeof(RowResult);
    CHECK(memcmp(again.source_gram, got->source_gram, sizeof again.source_gram) == 0, "%s: sums differ", w->c->name);
    CHECK(memcmp(off.grad, got->grad, w->model.flat_count * sizeof(float)) == 0, "%s: another gradient", w->c->name);
    CHECK(memcmp(off.row, got->row, rows) == 0 && off.loss == got->loss, "%s: other rows", w->c->name);
    CHECK(off.source_gram[0][0] == 0, "%s: sums of no source", w->c->name);
}

// ---- Against the CPU ------------------------------------------------------------------------------------------------

static void compare_batch(const World *w, Engine *a, Engine *b, Engine *without) {
    Outcome got = measure_batch(&gpu, a, w, GNS_EXACT);
    Outcome want = measure_batch(&cpu, b, w, GNS_EXACT);
    CHECK_CLOSE(got.loss, want.loss, LOSS, 0);
    CHECK_CLOSE(got.nll, want.nll, LOSS, 0);
    check_gradients(w, &got, &want);
    check_norms(w, got.grad_sq, want.grad_sq, "|g|^2");
    check_norms(w, got.example_sq, want.example_sq, "sum |g_b|^2");
    check_rows(w, &got, &want);
    check_sources(w, a, without, &got, GNS_EXACT);
    // Without exact norms other kernels compute the same gradient.
    got = measure_batch(&gpu, a, w, GNS_LN);
    want = measure_batch(&cpu, b, w, GNS_LN);
    check_gradients(w, &got, &want);
    check_rows(w, &got, &want);
    check_sources(w, a, without, &got, GNS_LN);
    for (int k = 0; k < w->model.tensor_count; k++) {
        const char *name = w->model.tensors[k].name;
        if (w->model.tensors[k].group != GROUP_LN)
            CHECK(isnan(got.example_sq[k]), "%s: %s was not measured", w->c->name, name);
        else CHECK_CLOSE(got.example_sq[k], want.example_sq[k], NORM, 0);
    }
}

static void compare_rows(const World *w, Engine *a, Engine *b) {
    for (int row = 0; row < w->c->batch; row++) {
        const uint16_t *tokens = w->tokens + (size_t)row * (size_t)(w->c->seq_len + 1);
        Outcome got = measure(&gpu, a, w, tokens, 1, 1, GNS_EXACT);
        Outcome want = measure(&cpu, b, w, tokens, 1, 1, GNS_EXACT);
        CHECK_CLOSE(got.loss, want.loss, LOSS, 0);
        check_norms(w, got.example_sq, want.example_sq, "|g_b|^2");
        for (int k = 0; k < w->model.tensor_count; k++) {
            double error = got.grad_sq[k] == 0 ? got.example_sq[k] : fabs(got.example_sq[k] / got.grad_sq[k] - 1);
            CHECK(error <= OWN_NORM, "%s, row %d, %s: |g_b|^2 is off |g|^2 by %.2e", w->c->name, row,
                  w->model.tensors[k].name, error);
            worst_seen[3] = fmax(worst_seen[3], error);
        }
    }
}

static void compare_inference(const World *w, Engine *a, Engine *b) {
    size_t V = (size_t)w->c->config.vocab, T = (size_t)w->c->seq_len, n = (size_t)w->c->micro_batch;
    Array<float> got(size_max(V, n * T), NAN), want = got;
    for (size_t length = T; length > 0; length = small ? length / 8 : length * 2 / 3) { // rows of T and fewer tokens
        for (size_t i = 0; i < n * length; i++) got[i] = want[i] = NAN;
        CALL_OK(gpu.eval(a, w->tokens, (int)n, (int)length, got, &e));
        CALL_OK(cpu.eval(b, w->tokens, (int)n, (int)length, want, &e));
        for (size_t i = 0; i < n * length; i++) CHECK_CLOSE(got[i], want[i], 10 * LOSS, 1.0);
        if (length < T || masked) continue;
        double sum = 0; // sum of validation losses, which are rounded as training losses are
        for (size_t i = 0; i < n * T; i++) sum += got[i] / (double)T;
        Outcome trained = measure(&gpu, a, w, w->tokens, (int)n, (int)n, GNS_OFF);
        CHECK_CLOSE(sum, trained.nll, 2e-6, 0);
    }
    for (int length = 1; length <= (int)T; length += (int)T / 3 + 1) {
        CALL_OK(gpu.logits(a, w->tokens, length, got, &e));
        CALL_OK(cpu.logits(b, w->tokens, length, want, &e));
        const double error = relative_error(got, want, V);
        CHECK(error <= LOGIT, "%s: logits of %d tokens off by %.2e", w->c->name, length, error);
    }
}

static void test_against_cpu(void) {
    memset(worst_seen, 0, sizeof worst_seen);
    for (int i = 0; i < case_count; i++) {
        World w(&cases[i], 1);
        printf("  %s\n", w.c->name);
        Engine *a = engine_of(&gpu, &w), *b = engine_of(&cpu, &w);
        sources = 0;
        Engine *without = engine_of(&gpu, &w);
        sources = SOURCES;
        if (a && b && without) {
            compare_batch(&w, a, b, without);
            if (!small) compare_rows(&w, a, b);
            compare_inference(&w, a, b);
        }
    }
    printf("  largest relative error of a gradient %.1e, of a norm %.1e, of a row's own norm %.1e; 1 - cosine %.1e\n",
           worst_seen[0], worst_seen[1], worst_seen[3], worst_seen[2]);
}

// Compares amax of a first step with the CPU's, then a second step, whose factors both engines round in the same way.
static void fp8_against_cpu(Dtype type) {
    int done = 0;
    memset(worst_seen, 0, sizeof worst_seen);
    for (int i = 0; i < 2 * case_count; i++) {
        masked = i % 2;
        if (!fp8_runs(type, &cases[i / 2])) continue;
        fp8 = type;
        World w(&cases[i / 2], 1);
        Engine *a = engine_of(&gpu, &w), *b = engine_of(&cpu, &w);
        exponents_begin(&w);
        Outcome got = measure_batch(&gpu, a, &w, GNS_OFF);
        Outcome want = measure_batch(&cpu, b, &w, GNS_OFF);
        for (size_t s = 0; s < exponents.size(); s++) CHECK_CLOSE(got.amax[s], want.amax[s], 5e-2, 0);
        exponents_next(want.amax);
        for (size_t s = 0; s < exponents.size(); s++) // any channels
            exponents[s] += s % FP8_ENTRIES < FP8_SITES ? 0 : (int8_t)(s * 37 % 64);
        got = measure_batch(&gpu, a, &w, GNS_EXACT);
        want = measure_batch(&cpu, b, &w, GNS_EXACT);
        for (size_t i = 0; i < exponents.size(); i++) { // flips of e4m3 move the largest of a group's few values more
            const int at = i % FP8_ENTRIES, site = at < FP8_SITES ? at : at < FP8_GELU_CHANNELS ? FP8_LN1 : FP8_GELU;
            CHECK_CLOSE(got.amax[i], want.amax[i], 0.15, at < FP8_SITES ? 0 : 0.1 * want.amax[i - at + site]);
        }
        CHECK_CLOSE(got.loss, want.loss, LOSS, 0);
        check_gradients(&w, &got, &want);
        check_norms(&w, got.grad_sq, want.grad_sq, "|g|^2");
        check_norms(&w, got.example_sq, want.example_sq, "sum |g_b|^2");
        done++;
    }
    masked = false, fp8 = DTYPE_FP32;
    if (!done) SKIP("only Hopper has fp8, and only in bf16");
    printf("  largest relative error of a gradient %.1e, of a norm %.1e; 1 - cosine %.1e\n", worst_seen[0],
           worst_seen[1], worst_seen[2]);
}
static void test_fp8_against_cpu(void) { fp8_against_cpu(DTYPE_FP8); }
static void test_fp8_dw_against_cpu(void) { fp8_against_cpu(DTYPE_FP8_DW); }

static void test_masks_against_cpu(void) {
    masked = true;
    test_against_cpu();
    masked = false;
}

static void train_against_cpu(Optimizer o, double tolerance) {
    for (int i = 0; i < case_count; i++) {
        double got[STEPS], want[STEPS];
        if (o != OPTIMIZER_ADAMW && i != 1 && i != 2 && i != 6) continue;
        optimizer = o;
        World w(&cases[i], steps);
        Engine *a = engine_of(&gpu, &w), *b = engine_of(&cpu, &w);
        if (a && b) {
            train(&gpu, a, &w, got);
            train(&cpu, b, &w, want);
            for (int s = 0; s < steps; s++)
                CHECK(fabs(got[s] - want[s]) <= tolerance * fabs(want[s]), "%s, %s, step %d: loss %.7f, want %.7f",
                      optimizer_names[o], w.c->name, s + 1, got[s], want[s]);
        }
    }
}
static void test_training_against_cpu(void) {
    train_against_cpu(OPTIMIZER_ADAMW, TRAINED);
    for (Optimizer o : {OPTIMIZER_LAMB, OPTIMIZER_MUON}) train_against_cpu(o, FP32 ? 1e-3 : 3e-2);
}

int main(int argc, char **argv) {
    engine_test_begin("test_engine_cuda", argc, argv);
    RUN(test_against_cpu, test_masks_against_cpu, test_fp8_against_cpu, test_fp8_dw_against_cpu);
    if (!small) RUN(test_training_against_cpu);
    return test_summary();
}
