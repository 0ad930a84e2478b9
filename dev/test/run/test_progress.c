// Progress: a step's line (numbers, width on a terminal), long work, the remaining time, the answer to a signal.
#define _XOPEN_SOURCE 700 // posix_openpt
#include "base/signals.h"
#include "gns/noise.h"
#include "run/progress.h"
#include "../test.h"

#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/ioctl.h>
#include <unistd.h>

static const char redraw[] = "\r\033[K";

enum { T = 10, HORIZON = 10000 };

static const StepMetrics metrics = {
    .step = 299, .tokens = 7000, .batch = 8, .loss = 2.34975, .nll = NAN, .tok_per_s = 25823.4, .mfu = 0.51249};
static const Noise noise = {0};
static Progress p;
static FILE *f; // where p writes

// Begins a run with 6980 tokens done in 10 s.
static void begin(bool terminal, int columns) {
    setenv("COLUMNS", path_of("%d", columns), 1);
    f = tmpfile();
    CHECK(f != NULL, "no file");
    progress_create(&p, f, false);
    p.terminal = terminal;
    progress_run(&p, 298, 6980, HORIZON);
    p.first_tokens = 0, p.started -= 10;
}

static void end(void) {
    progress_destroy(&p);
    fclose(f);
}

// Returns the text written to a file since the last call.
static const char *written(FILE *file) {
    static char text[4000];
    fflush(file);
    rewind(file);
    text[fread(text, 1, sizeof text - 1, file)] = 0;
    rewind(file);
    CHECK(ftruncate(fileno(file), 0) == 0, "cannot cut a temporary file");
    return text;
}

// Returns the line that a step prints to a file.
static const char *show(const StepMetrics *s, const Noise *n) {
    begin(false, 200);
    progress_step(&p, s, n, true);
    const char *line = written(f);
    end();
    return line;
}

static void test_line(void) {
    StepMetrics unknown = metrics;
    const char *line = show(&metrics, &noise);
    static const char want[] = "step   299  70%  ETA 0:04  loss 2.3497  B 8  25823 tok/s  MFU 51.2%\n";
    CHECK(strncmp(line, want, strlen(want)) == 0, "%s", line);
    CHECK(line[strlen(line) - 1] == '\n' && !strchr(line, '\r'), "%s", line);
    unknown.mfu = NAN, unknown.tok_per_s = 613946;
    unknown.has_target = true, unknown.target.aim = 12.34;
    line = show(&unknown, &noise);
    CHECK(!strstr(line, "MFU") && !strstr(line, "-") && !strstr(line, "GNS"), "%s", line);
    CHECK(strstr(line, "  B 8  614k tok/s  aim 12.3"), "%s", line);
}

// The noise scale's field is empty while the scale is unknown.
static void test_gns(void) {
    static const struct {
        double g2, spread; // spread: of the squared gradient
        const char *want;
    } cases[] = {{1, 0, "  GNS 10  "}, {1, 3, "  GNS > "}, {1, 1e6, ""}, {-1, 1e4, ""}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        double spread = cases[i].spread;
        StepMetrics s = metrics;
        Noise n = {.ln = {.steps = 100, .weight = 1, .g2 = cases[i].g2, .s = 10, .weight_sq = 0.01, .diff_weight = 1}};
        n.ln.diff_gg = 100 * spread * spread, n.ln.diff_ss = 1e-3;
        s.mode = GNS_LN;
        const char *line = show(&s, &n), *gns = strstr(line, "  GNS");
        CHECK(*cases[i].want ? gns && strncmp(gns, cases[i].want, strlen(cases[i].want)) == 0 : !gns, "%s", line);
        CHECK(!strstr(line, "  GNS +- ") == (i > 0), "%s", line);
    }
}

static void test_width_of_a_terminal(void) {
    for (int columns = 20; columns <= 200; columns += 20) {
        begin(true, columns);
        progress_step(&p, &metrics, &noise, true);
        const char *line = written(f);
        CHECK(strncmp(line, redraw, strlen(redraw)) == 0 && !strchr(line, '\n'), "%s", line);
        CHECK(strlen(line) - strlen(redraw) < (size_t)columns, "%d columns: %s", columns, line);
        CHECK(columns < 40 || (strstr(line, "  ETA ") && strstr(line, "  loss ")), "%s", line);
        CHECK(columns < 80 || (strstr(line, "  B 8") && strstr(line, " tok/s") && strstr(line, "  MFU ")), "%s", line);
        CHECK(columns > 40 || strcmp(line + strlen(redraw),
                                     columns > 20 ? "step   299  70%  ETA 0:04  loss 2.3497" : "step   299  70%") == 0,
              "%s", line);
        end();
    }
}

// Other lines appear between two drawings of a step's line. The drawn line ends before other lines begin.
static void test_other_lines(void) {
    for (int terminal = 0; terminal < 2; terminal++) {
        begin(terminal, 120);
        progress_step(&p, &metrics, &noise, true);
        written(f);
        progress_break(&p);
        fputs("step   299  val loss 1.2500\n", f);
        progress_step(&p, &metrics, &noise, true);
        progress_break(&p);
        const char *text = written(f), *want = path_of("%sstep   299  val loss 1.2500\n%sstep   299  70%%",
                                                       terminal ? "\n" : "", terminal ? redraw : "");
        CHECK(strncmp(text, want, strlen(want)) == 0, "%s", text);
        CHECK(text[strlen(text) - 1] == '\n' && text[strlen(text) - 2] != '\n', "%s", text);
        end();
    }
}

// ---- Work that takes long -------------------------------------------------------------------------------------------

// Checks what a long step of 8 rows shows: nothing before the delay, then the share done and the time left, and nothing
// at its end.
static void test_step(void) {
    for (int terminal = 0; terminal < 2; terminal++) {
        begin(terminal, 80);
        double delay = terminal ? 1 : 10, now = clock_seconds();
        progress_begin(&p, NULL, 8 * T);
        progress_next(&p, 2 * T);
        progress_tick(&p, now + 0.9 * delay);
        CHECK(!*written(f), "too early");
        progress_tick(&p, now + 100);
        const char *line = written(f), *want = path_of("%sstep 299: 25%%, 5:00 left  ETA ", terminal ? redraw : "");
        CHECK(strncmp(line, want, strlen(want)) == 0 && (strchr(line, '\n') != NULL) != terminal, "%s", line);
        progress_next(&p, 7 * T);
        progress_tick(&p, now + 300);
        CHECK(strstr(written(f), "step 299: 87%, "), "another share");
        progress_tick(&p, now + 300.1);
        CHECK(!*written(f), "too often");
        progress_end(&p);
        progress_tick(&p, now + 400);
        CHECK(!*written(f), "work that has ended");
        end();
    }
}

// Without a run (--eval-only) the line of work ends at 100% and stays. Work of unknown length shows bytes and time.
static void test_work(void) {
    begin(true, 80);
    double now = clock_seconds();
    p.horizon = 0;
    progress_begin(&p, "reading the data", 0);
    progress_tick(&p, now + 65);
    CHECK(strcmp(written(f), "\r\033[Kreading the data 1:05") == 0, "no length");
    progress_next(&p, 130000000);
    progress_tick(&p, now + 66);
    CHECK(strcmp(written(f), "\r\033[Kreading the data 130.0 MB, 2.0 MB/s, 1:06") == 0, "bytes");
    progress_end(&p);
    progress_begin(&p, "validation", 200);
    progress_next(&p, 50);
    progress_tick(&p, now + 100);
    const char *line = written(f);
    CHECK(strstr(line, "validation 25%, 5:00 left"), "%s", line);
    progress_end(&p);
    line = written(f);
    CHECK(strstr(line, "validation 100%, took 0:00\n"), "%s", line);
    progress_begin(&p, "HellaSwag", 200);
    progress_break(&p);
    progress_tick(&p, now + 200);
    CHECK(!*written(f), "a line after progress_break");
    end();
}

// In a log: the first step, then at most one line per log_interval, and the last step.
static void test_log(void) {
    static const struct {
        double started, stepped; // seconds by which p.started and p.stepped go back before the step
        bool force, line;
    } cases[] = {{0, 0, false, true},      {0, 0, false, false}, {0, 3, false, true},
                 {1000, 19, false, false}, {0, 2, false, true},  {0, 0, true, true}}; // 1000 s: log_interval is 20 s
    begin(false, 80);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        p.started -= cases[i].started, p.stepped -= cases[i].stepped;
        progress_step(&p, &metrics, &noise, cases[i].force);
        CHECK(!*written(f) != cases[i].line, "line %zu", i);
    }
    end();
}

// Tokens 100 to 200 of 1000 took 10 s, so 80 s are left. Within a step its finished rows count too.
static void test_left(void) {
    begin(false, 80);
    progress_run(&p, 1, 100, 1000);
    CHECK(isnan(progress_left(&p, p.started + 5)), "known before a step");
    p.tokens = 200;
    CHECK(fabs(progress_left(&p, p.started + 10) - 80) < 1e-9, "%g s", progress_left(&p, p.started + 10));
    progress_begin(&p, NULL, 10 * T);
    progress_next(&p, 5 * T);
    double slow = progress_left(&p, p.started + 60); // 150 tokens in 60 s
    CHECK(fabs(slow - 300) < 1e-9, "%g s within a slow step", slow);
    p.tokens = 1000;
    CHECK(progress_left(&p, p.started + 99) == 0, "after the end");
    end();
}

// A signal is answered once, on standard error, within the step. The request cannot be undone: this test runs last.
static void test_signal(void) {
    FILE *errors = tmpfile();
    int before = dup(STDERR_FILENO);
    begin(true, 80);
    progress_begin(&p, NULL, 8 * T);
    progress_next(&p, 4 * T);
    signals_install();
    raise(SIGINT);
    dup2(fileno(errors), STDERR_FILENO);
    progress_tick(&p, p.now.begun + 40);
    progress_tick(&p, p.now.begun + 41);
    dup2(before, STDERR_FILENO);
    const char *text = written(errors);
    CHECK(strcmp(text, "finishing this step, then saving; again: quit without saving\n") == 0, "%s", text);
    fclose(errors);
    close(before);
    end();
}

static void test_terminal(void) {
    struct winsize size = {.ws_row = 24, .ws_col = 40};
    FILE *file = tmpfile();
    int master = posix_openpt(O_RDWR | O_NOCTTY);
    CHECK(file && master >= 0 && grantpt(master) == 0 && unlockpt(master) == 0, "no pseudo-terminal");
    FILE *terminal = fopen(ptsname(master), "w");
    unsetenv("COLUMNS");
    CHECK(terminal && progress_columns(terminal) == 80 && progress_columns(file) == 80, "unknown: 80");
    setenv("COLUMNS", "57", 1);
    CHECK(progress_columns(terminal) == 57 && progress_columns(file) == 57, "by the environment");
    ioctl(fileno(terminal), TIOCSWINSZ, &size);
    CHECK(progress_columns(terminal) == 40 && progress_columns(file) == 57, "the terminal knows better");
    setenv("COLUMNS", "rubbish", 1);
    CHECK(progress_columns(file) == 80, "%d", progress_columns(file));
    for (int i = 0; i < 4; i++) { // a terminal redraws its line, unless it is dumb or lines must be plain
        setenv("TERM", i == 1 ? "dumb" : "xterm", 1);
        progress_create(&p, i == 3 ? file : terminal, i == 2);
        CHECK(p.terminal == (i == 0), "case %d: %d", i, p.terminal);
        progress_destroy(&p);
    }
    fclose(terminal);
    fclose(file);
    close(master);
}

int main(void) {
    RUN(test_line, test_gns, test_width_of_a_terminal, test_other_lines, test_step, test_work, test_log, test_left,
        test_signal, test_terminal);
    return test_summary();
}
