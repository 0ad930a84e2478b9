// settings: the command line of data/tokenize.
#pragma once

#include "base/common.h"

enum { TRAIN, VAL, SPLITS };
extern const char *const SPLIT_NAMES[SPLITS]; // "train", "val"

typedef struct {
    const char *tokenizer, *out, *files_from, *field, *separator; // NULL: not given
    enum { FORMAT_AUTO, FORMAT_TEXT, FORMAT_JSONL } format;
    enum { INVALID_ERROR, INVALID_BYTES, INVALID_SKIP } invalid;
    int split; // SPLITS: not given
    double val_fraction;
    uint64_t val_every_file, max_bytes, shard_tokens, threads; // 0: not given
    bool force, help;
} TokenizeOptions;

// Fills o and moves the inputs that the command line names to the front of argv, *inputs of them. ERR_USAGE for a mistake.
int settings_parse(int argc, char **argv, TokenizeOptions *o, int *inputs, Error *e);

void settings_print_help(void);
