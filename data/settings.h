// settings: the command line of data/tokenize.
#ifndef GNS_TOKENIZE_SETTINGS_H
#define GNS_TOKENIZE_SETTINGS_H

#include "base/common.h"

// What the options say: settings.c has the table of them, and --help prints it.
typedef struct {
    const char *tokenizer, *out, *files_from, *format, *field, *separator, *invalid, *split; // NULL: not given
    double val_fraction;
    uint64_t val_every_file, max_bytes, shard_tokens, threads, train_bpe; // 0: not given
    bool force, help;
} TokenizeOptions;

// Fills o; the inputs named on the command line are moved to the front of argv, *inputs of them. A mistake is
// ERR_USAGE.
int settings_parse(int argc, char **argv, TokenizeOptions *o, int *inputs, Error *e);

void settings_print_help(void);

#endif
