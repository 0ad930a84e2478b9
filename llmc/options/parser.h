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

// Sets *value to the next word and moves *i to it. ERR_USAGE if there is none. For an option of ROW_WORDS, joins the
// words up to the next option with blanks, in `joined`; a blank in a word becomes "\\ " (text/sources.h). row: NULL if
// the program ignores the value. For t->read_word.
int parser_next_value(const OptionTable *t, const OptionRow *row, int argc, char **argv, int *i,
                      char joined[OPTION_TEXT + 2], const char **value, Error *e);

// Returns ERR_USAGE and names the nearest option, or our name of another program's option. name: without dashes;
// dashes: "--" for a flag, "" for a line of a file.
int parser_unknown(const OptionTable *t, const char *said, const char *name, const char *dashes, Error *e);
