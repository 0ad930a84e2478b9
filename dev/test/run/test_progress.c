// The line of a step: its numbers, its memory compared with the kernel's count, and its width on a terminal. Work that
// takes long, the time that is left, and the answer to a signal.
#define _GNU_SOURCE // posix_openpt
#include "base/signals.h"
#include "gns/noise.h"
#include "run/progress.h"
#include "../test.h"

#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/ioctl.h>
#include <unistd.h>

static const StepMetrics metrics = {
    .step = 299, .tokens = 7000, .batch = 8, .loss = 2.34975, .tok_per_s = 25823.4, .mfu = 0.51249};

// The CPU engine has the memory of its process, whatever its state. Its progress is this.
static double engine_share;
static double share_of(const Engine *engine) {
    (void)engine;
    return engine_share;
}
static EngineApi api;
static const EngineApi *const state = &api;
static const Engine *const engine = (const Engine *)&state;

enum { T = 10, HORIZON = 10000 };

static Progress p;
static FILE *f; // p's

static void begin(FILE *file, bool terminal) {
    f = file;
    CHECK(f != NULL, "no file");
    progress_create(&p, f, false);
    p.terminal = terminal;
    progress_run(&p, engine, T, 298, 6980, HORIZON);
    p.first_tokens = 0, p.started -= 10; // 6980 tokens in 10 s
}

static void end(void) {
    progress_destroy(&p);
    fclose(f);
}

// What was written to the file since the last call.
static char *written(FILE *f) {
    static char text[4000];
    fflush(f);
    rewind(f);
    text[fread(text, 1, sizeof text - 1, f)] = 0;
    rewind(f);
    CHECK(ftruncate(fileno(f), 0) == 0, "cannot cut a temporary file");
    return text;
}

static int widest(const char *text) {
    int width = 0, most = 0;
    for (; *text; text++) {
        if (strncmp(text, "\033[K", 3) == 0) text += 2, width--; // takes no column
        width = *text == '\n' || *text == '\r' ? 0 : width + 1;
        if (width > most) most = width;
    }
    return most;
}

// What a step prints into a file.
static void show(const StepMetrics *s, char *out, size_t bytes) {
    Noise noise = {0};
    setenv("COLUMNS", "200", 1);
    begin(tmpfile(), false);
    progress_step(&p, s, &noise, true);
    snprintf(out, bytes, "%s", written(f));
    end();
    unsetenv("COLUMNS");
}

static void test_line(void) {
    char line[400];
    StepMetrics unknown = metrics;
    show(&metrics, line, sizeof line);
    static const char want[] = "step   299  70%  ETA 0:04  loss 2.3497  B 8  25823 tok/s  MFU 51.2%  ";
    CHECK(strncmp(line, want, strlen(want)) == 0, "%s", line);
    CHECK(line[strlen(line) - 1] == '\n' && !strchr(line, '\r'), "%s", line);
    unknown.mfu = NAN;
    show(&unknown, line, sizeof line);
    CHECK(!strstr(line, "MFU") && !strstr(line, "-") && !strstr(line, "GNS") && strstr(line, "iB\n"), "%s", line);
    unknown.tok_per_s = 613946;
    show(&unknown, line, sizeof line);
    CHECK(strstr(line, "  614k tok/s"), "%s", line);
    strcpy(unknown.why, ", up: aim 12.3"); // why the batch changes stands after it
    show(&unknown, line, sizeof line);
    CHECK(strstr(line, "  B 8, up: aim 12.3  614k tok/s"), "%s", line);
}

// The field of the noise scale: nothing while nothing is known.
static void test_gns(void) {
    static const struct {
        double g2, spread; // of the squared gradient
        const char *want;
    } cases[] = {{1, 0, "  GNS 10 +- "}, {1, 3, "  GNS > "}, {1, 1e6, ""}, {-1, 1e4, ""}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        double spread = cases[i].spread;
        StepMetrics s = metrics;
        Noise noise = {
            .ln = {.steps = 100, .weight = 1, .g2 = cases[i].g2, .s = 10, .weight_sq = 0.01, .diff_weight = 1}};
        noise.ln.diff_gg = 100 * spread * spread, noise.ln.diff_ss = 1e-3;
        s.mode = GNS_LN;
        setenv("COLUMNS", "120", 1);
        begin(tmpfile(), false);
        progress_step(&p, &s, &noise, true);
        const char *line = written(f), *gns = strstr(line, "  GNS");
        unsetenv("COLUMNS");
        CHECK(*cases[i].want ? gns && strncmp(gns, cases[i].want, strlen(cases[i].want)) == 0 : !gns, "%s", line);
        end();
    }
}

// Resident memory by /proc/self/status, which counts in another way.
static double resident_mib(void) {
    char text[200];
    double kib = NAN;
    FILE *f = fopen("/proc/self/status", "r");
    while (f && fgets(text, sizeof text, f))
        if (sscanf(text, "VmRSS: %lf kB", &kib) == 1) break;
    if (f) fclose(f);
    return kib / 1024;
}

static double memory_shown(void) {
    char line[400], unit[8] = "";
    double size = NAN;
    show(&metrics, line, sizeof line);
    const char *memory = strstr(line, "MFU 51.2%  ");
    CHECK(memory && sscanf(memory, "MFU 51.2%%  %lf %7s", &size, unit) == 2, "%s", line);
    return strcmp(unit, "GiB") == 0 ? 1024 * size : size;
}

static void test_memory(void) {
    enum { MIB = 1 << 20, MORE = 100 };
    Error e = {0};
    char *block;
    double before = memory_shown();
    CHECK(fabs(before - resident_mib()) < 4, "%g MiB, the kernel says %g", before, resident_mib());
    CHECK_OK(memory_alloc((void **)&block, (size_t)MORE * MIB, "test", &e), &e);
    double asked = memory_shown(); // not touched, so not resident yet
    CHECK(fabs(asked - before) < 8, "%g MiB, then %g", before, asked);
    for (size_t i = 0; i < (size_t)MORE * MIB; i += 512) ((volatile char *)block)[i] = (char)i;
    double after = memory_shown();
    CHECK(fabs(after - before - MORE) < 8, "%g MiB, then %g", before, after);
    memory_free(block);
}

// All that was written to the terminal: the kernel may hand it over in parts.
static void read_all(int master, FILE *f, char *out, size_t bytes) {
    size_t used = 0;
    fputc('@', f);
    fflush(f);
    while (used + 1 < bytes && (used == 0 || out[used - 1] != '@')) {
        ssize_t n = read(master, out + used, bytes - 1 - used);
        if (n <= 0) break;
        used += (size_t)n;
    }
    out[used ? used - 1 : 0] = 0;
}

// What a step of a run with every number draws on a pseudo-terminal with this many columns.
static void draw(int columns, char *line, size_t bytes) {
    Noise noise = {0};
    StepMetrics s = metrics;
    int master = posix_openpt(O_RDWR | O_NOCTTY);
    CHECK(master >= 0 && grantpt(master) == 0 && unlockpt(master) == 0, "no pseudo-terminal");
    int slave = open(ptsname(master), O_RDWR | O_NOCTTY);
    struct winsize size = {.ws_row = 24, .ws_col = (unsigned short)columns};
    CHECK(slave >= 0 && ioctl(slave, TIOCSWINSZ, &size) == 0, "no pseudo-terminal");
    begin(fdopen(slave, "w"), true);
    p.val_loss = 2.25;
    for (s.step = 18000; s.step < 18003; s.step++) s.loss -= 0.3, s.tokens += 100, progress_step(&p, &s, &noise, true);
    read_all(master, f, line, bytes);
    end();
    close(master);
}

static void test_terminal(void) {
    static const char redraw[] = "\r\033[K";
    char line[4000];
    for (int columns = 20; columns <= 200; columns += 20) {
        draw(columns, line, sizeof line);
        CHECK(strncmp(line, redraw, strlen(redraw)) == 0 && !strchr(line, '\n'), "%s", line);
        CHECK(widest(line) < columns, "%d wide on %d columns: %s", widest(line), columns, line);
        CHECK(columns < 40 || (strstr(line, "  ETA ") && strstr(line, "  loss ")), "%s", line);
        CHECK(columns < 80 || (strstr(line, "  B 8") && strstr(line, " tok/s") && strstr(line, "  MFU ")), "%s", line);
    }
    CHECK(strstr(line, "val 2.2500") && strstr(line, "iB"), "cut on a wide terminal: %s", line);
}

// A validation between two drawings of the line leaves one line, which later drawings do not overwrite.
static void test_validation(void) {
    for (int terminal = 0; terminal < 2; terminal++) {
        Noise noise = {0};
        setenv("COLUMNS", "120", 1);
        begin(tmpfile(), terminal);
        progress_step(&p, &metrics, &noise, true);
        progress_val(&p, &metrics, 1.25);
        progress_step(&p, &metrics, &noise, true);
        progress_break(&p);
        const char *text = written(f);
        const char *drawn = terminal ? "\r\033[K" : "", *line = strstr(text, "step   299  val loss 1.2500\n");
        const char *next = line ? strchr(line, '\n') + 1 : "";
        CHECK(line && strncmp(line - strlen(drawn), drawn, strlen(drawn)) == 0 && (terminal || line[-1] == '\n'), "%s",
              text);
        CHECK(strncmp(next, drawn, strlen(drawn)) == 0 && strstr(next, "  val 1.2500  "), "%s", text);
        CHECK(next[strlen(next) - 1] == '\n' && next[strlen(next) - 2] != '\n', "%s", text);
        end();
        unsetenv("COLUMNS");
    }
}

// ---- Work that takes long -------------------------------------------------------------------------------------------

// A step of 8 rows in two pieces: nothing within the delay, then its share and what is left, and at its end nothing.
static void check_step(bool terminal) {
    begin(tmpfile(), terminal);
    double delay = terminal ? 1 : 10, now = clock_seconds();
    progress_begin(&p, STAGE_STEP, NULL, 8, 2);
    progress_next(&p, 0, 4);
    progress_tick(&p, now + 0.9 * delay);
    CHECK(!*written(f), "too early");
    engine_share = 0.5;
    progress_tick(&p, now + 100);
    const char *line = written(f);
    CHECK(strstr(line, "step 299: 25%, 5:00 left  micro-step 1 of 2  ETA ") && widest(line) <= 80, "%s", line);
    CHECK(strncmp(line, "\r\033[K", 4) == 0 ? terminal && !strchr(line, '\n') : !terminal, "%s", line);
    engine_share = 0; // the engine has begun the next piece, and the program has not said so
    progress_tick(&p, now + 200);
    CHECK(strstr(written(f), "step 299: 25%, "), "a share that falls");
    progress_next(&p, 4, 4);
    engine_share = 1;
    progress_tick(&p, now + 300);
    CHECK(strstr(written(f), "step 299: 99%, "), "100%% before its end");
    progress_tick(&p, now + 300.1);
    CHECK(!*written(f), "too often");
    progress_end(&p);
    progress_tick(&p, now + 400);
    CHECK(!*written(f), "work that has ended");
    CHECK(p.tokens == 6980 + 80 && p.step == 299, "step %lld, %lld tokens", (long long)p.step, (long long)p.tokens);
    end();
    engine_share = 0;
}

static void test_step(void) { check_step(true), check_step(false); }

// Without a run (--eval-only) the line of work ends at 100%, on a line of its own. Work of unknown length shows its time.
static void test_work(void) {
    f = tmpfile();
    double now = clock_seconds();
    progress_create(&p, f, false);
    p.terminal = true;
    progress_begin(&p, STAGE_SETUP, "reading the data", 0, 0);
    progress_tick(&p, now + 65);
    CHECK(strcmp(written(f), "\r\033[Kreading the data 1:05") == 0, "no length");
    progress_end(&p);
    progress_begin(&p, STAGE_VALIDATE, "validation", 200, 200);
    progress_next(&p, 50, 10);
    progress_tick(&p, now + 100);
    const char *line = written(f);
    CHECK(strstr(line, "validation 25%, 5:00 left  50 of 200"), "%s", line);
    progress_end(&p);
    line = written(f);
    CHECK(strstr(line, "validation 100%, took 0:00\n"), "%s", line);
    progress_begin(&p, STAGE_TEST, "HellaSwag", 200, 200);
    progress_end(&p);
    CHECK(!*written(f), "work that was short is shown");
    progress_begin(&p, STAGE_TEST, "HellaSwag", 200, 200);
    progress_break(&p);
    progress_tick(&p, now + 200);
    CHECK(!*written(f), "a line after progress_break");
    end();
}

// In a log: the first step, then as rarely as log_interval says, and the last.
static void test_log(void) {
    Noise noise = {0};
    begin(tmpfile(), false);
    progress_step(&p, &metrics, &noise, false);
    CHECK(*written(f), "no first line");
    progress_step(&p, &metrics, &noise, false);
    CHECK(!*written(f), "a second line at once");
    p.stepped -= 3;
    progress_step(&p, &metrics, &noise, false);
    CHECK(*written(f), "no line after 3 s");
    p.started -= 1000, p.stepped -= 19; // the interval is 20 s
    progress_step(&p, &metrics, &noise, false);
    CHECK(!*written(f), "a line after 19 s of a log of 1000 s");
    p.stepped -= 2;
    progress_step(&p, &metrics, &noise, false);
    CHECK(*written(f), "no line after 21 s");
    end();
}

// Tokens 100 to 200 of 1000 took 10 s: 80 s are left; within a step its share counts.
static void test_left(void) {
    f = tmpfile();
    progress_create(&p, f, false);
    progress_run(&p, engine, T, 1, 100, 1000);
    CHECK(isnan(progress_left(&p, p.started + 5)), "known before a step");
    p.tokens = 200;
    CHECK(fabs(progress_left(&p, p.started + 10) - 80) < 1e-9, "%g s", progress_left(&p, p.started + 10));
    progress_begin(&p, STAGE_STEP, NULL, 10, 2);
    progress_next(&p, 5, 5);
    double slow = progress_left(&p, p.started + 60); // 150 tokens in 60 s
    CHECK(fabs(slow - 300) < 1e-9, "%g s within a slow step", slow);
    p.tokens = 1000;
    CHECK(progress_left(&p, p.started + 99) == 0, "after the end");
    end();
}

// Said once, within the first step, by 10 s: a run of 10,000 tokens at 8 tokens in 100 s.
static void test_long_run(void) {
    f = tmpfile();
    for (int hours = 0; hours < 2; hours++) {
        progress_create(&p, f, false);
        progress_run(&p, engine, 1, 0, 0, hours ? 10000 : 100);
        progress_begin(&p, STAGE_STEP, NULL, 16, 2);
        progress_next(&p, 8, 8);
        progress_tick(&p, p.now.begun + 100);
        const char *text = written(f);
        CHECK(!strstr(text, "note: the run takes 34h41 at this speed") == !hours, "%s", text);
        progress_tick(&p, p.now.begun + 120);
        CHECK(!strstr(written(f), "note"), "said twice");
        progress_destroy(&p);
    }
    fclose(f);
}

// Once, on standard error, within the step. (The signal stays requested: this is the last test.)
static void test_signal(void) {
    FILE *errors = tmpfile();
    int before = dup(STDERR_FILENO);
    begin(tmpfile(), true);
    progress_begin(&p, STAGE_STEP, NULL, 8, 2);
    progress_next(&p, 4, 4);
    signals_install();
    raise(SIGINT);
    dup2(fileno(errors), STDERR_FILENO);
    progress_tick(&p, p.now.begun + 40);
    progress_tick(&p, p.now.begun + 41);
    dup2(before, STDERR_FILENO);
    const char *text = written(errors);
    CHECK(strcmp(text, "finishing this step (0:40), then saving; again: quit without saving\n") == 0, "%s", text);
    progress_destroy(&p);
    fclose(errors);
    fclose(f);
    close(before);
}

int main(void) {
    api = cpu_engine;
    api.progress = share_of;
    RUN(test_line);
    RUN(test_gns);
    RUN(test_memory);
    RUN(test_terminal);
    RUN(test_validation);
    RUN(test_step);
    RUN(test_work);
    RUN(test_log);
    RUN(test_left);
    RUN(test_long_run);
    RUN(test_signal);
    return test_summary();
}
