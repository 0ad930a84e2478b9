// delays: a library to preload (LD_PRELOAD) into the ranks of a run. For test_faults.sh.
//
//   DELAYS_MOST   microseconds: every fourth call of those below sleeps for a random time up to this, before or after it;
//                 a thread of Open MPI up to 100 times as long after each poll
//   DELAYS_CRASH  a file to which a fatal signal appends its number, rank, address, memory map and stack
#define _GNU_SOURCE
#include <dlfcn.h>
#include <execinfo.h>
#include <fcntl.h>
#include <mpi.h>
#include <poll.h>
#include <pthread.h>
#include <semaphore.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

static unsigned most; // 0: no delays
static char crash[4096];
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

// A function that delays, calls the next one of its name, and delays.
#define DELAYED(name, parameters, ...)                                                                                 \
    int name parameters {                                                                                              \
        int(*next) parameters = (int(*) parameters)dlsym(RTLD_NEXT, #name);                                            \
        delay();                                                                                                       \
        int result = next(__VA_ARGS__);                                                                                \
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
    int (*next)(struct pollfd *, nfds_t, int) = (int (*)(struct pollfd *, nfds_t, int))dlsym(RTLD_NEXT, "poll");
    int result = next(files, count, ms);
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
    int (*next)(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *) =
        (int (*)(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *))dlsym(RTLD_NEXT, "pthread_create");
    Start *start = malloc(sizeof *start);
    *start = (Start){run, argument};
    return next(thread, attributes, delayed_thread, start);
}

// The stack comes last: of code that is no longer there it cannot be unwound.
static void report_crash(int signal_number, siginfo_t *info, void *context) {
    void *at[64];
    char maps[4096];
    int out = open(crash, O_CREAT | O_WRONLY | O_APPEND, 0600), in = open("/proc/self/maps", O_RDONLY);
    signal(signal_number, SIG_DFL);
    dprintf(out, "signal %d, rank %s, %s thread, at %p, address %p\n", signal_number, getenv("OMPI_COMM_WORLD_RANK"),
            gettid() == getpid() ? "main" : "another", (void *)((ucontext_t *)context)->uc_mcontext.gregs[REG_RIP],
            info->si_addr);
    for (ssize_t n; (n = read(in, maps, sizeof maps)) > 0;)
        if (write(out, maps, (size_t)n) < 0) break;
    backtrace_symbols_fd(at, backtrace(at, 64), out);
    raise(signal_number);
}

__attribute__((constructor)) static void begin(void) {
    static const int fatal[] = {SIGSEGV, SIGBUS, SIGABRT, SIGFPE, SIGILL};
    const struct sigaction report = {.sa_sigaction = report_crash, .sa_flags = SA_SIGINFO};
    void *at[1];
    if (!getenv("OMPI_COMM_WORLD_RANK")) return;
    most = (unsigned)atoi(getenv("DELAYS_MOST"));
    snprintf(crash, sizeof crash, "%s", getenv("DELAYS_CRASH"));
    backtrace(at, 1); // loads what it needs, which a handler may not
    for (size_t i = 0; i < sizeof fatal / sizeof *fatal; i++) sigaction(fatal[i], &report, NULL);
}
