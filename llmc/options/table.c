#include "options/table.h"

#include <assert.h>
#include <math.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#define OPTION(type, field, ...)                                                                                       \
    {TYPE_##type, #field, offsetof(Options, field), sizeof((Options *)0)->field, .help = __VA_ARGS__},
const OptionRow option_rows[OPTION_COUNT] = {
#include "options/table.def"
};

void option_flag(char out[FLAG_BYTES], OptionId id) {
    snprintf(out, FLAG_BYTES, "--%s", option_rows[id].field);
    for (char *c = out; *c; c++)
        if (*c == '_') *c = '-';
}

OptionId option_find(const char *name) {
    int id = 0;
    for (char flag[FLAG_BYTES]; id < OPTION_COUNT; id++) {
        option_flag(flag, (OptionId)id);
        size_t length = strlen(flag + 2);
        if (strncmp(name, flag + 2, length) == 0 && (!name[length] || name[length] == '=')) break;
    }
    return (OptionId)id;
}

OptionId option_find_alias(const char *alias) {
    int id = 0;
    while (id < OPTION_COUNT && !(option_rows[id].alias && strcmp(option_rows[id].alias, alias) == 0)) id++;
    return (OptionId)id;
}

void *option_field(Options *o, OptionId id) { return (char *)o + option_rows[id].offset; }

bool option_is_of_planning(OptionId id) {
    Need need = option_rows[id].needs[0];
    return id == OPTION_dry_run || need == NEED_PLAN || need == NEED_PLANNED_RANKS;
}

// ---- Values ---------------------------------------------------------------------------------------------------------

bool option_range_contains(const OptionRow *row, double x) {
    char open = 0, close = 0;
    double low = 0, high = 0;
    int read = sscanf(row->range, "%c%lf, %lf%c", &open, &low, &high, &close);
    assert(read == 4), (void)read;
    return (open == '[' ? x >= low : x > low) && (close == ']' ? x <= high : x < high);
}

// Decimal numbers only: no hexadecimal, no "nan", no "inf", nothing after the number.
static bool parse_real(const char *text, double *out) {
    if (!*text || text[strspn(text, "0123456789+-.eE")]) return false;
    char *end;
    *out = strtod(text, &end);
    return *end == 0;
}

// Whole numbers: digits, read exactly, or a form like 10e9. Clamped to the range of int64_t.
static bool parse_int(const char *text, int64_t *out) {
    double real;
    if (!parse_real(text, &real) || real != floor(real)) return false;
    char *end;
    *out = strtoll(text, &end, 10);
    if (*end == 0) return true;
    const double limit = 9223372036854775808.0; // 2^63
    *out = real >= limit ? INT64_MAX : real < -limit ? INT64_MIN : (int64_t)real;
    return true;
}

// Index of text among "first|second|third", or -1.
static int choice_find(const char *names, const char *text) {
    size_t length = strlen(text);
    for (int index = 0;; index++) {
        size_t width = strcspn(names, "|");
        if (width == length && strncmp(names, text, length) == 0) return index;
        if (!names[width]) return -1;
        names += width + 1;
    }
}

static int value_refuse(const OptionRow *row, const char *said, const char *text, const char *why, Error *e) {
    FAIL(e, ERR_USAGE, NULL, SAID " '" SAID "': %s", said, text, why);
    if (row->type == TYPE_CHOICE) return error_hint(e, "use one of %s", row->names);
    if (row->type == TYPE_FLAG) return error_hint(e, "use true or false");
    if (row == &option_rows[OPTION_prompt]) return error_hint(e, "write it to a file, and use @FILE");
    if (row == &option_rows[OPTION_train] || row == &option_rows[OPTION_val])
        return error_hint(e, "quote the pattern, which the shell has expanded: 'data/train_*.bin'");
    if (row->type == TYPE_TEXT) return error_hint(e, "use at most %d bytes", OPTION_TEXT - 1);
    return error_hint(e, "use a %snumber%s%s in %s", row->type == TYPE_INT ? "whole " : "", row->unit ? " of " : "",
                      row->unit ? row->unit : "", row->range);
}

// Into *out, which has the row's type.
static int value_parse(const OptionRow *row, const char *said, const char *text, void *out, Error *e) {
    int64_t whole;
    double real;
    int choice;
    switch (row->type) {
    case TYPE_INT:
        if (!parse_int(text, &whole)) return value_refuse(row, said, text, "not a whole number", e);
        if (!option_range_contains(row, (double)whole)) return value_refuse(row, said, text, "out of range", e);
        *(int64_t *)out = whole;
        return 0;
    case TYPE_REAL:
        if (!parse_real(text, &real)) return value_refuse(row, said, text, "not a number", e);
        if (!option_range_contains(row, real)) return value_refuse(row, said, text, "out of range", e);
        *(double *)out = real + 0.0; // -0 becomes 0
        return 0;
    case TYPE_TEXT:
        if (strlen(text) >= OPTION_TEXT) return value_refuse(row, said, text, "too long", e);
        strcpy(out, text);
        return 0;
    case TYPE_CHOICE:
        if ((choice = choice_find(row->names, text)) < 0) return value_refuse(row, said, text, "no such choice", e);
        *(int *)out = choice;
        return 0;
    case TYPE_FLAG:
        if (strcmp(text, "true") != 0 && strcmp(text, "false") != 0)
            return value_refuse(row, said, text, "neither true nor false", e);
        *(bool *)out = *text == 't';
        return 0;
    }
    assert(0);
    return ERR_INTERNAL;
}

void option_reset(Options *o, OptionId id) {
    const OptionRow *row = &option_rows[id];
    Error e;
    memset(option_field(o, id), 0, row->bytes);
    int code = row->init ? value_parse(row, row->field, row->init, option_field(o, id), &e) : 0;
    assert(code == 0), (void)code;
    o->given[id] = 0;
}

void options_defaults(Options *o) {
    memset(o, 0, sizeof *o);
    for (int id = 0; id < OPTION_COUNT; id++) option_reset(o, (OptionId)id);
}

int option_set(Options *o, OptionId id, const char *said, const char *text, int place, Error *e) {
    Options overruled;
    if (o->given[id] & place) return FAIL(e, ERR_USAGE, "give it once", SAID " is given twice", said);
    bool wins = !(o->given[id] & OPTION_GIVEN_COMMAND_LINE);
    TRY(value_parse(&option_rows[id], said, text, option_field(wins ? o : &overruled, id), e));
    o->given[id] |= (uint8_t)place;
    return 0;
}

void option_note(Options *o, const char *format, ...) {
    char text[1200], line[1210];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    snprintf(line, sizeof line, "note: %s\n", text);
    if (strlen(o->notes) + strlen(line) < sizeof o->notes && !strstr(o->notes, line)) strcat(o->notes, line);
}
