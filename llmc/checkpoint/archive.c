#define _POSIX_C_SOURCE 200809L
#include "checkpoint/archive.h"

#include <errno.h>
#include <inttypes.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

_Static_assert(ARCHIVE_PATH == PATH_MAX, "a path is a path");

// ---------------------------------------------------------------------------------------------------------------------
// Names

#define STEP_PREFIX    "step_"
#define PARTIAL_PREFIX ".step_"
#define PARTIAL_SUFFIX ".partial"

void archive_name(char *out, size_t bytes, int64_t step) { snprintf(out, bytes, STEP_PREFIX "%08" PRId64, step); }

static int step_path(const char *out, int64_t step, char path[ARCHIVE_PATH], Error *e) {
    char name[40];
    archive_name(name, sizeof name, step);
    return path_join(path, ARCHIVE_PATH, out, name, e);
}

static int partial_path(const char *out, int64_t step, char path[ARCHIVE_PATH], Error *e) {
    char name[60];
    snprintf(name, sizeof name, PARTIAL_PREFIX "%08" PRId64 PARTIAL_SUFFIX, step);
    return path_join(path, ARCHIVE_PATH, out, name, e);
}

int64_t archive_step_of(const char *name) {
    const char *digits = name + strlen(STEP_PREFIX);
    size_t length = strlen(name);
    if (strncmp(name, STEP_PREFIX, strlen(STEP_PREFIX)) != 0) return -1;
    if (length < strlen(STEP_PREFIX) + 8 || length > strlen(STEP_PREFIX) + 18) return -1;
    if (digits[strspn(digits, "0123456789")]) return -1;
    int64_t step = strtoll(digits, NULL, 10);
    char canonical[40];
    archive_name(canonical, sizeof canonical, step);
    return strcmp(canonical, name) == 0 ? step : -1;
}

// The step of a temporary name; -1 for any other.
static int64_t partial_step_of(const char *name) {
    char step[40];
    size_t length = strlen(name), tail = strlen(PARTIAL_SUFFIX);
    if (*name != '.' || length <= tail || length - tail > sizeof step) return -1;
    if (strcmp(name + length - tail, PARTIAL_SUFFIX) != 0) return -1;
    snprintf(step, sizeof step, "%.*s", (int)(length - tail - 1), name + 1);
    return archive_step_of(step);
}

typedef struct {
    int64_t *step; // newest first
    int count;
} Steps;

static int compare_newest_first(const void *a, const void *b) {
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return x > y ? -1 : x < y;
}

static void steps_free(Steps *steps) { memory_free(steps->step); }

static int steps_list(const char *out, Steps *steps, Error *e) {
    Names names;
    *steps = (Steps){0};
    TRY(directory_list(out, &names, e));
    int code = memory_alloc((void **)&steps->step, (size_t)names.count * sizeof *steps->step, "checkpoint names", e);
    for (int i = 0; !code && i < names.count; i++)
        if (archive_step_of(names.name[i]) >= 0) steps->step[steps->count++] = archive_step_of(names.name[i]);
    names_free(&names);
    if (!code && steps->count) qsort(steps->step, (size_t)steps->count, sizeof *steps->step, compare_newest_first);
    return code;
}

int archive_count(const char *out, int *count, Error *e) {
    Steps steps;
    TRY(steps_list(out, &steps, e));
    *count = steps.count;
    steps_free(&steps);
    return 0;
}

bool archive_has(const char *out, int64_t step) {
    char path[ARCHIVE_PATH];
    return step_path(out, step, path, &(Error){0}) == 0 && directory_exists(path);
}

// ---------------------------------------------------------------------------------------------------------------------
// Removing what has a temporary name

// All that a checkpoint may hold; the manifest, which lists it, is removed last.
static const char *const own_files[] = {"model.safetensors", "config.json", "optimizer.safetensors", "state.json",
                                        "vocab.json",        "merges.txt",  "tokenizer_config.json", MANIFEST_NAME};
enum { OWN_FILES = sizeof own_files / sizeof *own_files };

// Renames it to step_NNNNNNNN.SUFFIX, or the first of .SUFFIX.2, .SUFFIX.3, ... that is free.
static int rename_aside(const char *out, int64_t step, const char *from, const char *suffix,
                        char aside[ARCHIVE_PATH + 32], Error *e) {
    char path[ARCHIVE_PATH];
    int copy = 1;
    TRY(step_path(out, step, path, e));
    snprintf(aside, ARCHIVE_PATH + 32, "%s.%s", path, suffix);
    while (file_exists(aside)) snprintf(aside, ARCHIVE_PATH + 32, "%s.%s.%d", path, suffix, ++copy);
    return path_rename(from, aside, out, e);
}

static int keep_rest(const char *out, int64_t step, const char *partial, const Names *left, FILE *notes, Error *e) {
    char aside[ARCHIVE_PATH + 32];
    const int most = 5; // names in the line
    TRY(rename_aside(out, step, partial, "kept", aside, e));
    fprintf(notes, "note: %s keeps what the removed checkpoint held and this program did not write", aside);
    for (int i = 0; i < left->count && i < most; i++) fprintf(notes, "%s %s", i ? "," : ":", left->name[i]);
    if (left->count > most) fprintf(notes, " and %d more", left->count - most);
    fputs("\n", notes);
    return 0;
}

static int remove_partial(const char *out, int64_t step, FILE *notes, Error *e) {
    char path[ARCHIVE_PATH];
    const char *names[MANIFEST_FILES + OWN_FILES];
    Manifest manifest;
    Names left;
    int count = 0;
    TRY(partial_path(out, step, path, e));
    if (!file_exists(path)) return 0;
    manifest_read(&manifest, path, &(Error){0}); // without one it lists nothing
    for (int i = 0; i < manifest.count; i++) names[count++] = manifest.file[i].name;
    for (int i = 0; i < OWN_FILES; i++) names[count++] = own_files[i];
    int code = directory_remove(path, names, count, &left, e);
    if (!code && file_exists(path)) code = keep_rest(out, step, path, &left, notes, e);
    names_free(&left);
    return code;
}

void archive_abandon(const char *out, int64_t step, FILE *notes) { remove_partial(out, step, notes, &(Error){0}); }

// ---------------------------------------------------------------------------------------------------------------------
// Coming to be

int archive_begin(const char *out, int64_t step, char directory[ARCHIVE_PATH], FILE *notes, Error *e) {
    TRY(partial_path(out, step, directory, e));
    TRY(remove_partial(out, step, notes, e));
    if (mkdir(directory, 0777) != 0)
        return FAIL(e, ERR_WRITE, "make room, or choose another --out", "%s: cannot create: %s", directory,
                    strerror(errno));
    return 0;
}

int archive_commit(const char *out, int64_t step, const Manifest *manifest, char final[ARCHIVE_PATH], Error *e) {
    char partial[ARCHIVE_PATH];
    TRY(partial_path(out, step, partial, e));
    TRY(step_path(out, step, final, e));
    TRY(manifest_write(manifest, partial, e));
    pulse_beat(manifest->pulse);
    return path_rename(partial, final, out, e);
}

// *foreign, where the caller asks: its format is another one, which says nothing of damage.
static int check(const char *directory, Verify what, const Pulse *pulse, bool *foreign, Error *e) {
    Manifest *manifest;
    TRY(memory_alloc((void **)&manifest, sizeof *manifest, "a manifest", e));
    int code = manifest_read(manifest, directory, e);
    if (foreign) *foreign = manifest->foreign;
    manifest->pulse = pulse;
    if (!code) code = manifest_verify(manifest, directory, what, e);
    memory_free(manifest);
    return code;
}

int archive_verify(const char *directory, const Pulse *pulse, Error *e) {
    return check(directory, VERIFY_DISK, pulse, NULL, e);
}

// ---------------------------------------------------------------------------------------------------------------------
// Going away

// Out of the way in one rename first: a checkpoint that is removed half must not look like one.
static int remove_step(const char *out, int64_t step, FILE *notes, Error *e) {
    char path[ARCHIVE_PATH], partial[ARCHIVE_PATH];
    TRY(step_path(out, step, path, e));
    TRY(partial_path(out, step, partial, e));
    TRY(remove_partial(out, step, notes, e));
    TRY(path_rename(path, partial, out, e));
    return remove_partial(out, step, notes, e);
}

int archive_thin(const char *out, int64_t keep, int64_t stays, FILE *notes, Error *e) {
    Steps steps;
    int code = 0;
    if (keep == 0) return 0;
    TRY(steps_list(out, &steps, e));
    for (int i = 0, complete = 0; i < steps.count; i++) {
        char path[ARCHIVE_PATH];
        Error ignored;
        if (complete >= keep) {
            if (steps.step[i] != stays) TRY_GOTO(remove_step(out, steps.step[i], notes, e));
            continue;
        }
        TRY_GOTO(step_path(out, steps.step[i], path, e));
        complete += check(path, VERIFY_SIZES, NULL, NULL, &ignored) == 0;
    }
done:
    steps_free(&steps);
    return code;
}

// What removing a checkpoint gives back, as far as the files tell. A link gives nothing.
static int step_bytes(const char *out, int64_t step, uint64_t *bytes, Error *e) {
    char path[ARCHIVE_PATH], file[ARCHIVE_PATH];
    struct stat st;
    Names names;
    int code = 0;
    *bytes = 0;
    TRY(step_path(out, step, path, e));
    if (lstat(path, &st) != 0 || !S_ISDIR(st.st_mode)) return 0;
    TRY(directory_list(path, &names, e));
    for (int i = 0; i < names.count && !code; i++) {
        code = path_join(file, sizeof file, path, names.name[i], e);
        if (!code && lstat(file, &st) == 0)
            *bytes += (uint64_t)st.st_blocks * 512; // POSIX's unit of st_blocks, in bytes
    }
    names_free(&names);
    return code;
}

// Index of the newest checkpoint that the disk gives back as it was written; -1 where there is none.
static int newest_whole(const char *out, const Steps *steps, const Pulse *pulse) {
    char path[ARCHIVE_PATH];
    Error ignored;
    for (int i = 0; i < steps->count; i++)
        if (step_path(out, steps->step[i], path, &ignored) == 0 && archive_verify(path, pulse, &ignored) == 0) return i;
    return -1;
}

// All but that one and `best` may go, but none goes in vain.
static int remove_for_room(const char *out, const Steps *steps, uint64_t bytes, int64_t best, Removed *removed,
                           FILE *notes, const Pulse *pulse, Error *e) {
    uint64_t left, in_all, one;
    int newest = newest_whole(out, steps, pulse);
    TRY(disk_free(out, &left, e));
    in_all = left;
    for (int i = 0; i < steps->count && newest >= 0; i++) {
        if (i == newest || steps->step[i] == best) continue;
        TRY(step_bytes(out, steps->step[i], &one, e));
        in_all += one;
    }
    for (int i = steps->count - 1; i >= 0 && left < bytes && in_all >= bytes; i--) {
        if (i == newest || steps->step[i] == best) continue;
        TRY(step_bytes(out, steps->step[i], &one, e));
        if (one == 0) continue;
        TRY(remove_step(out, steps->step[i], notes, e));
        if (removed->count++ == 0) removed->first = steps->step[i];
        removed->last = steps->step[i];
        pulse_beat(pulse);
        TRY(disk_free(out, &left, e));
    }
    return 0;
}

int archive_make_room(const char *out, uint64_t bytes, int64_t keep, int64_t stays, Removed *removed, FILE *notes,
                      const Pulse *pulse, Error *e) {
    uint64_t left;
    Steps steps;
    *removed = (Removed){0};
    TRY(disk_free(out, &left, e));
    if (left < bytes && keep > 0) {
        TRY(steps_list(out, &steps, e));
        int code = remove_for_room(out, &steps, bytes, stays, removed, notes, pulse, e);
        steps_free(&steps);
        if (code) return code;
        TRY(disk_free(out, &left, e));
    }
    if (left >= bytes) return 0;
    return FAIL(e, ERR_WRITE, keep > 0 ? "make room" : "make room, or let older ones go with --keep",
                "%s: a checkpoint takes %.1f MiB, and the disk has %.1f MiB left", out, (double)bytes / (1 << 20),
                (double)left / (1 << 20));
}

int archive_tidy(const char *out, FILE *notes, Error *e) {
    Names names;
    int code = 0;
    TRY(directory_list(out, &names, e));
    for (int i = 0; i < names.count && !code; i++)
        if (partial_step_of(names.name[i]) >= 0) code = remove_partial(out, partial_step_of(names.name[i]), notes, e);
    names_free(&names);
    return code;
}

// ---------------------------------------------------------------------------------------------------------------------
// Being found again

int archive_newest(const char *out, FILE *notes, const Pulse *pulse, bool *found, int64_t *step,
                   char directory[ARCHIVE_PATH], Error *e) {
    Steps steps;
    *found = false;
    TRY(steps_list(out, &steps, e));
    int code = 0, passed = 0;
    for (int i = 0; i < steps.count && !*found; i++) {
        bool foreign = false;
        TRY_GOTO(step_path(out, steps.step[i], directory, e));
        *step = steps.step[i];
        code = check(directory, VERIFY_BYTES, pulse, &foreign, e); // and it is read next
        if (code && (code != ERR_INPUT || foreign)) goto done;
        *found = code == 0;
        if (code) passed++, fprintf(notes, "warning: %s. Passed over\n", e->what);
    }
    code = 0;
    if (!*found && passed)
        code = FAIL(e, ERR_INPUT, "--fresh starts over, and moves this run aside",
                    "%s: none of its %d checkpoints is as it was written", out, passed);
done:
    steps_free(&steps);
    return code;
}

static int set_aside(const char *out, int64_t step, FILE *notes, Error *e) {
    char path[ARCHIVE_PATH], aside[ARCHIVE_PATH + 32];
    TRY(step_path(out, step, path, e));
    TRY(rename_aside(out, step, path, "damaged", aside, e));
    fprintf(notes, "%s is now %s\n", path, aside);
    return 0;
}

int archive_set_aside_after(const char *out, int64_t step, FILE *notes, Error *e) {
    Steps steps;
    TRY(steps_list(out, &steps, e));
    int code = 0;
    for (int i = 0; !code && i < steps.count; i++)
        if (steps.step[i] > step) code = set_aside(out, steps.step[i], notes, e);
    steps_free(&steps);
    return code;
}
