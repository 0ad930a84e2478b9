// options: what the user asks for. table.def is THE OPTION TABLE. options_parse reads the command line and the files of
// --config (rows.h). options_resolve derives values that depend on several options. Short flags have llm.c's meaning.
#pragma once

#include "gns/ramp.h"
#include "model/modes.h"
#include "options/rows.h"

#define OPTION(type, field, ...) OPTION_##field,
typedef enum {
#include "options/table.def"
    OPTION_COUNT
} OptionId;

// The values that options_resolve derives: R(type, field). run.json lists them too.
#define OPTIONS_RESOLVED(R)                                                                                            \
    R(INT, horizon_tokens)     /* length of the run, a multiple of seq_len; 0: no training, or not known yet */        \
    R(INT, batch_ref_rows)     /* B_ref: the constant batch, and the batch that lr is meant for */                     \
    R(INT, batch_min_rows)     /* first batch of a ramp, not of replay; without a ramp batch_ref_rows */               \
    R(INT, batch_max_rows)     /* largest batch of a ramp, not of replay; without a ramp batch_ref_rows */             \
    R(INT, gns_exact_interval) /* steps from one exact measurement to the next; 0: none */                             \
    R(FLAG, gns_calibrates)    /* --ramp gns measures --gns-ratio itself, at exact steps spaced evenly in tokens */    \
    R(REAL, gns_half_life_tokens)

#define OPTION_FIELD_INT(field)    int64_t field;
#define OPTION_FIELD_REAL(field)   double field;
#define OPTION_FIELD_TEXT(field)   char field[OPTION_TEXT];
#define OPTION_FIELD_CHOICE(field) int field;
#define OPTION_FIELD_FLAG(field)   bool field;

#define OPTION(type, field, ...) OPTION_FIELD_##type(field)
typedef struct {
#include "options/table.def"

    struct { // filled by options_resolve
#define R(type, field) OPTION_FIELD_##type(field)
        OPTIONS_RESOLVED(R)
#undef R
        RampMode ramp_mode;
        const char *ramp_argument; // the text after the colon of `ramp`; or NULL
    } run;

    uint8_t given[OPTION_COUNT]; // where each option was given: OPTION_GIVEN_* bits; 0: nowhere
    const OptionRow *help_about; // the option that --help NAME asks for; NULL: all
    char notes[2048];            // lines for stderr about options without effect
} Options;

// Reads the command line up to --help or --version; an option's name may follow --help. ERR_USAGE for a mistake;
// ERR_INPUT for a config file that cannot be read.
int options_parse(Options *o, int argc, char **argv, Error *e);

// Sets o->run and checks the options against each other, without reading files. Notes options without effect in
// o->notes. Call it once, and not after --help or --version.
int options_resolve(Options *o, Error *e);

#define HORIZON_UNDECIDED ((int64_t)1e15) // tokens: a --train-hours run's horizon before its length is decided

// With --epochs: sets the horizon and the values that depend on it. windows: the rows in --train.
int options_resolve_epochs(Options *o, int64_t windows, Error *e);

// Sets the mode of --gns and the values that depend on it. Without --gns, the mode is ln until the caller passes the
// machine's default or the resumed run's.
int options_resolve_gns(Options *o, GnsMode mode, Error *e);

// True for --ramp gns if it follows the whole model's noise scale, measured at every step. Else --ramp gns follows the
// LayerNorms' noise scale, times --gns-ratio or the measured ratio.
static inline bool ramp_follows_total(const Options *o) {
    return o->run.ramp_mode == RAMP_GNS && o->run.gns_exact_interval == 1 && o->gns_ratio == 0;
}

// True if the command trains a model; false: an option such as --check or --dry-run asks for something else.
static inline bool options_train(const Options *o) {
    return !(o->help || o->version || o->print_options || o->dry_run || o->sample_only || o->eval_only || *o->check);
}

// Returns the number of steps from one possible checkpoint of --keep-best to the next; 0: none.
static inline int64_t best_every(const Options *o) { return o->keep_best && *o->val ? o->val_every : 0; }

// Prints the help of the option o->help_about; NULL: of all options.
void options_print_help(FILE *f, const Options *o, const char *program);

// Prints --print-options: a file for --config with the given options, and in comments the defaults of the others. Call
// it after options_resolve.
int options_print(FILE *f, const Options *o, Error *e);

// Writes one JSON object, without a newline at its end. which NULL: all options but those of planning, then "resolved",
// one per line, indented as a member of run.json. Otherwise the options whose `which` is not 0, on one line.
void options_write_json(FILE *f, const Options *o, const uint8_t *which);

void options_defaults(Options *o);

// ---- The table, for this folder, run/state.c and tests --------------------------------------------------------------

#define CONDITION(name, met, text) NEED_##name,
typedef enum {
    NEED_NOTHING,
#include "options/table.def"
} Need;

typedef enum { GROUP_NONE, GROUP_LENGTH, GROUP_JOB, GROUP_PROMPT } OptionGroup; // OptionRow.group

extern const OptionRow option_rows[OPTION_COUNT];

OptionTable options_table(Options *o);
void *option_field(Options *o, OptionId id);

// True for --print-options, --dry-run and options that only --dry-run uses, since they are not part of a run.
bool option_is_of_planning(int id);

// Adds the line "note: ..." to o->notes, once.
void option_note(Options *o, const char *format, ...) __attribute__((format(printf, 2, 3)));
