#define _POSIX_C_SOURCE 200809L
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
    Text line;     // being written
    char directory[PATH_MAX], path[PATH_MAX], samples_path[PATH_MAX];
};

static int cannot_write(const char *path, Error *e) {
    return FAIL(e, ERR_WRITE, "check --out", "%s: cannot write: %s", path, strerror(errno));
}

static int cannot_read(const char *path, Error *e) {
    return FAIL(e, ERR_INPUT, "check its permissions", "%s: cannot read: %s", path, strerror(errno));
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
    return m->bytes < 0 ? cannot_write(m->path, e) : 0;
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
    if (!f) return cannot_read(m->path, e);
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
    text_free(&m->line);
    memory_free(m);
    return code;
}

// ---------------------------------------------------------------------------------------------------------------------
// Resuming

// *keep: the bytes of a log before the first line that is of a step after `step`, or that is incomplete. 0 without a
// file.
static int bytes_until(const char *path, int64_t step, off_t *keep, Error *e) {
    static const char begin[] = "{\"step\": ";
    char *line = NULL;
    size_t room = 0;
    *keep = 0;
    FILE *f = fopen(path, "re");
    if (!f) return errno == ENOENT ? 0 : cannot_read(path, e);
    for (ssize_t n; (n = getline(&line, &room, f)) > 0; *keep += n)
        if (line[n - 1] != '\n' || strncmp(line, begin, strlen(begin)) != 0 || atoll(line + strlen(begin)) > step)
            break;
    free(line);
    fclose(f);
    return 0;
}

// Checks at the start of a run that its first sample can be written.
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
    // By steps as well as bytes: the checkpoint may be from another directory, with a longer file.
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

// Writes the line in one call, so that a killed run leaves no half line.
static int write_line(Metrics *m, int fd, const char *path, Error *e) {
    fputs("}\n", m->line.f);
    TRY(text_end(&m->line, e));
    return write_all(fd, m->line.text, m->line.bytes, path, e);
}

// JSON has no infinity, and some readers refuse a whole file for one: 1e308 stands for it.
static void put_value(FILE *f, double x) {
    const double unbounded = 1e308;
    if (isnan(x)) fputs("null", f);
    else fprintf(f, "%.17g", isinf(x) ? copysign(unbounded, x) : x);
}

static void put_number(FILE *f, const char *name, double x) {
    fprintf(f, ", \"%s\": ", name);
    put_value(f, x);
}

// *f: the stream of a new line, which write_line ends.
static int begin_line(Metrics *m, int64_t step, int64_t tokens, FILE **f, Error *e) {
    text_free(&m->line);
    TRY(text_begin(&m->line, e));
    *f = m->line.f;
    fprintf(*f, "{\"step\": %lld", (long long)step);
    put_number(*f, "tokens", (double)tokens);
    return 0;
}

static int end_metrics_line(Metrics *m, Error *e) {
    TRY(write_line(m, m->fd, m->path, e));
    m->bytes += (int64_t)m->line.bytes;
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

static void put_calibration(FILE *f, const Noise *noise) {
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

int metrics_step(Metrics *m, const StepMetrics *s, const Noise *noise, Error *e) {
    FILE *f;
    TRY(begin_line(m, s->step, s->tokens, &f, e));
    put_number(f, "examples", (double)s->examples);
    put_number(f, "batch", (double)s->batch);
    put_number(f, "loss", s->loss);
    put_number(f, "lr", s->lr);
    put_number(f, "grad_norm", s->grad_norm);
    put_number(f, "tok_per_s", s->tok_per_s);
    put_number(f, "mfu", s->mfu);
    if (s->skipped) fputs(", \"skipped\": true", f);
    if (s->mode != GNS_OFF) put_estimate(f, "gns_ln", &noise->ln);
    if (s->ranks_measured) put_estimate(f, "gns_ranks", &noise->ranks);
    bool calibrated = s->mode == GNS_EXACT && !s->skipped;
    if (calibrated || (s->mode != GNS_OFF && noise->fixed_ratio > 0)) put_number(f, "gns_ratio", noise_ratio(noise));
    if (calibrated) put_calibration(f, noise);
    return end_metrics_line(m, e);
}

int metrics_val(Metrics *m, int64_t step, int64_t tokens, double val_loss, Error *e) {
    FILE *f;
    TRY(begin_line(m, step, tokens, &f, e));
    put_number(f, "val_loss", val_loss);
    return end_metrics_line(m, e);
}

int metrics_hellaswag(Metrics *m, int64_t step, int64_t tokens, const HellaSwagScore *s, Error *e) {
    FILE *f;
    TRY(begin_line(m, step, tokens, &f, e));
    put_number(f, "hellaswag", (double)s->correct / s->questions);
    put_number(f, "hellaswag_norm", (double)s->correct_norm / s->questions);
    return end_metrics_line(m, e);
}

// Syncs at once: samples are few, and checkpoints do not have them.
int metrics_sample(Metrics *m, int64_t step, int64_t tokens, const char *prompt, const char *text, Error *e) {
    FILE *f;
    TRY(begin_line(m, step, tokens, &f, e));
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
