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
// an existing file and creates a new one. ERR_WRITE if `path` is a link, a device or a FIFO, or has a second name.
int file_open_output(int dir, const char *path, int flags, int *fd, Error *e);

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
int file_replace(int dir, const char *path, const void *data, size_t bytes, Error *e);

// Writes all bytes to a descriptor; `path` is for the message.
int write_all(int fd, const void *data, size_t bytes, const char *path, Error *e);
int descriptor_sync(int fd, const char *path, Error *e);

// ---- Reading --------------------------------------------------------------------------------------------------------

// These set e->unreadable if a file exists but cannot be read: it may be undamaged.

// Opens a regular file for reading and returns its size. ERR_INPUT for any other kind, at once even for a FIFO.
int file_open_input_in(int dir, const char *path, int *fd, uint64_t *bytes, Error *e);
static inline int file_open_input(const char *path, int *fd, uint64_t *bytes, Error *e) {
    return file_open_input_in(IN_PATH, path, fd, bytes, e);
}

// Reads all of bytes [offset, offset + bytes); `path` is for the message. Several threads may read from one descriptor.
int file_read_range(int fd, const char *path, uint64_t offset, void *out, size_t bytes, Error *e);

// Reads a whole file of at most max_bytes and adds a NUL; *out from memory_alloc.
int file_read_in(int dir, const char *path, size_t max_bytes, char **out, size_t *out_bytes, Error *e);
static inline int file_read(const char *path, size_t max_bytes, char **out, size_t *out_bytes, Error *e) {
    return file_read_in(IN_PATH, path, max_bytes, out, out_bytes, e);
}

typedef enum {
    DIGEST_ALL,
    DIGEST_DISK,  // as the disk holds it: past the page cache, where the file system allows it
    DIGEST_SAMPLE // above 64 MiB: the size, and 64 blocks of 64 KiB at even distances, first and last included
} DigestHow;

// Reads a file and hashes it. ERR_INPUT if it cannot be read. The pulse (NULL is fine) beats every 4 MiB.
int file_digest_in(int dir, const char *path, DigestHow how, const Pulse *pulse, FileDigest *digest, Error *e);
static inline int file_digest(const char *path, DigestHow how, const Pulse *pulse, FileDigest *digest, Error *e) {
    return file_digest_in(IN_PATH, path, how, pulse, digest, e);
}

// ---- Paths and directories ------------------------------------------------------------------------------------------

bool file_exists_in(int dir, const char *path);  // of any kind, a broken link included
bool file_missing_in(int dir, const char *path); // nothing has this name; false if the lookup fails otherwise
static inline bool file_exists(const char *path) { return file_exists_in(IN_PATH, path); }
static inline bool file_missing(const char *path) { return file_missing_in(IN_PATH, path); }
bool path_leads_to(int dir, const char *path, int fd); // false: to another file or directory than the open one, or none
bool directory_exists(const char *path);
bool directory_holds(const char *directory, const char *name); // file_exists(DIRECTORY/NAME)

// "DIRECTORY/NAME". ERR_USAGE if it does not fit.
int path_join(char *out, size_t out_bytes, const char *directory, const char *name, Error *e);

// The part of a path after its last slash.
const char *path_name(const char *path);

bool path_ends(const char *path, const char *ending); // false for the ending alone

// The directory that holds a path; "." if the path names none.
void path_parent(const char *path, char *out, size_t bytes);
void parent_sync(const char *path); // syncs that directory; failures are ignored

// Creates a directory and its parents; an existing one is fine.
int directory_create(const char *path, Error *e);

// Renames in the open directory `dir`, and syncs it. ERR_WRITE if the new name is taken.
int path_rename(int dir, const char *from, const char *to, Error *e);

// The names in a directory, ascending, without . and ..; names_free them.
typedef struct {
    char **name;
    int count;
} Names;
int directory_list_in(int dir, const char *path, Names *out, Error *e); // dir: of this directory itself, or IN_PATH
static inline int directory_list(const char *path, Names *out, Error *e) {
    return directory_list_in(IN_PATH, path, out, e);
}
void names_free(Names *names);

// Free bytes of the file system of a directory: of its descriptor `dir`, or of its path.
int disk_free(int dir, const char *path, uint64_t *bytes, Error *e);
