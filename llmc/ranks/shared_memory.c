#define _GNU_SOURCE // memfd_create
#include "ranks/shared_memory.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

// An anonymous file in memory that a rank has open. (A file in /dev/shm would outlive a run that is killed, and
// containers have little room there.)
typedef struct {
    int process, fd; // fd < 0: no memory
    dev_t device;
    ino_t inode; // identifies the file: in another container the process number may be another process's
    off_t bytes;
    char host[COMM_HOST]; // the rank's
} Address;

static void *map(int fd, size_t bytes) {
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    return memory == MAP_FAILED ? NULL : memory;
}

// With strict overcommit a file's pages are granted at first use, and a lack of memory is a signal (SIGBUS), not an error.
static bool overcommit_is_strict(void) {
    FILE *f = fopen("/proc/sys/vm/overcommit_memory", "r");
    int strict = f ? fgetc(f) == '2' : 0;
    if (f) fclose(f);
    return strict;
}

// Allocates this rank's memory as a file; NULL: it cannot, and at->fd < 0.
static void *offer(const Comm *comm, size_t bytes, Address *at) {
    struct stat st;
    void *memory = NULL;
    int fd = overcommit_is_strict() ? -1 : memfd_create("gns.c state", MFD_CLOEXEC);
    *at = (Address){.fd = -1};
    if (fd < 0) return NULL;
    if (ftruncate(fd, (off_t)bytes) == 0 && fstat(fd, &st) == 0) memory = map(fd, bytes);
    if (!memory) {
        close(fd);
        return NULL;
    }
    *at = (Address){.process = (int)getpid(), .fd = fd, .device = st.st_dev, .inode = st.st_ino, .bytes = st.st_size};
    memcpy(at->host, comm->host, sizeof at->host);
    return memory;
}

static bool is_at(const struct stat *st, const Address *at) {
    return st->st_dev == at->device && st->st_ino == at->inode && st->st_size == at->bytes;
}

// Opens another rank's file; < 0: it is not on this machine. The path may lead to any file until its inode is checked.
static int find(const Comm *comm, const Address *at) {
    char path[64];
    struct stat st;
    if (at->fd < 0 || strcmp(at->host, comm->host) != 0) return -1;
    snprintf(path, sizeof path, "/proc/%d/fd/%d", at->process, at->fd);
    if (stat(path, &st) != 0 || !is_at(&st, at)) return -1;
    int fd = open(path, O_RDWR | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
    if (fd < 0 || (fstat(fd, &st) == 0 && is_at(&st, at))) return fd;
    close(fd);
    return -1;
}

// Maps rank 0's file on the other ranks. Every rank has opened it by the last collective: then rank 0 may close it.
static int share(SharedMemory *s, Comm *comm, Address *at, Error *e) {
    TRY(comm_broadcast(comm, at, sizeof *at, e));
    int fd = comm->rank > 0 && at->bytes == (off_t)s->bytes ? find(comm, at) : -1;
    if (fd >= 0) {
        s->memory = map(fd, s->bytes);
        close(fd);
    }
    bool shares = s->memory != NULL;
    return comm_gather(comm, &shares, s->shared_by, sizeof shares, e);
}

int shared_memory_create(SharedMemory *s, Comm *comm, size_t bytes, Error *e) {
    Address at = {.fd = -1};
    *s = (SharedMemory){.bytes = bytes};
    size_t ranks = (size_t)comm->ranks;
    int code = memory_alloc_zero((void **)&s->shared_by, sizeof(bool) * ranks, "ranks that share memory", e);
    code = comm_agree(comm, code, e);
    if (!code && comm->rank == 0) s->memory = offer(comm, bytes, &at);
    if (!code) code = share(s, comm, &at, e);
    if (comm->rank == 0 && at.fd >= 0) close(at.fd);
    if (code) shared_memory_destroy(s);
    return code;
}

void shared_memory_destroy(SharedMemory *s) {
    if (s->memory) munmap(s->memory, s->bytes);
    memory_free(s->shared_by);
    *s = (SharedMemory){0};
}

// ---- Memory of each rank --------------------------------------------------------------------------------------------

// On rank 0: opens all files. False if it cannot open one.
static bool find_all(RankMemory *s, const Comm *comm, const Address *at) {
    bool all = true;
    for (s->files = 0; s->files < comm->ranks && all; s->files++) {
        s->file[s->files] = find(comm, &at[s->files]);
        all = s->file[s->files] >= 0;
    }
    return all;
}

int rank_memory_create(RankMemory *s, Comm *comm, size_t bytes, Error *e) {
    size_t ranks = (size_t)comm->ranks;
    Address mine = {.fd = -1}, *at = NULL;
    bool all = false;
    *s = (RankMemory){.bytes = bytes};
    int code = memory_alloc((void **)&at, sizeof *at * ranks, "ranks' memory", e);
    if (!code) code = memory_alloc((void **)&s->file, sizeof *s->file * ranks, "ranks' memory", e);
    code = comm_agree(comm, code, e);
    if (!code) s->memory = offer(comm, bytes, &mine);
    if (!code) code = comm_gather(comm, &mine, at, sizeof mine, e);
    if (!code && comm->rank == 0) all = find_all(s, comm, at);
    if (!code) code = comm_broadcast(comm, &all, sizeof all, e); // then the files may be closed
    if (mine.fd >= 0) close(mine.fd);
    if (!all) rank_memory_destroy(s);
    memory_free(at);
    return code;
}

int rank_memory_read(const RankMemory *s, int rank, size_t at, void *values, size_t bytes, Error *e) {
    for (char *to = values; bytes > 0;) {
        ssize_t n = pread(s->file[rank], to, bytes, (off_t)at);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) return FAIL(e, ERR_INTERNAL, NULL, "the copy of rank %d: cannot read: %s", rank, strerror(errno));
        to += n, at += (size_t)n, bytes -= (size_t)n;
    }
    return 0;
}

void rank_memory_destroy(RankMemory *s) {
    for (int i = 0; i < s->files; i++)
        if (s->file[i] >= 0) close(s->file[i]);
    if (s->memory) munmap(s->memory, s->bytes);
    memory_free(s->file);
    *s = (RankMemory){0};
}

void shared_memory_touch(const SharedMemory *s, size_t at, size_t bytes) {
    const volatile char *memory = s->memory;
    for (size_t end = at + bytes, page = (size_t)sysconf(_SC_PAGESIZE); at < end; at += page) (void)memory[at];
}
