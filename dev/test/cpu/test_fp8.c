// Compares the CPU engine in fp8 and fp8-dw with itself in fp32. test_math compares the rounding with e4m3's
// definition; dev/oracle checks losses and gradients.
#include "world.h"

enum { ROWS = 6, T = 24, FIRST = 100, SITES = 3 * FP8_SITES };
static const TensorKind matrices[] = {QKV_W, PROJ_W, FC_W, FCPROJ_W};
static const ModelConfig shape = {.layers = 3, .heads = 2, .channels = 48, .vocab = 70, .context = T};

static Engine *fp8_engine(const World *w, Dtype dtype, Recompute recompute, double dropout, int threads) {
    return engine_of(w, (EngineConfig){.micro_batch = ROWS,
                                       .threads = threads,
                                       .gns = GNS_EXACT,
                                       .dtype = dtype,
                                       .recompute = recompute,
                                       .document_mask = dropout > 0,
                                       .separator = 3,
                                       .dropout = dropout_of(dropout, 11)});
}

static Outcome measure_fp8(const World *w, Engine *engine, int micro_batch, const int8_t *k, float *amax) {
    Error e = {0};
    double unused[2][64];
    StepResult r = {.grad_sq = unused[0], .example_sq = unused[1], .amax = amax};
    if (k) engine_exponents(engine, k);
    Outcome o = measure(w, engine, w->tokens, FIRST, ROWS, micro_batch, GNS_EXACT);
    CHECK_OK(engine_result(engine, &r, &e), &e);
    return o;
}

// Sets k to the exponents that follow from an unrounded step, and amax to the step's largest values.
static void first_exponents(const World *w, Engine *engine, int8_t *k, float *amax) {
    free(measure_fp8(w, engine, ROWS, NULL, amax).grad);
    for (int i = 0; i < SITES; i++) k[i] = (int8_t)fp8_next(FP8_UNSET, amax[i]);
}

static bool same_outcome(const World *w, const Outcome *a, const Outcome *b) {
    return a->loss == b->loss && !memcmp(a->grad, b->grad, range_float_bytes(all_of(w)));
}

static double cosine(const float *a, const float *b, size_t n) {
    double ab = 0, aa = 0, bb = 0;
    for (size_t i = 0; i < n; i++) ab += (double)a[i] * b[i], aa += (double)a[i] * a[i], bb += (double)b[i] * b[i];
    return ab / sqrt(aa * bb);
}

// Without exponents a step has fp32's bits. With exponents its gradients are close to fp32's, matrix by matrix;
// evaluations and logits keep fp32's bits.
static void check_step(Dtype type) {
    Error e;
    int8_t k[SITES];
    float amax[SITES], eval[2][ROWS * T], logits[2][70];
    World w = world_of(shape, T, ROWS, 1);
    Engine *exact = fp8_engine(&w, DTYPE_FP32, RECOMPUTE_NONE, 0, 1), *fp8 = fp8_engine(&w, type, 0, 0, 2);
    Outcome want = measure(&w, exact, w.tokens, FIRST, ROWS, ROWS, GNS_EXACT),
            first = measure_fp8(&w, fp8, ROWS, NULL, amax);
    CHECK(same_outcome(&w, &want, &first), "the first step rounds");
    first_exponents(&w, fp8, k, amax);
    Outcome got = measure_fp8(&w, fp8, ROWS, k, amax);
    CHECK(fabs(got.loss - want.loss) < 0.1 * ROWS, "loss %.6f, want %.6f", got.loss, want.loss);
    for (int i = 0; i < w.model.tensor_count; i++) {
        const Tensor *t = &w.model.tensors[i];
        const double same = cosine(got.grad + t->offset, want.grad + t->offset, t->count);
        CHECK(same > (t->dimensions == 2 ? 0.99 : 0.98) && same < 1 - 1e-6, "gradient of %s: cosine %.6f", t->name,
              same);
        CHECK(fabs(got.example_sq[i] / want.example_sq[i] - 1) < 0.2, "examples' norms of %s", t->name);
    }
    for (int i = 0; i < 2; i++) {
        CHECK_OK(engine_eval(i ? fp8 : exact, w.tokens, ROWS, T, eval[i], &e), &e);
        CHECK_OK(engine_logits(i ? fp8 : exact, w.tokens, T, logits[i], &e), &e);
    }
    CHECK(!memcmp(eval[0], eval[1], sizeof *eval) && !memcmp(logits[0], logits[1], sizeof *logits), "eval rounds");
    free(want.grad), free(first.grad), free(got.grad);
    engine_destroy(exact), engine_destroy(fp8);
    world_close(&w);
}

static void test_step(void) { check_step(DTYPE_FP8), check_step(DTYPE_FP8_DW); }

// amax is the largest |x| of a site's unrounded factors over the step's micro-steps.
static void test_amax(void) {
    int8_t k[SITES];
    float amax[SITES], again[SITES], parts[2][SITES];
    World w = world_of(shape, T, ROWS, 1);
    Engine *engine = fp8_engine(&w, DTYPE_FP8, RECOMPUTE_NONE, 0, 1);
    first_exponents(&w, engine, k, amax);
    for (int i = 0; i < SITES; i++) CHECK(amax[i] > 0, "site %d: %g", i, (double)amax[i]);
    for (int i = 0; i < 3 * 4; i++) {
        const Tensor *t = model_tensor(&w.model, matrices[i % 4], i / 4);
        float most = 0;
        for (size_t j = 0; j < t->count; j++) most = fmaxf(most, fabsf(w.param[t->offset + j]));
        CHECK(amax[i / 4 * FP8_SITES + FP8_QKV_WEIGHT + i % 4] == most, "%s: %g", t->name, (double)most);
    }
    for (int half = 0; half < 2; half++) {
        World part = w;
        part.tokens += half * 3 * (T + 1);
        Error e;
        double unused[2][64];
        StepResult r = {.grad_sq = unused[0], .example_sq = unused[1], .amax = parts[half]};
        free(measure(&part, engine, part.tokens, FIRST, 3, 3, GNS_LN).grad);
        CHECK_OK(engine_result(engine, &r, &e), &e);
    }
    free(measure_fp8(&w, engine, 3, NULL, again).grad);
    CHECK(memcmp(parts[0], parts[1], sizeof *parts), "the step before counts");
    for (int i = 0; i < SITES; i++)
        CHECK(again[i] == fmaxf(parts[0][i], parts[1][i]), "site %d: %g of two micro-steps", i, (double)again[i]);
    engine_destroy(engine);
    world_close(&w);
}

// Each site's exponent matters: another one changes the gradients. If it is unset, no factor of its product is rounded.
static void test_each_site(void) {
    int8_t k[SITES], one[SITES];
    float amax[SITES];
    World w = world_of(shape, T, ROWS, 1);
    Engine *engine = fp8_engine(&w, DTYPE_FP8, RECOMPUTE_NONE, 0, 1);
    Outcome unrounded = measure_fp8(&w, engine, ROWS, NULL, amax);
    first_exponents(&w, engine, k, amax);
    Outcome all = measure_fp8(&w, engine, ROWS, k, amax);
    for (int s = 0; s < FP8_SITES; s++) {
        memcpy(one, k, sizeof k);
        one[FP8_SITES + s] = (int8_t)(k[FP8_SITES + s] - 10); // most values become subnormal or 0
        Outcome coarse = measure_fp8(&w, engine, ROWS, one, amax);
        CHECK(!same_outcome(&w, &coarse, &all), "the exponent of %s does nothing", fp8_site_names[s]);
        memset(one, FP8_UNSET, sizeof one);
        one[FP8_SITES + s] = k[FP8_SITES + s];
        Outcome alone = measure_fp8(&w, engine, ROWS, one, amax);
        CHECK(same_outcome(&w, &alone, &unrounded), "%s rounds alone", fp8_site_names[s]);
        free(coarse.grad), free(alone.grad);
    }
    free(all.grad), free(unrounded.grad);
    engine_destroy(engine);
    world_close(&w);
}

// fp8-dw changes the gradients of the blocks' matrices alone. An unset exponent of x, dy or W leaves both factors of dW
// alone.
static void test_dweight(void) {
    int8_t k[SITES], one[SITES];
    float amax[SITES];
    World w = world_of(shape, T, ROWS, 1);
    Engine *plain = fp8_engine(&w, DTYPE_FP8, RECOMPUTE_NONE, 0, 1), *dw = fp8_engine(&w, DTYPE_FP8_DW, 0, 0, 1);
    first_exponents(&w, plain, k, amax);
    for (int s = -1; s < FP8_SITES; s++) { // s is unset in block 1
        const int x = s - FP8_LN1, dy = FP8_DQKV - s, weight = s - FP8_QKV_WEIGHT;
        const int unset = s < 0 ? -1 : s < FP8_DFCPROJ ? x : s < FP8_QKV_WEIGHT ? dy : weight;
        memcpy(one, k, sizeof k);
        if (s >= 0) one[FP8_SITES + s] = FP8_UNSET;
        Outcome a = measure_fp8(&w, plain, ROWS, one, amax), b = measure_fp8(&w, dw, ROWS, one, amax);
        for (int i = 0; i < w.model.tensor_count; i++) {
            const Tensor *t = &w.model.tensors[i];
            const bool alone = t->layer == 1 && unset >= 0 && t->kind == matrices[unset];
            const bool rounds = t->layer >= 0 && t->dimensions == 2 && !alone;
            const bool same = !memcmp(a.grad + t->offset, b.grad + t->offset, sizeof(float) * t->count);
            CHECK(same != rounds && (a.example_sq[i] == b.example_sq[i]) == same, "%s unset: gradient of %s",
                  s < 0 ? "nothing" : fp8_site_names[s], t->name);
        }
        CHECK(a.loss == b.loss, "loss %.9g and %.9g", a.loss, b.loss);
        free(a.grad), free(b.grad);
    }
    engine_destroy(plain), engine_destroy(dw);
    world_close(&w);
}

// The same bits on any number of threads and with any recomputation.
static void check_same_bits(Dtype type) {
    static const Recompute recompute[] = {RECOMPUTE_NONE, RECOMPUTE_NONE, RECOMPUTE_GELU, RECOMPUTE_BLOCK};
    World w = world_of(shape, T, ROWS, 1);
    Outcome first = {0};
    int8_t k[4][SITES];
    float amax[4][SITES];
    for (int i = 0; i < 4; i++) {
        Engine *engine = fp8_engine(&w, type, recompute[i], 0.25, i == 1 ? 2 : 1);
        first_exponents(&w, engine, k[i], amax[i]);
        Outcome o = measure_fp8(&w, engine, 4, k[i], amax[i]);
        if (i == 0) first = o;
        const bool same = !memcmp(k[i], k[0], sizeof *k) && !memcmp(amax[i], amax[0], sizeof *amax);
        CHECK(same && same_outcome(&w, &o, &first), "engine %d", i);
        if (i > 0) free(o.grad);
        engine_destroy(engine);
    }
    free(first.grad);
    world_close(&w);
}

static void test_same_bits(void) { check_same_bits(DTYPE_FP8), check_same_bits(DTYPE_FP8_DW); }

// A factor that is not finite shows in amax and, if exponents are set, in the gradient's norm.
static void test_not_finite(void) {
    const float bad[] = {INFINITY, NAN};
    Error e;
    int8_t k[SITES];
    float amax[SITES];
    World w = world_of(shape, T, ROWS, 1);
    Engine *engine = fp8_engine(&w, DTYPE_FP8, RECOMPUTE_NONE, 0, 1);
    first_exponents(&w, engine, k, amax);
    for (int i = 0; i < 4; i++) {
        if (i == 2) memset(k, FP8_UNSET, sizeof k);
        w.param[model_tensor(&w.model, FC_W, 1)->offset + 7] = bad[i % 2];
        CHECK_OK(engine_load(engine, STATE_PARAM, all_of(&w), w.param, &e), &e);
        const Outcome o = measure_fp8(&w, engine, ROWS, k, amax);
        const float at = amax[FP8_SITES + FP8_FC_WEIGHT], before = amax[FP8_SITES + FP8_LN2];
        CHECK(i % 2 ? isnan(at) : isinf(at), "%g", (double)at);
        CHECK(isfinite(before), "%g", (double)before);
        CHECK(i >= 2 || isinf(o.grad_sq[0]), "squared norm %g", o.grad_sq[0]);
        free(o.grad);
    }
    engine_destroy(engine);
    world_close(&w);
}

// A step whose factor saturates changes no weight; the next step does.
static void test_saturation(void) {
    const UpdateConfig update = {.lr = 1e-3, .beta1 = 0.9, .beta2 = 0.9, .eps = 1e-8, .step = 1, .batch = ROWS};
    int8_t k[SITES], high[SITES];
    float amax[SITES];
    World w = world_of(shape, T, ROWS, 1);
    const Range all = all_of(&w), *half = (Range[]){{0, 640}, {640, all.end}};
    float *after = floats_of(&w);
    for (Optimizer o = 0; o < OPTIMIZERS; o++) {
        Error e = {0};
        Engine *engine =
            engine_of(&w, (EngineConfig){.micro_batch = ROWS, .threads = 1, .dtype = DTYPE_FP8, .optimizer = o});
        memset(k, FP8_UNSET, sizeof k);
        for (int step = 0; step < 4; step++) { // unset, exact, one too high, recovered
            StepResult r = {.amax = amax};
            double sums[2][64], sq = 0;
            r.grad_sq = sums[0], r.example_sq = sums[1];
            memcpy(high, k, sizeof k);
            if (step == 2) high[SITES - 1] = (int8_t)(k[SITES - 1] + 6);
            engine_exponents(engine, high);
            CHECK_OK(small_batch(engine, w.tokens, ROWS, T, ROWS, GNS_OFF, &e), &e);
            for (int part = 1; part >= 0; part--) CHECK_OK(engine_norms(engine, half[part], &e), &e);
            if (o == OPTIMIZER_LAMB) CHECK_OK(engine_trust(engine, all, &update, &e), &e);
            CHECK_OK(engine_update(engine, all, &update, &e), &e);
            CHECK_OK(engine_result(engine, &r, &e), &e);
            for (int i = 0; i < w.model.tensor_count; i++) sq += r.grad_sq[i];
            CHECK(isinf(sq) == (step == 2), "step %d: squared norm %g", step, sq);
            CHECK(fp8_saturates(high[SITES - 1], amax[SITES - 1]) == (step == 2), "step %d", step);
            for (int i = 0; i < SITES; i++) k[i] = (int8_t)fp8_next(k[i], amax[i]);
            float *before = floats_of(&w);
            memcpy(before, after, range_float_bytes(all));
            CHECK_OK(engine_store(engine, STATE_PARAM, all, after, &e), &e);
            CHECK((memcmp(before, after, range_float_bytes(all)) == 0) == (step == 2), "step %d of %s", step,
                  optimizer_names[o]);
            free(before);
        }
        engine_destroy(engine);
    }
    free(after);
    world_close(&w);
}

int main(void) {
    RUN(test_step, test_amax, test_each_site, test_dweight, test_same_bits, test_not_finite, test_saturation);
    return test_summary();
}
