#define _POSIX_C_SOURCE 200809L
#include "inputs.h"

#include "base/files.h"

#include <dirent.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static bool name_ends_in(const char *name, const char *end) {
    size_t n = strlen(name), m = strlen(end);
    return n > m && strcmp(name + n - m, end) == 0;
}

static bool name_is_jsonl(const char *name) { return name_ends_in(name, ".jsonl") || name_ends_in(name, ".ndjson"); }

// What is taken from a directory; a file named by itself may have any name.
static bool name_is_text(const char *name) {
    return name_ends_in(name, ".txt") || name_ends_in(name, ".md") || name_is_jsonl(name);
}

static int inputs_push(Inputs *in, const char *path, const struct stat *st, Error *e) {
    if (in->count == in->capacity) {
        int capacity = in->capacity ? 2 * in->capacity : 64;
        Input *all = realloc(in->all, (size_t)capacity * sizeof *all);
        if (!all) return FAIL(e, ERR_MEMORY, NULL, "out of memory listing the inputs");
        in->all = all;
        in->capacity = capacity;
    }
    Input *input = &in->all[in->count];
    *input = (Input){.jsonl = name_is_jsonl(path), .pipe = !st || !S_ISREG(st->st_mode)};
    if (!input->pipe) {
        input->bytes = (uint64_t)st->st_size;
        input->time = (int64_t)st->st_mtim.tv_sec * 1000000000 + st->st_mtim.tv_nsec;
    }
    TRY(memory_alloc((void **)&input->path, strlen(path) + 1, "inputs", e));
    strcpy(input->path, path);
    in->count++;
    return 0;
}

static int inputs_add_directory(Inputs *in, const char *path, Error *e);

// `inside` a directory other kinds of files are passed over.
static int inputs_add_path(Inputs *in, const char *path, bool inside, Error *e) {
    struct stat st;
    if (strcmp(path, "-") == 0) return inputs_push(in, path, NULL, e);
    if (stat(path, &st) != 0) {
        if (inside && errno == ENOENT) return 0; // a dangling link
        return FAIL(e, ERR_INPUT, "check the path", "%s: cannot open: %s", path, strerror(errno));
    }
    if (S_ISDIR(st.st_mode)) {
        struct stat link; // a linked directory may lead back up
        if (inside && lstat(path, &link) == 0 && S_ISLNK(link.st_mode)) return 0;
        return inputs_add_directory(in, path, e);
    }
    if (inside && !S_ISREG(st.st_mode)) return 0;
    if (inside && !name_is_text(path)) return in->passed_over++, 0;
    if (access(path, R_OK) != 0)
        return FAIL(e, ERR_INPUT, "check its permissions", "%s: cannot open: %s", path, strerror(errno));
    return inputs_push(in, path, &st, e);
}

static int inputs_compare(const struct dirent **a, const struct dirent **b) {
    return strcmp((*a)->d_name, (*b)->d_name);
}

static int inputs_add_directory(Inputs *in, const char *path, Error *e) {
    struct dirent **entries;
    int count = scandir(path, &entries, NULL, inputs_compare), code = 0;
    if (count < 0) return FAIL(e, ERR_INPUT, "check its permissions", "%s: cannot list: %s", path, strerror(errno));
    for (int i = 0; i < count; i++) {
        char child[4096];
        if (!code && entries[i]->d_name[0] != '.') { // hidden files are not text
            code = path_join(child, sizeof child, path, entries[i]->d_name, e);
            if (!code) code = inputs_add_path(in, child, true, e);
        }
        free(entries[i]);
    }
    free(entries);
    return code;
}

int inputs_add(Inputs *in, const char *path, Error *e) { return inputs_add_path(in, path, false, e); }

int inputs_add_list(Inputs *in, const char *list, Error *e) {
    char *text;
    size_t bytes;
    int code = 0, number = 1;
    TRY(file_read(list, (size_t)1 << 30, &text, &bytes, e));
    for (char *line = text; line < text + bytes && !code; number++) {
        char *next = memchr(line, '\n', (size_t)(text + bytes - line));
        if (next) *next = 0;
        if (*line) code = inputs_add(in, line, e);
        if (code) error_prefix(e, "%s line %d", list, number);
        line = next ? next + 1 : text + bytes;
    }
    memory_free(text);
    return code;
}

void inputs_free(Inputs *in) {
    for (int i = 0; i < in->count; i++) memory_free(in->all[i].path);
    free(in->all);
    *in = (Inputs){0};
}

const char *input_name(const Input *input) { return strcmp(input->path, "-") ? input->path : "standard input"; }
