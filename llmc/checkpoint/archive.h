// archive: the checkpoints of a run directory (run_dir, --out), step_NNNNNNNN. Each is complete or does not exist
// (archive.c).
//
// `notes` gets a line for everything kept, renamed or skipped. `protect` is the step of a checkpoint that is never
// removed; -1: none. The pulse, which may be NULL, beats for every 4 MiB read and every checkpoint removed.
#pragma once

#include "base/manifest.h"

enum { ARCHIVE_PATH = 4096 }; // bytes of a path, with its NUL

// "step_00000120"
void archive_name(char *out, size_t bytes, int64_t step);

// The step of such a name; -1 for any other.
int64_t archive_step_of(const char *name);

// Checkpoints that were removed, from the oldest step to the newest.
typedef struct {
    int count; // 0: first and last are not set
    int64_t first, last;
} Removed;

// Makes sure that the disk has space for a checkpoint of this many bytes. With keep > 0 it removes older checkpoints,
// oldest first, as many as needed, or none if even all of them are not enough. ERR_WRITE if the space is missing.
int archive_make_room(const char *run_dir, uint64_t bytes, int64_t keep, int64_t protect, Removed *removed, FILE *notes,
                      const Pulse *pulse, Error *e);

// Creates an empty directory for the checkpoint of a step, under its temporary name, and opens it (manifest_hold).
int archive_begin(const char *run_dir, int64_t step, char directory[ARCHIVE_PATH], Manifest *manifest, FILE *notes,
                  Error *e);

// Removes that directory if the checkpoint could not be written.
void archive_abandon(const char *run_dir, int64_t step, Manifest *manifest, FILE *notes);

// Makes the checkpoint visible. All files of the manifest must be on the disk.
int archive_commit(const char *run_dir, int64_t step, Manifest *manifest, char final[ARCHIVE_PATH], Error *e);

// True if this step has a checkpoint, damaged and unreadable ones included.
bool archive_has(const char *run_dir, int64_t step);

// Reads every byte of a checkpoint from the disk. ERR_INPUT names the first file that is damaged.
int archive_verify(const char *directory, const Pulse *pulse, Error *e);

// Removes the checkpoints older than the newest `keep` complete ones (0: none). A complete one has a manifest, and all
// its files have the right sizes.
int archive_thin(const char *run_dir, int64_t keep, int64_t protect, FILE *notes, Error *e);

// Finds the newest undamaged checkpoint; skips damaged ones. *found is false where there is no checkpoint. ERR_INPUT
// where all are damaged, or where a newer one cannot be read or is of another format: another build wrote it.
int archive_newest(const char *run_dir, FILE *notes, const Pulse *pulse, bool *found, int64_t *step,
                   char directory[ARCHIVE_PATH], Error *e);

// Renames the checkpoints of later steps to "step_00000120.damaged": the run will write those steps again.
int archive_set_aside_after(const char *run_dir, int64_t step, FILE *notes, Error *e);

// How many checkpoints there are, damaged or not.
int archive_count(const char *run_dir, int *count, Error *e);

// Removes the partials that a killed run left.
int archive_tidy(const char *run_dir, FILE *notes, Error *e);
