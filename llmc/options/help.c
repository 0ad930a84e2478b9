// The options as text: --help and run.json.
#include "options/table.h"

#include "base/files.h"
#include "base/text.h"

#include <ctype.h>
#include <stdlib.h>
#include <string.h>

// ---- --help ---------------------------------------------------------------------------------------------------------

enum { HELP_WIDTH = 100, HELP_COLUMN = 28 };

// Prints a word, or words that stay together, on this line or the next. *column: the cursor's.
static void print_word(FILE *f, int *column, const char *word, int width) {
    if (*column > HELP_COLUMN && *column + 1 + width > HELP_WIDTH)
        *column = HELP_COLUMN, fprintf(f, "\n%*s", HELP_COLUMN, "");
    if (*column > HELP_COLUMN) ++*column, fputc(' ', f);
    fprintf(f, "%.*s", width, word);
    *column += width;
}

static void print_words(FILE *f, int *column, const char *text) {
    while (*text) {
        int width = (int)strcspn(text, " ");
        print_word(f, column, text, width);
        text += width + strspn(text + width, " ");
    }
}

// Writes "--micro-batch ROWS" and returns its width. The unit names the value, in capitals unless it has some (GB/s).
static int print_flag(FILE *f, OptionId id) {
    static const char *const kinds[] = {"N", "X", "TEXT", "NAME", ""};
    const OptionRow *row = &option_rows[id];
    char flag[FLAG_BYTES], value[FLAG_BYTES];
    snprintf(value, sizeof value, "%s", row->unit ? row->unit : kinds[row->type]);
    bool capitals = !strpbrk(value, "ABCDEFGHIJKLMNOPQRSTUVWXYZ");
    for (char *c = value; capitals && *c; c++) *c = (char)toupper((unsigned char)*c);
    option_flag(flag, id);
    return fprintf(f, "  %s%s%s", flag, *value ? " " : "", value);
}

// "[default 4; llm.c -b]", or nothing.
static void default_and_alias(char *out, size_t bytes, const OptionRow *row) {
    static const char *const counts[] = {"", ", in steps", ", in micro-batches", ", in validations"};
    char fallback[80] = "", alias[80] = "";
    if (row->init) snprintf(fallback, sizeof fallback, "default %s", row->init);
    if (row->alias) snprintf(alias, sizeof alias, "llm.c %s%s", row->alias, counts[row->alias_unit]);
    *out = 0;
    if (*fallback || *alias) snprintf(out, bytes, "[%s%s%s]", fallback, *fallback && *alias ? "; " : "", alias);
}

static void print_row(FILE *f, OptionId id) {
    const OptionRow *row = &option_rows[id];
    char suffix[200], names[200] = "";
    if (row->names) snprintf(names, sizeof names, "%s:", row->names);
    default_and_alias(suffix, sizeof suffix, row);
    int column = HELP_COLUMN, width = print_flag(f, id);
    if (width >= HELP_COLUMN) width = 0, fputc('\n', f);
    fprintf(f, "%*s", HELP_COLUMN - width, "");
    print_words(f, &column, names);
    print_words(f, &column, row->help);
    if (*suffix) print_word(f, &column, suffix, (int)strlen(suffix));
    fputc('\n', f);
}

void options_print_help(FILE *f, const char *program) {
    fprintf(f, "Trains GPT-2, measures its gradient noise scale and can grow the batch with it.\n\n");
    fprintf(f, "usage: %s --train FILES [--val FILES] (--train-tokens N | --steps N | --epochs X) [options]\n",
            path_name(program));
#define SECTION(title)           fprintf(f, "\n%s\n", title);
#define OPTION(type, field, ...) print_row(f, OPTION_##field);
#include "options/table.def"
    fprintf(f, "\nExit codes: 0 done; 64 usage; 65 bad input; 69 no usable GPU or instructions; 70 internal;\n"
               "71 out of memory; 74 writing failed; 75 stopped by a signal, run the same command again;\n"
               "76 the loss or gradient is not finite; 78 a rank was lost, a deadline passed, or the ranks'\n"
               "weights differ.\n");
}

// ---- run.json -------------------------------------------------------------------------------------------------------

// The fewest digits that read back as the same number.
static void write_json_real(FILE *f, double x) {
    char text[40];
    for (int digits = 1; digits <= 17; digits++) {
        snprintf(text, sizeof text, "%.*g", digits, x);
        if (strtod(text, NULL) == x) break;
    }
    fputs(text, f);
}

// names: of a choice
static void write_json_value(FILE *f, OptionType type, const char *names, const void *field) {
    switch (type) {
    case TYPE_INT: fprintf(f, "%lld", (long long)*(const int64_t *)field); break;
    case TYPE_REAL: write_json_real(f, *(const double *)field); break;
    case TYPE_TEXT: text_write_json(f, field); break;
    case TYPE_FLAG: fputs(*(const bool *)field ? "true" : "false", f); break;
    case TYPE_CHOICE:
        for (int i = *(const int *)field; i > 0; i--) names += strcspn(names, "|") + 1;
        fprintf(f, "\"%.*s\"", (int)strcspn(names, "|"), names);
    }
}

// The options of a run, or those among them whose `which` is true (NULL: all).
static void write_json_options(FILE *f, const Options *o, const bool *which, const char *separator) {
    const char *before = "";
    for (int id = 0; id < OPTION_COUNT; id++) {
        const OptionRow *row = &option_rows[id];
        if ((which && !which[id]) || option_is_of_planning((OptionId)id)) continue;
        fprintf(f, "%s\"%s\": ", before, row->field);
        write_json_value(f, row->type, row->names, (const char *)o + row->offset);
        before = separator;
    }
}

void options_write_json_some(FILE *f, const Options *o, const bool which[OPTION_COUNT]) {
    fputc('{', f);
    write_json_options(f, o, which, ", ");
    fputc('}', f);
}

void options_write_json(FILE *f, const Options *o, int indent) {
    char next[40], inner[40], *separator = "";
    snprintf(next, sizeof next, ",\n%*s", indent + 2, "");
    snprintf(inner, sizeof inner, ",\n%*s", indent + 4, "");
    fprintf(f, "{%s", next + 1);
    write_json_options(f, o, NULL, next);
    fprintf(f, "%s\"resolved\": {%s", next, inner + 1);
#define R(type, field)                                                                                                 \
    fprintf(f, "%s\"%s\": ", separator, #field);                                                                       \
    write_json_value(f, TYPE_##type, "", &o->run.field);                                                               \
    separator = inner;
    OPTIONS_RESOLVED(R)
#undef R
    fprintf(f, "%s}\n%*s}", next + 1, indent, "");
}
