// transport_mpi: the transport between CPU ranks, by MPI. A call returns when its transfer is done on this rank. Open
// MPI moves long messages only during MPI calls, so nonblocking calls would overlap little.
#include "ranks/transport.h"

#include <limits.h>
#include <string.h>

#include "base/float16.h"
#include "ranks/mpi_check.h"

struct Transport {
    Comm *comm;
    Division division;
    MPI_Comm mpi;      // the division's ranks; separate from the control messages' communicator
    MPI_Comm peers;    // the ranks of equal t; without --tensor the same as `mpi`
    MPI_Comm replicas; // with --shard machine: the owners of this rank's parts, one per machine
    MPI_Comm group;    // with --tensor: the ranks of this rank's group
    bool bf16;         // gradients travel in bf16
    MPI_Datatype type; // type of gradients in transfer
    MPI_Op op;         // sums gradients
    void *sent;        // (TRANSPORT_MPI_PIECE) a piece's gradients in bf16; NULL in fp32
    void *received;    // (TRANSPORT_MPI_PIECE) a piece's gradients from each rank
    void *partial;     // buffer of reduce_rows: (ranks of the group, own rows, width)
    size_t partial_bytes;
    double waited; // seconds of waiting since the last mpi_waited
};

// Adds in fp32 and rounds at every hop.
static void add_bf16(void *in, void *inout, int *count, MPI_Datatype *type) {
    const uint16_t *x = in;
    uint16_t *y = inout;
    for (int i = 0; i < *count; i++) y[i] = f32_to_bf16(bf16_to_f32(x[i]) + bf16_to_f32(y[i]));
}

static int mpi_create(Transport **out, Comm *comm, const Division *division, WireType wire, size_t largest,
                      void *stream, Error *e) {
    const int tensor = division->tensor, shared = division->ranks;
    if (largest > INT_MAX) {
        comm_settle(comm);
        return FAIL(e, ERR_USAGE, "use fewer --channels, or one process",
                    "a block of this model has %zu elements, but MPI transfers at most %d", largest, INT_MAX);
    }
    TRY(memory_alloc_zero((void **)out, sizeof(Transport), "transport", e));
    Transport *t = *out;
    *t = (Transport){.comm = comm, .division = *division, .type = MPI_FLOAT, .op = MPI_SUM};
    if (wire == WIRE_BF16) {
        t->bf16 = true, t->type = MPI_UINT16_T;
        MPI_TRY(MPI_Op_create(add_bf16, 1, &t->op), e);
        TRY(memory_alloc(&t->sent, sizeof(uint16_t) * TRANSPORT_MPI_PIECE, "gradients in bf16", e));
    }
    TRY(memory_alloc(&t->received, (t->bf16 ? sizeof(uint16_t) : sizeof(float)) * TRANSPORT_MPI_PIECE,
                     "gradients of other ranks", e));
    MPI_TRY(MPI_Comm_split(MPI_COMM_WORLD, comm->rank / shared, comm->rank, &t->mpi), e); // keeps the error handler
    MPI_TRY(MPI_Comm_split(MPI_COMM_WORLD, comm->rank % shared, comm->rank, &t->replicas), e);
    t->peers = t->mpi;
    if (tensor > 1) {
        MPI_TRY(MPI_Comm_split(t->mpi, comm->rank % tensor, comm->rank, &t->peers), e);
        MPI_TRY(MPI_Comm_split(MPI_COMM_WORLD, comm->rank / tensor, comm->rank, &t->group), e);
    }
    return 0;
}

// MPI_Finalize frees the communicators.
static void mpi_destroy(Transport *t) {
    if (t->op != MPI_SUM) MPI_Op_free(&t->op);
    memory_free(t->sent);
    memory_free(t->received);
    memory_free(t->partial);
    memory_free(t);
}

// ---- Gradients and weights ------------------------------------------------------------------------------------------

// Finds elements [begin, end) of each part: their number, and their place in the bucket. Returns the longest part.
static size_t find_parts(const Transport *t, Range bucket, size_t begin, size_t end, int *counts, int *places) {
    size_t longest = 0;
    for (int r = 0; r < division_ranks(&t->division, bucket); r++) {
        const Range part = division_part(&t->division, bucket, r);
        const size_t n = range_length(part), from = size_min(begin, n);
        counts[r] = (int)(size_min(end, n) - from);
        places[r] = (int)(part.begin - bucket.begin + from);
        longest = size_max(longest, n);
    }
    return longest;
}

static MPI_Comm comm_of(const Transport *t, Range bucket) { return bucket.begin == 0 ? t->mpi : t->peers; }

static bool has_replicas(const Transport *t) { return t->comm->ranks > t->division.ranks; }

// Sends counts[r] items from places[r] on to each rank r. Receives `own` items from each, in the order of the ranks.
// Returns MPI's result.
static int all_to_all(const void *sent, const int *counts, const int *places, int ranks, int own, void *received,
                      MPI_Datatype type, MPI_Comm comm) {
    int own_counts[ranks], own_places[ranks]; // no memory_alloc, as in comm_agree
    for (int r = 0; r < ranks; r++) own_counts[r] = own, own_places[r] = r * own;
    return MPI_Alltoallv(sent, counts, places, type, received, own_counts, own_places, type, comm);
}

// Sums elements [begin, end) of each part over the ranks. Sets *longest to the length of the longest part.
static int sum_piece(Transport *t, float *values, Range bucket, size_t begin, size_t end, size_t *longest, Error *e) {
    const int ranks = division_ranks(&t->division, bucket);
    int counts[ranks], places[ranks];
    *longest = find_parts(t, bucket, begin, end, counts, places);
    const int rank = division_rank(&t->division, bucket), n = counts[rank];
    const size_t bytes = (size_t)n * (t->bf16 ? sizeof(uint16_t) : sizeof(float));
    float *own = values + places[rank];
    char *sum = t->received; // (ranks, n)
    for (int r = 0, place = 0; r < ranks && t->bf16; place += counts[r++]) {
        uint16_t *to = (uint16_t *)t->sent + place;
        for (int i = 0; i < counts[r]; i++) to[i] = f32_to_bf16(values[places[r] + i]);
        places[r] = place;
    }
    watchdog_wait(t->comm->watchdog, TRANSPORT_WORK);
    MPI_TRY(all_to_all(t->bf16 ? t->sent : values, counts, places, ranks, n, sum, t->type, comm_of(t, bucket)), e);
    for (int step = 1; step < ranks; step *= 2) // the tree ((0 + 1) + (2 + 3)) + ..., for any count
        for (int r = 0; r + step < ranks; r += 2 * step)
            MPI_TRY(MPI_Reduce_local(sum + (size_t)(r + step) * bytes, sum + (size_t)r * bytes, n, t->type, t->op), e);
    if (has_replicas(t)) MPI_TRY(MPI_Allreduce(MPI_IN_PLACE, sum, n, t->type, t->op, t->replicas), e);
    for (int i = 0; i < n; i++) own[i] = t->bf16 ? bf16_to_f32(((uint16_t *)sum)[i]) : ((float *)sum)[i];
    return 0;
}

// Exchanges the bucket in pieces, so that the buffers are small.
static int mpi_reduce_scatter(Transport *t, float *values, Range bucket, int64_t *work, Error *e) {
    const int ranks = division_ranks(&t->division, bucket);
    const size_t each = TRANSPORT_MPI_PIECE / (size_t)ranks;
    const double start = clock_seconds();
    watchdog_begin(t->comm->watchdog, TRANSPORT_WORK); // not per piece: ranks of other t may have more pieces
    *work = 0;
    if (ranks == 1 && !has_replicas(t)) return 0; // one rank: its values are the sum
    for (size_t begin = 0, longest = 1; begin < longest; begin += each)
        TRY(sum_piece(t, values, bucket, begin, begin + each, &longest, e));
    t->waited += clock_seconds() - start;
    return 0;
}

static int mpi_all_gather(Transport *t, const void *own, void *values, size_t element_bytes, Range bucket,
                          int64_t *work, Error *e) {
    MPI_Datatype type = element_bytes == sizeof(uint16_t) ? MPI_UINT16_T : MPI_FLOAT; // any type of that size
    const int ranks = division_ranks(&t->division, bucket), rank = division_rank(&t->division, bucket);
    const double start = clock_seconds();
    int counts[ranks], places[ranks];
    *work = 0;
    watchdog_begin(t->comm->watchdog, TRANSPORT_WORK);
    find_parts(t, bucket, 0, SIZE_MAX, counts, places);
    bool in_place = own == (const char *)values + (size_t)places[rank] * element_bytes;
    const void *from = in_place ? MPI_IN_PLACE : own;
    MPI_TRY(MPI_Allgatherv(from, counts[rank], type, values, counts, places, type, comm_of(t, bucket)), e);
    t->waited += clock_seconds() - start;
    return 0;
}

// ---- Rows of activations --------------------------------------------------------------------------------------------

// Exchanges rows in the group. Rank r owns rows_of_rank(rows, r, K) of `sent`. received NULL: every rank gets
// all rows, each from its owner, in place. Otherwise every rank has values for all rows, and `received` gets all ranks'
// values for this rank's own rows, in the order of the ranks.
static int exchange_rows(Transport *t, void *sent, void *received, int rows, size_t width, Dtype type, Error *e) {
    const int K = t->division.tensor, mine = t->comm->rank % K;
    const double begin = clock_seconds();
    int counts[K], places[K], result;
    MPI_Datatype row;
    for (int r = 0; r < K; r++) {
        const RankRows of = rows_of_rank(rows, r, K);
        counts[r] = (int)of.count, places[r] = (int)of.first;
    }
    watchdog_begin(t->comm->watchdog, TRANSPORT_ROWS);
    MPI_Type_contiguous((int)width, type == DTYPE_BF16 ? MPI_UINT16_T : MPI_FLOAT, &row);
    MPI_Type_commit(&row);
    if (received) result = all_to_all(sent, counts, places, K, counts[mine], received, row, t->group);
    else result = MPI_Allgatherv(MPI_IN_PLACE, 0, row, sent, counts, places, row, t->group);
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

// No transfer outlives its call.
static int mpi_wait_for(Transport *t, int64_t work, Error *e) {
    watchdog_wait(t->comm->watchdog, TRANSPORT_WORK);
    return 0;
}

static int mpi_finish(Transport *t, Error *e) { return mpi_wait_for(t, 0, e); }

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
