#define _POSIX_C_SOURCE 200809L
#include "run/metrics.h"

#include "base/files.h"
#include "text/hellaswag.h"
#include "gns/noise.h"
#include "run/lock.h"
#include "run/tensorboard.h"
#include "base/text.h"

#include <cjson/cJSON.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

// ---------------------------------------------------------------------------------------------------------------------
// The numbers of a step, under their names in metrics.jsonl, which are the columns of metrics.csv too.
// C(name, TensorBoard's tag; "": not shown there)

#define ESTIMATE_COLUMNS(C, name, tag)                                                                                 \
    C(name, tag)                                                                                                       \
    C(name##_se, tag "_standard_error")                                                                                \
    C(name##_lower, tag "_lower_bound")                                                                                \
    C(name##_g2, "")                                                                                                   \
    C(name##_s, "")

#define METRICS_COLUMNS(C)                                                                                             \
    C(step, "")                                                                                                        \
    C(tokens, "progress/tokens")                                                                                       \
    C(examples, "")                                                                                                    \
    C(batch, "progress/batch_rows")                                                                                    \
    C(loss, "loss/train")                                                                                              \
    C(lr, "optimizer/lr")                                                                                              \
    C(grad_norm, "optimizer/grad_norm")                                                                                \
    C(tok_per_s, "speed/tok_per_s")                                                                                    \
    C(mfu, "speed/mfu")                                                                                                \
    C(skipped, "")                                                                                                     \
    ESTIMATE_COLUMNS(C, gns_ln, "gns/ln")                                                                              \
    ESTIMATE_COLUMNS(C, gns_ranks, "gns/ranks")                                                                        \
    ESTIMATE_COLUMNS(C, gns_total, "gns/total")                                                                        \
    C(gns_ratio, "gns/ratio_total_to_ln")                                                                              \
    C(val_loss, "loss/val")                                                                                            \
    C(hellaswag, "test/hellaswag_acc")                                                                                 \
    C(hellaswag_norm, "test/hellaswag_acc_norm")

#define C(name, tag) COLUMN_##name,
typedef enum { METRICS_COLUMNS(C) COLUMN_COUNT } Column;
#undef C

static const struct {
    const char *name, *tag;
} columns[COLUMN_COUNT] = {
#define C(name, tag) {#name, tag},
    METRICS_COLUMNS(C)
#undef C
};

// One step; NaN: not known, or not measured at this step.
typedef struct {
    double column[COLUMN_COUNT];
    double type[GROUP_COUNT]; // gns_type_embedding and so on
} Row;

struct Metrics {
    int fd, csv_fd;
    int64_t bytes; // of metrics.jsonl
    FILE *file;    // over `line`: the line under way
    char *line;
    size_t line_bytes;
    Row row; // the step under way
    TensorBoard *tensorboard;
    char directory[PATH_MAX], path[PATH_MAX], csv_path[PATH_MAX], samples_path[PATH_MAX];
};

static void row_clear(Row *row) {
    for (int i = 0; i < COLUMN_COUNT; i++) row->column[i] = NAN;
    for (int i = 0; i < GROUP_COUNT; i++) row->type[i] = NAN;
}

static int cannot_write(const char *path, Error *e) {
    return FAIL(e, ERR_WRITE, "check --out", "%s: cannot write: %s", path, strerror(errno));
}

static int no_memory(const Metrics *m, Error *e) {
    return FAIL(e, ERR_MEMORY, "free some memory", "%s: no memory for a line", m->path);
}

// ---------------------------------------------------------------------------------------------------------------------
// Opening and closing

static int open_locked(Metrics *m, const char *directory, bool *may_go, Error *e) {
    TRY(path_join(m->path, sizeof m->path, directory, "metrics.jsonl", e));
    TRY(path_join(m->csv_path, sizeof m->csv_path, directory, "metrics.csv", e));
    TRY(path_join(m->samples_path, sizeof m->samples_path, directory, "samples.jsonl", e));
    strcpy(m->directory, directory); // which is shorter
    TRY(file_open_output(m->path, O_WRONLY | O_CREAT | O_APPEND, &m->fd, e));
    TRY(run_lock_take(m->fd, m->path, directory, may_go, e));
    m->bytes = lseek(m->fd, 0, SEEK_END);
    if (m->bytes < 0) return cannot_write(m->path, e);
    m->file = open_memstream(&m->line, &m->line_bytes);
    return m->file ? 0 : no_memory(m, e);
}

int metrics_open(Metrics **out, const char *directory, bool *may_go, Error *e) {
    Metrics *m;
    *out = NULL;
    *may_go = false;
    TRY(memory_alloc_zero((void **)&m, sizeof *m, "metrics", e));
    m->fd = m->csv_fd = -1;
    row_clear(&m->row);
    int code = open_locked(m, directory, may_go, e);
    if (code) metrics_close(m, &(Error){0});
    else *out = m;
    return code;
}

int metrics_tensorboard(Metrics *m, int64_t first_step, Error *e) {
    return tensorboard_create(&m->tensorboard, m->directory, first_step, e);
}

int64_t metrics_bytes(const Metrics *m) { return m->bytes; }

// Behind a name that metrics_step or its like has written.
static bool number_behind(const char *line, const char *name, double *x) {
    const char *at = strstr(line, name);
    char *end = NULL;
    if (at) *x = strtod(at + strlen(name), &end);
    return at && end > at + strlen(name);
}

int metrics_losses(const Metrics *m, void (*each)(void *context, double tokens, double loss), void *context, Error *e) {
    char *line = NULL;
    size_t room = 0;
    double tokens, loss;
    FILE *f = fopen(m->path, "re");
    if (!f) return FAIL(e, ERR_INPUT, "check its permissions", "%s: cannot read: %s", m->path, strerror(errno));
    while (getline(&line, &room, f) > 0)
        if (number_behind(line, "\"tokens\": ", &tokens) && number_behind(line, "\"loss\": ", &loss))
            each(context, tokens, loss);
    free(line);
    fclose(f);
    return 0;
}

int metrics_sync(const Metrics *m, Error *e) {
    TRY(descriptor_sync(m->csv_fd, m->csv_path, e));
    return descriptor_sync(m->fd, m->path, e);
}

int metrics_close(Metrics *m, Error *e) {
    if (!m) return 0;
    int code = tensorboard_close(m->tensorboard, e);
    if (m->csv_fd >= 0 && close(m->csv_fd) != 0 && errno != EINTR) code = cannot_write(m->csv_path, e);
    if (m->fd >= 0 && close(m->fd) != 0 && errno != EINTR) code = cannot_write(m->path, e);
    if (m->file) fclose(m->file);
    free(m->line);
    memory_free(m);
    return code;
}

// ---------------------------------------------------------------------------------------------------------------------
// metrics.csv

static void put_csv_header(FILE *f) {
    for (int i = 0; i < COLUMN_COUNT; i++) fprintf(f, "%s%s", i ? "," : "", columns[i].name);
    for (int i = 0; i < GROUP_COUNT; i++) fprintf(f, ",gns_type_%s", group_names[i]);
    fputc('\n', f);
}

// As all files have it. JSON has no infinity, and a number that some readers refuse would cost them the whole file.
static void write_number(FILE *f, double x, const char *unknown) {
    const double unbounded = 1e308;
    if (isnan(x)) fputs(unknown, f);
    else fprintf(f, "%.17g", isinf(x) ? copysign(unbounded, x) : x);
}

static void put_csv_number(FILE *f, const char *before, double x) {
    fputs(before, f);
    write_number(f, x, "");
}

static void put_csv_row(FILE *f, const Row *row) {
    for (int i = 0; i < COLUMN_COUNT; i++) put_csv_number(f, i ? "," : "", row->column[i]);
    for (int i = 0; i < GROUP_COUNT; i++) put_csv_number(f, ",", row->type[i]);
    fputc('\n', f);
}

// A line of metrics.jsonl into the row, which keeps what the line does not tell of.
static void row_read(Row *row, const cJSON *line) {
    for (int i = 0; i < COLUMN_COUNT; i++) {
        const cJSON *item = cJSON_GetObjectItemCaseSensitive(line, columns[i].name);
        if (cJSON_IsNumber(item)) row->column[i] = item->valuedouble;
        else if (cJSON_IsBool(item)) row->column[i] = cJSON_IsTrue(item);
    }
    for (int i = 0; i < GROUP_COUNT; i++) {
        char name[64];
        snprintf(name, sizeof name, "gns_type_%s", group_names[i]);
        const cJSON *item = cJSON_GetObjectItemCaseSensitive(line, name);
        if (cJSON_IsNumber(item)) row->type[i] = item->valuedouble;
    }
}

// The rows of all that metrics.jsonl holds. Lines of one step make one row.
static void put_csv_rows(FILE *csv, FILE *jsonl) {
    char *line = NULL;
    size_t room = 0;
    Row row;
    row_clear(&row);
    while (getline(&line, &room, jsonl) > 0) {
        cJSON *object = cJSON_Parse(line);
        double step = cJSON_GetNumberValue(cJSON_GetObjectItemCaseSensitive(object, columns[COLUMN_step].name));
        if (isfinite(row.column[COLUMN_step]) && step != row.column[COLUMN_step]) {
            put_csv_row(csv, &row);
            row_clear(&row);
        }
        row_read(&row, object);
        if (isnan(row.column[COLUMN_skipped])) row.column[COLUMN_skipped] = 0;
        cJSON_Delete(object);
    }
    if (isfinite(row.column[COLUMN_step])) put_csv_row(csv, &row);
    free(line);
}

static int make_csv(Metrics *m, Error *e) {
    char *text = NULL;
    size_t bytes = 0;
    FILE *jsonl = fopen(m->path, "re"), *csv = open_memstream(&text, &bytes);
    int code = 0;
    if (!jsonl) code = FAIL(e, ERR_INPUT, "check its permissions", "%s: cannot read: %s", m->path, strerror(errno));
    else if (!csv) code = no_memory(m, e);
    else put_csv_header(csv), put_csv_rows(csv, jsonl);
    if (jsonl) fclose(jsonl);
    if (csv && fclose(csv) != 0 && !code) code = no_memory(m, e);
    if (!code) code = file_replace(m->csv_path, text, bytes, e);
    free(text);
    return code ? code : file_open_output(m->csv_path, O_WRONLY | O_APPEND, &m->csv_fd, e);
}

// ---------------------------------------------------------------------------------------------------------------------
// Going on from a checkpoint

// How many bytes of a file of lines tell of the first `step` steps: up to a later one, or one that a machine that failed
// left unfinished. 0 where there is no file.
static int bytes_until(const char *path, int64_t step, off_t *keep, Error *e) {
    static const char begin[] = "{\"step\": ";
    char *line = NULL;
    size_t room = 0;
    *keep = 0;
    FILE *f = fopen(path, "re");
    if (!f && errno == ENOENT) return 0;
    if (!f) return FAIL(e, ERR_INPUT, "check its permissions", "%s: cannot read: %s", path, strerror(errno));
    for (ssize_t n; (n = getline(&line, &room, f)) > 0; *keep += n)
        if (line[n - 1] != '\n' || strncmp(line, begin, strlen(begin)) != 0 || atoll(line + strlen(begin)) > step)
            break;
    free(line);
    fclose(f);
    return 0;
}

// Better to know at once than at the first sample.
static int can_append(const char *path, Error *e) {
    int fd;
    if (!file_exists(path)) return 0;
    TRY(file_open_output(path, O_WRONLY | O_APPEND, &fd, e));
    close(fd);
    return 0;
}

int metrics_begin(Metrics *m, int64_t step, int64_t bytes, Error *e) {
    off_t keep;
    TRY(run_lock_sign(m->directory, e));
    // By steps as well: the checkpoint may have come from another directory, whose file was longer.
    TRY(bytes_until(m->path, step, &keep, e));
    if (keep > bytes) keep = (off_t)bytes;
    if (m->bytes > keep && ftruncate(m->fd, keep) != 0) return cannot_write(m->path, e);
    m->bytes = keep;
    if (step == 0) { // a new run: what else lies there is not ours to cut
        TRY(can_append(m->samples_path, e));
        return make_csv(m, e);
    }
    TRY(bytes_until(m->samples_path, step, &keep, e));
    TRY(file_cut(m->samples_path, keep, e));
    TRY(tensorboard_cut(m->directory, step, e));
    return make_csv(m, e);
}

// ---------------------------------------------------------------------------------------------------------------------
// Lines

// An empty line under way.
static FILE *begin_text(Metrics *m) {
    rewind(m->file);
    return m->file;
}

// It goes to the descriptor whole: a run that is killed leaves no half line that a buffer held back.
static int write_text(Metrics *m, int fd, const char *path, Error *e) {
    return fflush(m->file) == 0 ? write_all(fd, m->line, m->line_bytes, path, e) : no_memory(m, e);
}

static void put_number(FILE *f, const char *before, const char *name, double x) {
    fprintf(f, ", \"%s%s\": ", before, name);
    write_number(f, x, "null");
}

static void put_columns(FILE *f, const Row *row, Column first, Column last) {
    for (int i = (int)first; i <= (int)last; i++) put_number(f, "", columns[i].name, row->column[i]);
}

static FILE *begin_line(Metrics *m, int64_t step, int64_t tokens) {
    FILE *f = begin_text(m);
    fprintf(f, "{\"%s\": %lld", columns[COLUMN_step].name, (long long)step);
    put_number(f, "", columns[COLUMN_tokens].name, (double)tokens);
    return f;
}

// Of metrics.jsonl.
static int end_line(Metrics *m, Error *e) {
    fputs("}\n", m->file);
    TRY(write_text(m, m->fd, m->path, e));
    m->bytes += (int64_t)m->line_bytes;
    return 0;
}

// The five columns of an estimate, of which `first` is the first.
static void set_estimate(Row *row, Column first, const GnsTracker *t) {
    GnsEstimate g = gns_estimate(t);
    const double values[] = {g.scale, g.scale_se, g.valid ? g.lower : NAN, g.g2, g.s};
    memcpy(&row->column[first], values, sizeof values);
}

static void set_step(Row *row, const StepMetrics *s) {
    row_clear(row);
    row->column[COLUMN_step] = (double)s->step;
    row->column[COLUMN_tokens] = (double)s->tokens;
    row->column[COLUMN_examples] = (double)s->examples;
    row->column[COLUMN_batch] = (double)s->batch;
    row->column[COLUMN_loss] = s->loss;
    row->column[COLUMN_lr] = s->lr;
    row->column[COLUMN_grad_norm] = s->grad_norm;
    row->column[COLUMN_tok_per_s] = s->tok_per_s;
    row->column[COLUMN_mfu] = s->mfu;
    row->column[COLUMN_skipped] = s->skipped;
}

static void set_sampled(Row *row, const Noise *noise) {
    set_estimate(row, COLUMN_gns_total, &noise->calibration.total);
    for (int i = 0; i < GROUP_COUNT; i++) row->type[i] = gns_estimate(&noise->type[i]).scale;
}

static void put_sampled(FILE *f, const Row *row, const Noise *noise) {
    put_columns(f, row, COLUMN_gns_total, COLUMN_gns_total_s);
    for (int i = 0; i < GROUP_COUNT; i++) put_number(f, "gns_type_", group_names[i], row->type[i]);
    fputs(", \"gns_layer\": [", f);
    for (int l = 0; l < noise->layers; l++) {
        if (l) fputs(", ", f);
        write_number(f, gns_estimate(&noise->layer[l]).scale, "null");
    }
    fputs("]", f);
}

static void show_sampled(TensorBoard *tb, const Row *row, const Noise *noise) {
    char tag[64];
    for (int i = 0; i < GROUP_COUNT; i++) {
        snprintf(tag, sizeof tag, "gns_by_type/%s", group_names[i]);
        tensorboard_scalar(tb, tag, row->type[i]);
    }
    for (int l = 0; l < noise->layers; l++) {
        snprintf(tag, sizeof tag, "gns_by_layer/%02d", l);
        tensorboard_scalar(tb, tag, gns_estimate(&noise->layer[l]).scale);
    }
}

int metrics_step(Metrics *m, const StepMetrics *s, const Noise *noise, GnsMode mode, Error *e) {
    Row *row = &m->row;
    set_step(row, s);
    FILE *f = begin_line(m, s->step, s->tokens);
    put_columns(f, row, COLUMN_examples, COLUMN_mfu);
    if (s->skipped) fputs(", \"skipped\": true", f);
    if (mode != GNS_OFF) {
        set_estimate(row, COLUMN_gns_ln, &noise->ln);
        put_columns(f, row, COLUMN_gns_ln, COLUMN_gns_ln_s);
    }
    if (s->ranks_measured) {
        set_estimate(row, COLUMN_gns_ranks, &noise->ranks);
        put_columns(f, row, COLUMN_gns_ranks, COLUMN_gns_ranks_s);
    }
    bool sampled = mode == GNS_EXACT && !s->skipped;
    if (sampled || (mode != GNS_OFF && noise->fixed_ratio > 0)) {
        row->column[COLUMN_gns_ratio] = noise_ratio(noise);
        put_columns(f, row, COLUMN_gns_ratio, COLUMN_gns_ratio);
    }
    if (sampled) {
        set_sampled(row, noise);
        put_sampled(f, row, noise);
        if (m->tensorboard) show_sampled(m->tensorboard, row, noise);
    }
    return end_line(m, e);
}

int metrics_val(Metrics *m, int64_t step, int64_t tokens, double val_loss, Error *e) {
    m->row.column[COLUMN_val_loss] = val_loss;
    put_columns(begin_line(m, step, tokens), &m->row, COLUMN_val_loss, COLUMN_val_loss);
    return end_line(m, e);
}

int metrics_hellaswag(Metrics *m, int64_t step, int64_t tokens, const HellaSwagScore *s, Error *e) {
    m->row.column[COLUMN_hellaswag] = (double)s->correct / s->questions;
    m->row.column[COLUMN_hellaswag_norm] = (double)s->correct_norm / s->questions;
    put_columns(begin_line(m, step, tokens), &m->row, COLUMN_hellaswag, COLUMN_hellaswag_norm);
    return end_line(m, e);
}

int metrics_end_step(Metrics *m, Error *e) {
    put_csv_row(begin_text(m), &m->row);
    TRY(write_text(m, m->csv_fd, m->csv_path, e));
    if (!m->tensorboard) return 0;
    for (int i = 0; i < COLUMN_COUNT; i++)
        if (*columns[i].tag) tensorboard_scalar(m->tensorboard, columns[i].tag, m->row.column[i]);
    return tensorboard_write(m->tensorboard, (int64_t)m->row.column[COLUMN_step], e);
}

// ---------------------------------------------------------------------------------------------------------------------
// Texts

int metrics_command(Metrics *m, int64_t first_step, const char *command, Error *e) {
    return m->tensorboard ? tensorboard_text(m->tensorboard, first_step, "command", command, e) : 0;
}

// On the disk at once: samples are few, and nothing else holds them.
static int append_sample(Metrics *m, Error *e) {
    int fd;
    TRY(file_open_output(m->samples_path, O_WRONLY | O_CREAT | O_APPEND, &fd, e));
    int code = write_text(m, fd, m->samples_path, e);
    if (!code) code = descriptor_sync(fd, m->samples_path, e);
    close(fd);
    return code;
}

static int show_sample(Metrics *m, int64_t step, const char *text, Error *e) {
    text_write_utf8(begin_text(m), text);
    fputc(0, m->file);
    if (fflush(m->file) != 0) return no_memory(m, e);
    return tensorboard_text(m->tensorboard, step, "sample", m->line, e);
}

int metrics_sample(Metrics *m, int64_t step, int64_t tokens, const char *prompt, const char *text, Error *e) {
    FILE *f = begin_line(m, step, tokens);
    fputs(", \"prompt\": ", f);
    text_write_json(f, prompt);
    fputs(", \"text\": ", f);
    text_write_json(f, text);
    fputs("}\n", f);
    TRY(append_sample(m, e));
    return m->tensorboard ? show_sample(m, step, text, e) : 0;
}
