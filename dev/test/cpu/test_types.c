// Compares the CPU engine in bf16, fp8 and fp8-dw with itself in fp32. test_math compares e4m3's rounding with the
// definition; dev/oracle checks losses and gradients of fp32 and fp8.
#include "base/float16.h"
#include "cpu/layers.h"
#include "cpu/matmul_kernel.h"
#include "world.h"

enum { ROWS = 6, T = 24, FIRST = 100, SITES = 4 * FP8_ENTRIES, HEAD = 3 * FP8_ENTRIES };
static const TensorKind matrices[] = {QKV_W, PROJ_W, FC_W, FCPROJ_W};
static bool with_head = true; // new engines have fp8_head
static const ModelConfig shape = {.layers = 3, .heads = 2, .channels = 48, .vocab = 70, .context = T};

// Returns an engine of the configuration. With dropout the engine also masks documents.
static Engine *typed_engine(const World *w, EngineConfig c) {
    c.micro_batch = ROWS, c.gns = GNS_EXACT, c.separator = 3, c.fp8_head = with_head;
    c.document_mask = c.dropout.below > 0;
    if (!c.threads) c.threads = 1;
    return engine_of(w, c);
}

static Engine *engine_in(const World *w, Dtype dtype) { return typed_engine(w, (EngineConfig){.dtype = dtype}); }

// ---- bf16 -----------------------------------------------------------------------------------------------------------

// Shrinks small_params' weights towards GPT-2's size, so that rounding matters less. bf16 holds the weights exactly.
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

static void check_bf16(float smoothing, double dropout) {
    World w = rounded_world();
    EngineConfig c = {.label_smoothing = smoothing, .dropout = dropout_of(dropout, 11)};
    Engine *exact = typed_engine(&w, c);
    c.dtype = DTYPE_BF16, c.threads = 2;
    Engine *rounded = typed_engine(&w, c);
    Outcome want = measure(&w, exact, w.tokens, FIRST, ROWS, ROWS, GNS_EXACT),
            got = measure(&w, rounded, w.tokens, FIRST, ROWS, 4, GNS_EXACT);
    CHECK(fabs(got.loss - want.loss) < 2e-3 * ROWS, "loss %.6f, want %.6f", got.loss, want.loss);
    for (int k = 0; k < w.model.tensor_count; k++) {
        const Tensor *t = &w.model.tensors[k];
        double error = relative_error(got.grad + t->offset, want.grad + t->offset, t->count);
        CHECK(error < 0.02, "gradient of %s: %.4f", t->name, error);
        CHECK(fabs(got.grad_sq[k] / want.grad_sq[k] - 1) < 0.02, "its norm");
        CHECK(fabs(got.example_sq[k] / want.example_sq[k] - 1) < 0.02, "examples' norms of %s: %g, want %g", t->name,
              got.example_sq[k], want.example_sq[k]);
    }
    CHECK(relative_error(got.grad, want.grad, 100) > 0, "nothing was rounded");
    free(want.grad), free(got.grad);
    engine_destroy(exact), engine_destroy(rounded);
    world_close(&w);
}

static void test_bf16(void) {
    if (!matmul_kernel(DTYPE_BF16)) SKIP("this machine has no instructions for bf16");
    check_bf16(0, 0);
    check_bf16(0.2f, 0);
    check_bf16(0, 0.2);
}

// Master weights are fp32: engine_store returns the loaded bits; the kernels read rounded weights.
static void test_bf16_masters(void) {
    uint64_t hash[2];
    if (!matmul_kernel(DTYPE_BF16)) SKIP("this machine has no instructions for bf16");
    World w = rounded_world();
    for (size_t i = 0; i < w.model.flat_count; i++) w.param[i] *= 1 + 1e-5f;
    Engine *engine = engine_in(&w, DTYPE_BF16);
    float *back = floats_of(&w);
    CHECK_OK(engine_store(engine, STATE_PARAM, all_of(&w), back, &e), &e);
    CHECK(!memcmp(back, w.param, range_float_bytes(all_of(&w))), "other weights came back");
    CHECK_OK(engine_hash(engine, all_of(&w), &hash[0], &e), &e);
    w.param[7] *= 1 + 1e-6f; // below bf16's precision
    CHECK_OK(engine_load(engine, STATE_PARAM, all_of(&w), w.param, &e), &e);
    CHECK_OK(engine_hash(engine, all_of(&w), &hash[1], &e), &e);
    CHECK(hash[0] != hash[1], "the hash leaves the masters out");
    free(back);
    engine_destroy(engine);
    world_close(&w);
}

// ---- fp8 ------------------------------------------------------------------------------------------------------------

static Outcome measure_fp8(const World *w, Engine *engine, int micro_batch, const int8_t *k, float *amax) {
    double unused[2][64];
    StepResult r = {.grad_sq = unused[0], .example_sq = unused[1], .amax = amax};
    if (k) engine_exponents(engine, k);
    Outcome o = measure(w, engine, w->tokens, FIRST, ROWS, micro_batch, GNS_EXACT);
    CHECK_OK(engine_result(engine, &r, &e), &e);
    return o;
}

// Runs a step without rounding. Sets amax to the step's largest values, and k to the exponents that follow from amax
// and to any channels.
static void first_exponents(const World *w, Engine *engine, int8_t *k, float *amax) {
    free(measure_fp8(w, engine, ROWS, NULL, amax).grad);
    memset(k, FP8_UNSET, SITES);
    fp8_adapt(k, amax, shape.layers, true);
    for (int i = 0; i < SITES; i++) k[i] += i % FP8_ENTRIES < FP8_SITES ? 0 : (int8_t)(i * 37 % 64);
}

static bool same_outcome(const World *w, const Outcome *a, const Outcome *b) {
    return a->loss == b->loss && !memcmp(a->grad, b->grad, range_float_bytes(all_of(w)));
}

// Without exponents a step has fp32's bits. With exponents the gradient of every matrix is close to fp32's, while
// evaluations and logits have fp32's bits.
static void check_fp8(Dtype type) {
    int8_t k[SITES];
    float amax[SITES], eval[2][ROWS * T], logits[2][70];
    World w = world_of(shape, T, ROWS, 1);
    Engine *exact = engine_in(&w, DTYPE_FP32), *fp8 = engine_in(&w, type);
    with_head = false;
    Engine *without = engine_in(&w, type);
    with_head = true;
    Outcome want = measure(&w, exact, w.tokens, FIRST, ROWS, ROWS, GNS_EXACT),
            first = measure_fp8(&w, fp8, ROWS, NULL, amax);
    CHECK(same_outcome(&w, &want, &first), "the first step rounds");
    first_exponents(&w, fp8, k, amax);
    Outcome got = measure_fp8(&w, fp8, ROWS, k, amax);
    CHECK(fabs(got.loss - want.loss) < 0.1 * ROWS, "loss %.6f, want %.6f", got.loss, want.loss);
    for (int i = 0; i < w.model.tensor_count; i++) {
        const Tensor *t = &w.model.tensors[i];
        const double same = cosine_of(got.grad + t->offset, want.grad + t->offset, t->count);
        CHECK(same > (t->dimensions == 2 ? 0.99 : 0.98) && same < 1 - 1e-6, "gradient of %s: cosine %.6f", t->name,
              same);
        CHECK(fabs(got.example_sq[i] / want.example_sq[i] - 1) < 0.2, "examples' norms of %s", t->name);
    }
    const float ln = amax[2 * FP8_ENTRIES + FP8_LN1_CHANNELS + 5], gelu = amax[2 * FP8_ENTRIES + FP8_GELU_CHANNELS + 2];
    CHECK(ln > 0 && gelu > 0, "amax of the last groups: %g, %g", (double)ln, (double)gelu);
    for (int i = 0; i < 4; i++) { // without low parts of the last block, or with other channels
        int8_t other[SITES], *entry = other + 2 * FP8_ENTRIES + (i % 2 ? FP8_LN1_CHANNELS : FP8_GELU_CHANNELS);
        memcpy(other, k, sizeof k);
        for (int g = 0; g < FP8_GROUPS; g++)
            entry[g] = (int8_t)(i < 2 ? FP8_UNSET : FP8_UNSET + 1 + (fp8_channel(entry[g], 64) ^ 1));
        const Outcome o = measure_fp8(&w, fp8, ROWS, other, amax);
        CHECK(o.loss != got.loss && fabs(o.loss - got.loss) < 0.01 * ROWS, "low parts: %g, %g", o.loss, got.loss);
        free(o.grad);
    }
    for (int i = 0; i < 4; i++) { // exponents of the head alone: of lnf, of wte, of both, of both without --fp8-head
        int8_t head[SITES];
        memset(head, FP8_UNSET, sizeof head);
        if (i != 1) head[HEAD + FP8_LN2] = k[HEAD + FP8_LN2];
        if (i != 0) head[HEAD + FP8_FC_WEIGHT] = k[HEAD + FP8_FC_WEIGHT];
        const Outcome o = measure_fp8(&w, i == 3 ? without : fp8, ROWS, head, amax);
        CHECK(same_outcome(&w, &want, &o) == (i != 2) && fabs(o.loss - want.loss) < 0.01 * ROWS, "loss %.6f", o.loss);
        free(o.grad);
    }
    for (int i = 0; i < 2; i++) {
        CHECK_OK(engine_eval(i ? fp8 : exact, w.tokens, ROWS, T, eval[i], &e), &e);
        CHECK_OK(engine_logits(i ? fp8 : exact, w.tokens, T, logits[i], &e), &e);
    }
    CHECK(!memcmp(eval[0], eval[1], sizeof *eval) && !memcmp(logits[0], logits[1], sizeof *logits), "eval rounds");
    free(want.grad), free(first.grad), free(got.grad);
    engine_destroy(exact), engine_destroy(fp8), engine_destroy(without);
    world_close(&w);
}

static void test_fp8(void) { check_fp8(DTYPE_FP8), check_fp8(DTYPE_FP8_DW); }

// Low parts leave at most 2^-8 of |x|, or half a step of 2^-9 2^-k, of one channel per group, and change no other.
static void low_case(int group) {
    enum { N = 130, IN = 200, K = 3 };
    static float x[N * IN], high[N * IN], both[N * IN];
    int8_t channel[IN];
    float most[IN] = {0};
    const int groups = IN / group;
    for (int i = 0; i < N * IN; i++) x[i] = (float)(rng_normal(5, (uint64_t)group, (uint64_t)i) * exp2(i % 7));
    for (int g = 0; g < groups; g++) channel[g] = (int8_t)(FP8_UNSET + 1 + (g * 5 + 3) % group);
    fp8_round_values(high, x, N * IN, -K);
    memcpy(both, high, sizeof both);
    fp8_add_low(both, x, N, IN, group, -K, channel, most);
    for (int i = 0; i < N * IN; i++) {
        const int c = i % IN, g = c / group;
        const double left = fabs((double)both[i] - (double)x[i]), bound = fmax(fabs((double)x[i]) / 256, exp2(K - 10));
        if (g < groups && c % group == (g * 5 + 3) % group) CHECK(left <= bound, "%g of %g", left, (double)x[i]);
        else CHECK(both[i] == high[i], "channel %d changes", c);
    }
    for (int g = 0; g < groups; g++) {
        float largest[64] = {0}, all = 0;
        uint32_t bits;
        memcpy(&bits, most + g, sizeof bits);
        for (int i = 0; i < 3 * group; i++) { // the candidates' rows are 0, 64 and 128
            const float v = fabsf(x[i / group * 64 * IN + g * group + i % group]);
            all = fmaxf(all, v), largest[i % group] = fmaxf(largest[i % group], v);
        }
        CHECK(bits % 65536 < (uint32_t)group && largest[bits % 64] >= 0.99f * all, "group %d: %u", g, bits % 65536);
    }
}

static void test_low(void) { low_case(8), low_case(64); }

// amax is the largest |x| of a site's unrounded factors over the step's micro-steps.
static void test_amax(void) {
    int8_t k[SITES];
    float amax[SITES], again[SITES], parts[2][SITES];
    World w = world_of(shape, T, ROWS, 1);
    Engine *engine = engine_in(&w, DTYPE_FP8);
    first_exponents(&w, engine, k, amax);
    for (int i = 0; i < SITES; i++) {
        const int s = i % FP8_ENTRIES;
        CHECK((amax[i] > 0) == (i < HEAD ? s < FP8_SITES : s == FP8_LN2 || s == FP8_FC_WEIGHT), "site %d: %g", i,
              (double)amax[i]);
    }
    for (int i = 0; i <= 12; i++) {
        const Tensor *t = i < 12 ? model_tensor(&w.model, matrices[i % 4], i / 4) : model_tensor(&w.model, WTE, 0);
        const int site = i < 12 ? i / 4 * FP8_ENTRIES + FP8_QKV_WEIGHT + i % 4 : HEAD + FP8_FC_WEIGHT;
        float most = 0;
        for (size_t j = 0; j < t->count; j++) most = fmaxf(most, fabsf(w.param[t->offset + j]));
        CHECK(amax[site] == most, "%s: %g", t->name, (double)most);
    }
    for (int half = 0; half < 2; half++) {
        World part = w;
        part.tokens += half * 3 * (T + 1);
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

// fp8-dw changes only the gradients of the blocks' matrices. If an exponent of x, dy or W is unset, no factor of dW is
// rounded.
static void test_dweight(void) {
    int8_t k[SITES], one[SITES];
    float amax[SITES];
    World w = world_of(shape, T, ROWS, 1);
    Engine *plain = engine_in(&w, DTYPE_FP8), *dw = engine_in(&w, DTYPE_FP8_DW);
    first_exponents(&w, plain, k, amax);
    for (int s = -1; s < FP8_SITES; s++) { // site s of block 1 is unset
        const int x = s - FP8_LN1, dy = FP8_DQKV - s, weight = s - FP8_QKV_WEIGHT;
        const int unset = s < 0 ? -1 : s < FP8_DFCPROJ ? x : s < FP8_QKV_WEIGHT ? dy : weight;
        memcpy(one, k, sizeof k);
        if (s >= 0) one[FP8_ENTRIES + s] = FP8_UNSET;
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

// Threads and recomputation change no bit.
static void check_same_bits(Dtype type, double dropout) {
    static const Recompute recompute[] = {RECOMPUTE_NONE, RECOMPUTE_NONE, RECOMPUTE_GELU, RECOMPUTE_BLOCK};
    World w = world_of(shape, T, ROWS, 1);
    Outcome first = {0};
    int8_t k[4][SITES] = {0};
    float amax[4][SITES] = {0};
    for (int i = 0; i < 4; i++) {
        EngineConfig c = {.dtype = type, .threads = 1 + i % 2, .recompute = recompute[i]};
        c.dropout = dropout_of(dropout, 11);
        Engine *engine = typed_engine(&w, c);
        if (dtype_is_fp8(type)) first_exponents(&w, engine, k[i], amax[i]);
        if (dtype_is_fp8(type)) engine_exponents(engine, k[i]);
        Outcome o = measure(&w, engine, w.tokens, FIRST, ROWS, 4, GNS_EXACT);
        if (i == 0) first = o;
        const bool same = !memcmp(k[i], k[0], sizeof *k) && !memcmp(amax[i], amax[0], sizeof *amax);
        CHECK(same && same_outcome(&w, &o, &first), "%s: engine %d", dtype_names[type], i);
        if (i > 0) free(o.grad);
        engine_destroy(engine);
    }
    free(first.grad);
    world_close(&w);
}

static void test_same_bits(void) {
    const Dtype types[] = {DTYPE_FP32, DTYPE_FP8, DTYPE_FP8_DW};
    for (int i = 0; i < 3; i++) check_same_bits(types[i], 0.25);
    if (!matmul_kernel(DTYPE_BF16)) return;
    check_same_bits(DTYPE_BF16, 0.25);
    check_same_bits(DTYPE_BF16, 0);
}

// amax shows a factor that saturates or is not finite. If exponents are set, the gradient's norm is then infinite.
static void test_saturation(void) {
    const float values[] = {1, INFINITY, NAN}; // [0]: the exponent is too high
    int8_t k[SITES];
    float amax[SITES];
    World w = world_of(shape, T, ROWS, 1);
    Engine *engine = engine_in(&w, DTYPE_FP8);
    const size_t site = FP8_ENTRIES + FP8_FC_WEIGHT, element = model_tensor(&w.model, FC_W, 1)->offset + 7;
    first_exponents(&w, engine, k, amax);
    for (int i = 0; i < 4; i++) // 3: the head's exponent is too high
        for (int unset = 0; unset < 2; unset++) {
            const size_t high = i == 3 ? HEAD + FP8_FC_WEIGHT : site;
            int8_t set[SITES];
            memcpy(set, k, sizeof k);
            if (i % 3 == 0) set[high] = (int8_t)(k[high] + 6);
            if (unset) memset(set, FP8_UNSET, sizeof set);
            w.param[element] = values[i % 3];
            CHECK_OK(engine_load(engine, STATE_PARAM, all_of(&w), w.param, &e), &e);
            const Outcome o = measure_fp8(&w, engine, ROWS, set, amax);
            CHECK(i % 3 == 0 || memcmp(&amax[site], &values[i % 3], sizeof *amax) == 0, "%g", (double)amax[site]);
            CHECK(isfinite(amax[FP8_ENTRIES + FP8_LN2]), "%g", (double)amax[FP8_ENTRIES + FP8_LN2]);
            CHECK(isinf(o.grad_sq[0]) || unset, "squared norm %g", o.grad_sq[0]);
            CHECK(i % 3 > 0 || isfinite(o.grad_sq[0]) == unset, "squared norm %g", o.grad_sq[0]);
            free(o.grad);
        }
    engine_destroy(engine);
    world_close(&w);
}

int main(void) {
    RUN(test_bf16, test_bf16_masters, test_fp8, test_low, test_amax, test_dweight, test_same_bits, test_saturation);
    return test_summary();
}
