// cores: a library to preload (LD_PRELOAD) into ranks that are to find themselves on another machine: one of CORES cores,
// of which whatever started them may use the first CORES_HERE, and local rank i those that the i-th range of CORES_OF
// names, or the last one: "0-3,4-7". For test_machines.sh.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

int sched_getaffinity(pid_t process, size_t bytes, cpu_set_t *set) {
    int first = 0, last = atoi(getenv("CORES_HERE")) - 1;
    const char *ranges = getenv("CORES_OF"), *rank = getenv("OMPI_COMM_WORLD_LOCAL_RANK");
    for (int i = rank ? atoi(rank) : 0; i > 0 && strchr(ranges, ','); i--) ranges = strchr(ranges, ',') + 1;
    if (process != getppid() && sscanf(ranges, "%d-%d", &first, &last) != 2) abort();
    CPU_ZERO_S(bytes, set);
    for (int core = first; core <= last; core++) CPU_SET_S((size_t)core, bytes, set);
    return 0;
}

long sysconf(int name) {
    long (*next)(int) = (long (*)(int))dlsym(RTLD_NEXT, "sysconf");
    return name == _SC_NPROCESSORS_ONLN ? atol(getenv("CORES")) : next(name);
}
