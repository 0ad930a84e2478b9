#include "run/run.h"

#include "math/rng.h"

#include <errno.h>
#include <omp.h>
#include <stdlib.h>
#include <unistd.h>

enum { SAMPLE_STREAM = 1 << 20 }; // first rng stream of samples; lower streams initialise tensors

// ---- One token ------------------------------------------------------------------------------------------------------

static int compare_descending(const void *a, const void *b) {
    float x = *(const float *)a, y = *(const float *)b;
    return (x < y) - (x > y);
}

// Keeps the likeliest tokens and sets other logits to -INFINITY. If logits at the edge are equal, keeps the first ones.
static void keep_likeliest(float *logits, float *sorted, int V, const Options *o) {
    const int few = 1000; // up to this k insertion is fast; sorting GPT-2's vocabulary takes 10 ms
    int k = o->top_k > 0 && o->top_k < V ? (int)o->top_k : V;
    if (k == V && o->top_p >= 1) return;
    for (int v = 0, n = 0, i; k <= few && v < V; v++) {
        if (n == k && logits[v] <= sorted[k - 1]) continue;
        for (i = n < k ? n++ : k - 1; i > 0 && sorted[i - 1] < logits[v]; i--) sorted[i] = sorted[i - 1];
        sorted[i] = logits[v];
    }
    if (k > few) memcpy(sorted, logits, sizeof(float) * (size_t)V);
    if (k > few) qsort(sorted, (size_t)V, sizeof(float), compare_descending);
    if (o->top_p < 1) { // the nucleus: the fewest tokens whose probabilities add up to a fraction top_p
        const double T = o->temperature;
        double total = 0, sum = 0;
        int n = 0;
        for (int i = 0; i < k; i++) total += exp((sorted[i] - sorted[0]) / T);
        while (n < k && sum < o->top_p * total) sum += exp((sorted[n++] - sorted[0]) / T);
        k = n;
    }
    float edge = sorted[k - 1];
    int at_edge = 0; // number of the k largest that equal `edge`
    for (int i = 0; i < k; i++) at_edge += sorted[i] == edge;
    for (int v = 0; v < V; v++)
        if (logits[v] < edge || (logits[v] == edge && at_edge-- <= 0)) logits[v] = -INFINITY;
}

int sample_token(float *logits, double *scratch, int V, const Options *o, double u) {
    const int small = 1 << 12, threads = omp_get_max_threads();
    int best = 0;
    for (int v = 1; v < V; v++)
        if (logits[v] > logits[best]) best = v;
    if (o->temperature <= 0) return best;
    keep_likeliest(logits, (float *)scratch, V, o);
    double max = logits[best], total = 0, *weight = scratch;
#pragma omp parallel for schedule(static) num_threads(threads < 8 ? threads : 8) if (V > small)
    for (int v = 0; v < V; v++) weight[v] = exp((logits[v] - max) / o->temperature);
    for (int v = 0; v < V; v++) total += weight[v];
    double left = u * total;
    for (int v = 0; v < V; v++) {
        left -= weight[v];
        if (left < 0) return v;
    }
    return best; // u is near 1, and rounding left a remainder
}

// ---- A text ---------------------------------------------------------------------------------------------------------

// Prints a text with ? for control bytes. A model draws such bytes early in training, and they would move the cursor.
static void print_text(const char *text, size_t bytes, FILE *out, FILE *copy) {
    for (size_t i = 0; i < bytes; i++) {
        unsigned char c = (unsigned char)text[i];
        if ((c < 0x20 && c != '\n' && c != '\t') || c == 0x7f) c = '?';
        fputc(c, out);
        fputc(c, copy);
    }
    fflush(out);
}

int sample_text(Run *r, const char *prompt, uint64_t stream, FILE *out, FILE *copy, Error *e) {
    const Tokenizer *tokenizer = r->tokenizer;
    const int V = r->model.config.vocab, eot = tokenizer->eot;
    const size_t context = (size_t)r->shape.seq_len, most = strlen(prompt) + 1 + (size_t)r->options.sample_tokens;
    double *scratch;
    size_t count = 0;
    int code = memory_alloc((void **)&scratch, (size_t)V * (sizeof(double) + sizeof(float)) + most * sizeof(uint16_t),
                            "a sample", e);
    TRY_GOTO(comm_agree(r->comm, code, e)); // else other ranks would wait for a rank that failed
    float *logits = (float *)(scratch + V);
    uint16_t *tokens = (uint16_t *)(logits + V); // prompt and drawn text
    if (*prompt) {
        TRY_GOTO(comm_agree(r->comm, tokenizer_encode(tokenizer, NULL, prompt, strlen(prompt), tokens, &count, e), e));
        print_text(prompt, strlen(prompt), out, copy);
    } else if (eot >= 0 || tokenizer_encode(tokenizer, NULL, "\n", 1, tokens, &count, e)) { // eot, "\n" or 0
        tokens[0] = (uint16_t)(eot < 0 ? 0 : eot);
        count = 1;
    }
    for (int64_t i = 0; i < r->options.sample_tokens; i++) {
        const double u = rng_uniform((uint64_t)r->options.seed, SAMPLE_STREAM + stream, (uint64_t)i);
        const size_t from = count > context ? count - context : 0;
        code = engine_logits(r->engine, tokens + from, (int)(count - from), logits, e);
        if (code && (r->shape.shard_weights || tensor_ranks(&r->shape) > 1)) break; // other ranks wait in this pass
        const int known = is_rank0(r) ? V : 0; // with --tensor other ranks have no logits
        for (int v = 0; v < known && !code; v++)
            if (!isfinite(logits[v]))
                code = FAIL(e, ERR_NONFINITE, "check the model with --check",
                            "the logits after token %zu are not finite", count);
        TRY_GOTO(comm_agree(r->comm, code, e));
        int token = known ? sample_token(logits, scratch, V, &r->options, u) : 0;
        TRY_GOTO(comm_broadcast(r->comm, &token, sizeof token, e));
        size_t bytes;
        const char *text = tokenizer_decode(tokenizer, token, &bytes);
        if (token == eot) text = "\n---\n", bytes = strlen(text); // another document begins
        tokens[count++] = (uint16_t)token;
        print_text(text, bytes, out, copy);
    }
done:
    fputc('\n', out);
    memory_free(scratch);
    return code;
}

// ---- The samples of a run -------------------------------------------------------------------------------------------

// On all ranks: draws the samples of a prompt, since a pass may need all ranks' transfers. Rank 0 prints them. number:
// how many samples were drawn before.
static int sample_prompt(Run *r, const char *prompt, int64_t number, Error *e) {
    const Options *o = &r->options;
    const uint64_t beyond_any_step = (uint64_t)1 << 40;
    int code = 0;
    for (int64_t i = 0; i < o->samples && !code; i++) {
        const uint64_t stream = (uint64_t)r->at.step + (uint64_t)(number + i) * beyond_any_step;
        Text copy;
        if (o->samples > 1 && is_rank0(r)) printf("--- sample %lld of %lld\n", (long long)i + 1, (long long)o->samples);
        code = comm_agree(r->comm, text_begin(&copy, e), e);
        if (!code) code = sample_text(r, prompt, stream, is_rank0(r) ? stdout : copy.f, copy.f, e);
        if (!code) {
            code = text_end(&copy, e);
            if (!code && r->metrics) code = metrics_sample(r->metrics, r->at.step, r->at.tokens, prompt, copy.text, e);
            code = comm_agree(r->comm, code, e);
        }
        text_free(&copy);
    }
    return code;
}

int print_samples(Run *r, Error *e) {
    if (r->metrics) printf("\nsample%s after step %lld:\n", r->options.samples > 1 ? "s" : "", (long long)r->at.step);
    const int code = sample_prompt(r, r->options.prompt, 0, e);
    if (r->metrics) printf("\n");
    return code;
}

// Answers each line of standard input.
int print_answers(Run *r, Error *e) {
    const bool person = isatty(STDIN_FILENO) && isatty(STDOUT_FILENO);
    char *line = NULL;
    size_t room = 0;
    int code = 0;
    for (int64_t number = 0; !code; number += r->options.samples) {
        if (person) fputs("> ", stdout);
        fflush(stdout);
        ssize_t n = getline(&line, &room, stdin);
        if (n < 0 && ferror(stdin))
            code = FAIL(e, ERR_INPUT, "give it a file, a pipe or a terminal", "standard input: cannot read: %s",
                        strerror(errno));
        if (n < 0) break;
        if (line[n - 1] == '\n') line[--n] = 0;
        if (strlen(line) < (size_t)n)
            code = FAIL(e, ERR_INPUT, "give it lines of text", "standard input: a line has a zero byte");
        if (code) break;
        code = sample_prompt(r, line, number, e);
        if (code == ERR_INPUT) error_print(e), code = 0; // the tokenizer cannot encode this prompt
    }
    if (person) fputc('\n', stdout);
    free(line);
    return code;
}
