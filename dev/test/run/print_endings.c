// The losses of HellaSwag's endings as the engine computes them, for dev/oracle/check_evaluation.py:
//
//     print_endings MODEL QUESTIONS TOKENIZER T MICRO_BATCH
//
// prints a line a row of hellaswag.h: the sum of the losses of the ending's tokens. TOKENIZER: "-" for none.
#include "checkpoint/checkpoint.h"
#include "model/engine.h"
#include "text/hellaswag.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    Model model;
    Engine *engine;
    Tokenizer *tokenizer;
    HellaSwag *questions;
    uint16_t *rows; // (micro_batch, width + 1)
    float *loss;    // (micro_batch, width)
    double *sum;    // (micro_batch)
} Probe;

static int params_to_engine(void *engine, Range range, const float *values, Error *e) {
    return engine_load(engine, STATE_PARAM, range, values, e);
}

static int probe_open(Probe *p, char **argv, int T, int micro_batch, Error *e) {
    ModelConfig config;
    TRY(checkpoint_read_config(argv[1], &config, e));
    TRY(model_create(&p->model, &config, e));
    EngineConfig shape = {
        .model = &p->model, .micro_batch = micro_batch, .seq_len = T, .threads = 1, .inference = true};
    TRY(engine_create(&cpu_engine, &p->engine, &shape, e));
    TRY(checkpoint_load_model(argv[1], &p->model, params_to_engine, p->engine, e));
    if (strcmp(argv[3], "-") != 0) TRY(tokenizer_load(&p->tokenizer, argv[3], e));
    TRY(hellaswag_open(&p->questions, argv[2], p->tokenizer, config.vocab, T, e));
    size_t n = (size_t)micro_batch, width = (size_t)hellaswag_describe(p->questions).width;
    TRY(memory_alloc((void **)&p->rows, n * (width + 1) * sizeof *p->rows, "rows", e));
    TRY(memory_alloc((void **)&p->loss, n * width * sizeof *p->loss, "losses", e));
    return memory_alloc((void **)&p->sum, n * sizeof *p->sum, "sums", e);
}

static int probe_run(Probe *p, int micro_batch, Error *e) {
    HellaSwagInfo info = hellaswag_describe(p->questions);
    for (int first = 0, n; first < info.rows; first += n) {
        n = info.rows - first < micro_batch ? info.rows - first : micro_batch;
        hellaswag_rows(p->questions, first, n, p->rows);
        for (int i = 0; i < n * info.width; i++) p->loss[i] = NAN;
        TRY(engine_eval(p->engine, p->rows, n, info.width, p->loss, e));
        hellaswag_sums(p->questions, first, n, p->loss, p->sum);
        for (int i = 0; i < n; i++) printf("%.17g\n", p->sum[i]);
    }
    return 0;
}

static void probe_close(Probe *p) {
    memory_free(p->sum);
    memory_free(p->loss);
    memory_free(p->rows);
    hellaswag_close(p->questions);
    tokenizer_destroy(p->tokenizer);
    engine_destroy(p->engine);
    model_destroy(&p->model);
}

int main(int argc, char **argv) {
    if (argc != 6) {
        fprintf(stderr, "usage: print_endings MODEL QUESTIONS TOKENIZER T MICRO_BATCH\n");
        return ERR_USAGE;
    }
    Error e = {0};
    Probe p = {0};
    int micro_batch = atoi(argv[5]);
    int code = probe_open(&p, argv, atoi(argv[4]), micro_batch, &e);
    if (!code) code = probe_run(&p, micro_batch, &e);
    if (code) error_print(&e);
    probe_close(&p);
    return code;
}
