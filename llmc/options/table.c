#include "options/table.h"

#include <assert.h>
#include <math.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#define S(id, title) title,
const char *const option_section_titles[SECTION_COUNT] = {SECTIONS(S)};
#undef S

// clang-format off
#define X(type, field, alias, alias_unit, fallback, values, unit, section, help)                                       \
    {TYPE_##type, #field, alias, ALIAS_##alias_unit, fallback, values, unit, SECTION_##section, help,                  \
     offsetof(Options, field)},
// clang-format on
const OptionRow option_rows[OPTION_COUNT] = {OPTIONS_TABLE(X)};
#undef X

void option_flag(char out[FLAG_BYTES], OptionId id) {
    snprintf(out, FLAG_BYTES, "--%s", option_rows[id].field);
    for (char *c = out; *c; c++)
        if (*c == '_') *c = '-';
}

OptionId option_find(const char *name) {
    int id = 0;
    for (char flag[FLAG_BYTES]; id < OPTION_COUNT; id++) {
        option_flag(flag, (OptionId)id);
        if (strcmp(flag + 2, name) == 0) break;
    }
    return (OptionId)id;
}

OptionId option_find_alias(const char *alias) {
    int id = 0;
    while (id < OPTION_COUNT && strcmp(option_rows[id].alias, alias) != 0) id++;
    return (OptionId)id;
}

void *option_field(Options *o, OptionId id) { return (char *)o + option_rows[id].offset; }

// ---------------------------------------------------------------------------------------------------------------------
// Values

typedef struct {
    double low, high;
    bool low_included, high_included;
} Interval;

static Interval interval_parse(const char *text) {
    char open = 0, close = 0;
    Interval interval = {0};
    int read = sscanf(text, "%c%lf, %lf%c", &open, &interval.low, &interval.high, &close);
    assert(read == 4), (void)read; // the table's own text
    interval.low_included = open == '[';
    interval.high_included = close == ']';
    return interval;
}

bool option_range_contains(const OptionRow *row, double x) {
    Interval i = interval_parse(row->values);
    return (i.low_included ? x >= i.low : x > i.low) && (i.high_included ? x <= i.high : x < i.high);
}

// Decimal numbers only: no hexadecimal, no "nan", no "inf", nothing behind.
static bool parse_real(const char *text, double *out) {
    if (!*text || text[strspn(text, "0123456789+-.eE")]) return false;
    char *end;
    *out = strtod(text, &end);
    return *end == 0;
}

// Whole numbers, exactly, or written as in 10e9. What no int64_t holds becomes its nearest end.
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
static int choice_find(const char *choices, const char *text) {
    size_t length = strlen(text);
    for (int index = 0;; index++) {
        size_t width = strcspn(choices, "|");
        if (width == length && strncmp(choices, text, length) == 0) return index;
        if (!choices[width]) return -1;
        choices += width + 1;
    }
}

static int value_refuse(const OptionRow *row, const char *said, const char *text, const char *why, Error *e) {
    FAIL(e, ERR_USAGE, NULL, SAID " '" SAID "': %s", said, text, why);
    if (row->type == TYPE_CHOICE) return error_hint(e, "use one of %s", row->values);
    if (row->type == TYPE_FLAG) return error_hint(e, "say true or false");
    if (row == &option_rows[OPTION_prompt]) return error_hint(e, "put it into a file, and use @FILE");
    if (row->type == TYPE_TEXT) return error_hint(e, "use at most %d bytes", OPTION_TEXT - 1);
    const char *kind = row->type == TYPE_INT ? "a whole number" : "a number";
    return error_hint(e, "use %s%s%s in %s", kind, *row->unit ? " of " : "", row->unit, row->values);
}

// Into *out, which has the row's type.
static int value_parse(const OptionRow *row, const char *said, const char *text, void *out, Error *e) {
    switch (row->type) {
    case TYPE_INT: {
        int64_t value;
        if (!parse_int(text, &value)) return value_refuse(row, said, text, "not a whole number", e);
        if (!option_range_contains(row, (double)value)) return value_refuse(row, said, text, "out of range", e);
        *(int64_t *)out = value;
        return 0;
    }
    case TYPE_REAL: {
        double value;
        if (!parse_real(text, &value)) return value_refuse(row, said, text, "not a number", e);
        if (!option_range_contains(row, value)) return value_refuse(row, said, text, "out of range", e);
        *(double *)out = value;
        return 0;
    }
    case TYPE_TEXT:
        if (strlen(text) >= OPTION_TEXT) return value_refuse(row, said, text, "too long", e);
        strcpy(out, text);
        return 0;
    case TYPE_CHOICE: {
        int index = choice_find(row->values, text);
        if (index < 0) return value_refuse(row, said, text, "no such choice", e);
        *(int *)out = index;
        return 0;
    }
    case TYPE_FLAG:
        if (strcmp(text, "true") != 0 && strcmp(text, "false") != 0)
            return value_refuse(row, said, text, "neither true nor false", e);
        *(bool *)out = *text == 't';
        return 0;
    }
    assert(0);
    return ERR_INTERNAL;
}

static size_t value_bytes(OptionType type) {
    switch (type) {
    case TYPE_INT: return sizeof(int64_t);
    case TYPE_REAL: return sizeof(double);
    case TYPE_TEXT: return OPTION_TEXT;
    case TYPE_CHOICE: return sizeof(int);
    case TYPE_FLAG: return sizeof(bool);
    }
    assert(0);
    return 0;
}

void option_reset(Options *o, OptionId id) {
    const OptionRow *row = &option_rows[id];
    Error e;
    int code = 0;
    memset(option_field(o, id), 0, value_bytes(row->type));
    if (*row->fallback) code = value_parse(row, row->field, row->fallback, option_field(o, id), &e);
    assert(code == 0), (void)code; // the table's own text
    o->given[id] = 0;
    o->alias_unit[id] = ALIAS_AS_IS;
}

void options_defaults(Options *o) {
    memset(o, 0, sizeof *o);
    for (int id = 0; id < OPTION_COUNT; id++) option_reset(o, (OptionId)id);
}

int option_set(Options *o, OptionId id, const char *said, const char *text, int place, Error *e) {
    union {
        int64_t i;
        double d;
        int choice;
        bool flag;
        char text[OPTION_TEXT];
    } overruled;
    if (o->given[id] & place) return FAIL(e, ERR_USAGE, "give it once", SAID " is given twice", said);
    bool wins = !(o->given[id] & OPTION_GIVEN_COMMAND_LINE);
    TRY(value_parse(&option_rows[id], said, text, wins ? option_field(o, id) : (void *)&overruled, e));
    o->given[id] |= (uint8_t)place;
    return 0;
}

void option_note(Options *o, const char *format, ...) {
    char line[1200];
    va_list arguments;
    va_start(arguments, format);
    int length = snprintf(line, sizeof line, "note: ");
    vsnprintf(line + length, sizeof line - (size_t)length - 1, format, arguments); // and room for the newline
    va_end(arguments);
    strcat(line, "\n");
    if (strlen(o->notes) + strlen(line) < sizeof o->notes && !strstr(o->notes, line)) strcat(o->notes, line);
}

bool options_given(const Options *o, const char *flag) {
    assert(strncmp(flag, "--", 2) == 0);
    OptionId id = option_find(flag + 2);
    assert(id < OPTION_COUNT);
    return o->given[id] != 0;
}
