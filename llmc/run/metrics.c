#include "run/metrics.h"

#include "base/files.h"
#include "text/hellaswag.h"
#include "gns/noise.h"
#include "run/lock.h"
#include "base/text.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct Metrics {
    int fd;
    int64_t bytes; // of metrics.jsonl
    FILE *file;    // a memory stream over `line`: the line being written
    char *line;
    size_t line_bytes;
    char directory[PATH_MAX], path[PATH_MAX], samples_path[PATH_MAX];
};

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
    m->fd = -1;
    int code = open_locked(m, directory, may_go, e);
    if (code) metrics_close(m, &(Error){0});
    else *out = m;
    return code;
}

int64_t metrics_bytes(const Metrics *m) { return m->bytes; }

// The number after a name that metrics_step wrote.
static bool number_after(const char *line, const char *name, double *x) {
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
        if (number_after(line, "\"tokens\": ", &tokens) && number_after(line, "\"loss\": ", &loss))
            each(context, tokens, loss);
    free(line);
    fclose(f);
    return 0;
}

int metrics_sync(const Metrics *m, Error *e) { return descriptor_sync(m->fd, m->path, e); }

int metrics_close(Metrics *m, Error *e) {
    if (!m) return 0;
    int code = 0;
    if (m->fd >= 0 && close(m->fd) != 0 && errno != EINTR) code = cannot_write(m->path, e);
    if (m->file) fclose(m->file);
    free(m->line);
    memory_free(m);
    return code;
}

// ---------------------------------------------------------------------------------------------------------------------
// Resuming

// *keep: the bytes of a log up to the first line that is of a later step than `step`, or incomplete since a machine
// failed. 0 without a file.
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

// Fails at the start of a run rather than at its first sample.
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
    if (step == 0) return can_append(m->samples_path, e); // a new run keeps the lines of an older samples.jsonl
    TRY(bytes_until(m->samples_path, step, &keep, e));
    return file_cut(m->samples_path, keep, e);
}

// ---------------------------------------------------------------------------------------------------------------------
// Lines

// The whole line in one call: a run that is killed leaves no half line that a buffer held back.
static int write_line(Metrics *m, int fd, const char *path, Error *e) {
    fputs("}\n", m->file);
    return fflush(m->file) == 0 ? write_all(fd, m->line, m->line_bytes, path, e) : no_memory(m, e);
}

// JSON has no infinity: 1e308 stands for it, since a number that some readers refuse would cost them the whole file.
static void put_value(FILE *f, double x) {
    const double unbounded = 1e308;
    if (isnan(x)) fputs("null", f);
    else fprintf(f, "%.17g", isinf(x) ? copysign(unbounded, x) : x);
}

static void put_number(FILE *f, const char *name, double x) {
    fprintf(f, ", \"%s\": ", name);
    put_value(f, x);
}

static FILE *begin_line(Metrics *m, int64_t step, int64_t tokens) {
    rewind(m->file);
    fprintf(m->file, "{\"step\": %lld", (long long)step);
    put_number(m->file, "tokens", (double)tokens);
    return m->file;
}

// Of metrics.jsonl.
static int end_line(Metrics *m, Error *e) {
    TRY(write_line(m, m->fd, m->path, e));
    m->bytes += (int64_t)m->line_bytes;
    return 0;
}

static void put_estimate(FILE *f, const char *name, const GnsTracker *t) {
    const GnsEstimate g = gns_estimate(t);
    const struct {
        const char *end;
        double x;
    } number[] = {{"", g.scale}, {"_se", g.scale_se}, {"_lower", g.valid ? g.lower : NAN}, {"_g2", g.g2}, {"_s", g.s}};
    for (size_t i = 0; i < sizeof number / sizeof *number; i++) {
        char key[64];
        snprintf(key, sizeof key, "%s%s", name, number[i].end);
        put_number(f, key, number[i].x);
    }
}

static void put_sampled(FILE *f, const Noise *noise) {
    put_estimate(f, "gns_total", &noise->calibration.total);
    for (int i = 0; i < GROUP_COUNT; i++) {
        char key[64];
        snprintf(key, sizeof key, "gns_type_%s", group_names[i]);
        put_number(f, key, gns_estimate(&noise->type[i]).scale);
    }
    fputs(", \"gns_layer\": [", f);
    for (int l = 0; l < noise->layers; l++) {
        if (l) fputs(", ", f);
        put_value(f, gns_estimate(&noise->layer[l]).scale);
    }
    fputs("]", f);
}

int metrics_step(Metrics *m, const StepMetrics *s, const Noise *noise, GnsMode mode, Error *e) {
    FILE *f = begin_line(m, s->step, s->tokens);
    put_number(f, "examples", (double)s->examples);
    put_number(f, "batch", (double)s->batch);
    put_number(f, "loss", s->loss);
    put_number(f, "lr", s->lr);
    put_number(f, "grad_norm", s->grad_norm);
    put_number(f, "tok_per_s", s->tok_per_s);
    put_number(f, "mfu", s->mfu);
    if (s->skipped) fputs(", \"skipped\": true", f);
    if (mode != GNS_OFF) put_estimate(f, "gns_ln", &noise->ln);
    if (s->ranks_measured) put_estimate(f, "gns_ranks", &noise->ranks);
    bool sampled = mode == GNS_EXACT && !s->skipped;
    if (sampled || (mode != GNS_OFF && noise->fixed_ratio > 0)) put_number(f, "gns_ratio", noise_ratio(noise));
    if (sampled) put_sampled(f, noise);
    return end_line(m, e);
}

int metrics_val(Metrics *m, int64_t step, int64_t tokens, double val_loss, Error *e) {
    put_number(begin_line(m, step, tokens), "val_loss", val_loss);
    return end_line(m, e);
}

int metrics_hellaswag(Metrics *m, int64_t step, int64_t tokens, const HellaSwagScore *s, Error *e) {
    FILE *f = begin_line(m, step, tokens);
    put_number(f, "hellaswag", (double)s->correct / s->questions);
    put_number(f, "hellaswag_norm", (double)s->correct_norm / s->questions);
    return end_line(m, e);
}

// On the disk at once: samples are few, and nothing else holds them.
int metrics_sample(Metrics *m, int64_t step, int64_t tokens, const char *prompt, const char *text, Error *e) {
    FILE *f = begin_line(m, step, tokens);
    fputs(", \"prompt\": ", f);
    text_write_json(f, prompt);
    fputs(", \"text\": ", f);
    text_write_json(f, text);
    int fd;
    TRY(file_open_output(m->samples_path, O_WRONLY | O_CREAT | O_APPEND, &fd, e));
    int code = write_line(m, fd, m->samples_path, e);
    if (!code) code = descriptor_sync(fd, m->samples_path, e);
    close(fd);
    return code;
}
