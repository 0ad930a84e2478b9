// Sampling: each token has its share of the unit interval, in order; a text has known draws and contexts.
#include "run/run.h"
#include "../small_model.h"
#include "../test.h"

#include <time.h>

enum { MAX_V = 1200 }; // above the limit of insertion sort

static uint64_t seed; // different in every run of the test

// ---- One token ------------------------------------------------------------------------------------------------------

// Sets share to softmax(logits / temperature) over the tokens that --top-k and --top-p keep; 0 for other tokens. The
// first of equal logits ranks higher.
static void shares(const float *logits, int V, const Options *config, double *share) {
    long double sum = 0, all = 0, before = 0, weight[MAX_V]; // in long double exp does not overflow
    int ranked[MAX_V], kept = config->top_k && config->top_k < V ? config->top_k : V, n = 0;
    for (int v = 0; v < V; v++) {
        int rank = 0;
        for (int w = 0; w < V; w++) rank += logits[w] > logits[v] || (logits[w] == logits[v] && w < v);
        ranked[rank] = v;
        weight[v] = expl(logits[v] / (long double)config->temperature);
        share[v] = 0;
    }
    for (int i = 0; i < kept; i++) all += weight[ranked[i]];
    for (; n < kept && (config->top_p >= 1 || before < config->top_p * all); n++) before += weight[ranked[n]];
    for (int i = 0; i < n; i++) sum += weight[ranked[i]];
    for (int i = 0; i < n; i++) share[ranked[i]] = (double)(weight[ranked[i]] / sum);
}

static int draw(const float *logits, int V, const Options *config, double u) {
    float own[MAX_V];
    double scratch[MAX_V];
    memcpy(own, logits, sizeof own);
    for (int v = 0; v < MAX_V; v++) scratch[v] = NAN;
    return sample_token(own, scratch, V, config, u);
}

static void test_shares(void) {
    static const double temperatures[] = {0.3, 1, 2.5}, nuclei[] = {1, 1e-9, 0.1003, 0.5003, 0.9003, 0.9993};
    for (uint64_t trial = 0; trial < 600; trial++) {
        float logits[MAX_V] = {0};
        double share[MAX_V], begin = 0;
        int V = trial % 200 == 3 ? MAX_V : 2 + (int)(rng_u32(seed, 0, trial) % 39);
        const Options config = {.temperature = temperatures[trial % 3],
                                .top_k = V == MAX_V ? 0 : (int)(rng_u32(seed, 1, trial) % 40),
                                .top_p = nuclei[V == MAX_V ? 4 : trial / 3 % 6]};
        for (int v = 0; v < V; v++) // some are equal; all are far from 0
            logits[v] = 1000 + 0.25f * (float)(rng_u32(seed, 2 + trial, (uint64_t)v) % 16);
        shares(logits, V, &config, share);
        for (int v = 0; v < V; begin += share[v++]) {
            const double within[] = {begin == 0 ? 0 : 1e-6, 0.5, 1 - 1e-6};
            for (int i = 0; i < 3 && share[v] > 1e-6; i++) {
                int got = draw(logits, V, &config, begin + within[i] * share[v]);
                CHECK(got == v, "V %d, temperature %g, top %ld and %g: token %d, want %d, whose share is %g", V,
                      config.temperature, config.top_k, config.top_p, got, v, share[v]);
            }
        }
    }
}

static void test_likeliest(void) {
    static const float logits[MAX_V] = {-3, 2, -1, 2, 1};
    for (int i = 0; i < 10; i++) {
        CHECK(draw(logits, 5, &(Options){.top_p = 1}, i / 10.0) == 1, "not the first of the largest");
        CHECK(draw(logits, 5, &(Options){.temperature = 1, .top_k = 1, .top_p = 1}, i / 10.0) == 1, "not the top");
    }
    int last = draw(logits, 5, &(Options){.temperature = 1, .top_k = 3, .top_p = 1}, 1 - 0x1p-53);
    CHECK(last == 4, "token %d at the end of the interval", last);
}

// ---- A text of one-byte tokens with a short sliding context ---------------------------------------------------------

enum { T = 6, V = 256, DRAWN = 30, STREAM = 7 };

static Run run;

// Checks that text and copy hold the prompt and DRAWN tokens, control characters as '?'.
static void check_text(const char *prompt, const uint16_t *tokens) {
    char *text = NULL, *copy = NULL, want[200];
    size_t bytes, before = strlen(prompt), n = before + DRAWN;
    Error e = {0};
    FILE *out = open_memstream(&text, &bytes), *second = open_memstream(&copy, &bytes);
    CHECK_OK(sample_text(&run, prompt, STREAM, out, second, &e), &e);
    fclose(out);
    fclose(second);
    for (size_t i = 0; i < n; i++) {
        int byte = i < before ? prompt[i] : tokens[i - before];
        want[i] = (char)((byte < 32 && byte != '\n' && byte != '\t') || byte == 127 ? '?' : byte);
    }
    want[n] = 0;
    CHECK(strncmp(text, want, n) == 0 && strcmp(text + n, "\n") == 0 && strcmp(copy, want) == 0, "'%s'", text);
    free(text);
    free(copy);
}

// At a huge temperature all tokens are equally likely, and the numbers of rng stream 2^20 + STREAM choose them. At
// temperature 0 the likeliest token follows the last T tokens, from a prompt or from a hidden newline.
static void test_text(void) {
    static const char *const prompts[] = {"", "a", "longer\tthan T\x7f\x01"};
    const ModelConfig config = {.layers = 1, .heads = 2, .channels = 16, .vocab = V, .context = T};
    Error e = {0};
    run.comm = &(Comm){.ranks = 1};
    CHECK_OK(model_create(&run.model, &config, &e), &e);
    run.shape = (EngineConfig){.model = &run.model, .micro_batch = 1, .seq_len = T, .threads = 1, .inference = true};
    CHECK_OK(parallel_create(&run.parallel, run.comm, &(ParallelConfig){.tensor = 1}, &run.shape, &e), &e);
    CHECK_OK(engine_create(&cpu_engine, &run.engine, &run.shape, &e), &e);
    CHECK_OK(tokenizer_create_bytes(&run.tokenizer, &e), &e);
    float *params = malloc(run.model.flat_count * sizeof *params), logits[V];
    small_params(&run.model, seed, params);
    CHECK_OK(engine_load(run.engine, STATE_PARAM, (Range){0, run.model.flat_count}, params, &e), &e);

    uint16_t tokens[100];
    for (uint64_t i = 0; i < DRAWN; i++) tokens[i] = (uint16_t)(V * rng_uniform(seed, (1 << 20) + STREAM, i));
    run.options.seed = (int64_t)seed, run.options.sample_tokens = DRAWN;
    run.options.temperature = 1e30, run.options.top_p = 1;
    check_text("", tokens);
    run.options.temperature = 0;
    for (int p = 0; p < 3; p++) {
        const char *begin = *prompts[p] ? prompts[p] : "\n";
        size_t first = strlen(begin), n = 0;
        for (; n < first; n++) tokens[n] = (uint8_t)begin[n];
        for (; n < first + DRAWN; n++) {
            size_t context = n < T ? n : T;
            CHECK_OK(engine_logits(run.engine, tokens + n - context, (int)context, logits, &e), &e);
            tokens[n] = 0;
            for (int v = 1; v < V; v++)
                if (logits[v] > logits[tokens[n]]) tokens[n] = (uint16_t)v;
        }
        check_text(prompts[p], tokens + first);
    }
    free(params);
    memory_free(run.tokenizer);
    engine_destroy(run.engine);
    parallel_destroy(&run.parallel);
    model_destroy(&run.model);
}

int main(void) {
    seed = (uint64_t)time(NULL);
    printf("  seed %llu\n", (unsigned long long)seed);
    RUN(test_shares, test_likeliest, test_text);
    return test_summary();
}
