// yield: a library to preload (LD_PRELOAD) into ranks that share few cores; dev/test/trainer.h includes it. A
// waiting rank polls with sched_yield (OMPI_MCA_mpi_yield_when_idle=1). This sched_yield sleeps, which leaves the
// cores to ranks that compute.
#include <sched.h>
#include <time.h>

int sched_yield(void) { return nanosleep(&(struct timespec){.tv_nsec = 200000}, NULL); }
