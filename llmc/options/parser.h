// parser: reads the command line and the files of --config by a table of options.
//
// The command line gives an option at most once, as `--name value` or `--name=value`. A file of --config gives it at
// most once, as `name = value`; a run.json gives the options that its run was given. "_" in a name is "-". Later files
// overrule earlier ones. The command line overrules all files.
#pragma once

#include "options/rows.h"

// Sets t->values and t->given; t->values must hold the defaults. Stops after an option of ROW_ENDS. ERR_USAGE for a
// mistake; ERR_INPUT for a file that cannot be read.
int parser_command_line(OptionTable *t, int argc, char **argv, Error *e);

// Reads a file's text: `bytes` bytes and a NUL. name: for messages.
int parser_config(const OptionTable *t, char *text, size_t bytes, const char *name, Error *e);

// Moves *i to the next word and returns it in *value. ERR_USAGE if there is none. For t->read_word.
int parser_next_value(const OptionTable *t, int argc, char **argv, int *i, const char **value, Error *e);

// Joins the words up to the next option with blanks, for an option of ROW_WORDS. A blank in a word becomes "\\ "
// (text/sources.h). Returns `first` if it is the only word.
const char *parser_join_words(const OptionRow *row, int argc, char **argv, int *i, const char *first,
                              char joined[OPTION_TEXT + 2]);

// Returns ERR_USAGE and names the nearest option, or our name of another program's option. name: without dashes;
// dashes: "--" for a flag, "" for a line of a file.
int parser_unknown(const OptionTable *t, const char *said, const char *name, const char *dashes, Error *e);
