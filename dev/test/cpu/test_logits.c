// engine_logits reuses keys and values of earlier calls. Calls of other functions change no bit of the logits. If each
// block stores its own keys and values, an engine computes only the new tokens.
#include "cpu/engine_cpu.h"
#include "../scratch.h"
#include "world.h"

enum { T = 40, V = 50, C = 24, ROUNDS = 300 };

static const ModelConfig shape = {.layers = 3, .heads = 2, .channels = C, .vocab = V, .context = T};
static const struct {
    const char *name;
    EngineConfig config;
    bool reuses;
} kinds[] = {
    {"training", {.micro_batch = 2, .gns = GNS_LN}, true},
    {"training, recompute gelu", {.micro_batch = 1, .gns = GNS_OFF, .recompute = RECOMPUTE_GELU}, true},
    {"training, recompute block", {.micro_batch = 1, .gns = GNS_OFF, .recompute = RECOMPUTE_BLOCK}, false},
    {"inference", {.micro_batch = 1, .inference = true}, true},
    {"inference, several rows", {.micro_batch = 2, .inference = true}, false},
    {"bf16", {.micro_batch = 1, .inference = true, .dtype = DTYPE_BF16}, true}, // last, since some machines lack bf16
};

static int kind_count = sizeof kinds / sizeof *kinds;

typedef struct {
    World w; // the engine's weights and the text so far
    EngineConfig config;
    Engine *engine;
    uint16_t row[T + 1]; // input of an evaluation or a step
    int n;
} Sequence;

static void text_open(Sequence *x, int kind) {
    *x = (Sequence){.w = world_of(shape, T, 1, random_state), .config = kinds[kind].config};
    x->config.threads = 2;
    x->engine = engine_of(&x->w, x->config);
}

static void text_close(Sequence *x) {
    engine_destroy(x->engine);
    world_close(&x->w);
}

// Checks that the logits equal a new engine's, bit for bit.
static void check_logits(Sequence *x, const char *kind, const char *after) {
    float got[V], want[V];
    Engine *fresh = engine_of(&x->w, x->config);
    CHECK_OK(engine_logits(fresh, x->w.tokens, x->n, want, &e), &e);
    CHECK_OK(engine_logits(x->engine, x->w.tokens, x->n, got, &e), &e);
    CHECK(memcmp(got, want, sizeof want) == 0, "%s, %d tokens, after %s: other logits", kind, x->n, after);
    engine_destroy(fresh);
}

static void train_a_step(Sequence *x) {
    UpdateConfig update = {.lr = 1e-2, .beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8, .step = 1, .batch = 1};
    Range all = {0, x->w.model.flat_count};
    CHECK_OK(small_batch(x->engine, x->row, 1, T, 1, GNS_OFF, &e), &e);
    CHECK_OK(engine_norms(x->engine, all, &e), &e);
    float ignored[V]; // engine_logits may be called between gradients and update
    if (draw(2)) CHECK_OK(engine_logits(x->engine, x->w.tokens, x->n, ignored, &e), &e);
    CHECK_OK(engine_update(x->engine, all, &update, &e), &e);
    CHECK_OK(engine_store(x->engine, STATE_PARAM, all, x->w.param, &e), &e);
}

// Makes a call that users may make between two tokens. Returns the call's name.
static const char *something(Sequence *x) {
    float losses[T];
    small_tokens(V, draw(UINT32_MAX), T + 1, x->row);
    switch (draw(x->config.inference ? 6 : 7)) {
    case 0: return "nothing";
    case 1: x->w.tokens[draw((uint32_t)x->n)] ^= 1; return "another token";
    case 2: x->n = 1 + (int)draw((uint32_t)x->n); return "fewer tokens";
    case 3:
        memmove(x->w.tokens, x->w.tokens + 1, sizeof(uint16_t) * (size_t)(x->n - 1));
        x->n = x->n > 1 ? x->n - 1 : 1;
        return "a window that slides";
    case 4: CHECK_OK(engine_eval(x->engine, x->row, 1, 1 + (int)draw(T), losses, &e), &e); return "an evaluation";
    case 5:
        small_params(&x->w.model, draw(UINT32_MAX), x->w.param);
        CHECK_OK(engine_load(x->engine, STATE_PARAM, (Range){0, x->w.model.flat_count}, x->w.param, &e), &e);
        return "other weights";
    default: train_a_step(x); return "a step";
    }
}

static void test_any_order(void) {
    for (int kind = 0; kind < kind_count; kind++) {
        Sequence x;
        text_open(&x, kind);
        for (int round = 0; round < ROUNDS; round++) {
            const char *after = x.n > 0 && draw(3) == 0 ? something(&x) : "more tokens";
            for (int more = (int)draw(3); (more > 0 || x.n == 0) && x.n < T; more--)
                x.w.tokens[x.n++] = (uint16_t)draw(V);
            check_logits(&x, kinds[kind].name, after);
        }
        text_close(&x);
    }
}

// Counts computed tokens by the rows that the last LayerNorm writes, one per computed token.
static void test_computes_what_is_new(void) {
    for (int kind = 0; kind < kind_count; kind++) {
        Sequence x;
        float logits[V];
        text_open(&x, kind);
        CHECK_OK(engine_logits(x.engine, x.w.tokens, 10, logits, &e), &e);
        const Dtype type = x.config.dtype;
        void *lnf = x.engine->lnf;
        for (int i = 0; i < T * C; i++) value_set(lnf, (size_t)i, NAN, type);
        CHECK_OK(engine_logits(x.engine, x.w.tokens, 13, logits, &e), &e);
        for (int t = 0; t < T; t++) {
            bool computed = t < (kinds[kind].reuses ? 3 : 13);
            CHECK(isnan(value_get(lnf, (size_t)(t * C), type)) == !computed, "%s: row %d is %scomputed",
                  kinds[kind].name, t, computed ? "not " : "");
        }
        text_close(&x);
    }
}

int main(void) {
    random_begin();
    if (!matmul_kernel(DTYPE_BF16)) kind_count--;
    RUN(test_any_order, test_computes_what_is_new);
    return test_summary();
}
