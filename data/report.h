// report: what the user sees: progress, and the inputs that cannot be taken, all in one go.
#ifndef GNS_TOKENIZE_REPORT_H
#define GNS_TOKENIZE_REPORT_H

#include "../llmc/common.h"

typedef struct {
    double start, shown;               // seconds
    uint64_t start_bytes, total_bytes; // total 0: unknown
    bool terminal;
} Progress;

// A line on stderr, at most every 0.2 s on a terminal, every 10 s elsewhere. `last`: closes the line of a terminal.
void progress_show(Progress *p, uint64_t bytes, uint64_t tokens, bool last);

// A line on stderr, over the line of progress.
void print_note(const char *format, ...) __attribute__((format(printf, 1, 2)));

enum { LISTED_MAX = 20 }; // files that are named

typedef struct {
    int files;   // that cannot be taken
    int last;    // input number of the last of these
    Error first; // what is wrong with the first
} Complaints;

// Something is wrong with an input: the first fault of each counts. From the second input on they are printed.
void complaints_add(Complaints *c, int input, const Error *why);

// 0 if there were none; otherwise the error that ends the program.
int complaints_finish(const Complaints *c, int inputs, Error *e);

const char *plural(uint64_t count); // "" or "s"

#endif
