// terminal: output that fits the terminal's width.
#pragma once

#include "base/common.h"

// Returns the columns of f's terminal. If f is not a terminal: $COLUMNS, or 80.
int terminal_columns(FILE *f);

// True if f is a terminal that can redraw a line ($TERM is not "dumb").
bool terminal_redraws(FILE *f);

// Returns the seconds until the next line of a log that is `elapsed` seconds old: a fiftieth of its age, but at least
// 2 s and at most ten minutes. The log of a day of training has about 430 lines.
double log_interval(double elapsed);
