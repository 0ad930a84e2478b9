// manifest: MANIFEST.json, the list of a directory's files with their sizes and XXH3-128 hashes, and a hash of itself:
//
//     {
//       "format": 1,
//       "files": [
//         {"name": "config.json", "bytes": 598, "xxh3_128": "..."},
//         ...
//       ],
//       "xxh3_128_above": "..."        of all bytes above this line
//     }
//
// It is written last: a directory with a good manifest is complete, and every bit of it is as it was written.
#ifndef GNS_MANIFEST_H
#define GNS_MANIFEST_H

#include "base/files.h"

#define MANIFEST_NAME "MANIFEST.json"

enum { MANIFEST_FILES = 64, MANIFEST_FILE_NAME = 64 }; // at most

typedef struct {
    struct {
        char name[MANIFEST_FILE_NAME];
        FileDigest digest;
    } file[MANIFEST_FILES];
    int count;
    bool foreign;       // as it was written, in a format that is not ours (manifest_read)
    const Pulse *pulse; // beats for each file that is written or verified, and every 4 MiB that are read; may be NULL
} Manifest;

// Adds a file that is on the disk, with a digest that its writer gave.
void manifest_add(Manifest *manifest, const char *name, FileDigest digest);

// Writes it, and syncs file and directory.
int manifest_write(const Manifest *manifest, const char *directory, Error *e);

// Reads DIRECTORY/MANIFEST.json, and its own hash must be right. ERR_INPUT where it is not, or the format is not ours:
// then `foreign` is set.
int manifest_read(Manifest *manifest, const char *directory, Error *e);

typedef enum {
    VERIFY_SIZES,
    VERIFY_BYTES, // all of them: to be used next, so the page cache may keep them
    VERIFY_DISK,  // all of them, as they are on the disk (file_digest_disk)
} Verify;

// Are all of the manifest's files there, and as they were written? ERR_INPUT names the first one that is not.
int manifest_verify(const Manifest *manifest, const char *directory, Verify what, Error *e);

// One file alone, as it is on the disk. ERR_INPUT also where the manifest does not list it.
int manifest_verify_file(const Manifest *manifest, const char *directory, const char *name, Error *e);
#endif
