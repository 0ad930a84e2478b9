#define _GNU_SOURCE // memfd_create
#include "ranks/shared_memory.h"

#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

// An anonymous file in memory that rank 0 has open. (A file in /dev/shm would outlive a run that is killed, and
// containers have little room there.)
typedef struct {
    int process, fd; // fd < 0: there is none
    dev_t device;
    ino_t inode;          // tells the file from another: process numbers mean something else in another container
    char host[COMM_HOST]; // rank 0's
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

static void offer(SharedMemory *s, const Comm *comm, Address *at) {
    struct stat st;
    int fd = overcommit_is_strict() ? -1 : memfd_create("gns.c state", MFD_CLOEXEC);
    if (fd < 0) return;
    if (ftruncate(fd, (off_t)s->bytes) == 0 && fstat(fd, &st) == 0) s->memory = map(fd, s->bytes);
    if (!s->memory) {
        close(fd);
        return;
    }
    *at = (Address){.process = (int)getpid(), .fd = fd, .device = st.st_dev, .inode = st.st_ino};
    memcpy(at->host, comm->host, sizeof at->host);
}

// The path may lead to any file until its inode is checked.
static void find(SharedMemory *s, const Comm *comm, const Address *at) {
    char path[64];
    struct stat st;
    if (at->fd < 0 || strcmp(at->host, comm->host) != 0) return;
    snprintf(path, sizeof path, "/proc/%d/fd/%d", at->process, at->fd);
    if (stat(path, &st) != 0 || st.st_dev != at->device || st.st_ino != at->inode) return;
    int fd = open(path, O_RDWR | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
    if (fd < 0) return;
    if (fstat(fd, &st) == 0 && st.st_dev == at->device && st.st_ino == at->inode && st.st_size == (off_t)s->bytes)
        s->memory = map(fd, s->bytes);
    close(fd);
}

// The last collective comes after every rank's search: then rank 0 may close the file.
static int meet(SharedMemory *s, Comm *comm, Address *at, Error *e) {
    TRY(comm_broadcast(comm, at, sizeof *at, e));
    if (comm->rank > 0) find(s, comm, at);
    bool shares = s->memory != NULL;
    return comm_gather(comm, &shares, s->shared_by, sizeof shares, e);
}

int shared_memory_create(SharedMemory *s, Comm *comm, size_t bytes, Error *e) {
    Address at = {.fd = -1};
    *s = (SharedMemory){.bytes = bytes};
    size_t ranks = (size_t)comm->ranks;
    int code = memory_alloc_zero((void **)&s->shared_by, sizeof(bool) * ranks, "ranks that share memory", e);
    code = comm_agree(comm, code, e);
    if (!code && comm->rank == 0) offer(s, comm, &at);
    if (!code) code = meet(s, comm, &at, e);
    if (comm->rank == 0 && at.fd >= 0) close(at.fd);
    if (code) shared_memory_destroy(s);
    return code;
}

void shared_memory_destroy(SharedMemory *s) {
    if (s->memory) munmap(s->memory, s->bytes);
    memory_free(s->shared_by);
    *s = (SharedMemory){0};
}

void shared_memory_touch(const SharedMemory *s, size_t at, size_t bytes) {
    const volatile char *memory = s->memory;
    for (size_t end = at + bytes, page = (size_t)sysconf(_SC_PAGESIZE); at < end; at += page) (void)memory[at];
}
