// options: what the user asks for. table.def is THE OPTION TABLE; options_parse reads the command line and the files of
// --config (parser.h), options_resolve works out what the options mean together. llm.c's short flags are accepted as
// aliases, with llm.c's meaning.
#pragma once

#include "gns/ramp.h"
#include "model/modes.h"
#include "options/rows.h"

#define OPTION(type, field, ...) OPTION_##field,
typedef enum {
#include "options/table.def"
    OPTION_COUNT
} OptionId;

// The values that options_resolve derives, also written to run.json: R(type, field).
#define OPTIONS_RESOLVED(R)                                                                                            \
    R(INT, horizon_tokens)     /* end of the run: a multiple of seq_len; 0: nothing is trained, or not known yet */    \
    R(INT, batch_ref_rows)     /* B_ref: the constant batch, and the batch that lr is meant for */                     \
    R(INT, batch_min_rows)     /* first batch of a ramp; batch_ref_rows without one */                                 \
    R(INT, batch_max_rows)     /* largest batch of a ramp; batch_ref_rows without one */                               \
    R(INT, gns_exact_interval) /* steps from one exact measurement to the next; 0: none */                             \
    R(FLAG, gns_calibrates)    /* --ramp gns measures its ratio, at exact steps spaced in tokens */                    \
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
        const char *ramp_replay; // path within `ramp`; NULL unless replaying
    } run;

    uint8_t given[OPTION_COUNT]; // where each option was given: OPTION_GIVEN_* bits; 0: nowhere
    const char *help_about;      // the option that --help NAME asks for; NULL: all
    char notes[2048];            // whole lines for stderr: options that were given and have no effect
} Options;

// Nothing after --help or --version counts, but the option's name after --help. Usage errors are ERR_USAGE; a config file
// that cannot be read is ERR_INPUT. alone: this is the only rank, so that the config file may be a pipe.
int options_parse(Options *o, int argc, char **argv, bool alone, Error *e);

// Cross-checks that need no files, and o->run; o->notes names options without effect. Not after --help or --version.
int options_resolve(Options *o, Error *e);

#define HORIZON_UNDECIDED ((int64_t)1e15) // tokens: the length of a run of --train-hours until it is decided

// With --epochs: sets the horizon and what depends on it. windows: the rows in --train.
int options_resolve_epochs(Options *o, int64_t windows, Error *e);

// Without --gns: sets the mode (the machine's default or the resumed run's) and what depends on it. Until then it is ln.
int options_resolve_gns(Options *o, GnsMode mode, Error *e);

// True if --ramp gns follows the whole model's noise scale, which every step measures; false: c x the LayerNorms'.
static inline bool ramp_follows_total(const Options *o) {
    return o->run.ramp_mode == RAMP_GNS && o->run.gns_exact_interval == 1 && o->gns_ratio == 0;
}

// True if the command trains a model; false: an option such as --check or --dry-run says what it does.
static inline bool options_train(const Options *o) {
    return !(o->help || o->version || o->print_options || o->dry_run || o->sample_only || o->eval_only || *o->check);
}

// Steps from one possible checkpoint of --keep-best to the next; 0: none.
static inline int64_t best_every(const Options *o) { return o->keep_best && *o->val ? o->val_every : 0; }

// --help, of o->help_about or of all options.
void options_print_help(FILE *f, const Options *o, const char *program);

// --print-options, after options_resolve: a file for --config with the given options, and in comments the defaults of the
// others.
int options_print(FILE *f, const Options *o, Error *e);

// One JSON object: every option by its field's name, except options of planning, and "resolved". Indents lines after the
// first by `indent` spaces; no newline at the end.
void options_write_json(FILE *f, const Options *o, int indent);

// Only the options whose `which` is true, on one line.
void options_write_json_some(FILE *f, const Options *o, const bool which[OPTION_COUNT]);

// The parts of options_parse, for tests and the fuzzer. text: bytes and a NUL after them; name: for messages.
void options_defaults(Options *o);
int options_parse_config(Options *o, char *text, size_t bytes, const char *name, Error *e);
