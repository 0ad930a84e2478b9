// Tests the width of a terminal.
#define _XOPEN_SOURCE 700 // posix_openpt
#include "base/terminal.h"
#include "../test.h"

#include <fcntl.h>
#include <stdlib.h>
#include <sys/ioctl.h>
#include <unistd.h>

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
    RUN(test_columns);
    return test_summary();
}
