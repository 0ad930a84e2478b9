#include "base/terminal.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

int terminal_columns(FILE *f) {
    struct winsize size;
    const char *set = getenv("COLUMNS");
    int columns = ioctl(fileno(f), TIOCGWINSZ, &size) == 0 ? size.ws_col : 0;
    if (columns == 0 && set) columns = atoi(set);
    return columns < 10 || columns > 10000 ? 80 : columns;
}

bool terminal_redraws(FILE *f) {
    const char *kind = getenv("TERM");
    return isatty(fileno(f)) == 1 && !(kind && strcmp(kind, "dumb") == 0);
}

double log_interval(double elapsed) { return fmin(fmax(elapsed / 50, 2), 600); }
