// files: paths, directories, files read as a whole, and writing that lasts. A file written here is on the disk, with a
// digest of what should be there, before its name counts for anything.
#ifndef GNS_FILES_H
#define GNS_FILES_H

#include "base/common.h"

enum { HASH_TEXT = 33 }; // bytes of an XXH3-128 in hexadecimal, with its NUL

// What a file holds, in short.
typedef struct {
    uint64_t bytes;
    char hash[HASH_TEXT]; // XXH3-128, its canonical form
} FileDigest;

FileDigest digest_of(const void *data, size_t bytes);
bool digest_equal(const FileDigest *a, const FileDigest *b);

// The same of bytes that come one after another.
typedef struct Digester Digester;
int digester_create(Digester **out, Error *e); // of no bytes yet
void digester_add(Digester *digester, const void *data, size_t bytes);
FileDigest digester_read(const Digester *digester); // of what was added so far; more may follow
void digester_destroy(Digester *digester);          // NULL is fine

// ---------------------------------------------------------------------------------------------------------------------
// Writing, from first byte to last. The digest is of the bytes handed over, not of what the disk made of them.
// Large files go past the page cache, where the file system lets them: 4 MiB at a time.

typedef struct OutFile OutFile;

// Opens a file to write, with open's flags (O_WRONLY | O_APPEND, ...). Every output is opened here, or with O_EXCL.
// ERR_WRITE also where a link, a device or a FIFO has its name.
int file_open_output(const char *path, int flags, int *fd, Error *e);

// ERR_WRITE where something other than a regular file has this name. A free name is fine.
int file_check_output(const char *path, Error *e);

// Creates the file, or empties the one that is there (file_open_output).
int outfile_create(OutFile **out, const char *path, Error *e);
int outfile_write(OutFile *file, const void *data, size_t bytes, Error *e); // after a failure, abandon the file

// Writes what is left, fsync, close; frees *file whatever comes out, and removes a file that failed. digest may be NULL.
int outfile_finish(OutFile *file, FileDigest *digest, Error *e);

// Closes and removes the unfinished file. NULL is fine.
void outfile_abandon(OutFile *file);

// A whole file at once. digest may be NULL.
int file_save(const char *path, const void *data, size_t bytes, FileDigest *digest, Error *e);

// The same under a temporary name that replaces `path` when all of it is on the disk.
int file_replace(const char *path, const void *data, size_t bytes, Error *e);

// All of the bytes to a descriptor; `path` is for the message.
int write_all(int fd, const void *data, size_t bytes, const char *path, Error *e);

// ---------------------------------------------------------------------------------------------------------------------
// Files and directories that are there

// Opens a regular file to read and gives its size. ERR_INPUT for any other kind; a FIFO is not waited for.
int file_open_input(const char *path, int *fd, uint64_t *bytes, Error *e);

// Reads all of bytes [offset, offset + bytes); `path` is for the message. Several threads may read from one descriptor.
int file_read_range(int fd, const char *path, uint64_t offset, void *out, size_t bytes, Error *e);

// Reads the file: a file that cannot be read is ERR_INPUT. The pulse beats every 4 MiB.
int file_digest(const char *path, const Pulse *pulse, FileDigest *digest, Error *e);

// The same of what the disk holds, not of what is remembered of it: past the page cache, where that can be.
int file_digest_disk(const char *path, const Pulse *pulse, FileDigest *digest, Error *e);

// The same over a sample of a file of more than 64 MiB: its size, and 64 blocks of 64 KiB evenly spread over it, the
// first and the last included.
int file_digest_sampled(const char *path, FileDigest *digest, Error *e);

// A whole file in memory with a NUL behind it; *out from memory_alloc. max_bytes guards against a wrong path.
int file_read(const char *path, size_t max_bytes, char **out, size_t *out_bytes, Error *e);

bool file_exists(const char *path); // of whatever kind
bool directory_exists(const char *path);
bool directory_holds(const char *directory, const char *name); // file_exists(DIRECTORY/NAME)
int descriptor_sync(int fd, const char *path, Error *e);
int directory_sync(const char *path, Error *e);

// Joins a path; FAILs where it would not fit.
int path_join(char *out, size_t out_bytes, const char *directory, const char *name, Error *e);

// The last part of a path, behind its last slash.
const char *path_name(const char *path);

// The directory that holds a path: ".", where it names none.
void path_parent(const char *path, char *out, size_t bytes);
void parent_sync(const char *path); // if its file system allows that

// Creates a directory and its parents; an existing one is fine.
int directory_create(const char *path, Error *e);

// Renames and syncs the parent, which both share. The new name must be free.
int path_rename(const char *from, const char *to, const char *parent, Error *e);

// Cuts a file back to this many bytes; one that is not there is fine.
int file_cut(const char *path, int64_t bytes, Error *e);

// Names in a directory but . and .., ascending. *out from memory_alloc, one block: names_free.
typedef struct {
    char **name;
    int count;
} Names;
int directory_list(const char *path, Names *out, Error *e);
void names_free(Names *names);

// Removes these files of a directory, the last one last, and the directory if nothing else is in it; one that is not
// there is fine. A link in its place is unlinked, never entered. *left: names that stay, and so does the directory.
int directory_remove(const char *path, const char *const *names, int count, Names *left, Error *e);

// Bytes that may still be written below the directory.
int disk_free(const char *directory, uint64_t *bytes, Error *e);
#endif
