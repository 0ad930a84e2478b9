#define _GNU_SOURCE // memfd_create
#include "ranks/shared_memory.h"

#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

// Where the others find it: a file without a name, in memory, that rank 0 has open. (A file of /dev/shm would outlive a
// run that is killed, and containers give little room there.)
typedef struct {
    int process, fd;          // fd < 0: there is none
    char host[COMM_HOST];     // rank 0's
    unsigned char secret[16]; // its first bytes: in another container process numbers mean something else
} Address;

static void *map(int fd, size_t bytes) {
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    return memory == MAP_FAILED ? NULL : memory;
}

// Where the system grants no more memory than there is, a file's is granted page by page, at their first use, and lack of
// it is a signal (SIGBUS); other memory is refused with a word.
static bool grants_by_page(void) {
    FILE *f = fopen("/proc/sys/vm/overcommit_memory", "r");
    int strict = f ? fgetc(f) == '2' : 0;
    if (f) fclose(f);
    return strict;
}

static void offer(SharedMemory *s, const Comm *comm, Address *at) {
    if (grants_by_page() || s->bytes < sizeof at->secret) return;
    *at = (Address){.process = (int)getpid(), .fd = memfd_create("gns.c state", MFD_CLOEXEC)};
    memcpy(at->host, comm->host, sizeof at->host);
    if (at->fd >= 0 && ftruncate(at->fd, (off_t)s->bytes) == 0 &&
        getrandom(at->secret, sizeof at->secret, 0) == (ssize_t)sizeof at->secret)
        s->memory = map(at->fd, s->bytes);
    if (s->memory) {
        memcpy(s->memory, at->secret, sizeof at->secret);
    } else if (at->fd >= 0) {
        close(at->fd);
        at->fd = -1;
    }
}

// What has this number may be anything until it is known to be the right file.
static void find(SharedMemory *s, const Comm *comm, const Address *at) {
    char path[64];
    struct stat status;
    if (at->fd < 0 || strcmp(at->host, comm->host) != 0) return;
    snprintf(path, sizeof path, "/proc/%d/fd/%d", at->process, at->fd);
    if (stat(path, &status) != 0 || !S_ISREG(status.st_mode)) return;
    int fd = open(path, O_RDWR | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
    if (fd < 0) return;
    if (fstat(fd, &status) == 0 && S_ISREG(status.st_mode) && status.st_size == (off_t)s->bytes)
        s->memory = map(fd, s->bytes);
    close(fd);
    if (s->memory && memcmp(s->memory, at->secret, sizeof at->secret) != 0) {
        munmap(s->memory, s->bytes);
        s->memory = NULL;
    }
}

// The last collective is behind what the others have found: rank 0 may close the file.
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
    if (comm->rank == 0 && s->memory) memset(s->memory, 0, sizeof at.secret);
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
