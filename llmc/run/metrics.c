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
    Text line;     // being written, each at the beginning of the stream
    char directory[PATH_MAX], path[PATH_MAX], samples_path[PATH_MAX];
};

static int cannot_write(const char *path, Error *e) {
    return FAIL(e, ERR_WRITE, "check --out", "%s: cannot write: %s", path, strerror(errno));
}

static int cannot_read(const char *path, Error *e) {
    return FAIL(e, ERR_INPUT, "check its permissions", "%s: cannot read: %s", path, strerror(errno));
}

// ---- Opening and closing --------------------------------------------------------------------------------------------

int metrics_open(Metrics **out, const char *directory, bool *may_go, Error *e) {
    Metrics *m;
    int code = 0;
    *out = NULL;
    *may_go = false;
    TRY(memory_alloc_zero((void **)&m, sizeof *m, "metrics", e));
    m->fd = -1;
    TRY_GOTO(path_join(m->path, sizeof m->path, directory, "metrics.jsonl", e));
    TRY_GOTO(path_join(m->samples_path, sizeof m->samples_path, directory, "samples.jsonl", e));
    strcpy(m->directory, directory); // shorter than these
    TRY_GOTO(file_open_output(m->path, O_WRONLY | O_CREAT | O_APPEND, &m->fd, e));
    TRY_GOTO(run_lock_take(m->fd, m->path, directory, may_go, e));
    m->bytes = lseek(m->fd, 0, SEEK_END);
    TRY_GOTO(m->bytes < 0 ? cannot_write(m->path, e) : text_begin(&m->line, e));
    *out = m;
done:
    if (code) metrics_close(m, &(Error){0});
    return code;
}

int64_t metrics_bytes(const Metrics *m) { return m->bytes; }

int metrics_losses(const Metrics *m, void (*each)(void *context, double tokens, double loss), void *context, Error *e) {
    char *line = NULL;
    size_t room = 0;
    double tokens, loss;
    FILE *f = fopen(m->path, "re");
    if (!f) return cannot_read(m->path, e);
    while (getline(&line, &room, f) > 0)
        if (sscanf(line, "{\"step\": %*d, \"tokens\": %lf, \"examples\": %*f, \"batch\": %*f, \"loss\": %lf", &tokens,
                   &loss) == 2) // a line of metrics_step
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

// ---- Resuming -------------------------------------------------------------------------------------------------------

// *keep: the bytes of a log before the first line that is of a step after `step`, or that is incomplete. 0 without a
// file.
static int bytes_until(const char *path, int64_t step, off_t *keep, Error *e) {
    char *line = NULL;
    size_t room = 0;
    long long at;
    uint64_t size;
    int fd;
    *keep = 0;
    if (!file_exists(path)) return 0;
    TRY(file_open_input(path, &fd, &size, e)); // not a FIFO
    FILE *f = fdopen(fd, "r");
    if (!f) return close(fd), cannot_read(path, e);
    for (ssize_t n; (n = getline(&line, &room, f)) > 0; *keep += n)
        if (line[n - 1] != '\n' || sscanf(line, "{\"step\": %lld", &at) != 1 || at > step) break;
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

// ---- Lines ----------------------------------------------------------------------------------------------------------

// Writes the line in one call, so that a killed run leaves no half line.
static int write_line(Metrics *m, int fd, const char *path, Error *e) {
    fputs("}\n", m->line.f);
    if (fflush(m->line.f) == 0) return write_all(fd, m->line.text, m->line.bytes, path, e);
    return FAIL(e, ERR_MEMORY, "free some memory", "out of memory: a line of %s", path);
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

static FILE *begin_line(Metrics *m, int64_t step, int64_t tokens) {
    rewind(m->line.f);
    fprintf(m->line.f, "{\"step\": %lld", (long long)step);
    put_number(m->line.f, "tokens", (double)tokens);
    return m->line.f;
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
        fprintf(f, ", \"%s%s\": ", name, number[i].end);
        put_value(f, number[i].x);
    }
}

static void put_calibration(FILE *f, const Noise *noise) {
    put_estimate(f, "gns_total", &noise->calibration.total);
    for (int i = 0; i < GROUP_COUNT; i++) {
        fprintf(f, ", \"gns_type_%s\": ", group_names[i]);
        put_value(f, gns_estimate(&noise->type[i]).scale);
    }
    fputs(", \"gns_layer\": [", f);
    for (int l = 0; l < noise->layers; l++) {
        fputs(l ? ", " : "", f);
        put_value(f, gns_estimate(&noise->layer[l]).scale);
    }
    fputs("]", f);
}

int metrics_step(Metrics *m, const StepMetrics *s, const Noise *noise, Error *e) {
    FILE *f = begin_line(m, s->step, s->tokens);
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
    put_number(begin_line(m, step, tokens), "val_loss", val_loss);
    return end_metrics_line(m, e);
}

int metrics_hellaswag(Metrics *m, int64_t step, int64_t tokens, const HellaSwagScore *s, Error *e) {
    FILE *f = begin_line(m, step, tokens);
    put_number(f, "hellaswag", (double)s->correct / s->questions);
    put_number(f, "hellaswag_norm", (double)s->correct_norm / s->questions);
    return end_metrics_line(m, e);
}

// Syncs at once: samples are few, and checkpoints do not have them.
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
