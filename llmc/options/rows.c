#include "options/rows.h"

#include "base/files.h"
#include "base/text.h"

#include <assert.h>
#include <ctype.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

// Returns "--micro-batch" for "micro_batch" and for "micro-batch=4".
static Flag flag_of(const char *name) {
    Flag flag;
    snprintf(flag.s, sizeof flag.s, "--%.*s", (int)strcspn(name, "="), name);
    for (char *c = flag.s; *c; c++)
        if (*c == '_') *c = '-';
    return flag;
}

Flag row_flag(const OptionRow *row) { return flag_of(row->field); }

int row_find(const OptionTable *t, const char *name) {
    const Flag flag = flag_of(name);
    int id = 0;
    while (id < t->count && strcmp(row_flag(&t->rows[id]).s, flag.s) != 0) id++;
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

// Returns the index of text among "first|second|third", or -1.
static int choice_find(const char *names, const char *text) {
    for (int index = 0;; index++, names++) {
        size_t width = strcspn(names, "|");
        if (width == strlen(text) && strncmp(names, text, width) == 0) return index;
        names += width;
        if (!*names) return -1;
    }
}

// Reads a value of the row's type into *out. ERR_USAGE if `text` is not a value of this type.
static int value_parse(const OptionRow *row, const char *said, const char *text, void *out, Error *e) {
    const char *why = NULL, *unit = row->unit ? row->unit : "";
    const bool whole = row->type == TYPE_INT;
    char *end;
    double real;
    int choice;
    switch (row->type) {
    case TYPE_INT:
    case TYPE_REAL:
        if (!parse_real(text, &real) || (whole && real != floor(real)))
            why = whole ? "not a whole number" : "not a number";
        else if (!option_range_contains(row, real)) why = "out of range";
        else if (!whole) *(double *)out = real + 0.0; // -0 becomes 0
        else {
            const int64_t digits = strtoll(text, &end, 10);  // exact above 2^53
            *(int64_t *)out = *end ? (int64_t)real : digits; // not only digits: 10e9
        }
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
    FAIL(e, ERR_USAGE, NULL, SAID " '" SAID "': %s", said, text, why);
    if (row->type == TYPE_CHOICE) return error_hint(e, "use one of %s", row->names);
    if (row->type == TYPE_FLAG) return error_hint(e, "use true or false");
    if (row->kind == ROW_WORDS) return error_hint(e, "quote the pattern, which the shell has expanded");
    if (row->type == TYPE_TEXT) return error_hint(e, "use at most %zu bytes", row->bytes - 1);
    return error_hint(e, "use a %snumber%s%s in %s", whole ? "whole " : "", *unit ? " of " : "", unit, row->range);
}

static void *row_field(const OptionTable *t, int id) { return (char *)t->values + t->rows[id].offset; }

bool row_is_zero(const OptionTable *t, int id) {
    static const char zeros[sizeof(double)];
    return memcmp(row_field(t, id), zeros, t->rows[id].type == TYPE_TEXT ? 1 : t->rows[id].bytes) == 0;
}

void row_reset(const OptionTable *t, int id) {
    const OptionRow *row = &t->rows[id];
    memset(row_field(t, id), 0, row->bytes);
    int code = row->init ? value_parse(row, row->field, row->init, row_field(t, id), &(Error){0}) : 0;
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
        if (t->given[other] & place & ~OPTION_GIVEN_CONFIG)
            return FAIL(e, ERR_USAGE, "give one of them", "%s and %s exclude each other",
                        row_flag(&t->rows[other < id ? other : id]).s, row_flag(&t->rows[other < id ? id : other]).s);
        // The command line wins over a file, a later file over an earlier one.
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
    case TYPE_REAL: // print the fewest digits that read back as the same number; 300 is not 3e+02
        for (int digits = 6; digits <= 17; digits++) {
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
    const char *text = field, *quote = "";
    fprintf(f, "%s = ", row_flag(row).s + 2);
    if (row->type == TYPE_CHOICE) write_choice(f, row->names, *(const int *)field);
    else if (row->type != TYPE_TEXT) row_write_json(f, row->type, NULL, field);
    else {
        bool blank_at_end = *text && isspace((unsigned char)text[strlen(text) - 1]);
        if (isspace((unsigned char)*text) || blank_at_end || *text == '"' || strchr(text, '#')) quote = "\"";
        if (strchr(text, '\n') || (*quote && strchr(text, '"')))
            return FAIL(e, ERR_USAGE, "choose another value", "%s: no line of a --config file can hold this text",
                        row_flag(row).s);
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
    char value[FLAG_BYTES], text[2048], end[80] = "";

    // The unit names the value, "--micro-batch ROWS". It is printed in capitals unless it already has some (GB/s).
    snprintf(value, sizeof value, "%s", row->unit ? row->unit : kinds[row->type]);
    bool capitals = !strpbrk(value, "ABCDEFGHIJKLMNOPQRSTUVWXYZ");
    for (char *c = value; capitals && *c; c++) *c = (char)toupper((unsigned char)*c);
    int at = fprintf(f, "  %s%s%s", row_flag(row).s, *value ? " " : "", value); // column of the output
    if (at >= COLUMN) at = fprintf(f, "\n") - 1;
    at += fprintf(f, "%*s", COLUMN - at, "");
    if (*init || *alias)
        snprintf(end, sizeof end, " [%s%s%s%s%s%s]", *init ? "default " : "", init, *init && *alias ? "; " : "",
                 *alias ? "llm.c " : "", alias, *alias ? counts[row->alias_unit] : "");
    snprintf(text, sizeof text, "%s%s%s%s", row->names ? row->names : "", row->names ? ": " : "", row->help, end);
    for (char *word = strtok(text, " "); word; word = strtok(NULL, " ")) {
        if (at > COLUMN && at + 1 + (int)strlen(word) > WIDTH) at = fprintf(f, "\n%*s", COLUMN, "") - 1;
        at += fprintf(f, "%s%s", at > COLUMN ? " " : "", word);
    }
    fputc('\n', f);
}

// ---- Unknown names --------------------------------------------------------------------------------------------------

// True if at most `edits` insertions, deletions and substitutions turn a into b (Levenshtein 1966).
static bool is_near(const char *a, const char *b, int edits) {
    while (*a && *a == *b) a++, b++;
    if (!*a && !*b) return true;
    if (edits == 0) return false;
    return (*a && is_near(a + 1, b, edits - 1)) || (*b && is_near(a, b + 1, edits - 1)) ||
           (*a && *b && is_near(a + 1, b + 1, edits - 1));
}

int rows_unknown(const OptionTable *t, const char *said, const char *name, const char *dashes, Error *e) {
    char names[120], wanted[FLAG_BYTES + 2];
    FAIL(e, ERR_USAGE, "--help lists the options", "unknown option " SAID, said);
    snprintf(wanted, sizeof wanted, " %s ", flag_of(name).s + 2);
    for (const ForeignName *f = t->foreign; f && f->names; f++) {
        snprintf(names, sizeof names, " %s ", f->names);
        if (!strstr(names, wanted)) continue;
        if (!f->ours) return error_hint(e, "%s", f->note);
        return error_hint(e, "the option here is %s%s%s%s", dashes, f->ours, f->note ? ": " : "",
                          f->note ? f->note : "");
    }
    const int most = (int)size_min(3, (strlen(name) + 1) / 3); // a name with more edits is unrelated
    for (int edits = 1; edits <= most; edits++)
        for (int id = 0; id < t->count; id++) {
            const Flag flag = row_flag(&t->rows[id]);
            if (edits + 2 < (int)strlen(flag.s) && is_near(name, flag.s + 2, edits))
                return error_hint(e, "did you mean %s%s?", dashes, flag.s + 2);
        }
    return e->code;
}

// ---------------------------------------------------------------------------------------------------------------------
// Files of options
//
//     # a comment begins with # at the beginning of a line or after a blank
//     name = value
//     prompt = " quotes keep blanks and #; there are no escapes "

static char *trim(char *s) {
    while (isspace((unsigned char)*s)) s++;
    for (char *end = s + strlen(s); end > s && isspace((unsigned char)end[-1]);) *--end = 0;
    return s;
}

// Returns the text without a comment, and without blanks around it.
static char *uncomment(char *s) {
    char *c = s;
    while (*c && !(*c == '#' && (c == s || isspace((unsigned char)c[-1])))) c++;
    *c = 0;
    return trim(s);
}

static int parse_config_line(const OptionTable *t, char *line, Error *e) {
    char *value = trim(line);
    if (!*value || *value == '#') return 0;
    const char *name = trim(strsep(&value, "="));
    if (!value) return FAIL(e, ERR_USAGE, "write name = value", "'" SAID "' has no =", name);
    int id = row_find(t, name);
    if (id == t->count) {
        rows_unknown(t, name, name, "", e);
        return strncmp(name, "--", 2) == 0 ? error_hint(e, "write it without the dashes") : e->code;
    }
    if (t->rows[id].kind == ROW_FILE || t->rows[id].kind == ROW_ENDS)
        return FAIL(e, ERR_USAGE, "remove it from the file", "%s is for the command line only", name);
    value = trim(value);
    if (*value == '"') {
        char *close = strchr(++value, '"');
        if (!close) return FAIL(e, ERR_USAGE, "end the value with a quote", "%s: a quote is not closed", name);
        *close++ = 0;
        if (*uncomment(close))
            return FAIL(e, ERR_USAGE, "a value contains no quotes", "%s: text after the closing quote", name);
    } else value = uncomment(value);
    return row_set(t, id, name, value, OPTION_GIVEN_CONFIG | OPTION_GIVEN_THIS_FILE, e);
}

// Sets an option to a value of run.json. Ignores "", false and a 0 out of range if the option has no default.
static int parse_json_value(const OptionTable *t, const char *name, const cJSON *value, Error *e) {
    const double exact = 9007199254740992; // 2^53
    char number[40];
    int id = row_find(t, name);
    if (id == t->count) return rows_unknown(t, name, name, "", e);
    const OptionRow *row = &t->rows[id];
    if (row->of_invocation || row->kind == ROW_FILE || row->kind == ROW_ENDS || t->given[id] & OPTION_GIVEN_THIS_FILE)
        return 0;
    const char *text = cJSON_IsBool(value) ? cJSON_IsTrue(value) ? "true" : "false" : cJSON_GetStringValue(value);
    if (cJSON_IsNumber(value)) {
        if (row->type == TYPE_INT && value->valuedouble >= exact)
            return FAIL(e, ERR_USAGE, "write the run's options to a file, as name = value",
                        "%s: a number above 2^53, which JSON readers round", name);
        snprintf(number, sizeof number, "%.17g", value->valuedouble);
        text = number;
    }
    if (!text) return FAIL(e, ERR_USAGE, "name a run's run.json", "%s: neither a number nor a text nor a switch", name);
    const bool out = cJSON_IsNumber(value) && value->valuedouble == 0 && row->range && !option_range_contains(row, 0);
    if ((!*text || cJSON_IsFalse(value) || out) && !row->init && !(t->given[id] & OPTION_GIVEN_CONFIG)) return 0;
    return row_set(t, id, name, text, OPTION_GIVEN_CONFIG | OPTION_GIVEN_THIS_FILE, e);
}

int rows_read_config(const OptionTable *t, char *text, size_t bytes, const char *name, Error *e) {
    int code = 0;
    char *rest = text + utf8_mark(text, bytes), *line;
    if (strlen(text) < bytes)
        return FAIL(e, ERR_USAGE, "write plain text, name = value",
                    "--config %.200s: a zero byte: this is no text file", name);
    if (rest[strspn(rest, " \t\r\n")] == '{') {
        // `parts` of run.json lists the options that each start was given; `options` holds an option's last value.
        cJSON *root = cJSON_Parse(rest);
        const cJSON *options = json_get(root, "options"), *parts = json_get(root, "parts"), *part, *given;
        bool of_run = cJSON_IsObject(options) && cJSON_IsArray(parts);
        cJSON_ArrayForEach(part, parts) cJSON_ArrayForEach(given, json_get(part, "options")) {
            const cJSON *value = json_get(options, given->string);
            of_run = of_run && given->string; // NULL: `given` is an element of a list
            if (of_run && !code) code = parse_json_value(t, given->string, value ? value : given, e);
        }
        if (!of_run)
            code = FAIL(e, ERR_USAGE, "name a run's run.json, or write name = value", "JSON, but not of a run");
        if (code) error_prefix(e, "--config %.200s", name);
        cJSON_Delete(root);
        rest = NULL;
    }
    for (int number = 1; !code && (line = strsep(&rest, "\n")); number++) {
        code = parse_config_line(t, line, e);
        if (code) error_prefix(e, "--config %.200s line %d", name, number);
    }
    for (int id = 0; id < t->count; id++) t->given[id] &= (uint8_t)~OPTION_GIVEN_THIS_FILE;
    return code;
}

// ---- The command line -----------------------------------------------------------------------------------------------

int rows_next_value(const OptionTable *t, const OptionRow *row, int argc, char **argv, int *i,
                    char joined[OPTION_TEXT + 2], const char **value, Error *e) {
    const char *word = *i + 1 < argc ? argv[*i + 1] : NULL;
    bool is_name = word && strncmp(word, "--", 2) == 0 && row_find(t, word + 2) < t->count;
    if (!word || is_name || (word[0] == '-' && word[1] != '-' && t->is_short && t->is_short(word)))
        return FAIL(e, ERR_USAGE, "--help lists the values", SAID " has no value", argv[*i]);
    *value = argv[++*i];
    if (!row || row->kind != ROW_WORDS || *i + 1 >= argc || argv[*i + 1][0] == '-') return 0;
    size_t used = 0; // a text longer than OPTION_TEXT is cut, and row_set refuses it
    for (;; word = argv[++*i]) {
        for (const char *c = word; *c && used < OPTION_TEXT; c++) {
            if (*c == ' ') joined[used++] = '\\';
            joined[used++] = *c;
        }
        if (*i + 1 >= argc || argv[*i + 1][0] == '-') break;
        if (used < OPTION_TEXT) joined[used++] = ' ';
    }
    joined[used] = 0;
    *value = joined;
    return 0;
}

// Reads --name value, --name=value, or --name of a flag (short for --name=true).
static int parse_long(OptionTable *t, int argc, char **argv, int *i, Error *e) {
    const char *word = argv[*i], *equals = strchr(word, '='), *value = equals ? equals + 1 : NULL;
    char said[FLAG_BYTES], joined[OPTION_TEXT + 2]; // the longest flag; the longest value
    snprintf(said, sizeof said, "%.*s", (int)strcspn(word, "="), word);
    int id = row_find(t, word + 2);
    if (id == t->count) return rows_unknown(t, said, said + 2, "--", e);
    const OptionRow *row = &t->rows[id];
    if (row->type == TYPE_FLAG) value = value ? value : "true";
    else if (!value) TRY(rows_next_value(t, row, argc, argv, i, joined, &value, e));
    if (row->kind != ROW_FILE) return row_set(t, id, said, value, OPTION_GIVEN_COMMAND_LINE, e);

    // Read the file now. Options on the command line win, wherever they stand. The option's value lists all files.
    char names[OPTION_TEXT + 1], *field = (char *)t->values + row->offset;
    snprintf(names, sizeof names, "%s%s%s", field, *field ? " " : "", value);
    t->given[id] = 0;
    TRY(row_set(t, id, said, names, OPTION_GIVEN_COMMAND_LINE, e));
    const size_t max_bytes = 1 << 20; // far more than all options need
    char *text;
    size_t bytes;
    if (file_read(IN_PATH, value, max_bytes, &text, &bytes, e)) return error_prefix(e, "--config");
    int code = rows_read_config(t, text, bytes, value, e);
    memory_free(text);
    return code;
}

int rows_read_command_line(OptionTable *t, int argc, char **argv, Error *e) {
    for (int i = 1; i < argc; i++) {
        if (strncmp(argv[i], "--", 2) == 0 && argv[i][2]) TRY(parse_long(t, argc, argv, &i, e));
        else TRY(t->read_word(t, argc, argv, &i, e));
        for (int id = 0; id < t->count; id++) {
            if (t->rows[id].kind != ROW_ENDS || row_is_zero(t, id)) continue; // an option's name may follow --help
            if (strcmp(t->rows[id].field, "help") != 0 || i + 1 >= argc || argv[i + 1][0] == '-') return 0;
            const int about = row_find(t, argv[i + 1]);
            if (about == t->count) return rows_unknown(t, argv[i + 1], argv[i + 1], "--", e);
            t->about = &t->rows[about];
            return 0;
        }
    }
    return 0;
}
