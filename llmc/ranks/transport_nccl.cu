// transport between GPUs: NCCL, on a stream of its own so that it overlaps with the engine's. NCCL is set up over MPI.
#include "ranks/transport.h"
#include "cuda/device.cuh"

#include <assert.h>
#include <nccl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

// Events for the transfers that were begun last: more than a step has buckets. For one longer ago the event is a later
// transfer's, so that the wait is a little too long, and never too short.
enum { MARKS = 128 };

struct Transport {
    Comm *comm;
    WireType wire;
    ncclComm_t nccl;
    cudaStream_t engine, stream; // the engine's, and ours
    cudaEvent_t engine_done;     // where the engine's stream was when the last transfer began
    cudaEvent_t ended[MARKS];    // the end of transfer n is event n modulo MARKS
    int64_t started;             // transfers so far
    __nv_bfloat16 *rounded;      // a bucket's gradients in bf16; one bucket after the other, in the stream's order
    size_t largest;              // elements that it has room for
};

static int nccl_fail(ncclResult_t result, ncclComm_t comm, const char *call, const char *file, int line, Error *e) {
    return error_set(e, file, line, ERR_RANK, "NCCL_DEBUG=INFO says more; look for the rank that failed first",
                     "%.*s: %s (%s)", (int)strcspn(call, "("), call, ncclGetErrorString(result),
                     ncclGetLastError(comm));
}

#define NCCL_TRY(call, t, e)                                                                                           \
    do {                                                                                                               \
        ncclResult_t nccl_try_ = (call);                                                                               \
        if (nccl_try_ != ncclSuccess) return nccl_fail(nccl_try_, (t)->nccl, #call, __FILE__, __LINE__, (e));          \
    } while (0)

// ---------------------------------------------------------------------------------------------------------------------
// Which GPU

static int take_device(const Comm *comm, Error *e) {
    int count;
    TRY(device_count(&count, e));
    if (count == 1) return 0; // the batch system may show each rank its own; check_apart tells if not
    if (comm->local_rank < count) return device_take(comm->local_rank, e);
    FAIL(e, ERR_NO_GPU, NULL, "%d ranks on this machine, and %d GPUs", comm->local_ranks, count);
    return error_hint(e, "use mpirun -np %d, or more machines", count);
}

// Where a rank's GPU is. What one machine is goes by NCCL's own rule (getHostHash in its utils.cc): what NCCL_HOSTID
// says, else its name and the kernel's boot, since machines that are copies of each other have one name.
typedef struct {
    char host[64], boot[64], bus[32];
} Place;

static int find_place(Place *place, Error *e) {
    int device;
    const char *id = getenv("NCCL_HOSTID");
    *place = {};
    if (id) snprintf(place->host, sizeof place->host, "%s", id);
    else {
        gethostname(place->host, sizeof place->host - 1);
        FILE *f = fopen("/proc/sys/kernel/random/boot_id", "r");
        if (f) (void)!fread(place->boot, 1, sizeof place->boot - 1, f), fclose(f);
    }
    CUDA_TRY(cudaGetDevice(&device), e);
    return CUDA_CALL(cudaDeviceGetPCIBusId(place->bus, sizeof place->bus, device), e);
}

// Two ranks on one GPU would take each other's memory, and hang in NCCL or crawl. (Ranks that are to stand for several
// machines, each with an NCCL_HOSTID of its own, may: dev/test/ranks_check.sh, MACHINES.)
static int check_apart(Comm *comm, Error *e) {
    Place mine, *all;
    int same = -1;
    TRY(comm_agree(comm, find_place(&mine, e), e));
    TRY(memory_alloc((void **)&all, sizeof *all * (size_t)comm->ranks, "the ranks' GPUs", e));
    int code = comm_gather(comm, &mine, all, sizeof mine, e);
    for (int r = 0; !code && r < comm->ranks; r++)
        if (r != comm->rank && memcmp(&all[r], &mine, sizeof mine) == 0) same = r;
    memory_free(all);
    if (!code && same >= 0)
        code = FAIL(e, ERR_NO_GPU, "start one rank a GPU", "ranks %d and %d have the same GPU (%s of %s)", comm->rank,
                    same, mine.bus, mine.host);
    return comm_agree(comm, code, e);
}

static int choose_device(Comm *comm, Error *e) {
    if (comm->ranks == 1) return 0;
    TRY(comm_agree(comm, take_device(comm, e), e));
    return check_apart(comm, e);
}

// ---------------------------------------------------------------------------------------------------------------------
// Set-up and end

// Asked by the watchdog's thread.
static int check_nccl(void *context, Error *e) {
    Transport *t = (Transport *)context;
    ncclResult_t state = ncclSuccess;
    NCCL_TRY(ncclCommGetAsyncError(t->nccl, &state), t, e);
    if (state == ncclSuccess || state == ncclInProgress) return 0;
    return nccl_fail(state, t->nccl, "NCCL", __FILE__, __LINE__, e);
}

static void abort_nccl(void *context) { ncclCommAbort(((Transport *)context)->nccl); }

static int start_nccl(Transport *t, Error *e) {
    ncclUniqueId id;
    if (t->comm->rank == 0) NCCL_TRY(ncclGetUniqueId(&id), t, e);
    TRY(comm_broadcast(t->comm, &id, sizeof id, e));
    watchdog_begin(t->comm->watchdog, "start of NCCL");
    NCCL_TRY(ncclCommInitRank(&t->nccl, t->comm->ranks, id, t->comm->rank), t, e);
    WatchdogDevice device = {check_nccl, abort_nccl, t};
    watchdog_device(t->comm->watchdog, &device);
    return 0;
}

static int reserve_rounded(Transport *t, Error *e) {
    size_t bytes = transport_buffer_bytes(t->wire, t->largest);
    if (bytes == 0) return 0;
    cudaError_t status = cudaMalloc((void **)&t->rounded, bytes);
    if (status == cudaErrorMemoryAllocation) {
        (void)cudaGetLastError(); // or the next launch would report this failure
        return FAIL(e, ERR_MEMORY, "use a smaller --micro-batch, or --comm-dtype fp32",
                    "out of GPU memory: --comm-dtype bf16 needs %.1f MiB for the transfer of gradients",
                    (double)bytes / (1 << 20));
    }
    return CUDA_CALL(status, e);
}

static int create(Transport **out, Comm *comm, WireType wire, size_t largest, void *stream, Error *e) {
    TRY(memory_alloc_zero((void **)out, sizeof(Transport), "transport", e));
    Transport *t = *out;
    int least, most; // priorities: the transfer goes first where both have work, since it needs few multiprocessors
    t->comm = comm;
    t->wire = wire;
    t->largest = largest;
    t->engine = (cudaStream_t)stream;
    TRY(comm_agree(comm, reserve_rounded(t, e), e));
    CUDA_TRY(cudaDeviceGetStreamPriorityRange(&least, &most), e);
    CUDA_TRY(cudaStreamCreateWithPriority(&t->stream, cudaStreamNonBlocking, most), e);
    CUDA_TRY(cudaEventCreateWithFlags(&t->engine_done, cudaEventDisableTiming), e);
    for (cudaEvent_t &ended : t->ended) CUDA_TRY(cudaEventCreateWithFlags(&ended, cudaEventDisableTiming), e);
    return start_nccl(t, e);
}

static void destroy(Transport *t) {
    watchdog_device(t->comm->watchdog, NULL);
    watchdog_wait(t->comm->watchdog, "end of NCCL"); // after an error perhaps this rank's alone
    if (t->nccl) ncclCommAbort(t->nccl);             // waits for nobody: after an error the others may be gone
    if (t->rounded) cudaFree(t->rounded);
    for (cudaEvent_t ended : t->ended)
        if (ended) cudaEventDestroy(ended);
    if (t->engine_done) cudaEventDestroy(t->engine_done);
    if (t->stream) cudaStreamDestroy(t->stream);
    memory_free(t);
}

// ---------------------------------------------------------------------------------------------------------------------
// The order of the two streams

// Begins a transfer, behind what the engine has queued. (The watchdog's lock, which watchdog_begin takes, is held while
// the watchdog aborts NCCL: nothing is handed to a communicator that is going away.)
static int after_engine(Transport *t, Error *e) {
    watchdog_begin(t->comm->watchdog, TRANSPORT_WORK);
    CUDA_TRY(cudaEventRecord(t->engine_done, t->engine), e);
    return CUDA_CALL(cudaStreamWaitEvent(t->stream, t->engine_done, 0), e);
}

static int work_started(Transport *t, Error *e) {
    CUDA_TRY(cudaEventRecord(t->ended[t->started % MARKS], t->stream), e);
    t->started++;
    return 0;
}

static int64_t started(const Transport *t) { return t->started; }

static int wait_for(Transport *t, int64_t transfers, Error *e) {
    watchdog_wait(t->comm->watchdog, TRANSPORT_WORK);
    if (transfers > 0) CUDA_TRY(cudaStreamWaitEvent(t->engine, t->ended[(transfers - 1) % MARKS], 0), e);
    return 0;
}

static int finish(Transport *t, Error *e) {
    watchdog_wait(t->comm->watchdog, TRANSPORT_WORK);
    return CUDA_CALL(cudaStreamSynchronize(t->stream), e);
}

// ---------------------------------------------------------------------------------------------------------------------
// A bucket: equal parts of `each` elements go through the collectives for equal parts, in place; the short remainder
// goes to, or comes from, the last rank.

typedef struct {
    size_t each, rest, begin; // elements: of a part, of the remainder, before this rank's part
} Parts;

static Parts parts_of(const Comm *comm, Range bucket) {
    Range first = transport_part(bucket, 0, comm->ranks), mine = transport_part(bucket, comm->rank, comm->ranks);
    size_t all = range_length(bucket), each = range_length(first);
    return {each, all - each * (size_t)comm->ranks, mine.begin - bucket.begin};
}

static int reduce_scatter_type(Transport *t, void *values, size_t bytes, ncclDataType_t type, Parts parts, Error *e) {
    int last = t->comm->ranks - 1;
    char *own = (char *)values + parts.begin * bytes, *rest = (char *)values + parts.each * (size_t)(last + 1) * bytes;
    NCCL_TRY(ncclGroupStart(), t, e);
    if (parts.each) NCCL_TRY(ncclReduceScatter(values, own, parts.each, type, ncclSum, t->nccl, t->stream), t, e);
    if (parts.rest) NCCL_TRY(ncclReduce(rest, rest, parts.rest, type, ncclSum, last, t->nccl, t->stream), t, e);
    NCCL_TRY(ncclGroupEnd(), t, e);
    return 0;
}

__global__ static void round_kernel(__nv_bfloat16 *out, const float *in, size_t n) {
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x)
        out[i] = __float2bfloat16_rn(in[i]);
}

__global__ static void widen_kernel(float *out, const __nv_bfloat16 *in, size_t n) {
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x)
        out[i] = __bfloat162float(in[i]);
}

// Enough blocks for the memory's bandwidth: on few multiprocessors rounding takes longer than it saves on the wire (64
// blocks: 12 ms of a step of 110).
static unsigned blocks_for(size_t n) {
    const size_t threads = 256, most = 1024;
    return (unsigned)size_max(1, size_min(most, (n + threads - 1) / threads));
}

static int reduce_scatter_bf16(Transport *t, float *values, Range bucket, Parts parts, Error *e) {
    size_t all = range_length(bucket);
    Range mine = transport_part(bucket, t->comm->rank, t->comm->ranks);
    assert(all <= t->largest);
    round_kernel<<<blocks_for(all), 256, 0, t->stream>>>(t->rounded, values, all);
    TRY(CUDA_LAUNCHED(e));
    TRY(reduce_scatter_type(t, t->rounded, sizeof *t->rounded, ncclBfloat16, parts, e));
    size_t own = range_length(mine);
    widen_kernel<<<blocks_for(own), 256, 0, t->stream>>>(values + parts.begin, t->rounded + parts.begin, own);
    return CUDA_LAUNCHED(e);
}

static int reduce_scatter(Transport *t, float *values, Range bucket, Error *e) {
    Parts parts = parts_of(t->comm, bucket);
    TRY(after_engine(t, e));
    if (t->wire == WIRE_BF16) TRY(reduce_scatter_bf16(t, values, bucket, parts, e));
    else TRY(reduce_scatter_type(t, values, sizeof(float), ncclFloat32, parts, e));
    return work_started(t, e);
}

static int all_gather(Transport *t, void *values, size_t element_bytes, Range bucket, Error *e) {
    int last = t->comm->ranks - 1;
    Parts parts = parts_of(t->comm, bucket);
    const char *own = (const char *)values + parts.begin * element_bytes;
    char *rest = (char *)values + parts.each * (size_t)(last + 1) * element_bytes;
    TRY(after_engine(t, e));
    NCCL_TRY(ncclGroupStart(), t, e);
    if (parts.each)
        NCCL_TRY(ncclAllGather(own, values, parts.each * element_bytes, ncclInt8, t->nccl, t->stream), t, e);
    if (parts.rest)
        NCCL_TRY(ncclBroadcast(rest, rest, parts.rest * element_bytes, ncclInt8, last, t->nccl, t->stream), t, e);
    NCCL_TRY(ncclGroupEnd(), t, e);
    return work_started(t, e);
}

static int sum(Transport *t, double *values, int count, Error *e) {
    TRY(after_engine(t, e));
    NCCL_TRY(ncclAllReduce(values, values, (size_t)count, ncclFloat64, ncclSum, t->nccl, t->stream), t, e);
    TRY(work_started(t, e));
    return wait_for(t, t->started, e);
}

const TransportApi nccl_transport = {
    .device = choose_device,
    .create = create,
    .destroy = destroy,
    .reduce_scatter = reduce_scatter,
    .all_gather = all_gather,
    .sum = sum,
    .started = started,
    .wait_for = wait_for,
    .finish = finish,
};
