// Writes an engine's results, which dev/oracle/check_engine.py compares with the float64 oracle:
// dump_steps DIR writes DIR/CASE.safetensors, one small model per case. Each file has the settings as metadata, and
//
//     tokens               I32 (steps, B, T + 1)
//     param0/NAME          F32, parameters before step 1
//     paramN/NAME          F32, parameters after all steps
//     loss, nll            F64 (B), L_b of step 1, one row at a time, with and without label smoothing
//     loss_eval            F64 (B), L_b of engine_eval, without label smoothing
//     grad/NAME            F32, batch mean of g_b in step 1
//     grad_sq/NAME         F64, |sum_b g_b|^2 in step 1
//     example_sq/NAME      F64 (B), |g_b|^2 of step 1, one row at a time, in GNS_EXACT mode
//     example_sq_sum/NAME  F64, sum_b |g_b|^2 of one batched step in GNS_EXACT mode
//     example_sq_ln/NAME   F64, sum_b |g_b|^2 of one batched step in GNS_LN mode: NaN except for LayerNorms
//     row                  F64 (B, 3), in GNS_LN mode: |g_b|^2 over the LayerNorms, L_b without label smoothing, 0
//     source_gram          F64 (sources, sources) <v_s, v_t> of step 1 (StepResult)
//     source_numbers       F64 (sources, 3) per source: its share of the noise, its G2, its S; from all steps at param0
//     source_cosine        F64, cosine of the sources' mean gradients; NaN if a G2 is not significant
//     losses               F64 (steps), batch means before the update
//     exponents            I32 (L + 1, FP8_ENTRIES), of all steps; -128 where the engine does not round
//     padding_max          F64, largest |parameter| outside the tensors after all steps
#include "../safetensors_writer.h"
#include "gns/noise.h"
#include "math/schedule.h"
#include "../small_model.h"

#include <stdlib.h>

enum { STEPS = 10, LAYERS_MOST = 3, SOURCES = 2 };

typedef struct {
    const char *name;
    ModelConfig config;
    int seq_len, batch, micro_batch;
    double grad_clip, weight_decay, eps;
    float smoothing;
    Optimizer optimizer;
    double dropout;
    int separator; // token that opens a document; -1: none
    Dtype dtype;   // 0: fp32. fp8 and fp8-dw use the exponents that follow from step 1
} Case;

// Odd sizes: T that no tile divides, V not padded, B = 1, NH = 1, a context longer than T, a single token, T and C
// larger than the kernels' blocks. With a small V every token recurs, which tests the cross term of the tied weight.
// Clipping is active in some cases, off or out of reach in others. Adam's step hardly depends on the gradient's scale
// unless eps is large: one case has a large eps. The fp8 cases are so small that no value lies near a tie, where fp32
// and float64 may round differently.
static const Case cases[] = {
    {"l2_c32_v61_t13_b3", {2, 2, 32, 61, 13}, 13, 3, 2, 1.0, 0.1, 1e-8, 0, OPTIMIZER_ADAMW, 0, -1, 0},
    {"l1_c24_v37_t7_b1", {1, 1, 24, 37, 16}, 7, 1, 1, 0.0, 0.0, 1e-8, 0, OPTIMIZER_ADAMW, 0, -1, 0},
    {"l3_c64_v256_t32_b4", {3, 4, 64, 256, 32}, 32, 4, 4, 0.5, 0.3, 1e-3, 0.25f, OPTIMIZER_ADAMW, 0, -1, 0},
    {"l1_c48_v50_t1_b2", {1, 3, 48, 50, 17}, 1, 2, 1, 100.0, 0.1, 1e-8, 0.5f, OPTIMIZER_ADAMW, 0, -1, 0},
    {"l2_c48_v50_t17_b3", {2, 3, 48, 50, 17}, 17, 3, 3, 1.0, 0.1, 1e-8, 0.1f, OPTIMIZER_ADAMW, 0, -1, 0},
    {"l1_c132_v29_t201_b2", {1, 3, 132, 29, 210}, 201, 2, 2, 1.0, 0.1, 1e-8, 0, OPTIMIZER_ADAMW, 0, -1, 0},
    {"lamb_l2_c48_v50_t17_b3", {2, 3, 48, 50, 17}, 17, 3, 3, 1.0, 0.1, 1e-5, 0.1f, OPTIMIZER_LAMB, 0, -1, 0},
    {"muon_l2_c48_v50_t17_b3", {2, 3, 48, 50, 17}, 17, 3, 3, 1.0, 0.1, 1e-8, 0.1f, OPTIMIZER_MUON, 0, -1, 0},
    {"drop_l1_c132_v29_t150_b2", {1, 3, 132, 29, 150}, 150, 2, 1, 1.0, 0.1, 1e-8, 0, OPTIMIZER_ADAMW, 0.2, -1, 0},
    {"documents_drop_l2_c32_v7_t70_b3", {2, 2, 32, 7, 75}, 70, 3, 2, 1.0, 0.1, 1e-8, 0, OPTIMIZER_ADAMW, 0.25, 6, 0},
    {"fp8_l1_c24_v29_t6_b2", {1, 2, 24, 29, 6}, 6, 2, 1, 1.0, 0.1, 1e-8, 0, OPTIMIZER_ADAMW, 0.2, -1, DTYPE_FP8},
    {"fp8_dw_l1_c24_v29_t6_b2", {1, 2, 24, 29, 6}, 6, 2, 1, 1.0, 0.1, 1e-8, 0, OPTIMIZER_ADAMW, 0.2, -1, DTYPE_FP8_DW},
};

enum { FIRST_EXAMPLE = 1 << 20 }; // number of the first row; dropout's masks depend on it

// A case in progress: the engine, host copies of its arrays, and the file's content.
typedef struct {
    const Case *c;
    int steps;
    Model model;
    Engine *engine;
    UpdateConfig update;
    Schedule schedule;
    uint64_t seed;
    uint16_t *tokens;               // (steps, B, T + 1)
    float *before, *after;          // parameters, flat
    float *grad;                    // mean over the batch in step 1, flat
    double *grad_sq;                // (tensors)
    double *example_sq;             // (tensors, B)
    double *sum_exact, *sum_ln;     // (tensors)
    double *loss, *nll, *loss_eval; // (B)
    RowResult *row;                 // (B)
    double gram[SOURCES * SOURCES], numbers[SOURCES][3], cosine;
    double losses[STEPS], padding_max;
    int32_t exponents[(LAYERS_MOST + 1) * FP8_ENTRIES]; // (L + 1, FP8_ENTRIES)
} Dump;

static const double source_share[SOURCES] = {0.4, 0.6};

static int source_of(const void *data, uint64_t example) { return (void)data, example % 5 >= 2; }

static Range all_of(const Model *model) { return (Range){0, model->flat_count}; }

static int dump_create(Dump *d, const Case *c, uint64_t seed, Error *e) {
    *d = (Dump){.c = c, .seed = seed, .steps = c->seq_len > 100 ? STEPS / 2 : STEPS};
    double tokens_per_step = (double)c->batch * c->seq_len;
    d->update = (UpdateConfig){.beta1 = 0.9,
                               .beta2 = 0.95,
                               .eps = c->eps,
                               .weight_decay = c->weight_decay,
                               .momentum = 0.9,
                               .grad_clip = c->grad_clip,
                               .batch = c->batch};
    d->schedule = (Schedule){SCHEDULE_COSINE, 3e-3, 3.5 * tokens_per_step, (d->steps - 1) * tokens_per_step, 0.1, 0};
    TRY(model_create(&d->model, &c->config, e));
    size_t flat = d->model.flat_count, tensors = (size_t)d->model.tensor_count, B = (size_t)c->batch;
    float **floats[] = {&d->before, &d->after, &d->grad};
    for (size_t i = 0; i < 3; i++) TRY(memory_alloc((void **)floats[i], flat * sizeof(float), "parameters", e));
    double **doubles[] = {&d->grad_sq, &d->sum_exact, &d->sum_ln, &d->example_sq, &d->loss, &d->nll, &d->loss_eval};
    for (size_t i = 0; i < 7; i++) TRY(memory_alloc((void **)doubles[i], tensors * B * sizeof(double), "norms", e));
    TRY(memory_alloc((void **)&d->row, B * sizeof *d->row, "rows", e));
    size_t count = (size_t)d->steps * B * (size_t)(c->seq_len + 1);
    TRY(memory_alloc((void **)&d->tokens, count * sizeof *d->tokens, "tokens", e));
    small_tokens(c->config.vocab, seed, count, d->tokens);
    small_params(&d->model, seed, d->before);
    EngineConfig config = {.model = &d->model,
                           .micro_batch = c->micro_batch,
                           .seq_len = c->seq_len,
                           .gns = GNS_EXACT,
                           .document_mask = c->separator >= 0,
                           .separator = (uint16_t)c->separator,
                           .dropout = dropout_of(c->dropout, seed),
                           .optimizer = c->optimizer,
                           .step_rows = c->batch,
                           .sources = SOURCES,
                           .source = source_of,
                           .dtype = c->dtype,
                           .fp8_head = true,
                           .label_smoothing = c->smoothing};
    TRY(engine_create(&cpu_engine, &d->engine, &config, e));
    return engine_load(d->engine, STATE_PARAM, all_of(&d->model), d->before, e);
}

static void dump_destroy(Dump *d) {
    engine_destroy(d->engine);
    model_destroy(&d->model);
    void *all[] = {d->tokens, d->before,     d->after, d->grad, d->grad_sq,   d->sum_exact,
                   d->sum_ln, d->example_sq, d->loss,  d->nll,  d->loss_eval, d->row};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) memory_free(all[i]);
}

// Runs forward and backward over `rows` rows. Sets loss_sum, nll_sum (unless NULL), grad_sq (tensors) and example_sq
// (tensors).
static int measure(Dump *d, const uint16_t *tokens, int rows, GnsMode mode, double *loss_sum, double *nll_sum,
                   double *grad_sq, double *example_sq, Error *e) {
    StepResult result = {.grad_sq = grad_sq, .example_sq = example_sq, .row = mode == GNS_LN ? d->row : NULL};
    if (mode == GNS_LN) result.source_gram = d->gram;
    for (int k = 0; k < d->model.tensor_count; k++) grad_sq[k] = example_sq[k] = NAN;
    engine_examples(d->engine, FIRST_EXAMPLE + (uint64_t)(tokens - d->tokens) / (uint64_t)(d->c->seq_len + 1));
    TRY(small_batch(d->engine, tokens, rows, d->c->seq_len, d->c->micro_batch, mode, e));
    TRY(engine_norms(d->engine, all_of(&d->model), e));
    TRY(engine_result(d->engine, &result, e));
    *loss_sum = result.loss_sum;
    if (nll_sum) *nll_sum = result.nll_sum;
    return 0;
}

// Sets the exponents that follow from an unrounded step 1.
static int choose_exponents(Dump *d, Error *e) {
    const int sites = fp8_entries(d->model.config.layers);
    float amax[(LAYERS_MOST + 1) * FP8_ENTRIES];
    int8_t k[(LAYERS_MOST + 1) * FP8_ENTRIES];
    StepResult result = {.grad_sq = d->grad_sq, .example_sq = d->example_sq, .amax = amax};
    for (int i = 0; i < sites; i++) d->exponents[i] = FP8_UNSET;
    if (!dtype_is_fp8(d->c->dtype)) return 0;
    engine_examples(d->engine, FIRST_EXAMPLE);
    TRY(small_batch(d->engine, d->tokens, d->c->batch, d->c->seq_len, d->c->micro_batch, GNS_OFF, e));
    TRY(engine_result(d->engine, &result, e));
    memset(k, FP8_UNSET, sizeof k);
    fp8_adapt(k, amax, d->model.config.layers, true);
    for (int i = 0; i < sites; i++)
        d->exponents[i] = k[i] += k[i] == FP8_UNSET + 1 ? (int8_t)(i * 37 % 64) : 0; // any channels
    engine_exponents(d->engine, k);
    return 0;
}

// Measures losses and squared gradient norms of step 1's rows, one row at a time.
static int measure_examples(Dump *d, Error *e) {
    int T = d->c->seq_len, B = d->c->batch;
    float *token_loss = d->grad; // (T); the gradient overwrites it later
    for (int b = 0; b < B; b++) {
        const uint16_t *row = d->tokens + (size_t)b * (size_t)(T + 1);
        TRY(measure(d, row, 1, GNS_EXACT, &d->loss[b], &d->nll[b], d->grad_sq, d->sum_exact, e));
        for (int k = 0; k < d->model.tensor_count; k++)
            d->example_sq[(size_t)k * (size_t)B + (size_t)b] = d->sum_exact[k];
        TRY(engine_eval(d->engine, row, 1, T, token_loss, e));
        d->loss_eval[b] = 0;
        for (int t = 0; t < T; t++) d->loss_eval[b] += (double)token_loss[t] / T;
    }
    return 0;
}

// Measures the batched step's gradient and sums of norms in GNS_EXACT mode, without update.
static int measure_batch(Dump *d, Error *e) {
    double loss;
    TRY(measure(d, d->tokens, d->c->batch, GNS_EXACT, &loss, NULL, d->grad_sq, d->sum_exact, e));
    TRY(engine_store(d->engine, STATE_GRAD, all_of(&d->model), d->grad, e));
    for (size_t i = 0; i < d->model.flat_count; i++) d->grad[i] /= (float)d->c->batch;
    return 0;
}

// Measures rows and sources in GNS_LN mode. Step 1 comes last, since the file holds the statistics of step 1.
static int measure_sources(Dump *d, Error *e) {
    const int B = d->c->batch;
    const double tokens = (double)B * d->c->seq_len;
    Noise noise;
    double loss, sq[SOURCES], gram[SOURCES * SOURCES];
    int code = 0;
    TRY(noise_create(&noise, &d->model, 4 * tokens, 0, SOURCES, e));
    for (int step = d->steps; step > 0; step--) {
        const size_t first = (size_t)(step - 1) * (size_t)B;
        const uint16_t *rows = d->tokens + first * (size_t)(d->c->seq_len + 1);
        TRY_GOTO(measure(d, rows, B, GNS_LN, &loss, NULL, d->grad_sq, d->sum_ln, e));
        memset(sq, 0, sizeof sq);
        for (int b = 0; b < B; b++) sq[source_of(NULL, FIRST_EXAMPLE + first + (size_t)b)] += d->row[b].sq;
        memcpy(gram, d->gram, sizeof gram);
        noise_observe_sources(&noise, B, (double)B * (B - 1), source_share, sq, gram, tokens);
    }
    for (int s = 0; s < SOURCES; s++) {
        const GnsEstimate part = gns_estimate(&noise.source[s]), own = gns_estimate(&noise.source[SOURCES + s]);
        d->numbers[s][0] = part.scale, d->numbers[s][1] = own.g2, d->numbers[s][2] = own.s;
    }
    d->cosine = noise_cosine(&noise, 0, 1, &(double){0});
done:
    noise_destroy(&noise);
    return code;
}

static double adamw_lr_factor(const Dump *d) { return d->c->optimizer == OPTIMIZER_MUON ? 2.5 : 1; }

static int train(Dump *d, Error *e) {
    size_t step_tokens = (size_t)d->c->batch * (size_t)d->c->seq_len;
    size_t tensors = (size_t)d->model.tensor_count;
    double *scratch; // unused norms
    TRY(memory_alloc((void **)&scratch, 2 * tensors * sizeof *scratch, "norms", e));
    int code = 0;
    for (int step = 1; step <= d->steps; step++) {
        const uint16_t *rows = d->tokens + (size_t)(step - 1) * (size_t)d->c->batch * (size_t)(d->c->seq_len + 1);
        double loss_sum;
        TRY_GOTO(measure(d, rows, d->c->batch, GNS_OFF, &loss_sum, NULL, scratch, scratch + tensors, e));
        d->losses[step - 1] = loss_sum / d->c->batch;
        d->update.step = step;
        d->update.muon_lr = schedule_lr(&d->schedule, (double)step * (double)step_tokens); // tokens after the step
        d->update.lr = adamw_lr_factor(d) * d->update.muon_lr;
        if (d->c->optimizer == OPTIMIZER_LAMB) TRY_GOTO(engine_trust(d->engine, all_of(&d->model), &d->update, e));
        TRY_GOTO(engine_update(d->engine, all_of(&d->model), &d->update, e));
    }
    TRY_GOTO(engine_store(d->engine, STATE_PARAM, all_of(&d->model), d->after, e));
    const Model *model = &d->model;
    for (size_t k = 0; k < tensors; k++) {
        size_t begin = model->tensors[k].offset + model->tensors[k].count;
        size_t end = k + 1 < tensors ? model->tensors[k + 1].offset : model->flat_count;
        for (size_t i = begin; i < end; i++) {
            double x = fabs((double)d->after[i]);
            if (!(x <= d->padding_max)) d->padding_max = isnan(x) ? INFINITY : x; // a later x must not hide NaN
        }
    }
done:
    memory_free(scratch);
    return code;
}

// ---- The file -------------------------------------------------------------------------------------------------------

typedef struct {
    SafetensorsHeader header;
    Text data;
} File;

static void put(File *f, const char *group, const char *name, const char *type, int dimensions, const uint64_t *shape,
                const void *data) {
    char full[128];
    const uint64_t before = f->header.data;
    snprintf(full, sizeof full, "%s%s%s", group, *name ? "/" : "", name);
    safetensors_add(&f->header, full, type, dimensions, shape);
    fwrite(data, 1, f->header.data - before, f->data.f);
}

static void put_doubles(File *f, const char *group, const char *name, const double *x, uint64_t count) {
    put(f, group, name, "F64", count != 0, &count, x); // count 0: a scalar
}

static void put_flat(File *f, const char *group, const Tensor *t, const float *flat) {
    const uint64_t shape[2] = {t->rows, t->columns};
    put(f, group, t->name, "F32", t->dimensions, shape + (2 - t->dimensions), flat + t->offset);
}

static void put_all(File *f, const Dump *d) {
    const uint64_t B = (uint64_t)d->c->batch, rows[2] = {B, sizeof *d->row / sizeof(double)};
    const uint64_t gram[2] = {SOURCES, SOURCES}, numbers[2] = {SOURCES, 3};
    const uint64_t sites[2] = {(uint64_t)d->model.config.layers + 1, FP8_ENTRIES};
    const uint64_t tokens[3] = {(uint64_t)d->steps, B, (uint64_t)d->c->seq_len + 1};
    put_doubles(f, "loss", "", d->loss, B);
    put_doubles(f, "nll", "", d->nll, B);
    put_doubles(f, "loss_eval", "", d->loss_eval, B);
    put_doubles(f, "losses", "", d->losses, (size_t)d->steps);
    put(f, "row", "", "F64", 2, rows, d->row);
    put(f, "source_gram", "", "F64", 2, gram, d->gram);
    put(f, "source_numbers", "", "F64", 2, numbers, d->numbers);
    put_doubles(f, "source_cosine", "", &d->cosine, 0);
    put(f, "exponents", "", "I32", 2, sites, d->exponents);
    put_doubles(f, "padding_max", "", &d->padding_max, 0);
    for (int k = 0; k < d->model.tensor_count; k++) {
        const Tensor *t = &d->model.tensors[k];
        put_doubles(f, "example_sq", t->name, d->example_sq + (size_t)k * B, B);
        put_doubles(f, "example_sq_sum", t->name, &d->sum_exact[k], 0);
        put_doubles(f, "grad_sq", t->name, &d->grad_sq[k], 0);
        put_doubles(f, "example_sq_ln", t->name, &d->sum_ln[k], 0);
        put_flat(f, "param0", t, d->before);
        put_flat(f, "grad", t, d->grad);
        put_flat(f, "paramN", t, d->after);
    }
    safetensors_add(&f->header, "tokens", "I32", 3, tokens);
    for (size_t i = 0; i < tokens[0] * tokens[1] * tokens[2]; i++)
        fwrite(&(int32_t){d->tokens[i]}, sizeof(int32_t), 1, f->data.f);
}

static void put_metadata(File *f, const Dump *d) {
    const Case *c = d->c;
    const struct {
        const char *key;
        double value;
    } settings[] = {
        {"layers", c->config.layers},
        {"heads", c->config.heads},
        {"channels", c->config.channels},
        {"seq_len", c->seq_len},
        {"batch", c->batch},
        {"steps", d->steps},
        {"label_smoothing", c->smoothing},
        {"optimizer", c->optimizer},
        {"momentum", d->update.momentum},
        {"lr", d->schedule.lr},
        {"adamw_lr_factor", adamw_lr_factor(d)},
        {"beta1", d->update.beta1},
        {"beta2", d->update.beta2},
        {"eps", d->update.eps},
        {"weight_decay", d->update.weight_decay},
        {"grad_clip", d->update.grad_clip},
        {"warmup_tokens", d->schedule.warmup_tokens},
        {"train_tokens", d->schedule.train_tokens},
        {"final_frac", d->schedule.final_frac},
        {"seed", (double)d->seed},
        {"dropout", c->dropout},
        {"separator", c->separator},
        {"fp8_dw", c->dtype == DTYPE_FP8_DW},
        {"first_example", FIRST_EXAMPLE},
        {"share_0", source_share[0]},
    };
    for (size_t i = 0; i < sizeof settings / sizeof *settings; i++) {
        char value[32];
        snprintf(value, sizeof value, "%.17g", settings[i].value);
        safetensors_add_metadata(&f->header, settings[i].key, value);
    }
}

static int dump_write(const Dump *d, const char *directory, Error *e) {
    char path[1024];
    File f;
    snprintf(path, sizeof path, "%s/%s.safetensors", directory, d->c->name);
    TRY(safetensors_begin(&f.header, e));
    TRY(text_begin(&f.data, e));
    put_metadata(&f, d);
    put_all(&f, d);
    TRY(safetensors_end(&f.header, e));
    TRY(text_end(&f.data, e));
    FILE *out = fopen(path, "wb");
    if (!out) return FAIL(e, ERR_WRITE, NULL, "%s: cannot create", path);
    fwrite(f.header.text.text, 1, f.header.text.bytes, out);
    fwrite(f.data.text, 1, f.data.bytes, out);
    text_free(&f.header.text);
    text_free(&f.data);
    return fclose(out) ? FAIL(e, ERR_WRITE, NULL, "%s: cannot write", path) : 0;
}

static int case_run(const Case *c, const char *directory, uint64_t seed, Error *e) {
    Dump d;
    int code = 0;
    TRY_GOTO(dump_create(&d, c, seed, e));
    TRY_GOTO(choose_exponents(&d, e));
    TRY_GOTO(measure_examples(&d, e));
    TRY_GOTO(measure_sources(&d, e));
    TRY_GOTO(measure_batch(&d, e));
    TRY_GOTO(train(&d, e));
    TRY_GOTO(dump_write(&d, directory, e));
done:
    dump_destroy(&d);
    return code;
}

int main(int argc, char **argv) {
    if (argc < 2 || argc > 3) {
        fprintf(stderr, "usage: dump_steps DIR [SEED]\n");
        return ERR_USAGE;
    }
    Error e = {0};
    uint64_t seed = argc > 2 ? strtoull(argv[2], NULL, 10) : 1;
    int code = directory_create(argv[1], &e);
    for (size_t i = 0; !code && i < sizeof cases / sizeof *cases; i++) code = case_run(&cases[i], argv[1], seed, &e);
    if (code) error_print(&e);
    return code;
}
