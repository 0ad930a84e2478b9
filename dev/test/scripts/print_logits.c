// Writes down what a model makes of fixed rows of tokens, for dev/oracle/check_transformers.py to compare with
// transformers: print_logits DIR OUT, where DIR is read as --model is, and OUT is a safetensors file with
//
//     tokens  I32 (ROWS, T)     uniform, T the model's whole context
//     logits  F32 (ROWS, T, V)  of the token after tokens[row][0..t]
#include "checkpoint/checkpoint.h"
#include "../safetensors_writer.h"
#include "../small_model.h"

enum { ROWS = 3, SEED = 5 };

typedef struct {
    Model model;
    Engine *engine;
    uint16_t *tokens; // (ROWS, T)
    int32_t *wide;    // the same
    float *logits;    // (ROWS, T, V)
} Probe;

static size_t token_count(const Probe *p) { return (size_t)ROWS * (size_t)p->model.config.context; }

static int params_to_engine(void *engine, Range range, const float *values, Error *e) {
    return engine_load(engine, STATE_PARAM, range, values, e);
}

static int probe_load(Probe *p, const char *path, Error *e) {
    ModelConfig config;
    TRY(checkpoint_read_config(path, &config, e));
    TRY(model_create(&p->model, &config, e));
    EngineConfig shape = {
        .model = &p->model, .micro_batch = 1, .seq_len = config.context, .threads = 1, .inference = true};
    TRY(engine_create(&cpu_engine, &p->engine, &shape, e));
    return checkpoint_load_model(path, &p->model, params_to_engine, p->engine, e);
}

static int probe_run(Probe *p, Error *e) {
    size_t T = (size_t)p->model.config.context, V = (size_t)p->model.config.vocab, count = token_count(p);
    TRY(memory_alloc((void **)&p->tokens, count * sizeof *p->tokens, "tokens", e));
    TRY(memory_alloc((void **)&p->wide, count * sizeof *p->wide, "tokens", e));
    TRY(memory_alloc((void **)&p->logits, count * V * sizeof *p->logits, "logits", e));
    small_tokens((int)V, SEED, count, p->tokens);
    for (size_t i = 0; i < count; i++) p->wide[i] = p->tokens[i];
    for (size_t i = 0; i < count * V; i++) p->logits[i] = NAN;
    for (size_t i = 0; i < count; i++)
        TRY(engine_logits(p->engine, p->tokens + i / T * T, (int)(i % T) + 1, p->logits + i * V, e));
    return 0;
}

static int probe_write(const Probe *p, const char *path, Error *e) {
    const ModelConfig *c = &p->model.config;
    uint64_t shape[3] = {ROWS, (uint64_t)c->context, (uint64_t)c->vocab};
    size_t count = token_count(p);
    SafetensorsWriter *writer;
    TRY(writer_create(&writer, path, e));
    safetensors_add(&writer->header, "tokens", SAFETENSORS_I32, 2, shape);
    safetensors_add(&writer->header, "logits", SAFETENSORS_F32, 3, shape);
    TRY(writer_write(writer, p->wide, count * sizeof *p->wide, e));
    TRY(writer_write(writer, p->logits, count * (size_t)c->vocab * sizeof *p->logits, e));
    return writer_finish(writer, e);
}

static void probe_destroy(Probe *p) {
    engine_destroy(p->engine);
    model_destroy(&p->model);
    memory_free(p->tokens);
    memory_free(p->wide);
    memory_free(p->logits);
}

int main(int argc, char **argv) {
    if (argc != 3) {
        fprintf(stderr, "usage: print_logits DIR OUT.safetensors\n");
        return ERR_USAGE;
    }
    Error e = {0};
    Probe p = {0};
    int code = probe_load(&p, argv[1], &e);
    if (!code) code = probe_run(&p, &e);
    if (!code) code = probe_write(&p, argv[2], &e);
    if (code) error_print(&e);
    probe_destroy(&p);
    return code;
}
