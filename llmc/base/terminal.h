// terminal: lines that fit the terminal that they are printed on.
#pragma once

#include "base/common.h"

// Of the terminal that f is; elsewhere $COLUMNS, or 80.
int terminal_columns(FILE *f);

// A line of parts, in the order of display, each with the blanks before it.
typedef struct {
    int count;
    struct {
        char text[64];
        int worth; // what is worth least gives way first
    } part[16];
} Line;

__attribute__((format(printf, 3, 4))) void line_add(Line *line, int worth, const char *format, ...);

// Writes the line without the parts that do not fit into `columns`. The last part that is left is cut.
void line_fit(const Line *line, int columns, char *out, size_t bytes);

// Writes the text to f with no line longer than `columns`, broken at blanks; what follows a break begins after `indent`
// blanks. A longer word stays whole.
void fold_text(FILE *f, const char *text, int columns, int indent);

// Prints to f, folded where f is a terminal. Elsewhere a line stays one line.
void print_lines(FILE *f, int indent, const char *text);
__attribute__((format(printf, 3, 4))) void print_folded(FILE *f, int indent, const char *format, ...);

// Seconds until the next line of a log that is `elapsed` seconds old: 2 at first, then a fiftieth of its age, at most ten
// minutes. A day of training has some 450 lines.
double log_interval(double elapsed);
