// files: paths, directories, whole files, and durable writing. The head of files.c states the common promises.
#pragma once

#include "base/common.h"

#include <dirent.h>
#include <fcntl.h>

enum { HASH_TEXT = 33 }; // bytes of an XXH3-128 in hexadecimal, with its NUL

// A file's size and hash.
typedef struct {
    uint64_t bytes;
    char hash[HASH_TEXT]; // XXH3-128, its canonical form
} FileDigest;

FileDigest digest_of(const void *data, size_t bytes);
bool digest_equal(const FileDigest *a, const FileDigest *b);

// ---- Writing --------------------------------------------------------------------------------------------------------

// The argument `dir` is IN_PATH or an open directory's descriptor. With a descriptor, calls look up only the last part
// of `path`, in that directory, even if the directory was moved. Messages show the whole `path`.
enum { IN_PATH = AT_FDCWD };

// Opens a file for writing, with open's flags (O_WRONLY | O_APPEND, ...). For a checkpoint's files see manifest_open.
// With O_TRUNC, unlinks any file of this name and creates a new one. Without O_TRUNC, returns ERR_WRITE if `path` is a
// link, a device or a FIFO, or has a second name.
int file_open_output(int dir, const char *path, int flags, int *fd, Error *e);

// Writes all bytes at an offset. From 64 KiB of data on, whole blocks of 4 KiB bypass the page cache if the file system
// allows it and `data` equals `offset` modulo 4 KiB. Several processes may write different ranges of one file.
int file_write_range(int fd, const char *path, uint64_t offset, const void *data, size_t bytes, Error *e);

int file_close(int fd, const char *path, Error *e); // syncs, then closes; closes even if the sync fails

// Writes a whole file under a temporary name, syncs it, and renames it to `path`.
int file_replace(int dir, const char *path, const void *data, size_t bytes, Error *e);

int descriptor_sync(int fd, const char *path, Error *e);

// ERR_WRITE if `path` exists and is no empty file. For an output that only its writer may have created.
int file_check_free(int dir, const char *path, Error *e);

// ---- Reading --------------------------------------------------------------------------------------------------------

// These functions set e->unreadable if a file exists but cannot be read: it may be undamaged.

// Opens a regular file for reading and returns its size. ERR_INPUT for any other kind. Never waits for a FIFO.
int file_open_input(int dir, const char *path, int *fd, uint64_t *bytes, Error *e);

// Reads all bytes [offset, offset + bytes); `path` is for the message. Several threads may read from one descriptor.
int file_read_range(int fd, const char *path, uint64_t offset, void *out, size_t bytes, Error *e);

// Reads a whole file of at most max_bytes and adds a NUL; *out is from memory_alloc.
int file_read(int dir, const char *path, size_t max_bytes, char **out, size_t *out_bytes, Error *e);

// Hashes bytes [offset, offset + bytes) of an open file. The pulse (NULL is fine) beats every 4 MiB.
int file_digest_range(int fd, const char *path, uint64_t offset, uint64_t bytes, const Pulse *pulse, FileDigest *digest,
                      Error *e);

// Sets or clears O_DIRECT, with which reads and writes bypass the page cache. Returns true if the flag changed. Some
// file systems accept the flag, but later reads or writes fail with EINVAL.
bool file_past_cache(int fd, bool past);

// Identifies a file by a hash. The hash covers all bytes of a file of up to 64 MiB. In a larger file it covers 64
// blocks of 64 KiB at even distances, the first and the last block included.
int file_digest(const char *path, FileDigest *digest, Error *e);

// ---- Paths and directories ------------------------------------------------------------------------------------------

bool file_exists_in(int dir, const char *path); // a file of any kind, or a broken link
bool file_missing(int dir, const char *path);   // true: nothing has this name; false also if the lookup fails
static inline bool file_exists(const char *path) { return file_exists_in(IN_PATH, path); }
bool directory_exists(const char *path);
bool directory_holds(const char *directory, const char *name); // file_exists(DIRECTORY/NAME)

// Writes "DIRECTORY/NAME" to `out`. ERR_USAGE if it does not fit.
int path_join(char *out, size_t out_bytes, const char *directory, const char *name, Error *e);

// Returns the part of a path after its last slash.
const char *path_name(const char *path);

bool path_ends(const char *path, const char *ending); // false if the path is only the ending

// Writes the directory that holds a path to `out`; "." if the path has no slash.
void path_parent(const char *path, char *out, size_t bytes);

// Creates a directory and its parents; an existing one is fine.
int directory_create(const char *path, Error *e);

// Renames an entry of the open directory `dir`, and syncs `dir`. ERR_WRITE if the new name exists.
int path_rename(int dir, const char *from, const char *to, Error *e);

// The entries of a directory, . and .. included, ascending by name (release: names_free).
typedef struct {
    struct dirent **entry;
    int count;
} Names;
int directory_list(int dir, const char *path, Names *out, Error *e); // with IN_PATH lists `path`, else `dir`
void names_free(Names *names);

// Sets *bytes to the free space on the disk of the directory `dir`; with IN_PATH, of `path`, even if it is missing.
int disk_free(int dir, const char *path, uint64_t *bytes, Error *e);
