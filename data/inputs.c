#include "inputs.h"
#include "base/files.h"
#include "base/pipe.h"
#include "base/text.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/stat.h>
#include <unistd.h>

// ---- Text or JSON Lines ---------------------------------------------------------------------------------------------

static bool ends_with(const char *path, const char *ending) { // ignores case
    size_t length = strlen(path), n = strlen(ending);
    return length > n && strcasecmp(path + length - n, ending) == 0;
}

static int format_of_name(const char *path) { // FORMAT_AUTO: unknown
    static const char *const endings[] = {".jsonl", ".ndjson", ".jl", ".txt", ".md"};
    for (int i = 0; i < 5; i++)
        if (ends_with(path, endings[i])) return i < 3 ? FORMAT_JSONL : FORMAT_TEXT;
    return FORMAT_AUTO;
}

// JSON Lines begin with { and ". Returns FORMAT_AUTO if it needs more text.
static int format_of_text(const char *text, size_t bytes, bool ended) {
    size_t at = utf8_mark(text, bytes), blank = at + strspn(text + at, " \t\r\n");
    size_t next = blank + (text[blank] == '{'), quote = next + strspn(text + next, " \t");
    if (!text[quote] && quote >= bytes && !ended) return FORMAT_AUTO;
    return next > blank && text[quote] == '"' ? FORMAT_JSONL : FORMAT_TEXT;
}

static int format_of_file(const char *path) {
    char text[4097];
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    ssize_t bytes = fd < 0 ? 0 : read(fd, text, sizeof text - 1);
    if (fd >= 0) close(fd);
    text[bytes < 0 ? 0 : bytes] = 0;
    return format_of_text(text, strlen(text), true);
}

static void set_format(Input *input, int format, bool by_line) {
    input->jsonl = format == FORMAT_JSONL;
    if (by_line && input->jsonl) input->notes = 1 << NOTE_JSONL;
    else if (by_line && ends_with(input->path, ".json")) input->notes = 1 << NOTE_JSON;
    input->undecided = format == FORMAT_AUTO;
}

// Refuses options that need a file. A pipe's length and its UTF-8 are unknown until its end.
static int pipe_check(const TokenizeOptions *o, const Input *input, Error *e) {
    if (!input->jsonl && o->invalid == INVALID_SKIP)
        return FAIL(e, ERR_USAGE, "write it to a file first, or give --format jsonl",
                    "--invalid skip: whether %s is UTF-8 is unknown until its end", input_name(input));
    if (input_has_tail(o, input))
        return FAIL(e, ERR_USAGE, "write it to a file first, or give --separator or --format jsonl",
                    "--val-fraction: the length of %s is unknown", input_name(input));
    return 0;
}

int input_decide(Input *input, const TokenizeOptions *o, const char *text, size_t bytes, bool ended, Error *e) {
    char begin[256] = "";
    memcpy(begin, text, size_min(bytes, sizeof begin - 1));
    set_format(input, format_of_text(begin, strlen(begin), ended || bytes >= sizeof begin), true);
    return input->undecided ? 0 : pipe_check(o, input, e);
}

// ---- The list of inputs ---------------------------------------------------------------------------------------------

static int inputs_push(Inputs *in, const char *path, const struct stat *st, Error *e) {
    Input *all = realloc(in->all, ((size_t)in->count + 1) * sizeof *all);
    char *copy = strdup(path);
    if (all) in->all = all;
    if (!all || !copy) return free(copy), FAIL(e, ERR_MEMORY, NULL, "out of memory: the list of inputs");
    Input *input = &in->all[in->count];
    *input = (Input){.path = copy, .pipe = !st || !S_ISREG(st->st_mode)};
    int format = in->o->format ? in->o->format : format_of_name(path);
    if (format || input->pipe) set_format(input, format, false);
    else set_format(input, format_of_file(path), true);
    if (!input->pipe) input->bytes = (uint64_t)st->st_size;
    in->count++;
    return 0;
}

// Adds a path. `inside` a directory: only regular files with the endings of text. A file that the user names: any.
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
        if (inside && lstat(path, &link) == 0 && S_ISLNK(link.st_mode)) return 0; // it may lead back up
        TRY(directory_list(path, &names, e));
        for (int i = 0; i < names.count && !code; i++) {
            if (names.name[i][0] == '.') continue;
            code = path_join(child, sizeof child, path, names.name[i], e);
            if (!code) code = inputs_add(in, child, true, e);
        }
        names_free(&names);
        return code;
    }
    if (inside && !S_ISREG(st.st_mode)) return 0;
    bool json = inside && ends_with(path, ".json") && format_of_file(path) == FORMAT_JSONL;
    if (inside && !json && format_of_name(path) == FORMAT_AUTO) return in->passed_over++, 0;
    if (access(path, R_OK) != 0)
        return FAIL(e, ERR_INPUT, "check its permissions", "%s: cannot open: %s", path, strerror(errno));
    return inputs_push(in, path, &st, e);
}

static int inputs_add_list(Inputs *in, const char *list, Error *e) {
    char *text;
    size_t bytes;
    int code = 0, number = 1;
    if (pipe_read(list, (size_t)1 << 30, &text, &bytes, e)) return error_prefix(e, "--files-from");
    for (char *line = text + utf8_mark(text, bytes); line < text + bytes && !code; number++) {
        char *end = line + strcspn(line, "\n");
        if (!*end && end < text + bytes) code = FAIL(e, ERR_INPUT, "write one path a line", "a zero byte");
        *end = 0;
        if (end > line && end[-1] == '\r') end[-1] = 0;
        if (*line && !code) code = inputs_add(in, line, false, e);
        if (code) error_prefix(e, "%s line %d", pipe_name(list), number);
        line = end + 1;
    }
    memory_free(text);
    return code;
}

int inputs_gather(Inputs *in, const TokenizeOptions *o, char **names, int count, Error *e) {
    in->o = o;
    int standard_inputs = *o->files_from && strcmp(o->files_from, "-") == 0;
    for (int i = 0; i < count; i++) TRY(inputs_add(in, names[i], false, e));
    if (*o->files_from) TRY(inputs_add_list(in, o->files_from, e));
    if (in->count == 0)
        return FAIL(e, ERR_INPUT, "a directory is searched for .txt, .md, .jsonl, .ndjson and .jl files", "no text in %s",
                    pipe_name(count ? names[0] : o->files_from));
    if (in->passed_over)
        fprintf(stderr, "%d file%s with other endings passed over; --files-from takes any\n", in->passed_over,
                in->passed_over == 1 ? "" : "s");
    for (int i = 0; i < in->count; i++) {
        Input *input = &in->all[i];
        if (strcmp(input->path, "-") == 0 && standard_inputs++)
            return FAIL(e, ERR_USAGE, "name it once", "standard input is named twice");
        if (input->pipe && !input->undecided) TRY(pipe_check(o, input, e));
    }
    return 0;
}

void inputs_free(Inputs *in) {
    for (int i = 0; i < in->count; i++) free(in->all[i].path);
    free(in->all);
}

const char *input_name(const Input *input) { return pipe_name(input->path); }

bool input_has_tail(const TokenizeOptions *o, const Input *input) {
    return o->val_fraction > 0 && !*o->separator && !input->jsonl;
}
