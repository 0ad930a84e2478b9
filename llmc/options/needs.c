// Options that do not go together: some exclude each other, some need another one; without training many are ignored.
#include "options/table.h"

#include "math/schedule.h"

#include <string.h>

enum { LIST_BYTES = 1024 }; // of the options that a note names

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

static bool is_off(const Options *o, OptionId id) { return option_rows[id].off_at_0 && option_is_zero(o, id); }

// Adds ", --name" and more to a list that a note will show.
static void list_add(char list[LIST_BYTES], OptionId id, const char *more, const char *text) {
    char flag[FLAG_BYTES];
    size_t used = strlen(list);
    option_flag(flag, id);
    snprintf(list + used, LIST_BYTES - used, "%s%s%s%s", used ? ", " : "", flag, more, text);
}

// Refuses an option of the command line, under its own name, or adds a note: llm.c's scripts set llm.c's flags, and runs
// share files, whose idle options go into one list. Options of training are harmless if nothing is trained; options of
// planning without --dry-run are a mistake.
static int check_need(Options *o, OptionId id, Need need, bool refuse, char idle[LIST_BYTES], Error *e) {
    Condition condition = condition_of(o, need);
    char flag[FLAG_BYTES];
    if (condition.met) return 0;
    if (!(o->given[id] & OPTION_GIVEN_COMMAND_LINE)) return list_add(idle, id, " without ", condition.text), 0;
    option_flag(flag, id);
    refuse = refuse && !(o->given[id] & OPTION_GIVEN_ALIAS);
    if (refuse && (options_train(o) || (option_is_of_planning(id) && !o->print_options))) {
        FAIL(e, ERR_USAGE, NULL, "%s has no effect without %s", flag, condition.text);
        return error_hint(e, "%s, or leave %s out", condition.remedy, flag);
    }
    option_note(o, "%s has no effect without %s: %s", flag, condition.text,
                refuse && o->dry_run ? "the run would be refused" : "ignored");
    return 0;
}

// Adds one note that names the options of the command line that this mode ignores. Those of config files are fine.
static void note_unused(Options *o, OptionId mode, int by) {
    char list[LIST_BYTES] = "", mode_flag[FLAG_BYTES];
    for (int id = 0; id < OPTION_COUNT; id++)
        if (o->given[id] & OPTION_GIVEN_COMMAND_LINE && !(option_rows[id].used_by & by))
            list_add(list, (OptionId)id, "", "");
    option_flag(mode_flag, mode);
    if (*list) option_note(o, "%s ignores %s", mode_flag, list);
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
            int group = option_rows[first].group;
            if (!group || option_rows[second].group != group) continue;
            if (!option_is_zero(o, (OptionId)first) && !option_is_zero(o, (OptionId)second))
                TRY(check_pair(o, (OptionId)first, (OptionId)second, e));
        }
    return 0;
}

int options_check_needs(Options *o, Error *e) {
    OptionId mode = OPTION_COUNT; // training, or a plan of it: every option counts
    int by = 0;
    char idle[LIST_BYTES] = "";
    if (*o->check) mode = OPTION_check, by = BY_CHECK;
    else if (o->sample_only && !o->dry_run) mode = OPTION_sample_only, by = BY_SAMPLE;
    else if (o->eval_only && !o->dry_run) mode = OPTION_eval_only, by = BY_EVAL;
    for (int i = 0; i < OPTION_COUNT; i++) {
        OptionId id = (OptionId)i;
        const OptionRow *row = &option_rows[id];
        bool counts = mode == OPTION_COUNT || option_is_of_planning(id) || row->used_by & by;
        if (!counts || !o->given[id] || is_off(o, id)) continue;
        for (int k = 0; k < 2; k++) TRY(check_need(o, id, (Need)row->needs[k], true, idle, e));
        TRY(check_need(o, id, (Need)row->prefers, false, idle, e));
    }
    if (*idle) option_note(o, "no effect, as --config has them: %s", idle);
    if (mode != OPTION_COUNT) note_unused(o, mode, by);
    return 0;
}
