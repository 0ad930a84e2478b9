// Options that do not go together: some exclude each other, some need another one; without training many are ignored.
#include "options/table.h"

#include "math/schedule.h"

#include <string.h>

typedef struct {
    bool met;
    const char *text, *remedy; // the condition; what to do if it is not met
} Condition;

#define CONDITION(name, met, text, remedy) [NEED_##name] = {met, text, remedy},
static Condition condition_of(const Options *o, Need need) {
    const Condition conditions[] = {
        [NEED_NOTHING] = {.met = true},
#include "options/table.def"
    };
    return conditions[need];
}

bool option_is_zero(const Options *o, OptionId id) {
    static const char zeros[sizeof(double)];
    const OptionRow *row = &option_rows[id];
    return memcmp((const char *)o + row->offset, zeros, size_min(row->bytes, sizeof zeros)) == 0;
}

static bool is_off(const Options *o, OptionId id) { return option_rows[id].off_at_0 && option_is_zero(o, id); }

// True for an option on the command line, under its own name. Others are not refused: runs share config files, and llm.c's scripts
// set llm.c's flags.
static bool typed(const Options *o, OptionId id) {
    return (o->given[id] & (OPTION_GIVEN_COMMAND_LINE | OPTION_GIVEN_ALIAS)) == OPTION_GIVEN_COMMAND_LINE;
}

// Refuses the option or adds a note. Options of training are harmless if nothing is trained; options of planning
// without --dry-run are a mistake.
static int check_need(Options *o, OptionId id, Need need, bool refuse, Error *e) {
    Condition condition = condition_of(o, need);
    char flag[FLAG_BYTES];
    if (condition.met) return 0;
    option_flag(flag, id);
    refuse = refuse && typed(o, id);
    if (refuse && (options_train(o) || option_is_of_planning(id))) {
        FAIL(e, ERR_USAGE, NULL, "%s has no effect without %s", flag, condition.text);
        return error_hint(e, "%s, or leave %s out", condition.remedy, flag);
    }
    option_note(o, "%s has no effect without %s: %s", flag, condition.text,
                refuse && o->dry_run ? "the run would be refused" : "ignored");
    return 0;
}

// Adds one note that names the options of the command line that this mode ignores. Those of the config file are fine.
static void note_unused(Options *o, OptionId mode, int by) {
    char list[1024] = "", flag[FLAG_BYTES], mode_flag[FLAG_BYTES];
    size_t used = 0;
    for (int id = 0; id < OPTION_COUNT; id++) {
        if (!(o->given[id] & OPTION_GIVEN_COMMAND_LINE) || option_rows[id].used_by & by) continue;
        option_flag(flag, (OptionId)id);
        if (used + sizeof flag + 2 > sizeof list) break;
        used += (size_t)snprintf(list + used, sizeof list - used, "%s%s", used ? ", " : "", flag);
    }
    option_flag(mode_flag, mode);
    if (used) option_note(o, "%s ignores %s", mode_flag, list);
}

static int check_pair(Options *o, OptionId first, OptionId second, Error *e) {
    char flag[FLAG_BYTES], other[FLAG_BYTES];
    bool first_typed = o->given[first] & OPTION_GIVEN_COMMAND_LINE;
    bool second_typed = o->given[second] & OPTION_GIVEN_COMMAND_LINE;
    if (first_typed != second_typed) {
        option_reset(o, first_typed ? second : first);
        return 0;
    }
    option_flag(flag, first);
    option_flag(other, second);
    return FAIL(e, ERR_USAGE, "give one of them", "%s and %s exclude each other", flag, other);
}

int options_check_groups(Options *o, Error *e) {
    for (int first = 0; first < OPTION_COUNT; first++)
        for (int second = first + 1; second < OPTION_COUNT; second++) {
            OptionGroup group = option_rows[first].group;
            if (!group || option_rows[second].group != group) continue;
            if (!option_is_zero(o, (OptionId)first) && !option_is_zero(o, (OptionId)second))
                TRY(check_pair(o, (OptionId)first, (OptionId)second, e));
        }
    return 0;
}

int options_check_needs(Options *o, Error *e) {
    OptionId mode = OPTION_COUNT; // training, or a plan of it: every option counts
    int by = 0;
    if (*o->check) mode = OPTION_check, by = BY_CHECK;
    else if (o->sample_only && !o->dry_run) mode = OPTION_sample_only, by = BY_SAMPLE;
    else if (o->eval_only && !o->dry_run) mode = OPTION_eval_only, by = BY_EVAL;
    for (int i = 0; i < OPTION_COUNT; i++) {
        OptionId id = (OptionId)i;
        const OptionRow *row = &option_rows[id];
        bool counts = mode == OPTION_COUNT || option_is_of_planning(id) || row->used_by & by;
        if (!counts || !o->given[id] || is_off(o, id)) continue;
        for (int k = 0; k < 2; k++) TRY(check_need(o, id, row->needs[k], true, e));
        TRY(check_need(o, id, row->prefers, false, e));
    }
    if (mode != OPTION_COUNT) note_unused(o, mode, by);
    return 0;
}
