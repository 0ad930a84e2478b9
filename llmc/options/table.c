#include "options/table.h"

#include "model/model.h"

#include <stdarg.h>
#include <string.h>

#define OPTION(type, field, ...)                                                                                       \
    {TYPE_##type, #field, offsetof(Options, field), sizeof((Options *)0)->field, .help = __VA_ARGS__},
const OptionRow option_rows[OPTION_COUNT] = {
#include "options/table.def"
};

void option_flag(char out[FLAG_BYTES], OptionId id) { row_flag(out, &option_rows[id]); }
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
