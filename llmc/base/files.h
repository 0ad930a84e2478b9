// files: paths, directories, whole files, and durable writing. files.c states what these functions promise together.
#pragma once

#include "base/common.h"

enum { HASH_TEXT = 33 }; // bytes of an XXH3-128 in hexadecimal, with its NUL

// A file's size and hash.
typedef struct {
    uint64_t bytes;
    char hash[HASH_TEXT]; // XXH3-128, its canonical form
} FileDigest;

FileDigest digest_of(const void *data, size_t bytes);
bool digest_equal(const FileDigest *a, const FileDigest *b);

// The same for bytes in several pieces.
typedef struct Digester Digester;
int digester_create(Digester **out, Error *e);
void digester_add(Digester *digester, const void *data, size_t bytes);
FileDigest digester_read(const Digester *digester); // of all bytes added so far; more may follow
void digester_destroy(Digester *digester);          // NULL is fine

// ---------------------------------------------------------------------------------------------------------------------
// Writing, from first byte to last, 4 MiB at a time, past the page cache where the file system allows it.

typedef struct OutFile OutFile;

// `dir` of the functions below: IN_PATH, or the descriptor of an open directory. With a descriptor the file is the last
// part of `path` in that directory, even if the directory was moved or replaced; `path` is for messages.
enum { IN_PATH = -1 };

// Opens a file for writing, with open's flags (O_WRONLY | O_APPEND, ...). Every output is opened here. O_TRUNC unlinks
// an existing file and creates a new one. ERR_WRITE also if `path` is a link, a device or a FIFO.
int file_open_output(int dir, const char *path, int flags, int *fd, Error *e);

// Before a file is changed in place: makes sure that `path` is the only name of the open file. If the file has further
// names (hard links), or `path` no longer exists, a copy gets the name and becomes *fd, which can be read, too.
int file_own(const char *path, int *fd, Error *e);

// ERR_WRITE if the path exists and is not a regular file.
int file_check_output(const char *path, Error *e);

// Creates the file (file_open_output with O_TRUNC).
int outfile_create(OutFile **out, int dir, const char *path, Error *e);
int outfile_write(OutFile *file, const void *data, size_t bytes, Error *e); // after a failure, abandon the file

// Writes the rest, syncs, closes and frees the file; removes it on failure. digest may be NULL.
int outfile_finish(OutFile *file, FileDigest *digest, Error *e);

// Closes, removes and frees the unfinished file. NULL is fine.
void outfile_abandon(OutFile *file);

// Writes a whole file. digest may be NULL.
int file_save_in(int dir, const char *path, const void *data, size_t bytes, FileDigest *digest, Error *e);
static inline int file_save(const char *path, const void *data, size_t bytes, Error *e) {
    return file_save_in(IN_PATH, path, data, bytes, NULL, e);
}

// The same under a temporary name, which is renamed to `path` when the file is on the disk.
int file_replace(const char *path, const void *data, size_t bytes, Error *e);

// Truncates a file to this many bytes; a missing one is fine.
int file_truncate(const char *path, int64_t bytes, Error *e);

// Writes all bytes to a descriptor; `path` is for the message.
int write_all(int fd, const void *data, size_t bytes, const char *path, Error *e);
int descriptor_sync(int fd, const char *path, Error *e);

// ---- Reading --------------------------------------------------------------------------------------------------------

// These set e->unreadable if a file exists but cannot be read: it may be undamaged.

// Opens a regular file for reading and returns its size. ERR_INPUT for any other kind, at once even for a FIFO.
int file_open_input(const char *path, int *fd, uint64_t *bytes, Error *e);
int file_check_input(const char *path, Error *e); // the error of file_open_input

// Reads all of bytes [offset, offset + bytes); `path` is for the message. Several threads may read from one descriptor.
int file_read_range(int fd, const char *path, uint64_t offset, void *out, size_t bytes, Error *e);

// Reads a whole file of at most max_bytes and adds a NUL; *out from memory_alloc.
int file_read(const char *path, size_t max_bytes, char **out, size_t *out_bytes, Error *e);

typedef enum {
    DIGEST_ALL,
    DIGEST_DISK,  // as the disk holds it: past the page cache, where the file system allows it
    DIGEST_SAMPLE // above 64 MiB: the size, and 64 blocks of 64 KiB at even distances, first and last included
} DigestHow;

// Reads a file and hashes it. ERR_INPUT if it cannot be read. The pulse (NULL is fine) beats every 4 MiB.
int file_digest(const char *path, DigestHow how, const Pulse *pulse, FileDigest *digest, Error *e);

// ---- Paths and directories ------------------------------------------------------------------------------------------

bool file_exists(const char *path);  // of any kind, a broken link included
bool file_missing(const char *path); // nothing has this name; false if the lookup fails otherwise
bool directory_exists(const char *path);
bool directory_holds(const char *directory, const char *name); // file_exists(DIRECTORY/NAME)
int directory_sync(const char *path, Error *e);
int directory_open(const char *path, int *fd, Error *e); // to create files in; a link is ERR_WRITE
int directory_is(const char *path, int fd, Error *e);    // ERR_WRITE if the path no longer names this directory

// "DIRECTORY/NAME". ERR_USAGE if it does not fit.
int path_join(char *out, size_t out_bytes, const char *directory, const char *name, Error *e);

// The part of a path after its last slash.
const char *path_name(const char *path);

bool path_ends(const char *path, const char *ending); // false for the ending alone

// The directory that holds a path; "." if the path names none.
void path_parent(const char *path, char *out, size_t bytes);
void parent_sync(const char *path); // directory_sync of that directory; failures are ignored

// Creates a directory and its parents; an existing one is fine.
int directory_create(const char *path, Error *e);

// Renames, and syncs the parent, which both names share. ERR_WRITE if the new name is taken.
int path_rename(const char *from, const char *to, const char *parent, Error *e);

// The names in a directory, ascending, without . and ..; names_free them.
typedef struct {
    char **name;
    int count;
} Names;
int directory_list(const char *path, Names *out, Error *e);
void names_free(Names *names);

// Removes these files of a directory, in this order, and then the directory if it is empty. A missing directory is
// fine. If the path is a link, the link is unlinked, never followed; if it is a file, the file stays.
int directory_remove(const char *path, const char *const *names, int count, Error *e);

// Free bytes of the directory's file system.
int disk_free(const char *directory, uint64_t *bytes, Error *e);
