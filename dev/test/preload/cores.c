// cores: a library to preload (LD_PRELOAD) into ranks; fakes sched_getaffinity. A rank's parent sees the first
// CORES_HERE cores. Local rank i sees the i-th range of CORES_OF ("0-3,4-7"), or the last range if there are fewer. For
// test_machines.sh.
#define _GNU_SOURCE
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static int first, last; // cores of this rank
static int here;

static void set_cores(int from, int to, cpu_set_t *set) {
    CPU_ZERO(set);
    for (int core = from; core <= to; core++) CPU_SET((size_t)core, set);
}

__attribute__((constructor)) static void begin(void) {
    const char *ranges = getenv("CORES_OF"), *rank = getenv("OMPI_COMM_WORLD_LOCAL_RANK");
    for (int i = rank ? atoi(rank) : 0; i > 0 && strchr(ranges, ','); i--) ranges = strchr(ranges, ',') + 1;
    if (sscanf(ranges, "%d-%d", &first, &last) != 2) abort();
    here = atoi(getenv("CORES_HERE"));
}

int sched_getaffinity(pid_t process, size_t bytes, cpu_set_t *set) {
    if (bytes != sizeof *set) return -1;
    if (process == getppid()) set_cores(0, here - 1, set);
    else set_cores(first, last, set);
    return 0;
}
