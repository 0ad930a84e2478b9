// archive: the checkpoints step_NNNNNNNN of a run directory (--out). archive.c lists the promises. `notes` gets a line
// for everything kept, renamed or skipped. The pulse (or NULL) beats per 4 MiB read and per checkpoint removed.
#pragma once

#include "base/manifest.h"

enum { ARCHIVE_PATH = 4096 }; // bytes of a path, with its NUL

// A run directory, held open.
typedef struct {
    char path[ARCHIVE_PATH - 100]; // name of the directory, for messages; "": not open
    int dir;                       // its descriptor
    char id[HASH_TEXT];            // id of the run that writes here; "": nothing is removed
} Archive;

int archive_open(Archive *archive, const char *run_dir, Error *e);
void archive_close(Archive *archive); // no-op if it is not open
static inline bool archive_is_open(const Archive *archive) { return *archive->path; }

// ERR_WRITE, with both paths, if the directory's name no longer leads to the held directory.
int archive_check_name(const Archive *archive, Error *e);

// "RUN_DIR/step_00000120"; cuts a path that does not fit
void archive_step_path(const char *run_dir, int64_t step, char path[ARCHIVE_PATH]);

int64_t archive_step_of(const char *name); // "step_00000120": 120; -1 for other names

// The checkpoints that are not removed, by step.
typedef struct {
    int64_t keep; // number of newest complete checkpoints to keep; 0: all
    int64_t back; // a rollback goes to the newest checkpoint at or before this step; INT64_MAX: no rollback
    int64_t best; // --keep-best; 0: none
} Spare;

// Makes room on the disk for a checkpoint of `bytes` bytes, or returns ERR_WRITE. With keep > 0, removes checkpoints
// that a rollback renamed, then the oldest before step `newest`. Removes none if even without all of them the room is
// too small.
int archive_make_room(const Archive *archive, uint64_t bytes, Spare spare, int64_t newest, FILE *notes,
                      const Pulse *pulse, Error *e);

// Creates an empty directory for a step's checkpoint, with its temporary name, and opens it (archive_join).
int archive_begin(const Archive *archive, int64_t step, Manifest *manifest, FILE *notes, Error *e);

// Opens archive_begin's directory for new files (manifest_open): sets the manifest's path, dir and run. Close its dir.
int archive_join(const Archive *archive, int64_t step, Manifest *manifest, Error *e);

// Removes archive_begin's directory, open as `dir`, and closes `dir`. Files of other programs stay, under another name.
int archive_abandon(const Archive *archive, int64_t step, int dir, FILE *notes, Error *e);

// Makes the checkpoint visible. All files of the manifest must be on the disk. Closes manifest->dir after success.
int archive_commit(const Archive *archive, int64_t step, Manifest *manifest, Error *e);

bool archive_has(const Archive *archive, int64_t step); // true also for a damaged or unreadable checkpoint

// Reads a checkpoint's manifest (*manifest keeps no list of files) and verifies its files. ERR_INPUT names the first
// damaged file.
int archive_verify(const Archive *archive, int64_t step, Verify what, const Pulse *pulse, Manifest *manifest, Error *e);

// Removes step_N or step_N.rolled_back; no-op unless the checkpoint is this run's.
int archive_remove(const Archive *archive, int64_t step, bool rolled_back, FILE *notes, Error *e);

// Removes this run's checkpoints, except those that `spare` names: the newest `keep` complete ones (of the right
// sizes), the best, and those that a rollback may need: the newest of step `back` or before, and all later ones.
int archive_thin(const Archive *archive, const Spare *spare, FILE *notes, Error *e);

// A run's newest checkpoint that reads back as it was written.
typedef struct {
    bool found;
    int64_t step;
    char directory[ARCHIVE_PATH];
    char run[HASH_TEXT]; // id of the checkpoint's run; "": an older build's
} Newest;

// Finds the newest checkpoint of step `latest` or earlier; if there is none, the oldest later one. Skips damaged
// checkpoints (`verify` returns ERR_INPUT) and, if the archive has an id, another run's. ERR_INPUT if all are damaged,
// or if one that is tried cannot be read or has another build's format.
int archive_newest(const Archive *archive, int64_t latest, FILE *notes,
                   int (*verify)(void *context, const char *directory, Error *e), void *context, Newest *newest,
                   Error *e);

// Renames checkpoints later than `step`, except another run's, to "step_00000120.WHY". why: "damaged", "rolled_back".
int archive_set_aside_after(const Archive *archive, int64_t step, const char *why, FILE *notes, Error *e);

// Counts the checkpoints, damaged or not.
int archive_count(const Archive *archive, int *count, Error *e);

// Removes the partials of a killed run; rolled_back: also this run's checkpoints that a rollback renamed.
int archive_tidy(const Archive *archive, bool rolled_back, FILE *notes, Error *e);
