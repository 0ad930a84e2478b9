// comm: the processes (ranks) that train one model together. One process alone, or as many as mpirun or srun started,
// talking through MPI. What is here is control: small, in host memory, and it waits. Gradients and weights travel by
// transport.h.
//
// All ranks call the collective functions below in the same order. They return an error of MPI as ERR_RANK; sums are
// taken in the order of the ranks, in double, so that every rank has the same bits.
#ifndef GNS_COMM_H
#define GNS_COMM_H

#include "ranks/watchdog.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { COMM_HOST = 65 }; // bytes of a machine's name, with its NUL

// Where this rank may run. A core, here, is what runs a thread.
typedef struct {
    int mine;    // cores that it is let onto: mpirun and srun may bind it to some
    int sharers; // ranks of this machine, itself included, that are let onto some of them
    int here;    // cores of whatever started the ranks of this machine, as far as a rank could run on them
} CommCores;

typedef struct {
    int rank, ranks;
    int local_rank, local_ranks; // among those on this machine: picks the GPU, and shares the cores
    char host[COMM_HOST];        // this machine's name; "": all ranks are on it
    CommCores cores;
    double beat_at;    // when rank 0 told the others last that it gets on, seconds of the clock
    Error beat_failed; // code 0, or why it could not: the next broadcast fails of that
    bool settled;      // the error under way is known to all ranks, and `speaker` tells it
    int speaker;
    Watchdog *watchdog; // NULL: one process
} Comm;

// What may pass without anything getting on.
typedef struct {
    double setup, step, checkpoint; // seconds
} CommDeadlines;

// Joins the other processes where mpirun or srun started several; otherwise MPI is not even touched.
int comm_create(Comm *comm, const CommDeadlines *deadlines, Error *e);

// Several processes that know nothing of each other would all write the same run. ERR_USAGE where this one was started as
// one of several that cannot talk: no MPI in this build, or a launcher that is none of Open MPI's kind.
int comm_refuse_strangers(const Comm *comm, Error *e);

// The end of the program: tells e's line where there is one, and returns the exit code. An error that the other ranks
// know of (settled) ends all alike; with any other the whole job is ended from here, and this does not return.
int comm_finish(Comm *comm, const Error *e);

// From here on the deadline of this phase counts; and every micro-batch, collective and the like starts it anew.
void comm_phase(Comm *comm, WatchdogPhase phase, int64_t step);
void comm_progress(Comm *comm);

// From rank 0 to all.
int comm_broadcast(Comm *comm, void *data, size_t bytes, Error *e);

// Every rank's `bytes` bytes, in rank order. all: (ranks, bytes)
int comm_gather(Comm *comm, const void *mine, void *all, size_t bytes, Error *e);

// values[i] = sum over ranks.
int comm_sum(Comm *comm, double *values, int count, Error *e);

int comm_barrier(Comm *comm, Error *e);

// What rank 0 does alone may take as long as it likes, as long as it gets on: the others wait for it in comm_wait_first,
// to which it comes when it is done. Until then comm_beat is its pulse, and starts their deadline anew.
int comm_wait_first(Comm *comm, Error *e);
void comm_beat(void *comm);

// The same where the others wait for something else of rank 0 by comm_broadcast: a piece is done, and they get a word of
// so many bytes that puts them off, twice a second at most. What fails of it the next broadcast tells.
void comm_put_off(Comm *comm, void *word, size_t bytes);

// Between two ranks.
int comm_send(Comm *comm, int to, const void *data, size_t bytes, Error *e);
int comm_receive(Comm *comm, int from, void *data, size_t bytes, Error *e);

// Did all ranks get here with code 0? Otherwise the error becomes settled: the lowest rank that has one tells it.
int comm_agree(Comm *comm, int code, Error *e);

// Which machine each rank is on, for those who are to go there. *hosts: (ranks) names, "" where there is but one machine;
// from memory_alloc. comm_name prints "3", or "3 on node05".
int comm_hosts(Comm *comm, char (**hosts)[COMM_HOST], Error *e);
int comm_name(char *out, size_t bytes, int rank, char (*hosts)[COMM_HOST]);

// Have all ranks the same hash (hash_bytes)? Otherwise a settled error that names the first rank that differs from rank 0.
int comm_same(Comm *comm, uint64_t hash, int code, const char *what, const char *hint, Error *e);

// Do all ranks run the same program, byte for byte?
int comm_same_build(Comm *comm, Error *e);

// CPU threads for this rank, where nobody says how many; 0 for a single process: as it likes.
int comm_threads(const Comm *comm);

// Has a launcher bound this rank to fewer cores than its share of those here?
bool comm_is_bound(const Comm *comm);

// An error that every rank runs into alike, and with the same words (a loss that is not finite): rank 0 tells it.
void comm_settle(Comm *comm);

#ifdef __cplusplus
}
#endif
#endif
