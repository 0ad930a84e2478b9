#define _GNU_SOURCE // memfd_create
#include "shared_memory.h"

#include <fcntl.h>
#include <signal.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

// Where the others find it: a file without a name, in memory, that rank 0 has open. (A file of /dev/shm would outlive a
// run that is killed, and containers give little room there.)
typedef struct {
    int process, fd;          // fd < 0: there is none
    unsigned char secret[16]; // its first bytes: process numbers mean something else on another machine
} Address;

static void *map(int fd, size_t bytes) {
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    return memory == MAP_FAILED ? NULL : memory;
}

static void offer(SharedMemory *s, Address *at) {
    *at = (Address){.process = (int)getpid(), .fd = memfd_create("gns.c state", MFD_CLOEXEC)};
    if (at->fd < 0 || s->bytes < sizeof at->secret || ftruncate(at->fd, (off_t)s->bytes) != 0) return;
    if (getrandom(at->secret, sizeof at->secret, 0) != (ssize_t)sizeof at->secret) return;
    s->memory = map(at->fd, s->bytes);
    if (s->memory) memcpy(s->memory, at->secret, sizeof at->secret);
}

static void find(SharedMemory *s, const Address *at) {
    char path[64];
    struct stat status;
    snprintf(path, sizeof path, "/proc/%d/fd/%d", at->process, at->fd);
    int fd = at->fd < 0 ? -1 : open(path, O_RDWR | O_CLOEXEC);
    if (fd < 0) return;
    if (fstat(fd, &status) == 0 && S_ISREG(status.st_mode) && status.st_size == (off_t)s->bytes)
        s->memory = map(fd, s->bytes);
    close(fd);
    if (s->memory && memcmp(s->memory, at->secret, sizeof at->secret) != 0) {
        munmap(s->memory, s->bytes);
        s->memory = NULL;
    }
}

static void *touch(void *shared) {
    SharedMemory *s = shared;
    const volatile char *byte = s->memory;
    for (size_t at = 0, page = (size_t)sysconf(_SC_PAGESIZE); at < s->bytes; at += page) (void)byte[at];
    return NULL;
}

// Without a thread the first use takes longer.
static void touch_aside(SharedMemory *s) {
    sigset_t all, before;
    sigfillset(&all); // signals are the main thread's
    pthread_sigmask(SIG_SETMASK, &all, &before);
    s->touching = pthread_create(&s->toucher, NULL, touch, s) == 0;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

int shared_memory_create(SharedMemory *s, Comm *comm, size_t bytes, Error *e) {
    Address at = {.fd = -1};
    *s = (SharedMemory){.bytes = bytes};
    TRY(memory_alloc_zero((void **)&s->shared_by, sizeof(bool) * (size_t)comm->ranks, "ranks that share memory", e));
    if (comm->rank == 0) offer(s, &at);
    int code = comm_broadcast(comm, &at, sizeof at, e);
    if (!code && comm->rank > 0) find(s, &at);
    bool shares = s->memory != NULL;
    if (!code) code = comm_gather(comm, &shares, s->shared_by, sizeof shares, e); // and all have found it
    if (comm->rank == 0 && at.fd >= 0) close(at.fd);
    if (comm->rank == 0 && s->memory) memset(s->memory, 0, sizeof at.secret);
    if (code) shared_memory_destroy(s);
    else if (comm->rank > 0 && s->memory) touch_aside(s);
    return code;
}

void shared_memory_destroy(SharedMemory *s) {
    if (s->touching) pthread_join(s->toucher, NULL);
    if (s->memory) munmap(s->memory, s->bytes);
    memory_free(s->shared_by);
    *s = (SharedMemory){0};
}
