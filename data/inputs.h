// inputs: the files that a command line names, in its order; a directory's entries by byte order.
#pragma once

#include "settings.h"

// What a note says of a file: its first line has decided its format; a byte order mark; <|endoftext|> as text.
enum { NOTE_JSONL, NOTE_JSON, NOTE_MARK, NOTE_EOT, NOTES };

typedef struct {
    char *path;     // "-" is standard input
    bool jsonl;     // JSON Lines, else text
    bool undecided; // a pipe: its first line will decide jsonl
    int notes;      // 1 << NOTE_*
    bool pipe;      // standard input, a pipe or a device: of unknown length
    bool left_out;  // not read, or its rest is not: not UTF-8
    uint64_t bytes; // 0 for a pipe
} Input;

typedef struct {
    const TokenizeOptions *o;
    Input *all;
    int count;
    int passed_over; // files in directories with other endings
} Inputs;

// The inputs of a command line: files, "-", directories, and what --files-from names. A directory, searched with all below
// it but hidden names, gives its .txt, .md, .jsonl, .ndjson and .jl files, and .json files of JSON Lines. ERR_INPUT if one
// cannot be read.
int inputs_gather(Inputs *in, const TokenizeOptions *o, char **names, int count, Error *e);
void inputs_free(Inputs *in);

// Decides the format of a pipe by its first bytes, if they suffice. ended: there are no more.
int input_decide(Input *input, const TokenizeOptions *o, const char *text, size_t bytes, bool ended, Error *e);

const char *input_name(const Input *input); // for messages

// Whether the input is split by place: its end is validation.
bool input_has_tail(const TokenizeOptions *o, const Input *input);
