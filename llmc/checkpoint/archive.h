// archive: the checkpoints of a run directory, OUT/step_NNNNNNNN. Each is there as a whole or not at all: it comes to
// be under another name, is synced, gets its manifest and then, in one rename, its name. Whatever happens in between,
// the ones before it are as they were.
//
// A checkpoint is removed by its files' names alone, and one that is a link by unlinking that. Files that nobody here
// wrote stay, in step_NNNNNNNN.kept, with a line to `notes`; that is no checkpoint, so each is named once.
#ifndef GNS_ARCHIVE_H
#define GNS_ARCHIVE_H

#include "base/manifest.h"

enum { ARCHIVE_PATH = 4096 }; // bytes of a path, with its NUL

// "step_00000120"
void archive_name(char *out, size_t bytes, int64_t step);

// The step of such a name; -1 for any other.
int64_t archive_step_of(const char *name);

// The checkpoints that went: of how many steps, from one to another.
typedef struct {
    int count; // 0: the rest says nothing
    int64_t first, last;
} Removed;

// Has the disk room for a checkpoint of so many bytes? Where it has not, older ones make room, from the oldest on, as
// many as it takes, unless `keep` says that all stay (0), or it would not be enough. The newest that is as it was written
// is read back first, and stays, as does that of step `stays`. *removed says which went. The pulse beats for each of
// them, and for what is read.
int archive_make_room(const char *out, uint64_t bytes, int64_t keep, int64_t stays, Removed *removed, FILE *notes,
                      const Pulse *pulse, Error *e);

// Prepares an empty directory for the checkpoint of a step, under its temporary name.
int archive_begin(const char *out, int64_t step, char directory[ARCHIVE_PATH], FILE *notes, Error *e);

// Removes it again where it could not be completed.
void archive_abandon(const char *out, int64_t step, FILE *notes);

// Completes it, when all files of the manifest are on the disk: manifest, syncs, rename, sync of the parent.
int archive_commit(const char *out, int64_t step, const Manifest *manifest, char final[ARCHIVE_PATH], Error *e);

// Is there a checkpoint of this step, whole or damaged?
bool archive_has(const char *out, int64_t step);

// Reads a checkpoint back, every byte of it, from the disk.
int archive_verify(const char *directory, const Pulse *pulse, Error *e);

// Removes the checkpoints older than the newest `keep` complete ones (0: none is removed), but that of step `stays`. A
// complete one has its manifest, and all files of it with the right sizes; what is not complete does not count.
int archive_thin(const char *out, int64_t keep, int64_t stays, FILE *notes, Error *e);

// The newest checkpoint that is as it was written. *found is false where there is none at all. Damaged ones are passed
// over with a line each to `notes`; where there are only damaged ones that is an error (65). So is a newer one of
// another format: what another build has done since is neither damaged nor for this one to throw away.
int archive_newest(const char *out, FILE *notes, const Pulse *pulse, bool *found, int64_t *step,
                   char directory[ARCHIVE_PATH], Error *e);

// Renames the checkpoints of later steps, which would be in the way: "step_00000120.damaged".
int archive_set_aside_after(const char *out, int64_t step, FILE *notes, Error *e);

// How many there are, whole or damaged.
int archive_count(const char *out, int *count, Error *e);

// Removes what was left unfinished by a run that was killed.
int archive_tidy(const char *out, FILE *notes, Error *e);
#endif
