#include "run/progress.h"

#include "text/hellaswag.h"
#include "gns/noise.h"

#include <math.h>
#include <sys/ioctl.h>
#include <unistd.h>

// ---- The line -------------------------------------------------------------------------------------------------------

static const char redraw[] = "\r\033[K"; // back to the beginning of the terminal's line, and clear it

void progress_create(Progress *p, FILE *out, const Engine *engine, int64_t done_tokens, int64_t horizon_tokens) {
    *p = (Progress){
        .out = out,
        .engine = engine,
        .terminal = isatty(fileno(out)) == 1,
        .horizon = horizon_tokens,
        .first_tokens = done_tokens,
        .started = clock_seconds(),
        .val_loss = NAN,
    };
}

static void format_duration(char *out, size_t bytes, double seconds) {
    if (!isfinite(seconds) || seconds < 0) seconds = 0;
    long s = lround(seconds);
    if (s < 3600) snprintf(out, bytes, "%ld:%02ld", s / 60, s % 60);
    else snprintf(out, bytes, "%ldh%02ld", s / 3600, s / 60 % 60);
}

static void format_gns(char *out, size_t bytes, const Noise *noise, GnsMode mode) {
    const GnsEstimate g = gns_estimate(&noise->ln);
    if (mode == GNS_OFF) snprintf(out, bytes, "off");
    else if (!g.valid || isnan(g.lower)) snprintf(out, bytes, "-");
    else if (!g.significant) snprintf(out, bytes, "> %.3g", g.lower);
    else snprintf(out, bytes, "%.3g +- %.2g", g.scale, g.scale_se);
}

static void format_memory(char *out, size_t bytes, size_t memory) {
    const double gib = 1 << 30;
    if (!memory) snprintf(out, bytes, "memory unknown");
    else if ((double)memory < gib) snprintf(out, bytes, "%.0f MiB", (double)memory / (1 << 20));
    else snprintf(out, bytes, "%.1f GiB", (double)memory / gib);
}

// A narrow terminal cuts off the end, so that what matters least is last.
static void format_step(const Progress *p, const StepMetrics *s, const Noise *noise, double now, char *out,
                        size_t bytes) {
    char gns[64], eta[32], val[32] = "-", mfu[32] = "", memory[32];
    format_gns(gns, sizeof gns, noise, s->mode);
    format_duration(eta, sizeof eta,
                    (now - p->started) * (double)(p->horizon - s->tokens) / (double)(s->tokens - p->first_tokens));
    if (isfinite(p->val_loss)) snprintf(val, sizeof val, "%.4f", p->val_loss);
    if (isfinite(s->mfu)) snprintf(mfu, sizeof mfu, "  MFU %.1f%%", 100 * s->mfu);
    format_memory(memory, sizeof memory, engine_memory_in_use(p->engine));
    snprintf(out, bytes, "step %5lld  %3.0f%%  loss %.4f  val %s  B %lld  GNS %s  %.0f tok/s  ETA %s%s  %s",
             (long long)s->step, 100.0 * (double)s->tokens / (double)p->horizon, s->loss, val, (long long)s->batch, gns,
             s->tok_per_s, eta, mfu, memory);
}

// A line that wraps cannot be redrawn. 0: any width will do.
static int terminal_width(const Progress *p) {
    struct winsize size;
    return p->terminal && ioctl(fileno(p->out), TIOCGWINSZ, &size) == 0 ? size.ws_col : 0;
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
    const double interval = p->terminal ? 0.2 : 2.0; // seconds between lines
    char line[400];
    progress_past(p, (double)s->tokens, s->loss);
    double now = clock_seconds();
    if (!force && now - p->last_shown < interval) return;
    p->last_shown = now;
    format_step(p, s, noise, now, line, sizeof line);
    int width = terminal_width(p), most = width > 1 ? width - 1 : (int)sizeof line;
    fprintf(p->out, "%s%.*s%s", p->terminal ? redraw : "", most, line, p->terminal ? "" : "\n");
    fflush(p->out);
}

void progress_break(Progress *p) {
    if (p->terminal && p->last_shown > 0) fputs("\n", p->out);
    p->last_shown = 0;
}

void progress_val(Progress *p, const StepMetrics *s, double val_loss) {
    p->val_loss = val_loss;
    if (p->terminal && p->last_shown > 0) fputs(redraw, p->out); // the next step draws the line again, below
    if (p->terminal) p->last_shown = 0;
    fprintf(p->out, "step %5lld  val loss %.4f\n", (long long)s->step, val_loss);
    fflush(p->out);
}

void progress_hellaswag(Progress *p, const StepMetrics *s, const HellaSwagScore *score) {
    int n = score->questions;
    progress_break(p);
    fprintf(p->out, "step %5lld  HellaSwag acc %d/%d = %.4f  acc_norm %d/%d = %.4f\n", (long long)s->step,
            score->correct, n, (double)score->correct / n, score->correct_norm, n, (double)score->correct_norm / n);
    fflush(p->out);
}

// ---- The curve ------------------------------------------------------------------------------------------------------

void progress_curve(const Progress *p) {
    double loss[CURVE_WIDTH], low = INFINITY, high = -INFINITY; // mean of each column; NaN without steps
    for (int x = 0; x < CURVE_WIDTH; x++) {
        loss[x] = p->column[x].loss / (double)p->column[x].steps;
        low = fmin(low, loss[x]);
        high = fmax(high, loss[x]);
    }
    if (!(high > low)) return;
    fprintf(p->out, "\ntraining loss (nats a token)\n");
    for (int y = 0; y < CURVE_HEIGHT; y++) {
        double level = high - (high - low) * y / (CURVE_HEIGHT - 1);
        fprintf(p->out, "%7.3f |", level);
        for (int x = 0; x < CURVE_WIDTH; x++) {
            bool here = isfinite(loss[x]) && (int)lround((high - loss[x]) / (high - low) * (CURVE_HEIGHT - 1)) == y;
            fputc(here ? '*' : ' ', p->out);
        }
        fputc('\n', p->out);
    }
    fprintf(p->out, "        +");
    for (int x = 0; x < CURVE_WIDTH; x++) fputc('-', p->out);
    fprintf(p->out, "\n         0%*.3g million tokens\n", CURVE_WIDTH - 15, p->curve_tokens / 1e6);
}
