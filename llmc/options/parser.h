// parser: the command line and the files of --config, by a table of options.
//
// An option is given as `--name value` or `--name=value`, at most once; or as `name = value` in a file of --config, at
// most once in a file. "_" in a name is "-". Later files overrule earlier ones, and the command line overrules all. A
// run.json gives the options that its run was given.
#pragma once

#include "options/rows.h"

// Sets t->values, which have their defaults, and t->given. Nothing after an option of ROW_ENDS counts. Usage errors are
// ERR_USAGE; a file that cannot be read is ERR_INPUT.
int parser_command_line(OptionTable *t, int argc, char **argv, Error *e);

// text: bytes and a NUL after them; name: for messages.
int parser_config(const OptionTable *t, char *text, size_t bytes, const char *name, Error *e);

// For t->read_word. Moves *i to the next word, which must be a value.
int parser_next_value(const OptionTable *t, int argc, char **argv, int *i, const char **value, Error *e);

// Joins the words up to the next option with blanks, for an option of ROW_WORDS; a blank in a word becomes "\\ "
// (text/sources.h). Returns `first` if it is the only one.
const char *parser_join_words(const OptionRow *row, int argc, char **argv, int *i, const char *first,
                              char joined[OPTION_TEXT + 2]);

// ERR_USAGE with the nearest name, or with what another program's name is here. name: without dashes; dashes: "--" for
// a flag, "" for a line of a file.
int parser_unknown(const OptionTable *t, const char *said, const char *name, const char *dashes, Error *e);
