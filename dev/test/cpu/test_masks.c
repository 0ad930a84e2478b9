// Masks of dropout and of documents. Spans of dropout's masks equal math/dropout.h. With both masks, the loss and the
// sums by source do not depend on micro-batches. A packed row has its documents' losses. dev/oracle checks the masks'
// bits, gradients, and evaluations without dropout; test_types checks that threads and recomputation change no bit.
#include "cpu/layers.h"
#include "world.h"

// ---- Masks ----------------------------------------------------------------------------------------------------------

static void test_spans(void) {
    float factor[DROPOUT_SPAN];
    for (uint64_t i = 0; i < 300; i++) {
        RngBlock r = rng_block(5, SMALL_DIRECTIONS, i);
        Dropout d = dropout_of((double)(i + 1) / 301, (uint64_t)r.word[0] << 32 | r.word[1]);
        d = dropout_at(d, (uint64_t)r.word[2] << 18 | i, (int)(r.word[3] % 1000));
        uint32_t head = r.word[1] % 1000, row = r.word[2] % 65536, first = r.word[0] % 512 * DROPOUT_SPAN;
        dropout_factors(factor, d, (DropoutPlace)(i % 4), head, row, first);
        for (uint32_t c = 0; c < DROPOUT_SPAN; c++) {
            float want = dropout_factor(d, (DropoutPlace)(i % 4), head, row, first + c);
            CHECK(factor[c] == want, "draw %d, column %u: %g, want %g", (int)i, c, (double)factor[c], (double)want);
        }
    }
}

// ---- The engine -----------------------------------------------------------------------------------------------------

enum { ROWS = 5, T = 61, FIRST = 1000, SEPARATOR = 7 };
static const ModelConfig shape = {.layers = 3, .heads = 2, .channels = 36, .vocab = 50, .context = T};

static int sources = WORLD_SOURCES; // number of sources of the next engine

static Engine *masked_engine(const World *w, double p, bool documents) {
    return engine_of(w, (EngineConfig){.micro_batch = ROWS,
                                       .threads = 1,
                                       .gns = GNS_EXACT,
                                       .sources = sources,
                                       .document_mask = documents,
                                       .separator = SEPARATOR,
                                       .dropout = dropout_of(p, 9)});
}

// Measures rows [row, row + rows), micro_batch at a time. Row r is example FIRST + r.
static Outcome measure_rows(const World *w, Engine *engine, int row, int rows, int micro_batch) {
    return measure(w, engine, w->tokens + row * (T + 1), FIRST + row, rows, micro_batch, GNS_EXACT);
}

// Adds a row's gradient of the LayerNorms to sum.
static void add_ln(const World *w, double *sum, const float *grad) {
    for (const Tensor *t = w->model.tensors; t < w->model.tensors + w->model.tensor_count; t++)
        for (size_t i = t->offset; i < t->offset + t->count && t->group == GROUP_LN; i++) sum[i] += grad[i];
}

static void check_gram(const World *w, const double *got, double *const sum[WORLD_SOURCES]) {
    double want[WORLD_SOURCES * WORLD_SOURCES] = {0};
    for (int i = 0; i < WORLD_SOURCES * WORLD_SOURCES; i++)
        for (size_t k = 0; k < w->model.flat_count; k++)
            want[i] += sum[i / WORLD_SOURCES][k] * sum[i % WORLD_SOURCES][k];
    for (int i = 0; i < WORLD_SOURCES * WORLD_SOURCES; i++) {
        int s = i / WORLD_SOURCES, t = i % WORLD_SOURCES;
        double unit = sqrt(want[s * (WORLD_SOURCES + 1)] * want[t * (WORLD_SOURCES + 1)]);
        CHECK(fabs(got[i] - want[i]) < 1e-6 * unit, "sources %d, %d: %.9g, want %.9g of %g", s, t, got[i], want[i],
              unit);
    }
}

// An example's masks, loss and norms do not depend on the rows beside it: no bit of its RowResult changes. source_gram
// is <v_s, v_t>: v_s adds up LayerNorm gradients of single rows of source s. No other result depends on the sources.
static void test_micro_batches(void) {
    World w = world_of(shape, T, ROWS, 3);
    Engine *engine = masked_engine(&w, 0.25, true);
    double loss = 0, example_sq[64] = {0}, *sum[WORLD_SOURCES];
    RowResult row[ROWS];
    sources = 0;
    Engine *without = masked_engine(&w, 0.25, true);
    sources = WORLD_SOURCES;
    for (int s = 0; s < WORLD_SOURCES; s++) sum[s] = calloc(w.model.flat_count, sizeof **sum);
    for (int b = 0; b < ROWS; b++) {
        Outcome one = measure_rows(&w, engine, b, 1, 1);
        loss += one.loss;
        for (int k = 0; k < w.model.tensor_count; k++) example_sq[k] += one.example_sq[k];
        double sq = 0;
        for (int k = 0; k < w.model.tensor_count; k++)
            sq += w.model.tensors[k].group == GROUP_LN ? one.example_sq[k] : 0;
        row[b] = one.row[0];
        add_ln(&w, sum[(FIRST + b) % WORLD_SOURCES], one.grad);
        CHECK_CLOSE(row[b].sq, sq, 1e-12, 0);
        CHECK(row[b].nll == one.loss, "row %d: %g, its loss is %g", b, row[b].nll, one.loss);
        free(one.grad);
    }
    for (int micro_batch = 1; micro_batch <= ROWS; micro_batch++) {
        Outcome o = measure_rows(&w, engine, 0, ROWS, micro_batch);
        CHECK(o.loss == loss, "micro-batch %d: loss %.17g, row by row %.17g", micro_batch, o.loss, loss);
        for (int k = 0; k < w.model.tensor_count; k++) CHECK_CLOSE(o.example_sq[k], example_sq[k], 1e-6, example_sq[k]);
        CHECK(!memcmp(o.row, row, sizeof row), "micro-batch %d: the rows' own numbers differ", micro_batch);
        check_gram(&w, o.source_gram, sum);
        Outcome off = measure_rows(&w, without, 0, ROWS, micro_batch);
        CHECK(!memcmp(o.grad, off.grad, w.model.flat_count * sizeof(float)), "sources change the gradient");
        CHECK(!memcmp(o.row, off.row, sizeof row) && off.source_gram[0] == 0, "sources change the rows");
        free(off.grad);
        free(o.grad);
    }
    for (int s = 0; s < WORLD_SOURCES; s++) free(sum[s]);
    engine_destroy(without);
    engine_destroy(engine);
    world_close(&w);
}

// Compares losses and logits of a row of documents with each document alone, in an engine without the mask. The row
// begins within a document.
static void check_packed(World *w, const int *lengths) {
    float packed[T], alone[T], logits[2][50];
    Engine *mask = masked_engine(w, 0, true), *plain = masked_engine(w, 0, false);
    for (int t = 0; t <= T; t++) w->tokens[t] = (uint16_t)(w->tokens[t] == SEPARATOR ? 0 : w->tokens[t]);
    for (int i = 0, t = lengths[0]; t < T; t += lengths[++i]) w->tokens[t] = SEPARATOR;
    CHECK_OK(engine_eval(mask, w->tokens, 1, T, packed, &e), &e);
    for (int i = 0, begin = 0; begin < T; begin += lengths[i++]) {
        CHECK_OK(engine_eval(plain, w->tokens + begin, 1, lengths[i], alone, &e), &e);
        for (int t = 0; t < lengths[i]; t++) CHECK_CLOSE(packed[begin + t], alone[t], 1e-5, 1);
        for (int n = 1; n <= lengths[i]; n++) { // the engine `mask` reuses the packed row's keys and values
            CHECK_OK(engine_logits(mask, w->tokens, begin + n, logits[0], &e), &e);
            CHECK_OK(engine_logits(plain, w->tokens + begin, n, logits[1], &e), &e);
            for (int v = 0; v < 50; v++) CHECK_CLOSE(logits[0][v], logits[1][v], 1e-5, 1);
        }
    }
    engine_destroy(mask), engine_destroy(plain);
}

static void test_packed(void) {
    World w = world_of(shape, T, ROWS, 3);
    check_packed(&w, (const int[]){T});
    check_packed(&w, (const int[]){20, 1, 1, 33, T - 55});
    check_packed(&w, (const int[]){1, 12, 47, T - 60});
    world_close(&w);
}

int main(void) {
    RUN(test_spans, test_micro_batches, test_packed);
    return test_summary();
}
