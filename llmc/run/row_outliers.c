#include "run/row_outliers.h"

#include "base/files.h"
#include "base/text.h"
#include "checkpoint/checkpoint.h"
#include "run/run.h"

#include <stdlib.h>

const char *const row_kinds[ROW_KINDS] = {"loud", "rare", "strange", "uniform"};

int row_outliers_create(RowOutliers *o, int64_t most, int64_t batch_max, int vocab, Error *e) {
    const size_t kept = ROW_KINDS * (size_t)most * sizeof **o->row,
                 numbers = (ROW_KINDS + 2) * (size_t)batch_max + (size_t)vocab;
    *o = (RowOutliers){.most = (int)most};
    TRY(memory_alloc((void **)o->row, kept + numbers * sizeof *o->scratch, "outliers", e));
    for (int k = 1; k < ROW_KINDS; k++) o->row[k] = o->row[0] + k * most;
    o->scratch = (double *)(o->row[0] + ROW_KINDS * most);
    o->rarity = o->scratch + (ROW_KINDS + 1) * batch_max;
    o->surprise = o->rarity + batch_max;
    return 0;
}

// Counts the tokens of 1,024 windows at equal distances: the same ones on every rank and at every resume. Every count
// starts at 1.
int row_outliers_count(Run *r, Error *e) {
    const uint64_t all = dataset_describe(r->data.train).windows, windows = all < 1024 ? all : 1024;
    const int T = r->setup.shape.seq_len, V = r->setup.model.config.vocab;
    double *surprise = r->position.outliers.surprise;
    for (int v = 0; v < V; v++) surprise[v] = 1;
    for (uint64_t i = 0; i < windows; i++) {
        TRY(dataset_rows_sequential(r->data.train, i * all / windows, 1, r->data.rows, e));
        for (int t = 0; t < T; t++) surprise[r->data.rows[t]]++;
    }
    for (int v = 0; v < V; v++) surprise[v] = log(((double)windows * T + V) / surprise[v]);
    return 0;
}

void row_outliers_read(RowOutliers *o, const uint16_t *rows, int n, int64_t first, int T) {
    for (int i = 0; i < n; i++, rows += T + 1) {
        double sum = 0;
        for (int t = 0; t < T; t++) sum += o->surprise[rows[t]];
        o->rarity[first + i] = sum / T;
    }
}

static int compare_numbers(const void *a, const void *b) {
    return (*(const double *)a > *(const double *)b) - (*(const double *)a < *(const double *)b);
}

static double median(double *x, int64_t n) {
    qsort(x, (size_t)n, sizeof *x, compare_numbers);
    return (x[(n - 1) / 2] + x[n / 2]) / 2;
}

// Turns the B values of a step into scores.
static void score(double *x, int64_t B, Outliers *window, double *sorted) {
    double spread = 0;
    memcpy(sorted, x, (size_t)B * sizeof *x);
    const double centre = median(sorted, B);
    for (int64_t b = 0; b < B; b++) sorted[b] = fabs(x[b] - centre);
    window->value[window->count++ % OUTLIERS_WINDOW] = median(sorted, B);
    const int64_t steps = window->count < OUTLIERS_WINDOW ? window->count : OUTLIERS_WINDOW;
    for (int64_t i = 0; i < steps; i++) spread += window->value[i] / (double)steps;
    for (int64_t b = 0; b < B; b++) x[b] = (x[b] - centre) / (1.4826 * spread);
}

int row_outliers_observe(Run *r, int64_t B, Error *e) {
    const int64_t first_steps = 32; // steps whose rows are not judged: the spread is a guess
    RowOutliers *o = &r->position.outliers;
    const RowResult *row = r->position.rows;
    double *x = o->scratch; // (kind, row), then what `score` sorts
    const Tokenizer *tokenizer = r->setup.tokenizer;
    const int separator =
        checkpoint_end_of_text(r->setup.model.config.vocab, tokenizer ? tokenizer_eot(tokenizer) : -1);
    for (int64_t b = 0; b < B; b++) {
        const double norm = log(row[b].sq) / 2, loss = row[b].nll;
        x[ROW_LOUD * B + b] = norm, x[ROW_RARE * B + b] = row[b].rarity;
        x[ROW_STRANGE * B + b] = loss - norm, x[ROW_UNIFORM * B + b] = norm - log(loss);
    }
    for (int k = 0; k < ROW_KINDS; k++) score(x + k * B, B, &o->spread[k], x + ROW_KINDS * B);
    for (int64_t i = 0; i < ROW_KINDS * B && o->spread[0].count > first_steps; i++, x++) {
        const int64_t b = i % B, kind = i / B;
        OutlierRow *list = o->row[kind];
        int at = o->count[kind];
        ExamplePlace place;
        if (!isfinite(*x) || *x <= 0) continue;
        if (at == o->most && *x <= list[--at].score) continue; // of equal scores the earlier stays
        loader_expect(r->data.loader, 0, 0);                   // waits for the loader's thread: only one may read
        TRY(dataset_place(r->data.train, (uint64_t)(r->position.at.examples - B + b), separator, &place, e));
        if (at == o->count[kind]) o->count[kind]++;
        for (; at > 0 && list[at - 1].score < *x; at--) list[at] = list[at - 1];
        list[at] = (OutlierRow){.shard = place.shard, .offset = (double)place.offset, .score = *x};
        list[at].step = (double)r->position.at.step, list[at].document = (double)place.document;
        list[at].norm = sqrt(row[b].sq), list[at].loss = row[b].nll;
    }
    return 0;
}

int row_outliers_write(const Run *r, Error *e) {
    const RowOutliers *o = &r->position.outliers;
    const Dataset *data = r->data.train;
    Text text;
    TRY(text_begin(&text, e));
    for (int i = 0; i < ROW_KINDS * o->most; i++) {
        const int kind = i / o->most;
        const OutlierRow *x = &o->row[0][i];
        if (i % o->most >= o->count[kind]) continue;
        int s = 0, shard = (int)x->shard; // shard: number within source s
        for (; shard >= dataset_source(data, s).shards; s++) shard -= dataset_source(data, s).shards;
        fprintf(text.f, "{\"kind\": \"%s\", \"step\": %.0f, \"source\": ", row_kinds[kind], x->step);
        text_write_json(text.f, dataset_source(data, s).files);
        fputs(", \"shard\": ", text.f);
        text_write_json(text.f, dataset_shard_path(data, (int)x->shard));
        fprintf(text.f, x->document < 0 ? ", \"document\": null" : ", \"document\": %.0f", x->document);
        fprintf(text.f, ", \"offset\": %.0f, \"norm\": %.17g, \"loss\": %.17g, \"score\": %.17g}\n", x->offset, x->norm,
                x->loss, x->score);
    }
    int code = text_end(&text, e);
    if (!code) code = file_replace(r->saving.archive.dir, "outliers.jsonl", text.text, text.bytes, e);
    text_free(&text);
    return code;
}
