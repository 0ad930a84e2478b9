#include "run/progress.h"

#include "base/signals.h"
#include "gns/noise.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

static const char redraw[] = "\r\033[K"; // clears the terminal's line

// Locks *p. Returns false, without a lock, on ranks that show nothing.
static bool enter(Progress *p) {
    if (p->out) pthread_mutex_lock(&p->ticker.lock);
    return p->out != NULL;
}

static void leave(Progress *p) {
    fflush(p->out);
    pthread_mutex_unlock(&p->ticker.lock);
}

static void format_duration(char out[32], double seconds) {
    if (!isfinite(seconds) || seconds < 0) seconds = 0;
    long s = lround(seconds);
    if (s < 3600) snprintf(out, 32, "%ld:%02ld", s / 60, s % 60);
    else if (s < 100 * 3600) snprintf(out, 32, "%ldh%02ld", s / 3600, s / 60 % 60);
    else snprintf(out, 32, "%ldd%02ldh", s / 86400, s / 3600 % 24);
}

int progress_columns(FILE *f) {
    struct winsize size;
    const char *set = getenv("COLUMNS");
    int columns = ioctl(fileno(f), TIOCGWINSZ, &size) == 0 ? size.ws_col : 0;
    if (columns == 0 && set) columns = atoi(set);
    return columns < 10 || columns > 10000 ? 80 : columns;
}

// Returns the seconds until the next line of a log that is `elapsed` seconds old: a fiftieth of its age, but at least
// 2 s and at most ten minutes. The log of a day of training has about 430 lines.
static double log_interval(double elapsed) { return fmin(fmax(elapsed / 50, 2), 600); }

double progress_left(const Progress *p, double now) {
    if (p->ends > 0) return p->ends - now;
    double begun = p->now.runs && !p->now.what ? (double)p->now.done : 0; // tokens of this step
    double done = (double)(p->tokens - p->first_tokens) + begun, left = (double)(p->horizon - p->tokens) - begun;
    if (p->tokens >= p->horizon) return 0;
    return done > 0 ? (now - p->started) / done * fmax(0, left) : NAN;
}

// ---- The line -------------------------------------------------------------------------------------------------------

// Sets p->last and p->numbers.
static void format_step(Progress *p, const StepMetrics *s, const Noise *noise) {
    const double many = 99999.5; // tokens per second
    const GnsEstimate g = gns_estimate(&noise->ln);
    bool thousands = s->tok_per_s >= many;
    bool has_gns = s->mode != GNS_OFF && !isnan(g.lower);
    char *to = p->numbers;
    snprintf(p->last, sizeof p->last, "step %5lld %3.0f%%", (long long)s->step,
             floor(100.0 * (double)s->tokens / (double)p->horizon));
    to += sprintf(to, "  loss %.4f", s->loss);
    if (!isnan(s->nll)) to += sprintf(to, "  nll %.4f", s->nll);
    to += sprintf(to, "  B %lld", (long long)s->batch);
    if (s->overflows > 0) to += sprintf(to, "  %lld overflows", (long long)s->overflows);
    if (has_gns && g.significant) to += sprintf(to, "  GNS %.3g", g.scale);
    else if (has_gns && g.lower > 0.01) to += sprintf(to, "  GNS > %.3g", g.lower);
    to += sprintf(to, "  %.0f%s tok/s", thousands ? s->tok_per_s / 1000 : s->tok_per_s, thousands ? "k" : "");
    if (isfinite(s->mfu)) to += sprintf(to, "  MFU %.1f%%", 100 * s->mfu);
    if (s->has_target && !isnan(s->target.aim)) to += sprintf(to, "  aim %.3g", s->target.aim);
    if (s->loss_scale > 0) to += sprintf(to, "  scale %.0f", s->loss_scale);
    if (has_gns && g.significant) sprintf(to, "  GNS +- %.2g", g.scale_se);
}

// Draws a line of fields, two blanks before each field. Cuts the line to the terminal's width, after a whole field.
static void draw(Progress *p, const char *step, const char *work, const char *numbers, double now) {
    char line[600], eta[32];
    const int columns = progress_columns(p->out) - p->terminal; // a line that wraps cannot be redrawn
    const double left = progress_left(p, now);
    const bool known = p->horizon > 0 && isfinite(left);
    format_duration(eta, left);
    snprintf(line, sizeof line, "%s%s%s%s%s", step, work, known ? "  ETA " : "", known ? eta : "", numbers);
    char *text = line + strspn(line, " "), *cut = text + size_min(strlen(text), (size_t)columns);
    for (char *c = cut; *cut && c > text; c--)
        if (strncmp(c, "  ", 2) == 0) *(cut = c) = 0;
    *cut = 0;
    fprintf(p->out, "%s%s%s", p->terminal ? redraw : "", text, p->terminal ? "" : "\n");
    p->shown = now;
    p->drawn = p->terminal;
}

// Draws the work: "step 4: 37%, 0:28 left". A terminal shows it between the last step's label and that step's numbers.
static void draw_work(Progress *p, double now) {
    char what[40], share[48] = "", time[32], work[160];
    double part = p->now.total ? fmin(1, (double)p->now.done / (double)p->now.total) : NAN; // NaN: unknown
    double megabytes = (double)p->now.done / 1e6;
    double left = part >= 0.02 ? (now - p->now.begun) * (1 - part) / part : NAN; // NaN below 2%
    bool ended = p->now.total && p->now.done >= p->now.total, known = !ended && isfinite(left);
    if (p->now.what) snprintf(what, sizeof what, "%s", p->now.what);
    else snprintf(what, sizeof what, "step %lld:", (long long)p->step + 1);
    if (part >= 0) // rounded down: 100% only at the end
        snprintf(share, sizeof share, " %.0f%%", ended ? 100 : fmin(99, floor(100 * part)));
    else if (p->now.done)
        snprintf(share, sizeof share, " %.1f MB, %.1f MB/s,", megabytes, megabytes / (now - p->now.begun));
    format_duration(time, known ? left : now - p->now.begun);
    const char *how = known ? "," : ended ? ", took" : "";
    snprintf(work, sizeof work, "  %s%s%s %s%s", what, share, how, time, known ? " left" : "");
    draw(p, p->terminal ? p->last : "", work, p->terminal ? p->numbers : "", now);
}

static void end_drawn_line(Progress *p) {
    if (p->drawn) fputs("\n", p->out);
    p->drawn = false;
}

// ---- Work -----------------------------------------------------------------------------------------------------------

void progress_begin(Progress *p, const char *what, int64_t total) {
    if (!enter(p)) return;
    memset(&p->now, 0, sizeof p->now);
    p->now.runs = true;
    p->now.what = what;
    p->now.begun = clock_seconds();
    p->now.total = total;
    leave(p);
}

void progress_next(Progress *p, int64_t done) {
    if (!enter(p)) return;
    p->now.done = done;
    leave(p);
}

void progress_end(Progress *p) {
    if (!enter(p)) return;
    if (p->now.total) p->now.done = p->now.total;
    if (p->now.shown && !p->now.quiet && p->now.what) draw_work(p, clock_seconds());
    if (!p->horizon) end_drawn_line(p);
    p->now.runs = false;
    leave(p);
}

// ---- The thread -----------------------------------------------------------------------------------------------------

void progress_tick(Progress *p, double now) {
    const double delay = p->terminal ? 1 : 10, interval = p->terminal ? 0.2 : fmax(10, log_interval(now - p->started));
    const char *why = signals_requested(), *what = p->now.runs && p->now.what ? p->now.what : "this step";
    if (why && !p->answered) { // print "finishing this step, then saving; again: quit without saving", once
        const bool ctrl_c = strcmp(why, "SIGINT") == 0, saves = strcmp(what, "saving") == 0; // the terminal shows ^C
        p->answered = true;
        end_drawn_line(p);
        fflush(p->out);
        fprintf(stderr, "%s%sfinishing %s%s%s\n", ctrl_c ? "" : why, ctrl_c ? "" : ": ", what,
                saves ? "" : ", then saving", strncmp(why, "SIG", 3) == 0 ? "; again: quit without saving" : "");
    }
    if (!p->now.runs || p->now.quiet || now - p->now.begun < delay || now - p->shown < interval) return;
    p->now.shown = true;
    draw_work(p, now);
    fflush(p->out);
}

static void tick_now(void *progress) { progress_tick(progress, clock_seconds()); }

void progress_create(Progress *p, FILE *out, bool plain) {
    const char *kind = getenv("TERM");
    const bool redraws = isatty(fileno(out)) == 1 && !(kind && strcmp(kind, "dumb") == 0);
    *p = (Progress){.out = out, .terminal = !plain && redraws};
    p->started = clock_seconds();
    ticker_create(&p->ticker, tick_now, p);
}

void progress_destroy(Progress *p) {
    if (!p->out) return;
    ticker_destroy(&p->ticker);
    p->out = NULL;
}

// ---- The run --------------------------------------------------------------------------------------------------------

void progress_run(Progress *p, int64_t step, int64_t done_tokens, int64_t horizon_tokens) {
    if (!enter(p)) return;
    p->step = step;
    p->tokens = p->first_tokens = done_tokens;
    p->horizon = horizon_tokens;
    p->started = clock_seconds();
    leave(p);
}

void progress_step(Progress *p, const StepMetrics *s, const Noise *noise, bool force) {
    if (!enter(p)) return;
    double now = clock_seconds();
    double interval = p->terminal ? 0.2 : log_interval(now - p->started);
    p->step = s->step;
    p->tokens = s->tokens;
    p->now.runs = false;
    if (force || p->stepped == 0 || now - p->stepped >= interval) {
        format_step(p, s, noise);
        draw(p, p->last, "", p->numbers, now);
        p->stepped = now;
    }
    leave(p);
}

void progress_break(Progress *p) {
    if (!enter(p)) return;
    p->now.quiet = true;
    end_drawn_line(p);
    leave(p);
}
