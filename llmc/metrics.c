#define _DEFAULT_SOURCE // flock
#include "metrics.h"

#include "files.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <unistd.h>

struct Metrics {
    int fd;
    int64_t bytes; // of the file
    FILE *file;    // over `line`: the line under way
    char *line;
    size_t line_bytes;
    char path[PATH_MAX];
};

static int cannot_write(const Metrics *m, Error *e) {
    return FAIL(e, ERR_WRITE, "check --out", "%s: cannot write: %s", m->path, strerror(errno));
}

// Two runs in one place would undo each other's work. The lock goes when the file is closed, however the program ends.
static int open_locked(Metrics *m, const char *directory, Error *e) {
    TRY(path_join(m->path, sizeof m->path, directory, "metrics.jsonl", e));
    m->fd = open(m->path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
    if (m->fd < 0) return cannot_write(m, e);
    if (flock(m->fd, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK)
        return FAIL(e, ERR_USAGE, "wait for it to end, or choose another --out", "%s: another run is writing to it",
                    m->path);
    m->bytes = lseek(m->fd, 0, SEEK_END);
    m->file = open_memstream(&m->line, &m->line_bytes);
    return m->file && m->bytes >= 0 ? 0 : cannot_write(m, e);
}

int metrics_open(Metrics **out, const char *directory, Error *e) {
    Metrics *m;
    *out = NULL;
    TRY(memory_alloc_zero((void **)&m, sizeof *m, "metrics", e));
    m->fd = -1;
    int code = open_locked(m, directory, e);
    if (code) metrics_close(m, &(Error){0});
    else *out = m;
    return code;
}

int metrics_cut(Metrics *m, int64_t bytes, Error *e) {
    if (m->bytes <= bytes) return 0;
    if (ftruncate(m->fd, (off_t)bytes) != 0) return cannot_write(m, e);
    m->bytes = bytes;
    return 0;
}

int64_t metrics_bytes(const Metrics *m) { return m->bytes; }
int metrics_descriptor(const Metrics *m) { return m->fd; }

// A line is handed to the kernel whole: a run that is killed leaves no half line that a buffer held back.
static int end_line(Metrics *m, Error *e) {
    fputs("}\n", m->file);
    if (fflush(m->file) != 0) return FAIL(e, ERR_MEMORY, "free some memory", "%s: no memory for a line", m->path);
    TRY(write_all(m->fd, m->line, m->line_bytes, m->path, e));
    m->bytes += (int64_t)m->line_bytes;
    rewind(m->file);
    return 0;
}

static void put_number(FILE *f, const char *before, const char *name, const char *after, double x) {
    if (isfinite(x)) fprintf(f, ", \"%s%s%s\": %.17g", before, name, after, x);
    else fprintf(f, ", \"%s%s%s\": null", before, name, after);
}

static void put_estimate(FILE *f, const char *prefix, const char *name, const GnsTracker *t) {
    GnsEstimate g = gns_estimate(t);
    put_number(f, prefix, name, "", g.scale);
    put_number(f, prefix, name, "_se", g.scale_se);
    put_number(f, prefix, name, "_lower", g.valid ? g.lower : NAN);
    put_number(f, prefix, name, "_g2", g.g2);
    put_number(f, prefix, name, "_s", g.s);
}

static void put_sampled(FILE *f, const Noise *noise) {
    put_estimate(f, "gns_", "total", &noise->calibration.total);
    put_number(f, "", "gns_ratio", "", noise->calibration.ratio);
    for (int i = 0; i < GROUP_COUNT; i++) {
        GnsEstimate g = gns_estimate(&noise->type[i]);
        put_number(f, "gns_type_", group_names[i], "", g.scale);
    }
    fputs(", \"gns_layer\": [", f);
    for (int l = 0; l < noise->layers; l++) {
        GnsEstimate g = gns_estimate(&noise->layer[l]);
        if (isfinite(g.scale)) fprintf(f, "%s%.17g", l ? ", " : "", g.scale);
        else fprintf(f, "%snull", l ? ", " : "");
    }
    fputs("]", f);
}

int metrics_step(Metrics *m, const StepMetrics *s, const Noise *noise, GnsMode mode, Error *e) {
    FILE *f = m->file;
    fprintf(f, "{\"step\": %lld, \"tokens\": %lld, \"examples\": %lld, \"batch\": %lld", (long long)s->step,
            (long long)s->tokens, (long long)s->examples, (long long)s->batch);
    put_number(f, "", "loss", "", s->loss);
    put_number(f, "", "lr", "", s->lr);
    put_number(f, "", "grad_norm", "", s->grad_norm);
    put_number(f, "", "tok_per_s", "", s->tok_per_s);
    put_number(f, "", "mfu", "", s->mfu);
    if (s->skipped) fputs(", \"skipped\": true", f);
    if (mode != GNS_OFF) put_estimate(f, "gns_", "ln", &noise->ln);
    if (noise->ranks.steps > 0) put_estimate(f, "gns_", "ranks", &noise->ranks);
    if (mode == GNS_EXACT) put_sampled(f, noise);
    return end_line(m, e);
}

int metrics_val(Metrics *m, int64_t step, int64_t tokens, double val_loss, Error *e) {
    fprintf(m->file, "{\"step\": %lld, \"tokens\": %lld", (long long)step, (long long)tokens);
    put_number(m->file, "", "val_loss", "", val_loss);
    return end_line(m, e);
}

int metrics_close(Metrics *m, Error *e) {
    if (!m) return 0;
    int code = 0;
    if (m->fd >= 0 && close(m->fd) != 0 && errno != EINTR) code = cannot_write(m, e);
    if (m->file) fclose(m->file);
    free(m->line);
    memory_free(m);
    return code;
}
