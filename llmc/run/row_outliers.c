#include "run/run.h"

#include "base/files.h"
#include "checkpoint/checkpoint.h"

#include <stdlib.h>

// Counts the tokens of 1,024 windows at equal distances: the same on every rank and at every resume. Counts start at 1.
int row_outliers_create(Run *r, Error *e) {
    RowOutliers *o = &r->position.outliers;
    const uint64_t all = r->data.train->info.windows, windows = all < 1024 ? all : 1024;
    const int T = r->shape.seq_len, V = r->model.config.vocab;
    const size_t rows = (size_t)r->position.ramp.config.batch_max;
    TRY(memory_alloc_zero((void **)&o->surprise, ((size_t)V + 3 * rows) * sizeof *o->surprise, "outliers", e));
    o->rarity = o->surprise + V;
    for (uint64_t i = 0; i < windows; i++) {
        TRY(dataset_window(r->data.train, i * all / windows, 0, r->data.rows, e));
        for (int t = 0; t < T; t++) o->surprise[r->data.rows[t]]++;
    }
    for (int v = 0; v < V; v++) o->surprise[v] = log(((double)windows * T + V) / (1 + o->surprise[v]));
    for (int k = 0; k < ROW_KINDS; k++)
        if (!o->list[k]) o->list[k] = cJSON_CreateArray();
    return 0;
}

static int compare_numbers(const void *a, const void *b) {
    return (*(const double *)a > *(const double *)b) - (*(const double *)a < *(const double *)b);
}

static double median(double *x, int64_t n) {
    qsort(x, (size_t)n, sizeof *x, compare_numbers);
    return (x[(n - 1) / 2] + x[n / 2]) / 2;
}

// Adds row b of the step to a list if its score x is among the N largest. If scores are equal, the earlier row stays.
static int keep_row(Run *r, RowKind kind, int64_t B, int64_t b, double x, Error *e) {
    RowOutliers *o = &r->position.outliers;
    const int most = (int)r->options.outliers;
    const Dataset *data = r->data.train;
    const Tokenizer *tokenizer = r->tokenizer;
    const int end = checkpoint_end_of_text(r->model.config.vocab, tokenizer ? tokenizer->eot : -1);
    const uint64_t example = (uint64_t)(r->at.examples - B + b);
    cJSON *list = o->list[kind], *next = list->child, *row;
    ExamplePlace place;
    int at = 0;
    worker_join(&r->data.reader); // only one thread may read
    TRY(dataset_place(data, example, end, &place, e));
    if (!(row = cJSON_CreateObject())) return FAIL(e, ERR_MEMORY, "free some memory", "no memory for a row");
    cJSON_AddStringToObject(row, "kind", row_kinds[kind]);
    cJSON_AddNumberToObject(row, "step", (double)r->at.step);
    cJSON_AddStringToObject(row, "source", data->source[dataset_example_source(data, example)].files);
    cJSON_AddStringToObject(row, "shard", place.shard->path);
    cJSON_AddNumberToObject(row, "document", place.document < 0 ? NAN : (double)place.document); // NaN becomes null
    cJSON_AddNumberToObject(row, "offset", (double)place.offset);
    cJSON_AddNumberToObject(row, "norm", sqrt(r->position.rows[b].sq));
    cJSON_AddNumberToObject(row, "loss", r->position.rows[b].nll);
    cJSON_AddNumberToObject(row, "score", x);
    for (; next && cJSON_GetNumberValue(json_get(next, "score")) >= x; next = next->next) at++;
    row->prev = row; // cJSON 1.7.17 inserts no item whose prev is NULL
    cJSON_InsertItemInArray(list, at, row);
    while (cJSON_GetArraySize(list) > most) cJSON_DeleteItemFromArray(list, most);
    if (cJSON_GetArraySize(list) == most) o->least[kind] = cJSON_GetNumberValue(json_get(list->child->prev, "score"));
    return 0;
}

int row_outliers_observe(Run *r, int64_t B, Error *e) {
    const int64_t first_steps = 32; // no row of these steps is judged, as the spread is still a guess
    RowOutliers *o = &r->position.outliers;
    double *x = o->rarity + r->position.ramp.config.batch_max, *sorted = x + B;
    for (RowKind k = 0; k < ROW_KINDS; k++) {
        Outliers *window = &o->spread[k];
        double spread = 0;
        for (int64_t b = 0; b < B; b++) {
            const RowResult *row = &r->position.rows[b];
            const double norm = log(row->sq) / 2, loss = row->nll;
            sorted[b] = x[b] = (double[]){norm, row->rarity, loss - norm, norm - log(loss)}[k];
        }
        const double centre = median(sorted, B);
        for (int64_t b = 0; b < B; b++) sorted[b] = fabs(x[b] - centre);
        window->value[window->count++ % OUTLIERS_WINDOW] = median(sorted, B);
        const int64_t steps = window->count < OUTLIERS_WINDOW ? window->count : OUTLIERS_WINDOW;
        for (int64_t i = 0; i < steps; i++) spread += window->value[i] / (double)steps;
        for (int64_t b = 0; b < B && window->count > first_steps; b++) {
            const double score = round((x[b] - centre) / (1.4826 * spread) * 1e9) / 1e9; // a resume reads it back equal
            if (isfinite(score) && score > o->least[k]) TRY(keep_row(r, k, B, b, score, e));
        }
    }
    return 0;
}

int row_outliers_write(const Run *r, Error *e) {
    const cJSON *row;
    Text text;
    TRY(text_begin(&text, e));
    for (int k = 0; k < ROW_KINDS; k++) cJSON_ArrayForEach(row, r->position.outliers.list[k]) {
            char *line = cJSON_PrintUnformatted(row);
            fprintf(text.f, "%s\n", line ? line : "");
            cJSON_free(line);
        }
    int code = text_end(&text, e);
    if (!code) code = file_replace(r->archive.dir, "outliers.jsonl", text.text, text.bytes, e);
    text_free(&text);
    return code;
}
