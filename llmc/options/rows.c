#include "options/rows.h"

#include "base/terminal.h"
#include "base/text.h"

#include <assert.h>
#include <ctype.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

void row_flag(char out[FLAG_BYTES], const OptionRow *row) {
    snprintf(out, FLAG_BYTES, "--%s", row->field);
    for (char *c = out; *c; c++)
        if (*c == '_') *c = '-';
}

int row_find(const OptionTable *t, const char *name) {
    int id = 0;
    for (; id < t->count; id++) {
        const char *field = t->rows[id].field, *n = name;
        while (*field && (*n == *field || (*n == '-' && *field == '_'))) n++, field++;
        if (!*field && (!*n || *n == '=')) break;
    }
    return id;
}

// ---- Values ---------------------------------------------------------------------------------------------------------

bool option_range_contains(const OptionRow *row, double x) {
    char open = 0, close = 0;
    double low = 0, high = 0;
    int read = sscanf(row->range, "%c%lf, %lf%c", &open, &low, &high, &close);
    assert(read == 4), (void)read;
    return (open == '[' ? x >= low : x > low) && (close == ']' ? x <= high : x < high);
}

// Reads a decimal number: no hexadecimal, no "nan", no "inf", nothing after the number.
static bool parse_real(const char *text, double *out) {
    if (!*text || text[strspn(text, "0123456789+-.eE")]) return false;
    char *end;
    *out = strtod(text, &end);
    return *end == 0;
}

// Reads a whole number: digits exactly, or a form like 10e9. Clamps it to the range of int64_t.
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

// Returns the index of text among "first|second|third", or -1.
static int choice_find(const char *names, const char *text) {
    size_t length = strlen(text);
    for (int index = 0;; index++) {
        size_t width = strcspn(names, "|");
        if (width == length && strncmp(names, text, length) == 0) return index;
        if (!names[width]) return -1;
        names += width + 1;
    }
}

// Reads a value of the row's type into *out. ERR_USAGE if it is not one.
static int value_parse(const OptionRow *row, const char *said, const char *text, void *out, Error *e) {
    const char *why = NULL, *unit = row->unit ? row->unit : "";
    int64_t whole;
    double real;
    int choice;
    switch (row->type) {
    case TYPE_INT:
        if (!parse_int(text, &whole)) why = "not a whole number";
        else if (!option_range_contains(row, (double)whole)) why = "out of range";
        else *(int64_t *)out = whole;
        break;
    case TYPE_REAL:
        if (!parse_real(text, &real)) why = "not a number";
        else if (!option_range_contains(row, real)) why = "out of range";
        else *(double *)out = real + 0.0; // -0 becomes 0
        break;
    case TYPE_TEXT:
        if (row->empty && !*text) return FAIL(e, ERR_USAGE, row->empty, SAID " is empty", said);
        if (strlen(text) >= row->bytes) why = "too long";
        else strcpy(out, text);
        break;
    case TYPE_CHOICE:
        if ((choice = choice_find(row->names, text)) < 0) why = "no such choice";
        else *(int *)out = choice;
        break;
    case TYPE_FLAG:
        if (strcmp(text, "true") != 0 && strcmp(text, "false") != 0) why = "neither true nor false";
        else *(bool *)out = *text == 't';
    }
    if (!why) return 0;
    FAIL(e, ERR_USAGE, row->cut, SAID " '" SAID "': %s", said, text, why);
    if (row->type == TYPE_CHOICE) return error_hint(e, "use one of %s", row->names);
    if (row->type == TYPE_FLAG) return error_hint(e, "use true or false");
    if (row->type == TYPE_TEXT) return row->cut ? e->code : error_hint(e, "use at most %zu bytes", row->bytes - 1);
    return error_hint(e, "use a %snumber%s%s in %s", row->type == TYPE_INT ? "whole " : "", *unit ? " of " : "", unit,
                      row->range);
}

static void *row_field(const OptionTable *t, int id) { return (char *)t->values + t->rows[id].offset; }

bool row_is_zero(const OptionTable *t, int id) {
    static const char zeros[sizeof(double)];
    return memcmp(row_field(t, id), zeros, size_min(t->rows[id].bytes, sizeof zeros)) == 0;
}

void row_reset(const OptionTable *t, int id) {
    const OptionRow *row = &t->rows[id];
    Error e;
    memset(row_field(t, id), 0, row->bytes);
    int code = row->init ? value_parse(row, row->field, row->init, row_field(t, id), &e) : 0;
    assert(code == 0), (void)code;
    t->given[id] = 0;
}

int row_set(const OptionTable *t, int id, const char *said, const char *text, int place, Error *e) {
    const OptionRow *row = &t->rows[id];
    _Alignas(double) char overruled[OPTION_TEXT];
    assert(row->bytes <= sizeof overruled);
    if (t->given[id] & place & (OPTION_GIVEN_COMMAND_LINE | OPTION_GIVEN_THIS_FILE))
        return FAIL(e, ERR_USAGE, "give it once", SAID " is given twice", said);
    bool wins = place & OPTION_GIVEN_COMMAND_LINE || !(t->given[id] & OPTION_GIVEN_COMMAND_LINE);
    TRY(value_parse(row, said, text, wins ? row_field(t, id) : overruled, e));
    t->given[id] |= (uint8_t)place;
    for (int other = 0; wins && row->group && other < t->count; other++) {
        if (other == id || t->rows[other].group != row->group || row_is_zero(t, other) || row_is_zero(t, id)) continue;
        if (t->given[other] & place & ~OPTION_GIVEN_CONFIG) {
            char flag[FLAG_BYTES], second[FLAG_BYTES];
            row_flag(flag, &t->rows[other < id ? other : id]);
            row_flag(second, &t->rows[other < id ? id : other]);
            return FAIL(e, ERR_USAGE, "give one of them", "%s and %s exclude each other", flag, second);
        }
        // The command line wins; of two files, the later one.
        row_reset(t, t->given[other] & OPTION_GIVEN_COMMAND_LINE ? id : other);
    }
    return 0;
}

// ---- Values as text -------------------------------------------------------------------------------------------------

static void write_choice(FILE *f, const char *names, int index) {
    while (index-- > 0) names += strcspn(names, "|") + 1;
    fprintf(f, "%.*s", (int)strcspn(names, "|"), names);
}

void row_write_json(FILE *f, OptionType type, const char *names, const void *field) {
    char real[40];
    switch (type) {
    case TYPE_INT: fprintf(f, "%lld", (long long)*(const int64_t *)field); break;
    case TYPE_REAL: // print the fewest digits that read back as the same number
        for (int digits = 1; digits <= 17; digits++) {
            snprintf(real, sizeof real, "%.*g", digits, *(const double *)field);
            if (strtod(real, NULL) == *(const double *)field) break;
        }
        fputs(real, f);
        break;
    case TYPE_TEXT: text_write_json(f, field); break;
    case TYPE_FLAG: fputs(*(const bool *)field ? "true" : "false", f); break;
    case TYPE_CHOICE:
        fputc('"', f);
        write_choice(f, names, *(const int *)field);
        fputc('"', f);
    }
}

int row_write_config(FILE *f, const OptionRow *row, const void *field, Error *e) {
    char flag[FLAG_BYTES];
    const char *text = field, *quote = "";
    row_flag(flag, row);
    fprintf(f, "%s = ", flag + 2);
    if (row->type == TYPE_CHOICE) write_choice(f, row->names, *(const int *)field);
    else if (row->type != TYPE_TEXT) row_write_json(f, row->type, NULL, field);
    else {
        bool blank_at_end = *text && isspace((unsigned char)text[strlen(text) - 1]);
        if (isspace((unsigned char)*text) || blank_at_end || *text == '"' || strchr(text, '#')) quote = "\"";
        if (strchr(text, '\n') || (*quote && strchr(text, '"')))
            return FAIL(e, ERR_USAGE, row->cut ? row->cut : "choose another value",
                        "%s: no line of a --config file can hold this text", flag);
        fprintf(f, "%s%s%s", quote, text, quote);
    }
    fputc('\n', f);
    return 0;
}

// ---- --help ---------------------------------------------------------------------------------------------------------

void row_print_help(FILE *f, const OptionRow *row) {
    enum { WIDTH = 100, COLUMN = 28 };
    static const char *const kinds[] = {"N", "X", "TEXT", "NAME", ""};
    static const char *const counts[] = {"", ", in steps", ", in micro-batches", ", in validations"};
    const char *init = row->init ? row->init : "", *alias = row->alias ? row->alias : "";
    char flag[FLAG_BYTES], value[FLAG_BYTES], text[2048];

    // The unit names the value: "--micro-batch ROWS". It is put into capitals unless it has some (GB/s).
    snprintf(value, sizeof value, "%s", row->unit ? row->unit : kinds[row->type]);
    bool capitals = !strpbrk(value, "ABCDEFGHIJKLMNOPQRSTUVWXYZ");
    for (char *c = value; capitals && *c; c++) *c = (char)toupper((unsigned char)*c);
    row_flag(flag, row);
    int used = snprintf(text, sizeof text, "  %s%s%s", flag, *value ? " " : "", value), wide = used >= COLUMN;
    used +=
        snprintf(text + used, sizeof text - (size_t)used, "%s%*s%s%s%s", wide ? "\n" : "",
                 wide ? COLUMN : COLUMN - used, "", row->names ? row->names : "", row->names ? ": " : "", row->help);
    if (*init || *alias)
        snprintf(text + used, sizeof text - (size_t)used, " [%s%s%s%s%s%s]", *init ? "default " : "", init,
                 *init && *alias ? "; " : "", *alias ? "llm.c " : "", alias, *alias ? counts[row->alias_unit] : "");
    fold_text(f, text, WIDTH, COLUMN);
    fputc('\n', f);
}
