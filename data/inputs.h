// inputs: the files a command line names, in a fixed order: as given, directories by the byte order of their entries.
#ifndef GNS_INPUTS_H
#define GNS_INPUTS_H

#include "base/common.h"

typedef struct {
    char *path;     // "-" is standard input
    bool jsonl;     // else text
    bool pipe;      // standard input, a pipe: its length is unknown
    bool left_out;  // not UTF-8 (--invalid skip)
    uint64_t bytes; // 0 of a pipe
    int64_t time;   // last change, ns: to tell whether a run can be resumed
} Input;

typedef struct {
    Input *all;
    int count, capacity;
    int passed_over; // files in directories whose names end in something else
} Inputs;

// A file, "-", or a directory: its .txt, .md, .jsonl and .ndjson files and those below it, without the hidden ones. What
// cannot be read is ERR_INPUT.
int inputs_add(Inputs *in, const char *path, Error *e);

// The same of what a file names, one path a line.
int inputs_add_list(Inputs *in, const char *list, Error *e);

void inputs_free(Inputs *in);

const char *input_name(const Input *input); // for messages

#endif
