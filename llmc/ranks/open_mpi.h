// open_mpi: what Open MPI's own threads do beside ours. MPI has no call for either; PMIx has, which Open MPI is built on.
// Without libpmix (GNS_PMIX), or where Open MPI brings a PMIx of its own, these do nothing.
#pragma once

#include "base/common.h"

GNS_C_BEGIN

// When the connection to mpirun breaks, Open MPI ends this process at once. From here on it does not: the process is asked
// to stop (base/signals.h). After MPI_Init.
void open_mpi_survive(void);

// Waits until Open MPI's threads have nothing to do, a few seconds at most. To be called before MPI_Finalize: MPI_Init
// leaves a notification to a thread, and MPI_Finalize unloads the code for it, then ends the thread (4.1.4, rte_finalize).
// A thread that has not run since jumps into memory that is gone: SIGSEGV, in a run that ends soon after its start.
void open_mpi_settle(void);

GNS_C_END
