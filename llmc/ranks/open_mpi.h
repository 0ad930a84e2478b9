// open_mpi: works around two actions of Open MPI's threads, with calls of PMIx, the library below Open MPI. MPI itself
// has no such calls. No-ops without libpmix (GNS_PMIX). Without effect where Open MPI uses a PMIx of its own.
#pragma once

#include "base/common.h"

// Call after MPI_Init; no-op in a single process. A broken connection to mpirun is then a request to stop
// (base/signals.h). Without this call Open MPI ends this process at once.
void open_mpi_survive(void);

// Call before MPI_Finalize. Waits, ten seconds at most, until Open MPI's thread has handled the notifications that
// MPI_Init sent to it. Open MPI 4.1.4 unloads the thread's code before it ends the thread (rte_finalize): in a run that
// ends soon after its start, the thread would jump into unmapped memory.
void open_mpi_settle(void);
