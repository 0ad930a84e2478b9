// The options as rows, and as text: --help, --print-options and run.json.
#include "options/table.h"

#include "base/files.h"
#include "model/model.h"

#include <stdarg.h>
#include <string.h>

#define OPTION(type, field, ...)                                                                                       \
    {TYPE_##type, #field, offsetof(Options, field), sizeof((Options *)0)->field, .help = __VA_ARGS__},
const OptionRow option_rows[OPTION_COUNT] = {
#include "options/table.def"
};

void *option_field(Options *o, OptionId id) { return (char *)o + option_rows[id].offset; }

bool option_is_of_planning(int id) {
    int need = option_rows[id].needs[0];
    return id == OPTION_dry_run || id == OPTION_print_options || need == NEED_PLAN || need == NEED_PLANNED_RANKS;
}

void options_defaults(Options *o) {
    memset(o, 0, sizeof *o);
    OptionTable t = options_table(o);
    for (int id = 0; id < OPTION_COUNT; id++) row_reset(&t, id);
}

int option_set(Options *o, OptionId id, const char *said, const char *text, int place, Error *e) {
    OptionTable t = options_table(o);
    return row_set(&t, (int)id, said, text, place, e);
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

// ---- Text -----------------------------------------------------------------------------------------------------------

void options_print_help(FILE *f, const Options *o, const char *program) {
    OptionTable t = options_table((Options *)o); // row_print_help only reads *o
    if (o->help_about) return row_print_help(f, &option_rows[row_find(&t, o->help_about)]);
    fprintf(f, "Trains GPT-2, measures its gradient noise scale and can grow the batch with it.\n\n");
    fprintf(f, "usage: %s --train FILES [--val FILES] (--train-tokens N | --steps N | --epochs X) [options]\n",
            path_name(program));
#define SECTION(title)           fprintf(f, "\n%s\n", title);
#define OPTION(type, field, ...) row_print_help(f, &option_rows[OPTION_##field]);
#include "options/table.def"
    fprintf(f, "\nExit codes: 0 done; 64 usage; 65 bad input; 69 no usable GPU or instructions; 70 internal;\n"
               "71 out of memory; 74 writing failed; 75 stopped by a signal, run the same command again;\n"
               "76 the loss or gradient is not finite; 78 a rank was lost, a deadline passed, or the ranks'\n"
               "weights differ.\n");
}

int options_print(FILE *f, const Options *o, Error *e) {
    for (int id = 0; id < OPTION_COUNT; id++) {
        const OptionRow *row = &option_rows[id];
        if (row->kind == ROW_FILE || row->kind == ROW_ENDS || id == OPTION_print_options) continue;
        if (!o->given[id] && !row->init) continue;
        if (!o->given[id]) fputs("# ", f);
        TRY(row_write_config(f, row, (const char *)o + row->offset, e));
    }
    return 0;
}

// ---- run.json -------------------------------------------------------------------------------------------------------

// Writes `"name": value` for each option selected in which[] (NULL: all), without options of planning.
static void write_json_options(FILE *f, const Options *o, const bool *which, const char *separator) {
    const char *before = "";
    for (int id = 0; id < OPTION_COUNT; id++) {
        const OptionRow *row = &option_rows[id];
        if ((which && !which[id]) || option_is_of_planning(id)) continue;
        fprintf(f, "%s\"%s\": ", before, row->field);
        row_write_json(f, row->type, row->names, (const char *)o + row->offset);
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
    row_write_json(f, TYPE_##type, "", &o->run.field);                                                                 \
    separator = inner;
    OPTIONS_RESOLVED(R)
#undef R
    fprintf(f, "%s}\n%*s}", next + 1, indent, "");
}
