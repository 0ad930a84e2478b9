// manifest: MANIFEST.json lists a directory's files, with the XXH3-128 of every piece of up to 4 MiB:
//
//     {
//       "format": 2,
//       "run": "...",                  the run's id
//       "files": [
//         {"name": "config.json", "bytes": 598, "pieces": [
//           [598, "..."]]},            bytes and hash of each piece, from the file's first byte to its last
//         {"name": "training/state.json", ...
//       ],
//       "xxh3_128_above": "..."        hash of all bytes above this line
//     }
//
// Format 1, of older builds, has "xxh3_128" of the whole file in place of "pieces", and may have no "run". manifest.c
// states what a manifest promises.
#pragma once

#include "base/files.h"

#include <limits.h>

#define MANIFEST_NAME "MANIFEST.json"
#define TRAINING      "training/" // folder of files that only a resume needs

enum {
    MANIFEST_FILES = 64, // most files of a manifest
    MANIFEST_NAME_BYTES = 64,
    MANIFEST_PIECE = 4 << 20 // most bytes of a piece
};

typedef struct {
    char name[MANIFEST_NAME_BYTES]; // "NAME" or "training/NAME"
    uint64_t bytes;
    FileDigest *piece; // (pieces) the pieces' digests, in the file's order
    int pieces;
} ManifestFile;

// A process's share of the pieces to verify. A file is divided into blocks of 4 MiB. The share holds the pieces that
// begin in blocks `first`, `first` + `every`, `first` + 2 `every`, ... With `every` 0 it holds all pieces.
typedef struct {
    int first, every;
} Share;

typedef struct {
    char path[PATH_MAX]; // the directory's name, for messages
    int dir;             // the directory's descriptor; IN_PATH: open the directory by `path`
    char run[HASH_TEXT]; // id of the run; "": none
    ManifestFile file[MANIFEST_FILES];
    int count;
    bool foreign;       // undamaged, but in a format that this build does not know (manifest_read)
    const Pulse *pulse; // beats after each file written or verified, and after each piece read; may be NULL
    Share share;        // the pieces that manifest_verify reads
} Manifest;

void manifest_free(Manifest *manifest); // frees the list of files; keeps the other fields. A zeroed one is fine

// Opens a file of the directory for writing. create: the file is new, and gets `bytes` bytes of zeros.
int manifest_open(const Manifest *manifest, const char *name, bool create, uint64_t bytes, int *fd, Error *e);

// Adds a file that is on the disk, with the digests that its writer computed for its pieces.
int manifest_add(Manifest *manifest, const char *name, const FileDigest *piece, int pieces, Error *e);

// Writes a file and adds it.
int manifest_save(Manifest *manifest, const char *name, const void *data, size_t bytes, Error *e);

// Writes MANIFEST.json, and syncs this file and the directories.
int manifest_write(const Manifest *manifest, Error *e);

// Reads MANIFEST.json of the open directory `dir`; with IN_PATH, of the path `directory`. ERR_INPUT if the manifest is
// damaged or has another format; only another format sets `foreign`. Call manifest_free even after an error.
int manifest_read(Manifest *manifest, int dir, const char *directory, Error *e);

typedef enum {
    VERIFY_SIZES,
    VERIFY_BYTES, // all bytes, on all threads, through the page cache, since the caller loads them next
    VERIFY_DISK,  // all bytes, on this thread; reads files of 4 MiB or more past the page cache
} Verify;

// Compares the files with the manifest, except a file of the name `but` (NULL: none). ERR_INPUT names the first file
// that is missing or differs.
int manifest_verify(const Manifest *manifest, const char *but, Verify what, Error *e);
