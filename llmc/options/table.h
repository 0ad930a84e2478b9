// table: the rows of the option table as data, and their values as text. For the files of this folder, and for
// run/state.c, which compares the options of two runs; others include options.h.
#pragma once

#include "options/options.h"

typedef enum { TYPE_INT, TYPE_REAL, TYPE_TEXT, TYPE_CHOICE, TYPE_FLAG } OptionType;

// The unit of llm.c's flag, if it is not the option's: tokens, or steps for ALIAS_VALIDATIONS.
typedef enum { ALIAS_AS_IS, ALIAS_STEPS, ALIAS_MICRO_BATCHES, ALIAS_VALIDATIONS } AliasUnit;

#define CONDITION(name, met, text, remedy) NEED_##name,
typedef enum {
    NEED_NOTHING,
#include "options/table.def"
} Need;

enum { BY_CHECK = 1, BY_SAMPLE = 2, BY_EVAL = 4, BY_MODEL = BY_SAMPLE | BY_EVAL, BY_ALL = BY_CHECK | BY_MODEL };

// Options of one group exclude each other; in the file of --config they yield to one of the command line.
typedef enum { GROUP_NONE, GROUP_LENGTH, GROUP_JOB, GROUP_PROMPT } OptionGroup;

typedef struct {
    OptionType type;
    const char *field;
    size_t offset, bytes; // of the field in struct Options
    const char *help;
    const char *alias; // llm.c's flag; NULL: none
    AliasUnit alias_unit;
    const char *init;  // default, as on the command line; NULL: 0, empty or false
    const char *range; // of a number: "[" and "]" inclusive, "(" and ")" exclusive
    const char *names; // of a choice, in the order of its enum: "first|second"
    const char *unit;  // of a number; of other types the name of the value in --help
    Need needs[2];     // the option is refused unless all of these conditions hold
    Need prefers;      // a note unless this condition holds
    bool off_at_0;     // 0, "" and false turn the option off, and need nothing
    int used_by;       // BY_*: the kinds of run without training that use the option
    OptionGroup group;
    bool of_run; // may not change on resume; a checkpoint that lacks it had its default
} OptionRow;

extern const OptionRow option_rows[OPTION_COUNT];

bool option_is_zero(const Options *o, OptionId id); // true: its value is 0, the first of its names, "" or false

enum { FLAG_BYTES = 40 }; // of the longest flag, with its NUL
void option_flag(char out[FLAG_BYTES], OptionId id);

// The option of a name without its leading dashes, up to its end or a "="; of llm.c's flag. OPTION_COUNT: none.
OptionId option_find(const char *name);
OptionId option_find_alias(const char *alias);

void *option_field(Options *o, OptionId id);

// True if the interval of a row, "[0, 1)", contains x. False for NaN.
bool option_range_contains(const OptionRow *row, double x);

// True for --dry-run and for options of --dry-run alone: these are no part of a run.
bool option_is_of_planning(OptionId id);

// Format of an option's name as the user wrote it, and of its value; long texts are cut.
#define SAID "%.60s"

// Sets an option from the command line or the config file (place: OPTION_GIVEN_*). The command line is read first and
// wins; the value in the file must be valid all the same. said: the option's name as the user wrote it.
int option_set(Options *o, OptionId id, const char *said, const char *text, int place, Error *e);

void option_reset(Options *o, OptionId id); // to its default, not given

// Adds the line "note: ..." to o->notes, once.
void option_note(Options *o, const char *format, ...) __attribute__((format(printf, 2, 3)));

// ERR_USAGE for two options of one group; if one is from the config file only, that one is reset.
int options_check_groups(Options *o, Error *e);

// Options without effect: an error, or a note. Uses o->run.ramp_mode.
int options_check_needs(Options *o, Error *e);
