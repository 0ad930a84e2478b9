// transport_mpi: the transport between CPU ranks, by nonblocking MPI.
#include "ranks/transport.h"

#include <assert.h>
#include <limits.h>

#include "cpu/value.h"
#include "ranks/mpi_check.h"

// A transfer in flight: a gathering, or one piece of a reduction. MPI uses the arrays until the transfer ends.
typedef struct Pending {
    struct Pending *next; // started after this one
    MPI_Request request;
    float *own;            // destination of the piece's sums; NULL for a gathering
    size_t count;          // elements of the piece that this rank sums
    int ranks;             // ranks that exchange
    bool first;            // first piece of a bucket
    void *received;        // (ranks, count) each rank's gradients
    int *places, counts[]; // (2, ranks) offsets, lengths. Row 0: in the bucket. Row 1: in `received`
} Pending;

struct Transport {
    Comm *comm;
    Division division;
    MPI_Comm mpi;           // the division's ranks; separate from the control messages' communicator
    MPI_Comm peers;         // the ranks of equal t; without --tensor the same as `mpi`
    MPI_Comm replicas;      // with --shard machine: the owners of this rank's parts, one per machine
    MPI_Comm group;         // with --tensor: the ranks of this rank's group
    MPI_Datatype type;      // of the gradients in transfer
    MPI_Op op;              // sums them
    Dtype wire;             // type of the values in transfer
    Pending *first, **end;  // transfers in flight, in the order of their starts; end: the list's last link
    int64_t started, ended; // how many transfers have started; how many have ended
    int64_t reduced[2];     // numbers of the last two pieces, the older first
    double waited;          // seconds of waiting since the last mpi_waited
};

// Adds in fp32 and rounds at every hop.
static void add_bf16(void *in, void *inout, int *count, MPI_Datatype *type) {
    const Dtype bf16 = DTYPE_BF16;
    for (int i = 0; i < *count; i++) value_set(inout, i, value_get(in, i, bf16) + value_get(inout, i, bf16), bf16);
}

static int mpi_create(Transport **out, Comm *comm, const Division *division, WireType wire, size_t largest,
                      void *stream, Error *e) {
    const int tensor = division->tensor, shared = division->ranks;
    const int most = wire == WIRE_BF16 ? INT_MAX / 2 : INT_MAX; // with WIRE_BF16 `places` is in units of 2 bytes
    if (largest > (size_t)most) {
        comm_settle(comm);
        return FAIL(e, ERR_USAGE, "use fewer --channels, or one process",
                    "a block of this model has %zu elements, but MPI transfers at most %d", largest, most);
    }
    TRY(memory_alloc_zero((void **)out, sizeof(Transport), "transport", e));
    Transport *t = *out;
    *t = (Transport){.comm = comm, .division = *division, .end = &t->first, .op = MPI_SUM};
    t->wire = wire == WIRE_BF16 ? DTYPE_BF16 : DTYPE_FP32;
    t->type = wire == WIRE_BF16 ? MPI_UINT16_T : MPI_FLOAT;
    MPI_TRY(MPI_Comm_split(MPI_COMM_WORLD, comm->rank / shared, comm->rank, &t->mpi), e); // keeps the error handler
    MPI_TRY(MPI_Comm_split(MPI_COMM_WORLD, comm->rank % shared, comm->rank, &t->replicas), e);
    t->peers = t->mpi;
    if (tensor > 1) {
        MPI_TRY(MPI_Comm_split(t->mpi, comm->rank % tensor, comm->rank, &t->peers), e);
        MPI_TRY(MPI_Comm_split(MPI_COMM_WORLD, comm->rank / tensor, comm->rank, &t->group), e);
    }
    if (wire == WIRE_BF16) MPI_TRY(MPI_Op_create(add_bf16, 1, &t->op), e);
    return 0;
}

// MPI_Finalize frees the communicators. No transfer may be in flight (parallel_drain): it would write to freed memory.
static void mpi_destroy(Transport *t) {
    assert(!t->first);
    if (t->op != MPI_SUM) MPI_Op_free(&t->op);
    memory_free(t);
}

// Appends a transfer of elements `begin` to `end` of each part. Returns the longest part in *longest.
static int pending_add(Transport *t, Range bucket, size_t begin, size_t end, Pending **out, size_t *longest,
                       int64_t *work, Error *e) {
    const int ranks = division_ranks(&t->division, bucket);
    TRY(memory_alloc_zero((void **)out, sizeof(Pending) + 4 * (size_t)ranks * sizeof(int), "transport", e));
    Pending *p = *out;
    p->request = MPI_REQUEST_NULL;
    p->ranks = ranks;
    p->places = p->counts + 2 * ranks;
    *longest = 0;
    for (int r = 0; r < ranks; r++) {
        const Range part = division_part(&t->division, bucket, r);
        const size_t n = range_length(part), from = size_min(begin, n);
        p->counts[r] = (int)(size_min(end, n) - from);
        p->places[r] = (int)(part.begin - bucket.begin + from);
        *longest = size_max(*longest, n);
    }
    *t->end = p;
    t->end = &p->next;
    *work = ++t->started;
    return 0;
}

static bool has_replicas(const Transport *t) { return t->comm->ranks > t->division.ranks; }

static MPI_Comm comm_of(const Transport *t, Range bucket) { return bucket.begin == 0 ? t->mpi : t->peers; }

static int mpi_wait_for(Transport *t, int64_t work, Error *e) {
    watchdog_wait(t->comm->watchdog, TRANSPORT_WORK);
    for (; t->ended < work && t->first; t->ended++) {
        Pending *p = t->first;
        const double begin = clock_seconds();
        MPI_TRY(MPI_Wait(&p->request, MPI_STATUS_IGNORE), e);
        for (int step = 1; p->own && step < p->ranks; step *= 2) { // the tree ((0 + 1) + (2 + 3)) + ..., for any count
            char *values = p->received;
            const size_t bytes = p->count * value_bytes(t->wire);
            for (int r = 0; r + step < p->ranks; r += 2 * step)
                MPI_TRY(MPI_Reduce_local(values + (size_t)(r + step) * bytes, values + (size_t)r * bytes, (int)p->count,
                                         t->type, t->op),
                        e);
        }
        if (p->own && has_replicas(t)) { // counted, so that a hanging rank shows fewer collectives than waiting ranks
            if (p->first) watchdog_begin(t->comm->watchdog, TRANSPORT_WORK);
            MPI_TRY(MPI_Allreduce(MPI_IN_PLACE, p->received, (int)p->count, t->type, t->op, t->replicas), e);
        }
        t->waited += clock_seconds() - begin;
        for (size_t i = 0; p->own && i < p->count; i++) p->own[i] = value_get(p->received, i, t->wire);
        t->first = p->next;
        if (!t->first) t->end = &t->first;
        memory_free(p->received);
        memory_free(p);
    }
    return 0;
}

// Exchanges the bucket in pieces; mpi_wait_for sums. MPI_Ireduce_scatter would allocate two buckets on some ranks.
static int mpi_reduce_scatter(Transport *t, float *values, Range bucket, int64_t *work, Error *e) {
    const int ranks = division_ranks(&t->division, bucket), rank = division_rank(&t->division, bucket);
    const size_t element = value_bytes(t->wire), each = TRANSPORT_MPI_PIECE / (size_t)ranks;
    size_t longest = 1;
    watchdog_begin(t->comm->watchdog, TRANSPORT_WORK); // not per piece: ranks of other t may have more pieces
    *work = 0;
    if (ranks == 1 && !has_replicas(t)) return 0; // one rank: its values are the sum
    for (size_t begin = 0; begin < longest; begin += each) {
        Pending *p;
        TRY(mpi_wait_for(t, t->reduced[0], e)); // at most two pieces have buffers
        TRY(pending_add(t, bucket, begin, begin + each, &p, &longest, work, e));
        t->reduced[0] = t->reduced[1], t->reduced[1] = *work;
        float *own = values + p->places[rank];
        int *own_counts = p->counts + ranks, *own_places = p->places + ranks;
        p->count = (size_t)p->counts[rank];
        p->first = begin == 0;
        for (int r = 0; r < ranks; r++) own_counts[r] = (int)p->count, own_places[r] = r * (int)p->count;
        for (int r = 0; r < ranks && t->wire == DTYPE_BF16; p->places[r++] *= 2) { // rounds in place
            float *part = values + p->places[r];
            scale_values(part, 0, DTYPE_BF16, part, 0, DTYPE_FP32, (size_t)p->counts[r], 1);
        }
        TRY(memory_alloc(&p->received, element * p->count * (size_t)ranks, "gradients of other ranks", e));
        MPI_TRY(MPI_Ialltoallv(values, p->counts, p->places, t->type, p->received, own_counts, own_places, t->type,
                               comm_of(t, bucket), &p->request),
                e);
        p->own = own; // from here on mpi_wait_for sums
    }
    return 0;
}

static int mpi_all_gather(Transport *t, const void *own, void *values, size_t element_bytes, Range bucket,
                          int64_t *work, Error *e) {
    MPI_Datatype type = element_bytes == sizeof(uint16_t) ? MPI_UINT16_T : MPI_FLOAT; // any type of that size
    const int rank = division_rank(&t->division, bucket);
    Pending *p;
    size_t longest;
    watchdog_begin(t->comm->watchdog, TRANSPORT_WORK);
    TRY(pending_add(t, bucket, 0, SIZE_MAX, &p, &longest, work, e));
    const void *from = own == (const char *)values + (size_t)p->places[rank] * element_bytes ? MPI_IN_PLACE : own;
    MPI_TRY(MPI_Iallgatherv(from, p->counts[rank], type, values, p->counts, p->places, type, comm_of(t, bucket),
                            &p->request),
            e);
    return 0;
}

// ---- Rows of activations --------------------------------------------------------------------------------------------

// Exchanges rows in the group, blocking. Rank r owns rows_of_rank(rows, r, K) of `sent`. received NULL: every rank gets
// all rows, each from its owner, in place. Otherwise every rank has values for all rows, and `received` gets all ranks'
// values for this rank's own rows, in the order of the ranks.
static int exchange_rows(Transport *t, void *sent, void *received, int rows, size_t width, Dtype type, Error *e) {
    const int K = t->division.tensor, mine = t->comm->rank % K;
    const double begin = clock_seconds();
    int counts[K], places[K], own_counts[K], own_places[K]; // no memory_alloc, as in comm_agree
    int result = MPI_SUCCESS;
    MPI_Datatype row;
    for (int r = 0; r < K; r++) {
        const RankRows of = rows_of_rank(rows, r, K), own = rows_of_rank(rows, mine, K);
        counts[r] = (int)of.count, places[r] = (int)of.first;
        own_counts[r] = (int)own.count, own_places[r] = r * (int)own.count;
    }
    watchdog_begin(t->comm->watchdog, TRANSPORT_ROWS);
    MPI_Type_contiguous((int)width, type == DTYPE_BF16 ? MPI_UINT16_T : MPI_FLOAT, &row);
    MPI_Type_commit(&row);
    if (!received) result = MPI_Allgatherv(MPI_IN_PLACE, 0, row, sent, counts, places, row, t->group);
    else result = MPI_Alltoallv(sent, counts, places, row, received, own_counts, own_places, row, t->group);
    MPI_Type_free(&row);
    t->waited += clock_seconds() - begin;
    MPI_TRY(result, e);
    return 0;
}

static int mpi_gather_rows(Transport *t, void *values, int rows, size_t width, Dtype type, Error *e) {
    return exchange_rows(t, values, NULL, rows, width, type, e);
}

static int mpi_reduce_rows(Transport *t, void *own, const void *partial, int rows, size_t width, Dtype type, Error *e) {
    const size_t K = (size_t)t->division.tensor;
    const size_t n = (size_t)rows_of_rank(rows, t->comm->rank % (int)K, (int)K).count * width;
    char *received = (char *)partial + (size_t)rows * width * value_bytes(type); // (K, own rows, width)
    TRY(exchange_rows(t, (void *)partial, received, rows, width, type, e));
#pragma omp parallel for simd schedule(static) if (n > 1 << 13)
    for (size_t i = 0; i < n; i++) {
        float sum = 0;
        for (size_t r = 0; r < K; r++) sum += value_get(received, r * n + i, type);
        value_set(own, i, sum, type);
    }
    return 0;
}

static int mpi_sum(Transport *t, double *values, int count, Error *e) {
    const double begin = clock_seconds();
    int code = comm_sum(t->comm, values, count, e);
    t->waited += clock_seconds() - begin;
    return code;
}

static double mpi_waited(Transport *t) {
    const double seconds = t->waited;
    t->waited = 0;
    return seconds;
}

static int mpi_finish(Transport *t, Error *e) { return mpi_wait_for(t, t->started, e); }

const TransportApi mpi_transport = {
    .create = mpi_create,
    .destroy = mpi_destroy,
    .reduce_scatter = mpi_reduce_scatter,
    .all_gather = mpi_all_gather,
    .gather_rows = mpi_gather_rows,
    .reduce_rows = mpi_reduce_rows,
    .sum = mpi_sum,
    .wait_for = mpi_wait_for,
    .waited = mpi_waited,
    .finish = mpi_finish,
};
