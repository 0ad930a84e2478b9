// Checks that the options go together. Some exclude each other; some need another one; without training many are
// ignored.
#include "options/table.h"

#include "math/schedule.h"
#include "model/model.h"

#include <string.h>

enum { LIST_BYTES = 1024 }; // of a note's list of options

// Adds ", --name", `more` and `text` to a note's list of options.
static void list_add(char list[LIST_BYTES], int id, const char *more, const char *text) {
    char flag[FLAG_BYTES];
    size_t used = strlen(list);
    row_flag(flag, &option_rows[id]);
    snprintf(list + used, LIST_BYTES - used, "%s%s%s%s", used ? ", " : "", flag, more, text);
}

// Handles an option that has no effect. Refuses it if the command line gives it under its own name. Only adds a note
// for llm.c's flags (llm.c's scripts set them all) and for options of training if nothing is trained. Lists options of
// files in `idle`: several runs may share a file.
static int check_need(Options *o, int id, int need, bool refuse, char idle[LIST_BYTES], Error *e) {
#define CONDITION(name, met, text, remedy) [NEED_##name] = {met, text, remedy},
    const struct {
        bool met;
        const char *text, *remedy; // the condition; what to do if it is not met
    } conditions[] = {[NEED_NOTHING] = {.met = true},
#include "options/table.def"
    }, condition = conditions[need];
    char flag[FLAG_BYTES];
    if (condition.met) return 0;
    if (!(o->given[id] & OPTION_GIVEN_COMMAND_LINE)) return list_add(idle, id, " without ", condition.text), 0;
    row_flag(flag, &option_rows[id]);
    refuse = refuse && !(o->given[id] & OPTION_GIVEN_ALIAS);
    if (refuse && (options_train(o) || (option_is_of_planning(id) && !o->print_options))) {
        FAIL(e, ERR_USAGE, NULL, "%s has no effect without %s", flag, condition.text);
        return error_hint(e, "%s, or leave %s out", condition.remedy, flag);
    }
    option_note(o, "%s has no effect without %s: %s", flag, condition.text,
                refuse && o->dry_run ? "the run would be refused" : "ignored");
    return 0;
}

int options_check_groups(Options *o, Error *e) {
    OptionTable t = options_table(o);
    for (int first = 0; first < OPTION_COUNT; first++)
        for (int second = first + 1; second < OPTION_COUNT; second++) {
            int group = option_rows[first].group;
            if (!group || option_rows[second].group != group || row_is_zero(&t, first) || row_is_zero(&t, second)) continue;
            bool first_typed = o->given[first] & OPTION_GIVEN_COMMAND_LINE;
            if (first_typed != (bool)(o->given[second] & OPTION_GIVEN_COMMAND_LINE)) {
                row_reset(&t, first_typed ? second : first);
                continue;
            }
            char flag[FLAG_BYTES], other[FLAG_BYTES];
            row_flag(flag, &option_rows[first]);
            row_flag(other, &option_rows[second]);
            return FAIL(e, ERR_USAGE, "give one of them", "%s and %s exclude each other", flag, other);
        }
    return 0;
}

int options_check_needs(Options *o, Error *e) {
    OptionTable t = options_table(o);
    int mode = OPTION_COUNT, by = 0; // OPTION_COUNT: training or a plan of it; every option counts
    char idle[LIST_BYTES] = "", unused[LIST_BYTES] = "", flag[FLAG_BYTES];
    if (*o->check) mode = OPTION_check, by = BY_CHECK;
    else if (o->sample_only && !o->dry_run) mode = OPTION_sample_only, by = BY_SAMPLE;
    else if (o->eval_only && !o->dry_run) mode = OPTION_eval_only, by = BY_EVAL;
    for (int id = 0; id < OPTION_COUNT; id++) {
        const OptionRow *row = &option_rows[id];
        bool counts = mode == OPTION_COUNT || option_is_of_planning(id) || row->used_by & by;
        if (!counts || !o->given[id] || (row->off_at_0 && row_is_zero(&t, id))) continue;
        for (int k = 0; k < 2; k++) TRY(check_need(o, id, row->needs[k], true, idle, e));
        TRY(check_need(o, id, row->prefers, false, idle, e));
    }
    if (*idle) option_note(o, "no effect, as --config has them: %s", idle);
    if (mode == OPTION_COUNT) return 0;

    // A mode ignores many options. Name those that the command line gives; in a file they are fine.
    for (int id = 0; id < OPTION_COUNT; id++)
        if (o->given[id] & OPTION_GIVEN_COMMAND_LINE && !(option_rows[id].used_by & by)) list_add(unused, id, "", "");
    row_flag(flag, &option_rows[mode]);
    if (*unused) option_note(o, "%s ignores %s", flag, unused);
    return 0;
}
