#define _GNU_SOURCE // sched_getaffinity
#include "ranks/comm.h"
#include "base/signals.h"
#include "base/thread.h"

#include <assert.h>
#include <fcntl.h>
#include <math.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#ifdef GNS_MPI
#    include "ranks/mpi_check.h"
#else // one process: MPI is never called
#    define MPI_TRY(call, e) assert(!"MPI"), (void)(e)
#endif

// ---- Who started us -------------------------------------------------------------------------------------------------

static int environment_int(const char *name, int otherwise) {
    const char *text = getenv(name);
    return text ? atoi(text) : otherwise;
}

// True if a launcher started this process as one of several ranks. Open MPI's mpirun sets the number of ranks. srun
// --mpi=pmix does not, so the function assumes 2 until MPI_Init tells.
static bool launched(void) { return environment_int("OMPI_COMM_WORLD_SIZE", getenv("PMIX_RANK") ? 2 : 1) > 1; }

// Returns the number of cores (hardware threads) that a process may run on. On a machine with more cores than a
// cpu_set_t holds, returns the number of all cores.
static int cores_of(pid_t process) {
    cpu_set_t set;
    return sched_getaffinity(process, sizeof set, &set) == 0 ? CPU_COUNT(&set) : (int)sysconf(_SC_NPROCESSORS_ONLN);
}

// True if the launcher is gone; then also requests a stop. Checks the parent process. If the parent is a shell between
// launcher and rank, only PMIx notices (open_mpi.c).
static bool is_orphan(const Comm *comm) {
    if (comm->launcher && getppid() != comm->launcher) signals_orphaned("the launcher is gone");
    return signals_is_orphan();
}

#ifdef GNS_MPI

// ---- MPI ------------------------------------------------------------------------------------------------------------

static bool mpi_runs(void) {
    int started = 0, ended = 0;
    MPI_Initialized(&started);
    MPI_Finalized(&ended);
    return started && !ended;
}

// Opens the board of this machine's watchdogs, a file in the launcher's directory for this job. The first caller
// creates the board, before MPI starts, so that the watchdogs can name a rank that hangs in MPI's own start. The
// launcher removes the directory, however the job ends. Returns NULL without that directory; then no rank is named.
static WatchdogEntry *board_open(int rank, int ranks) {
    const char *job = getenv("PMIX_NAMESPACE"), *directory = getenv("PMIX_SERVER_TMPDIR");
    char path[512];
    if (!directory || !job || rank >= ranks) return NULL;
    int n = snprintf(path, sizeof path, "%s/gns_ranks.%s", directory, job);
    int fd = n < (int)sizeof path ? open(path, O_CREAT | O_RDWR | O_NOFOLLOW | O_CLOEXEC, 0600) : -1;
    if (fd < 0) return NULL;
    size_t bytes = watchdog_board_bytes(ranks);
    void *memory = MAP_FAILED;
    if (posix_fallocate(fd, 0, (off_t)bytes) == 0)
        memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    return memory == MAP_FAILED ? NULL : memory;
}

static void abort_job(int code) {
    if (mpi_runs()) MPI_Abort(MPI_COMM_WORLD, code);
    _exit(code); // mpirun, and srun --kill-on-bad-exit, end the other ranks
}

// Joins the other ranks. Before MPI starts, only the launcher's variables tell `rank` and `ranks`; ranks 0: unknown.
static int join(Comm *comm, double deadline, Error *e) {
    int rank = environment_int("OMPI_COMM_WORLD_RANK", environment_int("PMIX_RANK", 0));
    int ranks = environment_int("OMPI_COMM_WORLD_SIZE", environment_int("SLURM_STEP_NUM_TASKS", 0));
    int machines = environment_int("SLURM_STEP_NUM_NODES", 0);
    int here = environment_int("OMPI_COMM_WORLD_LOCAL_SIZE", machines == 1 ? ranks : 0); // ranks on this machine
    if ((here ? here < ranks : machines > 1) && gethostname(comm->host, COMM_HOST) != 0) *comm->host = 0;
    comm->host[COMM_HOST - 1] = 0; // gethostname may cut a name and omit the NUL
    WatchdogConfig watchdog = {
        .rank = rank,
        .ranks = ranks > 1 ? ranks : 2, // a lower bound, until watchdog_join
        .here = here,
        .host = comm->host,
        .board = board_open(rank, ranks),
        .deadline = deadline,
        .end = abort_job,
        .launcher = comm->launcher,
    };
    TRY(watchdog_create(&comm->watchdog, &watchdog, e));
    watchdog_begin(comm->watchdog, "start of MPI");
    MPI_Comm local; // this machine's ranks
    int got;
    MPI_TRY(MPI_Init_thread(NULL, NULL, MPI_THREAD_SERIALIZED, &got), e); // the watchdog's thread may call MPI_Abort
    MPI_TRY(MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN), e);
    MPI_TRY(MPI_Comm_rank(MPI_COMM_WORLD, &comm->rank), e);
    MPI_TRY(MPI_Comm_size(MPI_COMM_WORLD, &comm->ranks), e);
    if (comm->ranks == 1) { // no other rank waits, so slow work is no hang
        watchdog_destroy(comm->watchdog);
        comm->watchdog = NULL;
    }
    watchdog_join(comm->watchdog, comm->rank, comm->ranks);
    watchdog_begin(comm->watchdog, "grouping of ranks by machine");
    MPI_TRY(MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, comm->rank, MPI_INFO_NULL, &local), e);
    MPI_TRY(MPI_Comm_rank(local, &comm->local_rank), e);
    MPI_TRY(MPI_Comm_size(local, &comm->local_ranks), e);
    MPI_TRY(MPI_Comm_free(&local), e);
    return 0;
}

#endif

// ---- Begin, end, and the collectives that MPI has -------------------------------------------------------------------

int comm_create(Comm *comm, double deadline, Error *e) {
    *comm = (Comm){.ranks = 1, .local_ranks = 1, .cores = cores_of(0), .cores_here = cores_of(getppid())};
    if (getenv("OMPI_COMM_WORLD_RANK") || getenv("PMIX_RANK")) comm->launcher = (int)getppid();
#ifdef GNS_MPI
    if (launched()) return join(comm, deadline, e);
#endif
    return 0;
}

bool comm_asked_to_stop(const Comm *comm) { return is_orphan(comm) || signals_requested(); }

int comm_finish(Comm *comm, const Error *e) {
    bool reports = e->code && (!comm->settled || comm->speaker == comm->rank);
    int code = e->code;
    if (reports) error_print_on(e, comm->rank, comm->ranks, comm->host);
#ifdef GNS_MPI // steps 4 to 7 of the list at program_main (program.c)
    Error ending = {0};
    if (!mpi_runs()) return code;
    if (code && !comm->settled) abort_job(code);
    watchdog_begin(comm->watchdog, "end of MPI");
    int result = MPI_Barrier(MPI_COMM_WORLD);
    if (result == MPI_SUCCESS && !is_orphan(comm)) { // MPI_Finalize needs the launcher
        open_mpi_settle();
        result = MPI_Finalize();
    }
    if (result != MPI_SUCCESS && !code) {
        code = mpi_fail(result, "end of MPI", __FILE__, __LINE__, &ending);
        error_print_on(&ending, comm->rank, comm->ranks, comm->host);
    }
    watchdog_destroy(comm->watchdog);
    if (mpi_runs()) fflush(stdout), _exit(code);
#endif
    return code;
}

int comm_broadcast(Comm *comm, void *data, size_t bytes, Error *e) {
    watchdog_begin(comm->watchdog, "broadcast");
    if (comm->ranks > 1) MPI_TRY(MPI_Bcast(data, (int)bytes, MPI_BYTE, 0, MPI_COMM_WORLD), e);
    return 0;
}

int comm_gather(Comm *comm, const void *mine, void *all, size_t bytes, Error *e) {
    watchdog_begin(comm->watchdog, "gathering of sums");
    if (comm->ranks == 1) memcpy(all, mine, bytes);
    else MPI_TRY(MPI_Allgather(mine, (int)bytes, MPI_BYTE, all, (int)bytes, MPI_BYTE, MPI_COMM_WORLD), e);
    return 0;
}

int comm_swap(Comm *comm, const float *sent, size_t n, int to, float *received, size_t m, int from, Error *e) {
    watchdog_begin(comm->watchdog, "exchange of values");
    MPI_TRY(MPI_Sendrecv(sent, (int)n, MPI_FLOAT, n ? to : MPI_PROC_NULL, 0, received, (int)m, MPI_FLOAT,
                         m ? from : MPI_PROC_NULL, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE),
            e);
    return 0;
}

// ---- Functions built on these collectives ---------------------------------------------------------------------------

int comm_check_launch(const Comm *comm, Error *e) {
    static const char *const counts[] = {"SLURM_STEP_NUM_TASKS", "PMI_SIZE", "MV2_COMM_WORLD_SIZE"};
    if (comm->ranks > 1) return 0;
#ifdef GNS_NO_NCCL
    if (launched())
        return FAIL(e, ERR_USAGE, "install NCCL (libnccl-dev), or set NCCL_HOME=/path, and run make again",
                    "started as one of several processes, but this program was built without NCCL");
#elif !defined GNS_MPI
    if (launched())
        return FAIL(e, ERR_USAGE, "install Open MPI (libopenmpi-dev) and run make again",
                    "started as one of several processes, but this program was built without MPI");
#endif
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) {
        int processes = environment_int(counts[i], 1);
        if (processes < 2) continue;
        return FAIL(e, ERR_USAGE, "use mpirun of Open MPI, or srun --mpi=pmix",
                    "started as one of %d processes (%s), but not in a way that Open MPI understands", processes,
                    counts[i]);
    }
    return 0;
}

int comm_reduce(Comm *comm, double *values, int sums, int maxima, CommLeast *least, Error *e) {
    double *all; // (ranks, n)
    size_t n = (size_t)sums + (size_t)maxima;
    TRY(memory_alloc((void **)&all, sizeof(double) * n * (size_t)comm->ranks, "sums over the ranks", e));
    int code = comm_gather(comm, values, all, n * sizeof(double), e);
    if (!code) memcpy(values, all, n * sizeof(double));
    if (least && !code) *least = (CommLeast){0, all[0]};
    for (size_t r = 1; !code && r < (size_t)comm->ranks; r++) { // in the order of the ranks
        if (least && all[r * n] < least->value) *least = (CommLeast){(int)r, all[r * n]};
        for (size_t i = 0; i < n; i++) {
            const double x = all[r * n + i];
            if (i < (size_t)sums) values[i] += x;
            else if (x > values[i] || isnan(x)) values[i] = x;
        }
    }
    memory_free(all);
    return code;
}

int comm_wait_first(Comm *comm, int (*help)(void *context, Error *e), void *context, Error *e) {
    int word;
    do {
        word = comm->rank == 0 ? COMM_DONE : COMM_WAIT;
        TRY(comm_broadcast(comm, &word, sizeof word, e));
        if (word == COMM_HELP) TRY(help(context, e));
    } while (word != COMM_DONE);
    return 0;
}

void comm_beat(void *context) {
    Comm *comm = context;
    int word = COMM_WAIT;
    comm_progress(comm);
    if (comm->rank == 0) comm_broadcast(comm, &word, sizeof word, &(Error){0}); // after a failure the next call fails
}

int comm_agree(Comm *comm, int code, Error *e) {
    if (comm->ranks == 1 || comm->settled) return code;
    int codes[comm->ranks]; // no memory_alloc: a rank where it failed would leave other ranks waiting
    int failed = comm_gather(comm, &code, codes, sizeof code, e);
    for (int r = 0; !failed && r < comm->ranks; r++) {
        if (!codes[r]) continue;
        comm->settled = true;
        comm->speaker = r;
        failed = r == comm->rank ? code : FAIL(e, codes[r], NULL, "rank %d ended the run", r);
        break;
    }
    return failed;
}

int comm_lowest_error(Comm *comm, Error *error, Error *e) {
    Error all[comm->ranks]; // no memory_alloc, as in comm_agree
    TRY(comm_gather(comm, error, all, sizeof *error, e));
    for (int r = 0; r < comm->ranks; r++) {
        if (!all[r].code) continue;
        *error = all[r];
        if (comm->ranks > 1) error_prefix(error, "rank %d", r);
        if (comm->rank != r) error->file = NULL; // the pointer is valid on rank r only
        break;
    }
    return 0;
}

int comm_same(Comm *comm, uint64_t hash, int classes, int code, const char *what, const char *hint, Error *e) {
    const int other = comm->rank % classes;
    uint64_t all[comm->ranks];
    int failed = comm_gather(comm, &hash, all, sizeof hash, e);
    if (!failed && all[other] != hash) failed = FAIL(e, code, hint, "this rank has %s than rank %d", what, other);
    return comm_agree(comm, failed, e);
}

// ---- Cores ----------------------------------------------------------------------------------------------------------

// Returns each rank's share of `cores` on this machine, at least 1.
static int cores_each(const Comm *comm, int cores) { return cores > comm->local_ranks ? cores / comm->local_ranks : 1; }

int comm_threads(const Comm *comm) {
    int quota = thread_quota(""), share = cores_each(comm, quota < comm->cores_here ? quota : comm->cores_here);
    if (comm->local_ranks == 1) return getenv("OMP_NUM_THREADS") || quota > comm->cores ? 0 : quota;
    return comm->cores < share ? comm->cores : share;
}

bool comm_is_bound(const Comm *comm) {
    bool launched = comm->ranks > 1 || getenv("OMPI_COMM_WORLD_SIZE"); // mpirun -np 1 binds its one rank too
    return launched && comm->cores < cores_each(comm, comm->cores_here);
}
