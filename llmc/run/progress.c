#include "run/progress.h"

#include "base/signals.h"
#include "gns/noise.h"
#include "text/hellaswag.h"

#include <errno.h>
#include <math.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static const char redraw[] = "\r\033[K"; // back to the beginning of the terminal's line, and clear it

// ---- Numbers for a person -------------------------------------------------------------------------------------------

static void format_duration(char *out, size_t bytes, double seconds) {
    if (!isfinite(seconds) || seconds < 0) seconds = 0;
    long s = lround(seconds);
    if (s < 3600) snprintf(out, bytes, "%ld:%02ld", s / 60, s % 60);
    else if (s < 100 * 3600) snprintf(out, bytes, "%ldh%02ld", s / 3600, s / 60 % 60);
    else snprintf(out, bytes, "%ldd%02ldh", s / 86400, s / 3600 % 24);
}

// "about 40 s", "about 3.5 hours": in words
static void format_about(char *out, size_t bytes, double seconds) {
    const double minute = 60, hour = 3600, day = 86400;
    double unit = seconds < 99.5 ? 1 : seconds < 99.5 * minute ? minute : seconds < 48 * hour ? hour : day;
    double count = fmax(1, seconds / unit);
    snprintf(out, bytes, "about %.*f %s", unit >= hour && count < 9.95, count,
             unit == 1        ? "s"
             : unit == minute ? "minutes"
             : unit == hour   ? "hours"
                              : "days");
}

// Adds the noise scale, if it is known: a lower bound of a hundredth of a row says nothing.
static void add_gns(Line *line, const Noise *noise, GnsMode mode) {
    const GnsEstimate g = gns_estimate(&noise->ln);
    if (mode == GNS_OFF || !g.valid || isnan(g.lower)) return;
    if (g.significant) {
        line_add(line, 65, "  GNS %.3g", g.scale);
        line_add(line, 45, " +- %.2g", g.scale_se);
    } else if (g.lower > 0.01) line_add(line, 65, "  GNS > %.3g", g.lower);
}

static void add_memory(Line *line, size_t memory) {
    const double gib = 1 << 30;
    if (!memory) return;
    if ((double)memory < gib) line_add(line, 10, "  %.0f MiB", (double)memory / (1 << 20));
    else line_add(line, 10, "  %.1f GiB", (double)memory / gib);
}

// What the line says of a step until the next one.
static void format_step(Progress *p, const StepMetrics *s, const Noise *noise) {
    const double many = 99999.5; // tokens a second
    bool thousands = s->tok_per_s >= many;
    Line *line = &p->last;
    line->count = 0;
    line_add(line, 100, "step %5lld", (long long)s->step);
    line_add(line, 95, " %3.0f%%", floor(100.0 * (double)s->tokens / (double)p->horizon));
    line_add(line, 80, "  loss %.4f", s->loss);
    if (s->smoothed) line_add(line, 75, "  nll %.4f", s->nll);
    if (isfinite(p->val_loss)) line_add(line, 30, "  val %.4f", p->val_loss); // also printed on a separate line
    line_add(line, 70, "  B %lld", (long long)s->batch);
    line_add(line, 48, "%s", s->why);
    add_gns(line, noise, s->mode);
    if (s->loss_scale > 0) line_add(line, 47, "  scale %.0f", s->loss_scale);
    if (s->loss_scale > 0 && s->overflows > 0) line_add(line, 67, "  %lld overflows", (long long)s->overflows);
    line_add(line, 60, "  %.0f%s tok/s", thousands ? s->tok_per_s / 1000 : s->tok_per_s, thousands ? "k" : "");
    if (isfinite(s->mfu)) line_add(line, 50, "  MFU %.1f%%", 100 * s->mfu);
    add_memory(line, engine_memory_in_use(p->engine));
}

// ---- The work that is done, and the remaining time ------------------------------------------------------------------

// The share of the work that is done; NaN: unknown. It never falls.
static double share_done(Progress *p) {
    if (p->now.total == 0) return NAN;
    double of_piece = p->now.flight && p->engine ? engine_progress(p->engine) : 0;
    double share = ((double)p->now.done + of_piece * (double)p->now.flight) / (double)p->now.total;
    p->now.reached = fmin(1, fmax(p->now.reached, share));
    return p->now.reached;
}

// Seconds until the work ends, from its own speed, or from that of the same work before; NaN: unknown.
static double work_left(Progress *p, double now) {
    const double enough = 0.02; // of the work, to tell its speed
    double share = share_done(p), elapsed = now - p->now.begun;
    int64_t times = p->past[p->now.stage].count;
    if (share >= enough) return elapsed * (1 - share) / share;
    if (times == 0) return NAN;
    double each = p->past[p->now.stage].seconds / (double)times;
    if (p->now.stage == STAGE_STEP) each *= (double)p->batch_tokens;
    return fmax(0, each - elapsed);
}

// Of training: from the finished steps, or from the finished part of the first step; NaN: unknown.
static double seconds_a_token(Progress *p, double now) {
    const double enough = 0.002;
    if (p->past[STAGE_STEP].count > 0) return p->past[STAGE_STEP].seconds / (double)p->past[STAGE_STEP].count;
    double share = p->now.stage == STAGE_STEP ? share_done(p) : NAN;
    return share >= enough ? (now - p->now.begun) / (share * (double)p->batch_tokens) : NAN;
}

// How often the run still stops for a stage, if `steps` steps are left.
static double times_left(const Progress *p, Stage stage, int64_t steps) {
    int64_t every = p->costs.every[stage], last = p->step + steps, times = 0;
    if (every > 0) times = last / every - p->step / every;
    if (every > 0 && !p->costs.at_end[stage] && last % every == 0) times--; // the end has its own
    if (p->costs.at_end[stage] && (every == 0 || last % every != 0)) times++;
    return (double)times;
}

static double stage_left(const Progress *p, Stage stage, int64_t steps, double a_token) {
    int64_t count = p->past[stage].count;
    double each = count ? p->past[stage].seconds / (double)count : p->costs.guess[stage] * a_token;
    return steps > 0 ? fmax(0, times_left(p, stage, steps)) * each : 0;
}

double progress_left(Progress *p, double now) {
    double a_token = seconds_a_token(p, now), tokens = (double)(p->horizon - p->tokens);
    int64_t steps = p->batch_tokens ? (p->horizon - p->tokens + p->batch_tokens - 1) / p->batch_tokens : 0;
    double begun = p->now.stage == STAGE_STEP ? share_done(p) * (double)p->batch_tokens : 0; // tokens
    double left = a_token * fmax(0, tokens - begun);
    if (p->now.stage == STAGE_STEP) // this step may be slower than those before
        left = fmax(left, work_left(p, now) + a_token * fmax(0, tokens - (double)p->batch_tokens));
    left += p->costs.last_save;
    for (Stage s = STAGE_VALIDATE; s < STAGES; s++) left += stage_left(p, s, steps, a_token);
    return p->horizon > 0 && p->tokens < p->horizon ? left : 0;
}

// ---- The line -------------------------------------------------------------------------------------------------------

// Work: "step 4: 37%, 0:28 left  micro-step 2 of 8".
static void add_work(Progress *p, double now, Line *line) {
    char what[40], share[16] = "", time[32];
    double part = share_done(p), left = work_left(p, now);
    bool ended = p->now.total && p->now.done >= p->now.total, known = !ended && isfinite(left);
    if (p->now.what) snprintf(what, sizeof what, "%s", p->now.what);
    else snprintf(what, sizeof what, "step %lld:", (long long)p->step + 1);
    if (part >= 0) // below 100% until the end
        snprintf(share, sizeof share, " %.0f%%", ended ? 100 : fmin(99, floor(100 * part)));
    format_duration(time, sizeof time, known ? left : now - p->now.begun);
    line_add(line, 85, "  %s%s%s %s%s", what, share, known ? "," : ended ? ", took" : "", time, known ? " left" : "");
    if (p->now.pieces < 2 || ended) return;
    if (p->now.stage == STAGE_STEP)
        line_add(line, 40, "  micro-step %lld of %lld", (long long)p->now.piece, (long long)p->now.pieces);
    else line_add(line, 40, "  %lld of %lld rows", (long long)p->now.done, (long long)p->now.total);
}

// Formats the line, without parts that do not fit. work: with the current work; before the first step, and in a log,
// such a line has no numbers of the last step.
static void format_line(Progress *p, bool work, double now, char *out, size_t bytes) {
    enum { HEAD = 2 };
    Line line = {0};
    char eta[32];
    double left = progress_left(p, now);
    if (p->terminal || !work) line = p->last;
    if (line.count) line.count = HEAD;
    if (work) add_work(p, now, &line);
    format_duration(eta, sizeof eta, left);
    if (p->horizon > 0 && isfinite(left)) line_add(&line, 90, "  ETA %s", eta);
    for (int i = HEAD; i < p->last.count && (p->terminal || !work); i++)
        line_add(&line, p->last.part[i].priority, "%s", p->last.part[i].text);
    line_fit(&line, terminal_columns(p->out) - p->terminal, out, bytes); // a line that wraps cannot be redrawn
}

static void draw(Progress *p, bool work, double now) {
    char line[400];
    format_line(p, work, now, line, sizeof line);
    fprintf(p->out, "%s%s%s", p->terminal ? redraw : "", line, p->terminal ? "" : "\n");
    fflush(p->out);
    p->shown = now;
    p->drawn = p->terminal;
}

static void end_line(Progress *p) {
    if (p->drawn) fputs("\n", p->out);
    p->drawn = false;
}

// ---- Work -----------------------------------------------------------------------------------------------------------

void progress_begin(Progress *p, Stage stage, const char *what, int64_t total, int64_t pieces) {
    if (!p->out) return;
    pthread_mutex_lock(&p->watch.lock);
    memset(&p->now, 0, sizeof p->now);
    p->now.stage = stage;
    p->now.what = what;
    p->now.quiet = !what && stage != STAGE_STEP;
    p->now.begun = clock_seconds();
    p->now.total = total;
    p->now.pieces = pieces;
    if (stage == STAGE_STEP) p->batch_tokens = total * p->seq_len;
    pthread_mutex_unlock(&p->watch.lock);
}

void progress_next(Progress *p, int64_t done, int64_t flight) {
    if (!p->out) return;
    pthread_mutex_lock(&p->watch.lock);
    p->now.done = done;
    p->now.flight = flight;
    p->now.piece++;
    pthread_mutex_unlock(&p->watch.lock);
}

void progress_end(Progress *p) {
    if (!p->out) return;
    pthread_mutex_lock(&p->watch.lock);
    Stage stage = p->now.stage;
    double now = clock_seconds();
    p->now.done = p->now.total;
    p->now.flight = 0;
    if (p->now.shown && !p->now.quiet && stage != STAGE_STEP) draw(p, true, now);
    if (!p->horizon) end_line(p);
    p->past[stage].seconds += now - p->now.begun;
    p->past[stage].count += stage == STAGE_STEP ? p->batch_tokens : 1;
    if (stage == STAGE_STEP) p->step++, p->tokens += p->batch_tokens;
    p->now.stage = STAGE_NONE;
    pthread_mutex_unlock(&p->watch.lock);
}

// ---- The thread -----------------------------------------------------------------------------------------------------

// "finishing this step (about 40 s), then saving; again: quit without saving"
static void answer_signal(Progress *p, double now) {
    static const char *const finishing[STAGES] = {
        [STAGE_NONE] = "this step",          [STAGE_SETUP] = "the set-up", [STAGE_STEP] = "this step",
        [STAGE_VALIDATE] = "the validation", [STAGE_TEST] = "HellaSwag",   [STAGE_SAMPLE] = "the sample",
        [STAGE_SAVE] = "the save",
    };
    char about[48] = "", left[40];
    double seconds = p->now.stage == STAGE_NONE ? NAN : work_left(p, now);
    if (p->watch.answered || !signals_requested()) return;
    p->watch.answered = true;
    if (isfinite(seconds)) {
        format_about(left, sizeof left, seconds);
        snprintf(about, sizeof about, " (%s)", left);
    }
    end_line(p);
    fflush(p->out);
    const char *why = signals_requested(), *again = strncmp(why, "SIG", 3) == 0 ? "; again: quit without saving" : "";
    bool ctrl_c = strcmp(why, "SIGINT") == 0; // which the terminal shows
    print_folded(stderr, 4, "%s%sfinishing %s%s%s%s\n", ctrl_c ? "" : why, ctrl_c ? "" : ": ", finishing[p->now.stage],
                 about, p->now.stage == STAGE_SAVE ? "" : ", then saving", again);
}

// Once, as soon as the first step shows the speed: warns if the run will take hours.
static void warn_of_length(Progress *p, double now) {
    const double soon = 10, hour = 3600;
    char about[40], share[40] = "";
    bool told = p->past[STAGE_STEP].count > 0 || (p->now.stage == STAGE_STEP && now - p->now.begun >= soon);
    double left = progress_left(p, now), steps = seconds_a_token(p, now) * (double)(p->horizon - p->tokens);
    if (p->warned || !told || !isfinite(left)) return;
    p->warned = true;
    if (left < hour) return;
    format_about(about, sizeof about, left);
    if (steps < 0.99 * left) snprintf(share, sizeof share, ", of which the steps take %.0f%%", 100 * steps / left);
    end_line(p);
    print_folded(p->out, 6, "note: the run takes %s at this speed%s. Ctrl-C saves; the same command resumes\n", about,
                 share);
    fflush(p->out);
}

void progress_tick(Progress *p, double now) {
    const double delay = p->terminal ? 1 : 10, interval = p->terminal ? 0.2 : fmax(10, log_interval(now - p->started));
    pthread_mutex_lock(&p->watch.lock);
    answer_signal(p, now);
    if (p->now.stage == STAGE_STEP && !p->now.quiet) warn_of_length(p, now);
    if (p->now.stage != STAGE_NONE && !p->now.quiet && now - p->now.begun >= delay && now - p->shown >= interval) {
        p->now.shown = true;
        draw(p, true, now);
    }
    pthread_mutex_unlock(&p->watch.lock);
}

static void *watch(void *progress) {
    Progress *p = progress;
    const long tenth = 100000000; // ns
    pthread_mutex_lock(&p->watch.lock);
    while (!p->watch.stop) {
        struct timespec until;
        clock_gettime(CLOCK_MONOTONIC, &until);
        until.tv_nsec += tenth;
        until.tv_sec += until.tv_nsec / 1000000000;
        until.tv_nsec %= 1000000000;
        if (pthread_cond_timedwait(&p->watch.ends, &p->watch.lock, &until) != ETIMEDOUT) continue;
        pthread_mutex_unlock(&p->watch.lock);
        progress_tick(p, clock_seconds());
        pthread_mutex_lock(&p->watch.lock);
    }
    pthread_mutex_unlock(&p->watch.lock);
    return NULL;
}

int progress_watch(Progress *p, Error *e) {
    TRY(thread_start(&p->watch.thread, watch, p, "the progress", e));
    p->watch.runs = true;
    return 0;
}

void progress_create(Progress *p, FILE *out, bool plain) {
    *p = (Progress){.out = out, .terminal = !plain && isatty(fileno(out)) == 1, .val_loss = NAN};
    p->started = clock_seconds();
    pthread_condattr_t attributes;
    pthread_mutex_init(&p->watch.lock, NULL);
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&p->watch.ends, &attributes);
    pthread_condattr_destroy(&attributes);
}

void progress_destroy(Progress *p) {
    if (!p->out) return;
    pthread_mutex_lock(&p->watch.lock);
    p->watch.stop = true;
    pthread_cond_signal(&p->watch.ends);
    pthread_mutex_unlock(&p->watch.lock);
    if (p->watch.runs) pthread_join(p->watch.thread, NULL);
    pthread_cond_destroy(&p->watch.ends);
    pthread_mutex_destroy(&p->watch.lock);
    p->out = NULL;
}

// ---- The run --------------------------------------------------------------------------------------------------------

void progress_run(Progress *p, const Engine *engine, int seq_len, int64_t step, int64_t done_tokens,
                  int64_t horizon_tokens, const RunCosts *costs) {
    if (!p->out) return;
    pthread_mutex_lock(&p->watch.lock);
    p->engine = engine;
    p->seq_len = seq_len;
    p->step = step;
    p->tokens = done_tokens;
    p->horizon = horizon_tokens;
    if (costs) p->costs = *costs;
    p->started = clock_seconds();
    memset(p->past, 0, sizeof p->past);
    pthread_mutex_unlock(&p->watch.lock);
}

void progress_past(void *progress, double tokens, double loss) {
    Progress *p = progress;
    int x = (int)(tokens / (double)p->horizon * CURVE_WIDTH);
    if (x >= CURVE_WIDTH) x = CURVE_WIDTH - 1;
    p->column[x].loss += loss;
    p->column[x].steps++;
    p->curve_tokens = tokens;
}

void progress_step(Progress *p, const StepMetrics *s, const Noise *noise, bool force) {
    if (!p->out) return;
    progress_past(p, (double)s->tokens, s->loss);
    pthread_mutex_lock(&p->watch.lock);
    double now = clock_seconds();
    double interval = p->terminal ? 0.2 : log_interval(now - p->started);
    bool due = p->stepped == 0 || now - p->stepped >= interval;
    p->step = s->step;
    p->tokens = s->tokens;
    p->now.stage = STAGE_NONE;
    if (due || force) {
        format_step(p, s, noise);
        draw(p, false, now);
        p->stepped = now;
    }
    warn_of_length(p, now);
    pthread_mutex_unlock(&p->watch.lock);
}

void progress_break(Progress *p) {
    if (!p->out) return;
    pthread_mutex_lock(&p->watch.lock);
    p->now.quiet = true;
    end_line(p);
    fflush(p->out);
    pthread_mutex_unlock(&p->watch.lock);
}

void progress_val(Progress *p, const StepMetrics *s, double val_loss) {
    if (!p->out) return;
    pthread_mutex_lock(&p->watch.lock);
    p->val_loss = val_loss;
    if (p->drawn) fputs(redraw, p->out); // the next step draws the line again, below
    p->drawn = false;
    p->shown = 0;
    fprintf(p->out, "step %5lld  val loss %.4f\n", (long long)s->step, val_loss);
    fflush(p->out);
    pthread_mutex_unlock(&p->watch.lock);
}

void progress_hellaswag(Progress *p, const StepMetrics *s, const HellaSwagScore *score) {
    int n = score->questions;
    progress_break(p);
    print_folded(p->out, 10, "step %5lld  HellaSwag acc %d/%d = %.4f  acc_norm %d/%d = %.4f\n", (long long)s->step,
                 score->correct, n, (double)score->correct / n, score->correct_norm, n,
                 (double)score->correct_norm / n);
    fflush(p->out);
}

// ---- The curve ------------------------------------------------------------------------------------------------------

void progress_curve(const Progress *p) {
    enum { MARGIN = 9, LABEL = 24 };                                  // "  2.350 |"
    double loss[CURVE_WIDTH] = {0}, low = INFINITY, high = -INFINITY; // mean of each column; NaN without steps
    int64_t steps[CURVE_WIDTH] = {0};
    int room = terminal_columns(p->out) - MARGIN, width = room < CURVE_WIDTH ? room : CURVE_WIDTH;
    if (width < 1) return;
    for (int x = 0; x < CURVE_WIDTH; x++) {
        loss[x * width / CURVE_WIDTH] += p->column[x].loss;
        steps[x * width / CURVE_WIDTH] += p->column[x].steps;
    }
    for (int x = 0; x < width; x++) {
        loss[x] /= (double)steps[x];
        low = fmin(low, loss[x]);
        high = fmax(high, loss[x]);
    }
    if (!(high > low)) return;
    fprintf(p->out, "\ntraining loss (nats a token)\n");
    for (int y = 0; y < CURVE_HEIGHT; y++) {
        double level = high - (high - low) * y / (CURVE_HEIGHT - 1);
        fprintf(p->out, "%7.3f |", level);
        for (int x = 0; x < width; x++) {
            bool here = isfinite(loss[x]) && (int)lround((high - loss[x]) / (high - low) * (CURVE_HEIGHT - 1)) == y;
            fputc(here ? '*' : ' ', p->out);
        }
        fputc('\n', p->out);
    }
    fprintf(p->out, "        +");
    for (int x = 0; x < width; x++) fputc('-', p->out);
    fputc('\n', p->out);
    if (width >= LABEL) fprintf(p->out, "%*s0%*.3g million tokens\n", MARGIN, "", width - 16, p->curve_tokens / 1e6);
}
