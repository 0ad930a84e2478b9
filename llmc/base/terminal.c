#include "base/terminal.h"

#include <math.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

int terminal_columns(FILE *f) {
    struct winsize size;
    const char *set = getenv("COLUMNS");
    int columns = ioctl(fileno(f), TIOCGWINSZ, &size) == 0 ? size.ws_col : 0;
    if (columns == 0 && set) columns = atoi(set);
    return columns < 10 || columns > 10000 ? 80 : columns;
}

bool terminal_redraws(FILE *f) {
    const char *kind = getenv("TERM");
    return isatty(fileno(f)) == 1 && !(kind && strcmp(kind, "dumb") == 0);
}

void line_add(Line *line, int priority, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(line->part[line->count].text, sizeof line->part->text, format, arguments);
    va_end(arguments);
    line->part[line->count++].priority = priority;
}

void line_fit(const Line *line, int columns, char *out, size_t bytes) {
    Line left = *line;
    size_t width = 0, used = 0;
    for (int i = 0; i < left.count; i++) width += strlen(left.part[i].text);
    for (; width > (size_t)columns && left.count > 1; left.count--) {
        int least = 0;
        for (int i = 1; i < left.count; i++)
            if (left.part[i].priority < left.part[least].priority) least = i;
        width -= strlen(left.part[least].text);
        memmove(&left.part[least], &left.part[least + 1], sizeof *left.part * (size_t)(left.count - least - 1));
    }
    out[0] = 0;
    for (int i = 0; i < left.count && used < bytes; i++) {
        const char *text = left.part[i].text;
        while (used == 0 && *text == ' ') text++; // no blanks at the beginning of the line
        used += (size_t)snprintf(out + used, bytes - used, "%s", text);
    }
    if (used > (size_t)columns && (size_t)columns < bytes) out[columns] = 0;
}

double log_interval(double elapsed) { return fmin(fmax(elapsed / 50, 2), 600); }
