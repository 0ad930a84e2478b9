#include "run/progress.h"

#include "base/signals.h"
#include "gns/noise.h"
#include "text/hellaswag.h"

#include <math.h>
#include <string.h>
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

// Formats the part of the line that describes the last step.
static void format_step(Progress *p, const StepMetrics *s, const Noise *noise) {
    const double many = 99999.5, gib = 1 << 30; // tokens a second; bytes
    const double memory = (double)engine_memory_in_use(p->engine);
    const GnsEstimate g = gns_estimate(&noise->ln);
    bool thousands = s->tok_per_s >= many;
    bool has_gns = s->mode != GNS_OFF && g.valid && !isnan(g.lower);
    Line *line = &p->last;
    line->count = 0;
    line_add(line, 100, "step %5lld", (long long)s->step);
    line_add(line, 95, " %3.0f%%", floor(100.0 * (double)s->tokens / (double)p->horizon));
    line_add(line, 80, "  loss %.4f", s->loss);
    if (s->smoothed) line_add(line, 75, "  nll %.4f", s->nll);
    if (isfinite(p->val_loss)) line_add(line, 30, "  val %.4f", p->val_loss); // also printed on a separate line
    line_add(line, 70, "  B %lld", (long long)s->batch);
    line_add(line, 48, "%s", s->why);
    if (has_gns && g.significant) {
        line_add(line, 65, "  GNS %.3g", g.scale);
        line_add(line, 45, " +- %.2g", g.scale_se);
    } else if (has_gns && g.lower > 0.01) line_add(line, 65, "  GNS > %.3g", g.lower);
    if (s->loss_scale > 0) line_add(line, 47, "  scale %.0f", s->loss_scale);
    if (s->loss_scale > 0 && s->overflows > 0) line_add(line, 67, "  %lld overflows", (long long)s->overflows);
    line_add(line, 60, "  %.0f%s tok/s", thousands ? s->tok_per_s / 1000 : s->tok_per_s, thousands ? "k" : "");
    if (isfinite(s->mfu)) line_add(line, 50, "  MFU %.1f%%", 100 * s->mfu);
    if (memory >= gib) line_add(line, 10, "  %.1f GiB", memory / gib);
    else if (memory > 0) line_add(line, 10, "  %.0f MiB", memory / (1 << 20));
}

// ---- The work that is done, and the remaining time ------------------------------------------------------------------

// Returns the fraction of the work that is done, which never falls; NaN: unknown.
static double fraction_done(Progress *p) {
    if (p->now.total == 0) return NAN;
    double of_piece = p->now.flight && p->engine ? engine_progress(p->engine) : 0;
    double share = ((double)p->now.done + of_piece * (double)p->now.flight) / (double)p->now.total;
    p->now.reached = fmin(1, fmax(p->now.reached, share));
    return p->now.reached;
}

// Returns the seconds until the work ends, at its speed so far; NaN: unknown.
static double work_left(Progress *p, double now) {
    const double enough = 0.02; // of the work, to tell its speed
    double share = fraction_done(p);
    return share >= enough ? (now - p->now.begun) * (1 - share) / share : NAN;
}

double progress_left(Progress *p, double now) {
    if (p->ends > 0) return p->ends - now;
    const double enough = 0.002;                                                                // of the first step
    double begun = p->now.stage == STAGE_STEP ? fraction_done(p) * (double)p->batch_tokens : 0; // tokens
    double done = (double)(p->tokens - p->first_tokens) + begun, left = (double)(p->horizon - p->tokens) - begun;
    if (p->tokens >= p->horizon) return 0;
    return done > 0 && done >= enough * (double)p->batch_tokens ? (now - p->started) / done * fmax(0, left) : NAN;
}

// ---- The line -------------------------------------------------------------------------------------------------------

// Work: "step 4: 37%, 0:28 left  micro-step 2 of 8".
static void add_work(Progress *p, double now, Line *line) {
    char what[40], share[16] = "", time[32];
    double part = fraction_done(p), left = work_left(p, now);
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

// Formats the line without parts that do not fit. work: adds the current work, and in a log leaves out the last step.
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

static void end_drawn_line(Progress *p) {
    if (p->drawn) fputs("\n", p->out);
    p->drawn = false;
}

// ---- Work -----------------------------------------------------------------------------------------------------------

void progress_begin(Progress *p, Stage stage, const char *what, int64_t total, int64_t pieces) {
    if (!p->out) return;
    pthread_mutex_lock(&p->ticker.lock);
    memset(&p->now, 0, sizeof p->now);
    p->now.stage = stage;
    p->now.what = what;
    p->now.quiet = !what && stage != STAGE_STEP;
    p->now.begun = clock_seconds();
    p->now.total = total;
    p->now.pieces = pieces;
    if (stage == STAGE_STEP) p->batch_tokens = total * p->seq_len;
    pthread_mutex_unlock(&p->ticker.lock);
}

void progress_next(Progress *p, int64_t done, int64_t flight) {
    if (!p->out) return;
    pthread_mutex_lock(&p->ticker.lock);
    p->now.done = done;
    p->now.flight = flight;
    p->now.piece++;
    pthread_mutex_unlock(&p->ticker.lock);
}

void progress_end(Progress *p) {
    if (!p->out) return;
    pthread_mutex_lock(&p->ticker.lock);
    Stage stage = p->now.stage;
    double now = clock_seconds();
    p->now.done = p->now.total;
    p->now.flight = 0;
    if (p->now.shown && !p->now.quiet && stage != STAGE_STEP) draw(p, true, now);
    if (!p->horizon) end_drawn_line(p);
    if (stage == STAGE_STEP) p->step++, p->tokens += p->batch_tokens;
    p->now.stage = STAGE_NONE;
    pthread_mutex_unlock(&p->ticker.lock);
}

// ---- The thread -----------------------------------------------------------------------------------------------------

// "finishing this step (0:40), then saving; again: quit without saving"
static void answer_signal(Progress *p, double now) {
    static const char *const finishing[STAGES] = {
        [STAGE_NONE] = "this step",          [STAGE_SETUP] = "the set-up", [STAGE_STEP] = "this step",
        [STAGE_VALIDATE] = "the validation", [STAGE_TEST] = "HellaSwag",   [STAGE_SAMPLE] = "the sample",
        [STAGE_SAVE] = "the save",
    };
    char left[40], about[48] = "";
    double seconds = p->now.stage == STAGE_NONE ? NAN : work_left(p, now);
    if (p->answered || !signals_requested()) return;
    p->answered = true;
    if (isfinite(seconds)) {
        format_duration(left, sizeof left, seconds);
        snprintf(about, sizeof about, " (%s)", left);
    }
    end_drawn_line(p);
    fflush(p->out);
    const char *why = signals_requested(), *again = strncmp(why, "SIG", 3) == 0 ? "; again: quit without saving" : "";
    bool ctrl_c = strcmp(why, "SIGINT") == 0; // which the terminal shows
    print_folded(stderr, 4, "%s%sfinishing %s%s%s%s\n", ctrl_c ? "" : why, ctrl_c ? "" : ": ", finishing[p->now.stage],
                 about, p->now.stage == STAGE_SAVE ? "" : ", then saving", again);
}

// Warns once, as soon as the first step shows the speed, if the run will take hours.
static void warn_of_length(Progress *p, double now) {
    const double soon = 10, hour = 3600;
    char about[40];
    bool told = p->tokens > p->first_tokens || (p->now.stage == STAGE_STEP && now - p->now.begun >= soon);
    double left = progress_left(p, now);
    if (p->warned || !told || !isfinite(left)) return;
    p->warned = true;
    if (left < hour) return;
    format_duration(about, sizeof about, left);
    end_drawn_line(p);
    print_folded(p->out, 6, "note: the run takes %s at this speed. Ctrl-C saves; the same command resumes\n", about);
    fflush(p->out);
}

static void tick(Progress *p, double now) {
    const double delay = p->terminal ? 1 : 10, interval = p->terminal ? 0.2 : fmax(10, log_interval(now - p->started));
    answer_signal(p, now);
    if (p->now.stage == STAGE_STEP && !p->now.quiet) warn_of_length(p, now);
    if (p->now.stage != STAGE_NONE && !p->now.quiet && now - p->now.begun >= delay && now - p->shown >= interval) {
        p->now.shown = true;
        draw(p, true, now);
    }
}

void progress_tick(Progress *p, double now) {
    pthread_mutex_lock(&p->ticker.lock);
    tick(p, now);
    pthread_mutex_unlock(&p->ticker.lock);
}

static void tick_now(void *progress) { tick(progress, clock_seconds()); }

int progress_watch(Progress *p, Error *e) { return ticker_start(&p->ticker, "the progress", e); }

void progress_create(Progress *p, FILE *out, bool plain) {
    *p = (Progress){.out = out, .terminal = !plain && terminal_redraws(out), .val_loss = NAN};
    p->started = clock_seconds();
    ticker_create(&p->ticker, tick_now, p);
}

void progress_destroy(Progress *p) {
    if (!p->out) return;
    ticker_destroy(&p->ticker);
    p->out = NULL;
}

// ---- The run --------------------------------------------------------------------------------------------------------

void progress_run(Progress *p, const Engine *engine, int seq_len, int64_t step, int64_t done_tokens,
                  int64_t horizon_tokens) {
    if (!p->out) return;
    pthread_mutex_lock(&p->ticker.lock);
    p->engine = engine;
    p->seq_len = seq_len;
    p->step = step;
    p->tokens = p->first_tokens = done_tokens;
    p->horizon = horizon_tokens;
    p->started = clock_seconds();
    pthread_mutex_unlock(&p->ticker.lock);
}

void progress_step(Progress *p, const StepMetrics *s, const Noise *noise, bool force) {
    if (!p->out) return;
    pthread_mutex_lock(&p->ticker.lock);
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
    pthread_mutex_unlock(&p->ticker.lock);
}

void progress_break(Progress *p) {
    if (!p->out) return;
    pthread_mutex_lock(&p->ticker.lock);
    p->now.quiet = true;
    end_drawn_line(p);
    fflush(p->out);
    pthread_mutex_unlock(&p->ticker.lock);
}

void progress_val(Progress *p, const StepMetrics *s, double val_loss) {
    if (!p->out) return;
    pthread_mutex_lock(&p->ticker.lock);
    p->val_loss = val_loss;
    if (p->drawn) fputs(redraw, p->out); // the next step draws the line again, below
    p->drawn = false;
    p->shown = 0;
    fprintf(p->out, "step %5lld  val loss %.4f\n", (long long)s->step, val_loss);
    fflush(p->out);
    pthread_mutex_unlock(&p->ticker.lock);
}

void progress_hellaswag(Progress *p, const StepMetrics *s, const HellaSwagScore *score) {
    int n = score->questions;
    progress_break(p);
    print_folded(p->out, 10, "step %5lld  HellaSwag acc %d/%d = %.4f  acc_norm %d/%d = %.4f\n", (long long)s->step,
                 score->correct, n, (double)score->correct / n, score->correct_norm, n,
                 (double)score->correct_norm / n);
    fflush(p->out);
}
