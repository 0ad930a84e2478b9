// The line of a step: its numbers, its memory compared with the kernel's count, and its width on a terminal.
#define _XOPEN_SOURCE 700 // posix_openpt
#include "gns/noise.h"
#include "run/progress.h"
#include "../test.h"

#include <fcntl.h>
#include <sys/ioctl.h>
#include <unistd.h>

static const StepMetrics metrics = {
    .step = 299, .tokens = 7000, .batch = 8, .loss = 2.34975, .tok_per_s = 25823.4, .mfu = 0.51249};

// The CPU engine has the memory of its process, whatever its state.
static const EngineApi *const state = &cpu_engine;
static const Engine *const engine = (const Engine *)&state;

// What a step prints into a file.
static void show(const StepMetrics *s, char *out, size_t bytes) {
    Progress p;
    Noise noise = {0};
    FILE *f = tmpfile();
    CHECK(f != NULL, "no temporary file");
    progress_create(&p, f, engine, 0, 10000);
    progress_step(&p, s, &noise, true);
    rewind(f);
    out[fread(out, 1, bytes - 1, f)] = 0;
    fclose(f);
}

static void test_line(void) {
    char line[400];
    StepMetrics unknown = metrics;
    show(&metrics, line, sizeof line);
    static const char want[] = "step   299   70%  loss 2.3497  val -  B 8  GNS off  25823 tok/s  ETA 0:00  MFU 51.2%  ";
    CHECK(strncmp(line, want, strlen(want)) == 0, "%s", line);
    CHECK(line[strlen(line) - 1] == '\n' && !strchr(line, '\r'), "%s", line);
    unknown.mfu = NAN;
    show(&unknown, line, sizeof line);
    CHECK(!strstr(line, "MFU") && strstr(line, "  ETA 0:00  ") && !strstr(line, "   ETA") && strstr(line, "iB\n"), "%s",
          line);
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

// What a step draws on a pseudo-terminal with this many columns.
static void draw(int columns, char *out, size_t bytes) {
    Progress p;
    Noise noise = {0};
    int master = posix_openpt(O_RDWR | O_NOCTTY);
    CHECK(master >= 0 && grantpt(master) == 0 && unlockpt(master) == 0, "no pseudo-terminal");
    int slave = open(ptsname(master), O_RDWR | O_NOCTTY);
    struct winsize size = {.ws_row = 24, .ws_col = (unsigned short)columns};
    CHECK(slave >= 0 && ioctl(slave, TIOCSWINSZ, &size) == 0, "no pseudo-terminal");
    FILE *f = fdopen(slave, "w");
    progress_create(&p, f, engine, 0, 10000);
    progress_step(&p, &metrics, &noise, true);
    ssize_t n = read(master, out, bytes - 1);
    out[n > 0 ? n : 0] = 0;
    fclose(f);
    close(master);
}

static void test_terminal(void) {
    static const char redraw[] = "\r\033[K";
    char line[400];
    for (int columns = 20; columns <= 200; columns += 20) {
        draw(columns, line, sizeof line);
        CHECK(strncmp(line, redraw, strlen(redraw)) == 0 && !strchr(line, '\n'), "%s", line);
        int width = (int)(strlen(line) - strlen(redraw));
        CHECK(width < columns && (width == columns - 1 || columns > 90), "%d wide on %d columns", width, columns);
    }
    CHECK(strstr(line, "MiB") || strstr(line, "GiB"), "cut on a wide terminal: %s", line);
}

// A validation between two drawings of the line leaves one line, which later drawings do not overwrite.
static void test_validation(void) {
    char text[2000];
    for (int terminal = 0; terminal < 2; terminal++) {
        Progress p;
        Noise noise = {0};
        FILE *f = tmpfile();
        progress_create(&p, f, engine, 0, 10000);
        p.terminal = terminal;
        progress_step(&p, &metrics, &noise, true);
        progress_val(&p, &metrics, 1.25);
        progress_step(&p, &metrics, &noise, true);
        progress_break(&p);
        rewind(f);
        text[fread(text, 1, sizeof text - 1, f)] = 0;
        const char *drawn = terminal ? "\r\033[K" : "", *line = strstr(text, "step   299  val loss 1.2500\n");
        const char *next = line ? strchr(line, '\n') + 1 : "";
        CHECK(line && strncmp(line - strlen(drawn), drawn, strlen(drawn)) == 0 && (terminal || line[-1] == '\n'), "%s",
              text);
        CHECK(strncmp(next, drawn, strlen(drawn)) == 0 && strstr(next, "val 1.2500  "), "%s", text);
        CHECK(next[strlen(next) - 1] == '\n' && next[strlen(next) - 2] != '\n', "%s", text);
        fclose(f);
    }
}

int main(void) {
    RUN(test_line);
    RUN(test_memory);
    RUN(test_terminal);
    RUN(test_validation);
    return test_summary();
}
