// Lines that fit: parts left out by priority, the width of a terminal.
#define _XOPEN_SOURCE 700 // posix_openpt
#include "base/terminal.h"
#include "../test.h"

#include <fcntl.h>
#include <stdlib.h>
#include <sys/ioctl.h>
#include <unistd.h>

#define CHECK_STR(got, want) CHECK(strcmp(got, want) == 0, "\"%s\"", got)

static void test_line_fit(void) {
    Line parts = {0}, one = {0};
    char line[100];
    line_add(&parts, 9, "step %5d", 7);
    line_add(&parts, 8, "  ETA %s", "1:23");
    line_add(&parts, 1, "  memory");
    line_add(&parts, 5, "  loss 2.5");
    line_add(&one, 1, "  ETA 1:23");
    for (int columns = 1; columns < 60; columns++) {
        line_fit(&parts, columns, line, sizeof line);
        CHECK((int)strlen(line) <= columns, "%zu wide on %d columns: %s", strlen(line), columns, line);
    }
    line_fit(&parts, 38, line, sizeof line);
    CHECK_STR(line, "step     7  ETA 1:23  memory  loss 2.5");
    line_fit(&parts, 37, line, sizeof line);
    CHECK_STR(line, "step     7  ETA 1:23  loss 2.5");
    line_fit(&parts, 29, line, sizeof line);
    CHECK_STR(line, "step     7  ETA 1:23");
    line_fit(&parts, 4, line, sizeof line); // the last part is cut
    CHECK_STR(line, "step");
    line_fit(&one, 80, line, sizeof line); // the first part has nothing before it
    CHECK_STR(line, "ETA 1:23");
}

static void test_columns(void) {
    struct winsize size = {.ws_row = 24, .ws_col = 40};
    FILE *file = tmpfile();
    int master = posix_openpt(O_RDWR | O_NOCTTY);
    CHECK(file && master >= 0 && grantpt(master) == 0 && unlockpt(master) == 0, "no pseudo-terminal");
    FILE *terminal = fopen(ptsname(master), "w");
    unsetenv("COLUMNS");
    CHECK(terminal && terminal_columns(terminal) == 80 && terminal_columns(file) == 80, "unknown: 80");
    setenv("COLUMNS", "57", 1);
    CHECK(terminal_columns(terminal) == 57 && terminal_columns(file) == 57, "by the environment");
    ioctl(fileno(terminal), TIOCSWINSZ, &size);
    CHECK(terminal_columns(terminal) == 40 && terminal_columns(file) == 57, "the terminal knows better");
    setenv("COLUMNS", "rubbish", 1);
    CHECK(terminal_columns(file) == 80, "%d", terminal_columns(file));
    unsetenv("COLUMNS");
    setenv("TERM", "xterm", 1);
    CHECK(terminal_redraws(terminal) && !terminal_redraws(file), "a terminal redraws");
    setenv("TERM", "dumb", 1);
    CHECK(!terminal_redraws(terminal), "TERM=dumb");
    fclose(terminal);
    fclose(file);
    close(master);
}

int main(void) {
    RUN(test_line_fit, test_columns);
    return test_summary();
}
