// inputs: the options of data/tokenize, and the files that a command line names, in the order of the command line. A
// directory's entries are in byte order.
#pragma once

#include "options/rows.h"

#include <limits.h>
#include <stdatomic.h>

enum { TRAIN, VAL, SPLITS };
extern const char *const SPLIT_NAMES[SPLITS]; // "train", "val"

typedef struct { // an option not given: its default, else 0 or ""; but max_bytes INT64_MAX, threads one per core
    char tokenizer[PATH_MAX], out[PATH_MAX - 64], files_from[PATH_MAX], field[OPTION_TEXT], separator[OPTION_TEXT];
    int format, invalid, split; // FORMAT_*; INVALID_*; TRAIN, VAL, or SPLITS for both
    double val_fraction;
    int64_t val_every_file, max_bytes, shard_tokens, threads;
    bool force, help, version;
    int inputs; // inputs on the command line, which settings_parse moves to the front of argv
} TokenizeOptions;
enum { FORMAT_AUTO, FORMAT_TEXT, FORMAT_JSONL };
enum { INVALID_ERROR, INVALID_BYTES, INVALID_SKIP };

// Notes about a file. print_input_notes (tokenize.c) has their texts.
enum { NOTE_JSONL, NOTE_JSON, NOTE_MARK, NOTE_EOT, NOTES };

typedef struct {
    char *path;           // "-" is standard input
    uint64_t number;      // index among all inputs
    int format;           // FORMAT_*; AUTO: the first line will decide
    atomic_int notes;     // bits 1 << NOTE_*
    bool pipe;            // standard input, a pipe or a device: its length is unknown
    atomic_bool left_out; // skip the file, or the rest of it, because it is not UTF-8
    uint64_t bytes;       // 0 for a pipe
} Input;

typedef struct {
    const TokenizeOptions *o;
    Input *all;
    int count;
    uint64_t bytes;  // of all inputs but pipes
    bool pipes;      // some input is a pipe
    int passed_over; // files found in directories but left out, because of their names' endings
} Inputs;

// Gathers the inputs of a command line: files, "-", directories, and what --files-from names. Searches directories to
// any depth, without hidden names, for .txt, .md, .jsonl, .ndjson and .jl files, and for .json files that hold JSON
// Lines. ERR_INPUT if a path cannot be read. ERR_USAGE if an option must first know all of a text, and it is a pipe's.
int inputs_gather(Inputs *in, const TokenizeOptions *o, char **names, Error *e);
void inputs_free(Inputs *in);

// Decides the format by the input's first bytes, if they suffice; then ERR_USAGE as above. ended: it has no more bytes.
int input_decide(Input *input, const TokenizeOptions *o, const char *text, size_t bytes, bool ended, Error *e);

const char *input_name(const Input *input); // for messages
