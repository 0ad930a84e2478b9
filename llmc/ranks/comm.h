// comm: control messages between the ranks by MPI, small (MPI counts bytes in int) and in host memory. Calls block.
// Gradients and weights travel by transport.h. All ranks call the collectives in the same order. Sums are in double, in
// the order of the ranks, so every rank gets the same bits.
#pragma once

#include "ranks/watchdog.h"

GNS_C_BEGIN

enum { COMM_HOST = 65 }; // bytes of a machine's name, with its NUL

typedef struct {
    int rank, ranks;
    int local_rank, local_ranks; // rank and ranks on this machine; these ranks divide the machine's GPUs and cores
    char host[COMM_HOST];        // this machine's name; "": all ranks are on it
    int cores;                   // cores that this rank may run on: mpirun and srun may bind ranks to cores
    int cores_here;              // cores that the launcher on this machine may run on
    bool settled;                // all ranks know the error that they return; `speaker` prints it
    int speaker;
    Watchdog *watchdog; // NULL: one process
    int launcher;       // process that started this rank: mpirun, or a daemon of Open MPI or Slurm. 0: no launcher
} Comm;

// Joins the other ranks if mpirun or srun started several; otherwise does not touch MPI. deadline: watchdog.h.
int comm_create(Comm *comm, double deadline, Error *e);

// ERR_USAGE if this is one of several processes that cannot communicate: a build without MPI, or a launcher that Open
// MPI does not understand.
int comm_check_launch(const Comm *comm, Error *e);

// True if this rank was asked to stop (base/signals.h) or its launcher is gone. Other ranks may not know it.
bool comm_asked_to_stop(const Comm *comm);

// Call after comm_create; no-op in a single process. A broken connection to mpirun is then a request to stop
// (base/signals.h). Without this call Open MPI ends this process at once.
void open_mpi_survive(void);

// Called before MPI_Finalize. Waits, ten seconds at most, until Open MPI's thread has handled the notifications that
// MPI_Init sent to it. Open MPI 4.1.4 unloads the thread's code before it ends the thread (rte_finalize): in a run that
// ends soon after its start, the thread would jump into unmapped memory.
void open_mpi_settle(void);

// Last call of the program: prints the error's line, if any, and returns the exit code. Each rank ends by itself if the
// error is settled or there is none. Any other error ends the whole job: the call does not return.
int comm_finish(Comm *comm, const Error *e);

// comm_progress and every collective restart the phase's deadline.
static inline void comm_phase(Comm *comm, WatchdogPhase phase, int64_t step) {
    watchdog_phase(comm->watchdog, phase, step);
}
static inline void comm_progress(void *comm) { watchdog_progress(((Comm *)comm)->watchdog); }

int comm_broadcast(Comm *comm, void *data, size_t bytes, Error *e); // copies rank 0's data to all ranks

// Copies `mine` of every rank to `all` (ranks, bytes).
int comm_gather(Comm *comm, const void *mine, void *all, size_t bytes, Error *e);

// Sends n values to rank `to`, and receives m values from rank `from`. No message is sent for 0 values.
int comm_swap(Comm *comm, const float *sent, size_t n, int to, float *received, size_t m, int from, Error *e);

// Reduces values over the ranks: the first `sums` values become sums, the next `maxima` values become maxima (NaN if
// any is). least: the smallest values[0] of any rank, and the lowest rank that has this value; may be NULL.
typedef struct {
    int rank;
    double value;
} CommLeast;
int comm_reduce(Comm *comm, double *values, int sums, int maxima, CommLeast *least, Error *e);
static inline int comm_sum(Comm *comm, double *values, int count, Error *e) {
    return comm_reduce(comm, values, count, 0, NULL, e);
}

// Rank 0 may work alone for any time while other ranks wait in comm_wait_first. After each piece of work rank 0 calls
// comm_beat, which restarts the other ranks' deadline; at the end it calls comm_wait_first. help: what the other ranks
// do when rank 0 sends COMM_HELP; NULL if it never does.
int comm_wait_first(Comm *comm, int (*help)(void *context, Error *e), void *context, Error *e);
void comm_beat(void *comm);
enum { COMM_DONE, COMM_WAIT, COMM_HELP }; // rank 0's messages to the ranks in comm_wait_first

// Returns 0 if `code` is 0 on all ranks. Otherwise the error becomes settled: the lowest rank with an error prints it.
int comm_agree(Comm *comm, int code, Error *e);

// Sets *error on all ranks to the error of the lowest rank with an error, and names that rank in it.
int comm_lowest_error(Comm *comm, Error *error, Error *e);

// A class is the ranks of equal rank modulo `classes`. Compares each rank's hash (hash_bytes) with the hash of its
// class's first rank. Returns 0 if none differs. Otherwise settles an error, which the lowest differing rank prints.
int comm_same(Comm *comm, uint64_t hash, int classes, int code, const char *what, const char *hint, Error *e);

// Returns the default number of this rank's CPU threads, within the CPU quota. 0: OpenMP's, if alone on its machine.
int comm_threads(const Comm *comm);

// True if a launcher bound this rank to fewer cores than its even share of this machine's cores.
bool comm_is_bound(const Comm *comm);

// Settles an error that every rank finds by itself, with equal text (a loss that is not finite). Rank 0 prints it.
static inline void comm_settle(Comm *comm) { comm->settled = true, comm->speaker = 0; }

GNS_C_END
