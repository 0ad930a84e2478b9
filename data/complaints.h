// complaints: inputs that cannot be taken. They are told in one go, so that they can be repaired in one go.
#ifndef GNS_TOKENIZE_COMPLAINTS_H
#define GNS_TOKENIZE_COMPLAINTS_H

#include "base/common.h"

enum { LISTED_MAX = 20 }; // files that are named, of however many

typedef struct {
    int files;   // that cannot be taken
    int last;    // the input's number of the last of these
    Error first; // what is wrong with the first
} Complaints;

// Something is wrong with an input: of each the first thing counts. From the second input on they are printed.
void complaints_add(Complaints *c, int input, const Error *why);

// 0 if there were none; otherwise the error that ends the program.
int complaints_finish(const Complaints *c, int inputs, Error *e);

// A line on stderr, which may be showing progress.
void print_note(const char *format, ...) __attribute__((format(printf, 1, 2)));

#endif
