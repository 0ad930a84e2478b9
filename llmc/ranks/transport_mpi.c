// transport_mpi: the transport between CPU ranks, by nonblocking MPI.
#include "ranks/transport.h"

#include <assert.h>
#include <limits.h>
#include <string.h>

#include "base/float16.h"
#include "ranks/mpi_check.h"

// A transfer in flight. MPI uses the arrays until the transfer ends.
typedef struct Pending {
    struct Pending *next; // started after this one
    MPI_Request request;
    float *own;            // destination of the sums of this rank's part; NULL for a gathering
    size_t count;          // elements of the part
    void *sent, *received; // buffers of a reduction: bf16 uses both, fp32 uses only `received`
    int *places, counts[]; // places: (ranks) offsets of the parts; counts: (ranks) their lengths
} Pending;

struct Transport {
    Comm *comm;
    Division division;
    MPI_Comm mpi;      // the division's ranks; separate from the control messages' communicator
    MPI_Comm peers;    // the ranks of equal t; without --tensor the same as `mpi`
    MPI_Comm replicas; // with --shard machine: the ranks of all machines that own this rank's parts
    MPI_Comm group;    // with --tensor: the ranks of this rank's group
    MPI_Datatype type; // type of gradients in transfer
    MPI_Op op;         // sums gradients
    void *partial;     // buffer of reduce_rows: (ranks of the group, own rows, width)
    size_t partial_bytes;
    WireType wire;
    Pending *first, **end;  // transfers in flight, in the order of their starts; end: link of the next transfer
    int64_t started, ended; // how many transfers have started; how many have ended
    double waited;          // seconds of waiting since the last mpi_waited
};

// Adds in fp32 and rounds at every hop.
static void add_bf16(void *in, void *inout, int *count, MPI_Datatype *type) {
    (void)type;
    const uint16_t *x = in;
    uint16_t *y = inout;
    for (int i = 0; i < *count; i++) y[i] = f32_to_bf16(bf16_to_f32(x[i]) + bf16_to_f32(y[i]));
}

static int mpi_create(Transport **out, Comm *comm, const Division *division, WireType wire, size_t largest,
                      void *stream, Error *e) {
    const int tensor = division->tensor, shared = division->ranks;
    (void)stream; // only device memory needs a stream
    if (largest > INT_MAX) {
        comm_settle(comm);
        return FAIL(e, ERR_USAGE, "use fewer --channels, or one process",
                    "a block of this model has %zu elements, but MPI transfers at most %d", largest, INT_MAX);
    }
    TRY(memory_alloc_zero((void **)out, sizeof(Transport), "transport", e));
    Transport *t = *out;
    *t = (Transport){.comm = comm, .division = *division, .wire = wire, .end = &t->first, .op = MPI_SUM};
    t->type = wire == WIRE_BF16 ? MPI_UINT16_T : MPI_FLOAT;
    MPI_TRY(MPI_Comm_split(MPI_COMM_WORLD, comm->rank / shared, comm->rank, &t->mpi), e); // with its error handler
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
    if (t->op != MPI_SUM) MPI_Op_free(&t->op);
    memory_free(t->partial);
    memory_free(t);
}

// Appends a transfer with the bucket's parts.
static int pending_add(Transport *t, Range bucket, Pending **out, int64_t *work, Error *e) {
    const int ranks = division_ranks(&t->division, bucket);
    watchdog_begin(t->comm->watchdog, TRANSPORT_WORK);
    TRY(memory_alloc_zero((void **)out, sizeof(Pending) + 2 * (size_t)ranks * sizeof(int), "transport", e));
    Pending *p = *out;
    p->request = MPI_REQUEST_NULL;
    p->places = p->counts + ranks;
    for (int r = 0; r < ranks; r++) {
        Range part = division_part(&t->division, bucket, r);
        p->counts[r] = (int)range_length(part);
        p->places[r] = (int)(part.begin - bucket.begin);
    }
    *t->end = p;
    t->end = &p->next;
    *work = ++t->started;
    return 0;
}

static bool has_replicas(const Transport *t) { return t->comm->ranks > t->division.ranks; }

static MPI_Comm comm_of(const Transport *t, Range bucket) { return bucket.begin == 0 ? t->mpi : t->peers; }

static int mpi_reduce_scatter(Transport *t, float *values, Range bucket, int64_t *work, Error *e) {
    const size_t all = range_length(bucket);
    const int rank = division_rank(&t->division, bucket);
    const bool rounded = t->wire == WIRE_BF16;
    Pending *p;
    TRY(pending_add(t, bucket, &p, work, e));
    if (division_ranks(&t->division, bucket) == 1 && !has_replicas(t)) return 0; // one rank: its values are the sum
    p->own = values + p->places[rank];
    p->count = (size_t)p->counts[rank];
    if (rounded) TRY(memory_alloc(&p->sent, sizeof(uint16_t) * all, "gradients in bf16", e));
    for (size_t i = 0; i < all && rounded; i++) ((uint16_t *)p->sent)[i] = f32_to_bf16(values[i]);
    TRY(memory_alloc(&p->received, (rounded ? sizeof(uint16_t) : sizeof(float)) * p->count, "sums of gradients", e));
    MPI_TRY(MPI_Ireduce_scatter(rounded ? p->sent : values, p->received, p->counts, t->type, t->op, comm_of(t, bucket),
                                &p->request),
            e);
    return 0;
}

static int mpi_all_gather(Transport *t, const void *own, void *values, size_t element_bytes, Range bucket,
                          int64_t *work, Error *e) {
    MPI_Datatype type = element_bytes == sizeof(uint16_t) ? MPI_UINT16_T : MPI_FLOAT; // any type of that size
    Pending *p;
    TRY(pending_add(t, bucket, &p, work, e));
    const int rank = division_rank(&t->division, bucket), count = p->counts[rank];
    bool in_place = own == (const char *)values + (size_t)p->places[rank] * element_bytes;
    const void *from = in_place ? MPI_IN_PLACE : own;
    MPI_TRY(MPI_Iallgatherv(from, count, type, values, p->counts, p->places, type, comm_of(t, bucket), &p->request), e);
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
    const bool rounded = type == DTYPE_BF16;
    const size_t K = (size_t)t->division.tensor;
    const size_t n = (size_t)rows_of_rank(rows, t->comm->rank % (int)K, (int)K).count * width;
    const size_t bytes = K * n * (rounded ? sizeof(uint16_t) : sizeof(float));
    if (t->partial_bytes < bytes) {
        memory_free(t->partial);
        t->partial = NULL;
        TRY(memory_alloc(&t->partial, bytes, "partial sums", e));
        t->partial_bytes = bytes;
    }
    TRY(exchange_rows(t, (void *)partial, t->partial ? t->partial : &(char){0}, rows, width, type, e));
    const uint16_t *x16 = t->partial;
    const float *x = t->partial;
#pragma omp parallel for simd schedule(static) if (n > 1 << 13)
    for (size_t i = 0; i < n; i++) {
        float sum = 0;
        for (size_t r = 0; r < K; r++) sum += rounded ? bf16_to_f32(x16[r * n + i]) : x[r * n + i];
        if (rounded) ((uint16_t *)own)[i] = f32_to_bf16(sum);
        else ((float *)own)[i] = sum;
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

static int mpi_wait_for(Transport *t, int64_t work, Error *e) {
    watchdog_wait(t->comm->watchdog, TRANSPORT_WORK);
    for (; t->ended < work && t->first; t->ended++) {
        Pending *p = t->first;
        const double begin = clock_seconds();
        MPI_TRY(MPI_Wait(&p->request, MPI_STATUS_IGNORE), e);
        if (p->own && has_replicas(t)) { // counted, so that a hanging rank shows fewer collectives than waiting ranks
            watchdog_begin(t->comm->watchdog, TRANSPORT_WORK);
            MPI_TRY(MPI_Allreduce(MPI_IN_PLACE, p->received, (int)p->count, t->type, t->op, t->replicas), e);
        }
        t->waited += clock_seconds() - begin;
        for (size_t i = 0; p->own && i < p->count; i++)
            p->own[i] = t->wire == WIRE_BF16 ? bf16_to_f32(((uint16_t *)p->received)[i]) : ((float *)p->received)[i];
        t->first = p->next;
        if (!t->first) t->end = &t->first;
        memory_free(p->sent);
        memory_free(p->received);
        memory_free(p);
    }
    return 0;
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
