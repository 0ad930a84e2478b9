// A checkpoint OUT/step_N is complete or does not exist. These functions keep these promises together:
// 1. All paths in OUT are relative to OUT's descriptor: if another directory gets OUT's name, nothing is written,
//    renamed or removed in that directory.
// 2. A checkpoint is written in OUT/.step_N.partial, which nothing reads as a checkpoint (archive_begin).
// 3. One rename makes it visible, after its files, its manifest and their directory are on the disk; then OUT is synced
//    (archive_commit). If the sync fails, the rename is undone. A process killed before the rename leaves a partial,
//    which archive_tidy removes.
// 4. A checkpoint is removed in the opposite order: first renamed to .step_N.partial, then deleted (archive_remove).
// 5. Only a checkpoint whose manifest holds this run's id is removed, unless it is a link or its directory is not
//    writable. Only files that the manifest or own_files lists go; others stay in OUT/step_N.kept (see `notes`).
// 6. Never removed are the checkpoints that `Spare` names, and the newest checkpoint that this run has read back whole
//    (`newest` in archive_make_room). Callers of archive_thin verify the newest checkpoint first.
// 7. A checkpoint that cannot be read is not treated as damaged: the program renames and removes nothing, and uses no
//    older checkpoint instead.
// 8. A checkpoint that is damaged, or later than the one that a run resumed from, is renamed, never removed
//    (archive_set_aside_after). Checkpoints that a rollback renames stay until the next rollback, or until the disk is
//    full (archive_tidy).
#include "checkpoint/archive.h"

#include "base/text.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

int archive_open(Archive *archive, const char *run_dir, Error *e) {
    int dir = open(run_dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (dir < 0) return FAIL_UNREADABLE(e, "check the path", "%s: cannot open: %s", run_dir, strerror(errno));
    *archive = (Archive){.dir = dir};
    if (snprintf(archive->path, sizeof archive->path, "%s", run_dir) < (int)sizeof archive->path) return 0;
    archive_close(archive);
    return FAIL(e, ERR_USAGE, "use a shorter path", "%.80s...: path too long", run_dir);
}

void archive_close(Archive *archive) {
    if (archive_is_open(archive)) close(archive->dir);
    *archive = (Archive){0};
}

int archive_check_name(const Archive *archive, Error *e) {
    char link[64], now[PATH_MAX];
    struct stat named, held;
    bool found = stat(archive->path, &named) == 0;
    if (!found && errno != ENOENT && errno != ENOTDIR && errno != ELOOP) return 0; // cannot tell
    if (found && fstat(archive->dir, &held) == 0 && named.st_dev == held.st_dev && named.st_ino == held.st_ino)
        return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", archive->dir);
    ssize_t n = readlink(link, now, sizeof now - 1);
    now[n > 0 ? n : 0] = 0;
    return FAIL(e, ERR_WRITE, "move it back: then the same command resumes",
                "%s no longer leads to this run's directory, which is now %s", archive->path, *now ? now : "elsewhere");
}

// ---- Names ----------------------------------------------------------------------------------------------------------

#define FINAL       "step_%08" PRId64
#define PARTIAL     "." FINAL ".partial"
#define ROLLED_BACK FINAL ".rolled_back"

void archive_step_path(const char *run_dir, int64_t step, char path[PATH_MAX]) {
    snprintf(path, PATH_MAX, "%s/" FINAL, run_dir, step);
}

// format: FINAL, PARTIAL or ROLLED_BACK
static void step_path(const Archive *archive, int64_t step, const char *format, char path[PATH_MAX]) {
    int n = snprintf(path, PATH_MAX, "%s/", archive->path);
    snprintf(path + n, PATH_MAX - (size_t)n, format, step);
}

// Opens the directory of a step; the caller closes it. Returns -1 and sets errno if it is missing or `flags` refuse it.
static int step_open(const Archive *archive, int64_t step, const char *format, int flags) {
    char name[60];
    snprintf(name, sizeof name, format, step);
    return openat(archive->dir, name, O_RDONLY | O_DIRECTORY | O_CLOEXEC | flags);
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

// Sets *step to the next older step in the directory (by = -1) or to the next newer step (by = 1). Returns false if
// there is none, or on an error, which *code holds.
static bool next_step(const Archive *archive, const char *format, int by, int64_t *step, int *code, Error *e) {
    Names names;
    int64_t next = -1;
    *code = directory_list(archive->dir, archive->path, &names, e);
    if (*code) return false;
    for (int i = 0; i < names.count; i++) {
        const int64_t at = step_of(names.entry[i]->d_name, format);
        if (at >= 0 && (by < 0 ? at < *step && at > next : at > *step && (next < 0 || at < next))) next = at;
    }
    names_free(&names);
    *step = next;
    return next >= 0;
}

int archive_count(const Archive *archive, int *count, Error *e) {
    int code = 0;
    *count = 0;
    for (int64_t step = INT64_MAX; next_step(archive, FINAL, -1, &step, &code, e);) ++*count;
    return code;
}

// ---- Partials -------------------------------------------------------------------------------------------------------

// All files that this build or an older one writes to a checkpoint. The manifest, which lists files, is removed last.
// clang-format off
static const char *const own_files[] = {
    "model.safetensors", "config.json", "generation_config.json", "vocab.json", "merges.txt", "tokenizer_config.json",
    "optimizer.safetensors", "state.json", "training/optimizer.safetensors", "training/state.json", MANIFEST_NAME};
// clang-format on
enum { OWN_FILES = sizeof own_files / sizeof *own_files };

// Renames `from` to step_N.SUFFIX. If that exists, to the first free name of step_N.SUFFIX.2, step_N.SUFFIX.3, ...
static int rename_aside(const Archive *archive, int64_t step, const char *from, const char *suffix,
                        char aside[PATH_MAX], Error *e) {
    step_path(archive, step, FINAL, aside);
    char *end = aside + strlen(aside);
    sprintf(end, ".%s", suffix);
    for (int copy = 2; file_exists_in(archive->dir, aside); copy++) sprintf(end, ".%s.%d", suffix, copy);
    return path_rename(archive->dir, from, aside, e);
}

int archive_abandon(const Archive *archive, int64_t step, int dir, FILE *notes, Error *e) {
    char path[PATH_MAX], aside[PATH_MAX];
    Manifest manifest;
    int failed = 0;
    step_path(archive, step, PARTIAL, path);
    manifest_read(&manifest, dir, path, &(Error){0}); // on failure the list is empty
    for (int i = 0; i < manifest.count + OWN_FILES && !failed; i++) {
        const char *name = i < manifest.count ? manifest.file[i].name : own_files[i - manifest.count];
        if (unlinkat(dir, name, 0) != 0 && errno != ENOENT && errno != EISDIR) failed = errno;
    }
    manifest_free(&manifest);
    if (unlinkat(dir, TRAINING, AT_REMOVEDIR) != 0 && errno != ENOENT && errno != ENOTEMPTY && errno != EEXIST)
        failed = errno;
    close(dir);
    if (!failed && unlinkat(archive->dir, path_name(path), AT_REMOVEDIR) != 0) failed = errno;
    if (!failed) return 0;
    if (failed != ENOTEMPTY && failed != EEXIST)
        return FAIL(e, ERR_WRITE, "check its permissions", "%s: cannot remove: %s", path, strerror(failed));
    TRY(rename_aside(archive, step, path, "kept", aside, e));
    fprintf(notes, "note: %s keeps files of the removed checkpoint that this program did not write\n", aside);
    return 0;
}

static int remove_partial(const Archive *archive, int64_t step, FILE *notes, Error *e) {
    int dir = step_open(archive, step, PARTIAL, O_NOFOLLOW);
    return dir < 0 ? 0 : archive_abandon(archive, step, dir, notes, e);
}

// ---- Writing and verifying ------------------------------------------------------------------------------------------

int archive_join(const Archive *archive, int64_t step, Manifest *manifest, Error *e) {
    step_path(archive, step, PARTIAL, manifest->path);
    strcpy(manifest->run, archive->id);
    manifest->dir = step_open(archive, step, PARTIAL, O_NOFOLLOW);
    if (manifest->dir >= 0) return 0;
    return FAIL(e, ERR_WRITE, "is --out the same directory on all machines?", "%s: cannot open: %s", manifest->path,
                strerror(errno));
}

int archive_begin(const Archive *archive, int64_t step, Manifest *manifest, FILE *notes, Error *e) {
    char path[PATH_MAX], training[80];
    step_path(archive, step, PARTIAL, path);
    snprintf(training, sizeof training, PARTIAL "/" TRAINING, step);
    TRY(remove_partial(archive, step, notes, e));
    if (mkdirat(archive->dir, path_name(path), 0777) == 0 && mkdirat(archive->dir, training, 0777) == 0)
        return archive_join(archive, step, manifest, e);
    const char *hint = errno == ENOENT ? "was --out removed? name another" : "free some space, or choose another --out";
    return FAIL(e, ERR_WRITE, hint, "%s: cannot create: %s", path, strerror(errno));
}

int archive_commit(const Archive *archive, int64_t step, Manifest *manifest, Error *e) {
    char path[PATH_MAX];
    step_path(archive, step, FINAL, path);
    TRY(manifest_write(manifest, e));
    if (path_rename(archive->dir, manifest->path, path, e) == 0) return close(manifest->dir), 0;
    if (!file_exists_in(archive->dir, manifest->path)) // the rename was made, but is not on the disk
        renameat(archive->dir, path_name(path), archive->dir, path_name(manifest->path));
    return e->code;
}

int archive_verify(const Archive *archive, int64_t step, Verify what, const Pulse *pulse, Manifest *manifest,
                   Error *e) {
    char path[PATH_MAX];
    *manifest = (Manifest){.count = 0};
    step_path(archive, step, FINAL, path);
    int dir = step_open(archive, step, FINAL, 0);
    if (dir < 0 && (errno == ENOENT || errno == ENOTDIR))
        return FAIL(e, ERR_INPUT, "use another checkpoint", "%s: not a directory", path);
    if (dir < 0) return FAIL_UNREADABLE(e, "make it readable", "%s: %s", path, strerror(errno));
    int code = manifest_read(manifest, dir, path, e);
    manifest->pulse = pulse;
    if (!code) code = manifest_verify(manifest, NULL, what, e);
    manifest_free(manifest);
    close(dir);
    return code;
}

// False if one side has no id: an older build's checkpoint, or a run that has not chosen its id.
static bool of_another_run(const Archive *archive, const Manifest *manifest) {
    return *archive->id && *manifest->run && strcmp(manifest->run, archive->id) != 0;
}

// ---- Removing -------------------------------------------------------------------------------------------------------

int archive_remove(const Archive *archive, int64_t step, bool rolled_back, uint64_t *bytes, FILE *notes, Error *e) {
    const char *format = rolled_back ? ROLLED_BACK : FINAL;
    char path[PATH_MAX], partial[PATH_MAX];
    struct stat st;
    Manifest manifest;
    const int dir = step_open(archive, step, format, O_NOFOLLOW);
    if (dir < 0) return 0;
    const bool own = !manifest_read(&manifest, dir, "", &(Error){0}) && *archive->id &&
                     strcmp(manifest.run, archive->id) == 0 && faccessat(dir, ".", W_OK, AT_EACCESS) == 0 &&
                     fstat(dir, &st) == 0 && st.st_mode & 0222; // root may write without permission
    for (int i = 0; i < manifest.count && own && bytes; i++) *bytes += manifest.file[i].bytes;
    manifest_free(&manifest);
    if (!own || !notes) return close(dir), 0;
    step_path(archive, step, format, path);
    step_path(archive, step, PARTIAL, partial);
    int code = remove_partial(archive, step, notes, e);
    if (!code) code = path_rename(archive->dir, path, partial, e);
    if (code) return close(dir), code;
    TRY(archive_abandon(archive, step, dir, notes, e));
    if (bytes) fprintf(notes, "note: removed %s to make room on the disk\n", path);
    return 0;
}

int archive_tidy(const Archive *archive, bool rolled_back, FILE *notes, Error *e) {
    int code = 0;
    for (int64_t step = INT64_MAX; next_step(archive, PARTIAL, -1, &step, &code, e);)
        TRY(remove_partial(archive, step, notes, e));
    for (int64_t step = INT64_MAX; rolled_back && !code && next_step(archive, ROLLED_BACK, -1, &step, &code, e);)
        TRY(archive_remove(archive, step, true, NULL, notes, e));
    return code;
}

// Returns the step of the best checkpoint, which state.json names. 0: none so far; -1: not readable.
static int64_t best_of(const Archive *archive, int64_t step) {
    cJSON *state = NULL;
    const int dir = step_open(archive, step, FINAL "/" TRAINING, 0);
    json_read(&state, dir, "state.json", 1 << 26, NULL, &(Error){0});
    const cJSON *best = json_get(state, "best_step");
    step = json_whole(best, 0, 9e15) ? (int64_t)best->valuedouble : -1;
    cJSON_Delete(state);
    if (dir >= 0) close(dir);
    return step;
}

// Removes the checkpoints before step `before` that are not in `spare`, newer ones first: no checkpoint outlives the
// best one that it names. bytes, notes: see archive_remove; for room also removes those between `back` and the newest.
static int thin(const Archive *archive, const Spare *spare, int64_t before, uint64_t *bytes, FILE *notes, Error *e) {
    int64_t complete = 0, behind = 0, best = 0; // behind: complete ones at or before step `back`
    int code = 0;
    for (int64_t step = before; next_step(archive, FINAL, -1, &step, &code, e);) {
        Manifest manifest;
        const bool enough = complete >= spare->keep && (behind || (bytes && step > spare->back));
        if (enough && (step == 0 || step != best)) TRY(archive_remove(archive, step, false, bytes, notes, e));
        if (enough || archive_verify(archive, step, VERIFY_SIZES, NULL, &manifest, &(Error){0})) continue;
        if (spare->best && (best = best_of(archive, step)) < 0) continue;
        if (!of_another_run(archive, &manifest)) complete++, behind += step <= spare->back;
    }
    return code;
}

int archive_thin(const Archive *archive, const Spare *spare, FILE *notes, Error *e) {
    return spare->keep ? thin(archive, spare, INT64_MAX, NULL, notes, e) : 0;
}

int archive_make_room(const Archive *archive, uint64_t bytes, Spare spare, int64_t newest, FILE *notes,
                      const Pulse *pulse, Error *e) {
    const char *hint = spare.keep ? "free some space" : "free some space, or remove older ones with --keep";
    uint64_t left, most;
    int count = 0;
    TRY(disk_free(archive->dir, archive->path, &left, e));
    if (left < bytes && spare.keep > 0) TRY(archive_tidy(archive, true, notes, e));
    TRY(disk_free(archive->dir, archive->path, &left, e));
    if (left >= bytes) return 0;
    if (spare.keep > 0) TRY(archive_count(archive, &count, e));
    most = left, spare.keep = 1;
    TRY(thin(archive, &spare, newest + 1, &most, NULL, e));
    for (spare.keep = most < bytes ? 0 : count; spare.keep > 0 && left < bytes; spare.keep--) {
        TRY(thin(archive, &spare, newest + 1, &left, notes, e));
        pulse_beat(pulse);
        TRY(disk_free(archive->dir, archive->path, &left, e));
    }
    if (left >= bytes) return 0;
    return FAIL(e, ERR_WRITE, hint, "%s: a checkpoint takes %.1f MiB, and the disk has %.1f MiB left", archive->path,
                (double)bytes / (1 << 20), (double)left / (1 << 20));
}

// ---- Finding --------------------------------------------------------------------------------------------------------

int archive_newest(const Archive *archive, int64_t latest, FILE *notes,
                   int (*verify)(void *context, const char *directory, Error *e), void *context, Newest *newest,
                   Error *e) {
    int skipped = 0, code = 0;
    int64_t step = latest < INT64_MAX ? latest + 1 : latest;
    *newest = (Newest){0};
    for (int by = -1; by <= 1 && !code; by += 2, step = latest)
        while (!newest->found && next_step(archive, FINAL, by, &step, &code, e)) {
            Manifest manifest;
            newest->step = step;
            step_path(archive, newest->step, FINAL, newest->directory);
            int bad = archive_verify(archive, newest->step, VERIFY_SIZES, NULL, &manifest, e);
            if (of_another_run(archive, &manifest)) continue;
            if (!bad) bad = verify(context, newest->directory, e);
            strcpy(newest->run, manifest.run);
            if (bad && e->unreadable)
                error_hint(e,
                           "the checkpoint may be undamaged, and nothing was changed: make it readable and start "
                           "again; or rename %s, to resume from an older one",
                           newest->directory);
            if (bad && (bad != ERR_INPUT || manifest.foreign || e->unreadable)) return bad;
            newest->found = bad == 0;
            if (bad) skipped++, fprintf(notes, "warning: %s. Skipped\n", e->what);
        }
    if (code || newest->found || !skipped) return code;
    return FAIL(e, ERR_INPUT, "restore a copy, use another run, or if this is --out, start over with --fresh",
                "%s: all of its %d checkpoints are damaged", archive->path, skipped);
}

int archive_set_aside_after(const Archive *archive, int64_t step, const char *why, FILE *notes, Error *e) {
    char path[PATH_MAX], aside[PATH_MAX];
    int code = 0;
    for (int64_t at = INT64_MAX; next_step(archive, FINAL, -1, &at, &code, e) && at > step;) {
        Manifest manifest;
        archive_verify(archive, at, VERIFY_SIZES, NULL, &manifest, &(Error){0});
        if (of_another_run(archive, &manifest)) continue;
        step_path(archive, at, FINAL, path);
        TRY(rename_aside(archive, at, path, why, aside, e));
        fprintf(notes, "%s is now %s\n", path, aside);
    }
    return code;
}
