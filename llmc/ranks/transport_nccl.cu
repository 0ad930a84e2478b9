// transport_nccl: transfers between GPUs by NCCL, set up over MPI.
//
// Two streams: the engine's stream runs kernels, `stream` runs transfers. With --tensor the engine's stream also
// exchanges rows of activations, through a communicator of its own.
//     engine   kernels of block l + 1 | engine_done | kernels of block l | wait for transfer n | its readers
//     stream              wait for engine_done | transfer n | ended
// 1. A transfer starts after all work queued before it on the engine's stream (after_engine).
// 2. Transfers run one after another, so they can share `rounded`.
// 3. nccl_wait_for makes the engine's stream wait, not the host; nccl_finish makes the host wait for all transfers.
// 4. A call that hands work to NCCL runs between watchdog_handing(true) and (false). The watchdog waits for the call's
//    end (1 s at most) before it aborts NCCL, and lets no later call begin: an aborted communicator gets no work.
#include "ranks/transport.h"
#include "cuda/device.cuh"
#include "cuda/vec.cuh"

#include <assert.h>
#include <nccl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

// Number of events: more than the transfers that a backward pass over 255 blocks starts. A wait on a reused event is
// too long, never too short.
enum { MARKS = 512 };

enum { WAITS = 2048 }; // how many of the engine stream's last waits are timed

struct Transport {
    Comm *comm;
    WireType wire;
    ncclComm_t nccl;             // all ranks
    ncclComm_t peers, group;     // ranks of equal t; ranks of equal d. Without --tensor: peers = shared, group NULL
    ncclComm_t shared, replicas; // --shard machine: a machine's ranks, owners of this rank's parts. Else: nccl, NULL
    cudaStream_t engine, stream; // engine: runs kernels; stream: runs transfers
    cudaEvent_t engine_done;     // recorded on `engine` before the last transfer
    cudaEvent_t ended[MARKS];    // ended[(n - 1) mod MARKS]: recorded after transfer n = 1, 2, ...
    int64_t started;             // number of transfers so far
    cudaEvent_t wait[WAITS][2];  // recorded on `engine` before and after a wait
    int64_t waits;               // waits since nccl_waited reported them
    __nv_bfloat16 *rounded;      // a bucket's gradients in bf16
    size_t largest;              // elements of the largest bucket
    Division division;
};

static int nccl_status(ncclResult_t result, ncclComm_t comm, const char *call, const char *file, int line, Error *e) {
    if (result == ncclSuccess) return 0;
    if (strstr(ncclGetLastError(comm), "out of memory")) // "Cuda failure 2 'out of memory'"
        return error_set(e, file, line, ERR_MEMORY, "use a smaller --micro-batch, or try NCCL_NVLS_ENABLE=0",
                         "out of GPU memory: NCCL needs more than was left to it (%.*s)", (int)strcspn(call, "("),
                         call);
    return error_set(e, file, line, ERR_RANK, "NCCL_DEBUG=INFO says more; look for the rank that failed first",
                     "%.*s: %s (%s)", (int)strcspn(call, "("), call, ncclGetErrorString(result),
                     ncclGetLastError(comm));
}
#define NCCL_CALL(call, t, e) nccl_status((call), (t)->nccl, #call, __FILE__, __LINE__, (e))
#define NCCL_TRY(call, t, e)  TRY(nccl_status((call), (t)->nccl, #call, __FILE__, __LINE__, (e)))

// ---- Which GPU ------------------------------------------------------------------------------------------------------

// A rank's GPU. machine: NCCL_HOSTID, else the kernel's boot id, since cloned machines may have one host name.
typedef struct {
    char machine[64], bus[32];
} GpuPlace;

// Refuses two ranks on one GPU, where they would compete for memory, and NCCL would hang or be slow. Ranks with
// different NCCL_HOSTID may share a GPU (dev/test/ranks_check.sh, MACHINES).
static int check_apart(Comm *comm, Error *e) {
    GpuPlace mine = {}, *all = NULL;
    int same = -1, device;
    const char *id = getenv("NCCL_HOSTID");
    FILE *f = id ? NULL : fopen("/proc/sys/kernel/random/boot_id", "r");
    if (id) snprintf(mine.machine, sizeof mine.machine, "%s", id);
    else if (!f || !fgets(mine.machine, sizeof mine.machine, f)) gethostname(mine.machine, 63);
    if (f) fclose(f);
    int code = CUDA_CALL(cudaGetDevice(&device), e);
    if (!code) code = CUDA_CALL(cudaDeviceGetPCIBusId(mine.bus, sizeof mine.bus, device), e);
    if (!code) code = memory_alloc((void **)&all, sizeof *all * (size_t)comm->ranks, "the ranks' GPUs", e);
    TRY(comm_agree(comm, code, e));
    code = comm_gather(comm, &mine, all, sizeof mine, e);
    for (int r = 0; !code && r < comm->ranks; r++)
        if (r != comm->rank && strcmp(all[r].machine, mine.machine) == 0 && strcmp(all[r].bus, mine.bus) == 0) same = r;
    memory_free(all);
    if (same >= 0)
        code = FAIL(e, ERR_UNAVAILABLE, "start one rank a GPU; give each container its own (docker run --gpus)",
                    "ranks %d and %d have the same GPU (%s)", comm->rank, same, mine.bus);
    return comm_agree(comm, code, e);
}

static int nccl_device(Comm *comm, Error *e) {
    int count = 0;
    if (comm->ranks == 1) return 0;
    int code = device_count(&count, e);
    // If one GPU is visible, the batch system may show each rank its own; check_apart verifies that.
    if (!code && count > 1 && comm->local_rank < count) code = device_take(comm->local_rank, e);
    if (!code && count > 1 && comm->local_rank >= count) {
        FAIL(e, ERR_UNAVAILABLE, NULL, "%d ranks on this machine, and %d GPUs", comm->local_ranks, count);
        code = error_hint(e, "use mpirun -np %d, or more machines", count);
    }
    TRY(comm_agree(comm, code, e));
    return check_apart(comm, e);
}

// ---- Set-up and end -------------------------------------------------------------------------------------------------

// Called by the watchdog's thread.
static int check_nccl(void *context, Error *e) {
    Transport *t = (Transport *)context;
    for (ncclComm_t comm : {t->nccl, t->peers, t->group, t->shared, t->replicas}) {
        ncclResult_t state = ncclSuccess;
        if (comm) NCCL_TRY(ncclCommGetAsyncError(comm, &state), t, e);
        if (state != ncclInProgress) TRY(nccl_status(state, comm, "NCCL", __FILE__, __LINE__, e));
    }
    return 0;
}

// Does not wait for other ranks, which may have ended.
static void abort_nccl(void *context) {
    Transport *t = (Transport *)context;
    const ncclComm_t peers = t->peers != t->shared ? t->peers : NULL, shared = t->shared != t->nccl ? t->shared : NULL;
    for (ncclComm_t comm : {t->group, peers, t->replicas, shared, t->nccl})
        if (comm) ncclCommAbort(comm);
}

static int start_nccl(Transport *t, Error *e) {
    const int rank = t->comm->rank, K = t->division.tensor, shared = t->division.ranks;
    ncclUniqueId id;
    // Kernels of two communicators may wait for each other: start them on every rank in the order of the calls.
    if (K > 1) setenv("NCCL_LAUNCH_ORDER_IMPLICIT", "1", 0);
    if (rank == 0) NCCL_TRY(ncclGetUniqueId(&id), t, e);
    TRY(comm_broadcast(t->comm, &id, sizeof id, e));
    watchdog_begin(t->comm->watchdog, "start of NCCL");
    NCCL_TRY(ncclCommInitRank(&t->nccl, t->comm->ranks, id, rank), t, e);
    t->shared = t->nccl;
    if (shared < t->comm->ranks) {
        t->shared = NULL;
        NCCL_TRY(ncclCommSplit(t->nccl, rank / shared, rank % shared, &t->shared, NULL), t, e);
        NCCL_TRY(ncclCommSplit(t->nccl, rank % shared, rank / shared, &t->replicas, NULL), t, e);
    }
    t->peers = t->shared;
    if (K > 1) {
        NCCL_TRY(ncclCommSplit(t->nccl, rank / K, rank % K, &t->group, NULL), t, e);
        t->peers = NULL;
        NCCL_TRY(ncclCommSplit(t->shared, rank % K, rank / K, &t->peers, NULL), t, e);
    }
    WatchdogDevice device = {check_nccl, abort_nccl, t};
    watchdog_device(t->comm->watchdog, &device);
    return 0;
}

static int nccl_create(Transport **out, Comm *comm, const Division *division, WireType wire, size_t largest,
                       void *stream, Error *e) {
    TRY(memory_alloc_zero((void **)out, sizeof(Transport), "transport", e));
    Transport *t = *out;
    int least, most; // priorities. Transfers get the highest, as they need few multiprocessors
    t->comm = comm;
    t->division = *division;
    t->wire = wire;
    t->largest = largest;
    t->engine = (cudaStream_t)stream;
    const size_t bytes = transport_buffer_bytes(wire, largest);
    const cudaError_t status = bytes ? cudaMalloc((void **)&t->rounded, bytes) : cudaSuccess;
    int code = CUDA_CALL(status, e);
    if (status == cudaErrorMemoryAllocation) {
        (void)cudaGetLastError(); // clears the failure, which the next launch would report
        code = FAIL(e, ERR_MEMORY, "use a smaller --micro-batch, or --comm-dtype fp32",
                    "out of GPU memory: --comm-dtype bf16 needs %.1f MiB for the transfer of gradients",
                    (double)bytes / (1 << 20));
    }
    TRY(comm_agree(comm, code, e));
    CUDA_TRY(cudaDeviceGetStreamPriorityRange(&least, &most), e);
    CUDA_TRY(cudaStreamCreateWithPriority(&t->stream, cudaStreamNonBlocking, most), e);
    CUDA_TRY(cudaEventCreateWithFlags(&t->engine_done, cudaEventDisableTiming), e);
    for (cudaEvent_t &ended : t->ended) CUDA_TRY(cudaEventCreateWithFlags(&ended, cudaEventDisableTiming), e);
    for (auto &wait : t->wait)
        for (cudaEvent_t &event : wait) CUDA_TRY(cudaEventCreateWithFlags(&event, cudaEventDefault), e);
    return start_nccl(t, e);
}

static void nccl_destroy(Transport *t) {
    watchdog_device(t->comm->watchdog, NULL);
    watchdog_wait(t->comm->watchdog, "end of NCCL"); // not counted as a collective: perhaps only this rank failed
    abort_nccl(t);
    if (t->rounded) cudaFree(t->rounded);
    for (cudaEvent_t ended : t->ended)
        if (ended) cudaEventDestroy(ended);
    for (const auto &wait : t->wait)
        for (cudaEvent_t event : wait)
            if (event) cudaEventDestroy(event);
    if (t->engine_done) cudaEventDestroy(t->engine_done);
    if (t->stream) cudaStreamDestroy(t->stream);
    memory_free(t);
}

// ---- Transfers ------------------------------------------------------------------------------------------------------

static int after_engine(Transport *t, Error *e) {
    watchdog_begin(t->comm->watchdog, TRANSPORT_WORK);
    CUDA_TRY(cudaEventRecord(t->engine_done, t->engine), e);
    CUDA_TRY(cudaStreamWaitEvent(t->stream, t->engine_done, 0), e);
    watchdog_handing(t->comm->watchdog, true);
    return 0;
}

static int work_started(Transport *t, int64_t *work, Error *e) {
    watchdog_handing(t->comm->watchdog, false);
    *work = ++t->started;
    return CUDA_CALL(cudaEventRecord(t->ended[(*work - 1) % MARKS], t->stream), e);
}

static int nccl_wait_for(Transport *t, int64_t work, Error *e) {
    watchdog_wait(t->comm->watchdog, TRANSPORT_WORK);
    if (work == 0) return 0;
    const auto &wait = t->wait[t->waits++ % WAITS];
    CUDA_TRY(cudaEventRecord(wait[0], t->engine), e);
    CUDA_TRY(cudaStreamWaitEvent(t->engine, t->ended[(work - 1) % MARKS], 0), e);
    return CUDA_CALL(cudaEventRecord(wait[1], t->engine), e);
}

// Ignores waits that the device has not ended.
static double nccl_waited(Transport *t) {
    double seconds = 0;
    for (int i = 0; i < WAITS && i < t->waits; i++) {
        float ms;
        if (cudaEventElapsedTime(&ms, t->wait[i][0], t->wait[i][1]) == cudaSuccess) seconds += 1e-3 * (double)ms;
        else (void)cudaGetLastError(); // clears the failure, which the next launch would report
    }
    t->waits = 0;
    return seconds;
}

static int nccl_finish(Transport *t, Error *e) {
    watchdog_wait(t->comm->watchdog, TRANSPORT_WORK);
    return CUDA_CALL(cudaStreamSynchronize(t->stream), e);
}

static ncclComm_t nccl_of(const Transport *t, Range bucket) { return bucket.begin == 0 ? t->shared : t->peers; }

// Returns the least number of elements in any rank's part of a bucket; 0 with Muon, whose parts are whole blocks.
static size_t each_elements(const Transport *t, Range bucket) {
    const bool unequal = t->division.uncut && bucket.begin > 0;
    return unequal ? 0 : range_length(division_part(&t->division, bucket, 0));
}

// Returns rank r's part without its first each_elements(bucket) elements.
static Range rest_of(const Transport *t, Range bucket, int r) {
    Range part = division_part(&t->division, bucket, r);
    part.begin += each_elements(t, bucket);
    return part;
}

static int reduce_scatter_type(Transport *t, void *values, size_t bytes, ncclDataType_t type, Range bucket, Error *e) {
    const ncclComm_t nccl = nccl_of(t, bucket);
    const size_t each = each_elements(t, bucket);
    char *own = (char *)values + each * (size_t)division_rank(&t->division, bucket) * bytes;
    NCCL_TRY(ncclGroupStart(), t, e);
    if (each) NCCL_TRY(ncclReduceScatter(values, own, each, type, ncclSum, nccl, t->stream), t, e);
    for (int r = 0; r < division_ranks(&t->division, bucket); r++) {
        const Range rest = rest_of(t, bucket, r);
        char *at = (char *)values + (rest.begin - bucket.begin) * bytes;
        if (range_length(rest))
            NCCL_TRY(ncclReduce(at, at, range_length(rest), type, ncclSum, r, nccl, t->stream), t, e);
    }
    NCCL_TRY(ncclGroupEnd(), t, e);
    const Range mine = division_part(&t->division, bucket, division_rank(&t->division, bucket));
    char *sums = (char *)values + (mine.begin - bucket.begin) * bytes;
    if (!t->replicas || !range_length(mine)) return 0;
    return NCCL_CALL(ncclAllReduce(sums, sums, range_length(mine), type, ncclSum, t->replicas, t->stream), t, e);
}

static int nccl_reduce_scatter(Transport *t, float *values, Range bucket, int64_t *work, Error *e) {
    TRY(after_engine(t, e));
    const bool rounds = t->wire == WIRE_BF16 && (t->replicas || division_ranks(&t->division, bucket) > 1);
    const Range mine = division_part(&t->division, bucket, division_rank(&t->division, bucket));
    const size_t all = range_length(bucket), own = range_length(mine), begin = mine.begin - bucket.begin;
    assert(all <= t->largest);
    if (rounds) TRY(convert(t->rounded, values, all, t->stream, e));
    if (rounds) TRY(reduce_scatter_type(t, t->rounded, sizeof *t->rounded, ncclBfloat16, bucket, e));
    else TRY(reduce_scatter_type(t, values, sizeof(float), ncclFloat32, bucket, e));
    if (rounds) TRY(convert(values + begin, t->rounded + begin, own, t->stream, e));
    return work_started(t, work, e);
}

static int nccl_all_gather(Transport *t, const void *own, void *values, size_t bytes, Range bucket, int64_t *work,
                           Error *e) {
    const ncclComm_t nccl = nccl_of(t, bucket);
    const size_t each = each_elements(t, bucket);
    TRY(after_engine(t, e));
    NCCL_TRY(ncclGroupStart(), t, e);
    if (each) NCCL_TRY(ncclAllGather(own, values, each * bytes, ncclInt8, nccl, t->stream), t, e);
    for (int r = 0; r < division_ranks(&t->division, bucket); r++) {
        const Range rest = rest_of(t, bucket, r);
        char *at = (char *)values + (rest.begin - bucket.begin) * bytes;
        const char *from = (const char *)own + each * bytes; // only rank r reads it
        if (range_length(rest))
            NCCL_TRY(ncclBroadcast(from, at, range_length(rest) * bytes, ncclInt8, r, nccl, t->stream), t, e);
    }
    NCCL_TRY(ncclGroupEnd(), t, e);
    return work_started(t, work, e);
}

static int nccl_sum(Transport *t, double *values, int count, Error *e) {
    int64_t work;
    TRY(after_engine(t, e));
    NCCL_TRY(ncclAllReduce(values, values, (size_t)count, ncclFloat64, ncclSum, t->nccl, t->stream), t, e);
    TRY(work_started(t, &work, e));
    return nccl_wait_for(t, work, e);
}

// ---- Rows of activations, on the engine's stream --------------------------------------------------------------------

// Exchanges rows of activations within the group, whose ranks may own different numbers of rows. received NULL: every
// rank gets all rows, in place. Otherwise `received` gets the other ranks' values for this rank's own rows, in the
// order of the ranks.
static int exchange_rows(Transport *t, real *x, real *received, int rows, size_t width, Dtype type, Error *e) {
    const int K = t->division.tensor, rank = t->comm->rank % K;
    const RankRows own = rows_of_rank(rows, rank, K);
    const size_t n = own.count * width;
    assert(type == REAL_DTYPE), (void)type;
    watchdog_begin(t->comm->watchdog, TRANSPORT_ROWS);
    watchdog_handing(t->comm->watchdog, true);
    NCCL_TRY(ncclGroupStart(), t, e);
    for (int r = 0, others = 0; r < K; r++) {
        const RankRows other = rows_of_rank(rows, r, K);
        const size_t m = other.count * width, sent = (received ? m : n) * sizeof(real);
        const size_t got = (received ? n : m) * sizeof(real);
        real *theirs = x + other.first * width;
        if (r == rank) continue;
        const real *from = received ? theirs : x + own.first * width;
        real *to = received ? received + others++ * n : theirs;
        if (sent) NCCL_TRY(ncclSend(from, sent, ncclInt8, r, t->group, t->engine), t, e);
        if (got) NCCL_TRY(ncclRecv(to, got, ncclInt8, r, t->group, t->engine), t, e);
    }
    NCCL_TRY(ncclGroupEnd(), t, e);
    watchdog_handing(t->comm->watchdog, false);
    return 0;
}

static int nccl_gather_rows(Transport *t, void *values, int rows, size_t width, Dtype type, Error *e) {
    return exchange_rows(t, (real *)values, NULL, rows, width, type, e);
}

// Adds the own part and the received parts, n values each, in the order of the ranks. Grid: any; W values at a time.
template <int W>
__global__ static void parts_kernel(real *out, const real *own, const real *received, int rank, int ranks, size_t n) {
    for (size_t i = (blockIdx.x * (size_t)blockDim.x + threadIdx.x) * W; i < n;
         i += (size_t)gridDim.x * blockDim.x * W) {
        float sum[W] = {}, x[W];
        for (int r = 0; r < ranks; r++) {
            pack_get(x, pack_load<W>((r == rank ? own : received + (r - (r > rank)) * n) + i));
            floats_add(sum, x);
        }
        pack_store(out + i, pack_of<W>(sum));
    }
}

static int nccl_reduce_rows(Transport *t, void *own, const void *partial, int rows, size_t width, Dtype type,
                            Error *e) {
    const int K = t->division.tensor, rank = t->comm->rank % K;
    const RankRows mine = rows_of_rank(rows, rank, K);
    const size_t n = mine.count * width;
    real *x = (real *)partial, *received = x + rows * width; // Engine.exchange has room behind the rows
    TRY(exchange_rows(t, x, received, rows, width, type, e));
    if (n == 0) return 0;
    return launch({FULL_BLOCKS, FULL_THREADS, t->engine}, e, width % VEC ? parts_kernel<1> : parts_kernel<VEC>,
                  (real *)own, x + mine.first * width, received, rank, K, n);
}

const TransportApi nccl_transport = {
    .device = nccl_device,
    .create = nccl_create,
    .destroy = nccl_destroy,
    .reduce_scatter = nccl_reduce_scatter,
    .all_gather = nccl_all_gather,
    .sum = nccl_sum,
    .gather_rows = nccl_gather_rows,
    .reduce_rows = nccl_reduce_rows,
    .wait_for = nccl_wait_for,
    .waited = nccl_waited,
    .finish = nccl_finish,
};
