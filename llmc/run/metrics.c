#include "run/metrics.h"

#include "base/files.h"
#include "gns/noise.h"
#include "base/text.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <math.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

// A log and its waiting lines. One call of write writes whole lines, so a killed run leaves no half line.
typedef struct {
    Text lines;
    size_t sent; // bytes of `lines` that are in the file
    char path[PATH_MAX];
} Log;

// UNDONE: what a rollback or a resume has cut from the other two.
enum { STEPS, SAMPLES, UNDONE, LOGS };
static const char *const log_names[LOGS] = {"metrics.jsonl", "samples.jsonl", "metrics.rolled_back.jsonl"};

struct Metrics {
    int dir; // the directory of the files (files.h)
    int fd;  // metrics.jsonl
    Log log[LOGS];
};

static int cannot_write(const char *path, Error *e) {
    return FAIL(e, ERR_WRITE, "free some space, or check --out", "%s: cannot write: %s", path, strerror(errno));
}

// ---- Lines that wait ------------------------------------------------------------------------------------------------

static size_t log_waits(const Log *log) { return log->lines.bytes - log->sent; }

size_t metrics_waiting(const Metrics *m) {
    return m ? log_waits(&m->log[STEPS]) + log_waits(&m->log[SAMPLES]) + log_waits(&m->log[UNDONE]) : 0;
}

static void log_empty(Log *log) { rewind(log->lines.f), fflush(log->lines.f), log->sent = 0; } // lines.bytes is 0 then

int metrics_flush(Metrics *m, Error *e) {
    int code = 0;
    for (int i = 0; i < LOGS && !code; i++) {
        Log *log = &m->log[i];
        int fd = m->fd;
        if (log_waits(log) == 0) continue;
        if (i != STEPS) TRY(file_open_output(m->dir, log->path, O_RDWR | O_CREAT | O_APPEND, &fd, e));
        while (!code && log_waits(log) > 0) {
            ssize_t n = write(fd, log->lines.text + log->sent, log_waits(log));
            if (n < 0 && errno != EINTR) code = cannot_write(log->path, e);
            log->sent += n > 0 ? (size_t)n : 0;
        }
        if (!code) log_empty(log);
        if (!code && i != STEPS) code = descriptor_sync(fd, log->path, e); // a save syncs only metrics.jsonl
        if (i != STEPS) close(fd);
    }
    return code;
}

// ---- The lock -------------------------------------------------------------------------------------------------------

enum { HOST_BYTES = 256 };

// Writes the lock's holder, by run.json's last part, to `who`, for a message; "": unknown. Returns true if it is a
// process of this machine.
static bool read_holder(int dir, char who[HOST_BYTES + 64]) {
    char here[HOST_BYTES] = "unknown";
    cJSON *root;
    *who = 0;
    json_read(&root, dir, "run.json", 1 << 26, NULL, &(Error){0});
    const cJSON *parts = json_get(root, "parts"), *last = cJSON_GetArrayItem(parts, cJSON_GetArraySize(parts) - 1);
    const char *host = cJSON_GetStringValue(json_get(last, "host"));
    const cJSON *item = json_get(last, "process");
    const pid_t process = host && json_whole(item, 1, INT_MAX) ? item->valueint : 0; // 0: an older build's run.json
    if (process) snprintf(who, HOST_BYTES + 64, "; the last known one is process %d on %.255s", process, host);
    gethostname(here, HOST_BYTES - 1);
    const bool local = process && strcmp(host, here) == 0 && (kill(process, 0) == 0 || errno == EPERM);
    cJSON_Delete(root);
    return local;
}

// ---- Opening and closing --------------------------------------------------------------------------------------------

int metrics_open(Metrics **out, int dir, const char *directory, bool *here, Error *e) {
    char who[HOST_BYTES + 64];
    Metrics *m;
    int code = 0;
    *out = NULL;
    *here = false;
    TRY(memory_alloc_zero((void **)&m, sizeof *m, "metrics", e));
    m->fd = -1;
    m->dir = dir;
    for (int i = 0; i < LOGS; i++) {
        TRY_GOTO(path_join(m->log[i].path, sizeof m->log[i].path, directory, log_names[i], e));
        TRY_GOTO(text_begin(&m->log[i].lines, e));
    }
    TRY_GOTO(file_open_output(dir, m->log[STEPS].path, O_RDWR | O_CREAT | O_APPEND, &m->fd, e));
    if (flock(m->fd, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) {
        *here = read_holder(dir, who);
        TRY_GOTO(FAIL(e, ERR_USAGE, "wait for it to end, or choose another --out",
                      "%s/metrics.jsonl: another run is writing to it%s", directory, who));
    }
    *out = m;
done:
    if (code) metrics_close(m, &(Error){0});
    return code;
}

int64_t metrics_bytes(const Metrics *m) { return lseek(m->fd, 0, SEEK_END) + (int64_t)log_waits(&m->log[STEPS]); }

int metrics_sync(const Metrics *m, Error *e) { return descriptor_sync(m->fd, m->log[STEPS].path, e); }

int metrics_close(Metrics *m, Error *e) {
    if (!m) return 0;
    struct stat st;
    int code = m->fd < 0 ? 0 : metrics_flush(m, e);
    if (!code && m->fd >= 0 && fstat(m->fd, &st) == 0 && st.st_nlink == 0)
        code = FAIL(e, ERR_WRITE, "leave a run's files alone until it ends",
                    "%s was removed or replaced, and its lines are lost", m->log[STEPS].path);
    if (m->fd >= 0 && close(m->fd) != 0 && errno != EINTR && !code) code = cannot_write(m->log[STEPS].path, e);
    for (int i = 0; i < LOGS; i++) text_free(&m->log[i].lines);
    memory_free(m);
    return code;
}

// ---- Resuming -------------------------------------------------------------------------------------------------------

// Truncates a log to the whole lines of steps up to `step`. Moves the other bytes, which may be another program's, to
// UNDONE, except from a NUL on: a full disk or power cut may leave a hole of zeros. Stops at a line that does not begin
// with '{', since getline would read the hole as one very long line.
static int log_cut(Metrics *m, const char *path, int fd, int64_t step, bool keeps, Error *e) {
    Log *undone = &m->log[UNDONE];
    char *line = NULL;
    size_t room = 0;
    long long at;
    FILE *f = fdopen(dup(fd), "r");
    off_t keep = 0;
    if (f) rewind(f);
    for (int c; f && (c = getc(f)) == '{';) {
        ungetc(c, f);
        ssize_t n = getline(&line, &room, f);
        if (n <= 0 || line[n - 1] != '\n' || sscanf(line, "{\"step\": %lld", &at) != 1 || at > step) break;
        keep += n;
    }
    if (f) fseek(f, keep, SEEK_SET);
    int last = '\n';
    for (int c; f && (c = getc_unlocked(f)) > 0; last = c) putc_unlocked(c, undone->lines.f);
    if (last != '\n') putc('\n', undone->lines.f);
    fflush(undone->lines.f);
    const int error = !f || ferror(f) || ferror(undone->lines.f) ? errno : 0;
    free(line);
    if (f) fclose(f);
    if (error)
        return FAIL_UNREADABLE(e, "make it readable, and start again", "%s: cannot read: %s", path, strerror(error));
    if (metrics_flush(m, e) && !keeps && !((errno == ENOSPC || errno == EDQUOT) && log_waits(undone) > 0))
        return log_empty(undone), e->code; // the log still has them. On a full disk they wait for the room of the cut
    return ftruncate(fd, keep) ? cannot_write(path, e) : 0;
}

int metrics_begin(Metrics *m, int64_t step, int64_t bytes, bool keeps, Error *e) {
    const char *samples = m->log[SAMPLES].path;
    int fd;
    if (keeps && metrics_flush(m, e) && metrics_waiting(m) > log_waits(&m->log[UNDONE])) return e->code;
    TRY(log_cut(m, m->log[STEPS].path, m->fd, step, keeps, e));
    if (metrics_bytes(m) != bytes)
        fprintf(stderr,
                "warning: %s is not as it was at the checkpoint: steps are missing or another run's. Lines "
                "cut now, if any, are in metrics.rolled_back.jsonl\n",
                m->log[STEPS].path);
    if (!file_exists_in(m->dir, samples)) return 0;
    TRY(file_open_output(m->dir, samples, O_RDWR, &fd, e)); // if samples cannot be written, the run ends now
    const int code = log_cut(m, samples, fd, step, keeps, e);
    return close(fd), code;
}

// ---- Lines ----------------------------------------------------------------------------------------------------------

// Writes infinity as 1e308: JSON has no infinity, and some readers refuse a file with one.
static void put_value(FILE *f, double x) {
    if (isnan(x)) fputs("null", f);
    else fprintf(f, "%.17g", isinf(x) ? copysign(1e308, x) : x);
}

static void put_field(FILE *f, const char *name, const char *end, double x) {
    fprintf(f, ", \"%s%s\": ", name, end);
    put_value(f, x);
}

static void put_number(FILE *f, const char *name, double x) { put_field(f, name, "", x); }

static FILE *begin_line(Log *log, int64_t step, int64_t tokens) {
    fprintf(log->lines.f, "{\"step\": %lld", (long long)step);
    put_number(log->lines.f, "tokens", (double)tokens);
    return log->lines.f;
}

// Ends a line. Writes the waiting lines, then this line.
static int log_end_line(Metrics *m, Log *log, Error *e) {
    fputs("}\n", log->lines.f);
    if (fflush(log->lines.f) != 0)
        return FAIL(e, ERR_MEMORY, "free some memory", "out of memory: a line of %s", log->path);
    metrics_flush(m, &(Error){0}); // on failure the line waits
    return 0;
}

static void put_estimate(FILE *f, const char *name, const GnsTracker *t) {
    const GnsEstimate g = gns_estimate(t);
    put_field(f, name, "", g.scale);
    put_field(f, name, "_se", g.scale_se);
    put_field(f, name, "_lower", g.lower);
    put_field(f, name, "_g2", g.g2);
    put_field(f, name, "_s", g.s);
}

// Writes source i's estimates, and its cosines with sources 0 to i - 1.
static void put_source(FILE *f, const Noise *noise, int i) {
    static const char *const end[] = {"", "_se", "_scale", "_scale_se", "_scale_lower", "_g2", "_g2_se", "_s", "_s_se"};
    const GnsEstimate part = gns_estimate(&noise->source[i]), g = gns_estimate(&noise->source[noise->sources + i]);
    const double x[] = {part.scale, part.scale_se, g.scale, g.scale_se, g.lower, g.g2, g.g2_se, g.s, g.s_se};
    char name[40];
    snprintf(name, sizeof name, "gns_source_%d", i);
    for (size_t k = 0; k < sizeof x / sizeof *x; k++) put_field(f, name, end[k], x[k]);
    for (int s = 0; s < i; s++) {
        double se;
        snprintf(name, sizeof name, "gns_cosine_%d_%d", s, i);
        put_field(f, name, "", noise_cosine(noise, s, i, &se));
        put_field(f, name, "_se", se);
    }
}

int metrics_step(Metrics *m, const StepMetrics *s, const Noise *noise, Error *e) {
    FILE *f = begin_line(&m->log[STEPS], s->step, s->tokens);
    put_number(f, "examples", (double)s->examples);
    put_number(f, "batch", (double)s->batch);
    put_number(f, "loss", s->loss);
    if (!isnan(s->nll)) put_number(f, "loss_nll", s->nll);
    put_number(f, "lr", s->lr);
    put_number(f, "grad_norm", isfinite(s->grad_norm) ? s->grad_norm : NAN);
    put_number(f, "tok_per_s", s->tok_per_s);
    if (s->slowest_rank >= 0) {
        put_number(f, "slowest_rank", s->slowest_rank);
        put_number(f, "wait_share", s->wait_share);
    }
    put_number(f, "mfu", s->mfu);
    if (s->skipped) fputs(", \"skipped\": true", f);
    fprintf(f, ", \"clipped\": %s", s->clipped ? "true" : "false");
    if (s->loss_scale > 0) put_number(f, "loss_scale", s->loss_scale);
    if (s->loss_scale > 0 || s->overflows > 0) put_number(f, "overflows", (double)s->overflows);
    if (s->has_target) {
        put_number(f, "ramp_target", s->target.target);
        put_number(f, "ramp_aim", s->target.aim);
        put_number(f, "ramp_target_lower", s->target.lower);
        put_number(f, "ramp_extra_tokens", s->target.waste);
        put_number(f, "ramp_extra_seconds", s->target.extra);
    }
    if (s->mode != GNS_OFF) put_estimate(f, "gns_ln", &noise->ln);
    for (int i = 0; i < noise->sources && s->mode != GNS_OFF; i++) put_source(f, noise, i);
    bool calibrated = s->mode == GNS_EXACT && !s->skipped;
    if (s->mode != GNS_OFF && noise->fixed_ratio > 0) put_number(f, "gns_ratio", noise->fixed_ratio);
    else if (calibrated) put_number(f, "gns_ratio", noise->calibration.ratio.value);
    if (calibrated) {
        put_estimate(f, "gns_total", noise->follows_total ? &noise->total : &noise->calibration.total);
        for (int i = 0; i < GROUP_COUNT; i++)
            put_field(f, "gns_type_", group_names[i], gns_estimate(&noise->type[i]).scale);
        for (int l = 0; l < noise->layers; l++) {
            fputs(l ? ", " : ", \"gns_layer\": [", f);
            put_value(f, gns_estimate(&noise->layer[l]).scale);
        }
        fputs("]", f);
    }
    return log_end_line(m, &m->log[STEPS], e);
}

int metrics_test(Metrics *m, int64_t step, int64_t tokens, const char *name, double x, double norm, Error *e) {
    FILE *f = begin_line(&m->log[STEPS], step, tokens);
    put_number(f, name, x);
    if (!isnan(norm)) put_field(f, name, "_norm", norm);
    return log_end_line(m, &m->log[STEPS], e);
}

int metrics_sample(Metrics *m, int64_t step, int64_t tokens, const char *prompt, const char *text, Error *e) {
    FILE *f = begin_line(&m->log[SAMPLES], step, tokens);
    fputs(", \"prompt\": ", f);
    text_write_json(f, prompt);
    fputs(", \"text\": ", f);
    text_write_json(f, text);
    return log_end_line(m, &m->log[SAMPLES], e);
}
