// cores: a library to preload (LD_PRELOAD) into ranks that are to find themselves on another machine: one of CORES cores,
// of which whatever started them may use the first CORES_HERE, and local rank i those that the i-th range of CORES_OF
// names, or the last one: "0-3,4-7". It may change that to any of the first CORES_MOST. For test_machines.sh.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static int first, last; // of this rank's own
static int widened;     // to what the one that started it may use

static void set_cores(int from, int to, cpu_set_t *set) {
    CPU_ZERO(set);
    for (int core = from; core <= to; core++) CPU_SET((size_t)core, set);
}

static int number(const char *name) { return atoi(getenv(name)); }

__attribute__((constructor)) static void begin(void) {
    const char *ranges = getenv("CORES_OF"), *rank = getenv("OMPI_COMM_WORLD_LOCAL_RANK");
    for (int i = rank ? atoi(rank) : 0; i > 0 && strchr(ranges, ','); i--) ranges = strchr(ranges, ',') + 1;
    if (sscanf(ranges, "%d-%d", &first, &last) != 2) abort();
}

int sched_getaffinity(pid_t process, size_t bytes, cpu_set_t *set) {
    int here = number("CORES_HERE"), most = number("CORES_MOST");
    if (bytes != sizeof *set) return -1;
    if (process == getppid()) set_cores(0, here - 1, set);
    else if (widened) set_cores(0, (here < most ? here : most) - 1, set);
    else set_cores(first, last, set);
    return 0;
}

// MPI looks at the true machine by way of this, and is none of our business.
int sched_setaffinity(pid_t process, size_t bytes, const cpu_set_t *set) {
    cpu_set_t here, mine;
    set_cores(0, number("CORES_HERE") - 1, &here);
    set_cores(first, last, &mine);
    if (process != 0 || bytes != sizeof here) return -1;
    if (CPU_EQUAL(set, &here)) widened = 1;
    if (CPU_EQUAL(set, &mine)) widened = 0;
    return 0;
}

long sysconf(int name) {
    long (*next)(int) = (long (*)(int))dlsym(RTLD_NEXT, "sysconf");
    return name == _SC_NPROCESSORS_ONLN ? atol(getenv("CORES")) : next(name);
}
