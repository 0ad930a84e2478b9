#define _POSIX_C_SOURCE 200809L
#include "report.h"

#include <inttypes.h>
#include <stdarg.h>
#include <unistd.h>

void progress_show(Progress *p, uint64_t bytes, uint64_t tokens, bool last) {
    static const char done[] = "##############################", to_do[] = "..............................";
    enum { WIDTH = sizeof done - 1 };
    double now = clock_seconds(), every = p->terminal ? 0.2 : 10;
    if (last ? !p->terminal : now - p->shown < every) return;
    p->shown = now;
    double rate = (double)(bytes - p->start_bytes) / (now - p->start + 1e-9);
    if (p->terminal) fputs("\r", stderr);
    if (p->total_bytes) {
        bytes = size_min(bytes, p->total_bytes);
        double part = (double)bytes / (double)p->total_bytes;
        double left = rate > 0 ? (double)(p->total_bytes - bytes) / rate : 0;
        fprintf(stderr, "[%.*s%.*s] %5.1f%%  ETA %d:%02d:%02d  ", (int)(part * WIDTH), done,
                WIDTH - (int)(part * WIDTH), to_do, 100 * part, (int)(left / 3600), (int)(left / 60) % 60,
                (int)left % 60);
    }
    fprintf(stderr, "%.1f MB  %.1f MB/s  %" PRIu64 " tokens%s", (double)bytes / 1e6, rate / 1e6, tokens,
            p->terminal ? "\x1b[K" : "\n");
    if (last) fputs("\n", stderr);
}

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
    if (c->files == 0) return 0;
    *e = c->first;
    if (c->files > 1)
        FAIL(e, c->first.code, c->first.hint, "%d of %d files cannot be taken; the first is %s", c->files, inputs,
             c->first.what);
    return e->code;
}

const char *plural(uint64_t count) { return count == 1 ? "" : "s"; }
