// open_mpi: workarounds for two actions of Open MPI's own threads. MPI has no call for them; PMIx, on which Open MPI is
// built, has. Without libpmix (GNS_PMIX), or where Open MPI uses a PMIx of its own, these functions do nothing.
#pragma once

#include "base/common.h"

GNS_C_BEGIN

// To be called after MPI_Init. When the connection to mpirun breaks, Open MPI would end this process at once; from here on
// the process is asked to stop instead (base/signals.h).
void open_mpi_survive(void);

// To be called before MPI_Finalize: waits, for ten seconds at most, until Open MPI's threads are idle. MPI_Init leaves a
// notification to a thread, and MPI_Finalize unloads the code for it before it ends the thread (4.1.4, rte_finalize). In a
// run that ends soon after its start, the thread may only then handle it, by a jump into unmapped memory: SIGSEGV.
void open_mpi_settle(void);

GNS_C_END
