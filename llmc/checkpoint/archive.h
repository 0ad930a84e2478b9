// archive: the checkpoints step_NNNNNNNN of a run directory (--out). archive.c lists the promises. A function writes a
// line to `notes` for whatever it keeps, renames or skips. A pulse (or NULL) beats per 4 MiB read and per checkpoint
// removed.
#pragma once

#include "base/manifest.h"

// A run directory, held open.
typedef struct {
    char path[PATH_MAX - 100]; // name of the directory, for messages; "": not open
    int dir;                   // descriptor of the directory
    char id[HASH_TEXT];        // id of the run that writes here; "": no checkpoint is removed
} Archive;

int archive_open(Archive *archive, const char *run_dir, Error *e);
void archive_close(Archive *archive); // no-op unless open
static inline bool archive_is_open(const Archive *archive) { return *archive->path; }

// Returns ERR_WRITE if archive->path no longer leads to the held directory. The message names both directories.
int archive_check_name(const Archive *archive, Error *e);

// Writes "RUN_DIR/step_00000120", truncated to the size of `path`.
void archive_step_path(const char *run_dir, int64_t step, char path[PATH_MAX]);

int64_t archive_step_of(const char *name); // returns 120 for "step_00000120", and -1 for other names

// Says which checkpoints must not be removed.
typedef struct {
    int64_t keep; // number of newest complete checkpoints to keep; 0: all
    int64_t back; // a rollback goes to the newest checkpoint at or before this step; INT64_MAX: no rollback
    bool best;    // --keep-best: with a checkpoint, keep the best one that it names (state.json)
} Spare;

// Makes room on the disk for a checkpoint of `bytes` bytes, or returns ERR_WRITE. With keep > 0, first removes
// checkpoints that a rollback renamed, then more before step `newest`, as archive_thin does with a smaller `keep`, but
// also those after the one for a rollback. Removes none of the latter two if all of them would not make enough room.
int archive_make_room(const Archive *archive, uint64_t bytes, Spare spare, int64_t newest, FILE *notes,
                      const Pulse *pulse, Error *e);

// Creates the directory of a step's partial, and opens it (archive_join).
int archive_begin(const Archive *archive, int64_t step, Manifest *manifest, FILE *notes, Error *e);

// Opens the directory that archive_begin created: sets the manifest's path, dir and run. The caller closes dir.
int archive_join(const Archive *archive, int64_t step, Manifest *manifest, Error *e);

// Removes the partial's directory, open as `dir`, and closes `dir`. Files of other programs stay, under another name.
int archive_abandon(const Archive *archive, int64_t step, int dir, FILE *notes, Error *e);

// Renames the partial to step_N. The manifest's files must be on the disk already. On success closes manifest->dir.
int archive_commit(const Archive *archive, int64_t step, Manifest *manifest, Error *e);

// Reads a manifest, verifies its files, and frees their list. ERR_INPUT names the first damaged file.
int archive_verify(const Archive *archive, int64_t step, Verify what, const Pulse *pulse, Manifest *manifest, Error *e);

// Removes step_N, or step_N.rolled_back if `rolled_back`. No-op unless it is this run's, writable and no link. bytes,
// unless NULL: adds the checkpoint's bytes, and notes that it made room. notes NULL: removes nothing.
int archive_remove(const Archive *archive, int64_t step, bool rolled_back, uint64_t *bytes, FILE *notes, Error *e);

// Keeps the newest `keep` checkpoints whose files have the right sizes, the newest at or before step `back` with all
// later ones, and the best ones of these. Removes this run's other checkpoints.
int archive_thin(const Archive *archive, const Spare *spare, FILE *notes, Error *e);

// The checkpoint that archive_newest found.
typedef struct {
    bool found;
    int64_t step;
    char directory[PATH_MAX];
    char run[HASH_TEXT]; // id of the run that wrote it; "": an older build wrote it
} Newest;

// Finds the newest checkpoint at or before step `latest`; if there is none, the oldest later one. Skips damaged
// checkpoints (`verify` returns ERR_INPUT for them). If the archive has an id, also skips other runs' checkpoints.
// ERR_INPUT if all are damaged, or if one that is tried cannot be read or has another build's format.
int archive_newest(const Archive *archive, int64_t latest, FILE *notes,
                   int (*verify)(void *context, const char *directory, Error *e), void *context, Newest *newest,
                   Error *e);

// Renames checkpoints later than `step`, except other runs', to "step_N.WHY". why: "damaged" or "rolled_back".
int archive_set_aside_after(const Archive *archive, int64_t step, const char *why, FILE *notes, Error *e);

// Counts the checkpoints, damaged or not.
int archive_count(const Archive *archive, int *count, Error *e);

// Removes all partials. rolled_back: also removes this run's checkpoints that a rollback renamed.
int archive_tidy(const Archive *archive, bool rolled_back, FILE *notes, Error *e);
