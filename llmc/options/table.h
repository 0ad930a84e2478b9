// table: the trainer's options as rows. Only this folder and run/state.c (it compares the options of two runs) include
// it; others include options.h.
#pragma once

#include "options/options.h"
#include "options/rows.h"

#define CONDITION(name, met, text, remedy) NEED_##name,
typedef enum {
    NEED_NOTHING,
#include "options/table.def"
} Need;

enum { BY_CHECK = 1, BY_SAMPLE = 2, BY_EVAL = 4, BY_MODEL = BY_SAMPLE | BY_EVAL, BY_ALL = BY_CHECK | BY_MODEL };

typedef enum { GROUP_NONE, GROUP_LENGTH, GROUP_JOB, GROUP_PROMPT } OptionGroup; // OptionRow.group

extern const OptionRow option_rows[OPTION_COUNT];

OptionTable options_table(Options *o);
void *option_field(Options *o, OptionId id);

// True for --print-options, --dry-run and options of --dry-run alone: they are not part of a run.
bool option_is_of_planning(int id);

int option_set(Options *o, OptionId id, const char *said, const char *text, int place, Error *e);

// Adds the line "note: ..." to o->notes, once.
void option_note(Options *o, const char *format, ...) __attribute__((format(printf, 2, 3)));
