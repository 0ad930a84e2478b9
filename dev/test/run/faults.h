// faults: plans system calls that fail, fall short or end the program. The linker sends calls of the unchanged library
// here (--wrap, dev/make/tests.mk). Plan and counts are in a file of the current directory, mapped by the test and by
// the trainers that it starts.
#pragma once

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <unistd.h>

// Calls that can fail. WRITE includes pwrite. OPEN counts only opens that write or create.
typedef enum { CALL_WRITE, CALL_FSYNC, CALL_RENAME, CALL_MKDIR, CALL_OPEN, CALL_UNLINK, CALL_ALLOC, CALLS } Call;
static const char *const call_names[CALLS] = {"write", "fsync", "rename", "mkdir", "open", "unlink", "malloc"};

typedef enum {
    FAULT_NONE,
    FAULT_KILL, // the program is killed before the call, or after half of a write
    FAULT_ONCE, // the call fails
    FAULT_ON,   // the call and all later calls of its kind fail
} Fault;

enum { FAULT_RANKS = 4 };

typedef struct {
    Fault fault;
    int rank;            // the rank whose calls fail
    int call;            // the kind of call that fails; -1: any kind but ALLOC
    long at;             // number of the call that fails, from 1
    int error;           // errno
    long free_kb;        // free space that statvfs and fstatvfs report, if not 0
    long disk_kb;        // the disk's size, which only checkpoints fill; 0: the real disk
    long slow_us;        // added to every fsync of `rank`
    size_t refused;      // allocations of this many bytes fail on `rank`
    long slow_step_us;   // added to every step, in tests that count steps
    long log_needs_kb;   // writes to metrics.jsonl fail if less than this is left of disk_kb
    long readable;       // reads of `unreadable` that succeed first
    char unreadable[80]; // opening a file whose path has this text fails with `error`; with EIO reading fails instead
    bool unlisted;       // the first listing of a directory fails with `error`
    long flip_step;      // the disk flips one bit of this step's checkpoint; 0: never

    struct {
        _Atomic long count[CALLS + 1]; // calls of each kind so far; last element: sum over all kinds but ALLOC
        _Atomic long steps;            // steps begun
        _Atomic int process;           // process number; 0: not started yet
        _Atomic int dirty;             // files that the rank wrote and has not synced
    } of[FAULT_RANKS];
    _Atomic long reads;      // reads of the unreadable file
    _Atomic long main_reads; // those by the main thread
    _Atomic long slowed;     // fsyncs so far that slow_us delays
    _Atomic long committed;  // step of the last checkpoint that got its name; 0: none
    _Atomic long before;     // step of the checkpoint before `committed`
    _Atomic long struck;     // calls that failed
    _Atomic long unsynced;   // files and directories that were not on the disk when their checkpoint got its name
    _Atomic long unnamed;    // checkpoints whose name is not on the disk

    // One bit of a rank's weights changes before a step.
    int stray_rank; // -1: none
    long stray_step;
    size_t stray_element;
    bool stray_late; // the bit changes after the step's new weights have arrived

    bool apart;      // each rank has its own machine
    bool not_finite; // every step's loss is NaN
    bool no_logits;  // `rank` computes none
} Faults;

static Faults *faults; // shared with child processes

static pid_t faults_parent; // faults happen in children only
static int faults_rank;     // this process's rank

static void faults_setup(void) {
    int fd = open("faults", O_RDWR | O_CREAT, 0666);
    if (fd < 0 || ftruncate(fd, sizeof *faults) != 0) abort();
    faults = mmap(NULL, sizeof *faults, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (faults == MAP_FAILED) abort();
    close(fd);
}

// Sets faults up in a rank that mpirun started.
static inline void faults_join(void) {
    const char *rank = getenv("OMPI_COMM_WORLD_RANK");
    faults_setup();
    faults_parent = 1;
    faults_rank = rank ? atoi(rank) : 0;
    faults->of[faults_rank].process = getpid();
}

static void faults_plan(Fault fault, int call, long at, int error) {
    memset((void *)faults, 0, sizeof *faults);
    faults_parent = getpid();
    faults->fault = fault;
    faults->stray_rank = -1;
    faults->call = call;
    faults->at = at;
    faults->error = error;
}

static bool in_child(void) { return faults && faults_parent && getpid() != faults_parent; }

// Counts the call. True if it must fail.
static bool meant(Call call) {
    if (!in_child()) return false;
    _Atomic long *count = faults->of[faults_rank].count;
    long of_kind = ++count[call], of_any = call == CALL_ALLOC ? 0 : ++count[CALLS];
    long n = faults->call < 0 ? of_any : faults->call == (int)call ? of_kind : 0;
    if (n == 0 || faults->fault == FAULT_NONE || faults->rank != faults_rank) return false;
    return faults->fault == FAULT_ON ? n >= faults->at : n == faults->at;
}

static bool strikes(Call call) {
    if (!meant(call)) return false;
    if (faults->fault == FAULT_KILL) kill(getpid(), SIGKILL);
    faults->struck++;
    errno = faults->error;
    return true;
}

// Tracks what is on the disk. A killed process loses nothing that it wrote, but a loss of power loses what was not
// synced. So a checkpoint may get its name only after its files, their directory, and the metrics up to its step are
// synced.

enum { FAULT_FILES = 256 };
static struct {
    pthread_mutex_t lock;
    struct {
        ino_t inode;
        bool dirty;
    } file[FAULT_FILES]; // files and directory of the checkpoint being written
    int count;
    bool metrics_synced; // since the last checkpoint
} disk = {.lock = PTHREAD_MUTEX_INITIALIZER};

// Writes the path of an open file; "": unknown.
static void path_of_descriptor(int fd, char path[PATH_MAX]) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, path, PATH_MAX - 1);
    path[n > 0 ? n : 0] = 0;
}

static void disk_mark(ino_t inode, bool dirty) {
    int i = 0;
    pthread_mutex_lock(&disk.lock);
    while (i < disk.count && disk.file[i].inode != inode) i++;
    if (i == disk.count && dirty) {
        if (disk.count == FAULT_FILES) abort();
        disk.file[disk.count++].inode = inode;
    }
    if (i < disk.count) disk.file[i].dirty = dirty;
    int count = 0;
    for (i = 0; i < disk.count; i++) count += disk.file[i].dirty;
    faults->of[faults_rank].dirty = count;
    pthread_mutex_unlock(&disk.lock);
}

static void disk_written(int fd) {
    struct stat st;
    char path[PATH_MAX];
    path_of_descriptor(fd, path);
    if (strstr(path, "/.step_") && fstat(fd, &st) == 0) disk_mark(st.st_ino, true);
}

static void disk_created(const char *path) { // marks the directory of `path` as not synced
    struct stat st;
    char directory[PATH_MAX];
    snprintf(directory, sizeof directory, "%s", path);
    char *slash = strrchr(directory, '/');
    if (!slash || !strstr(path, ".step_")) return;
    *slash = 0;
    if (stat(directory, &st) == 0) disk_mark(st.st_ino, true);
}

static void disk_synced(int fd) {
    struct stat st;
    char path[PATH_MAX];
    path_of_descriptor(fd, path);
    if (strstr(path, "/metrics.jsonl")) disk.metrics_synced = true;
    if (fstat(fd, &st) != 0) return;
    if (S_ISDIR(st.st_mode) && !strstr(path, "/.step_")) faults->unnamed = 0;
    disk_mark(st.st_ino, false);
}

// Begins a save: forgets the files of an abandoned save.
static void disk_begin(void) {
    pthread_mutex_lock(&disk.lock);
    disk.count = faults->of[faults_rank].dirty = 0;
    pthread_mutex_unlock(&disk.lock);
}

static void disk_named(void) {
    pthread_mutex_lock(&disk.lock);
    faults->unsynced += !disk.metrics_synced;
    for (int r = 0; r < FAULT_RANKS; r++) faults->unsynced += faults->of[r].dirty;
    faults->unnamed++;
    disk.count = 0;
    disk.metrics_synced = false;
    pthread_mutex_unlock(&disk.lock);
}

ssize_t __real_pwrite(int fd, const void *data, size_t bytes, off_t at);
ssize_t __real_pread(int fd, void *to, size_t bytes, off_t at);

static void flip_on_disk(int fd) {
    char path[PATH_MAX], name[40];
    unsigned char byte;
    path_of_descriptor(fd, path);
    snprintf(name, sizeof name, "/.step_%08ld", faults->flip_step);
    if (!strstr(path, name)) return;
    int file = open(path, O_RDWR);
    if (file < 0 || __real_pread(file, &byte, 1, 0) != 1) abort();
    byte ^= 1;
    if (__real_pwrite(file, &byte, 1, 0) != 1 || close(file) != 0) abort();
    faults->flip_step = 0;
    faults->struck++;
}

// ---- The calls ------------------------------------------------------------------------------------------------------

static long disk_used_kb(const char *run);

static bool log_is_full(int fd) {
    char path[PATH_MAX];
    path_of_descriptor(fd, path);
    char *slash = strrchr(path, '/');
    if (!slash || strcmp(slash, "/metrics.jsonl") != 0) return false;
    *slash = 0;
    return faults->disk_kb - disk_used_kb(path) < faults->log_needs_kb;
}

static bool is_unreadable(const char *path, bool opens) {
    if (!in_child() || !*faults->unreadable || faults->rank != faults_rank || (faults->error == EIO) == opens)
        return false;
    if (!strstr(path, faults->unreadable)) return false;
    faults->main_reads += syscall(SYS_gettid) == getpid();
    if (++faults->reads <= faults->readable) return false;
    faults->struck++;
    errno = faults->error;
    return true;
}

ssize_t __wrap_pread(int fd, void *to, size_t bytes, off_t at) {
    char path[PATH_MAX] = "";
    if (in_child() && *faults->unreadable) path_of_descriptor(fd, path);
    return is_unreadable(path, false) ? -1 : __real_pread(fd, to, bytes, at);
}

ssize_t __real_write(int fd, const void *data, size_t bytes);
static ssize_t real_write(int fd, const void *data, size_t bytes, off_t at) { // writes at the file's position if at < 0
    return at < 0 ? __real_write(fd, data, bytes) : __real_pwrite(fd, data, bytes, at);
}

static ssize_t faulty_write(int fd, const void *data, size_t bytes, off_t at) {
    bool is_meant = meant(CALL_WRITE);
    if (in_child()) disk_written(fd);
    if (in_child() && faults->log_needs_kb && log_is_full(fd)) {
        faults->struck++;
        errno = ENOSPC;
        return -1;
    }
    if (in_child() && faults->log_needs_kb && bytes > 1) bytes /= 2; // a write may write less
    if (!is_meant) {
        ssize_t written = real_write(fd, data, bytes, at);
        if (in_child() && faults->flip_step) flip_on_disk(fd);
        return written;
    }
    if (faults->fault == FAULT_KILL) {
        if (real_write(fd, data, bytes > 1 ? bytes / 2 : bytes, at) >= 0) kill(getpid(), SIGKILL);
    }
    faults->struck++;
    errno = faults->error;
    return -1;
}

ssize_t __wrap_write(int fd, const void *data, size_t bytes) { return faulty_write(fd, data, bytes, -1); }
ssize_t __wrap_pwrite(int fd, const void *data, size_t bytes, off_t at) { return faulty_write(fd, data, bytes, at); }

// Does not wait for the disk: without a loss of power this changes nothing.
int __wrap_fsync(int fd) {
    struct stat st;
    if (in_child() && faults->slow_us && faults->rank == faults_rank) {
        faults->slowed++;
        usleep((useconds_t)faults->slow_us);
    }
    if (strikes(CALL_FSYNC)) return -1;
    int result = fstat(fd, &st);
    if (result == 0 && in_child()) disk_synced(fd);
    return result;
}

// Writes the path of `name` in an open directory.
static void path_at(int directory, const char *name, char path[PATH_MAX]) {
    path[0] = 0;
    if (directory != AT_FDCWD && *name != '/') path_of_descriptor(directory, path);
    size_t n = strlen(path);
    snprintf(path + n, PATH_MAX - n, "%s%s", n ? "/" : "", name);
}

int __real_renameat(int a, const char *from, int b, const char *to);
int __wrap_renameat(int a, const char *from, int b, const char *to) {
    char path[PATH_MAX];
    if (strikes(CALL_RENAME)) return -1;
    int result = __real_renameat(a, from, b, to);
    if (result == 0 && faults && strncmp(from, "step_", 5) == 0 && atol(from + 5) == faults->committed)
        faults->committed = faults->before; // the last checkpoint has lost its name
    path_at(b, to, path);
    const char *step = strstr(path, "/step_");
    if (result == 0 && faults && step && !strchr(step, '.')) {
        faults->before = faults->committed;
        faults->committed = atol(step + 6);
        disk_named();
    }
    return result;
}

int __real_mkdir(const char *path, mode_t mode);
int __wrap_mkdir(const char *path, mode_t mode) { return strikes(CALL_MKDIR) ? -1 : __real_mkdir(path, mode); }

int __real_mkdirat(int directory, const char *name, mode_t mode);
int __wrap_mkdirat(int directory, const char *name, mode_t mode) {
    if (in_child() && strncmp(name, ".step_", 6) == 0) disk_begin();
    return strikes(CALL_MKDIR) ? -1 : __real_mkdirat(directory, name, mode);
}

int __real_unlinkat(int directory, const char *name, int flags);
int __wrap_unlinkat(int directory, const char *name, int flags) {
    return strikes(CALL_UNLINK) ? -1 : __real_unlinkat(directory, name, flags);
}

int __real_openat(int directory, const char *name, int flags, ...);
int __wrap_openat(int directory, const char *name, int flags, ...) {
    char path[PATH_MAX];
    va_list args;
    va_start(args, flags);
    mode_t mode = flags & O_CREAT ? va_arg(args, mode_t) : 0;
    va_end(args);
    bool writes = flags & (O_WRONLY | O_RDWR | O_CREAT);
    path_at(directory, name, path);
    if ((writes && strikes(CALL_OPEN)) || (!writes && is_unreadable(path, true))) return -1;
    int fd = __real_openat(directory, name, flags, mode);
    if (fd >= 0 && (flags & O_CREAT) && in_child()) disk_created(path);
    if (faults_rank > 0 && writes && strcmp(name, "model.safetensors") == 0) disk_begin();
    return fd;
}

typedef int (*NamePick)(const struct dirent *);
typedef int (*NameOrder)(const struct dirent **, const struct dirent **);
int __real_scandirat(int directory, const char *name, struct dirent ***list, NamePick pick, NameOrder order);
int __wrap_scandirat(int directory, const char *name, struct dirent ***list, NamePick pick, NameOrder order) {
    if (!in_child() || !faults->unlisted) return __real_scandirat(directory, name, list, pick, order);
    faults->unlisted = false;
    faults->struck++;
    errno = faults->error;
    return -1;
}

int __real_posix_memalign(void **out, size_t alignment, size_t bytes);
int __wrap_posix_memalign(void **out, size_t alignment, size_t bytes) {
    bool refused = in_child() && bytes == faults->refused && faults->rank == faults_rank;
    if (refused) faults->struck++;
    return refused || strikes(CALL_ALLOC) ? ENOMEM : __real_posix_memalign(out, alignment, bytes);
}

// Returns the number of 512-byte blocks of all files below a directory. Skips entries whose names lack `having`.
static long blocks_of(const char *path, const char *having) {
    long blocks = 0;
    DIR *directory = opendir(path);
    for (struct dirent *entry; directory && (entry = readdir(directory));) {
        char inner[PATH_MAX];
        struct stat st;
        if (strspn(entry->d_name, ".") == strlen(entry->d_name) || !strstr(entry->d_name, having)) continue;
        if (fstatat(dirfd(directory), entry->d_name, &st, 0) != 0) continue;
        if (snprintf(inner, sizeof inner, "%s/%s", path, entry->d_name) >= PATH_MAX) continue;
        blocks += S_ISDIR(st.st_mode) ? blocks_of(inner, "") : st.st_blocks;
    }
    if (directory) closedir(directory);
    return blocks;
}

// Returns the space that a run directory's checkpoints occupy, complete or not.
static long disk_used_kb(const char *run) { return blocks_of(run, "step_") / 2; }

static void fake_space(const char *path, struct statvfs *st) {
    if (!in_child() || (!faults->free_kb && !faults->disk_kb)) return;
    long left = faults->disk_kb ? faults->disk_kb - disk_used_kb(path) : faults->free_kb;
    st->f_frsize = 1024;
    st->f_bavail = left > 0 ? (fsblkcnt_t)left : 0;
}

int __real_fstatvfs(int fd, struct statvfs *st);
int __wrap_fstatvfs(int fd, struct statvfs *st) {
    char path[PATH_MAX];
    int result = __real_fstatvfs(fd, st);
    path_of_descriptor(fd, path);
    fake_space(path, st);
    return result;
}

int __real_statvfs(const char *path, struct statvfs *st);
int __wrap_statvfs(const char *path, struct statvfs *st) {
    int result = __real_statvfs(path, st);
    fake_space(path, st);
    return result;
}
