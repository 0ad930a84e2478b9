#define _POSIX_C_SOURCE 200809L
#include "metrics.h"

#include <errno.h>
#include <limits.h>
#include <math.h>
#include <string.h>

struct Metrics {
    FILE *file;
    char path[PATH_MAX];
};

int metrics_open(Metrics **out, const char *directory, Error *e) {
    TRY(memory_alloc_zero((void **)out, sizeof(Metrics), "metrics", e));
    Metrics *m = *out;
    int code = path_join(m->path, sizeof m->path, directory, "metrics.jsonl", e);
    if (!code) {
        m->file = fopen(m->path, "we");
        if (!m->file) code = FAIL(e, ERR_WRITE, "check --out", "%s: cannot write: %s", m->path, strerror(errno));
    }
    if (code) {
        memory_free(m);
        *out = NULL;
    }
    return code;
}

// A line is handed to the kernel whole: a run that is killed leaves no half line that a buffer held back.
static int end_line(Metrics *m, Error *e) {
    fputs("}\n", m->file);
    if (fflush(m->file) != 0 || ferror(m->file))
        return FAIL(e, ERR_WRITE, "free some space and start again", "%s: cannot write: %s", m->path, strerror(errno));
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
    if (fclose(m->file) != 0)
        code = FAIL(e, ERR_WRITE, "free some space and start again", "%s: cannot write: %s", m->path, strerror(errno));
    memory_free(m);
    return code;
}
