// cuda_logits reuses keys and values of earlier calls. Its logits equal a new engine's and the CPU engine's up to
// rounding, whatever happens between calls. cuda_logits computes only the last token if each block stores its own keys
// and values. Repeated calls give the same bits. Arguments: engine_test.cuh.
#include "engine_test.cuh"

#include "cuda/engine.cuh"

static const double CLOSE = FP32 ? 1e-5 : 2e-2; // relative to the logits' norm

static const struct {
    const char *name;
    int micro_batch;
    Recompute recompute;
    bool inference, reuses;
} kinds[] = {
    {"training", 2, RECOMPUTE_NONE, false, true},
    {"training, recompute gelu", 1, RECOMPUTE_GELU, false, true},
    {"training, recompute block", 1, RECOMPUTE_BLOCK, false, false},
    {"inference", 1, RECOMPUTE_NONE, true, true},
    {"inference, several rows", 2, RECOMPUTE_NONE, true, false},
};
enum { TRAINING, RECOMPUTING = 2, INFERENCE, KINDS = sizeof kinds / sizeof *kinds };

static uint64_t draws;
static int draw(int n) { return (int)(rng_u32(seed, 1 << 20, draws++) % (uint32_t)n); }

static bool documents; // new engines mask documents; token 0 opens a document

static Engine *engine_with(const Api *api, const World *w, int kind) {
    EngineConfig config = {};
    config.model = &w->model;
    config.seq_len = w->c->seq_len;
    config.micro_batch = kinds[kind].micro_batch;
    config.recompute = kinds[kind].recompute;
    config.inference = kinds[kind].inference;
    config.document_mask = documents;
    return world_engine(api, w, config);
}

static std::vector<float> logits_of(const World *w, const Api *api, Engine *engine, const uint16_t *tokens, int n) {
    std::vector<float> x(w->c->config.vocab, NAN);
    CALL_OK(api->logits(engine, tokens, n, x.data(), &e));
    return x;
}

static double difference(const std::vector<float> &got, const std::vector<float> &want) {
    return relative_error(got.data(), want.data(), want.size());
}

// Does something that may happen between two calls. Returns the text's new length.
static int disturb(const World *w, Engine *engine, std::vector<uint16_t> &text, int n) {
    const int T = w->c->seq_len, V = w->c->config.vocab;
    std::vector<float> loss((size_t)T * w->c->micro_batch);
    switch (draw(6)) {
    case 0: text[draw(n)] = (uint16_t)draw(V); return n;
    case 1: return 1 + draw(T);
    case 2: return n > 1 ? n - 1 : n;
    case 3: CALL_OK(gpu.eval(engine, w->tokens, 1, 1 + draw(T), loss.data(), &e)); return n;
    case 4: CALL_OK(gpu.load(engine, STATE_PARAM, all_of(&w->model), w->param, &e)); return n;
    default: return n;
    }
}

// Sets one stored key to NaN. This spoils the logits of a longer text only if the engine reuses keys. The engine reuses
// keys if each block stores its own and heads are whole packs of 8 elements.
static void check_spoilt(const World *w, Engine *engine, int kind, const uint16_t *text, int n) {
    const size_t C = w->c->config.channels;
    const bool apart = kinds[kind].reuses || w->c->config.layers == 1,
               reuses = apart && C / w->c->config.heads % 8 == 0;
    const real nan = (real)NAN;
    real *key = engine->block[0].qkv + (size_t)draw(n) * 3 * C + C;
    cudaMemcpy(key, &nan, sizeof nan, cudaMemcpyHostToDevice);
    cudaDeviceSynchronize(); // cudaMemcpy may return before its copy is done
    const float logit = logits_of(w, &gpu, engine, text, n + 1)[0];
    CHECK(isnan(logit) == reuses, "%s, %s, %d tokens: logit %g with a spoilt key", w->c->name, kinds[kind].name, n + 1,
          logit);
}

// fresh: an engine that never reuses keys.
static void compare_texts(const World *w, int kind, Engine *fresh, Engine *c, double *worst) {
    const int T = w->c->seq_len, V = w->c->config.vocab;
    Engine *a = engine_with(&gpu, w, kind), *b = engine_with(&gpu, w, kind);
    std::vector<uint16_t> text(T);
    int n = 1 + draw(T < 8 ? T : 8), calls = small ? 4 : T < 200 ? 40 : 20;
    for (uint16_t &t : text) t = (uint16_t)draw(V);
    for (int i = 0; i < calls; i++, n = n < T ? n + 1 : 1 + draw(T)) {
        const uint64_t before = draws;
        const int was = n;
        std::vector<uint16_t> same = text;
        if (draw(4) == 0) n = disturb(w, a, text, n);
        draws = before;
        if (draw(4) == 0) disturb(w, b, same, was);
        const std::vector<float> got = logits_of(w, &gpu, a, text.data(), n),
                                 again = logits_of(w, &gpu, b, text.data(), n);
        if (fresh) fresh->seen_count = 0;
        const double off = difference(got, logits_of(w, &gpu, fresh, text.data(), n));
        const double off_cpu = difference(got, logits_of(w, &cpu, c, text.data(), n));
        CHECK(got == again, "%s, %s, %d tokens: other bits", w->c->name, kinds[kind].name, n);
        CHECK(off <= CLOSE, "%s, %s, %d tokens: %.2e off", w->c->name, kinds[kind].name, n, off);
        CHECK(off_cpu <= (FP32 ? 1e-4 : 3e-2), "%s, %s, %d tokens: %.2e off the CPU's", w->c->name, kinds[kind].name, n,
              off_cpu);
        *worst = fmax(*worst, off);
        if (!documents && draw(8) == 0 && n > 1 && n < T)
            check_spoilt(w, a, kind, text.data(), n), a->seen_count = b->seen_count = 0;
    }
}

// A case whose matrices have more rows than a thread of decode_linear loads at once.
static const Case wide = {"wide", {1, 13, 1664, 97, 24}, 24, 2, 2};

static void compare_cases(void) {
    for (int i = 0; i <= case_count; i++) {
        double worst = 0;
        World w(i < case_count ? &cases[i] : &wide, 1);
        Engine *fresh = engine_with(&gpu, &w, RECOMPUTING), *c = engine_with(&cpu, &w, INFERENCE);
        for (int kind = 0; kind < KINDS; kind++)
            if (i == 2 || kind == TRAINING || kind == INFERENCE) compare_texts(&w, kind, fresh, c, &worst);
        printf("  %s: at most %.1e off a new engine's\n", w.c->name, worst);
    }
}

static void test_reuse(void) {
    documents = false;
    compare_cases();
}

static void test_reuse_within_documents(void) {
    documents = true;
    case_count = SMALL_CASES;
    compare_cases();
    documents = false;
}

// Checks that after an update the logits of a longer text use no keys of old weights.
static void test_update(void) {
    World w(&cases[2], 1);
    Engine *a = engine_with(&gpu, &w, TRAINING), *fresh = engine_with(&gpu, &w, TRAINING);
    UpdateConfig u = update_config(w.c, 1);
    u.lr = 0.1, u.batch = 1;
    std::vector<float> param(w.model.flat_count);
    CALL_OK(gpu.begin_step(a, &e));
    CALL_OK(gpu.micro_step(a, w.tokens, 1, GNS_OFF, &e));
    const std::vector<float> before = logits_of(&w, &gpu, a, w.tokens, 20);
    CALL_OK(gpu.norms(a, all_of(&w.model), &e));
    CALL_OK(gpu.update(a, all_of(&w.model), &u, &e));
    CALL_OK(gpu.store(a, STATE_PARAM, all_of(&w.model), param.data(), &e));
    CALL_OK(gpu.load(fresh, STATE_PARAM, all_of(&w.model), param.data(), &e));
    const std::vector<float> got = logits_of(&w, &gpu, a, w.tokens, 21);
    CHECK(got == logits_of(&w, &gpu, fresh, w.tokens, 21), "logits from keys of the old weights");
    CHECK(difference(before, got) > 0.01, "no update");
}

int main(int argc, char **argv) {
    engine_test_begin("test_logits_cuda", argc, argv);
    RUN(test_reuse, test_reuse_within_documents, test_update);
    return test_summary();
}
