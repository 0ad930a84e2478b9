// delays: a library to preload (LD_PRELOAD) into the ranks of a run. For test_faults.sh.
//
//   DELAYS_MOST   microseconds: every fourth call of those below sleeps for a random time up to this, before or after it;
//                 a thread of Open MPI up to 100 times as long after each poll
#define _GNU_SOURCE
#include <dlfcn.h>
#include <mpi.h>
#include <poll.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

static unsigned most; // 0: no delays
static _Thread_local unsigned random_state;

static unsigned random_below(unsigned bound) {
    struct timespec now;
    if (!random_state) {
        clock_gettime(CLOCK_MONOTONIC, &now);
        random_state = (unsigned)now.tv_nsec ^ (unsigned)gettid() * 2654435761u;
    }
    return (unsigned)rand_r(&random_state) % bound;
}

static void sleep_up_to(unsigned us) {
    us = random_below(us);
    nanosleep(&(struct timespec){us / 1000000, 1000L * (us % 1000000)}, NULL);
}

static void delay(void) {
    if (most && random_below(4) == 0) sleep_up_to(most);
}

#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name)) // the function that this library hides

// A function that delays, calls the next one of its name, and delays.
#define DELAYED(name, parameters, ...)                                                                                 \
    int name parameters {                                                                                              \
        delay();                                                                                                       \
        int result = NEXT(name)(__VA_ARGS__);                                                                          \
        delay();                                                                                                       \
        return result;                                                                                                 \
    }
DELAYED(pthread_join, (pthread_t thread, void **result_of_thread), thread, result_of_thread)
DELAYED(sem_post, (sem_t * semaphore), semaphore)
DELAYED(sem_wait, (sem_t * semaphore), semaphore)
DELAYED(munmap, (void *memory, size_t bytes), memory, bytes)
DELAYED(unlink, (const char *path), path)
DELAYED(dlclose, (void *library), library)
DELAYED(epoll_wait, (int fd, struct epoll_event *events, int count, int ms), fd, events, count, ms)
DELAYED(MPI_Barrier, (MPI_Comm comm), comm)
DELAYED(MPI_Finalize, (void))
DELAYED(MPI_Op_free, (MPI_Op * op), op)
DELAYED(MPI_Wait, (MPI_Request * request, MPI_Status *status), request, status)
DELAYED(MPI_Bcast, (void *at, int count, MPI_Datatype type, int root, MPI_Comm comm), at, count, type, root, comm)
DELAYED(MPI_Allgather,
        (const void *from, int n, MPI_Datatype type, void *to, int m, MPI_Datatype type_to, MPI_Comm comm), from, n,
        type, to, m, type_to, comm)

int poll(struct pollfd *files, nfds_t count, int ms) {
    int result = NEXT(poll)(files, count, ms);
    if (most && ms != 0 && gettid() != getpid()) sleep_up_to(100 * most); // 0: the watchdog looks at a launcher
    return result;
}

typedef struct {
    void *(*run)(void *argument);
    void *argument;
} Start;

static void *delayed_thread(void *start) {
    const Start s = *(Start *)start;
    free(start);
    delay();
    void *result = s.run(s.argument);
    delay();
    return result;
}

int pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*run)(void *), void *argument) {
    Start *start = malloc(sizeof *start);
    *start = (Start){run, argument};
    return NEXT(pthread_create)(thread, attributes, delayed_thread, start);
}

__attribute__((constructor)) static void begin(void) {
    if (getenv("OMPI_COMM_WORLD_RANK")) most = (unsigned)atoi(getenv("DELAYS_MOST"));
}
