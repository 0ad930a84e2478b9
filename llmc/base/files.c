// These functions keep four promises together:
// 1. Nothing is written through a link, a device or a FIFO, nor into a file with a second name (a hard link): another
//    program may own it. file_open_output refuses these files. With O_TRUNC it creates a new file under the name; so
//    does file_replace.
// 2. A written file is on the disk when file_close or file_replace returns 0. file_replace leaves the old file or the
//    whole new one at `path`.
// 3. A new name is on the disk after descriptor_sync of the directory that holds it. path_rename does this sync.
// 4. If `dir` is a directory's descriptor, a call reads and writes in this directory, even if the directory was moved.
#define _GNU_SOURCE // O_DIRECT, scandirat
#include "base/files.h"

#include <errno.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#define XXH_INLINE_ALL // xxHash as a header, nothing to link
#include <xxhash.h>

static const char *const make_room = "free some space, or choose another place";

static int too_long(const char *path, Error *e) {
    return FAIL(e, ERR_USAGE, "use a shorter path", "%.80s...: path too long", path);
}

// Returns the name under which openat, unlinkat and fstatat find `path` in `dir`.
static const char *at_name(int dir, const char *path) { return dir == IN_PATH ? path : path_name(path); }

// ---- Digests --------------------------------------------------------------------------------------------------------

static FileDigest digest_make(XXH128_hash_t hash, uint64_t bytes) {
    FileDigest digest = {.bytes = bytes};
    XXH128_canonical_t canonical;
    XXH128_canonicalFromHash(&canonical, hash);
    for (size_t i = 0; i < sizeof canonical.digest; i++) snprintf(digest.hash + 2 * i, 3, "%02x", canonical.digest[i]);
    return digest;
}

FileDigest digest_of(const void *data, size_t bytes) { return digest_make(XXH3_128bits(data, bytes), bytes); }

bool digest_equal(const FileDigest *a, const FileDigest *b) {
    return a->bytes == b->bytes && strcmp(a->hash, b->hash) == 0;
}

// ---- O_DIRECT: past the page cache ----------------------------------------------------------------------------------

// Gigabytes that are written once and read back once gain nothing from the page cache, which costs a copy and memory.
// On a virtual machine whose host reclaims free memory the cache also costs a fault per page. Measured for 1.5 GB: 1 to
// 6 s through the cache; the disk alone needs 0.6 s.

enum {
    BLOCK_BYTES = 1 << 12, // with O_DIRECT addresses, offsets and lengths must be multiples of this
    STAGE_BYTES = 4 << 20  // bytes that file_digest_range reads at a time
};

static unsigned char *block_align(const void *p) { return (unsigned char *)round_up((size_t)p, BLOCK_BYTES); }

bool file_past_cache(int fd, bool past) {
    const int flags = fcntl(fd, F_GETFL);
    return flags >= 0 && !!(flags & O_DIRECT) != past && fcntl(fd, F_SETFL, flags ^ O_DIRECT) == 0;
}

// ---- Writing --------------------------------------------------------------------------------------------------------

static int fail_open_output(const char *path, Error *e) {
    return FAIL(e, ERR_WRITE, "choose a place that you may write to", "%s: cannot write: %s", path, strerror(errno));
}

int file_open_output(int dir, const char *path, int flags, int *fd, Error *e) {
    struct stat st;
    if (flags & O_TRUNC) {
        if (unlinkat(dir, at_name(dir, path), 0) != 0 && errno != ENOENT) return fail_open_output(path, e);
        flags = (flags & ~O_TRUNC) | O_CREAT | O_EXCL;
    }
    // O_NONBLOCK: opening a FIFO must not wait for its reader
    *fd = openat(dir, at_name(dir, path), flags | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC, 0666);
    if (*fd < 0) return fail_open_output(path, e);
    if (fstat(*fd, &st) == 0 && S_ISREG(st.st_mode) && st.st_nlink <= 1) return 0;
    close(*fd);
    *fd = -1;
    return FAIL(e, ERR_WRITE, "move it away, or put a copy in its place",
                "%s: cannot write: not a regular file, or one with a second name (a hard link)", path);
}

// Writes all bytes with pwrite.
static int write_between(int fd, uint64_t offset, const char *data, size_t bytes, const char *path, Error *e) {
    for (size_t done = 0; done < bytes;) {
        ssize_t n = pwrite(fd, data + done, bytes - done, (off_t)(offset + done));
        if (n < 0 && errno == EINTR) continue;
        if (n < 0 && errno == EINVAL && file_past_cache(fd, false)) continue;
        if (n < 0) return FAIL(e, ERR_WRITE, make_room, "%s: write failed: %s", path, strerror(errno));
        done += (size_t)n;
    }
    return 0;
}

int file_write_range(int fd, const char *path, uint64_t offset, const void *data, size_t bytes, Error *e) {
    const size_t least = 1 << 16; // O_DIRECT gains nothing for fewer bytes
    uint64_t end = offset + bytes, first = round_up(offset, BLOCK_BYTES), last = end - end % BLOCK_BYTES;
    const char *from = data;
    if (bytes < least || block_align(from + (first - offset)) != (unsigned char *)from + (first - offset))
        first = last = end;
    TRY(write_between(fd, offset, from, first - offset, path, e));
    if (first < last) file_past_cache(fd, true);
    TRY(write_between(fd, first, from + (first - offset), last - first, path, e));
    if (first < last) file_past_cache(fd, false);
    return write_between(fd, last, from + (last - offset), end - last, path, e);
}

int descriptor_sync(int fd, const char *path, Error *e) {
    while (fsync(fd) != 0)
        if (errno != EINTR) return FAIL(e, ERR_WRITE, make_room, "%s: fsync failed: %s", path, strerror(errno));
    return 0;
}

int file_close(int fd, const char *path, Error *e) {
    int code = descriptor_sync(fd, path, e);
    // Ignore EINTR: Linux has closed the descriptor, and the synced data is safe.
    if (close(fd) != 0 && errno != EINTR && !code)
        code = FAIL(e, ERR_WRITE, make_room, "%s: close failed: %s", path, strerror(errno));
    return code;
}

int file_check_free(int dir, const char *path, Error *e) {
    struct stat st;
    const bool found = fstatat(dir, at_name(dir, path), &st, AT_SYMLINK_NOFOLLOW) == 0;
    if (!found || (S_ISREG(st.st_mode) && st.st_size == 0)) return 0;
    return FAIL(e, ERR_WRITE, "move it away, or choose another --out", "%s: another program's, or another run's", path);
}

int file_replace(int dir, const char *path, const void *data, size_t bytes, Error *e) {
    char partial[PATH_MAX];
    int fd;
    if (snprintf(partial, sizeof partial, "%s.partial", path) >= PATH_MAX) return too_long(path, e);
    TRY(file_open_output(dir, partial, O_WRONLY | O_TRUNC, &fd, e));
    int code = file_write_range(fd, partial, 0, data, bytes, e);
    if (file_close(fd, partial, code ? &(Error){0} : e)) code = e->code;
    if (!code && renameat(dir, at_name(dir, partial), dir, at_name(dir, path)) != 0)
        code = FAIL(e, ERR_WRITE, make_room, "%s: cannot replace: %s", path, strerror(errno));
    if (code) unlinkat(dir, at_name(dir, partial), 0);
    return code;
}

// ---- Reading --------------------------------------------------------------------------------------------------------

int file_open_input(int dir, const char *path, int *fd, uint64_t *bytes, Error *e) {
    static const char lfs[] = "version https://git-lfs.github.com/spec/"; // a clone without git-lfs holds this
    char text[sizeof lfs] = "";
    struct stat st = {0};
    // O_NONBLOCK: opening a FIFO must not wait for its writer
    *fd = openat(dir, at_name(dir, path), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (*fd < 0) {
        FAIL(e, ERR_INPUT, "check the path", "%s: cannot open: %s", path, strerror(errno));
        return e->unreadable = !file_missing(dir, path), e->code;
    }
    bool regular = fstat(*fd, &st) == 0 && S_ISREG(st.st_mode);
    *bytes = (uint64_t)st.st_size;
    if (regular && !(*bytes < 1024 && pread(*fd, text, sizeof lfs - 1, 0) > 0 && strcmp(text, lfs) == 0)) return 0;
    close(*fd);
    *fd = -1;
    if (!regular) return FAIL(e, ERR_INPUT, "name a regular file", "%s: not a regular file", path);
    return FAIL(e, ERR_INPUT, "fetch the file",
                "%s: a Git LFS pointer in place of the file, which git lfs pull fetches", path);
}

// Reads at least `bytes` and at most `room` bytes.
static int read_between(int fd, const char *path, uint64_t offset, void *out, size_t bytes, size_t room, Error *e) {
    for (size_t have = 0; have < bytes;) {
        ssize_t n = pread(fd, (char *)out + have, room - have, (off_t)(offset + have));
        if (n < 0 && errno == EINTR) continue;
        if (n < 0 && errno == EINVAL && file_past_cache(fd, false)) continue;
        if (n <= 0) {
            FAIL(e, ERR_INPUT, "check the disk, and that nothing else writes to the file",
                 "%s: read failed at byte %llu: %s", path, (unsigned long long)(offset + have),
                 n ? strerror(errno) : "the file ends there");
            e->unreadable = n < 0;
            return e->code;
        }
        have += (size_t)n;
    }
    return 0;
}

int file_read_range(int fd, const char *path, uint64_t offset, void *out, size_t bytes, Error *e) {
    return read_between(fd, path, offset, out, bytes, bytes, e);
}

int file_read(int dir, const char *path, size_t max_bytes, char **out, size_t *out_bytes, Error *e) {
    int fd, code = 0;
    uint64_t bytes;
    *out = NULL;
    *out_bytes = 0;
    TRY(file_open_input(dir, path, &fd, &bytes, e));
    if (bytes > max_bytes)
        code = FAIL(e, ERR_INPUT, "is this the right file?", "%s: %llu bytes, more than the %zu it may have", path,
                    (unsigned long long)bytes, max_bytes);
    if (!code) code = memory_alloc((void **)out, bytes + 1, path, e);
    if (!code) code = file_read_range(fd, path, 0, *out, bytes, e);
    close(fd);
    if (code) return memory_free(*out), *out = NULL, code;
    (*out)[bytes] = 0;
    *out_bytes = bytes;
    return 0;
}

enum {
    SAMPLE_BYTES = 1 << 16, // bytes of one sampled block
    SAMPLE_BLOCKS = 64,
    SAMPLE_ABOVE_BYTES = 1 << 26 // file_digest hashes all bytes of files up to this size
};

int file_digest_range(int fd, const char *path, uint64_t offset, uint64_t bytes, const Pulse *pulse, FileDigest *digest,
                      Error *e) {
    XXH3_state_t hash;
    void *memory;
    int code = 0;
    TRY(memory_alloc(&memory, BLOCK_BYTES + STAGE_BYTES, "a file buffer", e));
    unsigned char *buffer = block_align(memory);
    XXH3_128bits_reset(&hash);
    for (uint64_t at = offset, end = offset + bytes, n; at < end && !code; at += n) { // whole blocks, for O_DIRECT
        size_t lead = at % BLOCK_BYTES;
        n = size_min(end - at, STAGE_BYTES - lead);
        code = read_between(fd, path, at - lead, buffer, lead + n, round_up(lead + n, BLOCK_BYTES), e);
        if (!code) XXH3_128bits_update(&hash, buffer + lead, n);
        pulse_beat(pulse);
    }
    *digest = digest_make(XXH3_128bits_digest(&hash), bytes);
    memory_free(memory);
    return code;
}

int file_digest(const char *path, FileDigest *digest, Error *e) {
    int fd, code = 0;
    uint64_t bytes;
    char block[SAMPLE_BYTES];
    XXH3_state_t hash;
    TRY(file_open_input(IN_PATH, path, &fd, &bytes, e));
    const uint64_t blocks = (bytes + SAMPLE_BYTES - 1) / SAMPLE_BYTES;
    const bool all = bytes <= SAMPLE_ABOVE_BYTES;
    XXH3_128bits_reset(&hash);
    for (uint64_t i = 0; i < (all ? blocks : SAMPLE_BLOCKS) && !code; i++) {
        const uint64_t at = SAMPLE_BYTES * (all ? i : (blocks - 1) * i / (SAMPLE_BLOCKS - 1));
        const size_t n = size_min(bytes - at, SAMPLE_BYTES);
        code = file_read_range(fd, path, at, block, n, e);
        if (!code) XXH3_128bits_update(&hash, block, n);
    }
    *digest = digest_make(XXH3_128bits_digest(&hash), bytes);
    close(fd);
    return code;
}

// ---- Directories ----------------------------------------------------------------------------------------------------

bool file_exists_in(int dir, const char *path) {
    struct stat st;
    return fstatat(dir, at_name(dir, path), &st, AT_SYMLINK_NOFOLLOW) == 0;
}

bool directory_holds(const char *directory, const char *name) {
    char path[PATH_MAX];
    return path_join(path, sizeof path, directory, name, &(Error){0}) == 0 && file_exists(path);
}

bool file_missing(int dir, const char *path) {
    return !file_exists_in(dir, path) && (errno == ENOENT || errno == ENOTDIR);
}

bool directory_exists(const char *path) {
    struct stat st;
    return stat(path, &st) == 0 && S_ISDIR(st.st_mode);
}

int path_join(char *out, size_t out_bytes, const char *directory, const char *name, Error *e) {
    int n = snprintf(out, out_bytes, "%s/%s", directory, name);
    return n < 0 || (size_t)n >= out_bytes ? too_long(directory, e) : 0;
}

const char *path_name(const char *path) {
    const char *slash = strrchr(path, '/');
    return slash ? slash + 1 : path;
}

bool path_ends(const char *path, const char *ending) {
    size_t n = strlen(path), m = strlen(ending);
    return n > m && strcmp(path + n - m, ending) == 0;
}

void path_parent(const char *path, char *out, size_t bytes) {
    snprintf(out, bytes, "%s", path);
    char *slash = strrchr(out, '/');
    if (!slash) strcpy(out, ".");
    else slash[slash == out] = 0; // the parent of "/x" is "/"
}

int directory_create(const char *path, Error *e) {
    char partial[PATH_MAX];
    size_t length = strlen(path);
    if (length >= sizeof partial) return too_long(path, e);
    for (size_t i = 1; i <= length; i++) {
        if (path[i] != '/' && path[i] != 0) continue;
        snprintf(partial, i + 1, "%s", path);
        if (mkdir(partial, 0777) != 0 && errno != EEXIST)
            return FAIL(e, ERR_WRITE, "choose a directory that you may write to", "%s: cannot create: %s", partial,
                        strerror(errno));
    }
    if (directory_exists(path)) return 0;
    return FAIL(e, ERR_WRITE, "choose another path", "%s: exists and is not a directory", path);
}

int path_rename(int dir, const char *from, const char *to, Error *e) {
    if (file_exists_in(dir, to)) return FAIL(e, ERR_WRITE, "move it away", "%s: exists already", to);
    if (renameat(dir, at_name(dir, from), dir, at_name(dir, to)) != 0)
        return FAIL(e, ERR_WRITE, make_room, "%s: cannot rename to %s: %s", from, to, strerror(errno));
    return descriptor_sync(dir, to, e);
}

void names_free(Names *names) {
    while (names->count > 0) free(names->entry[--names->count]);
    free(names->entry);
}

int directory_list(int dir, const char *path, Names *out, Error *e) {
    *out = (Names){0};
    out->count = scandirat(dir, dir == IN_PATH ? path : ".", &out->entry, NULL, alphasort);
    if (out->count >= 0) return 0;
    return FAIL(e, ERR_INPUT, "check the path", "%s: cannot list: %s", path, strerror(errno));
}

int disk_free(int dir, const char *path, uint64_t *bytes, Error *e) {
    struct statvfs st;
    char disk[PATH_MAX], missing[PATH_MAX]; // disk: the longest parent that exists
    snprintf(disk, sizeof disk, "%s", path);
    while (dir == IN_PATH && !directory_exists(disk)) path_parent(strcpy(missing, disk), disk, sizeof disk);
    if ((dir == IN_PATH ? statvfs(disk, &st) : fstatvfs(dir, &st)) != 0)
        return FAIL(e, ERR_WRITE, "check --out", "%s: cannot read the free space: %s", path, strerror(errno));
    *bytes = (uint64_t)st.f_bavail * st.f_frsize;
    return 0;
}
