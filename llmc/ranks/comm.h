// comm: the processes (ranks) that train one model together: one alone, or as many as mpirun or srun started, which talk
// through MPI. This is for control: small data in host memory, and every call waits. Gradients and weights go by
// transport.h.
//
// All ranks call the collective functions below in the same order. They return an error of MPI as ERR_RANK. Sums are
// taken in the order of the ranks, in double: every rank has the same bits.
#pragma once

#include "ranks/watchdog.h"

GNS_C_BEGIN

enum { COMM_HOST = 65 }; // bytes of a machine's name, with its NUL

// Where this rank may run, in cores (hardware threads).
typedef struct {
    int mine;    // of this rank: mpirun and srun may bind it to some
    int sharers; // ranks of this machine, this one included, that may run on some of these
    int here;    // of the launcher of this machine's ranks
} CommCores;

typedef struct {
    int rank, ranks;
    int local_rank, local_ranks; // among those on this machine: picks the GPU, and shares the cores
    char host[COMM_HOST];        // this machine's name; "": all ranks are on it
    CommCores cores;
    double beat_at;    // time of rank 0's last heartbeat, seconds of the clock
    Error beat_failed; // code 0, or why that heartbeat failed: the next broadcast returns it
    bool settled;      // all ranks know the error under way, and `speaker` reports it
    int speaker;
    Watchdog *watchdog; // NULL: one process
} Comm;

// Timeouts, by phase: the longest time without progress.
typedef struct {
    double setup, step, checkpoint; // seconds
} CommDeadlines;

// Joins the other processes where mpirun or srun started several; otherwise does not touch MPI.
int comm_create(Comm *comm, const CommDeadlines *deadlines, Error *e);

// Several processes that know nothing of each other would all write the same run. ERR_USAGE where this is one of several
// that cannot talk: a build without MPI, or a launcher that Open MPI does not understand.
int comm_refuse_strangers(const Comm *comm, Error *e);

// The end of the program: prints the error's line, if there is one, and returns the exit code. An error that all ranks
// know (settled) ends each of them. Any other ends the whole job from here, and this does not return.
int comm_finish(Comm *comm, const Error *e);

// The deadline of this phase counts from here on; every micro-batch and every collective restarts it.
void comm_phase(Comm *comm, WatchdogPhase phase, int64_t step);
void comm_progress(Comm *comm);

// From rank 0 to all.
int comm_broadcast(Comm *comm, void *data, size_t bytes, Error *e);

// Every rank's `bytes` bytes, in rank order. all: (ranks, bytes)
int comm_gather(Comm *comm, const void *mine, void *all, size_t bytes, Error *e);

// values[i] = sum over ranks.
int comm_sum(Comm *comm, double *values, int count, Error *e);

int comm_barrier(Comm *comm, Error *e);

// Rank 0 may work alone for any time, as long as it makes progress: the others wait in comm_wait_first, which rank 0 calls
// when it is done. Until then comm_beat is its pulse: it restarts their deadline.
int comm_wait_first(Comm *comm, Error *e);
void comm_beat(void *comm);

// The same where the others wait in another comm_broadcast of rank 0: sends them `word` of `bytes` bytes, which says to
// keep waiting, at most twice a second. The next broadcast returns a failure of it.
void comm_put_off(Comm *comm, void *word, size_t bytes);

// Between two ranks.
int comm_send(Comm *comm, int to, const void *data, size_t bytes, Error *e);
int comm_receive(Comm *comm, int from, void *data, size_t bytes, Error *e);

// 0 if all ranks come with code 0. Otherwise the error becomes settled: the lowest rank that has one reports it.
int comm_agree(Comm *comm, int code, Error *e);

// The machine of each rank. *hosts: (ranks) names, "" where there is one machine; from memory_alloc. comm_name prints "3",
// or "3 on node05".
int comm_hosts(Comm *comm, char (**hosts)[COMM_HOST], Error *e);
int comm_name(char *out, size_t bytes, int rank, char (*hosts)[COMM_HOST]);

// 0 if all ranks have the same hash (hash_bytes). Otherwise a settled error that names a rank that differs from rank 0.
int comm_same(Comm *comm, uint64_t hash, int code, const char *what, const char *hint, Error *e);

// The same of the program's bytes.
int comm_same_build(Comm *comm, Error *e);

// Is this one of several ranks that a launcher starts? Known before comm_create.
bool comm_launched(void);

// Default number of CPU threads of this rank; 0 for a single process: all.
int comm_threads(const Comm *comm);

// True if a launcher bound this rank to fewer cores than its share of those here.
bool comm_is_bound(const Comm *comm);

// For an error that every rank meets alike, in the same words (a loss that is not finite): rank 0 reports it.
void comm_settle(Comm *comm);

GNS_C_END
