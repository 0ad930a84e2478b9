// fault: a library to preload (LD_PRELOAD) into the ranks of a run. For test_faults.sh and others.
//
// Rank FAULT_RANK only:
//   FAULT_ACTION  kill, stop, exit:CODE, hang (in the next computation), slow (in every computation), or ask (SIGUSR1
//                 just before joining MPI)
//   FAULT_AFTER   seconds from the start to the action (0: act before main); +SECONDS: from joining MPI; #N: act in
//                 computation number N
// Every rank:
//   FAULT_FSYNC   seconds that a stand-in for fsync sleeps
//   FAULT_FLUSH   seconds added to each line of output
//   FAULT_READ    seconds added to each read of a checkpoint's JSON files
//   FAULT_READS   prefix of log files, one per rank, with a line for each read of a checkpoint: bytes and path
//   FAULT_SAVING  at a checkpoint's first fsync: "ask" (SIGUSR1) or "hang"
//   FAULT_ZERO    seconds by which each long memset of a thread but the first begins late
//   FAULT_STARVE  seconds that Open MPI's threads sleep after each poll, as on a busy machine
//   FAULT_HOST    the machine's name, with a number: ranks with different numbers share no memory
#define _GNU_SOURCE
#include <dlfcn.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name)) // the function that this library hides

// Read once, before threads start, since getenv beside MPI_Init's setenv may read freed memory.
static struct {
    const char *rank, *victim, *action, *after, *fsync, *flush, *read, *reads, *saving, *zero, *starve, *host;
} fault;

static void sleep_for(double seconds) {
    struct timespec wait = {(time_t)seconds, (long)(1e9 * (seconds - (double)(time_t)seconds))};
    nanosleep(&wait, NULL);
}

static volatile int hangs, slow;

static void *strike(void *action) {
    sleep_for(atof(fault.after));
    if (strcmp(action, "kill") == 0) kill(getpid(), SIGKILL);
    else if (strcmp(action, "hang") == 0) hangs = 1;
    else if (strcmp(action, "slow") == 0) slow = 1;
    else if (strcmp(action, "stop") == 0) kill(getpid(), SIGSTOP);
    else _exit(atoi(strchr(action, ':') + 1));
    return NULL;
}

static int is_victim(void) { return fault.rank && fault.victim && strcmp(fault.rank, fault.victim) == 0; }

void GOMP_parallel(void (*body)(void *), void *data, unsigned threads, unsigned flags) {
    static long computations;
    if (is_victim() && *fault.after == '#' && ++computations == atol(fault.after + 1)) strike((void *)fault.action);
    while (hangs) sleep_for(1);
    if (slow) sleep_for(0.01); // far longer than a step, even on a busy machine
    NEXT(GOMP_parallel)(body, data, threads, flags);
}

void *memset(void *to, int value, size_t bytes) {
    if (fault.zero && bytes > 1 << 14 && gettid() != getpid()) sleep_for(atof(fault.zero));
    for (volatile char *at = to; at < (char *)to + bytes; at++) *at = (char)value;
    return to;
}

static void strike_saving(int fd) {
    static int struck;
    char link[64], path[4096] = "";
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    if (struck || !fault.saving || readlink(link, path, sizeof path - 1) < 0 || !strstr(path, "/.step_")) return;
    struck = 1;
    if (strcmp(fault.saving, "ask") == 0) kill(getpid(), SIGUSR1);
    else sleep_for(1e6);
}

int fsync(int fd) {
    strike_saving(fd);
    if (!fault.fsync) return NEXT(fsync)(fd);
    sleep_for(atof(fault.fsync));
    return 0;
}

ssize_t pread(int fd, void *to, size_t bytes, off_t at) {
    char link[64], path[4096] = "", name[256];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    if ((!fault.read && !fault.reads) || readlink(link, path, sizeof path - 1) < 0 || !strstr(path, "/step_"))
        return NEXT(pread)(fd, to, bytes, at);
    if (fault.read && strstr(path, ".json")) sleep_for(atof(fault.read));
    if (fault.reads) {
        snprintf(name, sizeof name, "%s.%s", fault.reads, fault.rank);
        FILE *file = fopen(name, "a");
        fprintf(file, "%zu %s\n", bytes, path), fclose(file);
    }
    return NEXT(pread)(fd, to, bytes, at);
}

int fflush(FILE *file) {
    if (fault.flush && file == stdout) sleep_for(atof(fault.flush));
    return NEXT(fflush)(file);
}

int poll(struct pollfd *files, nfds_t count, int ms) {
    int code = NEXT(poll)(files, count, ms);
    if (fault.starve && gettid() != getpid()) sleep_for(atof(fault.starve));
    return code;
}

int gethostname(char *name, size_t bytes) {
    if (!fault.host) return NEXT(gethostname)(name, bytes);
    snprintf(name, bytes, "%s", fault.host);
    return 0;
}

int MPI_Comm_split(void *comm, int color, int key, void **out);
int MPI_Comm_split_type(void *comm, int type, int key, void *info, void **out) {
    if (!fault.host) return NEXT(MPI_Comm_split_type)(comm, type, key, info, out);
    return NEXT(MPI_Comm_split)(comm, atoi(fault.host + strcspn(fault.host, "0123456789")), key, out);
}

static void arm(void) {
    pthread_t thread;
    pthread_create(&thread, NULL, strike, (void *)fault.action);
}

int MPI_Init_thread(int *argc, char ***argv, int wanted, int *got) {
    if (is_victim() && strcmp(fault.action, "ask") == 0) raise(SIGUSR1);
    int code = NEXT(MPI_Init_thread)(argc, argv, wanted, got);
    if (is_victim() && *fault.after == '+') arm();
    return code;
}

__attribute__((constructor)) static void begin(void) {
    static const char *const names[] = {"OMPI_COMM_WORLD_RANK", "FAULT_RANK", "FAULT_ACTION", "FAULT_AFTER",  "FAULT_FSYNC",
                                        "FAULT_FLUSH",          "FAULT_READ", "FAULT_READS",  "FAULT_SAVING", "FAULT_ZERO",
                                        "FAULT_STARVE",         "FAULT_HOST"};
    for (int i = 0; i < 12; i++) {
        const char *value = getenv(names[i]);
        (&fault.rank)[i] = value ? strdup(value) : NULL; // `names` lists the fields in order
    }
    if (!is_victim() || strcmp(fault.action, "ask") == 0 || strchr("+#", *fault.after)) return;
    if (atof(fault.after) > 0) arm();
    else strike((void *)fault.action);
}
