// A checkpoint OUT/step_N is complete or does not exist. These functions keep these promises together:
// 1. A checkpoint is written in OUT/.step_N.partial, which nothing reads as a checkpoint (archive_begin). The
//    directory is held by its descriptor: if another one takes its path, nothing is written there.
// 2. It becomes visible in one rename, after its files, its manifest and their directory are on the disk; then OUT is
//    synced (archive_commit). A process killed before leaves a partial, which archive_tidy removes.
// 3. It is removed in the opposite order: renamed to .step_N.partial, then removed (remove_step).
// 4. Only files that the manifest or own_files names are removed. Other files stay in OUT/step_N.kept, with a line to
//    `notes`. A checkpoint that is a link is unlinked (directory_remove).
// 5. The newest checkpoint that reads back undamaged is never removed, and neither is that of step `protect`.
//    archive_make_room reads it back first; archive_thin is called after archive_verify of the newest.
// 6. A checkpoint that cannot be read does not count as damaged: nothing is removed or renamed because of it, and no
//    older one is used instead.
// 7. A checkpoint that is damaged, or later than the one that a run resumed from, is renamed, never removed
//    (archive_set_aside_after).
#include "checkpoint/archive.h"

#include <errno.h>
#include <inttypes.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

_Static_assert(ARCHIVE_PATH == PATH_MAX, "path_join fills either");

// ---- Names ----------------------------------------------------------------------------------------------------------

#define FINAL   "step_%08" PRId64
#define PARTIAL "." FINAL ".partial"

void archive_name(char *out, size_t bytes, int64_t step) { snprintf(out, bytes, FINAL, step); }

// format: FINAL or PARTIAL
static int step_path(const char *run_dir, int64_t step, const char *format, char path[ARCHIVE_PATH], Error *e) {
    char name[60];
    snprintf(name, sizeof name, format, step);
    return path_join(path, ARCHIVE_PATH, run_dir, name, e);
}

static int64_t step_of(const char *name, const char *format) {
    static const char decimal[] = "0123456789";
    char canonical[60];
    const char *digits = name + strcspn(name, decimal);
    int64_t step = strspn(digits, decimal) <= 18 ? strtoll(digits, NULL, 10) : -1; // 18 digits fit 64 bits
    snprintf(canonical, sizeof canonical, format, step);
    return step >= 0 && strcmp(canonical, name) == 0 ? step : -1;
}

int64_t archive_step_of(const char *name) { return step_of(name, FINAL); }

typedef struct {
    int64_t *step; // newest first
    int count;
} Steps;

static int compare_newest_first(const void *a, const void *b) {
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return x > y ? -1 : x < y;
}

static int steps_list(const char *run_dir, Steps *steps, Error *e) {
    Names names;
    *steps = (Steps){0};
    TRY(directory_list(run_dir, &names, e));
    int code = memory_alloc((void **)&steps->step, (size_t)names.count * sizeof *steps->step, "checkpoint names", e);
    for (int i = 0; !code && i < names.count; i++)
        if (archive_step_of(names.name[i]) >= 0) steps->step[steps->count++] = archive_step_of(names.name[i]);
    names_free(&names);
    if (!code && steps->count) qsort(steps->step, (size_t)steps->count, sizeof *steps->step, compare_newest_first);
    return code;
}

int archive_count(const char *run_dir, int *count, Error *e) {
    Steps steps;
    TRY(steps_list(run_dir, &steps, e));
    *count = steps.count;
    memory_free(steps.step);
    return 0;
}

bool archive_has(const char *run_dir, int64_t step) {
    char path[ARCHIVE_PATH];
    return step_path(run_dir, step, FINAL, path, &(Error){0}) == 0 && !file_missing(path);
}

// ---- Partials -------------------------------------------------------------------------------------------------------

// All files of a checkpoint. The manifest, which lists them, is removed last.
static const char *const own_files[] = {
    "model.safetensors", "config.json",           "optimizer.safetensors",  "state.json", "vocab.json",
    "merges.txt",        "tokenizer_config.json", "generation_config.json", MANIFEST_NAME};
enum { OWN_FILES = sizeof own_files / sizeof *own_files };

// Renames `from` to step_N.SUFFIX, or the first free name of step_N.SUFFIX.2, step_N.SUFFIX.3, ...
static int rename_aside(const char *run_dir, int64_t step, const char *from, const char *suffix,
                        char aside[ARCHIVE_PATH + 32], Error *e) {
    char path[ARCHIVE_PATH];
    int copy = 1;
    TRY(step_path(run_dir, step, FINAL, path, e));
    snprintf(aside, ARCHIVE_PATH + 32, "%s.%s", path, suffix);
    while (file_exists(aside)) snprintf(aside, ARCHIVE_PATH + 32, "%s.%s.%d", path, suffix, ++copy);
    return path_rename(from, aside, run_dir, e);
}

static int keep_rest(const char *run_dir, int64_t step, const char *partial, FILE *notes, Error *e) {
    char aside[ARCHIVE_PATH + 32];
    const int most = 5; // names in the line
    Names left;
    TRY(rename_aside(run_dir, step, partial, "kept", aside, e));
    directory_list(aside, &left, &(Error){0}); // no names if it is not a directory
    fprintf(notes, "note: %s keeps files of the removed checkpoint that this program did not write", aside);
    for (int i = 0; i < left.count && i < most; i++) fprintf(notes, "%s %s", i ? "," : ":", left.name[i]);
    if (left.count > most) fprintf(notes, " and %d more", left.count - most);
    fputs("\n", notes);
    names_free(&left);
    return 0;
}

static int remove_partial(const char *run_dir, int64_t step, FILE *notes, Error *e) {
    char path[ARCHIVE_PATH];
    const char *names[MANIFEST_FILES + OWN_FILES];
    Manifest manifest;
    int count = 0;
    TRY(step_path(run_dir, step, PARTIAL, path, e));
    if (!file_exists(path)) return 0;
    manifest_read(&manifest, path, &(Error){0}); // lists nothing on failure
    for (int i = 0; i < manifest.count; i++) names[count++] = manifest.file[i].name;
    for (int i = 0; i < OWN_FILES; i++) names[count++] = own_files[i];
    TRY(directory_remove(path, names, count, e));
    return file_exists(path) ? keep_rest(run_dir, step, path, notes, e) : 0;
}

void archive_abandon(const char *run_dir, int64_t step, Manifest *manifest, FILE *notes) {
    manifest_release(manifest);
    remove_partial(run_dir, step, notes, &(Error){0});
}

int archive_tidy(const char *run_dir, FILE *notes, Error *e) {
    Names names;
    int code = 0;
    TRY(directory_list(run_dir, &names, e));
    for (int i = 0; i < names.count && !code; i++)
        if (step_of(names.name[i], PARTIAL) >= 0)
            code = remove_partial(run_dir, step_of(names.name[i], PARTIAL), notes, e);
    names_free(&names);
    return code;
}

// ---- Writing and verifying ------------------------------------------------------------------------------------------

int archive_begin(const char *run_dir, int64_t step, char directory[ARCHIVE_PATH], Manifest *manifest, FILE *notes,
                  Error *e) {
    TRY(step_path(run_dir, step, PARTIAL, directory, e));
    TRY(remove_partial(run_dir, step, notes, e));
    if (mkdir(directory, 0777) != 0)
        return FAIL(e, ERR_WRITE, "free some space, or choose another --run_dir", "%s: cannot create: %s", directory,
                    strerror(errno));
    return manifest_hold(manifest, directory, e);
}

int archive_commit(const char *run_dir, int64_t step, Manifest *manifest, char final[ARCHIVE_PATH], Error *e) {
    char partial[ARCHIVE_PATH];
    TRY(step_path(run_dir, step, PARTIAL, partial, e));
    TRY(step_path(run_dir, step, FINAL, final, e));
    TRY(manifest_write(manifest, partial, e));
    pulse_beat(manifest->pulse);
    TRY(directory_is(partial, manifest->dir, e));
    manifest_release(manifest);
    return path_rename(partial, final, run_dir, e);
}

// foreign may be NULL; *foreign: the manifest is of another format, which is no damage.
static int check(const char *directory, Verify what, const Pulse *pulse, bool *foreign, Error *e) {
    Manifest manifest;
    struct stat st;
    if (stat(directory, &st) != 0 && file_exists(directory))
        return FAIL_UNREADABLE(e, "make it readable", "%s: %s", directory, strerror(errno));
    int code = manifest_read(&manifest, directory, e);
    if (foreign) *foreign = manifest.foreign;
    manifest.pulse = pulse;
    return code ? code : manifest_verify(&manifest, directory, what, e);
}

int archive_verify(const char *directory, const Pulse *pulse, Error *e) {
    return check(directory, VERIFY_DISK, pulse, NULL, e);
}

// ---- Removing -------------------------------------------------------------------------------------------------------

static int remove_step(const char *run_dir, int64_t step, FILE *notes, Error *e) {
    char path[ARCHIVE_PATH], partial[ARCHIVE_PATH];
    TRY(step_path(run_dir, step, FINAL, path, e));
    TRY(step_path(run_dir, step, PARTIAL, partial, e));
    TRY(remove_partial(run_dir, step, notes, e));
    TRY(path_rename(path, partial, run_dir, e));
    return remove_partial(run_dir, step, notes, e);
}

int archive_thin(const char *run_dir, int64_t keep, int64_t protect, FILE *notes, Error *e) {
    Steps steps;
    int code = 0;
    if (keep == 0) return 0;
    TRY(steps_list(run_dir, &steps, e));
    for (int i = 0, complete = 0; i < steps.count; i++) {
        char path[ARCHIVE_PATH];
        Error ignored;
        if (complete >= keep) {
            if (steps.step[i] != protect) TRY_GOTO(remove_step(run_dir, steps.step[i], notes, e));
            continue;
        }
        TRY_GOTO(step_path(run_dir, steps.step[i], FINAL, path, e));
        complete += check(path, VERIFY_SIZES, NULL, NULL, &ignored) == 0;
    }
done:
    memory_free(steps.step);
    return code;
}

// The disk space that removing a checkpoint frees, as its files tell. A link frees nothing.
static uint64_t step_bytes(const char *run_dir, int64_t step) {
    char path[ARCHIVE_PATH], file[ARCHIVE_PATH];
    Error ignored;
    struct stat st;
    Names names;
    uint64_t bytes = 0;
    if (step_path(run_dir, step, FINAL, path, &ignored) || lstat(path, &st) != 0 || !S_ISDIR(st.st_mode)) return 0;
    if (directory_list(path, &names, &ignored)) return 0;
    for (int i = 0; i < names.count; i++)
        if (path_join(file, sizeof file, path, names.name[i], &ignored) == 0 && lstat(file, &st) == 0)
            bytes += (uint64_t)st.st_blocks * 512; // POSIX's unit of st_blocks, in bytes
    names_free(&names);
    return bytes;
}

// Index of the newest checkpoint that reads back undamaged; -1: none. Newer ones that cannot be read are kept: their
// step becomes -1.
static int newest_whole(const char *run_dir, Steps *steps, const Pulse *pulse) {
    char path[ARCHIVE_PATH];
    for (int i = 0; i < steps->count; i++) {
        Error e = {0};
        if (step_path(run_dir, steps->step[i], FINAL, path, &e) == 0 && archive_verify(path, pulse, &e) == 0) return i;
        if (e.unreadable) steps->step[i] = -1;
    }
    return -1;
}

// Removes checkpoints, oldest first, until `bytes` are free (*left); none if even all of them are not enough.
static int remove_for_room(const char *run_dir, Steps *steps, uint64_t bytes, int64_t protect, uint64_t *left,
                           Removed *removed, FILE *notes, const Pulse *pulse, Error *e) {
    uint64_t in_all = *left;
    int newest = newest_whole(run_dir, steps, pulse);
    for (int i = 0; i < steps->count; i++) {
        bool kept = i == newest || steps->step[i] == protect || steps->step[i] < 0;
        uint64_t one = kept ? 0 : step_bytes(run_dir, steps->step[i]);
        if (!one) steps->step[i] = -1; // kept
        in_all += one;
    }
    for (int i = steps->count - 1; i >= 0 && newest >= 0 && *left < bytes && in_all >= bytes; i--) {
        if (steps->step[i] < 0) continue;
        TRY(remove_step(run_dir, steps->step[i], notes, e));
        if (removed->count++ == 0) removed->first = steps->step[i];
        removed->last = steps->step[i];
        pulse_beat(pulse);
        TRY(disk_free(run_dir, left, e));
    }
    return 0;
}

int archive_make_room(const char *run_dir, uint64_t bytes, int64_t keep, int64_t protect, Removed *removed, FILE *notes,
                      const Pulse *pulse, Error *e) {
    uint64_t left;
    Steps steps;
    *removed = (Removed){0};
    TRY(disk_free(run_dir, &left, e));
    if (left < bytes && keep > 0) {
        TRY(steps_list(run_dir, &steps, e));
        int code = remove_for_room(run_dir, &steps, bytes, protect, &left, removed, notes, pulse, e);
        memory_free(steps.step);
        if (code) return code;
    }
    if (left >= bytes) return 0;
    return FAIL(e, ERR_WRITE, keep > 0 ? "free some space" : "free some space, or remove older ones with --keep",
                "%s: a checkpoint takes %.1f MiB, and the disk has %.1f MiB left", run_dir, (double)bytes / (1 << 20),
                (double)left / (1 << 20));
}

// ---- Finding --------------------------------------------------------------------------------------------------------

int archive_newest(const char *run_dir, FILE *notes, const Pulse *pulse, bool *found, int64_t *step,
                   char directory[ARCHIVE_PATH], Error *e) {
    Steps steps;
    *found = false;
    TRY(steps_list(run_dir, &steps, e));
    int code = 0, skipped = 0;
    for (int i = 0; i < steps.count && !*found; i++) {
        bool foreign = false;
        TRY_GOTO(step_path(run_dir, steps.step[i], FINAL, directory, e));
        *step = steps.step[i];
        code = check(directory, VERIFY_BYTES, pulse, &foreign, e);
        if (code && e->unreadable)
            error_hint(e,
                       "the checkpoint may be undamaged, and nothing was changed: make it readable and start again; "
                       "or rename %s, to resume from an older one",
                       directory);
        if (code && (code != ERR_INPUT || foreign || e->unreadable)) goto done;
        *found = code == 0;
        if (code) skipped++, fprintf(notes, "warning: %s. Skipped\n", e->what);
    }
    code = 0;
    if (!*found && skipped)
        code = FAIL(e, ERR_INPUT, "--fresh starts over, and moves this run aside",
                    "%s: all of its %d checkpoints are damaged", run_dir, skipped);
done:
    memory_free(steps.step);
    return code;
}

int archive_set_aside_after(const char *run_dir, int64_t step, FILE *notes, Error *e) {
    char path[ARCHIVE_PATH], aside[ARCHIVE_PATH + 32];
    Steps steps;
    int code = 0;
    TRY(steps_list(run_dir, &steps, e));
    for (int i = 0; i < steps.count && steps.step[i] > step; i++) {
        TRY_GOTO(step_path(run_dir, steps.step[i], FINAL, path, e));
        TRY_GOTO(rename_aside(run_dir, steps.step[i], path, "damaged", aside, e));
        fprintf(notes, "%s is now %s\n", path, aside);
    }
done:
    memory_free(steps.step);
    return code;
}
