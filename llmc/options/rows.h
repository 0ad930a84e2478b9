// rows: a program's options as a table, by which it reads the command line and the files of --config. An option is a
// row; its value is a field of the program's own struct.
//
// The command line gives an option at most once, as `--name value` or `--name=value`. A file of --config gives it at
// most once, as `name = value`. If the file is a run.json, it gives the options that its run was given. "_" in a name
// counts as "-". Later files overrule earlier files. The command line overrules all files.
#pragma once

#include "base/common.h"

typedef enum {
    TYPE_INT,
    TYPE_REAL,
    TYPE_TEXT,
    TYPE_CHOICE,
    TYPE_FLAG
} OptionType; // types of the fields, in this order: int64_t, double, char[], int, bool

typedef enum {
    ROW_PLAIN,
    ROW_WORDS, // TEXT: all words up to the next option, such as a pattern that the shell expanded
    ROW_FILE,  // TEXT: names a file of options; may be given several times
    ROW_ENDS   // FLAG: words after it are not read
} OptionKind;

// The unit in which llm.c's flag counts. ALIAS_AS_IS: the option's unit. Otherwise the option counts tokens, or (with
// ALIAS_VALIDATIONS) steps.
typedef enum { ALIAS_AS_IS, ALIAS_STEPS, ALIAS_MICRO_BATCHES, ALIAS_VALIDATIONS } AliasUnit;

typedef struct {
    OptionType type;
    const char *field;
    size_t offset, bytes; // place and size of the field in the program's struct
    const char *help;
    OptionKind kind;
    const char *alias; // llm.c's flag; NULL: none
    AliasUnit alias_unit;
    const char *init;   // default, as on the command line; NULL: 0, empty or false
    const char *range;  // limits of a number: "[" and "]" inclusive, "(" and ")" exclusive
    const char *names;  // words of a choice, in the order of its enum: "first|second"
    const char *unit;   // unit of a number, or another name of the value, for --help
    const char *empty;  // remedy for an empty text; NULL: accept it
    int needs[2];       // refuse the option unless all of these conditions hold
    bool off_at_0;      // 0, "" and false turn the option off, and `needs` is ignored
    int group;          // options of one group exclude each other; row_set decides which has an effect. 0: no group
    bool of_run;        // may not change on resume; a checkpoint without the option has the default
    bool of_invocation; // not part of a run, so --config RUN/run.json ignores it
} OptionRow;

// An option of other programs. names: its names, separated by blanks; ours: our name or NULL; note: a hint or NULL.
typedef struct {
    const char *names, *ours, *note;
} ForeignName;

typedef struct OptionTable OptionTable;
struct OptionTable {
    const OptionRow *rows;
    int count;
    const ForeignName *foreign; // ends with a row of NULLs; may be NULL
    void *values;               // the struct that holds the rows' fields
    uint8_t *given;             // OPTION_GIVEN_* bits of each row
    const OptionRow *about;     // the option that --help NAME asks for; NULL: all

    // Reads a word that is not --name; moves *i to the last word read.
    int (*read_word)(const OptionTable *t, int argc, char **argv, int *i, Error *e);
    bool (*is_short)(const char *word); // true for an option with one dash; NULL: no such options
};

enum {
    OPTION_GIVEN_CONFIG = 1,
    OPTION_GIVEN_COMMAND_LINE = 2,
    OPTION_GIVEN_ALIAS = 4,    // on the command line, as llm.c's flag, in its unit
    OPTION_GIVEN_THIS_FILE = 8 // in the --config file that is being read
};

enum { OPTION_TEXT = 4096 }; // bytes of the longest TEXT value, with its NUL
enum { FLAG_BYTES = 40 };    // bytes of the longest flag, with its NUL

// printf format for an option's name as the user wrote it, or its value; cuts a long text.
#define SAID "%.60s"

typedef struct {
    char s[FLAG_BYTES];
} Flag;
Flag row_flag(const OptionRow *row); // "--micro-batch"

// Returns the row of a name without its leading dashes; t->count: none. The name ends at its NUL or a "="; "_" is "-".
int row_find(const OptionTable *t, const char *name);

// True if the interval of a row, "[0, 1)", contains x. False for NaN.
bool option_range_contains(const OptionRow *row, double x);

bool row_is_zero(const OptionTable *t, int id); // true if the value is 0, the first choice, "" or false
void row_reset(const OptionTable *t, int id);   // sets the default and clears the bits in `given`

// Sets an option. place: OPTION_GIVEN_*. The command line overrules files; later files overrule earlier files. An
// overruled value must also be valid. said: the option's name as the user wrote it.
int row_set(const OptionTable *t, int id, const char *said, const char *text, int place, Error *e);

// Prints the option's lines of --help, at most 100 columns wide.
void row_print_help(FILE *f, const OptionRow *row);

void row_write_json(FILE *f, OptionType type, const char *names, const void *field); // names: see OptionRow

// Writes "name = value", a line of a --config file. ERR_USAGE for a text that no line can hold.
int row_write_config(FILE *f, const OptionRow *row, const void *field, Error *e);

// ---- Command line and files of --config -----------------------------------------------------------------------------

// Sets t->values and t->given; t->values must hold the defaults. Stops after an option of ROW_ENDS. ERR_USAGE for a
// mistake; ERR_INPUT for a file that cannot be read.
int rows_read_command_line(OptionTable *t, int argc, char **argv, Error *e);

// Reads a file's text: `bytes` bytes and a NUL. name: for messages.
int rows_read_config(const OptionTable *t, char *text, size_t bytes, const char *name, Error *e);

// For t->read_word. Sets *value to the next word and moves *i to it. ERR_USAGE if there is no next word. For an option
// of ROW_WORDS, joins the words up to the next option with blanks, in `joined`; a blank in a word becomes "\\ "
// (text/shards.h). row: NULL if the program ignores the value.
int rows_next_value(const OptionTable *t, const OptionRow *row, int argc, char **argv, int *i,
                    char joined[OPTION_TEXT + 2], const char **value, Error *e);

// Returns ERR_USAGE and names the nearest option, or our name of another program's option. name: without dashes;
// dashes: "--" for a flag, "" for a line of a file.
int rows_unknown(const OptionTable *t, const char *said, const char *name, const char *dashes, Error *e);
