#define _POSIX_C_SOURCE 200809L
#include "complaints.h"

#include <stdarg.h>
#include <unistd.h>

void print_note(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    if (isatty(STDERR_FILENO)) fputs("\r\x1b[K", stderr);
    vfprintf(stderr, format, arguments);
    fputc('\n', stderr);
    va_end(arguments);
}

void complaints_add(Complaints *c, int input, const Error *why) {
    if (c->files && c->last == input) return;
    c->files++;
    c->last = input;
    if (c->files == 1) c->first = *why;
    if (c->files == 2) print_note("%s", c->first.what);
    if (c->files >= 2 && c->files <= LISTED_MAX) print_note("%s", why->what);
}

int complaints_finish(const Complaints *c, int inputs, Error *e) {
    if (c->files > LISTED_MAX) print_note("and %d more", c->files - LISTED_MAX);
    if (c->files <= 1) {
        if (c->files) *e = c->first;
        return c->files ? c->first.code : 0;
    }
    return FAIL(e, c->first.code, c->first.hint, "%d of %d files cannot be taken; the first is %s", c->files, inputs,
                c->first.what);
}
