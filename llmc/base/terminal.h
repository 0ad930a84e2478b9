// terminal: output that fits the terminal's width.
#pragma once

#include "base/common.h"

// Returns the columns of f's terminal. If f is not a terminal: $COLUMNS, or 80.
int terminal_columns(FILE *f);

// True if f is a terminal that can redraw a line: not TERM=dumb.
bool terminal_redraws(FILE *f);

// A line of parts, in the order of display, each with its leading blanks.
typedef struct {
    int count;
    struct {
        char text[64];
        int priority; // the lowest is left out first
    } part[16];
} Line;

__attribute__((format(printf, 3, 4))) void line_add(Line *line, int priority, const char *format, ...);

// Leaves out parts until the line fits into `columns`. A single remaining part is cut.
void line_fit(const Line *line, int columns, char *out, size_t bytes);

// Returns the seconds until the next line of a log that is `elapsed` seconds old: a fiftieth of its age, from 2 s to
// ten minutes. A day of training has about 430 lines.
double log_interval(double elapsed);
