// yield: a library to preload (LD_PRELOAD) into ranks that share few cores: one that waits sleeps, rather than poll
// with sched_yield (OMPI_MCA_mpi_yield_when_idle=1), which takes a core from the ranks and tests that compute.
#define _GNU_SOURCE
#include <sched.h>
#include <time.h>

int sched_yield(void) { return nanosleep(&(struct timespec){.tv_nsec = 20000}, NULL); }
