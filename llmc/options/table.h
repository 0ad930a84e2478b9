// option_rows: the rows of the option table as data, and their values as text: what parsing, resolving and printing
// stand on. For the options' own modules, and for run_state.c, which compares two runs' options one by one; everybody
// else includes options.h.
#ifndef GNS_OPTION_ROWS_H
#define GNS_OPTION_ROWS_H

#include "options/options.h"

typedef enum { TYPE_INT, TYPE_REAL, TYPE_TEXT, TYPE_CHOICE, TYPE_FLAG } OptionType;
typedef enum { ALIAS_AS_IS, ALIAS_STEPS, ALIAS_MICRO_BATCHES, ALIAS_VALIDATIONS } AliasUnit;

// Sections of --help, in the table's order.
#define SECTIONS(S)                                                                                                    \
    S(DATA, "Data and output")                                                                                         \
    S(MODEL, "Model")                                                                                                  \
    S(BATCH, "Batch and length of the run")                                                                            \
    S(OPTIMIZER, "Optimizer (AdamW)")                                                                                  \
    S(EVALUATION, "Validation and samples")                                                                            \
    S(CHECKPOINT, "Checkpoints and safety")                                                                            \
    S(GNS, "Gradient noise scale")                                                                                     \
    S(RAMP, "Batch ramp")                                                                                              \
    S(RANKS, "Several processes (mpirun -np N ...)")                                                                   \
    S(PLAN, "Planning (--dry-run)")                                                                                    \
    S(PROGRAM, "Program")

#define S(id, title) SECTION_##id,
typedef enum { SECTIONS(S) SECTION_COUNT } Section;
#undef S

typedef struct {
    OptionType type;
    const char *field, *alias;
    AliasUnit alias_unit;
    const char *fallback, *values, *unit; // fallback: the default
    Section section;
    const char *help;
    size_t offset; // into struct Options
} OptionRow;

extern const OptionRow option_rows[OPTION_COUNT];
extern const char *const option_section_titles[SECTION_COUNT];

enum { FLAG_BYTES = 40 }; // of the longest flag, with its NUL
void option_flag(char out[FLAG_BYTES], OptionId id);

// The option of a name without its leading dashes, or of llm.c's flag; OPTION_COUNT where there is none.
OptionId option_find(const char *name);
OptionId option_find_alias(const char *alias);

void *option_field(Options *o, OptionId id);

// Does the interval of a row, "[0, 1)", contain x? False for NaN.
bool option_range_contains(const OptionRow *row, double x);

// How an option was called by the user, to be named in messages; the user's own text is cut to keep the rest readable.
#define SAID "%.60s"

// Sets an option from one of the two places. The command line is read first and wins, but what the file says must be
// right all the same. said: how the user called it.
int option_set(Options *o, OptionId id, const char *said, const char *text, int place, Error *e);

// As if it had not been given.
void option_reset(Options *o, OptionId id);

// Adds the line "note: ..." to o->notes, once.
void option_note(Options *o, const char *format, ...) __attribute__((format(printf, 2, 3)));

// Options that are of no use as things are: an error, or a note. Needs o->run.ramp_mode.
int options_check_needs(Options *o, Error *e);

#endif
