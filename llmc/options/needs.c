// Options that were given and do nothing: those that need another one, and those that a run which does not train passes
// by. Here as tables, so that an option is looked after by adding a row.
#include "options/table.h"

#include "math/schedule.h"

#include <assert.h>
#include <math.h>
#include <string.h>

// What an option may need: C(name, whether it is there, how it is called, what to do about it where it is not).
// clang-format off
#define CONDITIONS(C)                                                                                                  \
    C(VAL,           *o->val,                                 "--val",               "add --val")                      \
    C(VALIDATION,    o->val_every > 0 || o->eval_only,        "--val-every above 0", "say how often")                  \
    C(HELLASWAG,     o->hellaswag_every > 0 || o->eval_only,  "--hellaswag-every or --eval-only",                      \
      "say when to ask its questions")                                                                                 \
    C(SAMPLING,      o->sample_every > 0 || o->sample_only,   "--sample-every or --sample-only", "say when to sample") \
    C(CHANCE,        o->temperature > 0,                      "--temperature above 0", "raise it")                     \
    C(FALLING_LR,    o->lr_schedule != SCHEDULE_CONSTANT && o->lr_schedule != SCHEDULE_INVERSE_SQRT,                   \
      "--lr-schedule linear, cosine or wsd", "use one of them")                                                        \
    C(NOISE_SCALE,   o->gns != GNS_OFF,                       "--gns ln or exact",   "use one of them")                \
    C(RAMP,          o->run.ramp_mode != RAMP_FIXED,          "a --ramp",                                              \
      "use --ramp linear, seesaw or gns, or --batch-tokens for a constant batch")                                      \
    C(RAMP_GNS,      o->run.ramp_mode == RAMP_GNS,            "--ramp gns",          "use that")                       \
    C(RAMP_OF_OWN,   o->run.ramp_mode != RAMP_REPLAY,         "a --ramp other than replay", "use one")                 \
    C(REFERENCE,     o->run.ramp_mode != RAMP_REPLAY || !o->batch_tokens,                                              \
      "a --ramp other than replay", "use one")                                                                         \
    C(PLAN,          o->dry_run,                              "--dry-run",           "add that to plan a run")         \
    C(PLANNED_RANKS, o->dry_run,                              "--dry-run",           "add that, or say mpirun -np")

#define C(name, holds, text, remedy) NEEDS_##name,
typedef enum { CONDITIONS(C) CONDITION_COUNT } Condition;
#undef C

static const struct {
    const char *text, *remedy;
} conditions[CONDITION_COUNT] = {
#define C(name, holds, text, remedy) {text, remedy},
    CONDITIONS(C)
#undef C
};

static bool condition_holds(const Options *o, Condition condition) {
    switch (condition) {
#define C(name, holds, text, remedy) case NEEDS_##name: return holds;
    CONDITIONS(C)
#undef C
    case CONDITION_COUNT: break;
    }
    assert(0);
    return false;
}
// clang-format on

typedef enum {
    REFUSE, // on the command line: something else must have been meant
    REMARK  // a habit: one command for runs of two kinds
} Answer;

// An option at `nothing` asks for nothing, and needs nothing. An empty text is 0, NAN is no value.
static const struct {
    OptionId option;
    double nothing;
    Condition needs;
    Answer answer;
} needs[] = {
    {OPTION_val_every, 0, NEEDS_VAL, REFUSE},
    {OPTION_val_tokens, NAN, NEEDS_VAL, REFUSE},
    {OPTION_val_tokens, NAN, NEEDS_VALIDATION, REMARK},
    {OPTION_keep_best, 0, NEEDS_VAL, REFUSE},
    {OPTION_keep_best, 0, NEEDS_VALIDATION, REFUSE},
    {OPTION_hellaswag, NAN, NEEDS_HELLASWAG, REFUSE},
    {OPTION_samples, NAN, NEEDS_SAMPLING, REFUSE},
    {OPTION_sample_tokens, NAN, NEEDS_SAMPLING, REFUSE},
    {OPTION_prompt, 0, NEEDS_SAMPLING, REFUSE},
    {OPTION_temperature, NAN, NEEDS_SAMPLING, REFUSE},
    {OPTION_top_k, 0, NEEDS_SAMPLING, REFUSE},
    {OPTION_top_k, 0, NEEDS_CHANCE, REMARK},
    {OPTION_final_lr_frac, 1, NEEDS_FALLING_LR, REFUSE},
    {OPTION_gns_exact_every, 0, NEEDS_NOISE_SCALE, REFUSE},
    {OPTION_gns_half_life, 0, NEEDS_NOISE_SCALE, REFUSE},
    {OPTION_gns_ratio, 0, NEEDS_RAMP_GNS, REFUSE},
    {OPTION_batch_min, NAN, NEEDS_RAMP, REFUSE},
    {OPTION_batch_max, NAN, NEEDS_RAMP, REFUSE},
    {OPTION_batch_min, NAN, NEEDS_REFERENCE, REMARK}, // it is that of --lr where --batch-tokens is not given
    {OPTION_batch_max, NAN, NEEDS_RAMP_OF_OWN, REMARK},
    {OPTION_ramp_kappa, NAN, NEEDS_RAMP_GNS, REFUSE},
    {OPTION_ramp_lr_power, NAN, NEEDS_RAMP, REFUSE},
    {OPTION_device, NAN, NEEDS_PLAN, REFUSE},
    {OPTION_ranks, NAN, NEEDS_PLANNED_RANKS, REFUSE},
    {OPTION_price, NAN, NEEDS_PLAN, REFUSE},
    {OPTION_link, NAN, NEEDS_PLAN, REFUSE},
};

static double option_number(Options *o, OptionId id) {
    const void *field = option_field(o, id);
    switch (option_rows[id].type) {
    case TYPE_INT: return (double)*(const int64_t *)field;
    case TYPE_REAL: return *(const double *)field;
    case TYPE_TEXT: return (double)strlen(field);
    case TYPE_CHOICE: return *(const int *)field;
    case TYPE_FLAG: return *(const bool *)field;
    }
    assert(0);
    return NAN;
}

// Typed for this run, by its own name? A file may be shared by runs, and llm.c's flags come from llm.c's scripts.
static bool typed(const Options *o, OptionId id) {
    return (o->given[id] & (OPTION_GIVEN_COMMAND_LINE | OPTION_GIVEN_ALIAS)) == OPTION_GIVEN_COMMAND_LINE;
}

// ---------------------------------------------------------------------------------------------------------------------
// Runs that do not train

enum { BY_CHECK = 1, BY_SAMPLE = 2, BY_EVAL = 4, BY_MODEL = BY_SAMPLE | BY_EVAL, BY_ALL = BY_CHECK | BY_MODEL };

// What they use; they pass by what is not here.
static const struct {
    OptionId option;
    int by;
} uses[] = {
    {OPTION_check, BY_CHECK},        {OPTION_sample_only, BY_SAMPLE},   {OPTION_eval_only, BY_EVAL},
    {OPTION_model, BY_MODEL},        {OPTION_vocab_size, BY_MODEL},     {OPTION_tokenizer, BY_MODEL},
    {OPTION_seq_len, BY_MODEL},      {OPTION_threads, BY_MODEL},        {OPTION_seed, BY_SAMPLE},
    {OPTION_prompt, BY_SAMPLE},      {OPTION_sample_tokens, BY_SAMPLE}, {OPTION_temperature, BY_SAMPLE},
    {OPTION_samples, BY_SAMPLE},     {OPTION_top_k, BY_SAMPLE},         {OPTION_val, BY_EVAL},
    {OPTION_val_tokens, BY_EVAL},    {OPTION_hellaswag, BY_EVAL},       {OPTION_micro_batch, BY_EVAL},
    {OPTION_deadline_setup, BY_ALL}, {OPTION_deadline_step, BY_ALL},    {OPTION_deadline_checkpoint, BY_ALL},
    {OPTION_config, BY_ALL},
};

static bool is_used(OptionId id, int by) {
    for (size_t i = 0; i < sizeof uses / sizeof *uses; i++)
        if (uses[i].option == id) return (uses[i].by & by) != 0;
    return false;
}

// One line for all of them. What the file of --config says of training is no matter.
static void note_unused(Options *o, OptionId mode, int by) {
    char list[1024] = "", flag[FLAG_BYTES], mode_flag[FLAG_BYTES];
    size_t used = 0;
    for (int id = 0; id < OPTION_COUNT; id++) {
        if (!(o->given[id] & OPTION_GIVEN_COMMAND_LINE) || is_used((OptionId)id, by)) continue;
        option_flag(flag, (OptionId)id);
        if (used + sizeof flag + 2 > sizeof list) break;
        used += (size_t)snprintf(list + used, sizeof list - used, "%s%s", used ? ", " : "", flag);
    }
    option_flag(mode_flag, mode);
    if (used) option_note(o, "%s makes no use of %s", mode_flag, list);
}

// ---------------------------------------------------------------------------------------------------------------------
// What each option needs

static bool is_of_planning(size_t row) {
    return needs[row].needs == NEEDS_PLAN || needs[row].needs == NEEDS_PLANNED_RANKS;
}

// Options of a training run do no harm where none is trained; those of planning were meant for a plan.
static int check_need(Options *o, size_t row, Error *e) {
    OptionId id = needs[row].option;
    Condition condition = needs[row].needs;
    bool meant = needs[row].answer == REFUSE && typed(o, id);
    char flag[FLAG_BYTES];
    if (!o->given[id] || option_number(o, id) == needs[row].nothing || condition_holds(o, condition)) return 0;
    option_flag(flag, id);
    if (!meant || !(options_train(o) || is_of_planning(row))) {
        option_note(o, "%s is of no use without %s: %s", flag, conditions[condition].text,
                    meant && o->dry_run ? "the run would be refused" : "ignored");
        return 0;
    }
    FAIL(e, ERR_USAGE, NULL, "%s is of no use without %s", flag, conditions[condition].text);
    return error_hint(e, "%s, or leave %s out", conditions[condition].remedy, flag);
}

int options_check_needs(Options *o, Error *e) {
    OptionId mode = OPTION_COUNT; // training, or planning that: all that is said is said to it
    int by = 0;
    if (*o->check) mode = OPTION_check, by = BY_CHECK;
    else if (o->sample_only && !o->dry_run) mode = OPTION_sample_only, by = BY_SAMPLE;
    else if (o->eval_only && !o->dry_run) mode = OPTION_eval_only, by = BY_EVAL;
    for (size_t row = 0; row < sizeof needs / sizeof *needs; row++)
        if (mode == OPTION_COUNT || is_of_planning(row) || is_used(needs[row].option, by)) TRY(check_need(o, row, e));
    if (mode != OPTION_COUNT) note_unused(o, mode, by);
    return 0;
}
