// Sampling: each token has its share of the unit interval, in its place; the draws and the context of a text.
#include "run/sample.h"
#include "../small_model.h"
#include "../test.h"

#include <time.h>
#include <unistd.h>

enum { MAX_V = 40 };

static uint64_t seed; // another in every run

// ---- One token ------------------------------------------------------------------------------------------------------

// softmax(logits / temperature) of the k largest, of equal ones those with the lower numbers; 0 for the others.
static void shares(const float *logits, int V, double temperature, int k, double *share) {
    long double sum = 0, weight[MAX_V]; // whose range needs no maximum taken off
    for (int v = 0; v < V; v++) {
        int before = 0; // how many rank before it
        for (int w = 0; w < V; w++) before += logits[w] > logits[v] || (logits[w] == logits[v] && w < v);
        weight[v] = k > 0 && before >= k ? 0 : expl(logits[v] / (long double)temperature);
        sum += weight[v];
    }
    for (int v = 0; v < V; v++) share[v] = (double)(weight[v] / sum);
}

static int draw(const float *logits, int V, double temperature, int k, double u) {
    float own[MAX_V];
    double scratch[MAX_V];
    memcpy(own, logits, sizeof own);
    for (int v = 0; v < MAX_V; v++) scratch[v] = NAN;
    const SampleConfig config = {.temperature = temperature, .top_k = k, .top_p = 1};
    return sample_token(own, scratch, V, &config, u);
}

static void check_draws(const float *logits, int V, double temperature, int k) {
    double share[MAX_V], begin = 0;
    shares(logits, V, temperature, k, share);
    for (int v = 0; v < V; begin += share[v++]) {
        const double within[] = {begin == 0 ? 0 : 1e-6, 0.5, 1 - 1e-6};
        for (int i = 0; i < 3 && share[v] > 1e-6; i++) {
            int got = draw(logits, V, temperature, k, begin + within[i] * share[v]);
            CHECK(got == v, "V %d, temperature %g, top %d: token %d, want %d, whose share is %g", V, temperature, k,
                  got, v, share[v]);
        }
    }
}

static void test_shares(void) {
    static const double temperatures[] = {0.3, 1, 2.5};
    for (uint64_t trial = 0; trial < 200; trial++) {
        float logits[MAX_V] = {0};
        int V = 2 + (int)(rng_u32(seed, 0, trial) % (MAX_V - 1)), k = (int)(rng_u32(seed, 1, trial) % MAX_V);
        for (int v = 0; v < V; v++) // some of them equal; all far from 0
            logits[v] = 1000 + 0.25f * (float)(rng_u32(seed, 2 + trial, (uint64_t)v) % 16);
        check_draws(logits, V, temperatures[trial % 3], k);
    }
}

static void test_likeliest(void) {
    static const float logits[MAX_V] = {-3, 2, -1, 2, 1};
    for (int i = 0; i < 10; i++) {
        CHECK(draw(logits, 5, 0, 0, i / 10.0) == 1, "not the first of the largest");
        CHECK(draw(logits, 5, 1, 1, i / 10.0) == 1, "not the only one of the top 1");
    }
    int last = draw(logits, 5, 1, 3, 1 - 0x1p-53);
    CHECK(last == 4, "token %d at the end of the interval", last);
}

// ---- A text of one-byte tokens, with a short context that slides ----------------------------------------------------

enum { T = 6, V = 256, DRAWN = 30, STREAM = 7 };

typedef struct {
    Model model;
    EngineConfig shape;
    Engine *engine;
    Tokenizer *tokenizer;
    uint8_t byte[V]; // of each token
} World;

// GPT-2's own order without its merges and its <|endoftext|>: the bytes that print, then the others as U+0100 and on.
// https://github.com/openai/gpt-2, encoder.py, bytes_to_unicode; there "+" is token 10 and a newline 198.
static void gpt2_order(uint8_t *byte, int *character) {
    int n = 0;
    for (int pass = 0, others = 0; pass < 2; pass++)
        for (int b = 0; b < V; b++) {
            bool prints = (b >= '!' && b <= '~') || (b >= 0xa1 && b <= 0xac) || b >= 0xae;
            if (prints != (pass == 0)) continue;
            character[n] = prints ? b : 0x100 + others++;
            byte[n++] = (uint8_t)b;
        }
}

static void make_gpt2_order(Tokenizer **out, uint8_t *byte) {
    char directory[] = "/tmp/test_sample_XXXXXX", vocab[64], merges[64];
    int character[V];
    Error e = {0};
    gpt2_order(byte, character);
    CHECK(byte[10] == '+' && byte[198] == '\n', "%d and %d", byte[10], byte[198]);
    CHECK(mkdtemp(directory), "no directory");
    snprintf(vocab, sizeof vocab, "%s/vocab.json", directory);
    snprintf(merges, sizeof merges, "%s/merges.txt", directory);
    FILE *f = fopen(vocab, "w");
    for (int v = 0; v < V; v++) fprintf(f, "%s\"\\u%04x\": %d", v ? ", " : "{", character[v], v);
    fprintf(f, "}\n");
    fclose(f);
    f = fopen(merges, "w");
    fprintf(f, "#version: 0.2\n");
    fclose(f);
    CHECK_OK(tokenizer_load(out, directory, &e), &e);
    CHECK(tokenizer_eot(*out) < 0, "it has an end of text");
    unlink(vocab), unlink(merges), rmdir(directory);
}

static void world_create(World *w, bool bytes) {
    const ModelConfig config = {.layers = 1, .heads = 2, .channels = 16, .vocab = V, .context = T};
    Error e = {0};
    float *params;
    CHECK_OK(model_create(&w->model, &config, &e), &e);
    for (int v = 0; v < V; v++) w->byte[v] = (uint8_t)v;
    if (bytes) CHECK_OK(tokenizer_create_bytes(&w->tokenizer, &e), &e);
    else make_gpt2_order(&w->tokenizer, w->byte);
    w->shape = (EngineConfig){.model = &w->model, .micro_batch = 1, .seq_len = T, .threads = 1, .inference = true};
    CHECK_OK(engine_create(&cpu_engine, &w->engine, &w->shape, &e), &e);
    CHECK_OK(memory_alloc((void **)&params, w->model.flat_count * sizeof *params, "parameters", &e), &e);
    small_params(&w->model, seed, params);
    CHECK_OK(engine_load(w->engine, STATE_PARAM, (Range){0, w->model.flat_count}, params, &e), &e);
    memory_free(params);
}

static void world_destroy(World *w) {
    engine_destroy(w->engine);
    tokenizer_destroy(w->tokenizer);
    model_destroy(&w->model);
}

static int sample_to(World *w, const SampleConfig *config, char **text, char **copy, Error *e) {
    size_t bytes;
    FILE *out = open_memstream(text, &bytes), *second = open_memstream(copy, &bytes);
    int code = sample_text(w->engine, &w->shape, w->tokenizer, config, STREAM, out, second, e);
    fclose(out);
    fclose(second);
    return code;
}

static void count_beat(void *beats) { ++*(int *)beats; }

// The text has these tokens, control characters as '?'; the copy has all of them, or those after the prompt; each drawn
// token beats the pulse.
static void check_text(World *w, const SampleConfig *config, const uint16_t *tokens, size_t n) {
    char *text = NULL, *copy = NULL;
    int beats = 0;
    const Pulse pulse = {count_beat, &beats};
    SampleConfig told = *config;
    Error e = {0};
    told.pulse = &pulse;
    CHECK_OK(sample_to(w, &told, &text, &copy, &e), &e);
    CHECK(beats == config->tokens, "%d tokens, and %d beats", config->tokens, beats);
    size_t left_out = config->copy_prompt ? 0 : n - (size_t)config->tokens;
    CHECK(strlen(copy) == n - left_out && strlen(text) == n + 1 && text[n] == '\n', "%zu and %zu bytes of %zu tokens",
          strlen(copy), strlen(text), n);
    CHECK(strncmp(copy, text + left_out, n - left_out) == 0, "the copy is another");
    for (size_t i = 0; i < n && i < strlen(text); i++) {
        int byte = w->byte[tokens[i]];
        bool control = (byte < 32 && byte != '\n' && byte != '\t') || byte == 127;
        char want = (char)(control ? '?' : byte);
        CHECK(text[i] == want, "byte %zu is %d, want %d", i, text[i], want);
    }
    free(text);
    free(copy);
}

// With equally likely tokens the text shows the draws: those of stream 2^20 + STREAM, in order.
static void test_draws_of_a_text(void) {
    const SampleConfig config = {.tokens = DRAWN, .temperature = 1e30, .top_p = 1, .seed = seed};
    World w;
    uint16_t tokens[DRAWN];
    world_create(&w, true);
    for (uint64_t i = 0; i < DRAWN; i++) tokens[i] = (uint16_t)(V * rng_uniform(seed, (1 << 20) + STREAM, i));
    check_text(&w, &config, tokens, DRAWN);
    world_destroy(&w);
}

// The likeliest token after the last T, from a prompt or from a newline that is not shown.
static void check_context(World *w, const char *prompt, bool copied) {
    const SampleConfig config = {.tokens = DRAWN, .seed = seed, .prompt = prompt, .copy_prompt = copied};
    bool shown = prompt && prompt[0];
    const char *begin = shown ? prompt : "\n";
    uint16_t tokens[100];
    float logits[V];
    size_t first = strlen(begin), n = first;
    Error e = {0};
    for (size_t i = 0; i < n; i++) tokens[i] = (uint16_t)((uint8_t *)memchr(w->byte, begin[i], V) - w->byte);
    for (; n < first + DRAWN; n++) {
        size_t context = n < T ? n : T;
        CHECK_OK(engine_logits(w->engine, tokens + n - context, (int)context, logits, &e), &e);
        tokens[n] = 0;
        for (int v = 1; v < V; v++)
            if (logits[v] > logits[tokens[n]]) tokens[n] = (uint16_t)v;
    }
    if (shown) check_text(w, &config, tokens, n);
    else check_text(w, &config, tokens + first, DRAWN);
}

static void check_contexts(bool bytes) {
    World w;
    world_create(&w, bytes);
    check_context(&w, NULL, true);
    check_context(&w, "", true);
    check_context(&w, "a", true);
    check_context(&w, "longer\tthan T\x7f\x01", true);
    check_context(&w, "not copied", false);
    world_destroy(&w);
}

static void test_context_of_a_text(void) { check_contexts(true); }
static void test_another_order_of_bytes(void) { check_contexts(false); }

// The text shows whole characters at the end of a long prompt; the copy has all of it.
static void check_shown(World *w, const char *prompt, size_t shown, const char *want) {
    const SampleConfig config = {.tokens = 3, .prompt = prompt, .shown = shown, .copy_prompt = true};
    char *text = NULL, *copy = NULL;
    size_t n = strlen(prompt), m = strlen(want);
    Error e = {0};
    CHECK_OK(sample_to(w, &config, &text, &copy, &e), &e);
    CHECK(strncmp(text, want, m) == 0, "%zu bytes of '%s' are shown as '%s'", shown, prompt, text);
    CHECK(strncmp(copy, prompt, n) == 0, "of '%s' the copy has '%s'", prompt, copy);
    CHECK(strlen(copy) == n + 3 && strlen(text) == m + 4 && strncmp(copy + n, text + m, 3) == 0, "'%s' and '%s'", copy,
          text);
    free(text);
    free(copy);
}

static void test_end_of_a_prompt(void) {
    World w;
    world_create(&w, true);
    check_shown(&w, "abcdefgh", 0, "abcdefgh");
    check_shown(&w, "abcdefgh", 9, "abcdefgh");
    check_shown(&w, "abcdefgh", 8, "abcdefgh");
    check_shown(&w, "abcdefgh", 7, "...bcdefgh");
    check_shown(&w, "abcdefgh", 1, "...h");
    check_shown(&w, "ab\u00e9cd", 4, "...\u00e9cd");
    check_shown(&w, "ab\u00e9cd", 3, "...cd");
    for (size_t shown = 3; shown < 6; shown++) check_shown(&w, "ab\U0001f600cd", shown, "...cd");
    check_shown(&w, "ab\U0001f600cd", 6, "...\U0001f600cd");
    check_shown(&w, "a\x80\x80\x80\x80\x80\x80", 5, "...\x80\x80"); // no character: no further than one could reach
    world_destroy(&w);
}

int main(void) {
    seed = (uint64_t)time(NULL);
    printf("  seed %llu\n", (unsigned long long)seed);
    RUN(test_shares);
    RUN(test_likeliest);
    RUN(test_draws_of_a_text);
    RUN(test_context_of_a_text);
    RUN(test_another_order_of_bytes);
    RUN(test_end_of_a_prompt);
    return test_summary();
}
