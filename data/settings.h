// settings: the command line of data/tokenize.
#pragma once

#include "options/rows.h"

#include <limits.h>

enum { TRAIN, VAL, SPLITS };
extern const char *const SPLIT_NAMES[SPLITS]; // "train", "val"

typedef struct { // an option without a default is 0 or empty; max_bytes is INT64_MAX
    char tokenizer[PATH_MAX], out[PATH_MAX - 64], files_from[PATH_MAX], field[OPTION_TEXT], separator[OPTION_TEXT];
    int format, invalid, split; // FORMAT_*, INVALID_*; SPLITS: both
    double val_fraction;
    int64_t val_every_file, max_bytes, shard_tokens, threads;
    bool force, help, version;
    const char *help_about; // the option that --help NAME asks for; NULL: all
} TokenizeOptions;
enum { FORMAT_AUTO, FORMAT_TEXT, FORMAT_JSONL };
enum { INVALID_ERROR, INVALID_BYTES, INVALID_SKIP };

// Fills o. Moves the *inputs inputs of the command line to the front of argv. ERR_USAGE for a mistake.
int settings_parse(int argc, char **argv, TokenizeOptions *o, int *inputs, Error *e);

void settings_print_help(const TokenizeOptions *o);
