// open_mpi: workarounds for two actions of Open MPI's own threads. MPI has no call for them; PMIx, on which Open MPI is
// built, has. No-ops without libpmix (GNS_PMIX), and without effect where Open MPI uses a PMIx of its own.
#pragma once

#include "base/common.h"

GNS_C_BEGIN

// After MPI_Init: makes a broken connection to mpirun a request to stop (base/signals.h). Open MPI would end this process at
// once.
void open_mpi_survive(void);

// Before MPI_Finalize: waits, ten seconds at most, until Open MPI's threads are idle. MPI_Init leaves a notification to a
// thread, and MPI_Finalize unloads the thread's code before it ends the thread (4.1.4, rte_finalize). In a run that ends
// soon after its start, the thread may only then handle it and jump into unmapped memory: SIGSEGV.
void open_mpi_settle(void);

GNS_C_END
