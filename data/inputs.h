// inputs: the files that a command line names, in its order; a directory's entries by byte order.
#pragma once

#include "settings.h"

typedef struct {
    char *path;             // "-" is standard input
    bool jsonl;             // else text
    bool pipe;              // standard input, a pipe or a device: of unknown length
    bool left_out;          // not read, or its rest is not: not UTF-8
    uint64_t bytes;         // 0 for a pipe
    int64_t time;           // last change, ns
    uint64_t device, inode; // of what is read
} Input;

typedef struct {
    Input *all;
    int count;
    int passed_over; // files of directories whose names end in something else
} Inputs;

// The inputs of a command line: files, "-", directories (their .txt, .md, .jsonl and .ndjson files, also those of
// directories in them, hidden ones excepted), and what --files-from names. ERR_INPUT for one that cannot be read.
int inputs_gather(Inputs *in, const TokenizeOptions *o, char **names, int count, Error *e);
void inputs_free(Inputs *in);

const char *input_name(const Input *input); // for messages

// Whether the input is split by place: its end is validation.
bool input_has_tail(const TokenizeOptions *o, const Input *input);
