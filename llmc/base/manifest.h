// manifest: MANIFEST.json, the list of a directory's files with their sizes and XXH3-128 hashes, and a hash of itself:
//
//     {
//       "format": 1,
//       "run": "...",                  the run's id; missing in manifests of older builds
//       "files": [
//         {"name": "config.json", "bytes": 598, "xxh3_128": "..."},
//         ...
//       ],
//       "xxh3_128_above": "..."        of all bytes above this line
//     }
//
// manifest.c states what a manifest promises.
#pragma once

#include "base/files.h"

#define MANIFEST_NAME "MANIFEST.json"

enum { MANIFEST_FILES = 64, MANIFEST_FILE_NAME = 64 }; // at most

typedef struct {
    char run[HASH_TEXT]; // "": none
    struct {
        char name[MANIFEST_FILE_NAME];
        FileDigest digest;
    } file[MANIFEST_FILES];
    int count;
    int dir;            // its directory: an open descriptor, or IN_PATH (files.h)
    bool foreign;       // undamaged, but of another format (manifest_read)
    const Pulse *pulse; // beats per file written or verified, and per 4 MiB read; may be NULL
} Manifest;

static inline int manifest_dir(const Manifest *manifest) { return manifest ? manifest->dir : IN_PATH; }

// Adds a file that is on the disk, with the digest that its writer gave. manifest may be NULL.
void manifest_add(Manifest *manifest, const char *name, FileDigest digest);

// Writes DIRECTORY/NAME (file_save) and adds it.
int manifest_save(Manifest *manifest, const char *directory, const char *name, const void *data, size_t bytes,
                  Error *e);

// Writes DIRECTORY/MANIFEST.json, and syncs file and directory.
int manifest_write(const Manifest *manifest, const char *directory, Error *e);

// Reads DIRECTORY/MANIFEST.json, from the open directory `dir` or IN_PATH. ERR_INPUT where it is damaged, or of another
// format: then `foreign` is set.
int manifest_read(Manifest *manifest, int dir, const char *directory, Error *e);

typedef enum {
    VERIFY_SIZES,
    VERIFY_BYTES, // all bytes, through the page cache: they are used next
    VERIFY_DISK,  // all bytes, as the disk holds them
} Verify;

// Compares all files with the manifest. ERR_INPUT names the first one that is missing or differs.
int manifest_verify(const Manifest *manifest, const char *directory, Verify what, Error *e);

// The same for one file, with VERIFY_DISK. ERR_INPUT also where the manifest does not list it.
int manifest_verify_file(const Manifest *manifest, const char *directory, const char *name, Error *e);
