#define _GNU_SOURCE // FNM_CASEFOLD
#include "inputs.h"
#include "base/files.h"
#include "base/text.h"

#include <errno.h>
#include <fcntl.h>
#include <fnmatch.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { BEGIN_BYTES = 256 }; // bytes of a text that decide its format

// ---- Text or JSON Lines ---------------------------------------------------------------------------------------------

static bool path_matches(const char *path, const char *pattern) { // ignores case
    return fnmatch(pattern, path, FNM_CASEFOLD | FNM_EXTMATCH) == 0;
}

static int format_of_name(const char *path) { // FORMAT_AUTO: unknown
    if (path_matches(path, "*.@(jsonl|ndjson|jl)")) return FORMAT_JSONL;
    return path_matches(path, "*.@(txt|md)") ? FORMAT_TEXT : FORMAT_AUTO;
}

// A text that begins with { and " is JSON Lines. Returns FORMAT_AUTO if the decision needs more text.
static int format_of_text(const char *text, size_t bytes, bool ended) {
    char begin[BEGIN_BYTES] = "";
    memcpy(begin, text, size_min(bytes, sizeof begin - 1));
    const char *blank = begin + utf8_mark(begin, bytes);
    blank += strspn(blank, " \t\r\n");
    const char *next = blank + (*blank == '{'), *quote = next + strspn(next, " \t");
    if (!*quote && (size_t)(quote - begin) >= bytes && !ended) return FORMAT_AUTO;
    return next > blank && *quote == '"' ? FORMAT_JSONL : FORMAT_TEXT;
}

static int format_of_file(const char *path) {
    char text[BEGIN_BYTES];
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    ssize_t bytes = fd < 0 ? 0 : read(fd, text, sizeof text);
    if (fd >= 0) close(fd);
    return format_of_text(text, bytes < 0 ? 0 : (size_t)bytes, true);
}

// Refuses a pipe if an option must first know all of its text.
static int check_pipe(const Input *input, const TokenizeOptions *o, Error *e) {
    if (!input->pipe || input->format != FORMAT_TEXT) return 0;
    if (o->invalid == INVALID_SKIP)
        return FAIL(e, ERR_USAGE, "write it to a file first, or give --format jsonl",
                    "--invalid skip: whether %s is UTF-8 is unknown until its end", input_name(input));
    if (o->val_fraction > 0 && !*o->separator)
        return FAIL(e, ERR_USAGE, "write it to a file first, or give --separator or --format jsonl",
                    "--val-fraction: the length of %s is unknown", input_name(input));
    return 0;
}

int input_decide(Input *input, const TokenizeOptions *o, const char *text, size_t bytes, bool ended, Error *e) {
    input->format = format_of_text(text, bytes, ended);
    if (input->format == FORMAT_JSONL) input->notes = 1 << NOTE_JSONL;
    else if (input->format == FORMAT_TEXT && path_matches(input->path, "*.json")) input->notes = 1 << NOTE_JSON;
    return check_pipe(input, o, e);
}

// ---- The list of inputs ---------------------------------------------------------------------------------------------

static int inputs_push(Inputs *in, const char *path, const struct stat *st, Error *e) {
    Input *all = realloc(in->all, ((size_t)in->count + 1) * sizeof *all);
    char *copy = strdup(path);
    if (all) in->all = all;
    if (!all || !copy) return free(copy), FAIL(e, ERR_MEMORY, NULL, "out of memory: the list of inputs");
    Input *input = &in->all[in->count];
    *input = (Input){.path = copy, .number = (uint64_t)in->count++, .pipe = !st || !S_ISREG(st->st_mode)};
    input->format = in->o->format ? in->o->format : format_of_name(path);
    if (input->pipe) in->pipes = true;
    else in->bytes += input->bytes = (uint64_t)st->st_size;
    return check_pipe(input, in->o, e);
}

// Adds a file, or a directory's files. inside: `path` was found in a directory. Such a file is skipped unless
// format_of_name knows its name's ending, or it is a *.json file of JSON Lines.
static int inputs_add(Inputs *in, const char *path, bool inside, Error *e) {
    struct stat st, link;
    if (strcmp(path, "-") == 0) return inputs_push(in, path, NULL, e);
    if (stat(path, &st) != 0) {
        if (inside && errno == ENOENT) return 0; // a dangling link
        return FAIL(e, ERR_INPUT, "check the path", "%s: cannot open: %s", path, strerror(errno));
    }
    if (S_ISDIR(st.st_mode)) {
        Names names;
        char child[PATH_MAX];
        int code = 0;
        if (inside && lstat(path, &link) == 0 && S_ISLNK(link.st_mode)) return 0; // may be a parent directory
        TRY(directory_list(IN_PATH, path, &names, e));
        for (int i = 0; i < names.count && !code; i++) {
            if (names.entry[i]->d_name[0] == '.') continue;
            code = path_join(child, sizeof child, path, names.entry[i]->d_name, e);
            if (!code) code = inputs_add(in, child, true, e);
        }
        names_free(&names);
        return code;
    }
    if (inside && !S_ISREG(st.st_mode)) return 0;
    bool json = inside && path_matches(path, "*.json") && format_of_file(path) == FORMAT_JSONL;
    if (inside && !json && format_of_name(path) == FORMAT_AUTO) return in->passed_over++, 0;
    if (access(path, R_OK) != 0)
        return FAIL(e, ERR_INPUT, "check its permissions", "%s: cannot open: %s", path, strerror(errno));
    return inputs_push(in, path, &st, e);
}

static const char *name_of(const char *path) { return strcmp(path, "-") ? path : "standard input"; }

static int inputs_add_list(Inputs *in, const char *list, Error *e) {
    FILE *f = strcmp(list, "-") ? fopen(list, "re") : stdin;
    char *line = NULL;
    size_t room = 0;
    int code = 0, number = 1;
    if (!f) return FAIL(e, ERR_INPUT, "check the path", "--files-from: %s: cannot open: %s", list, strerror(errno));
    for (ssize_t n; !code && (n = getline(&line, &room, f)) > 0; number++) {
        const char *path = line + (number == 1 ? utf8_mark(line, (size_t)n) : 0);
        if (strlen(line) < (size_t)n) code = FAIL(e, ERR_INPUT, "write one path per line", "a zero byte");
        if (line[n - 1] == '\n') line[--n] = 0;
        if (n > 0 && line[n - 1] == '\r') line[n - 1] = 0;
        if (*path && !code) code = inputs_add(in, path, false, e);
        if (code) error_prefix(e, "%s line %d", name_of(list), number);
    }
    if (!code && !feof(f))
        code =
            FAIL(e, ERR_INPUT, "check the path", "--files-from: %s: cannot read: %s", name_of(list), strerror(errno));
    free(line);
    if (f != stdin) fclose(f);
    return code;
}

int inputs_gather(Inputs *in, const TokenizeOptions *o, char **names, Error *e) {
    in->o = o;
    for (int i = 0; i < o->inputs; i++) TRY(inputs_add(in, names[i], false, e));
    if (*o->files_from) TRY(inputs_add_list(in, o->files_from, e));
    if (in->count == 0)
        return FAIL(e, ERR_INPUT, "a directory is searched for .txt, .md, .jsonl, .ndjson, .jl and .json files",
                    "no text in %s", name_of(o->inputs ? names[0] : o->files_from));
    if (in->passed_over)
        fprintf(stderr, "%d file%s with other endings passed over; --files-from takes any\n", in->passed_over,
                in->passed_over == 1 ? "" : "s");
    return 0;
}

void inputs_free(Inputs *in) {
    for (int i = 0; i < in->count; i++) free(in->all[i].path);
    free(in->all);
}

const char *input_name(const Input *input) { return name_of(input->path); }
