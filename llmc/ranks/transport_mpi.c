// transport between CPU ranks: nonblocking MPI.
#include "ranks/transport.h"

#include <assert.h>
#include <limits.h>
#include <string.h>

#include "base/float16.h"
#include "ranks/mpi_check.h"

// One reduction or gathering in flight.
typedef struct {
    MPI_Request request;
    float *own;            // where this rank's part belongs; NULL for a gathering
    size_t count;          // elements of it
    int *counts, *places;  // (ranks) each: of the parts. MPI reads them until the transfer ends
    void *sent, *received; // buffers: in bf16 both, in fp32 only `received`
} Pending;

struct Transport {
    Comm *comm;
    const Model *whole; // NULL: matrices are cut
    MPI_Comm mpi;       // separate from that of the control messages
    MPI_Op add_bf16;
    WireType wire;
    Pending *pending; // pending_done transfers that have ended, then those in flight
    int pending_done, pending_count, pending_capacity;
    int64_t ended; // transfers before all of `pending`
};

// ---- bf16. Sums are taken in fp32 and rounded again at every hop. ---------------------------------------------------

static void add_bf16(void *in, void *inout, int *count, MPI_Datatype *type) {
    (void)type;
    const uint16_t *x = in;
    uint16_t *y = inout;
    for (int i = 0; i < *count; i++) y[i] = f32_to_bf16(bf16_to_f32(x[i]) + bf16_to_f32(y[i]));
}

// ---------------------------------------------------------------------------------------------------------------------

static int create(Transport **out, Comm *comm, WireType wire, size_t largest, const Model *whole, void *stream,
                  Error *e) {
    (void)stream; // transfers are in host memory
    if (largest > INT_MAX) {
        comm_settle(comm);
        return FAIL(e, ERR_USAGE, "use fewer --channels, or one process",
                    "a block of this model has %zu elements, but MPI transfers at most %d", largest, INT_MAX);
    }
    TRY(memory_alloc_zero((void **)out, sizeof(Transport), "transport", e));
    Transport *t = *out;
    t->comm = comm;
    t->wire = wire;
    t->whole = whole;
    t->mpi = MPI_COMM_NULL;
    t->add_bf16 = MPI_OP_NULL;
    MPI_TRY(MPI_Comm_dup(MPI_COMM_WORLD, &t->mpi), e); // with its error handler
    MPI_TRY(MPI_Op_create(add_bf16, 1, &t->add_bf16), e);
    return 0;
}

static void pending_free(Pending *p) {
    memory_free(p->sent);
    memory_free(p->received);
    memory_free(p->counts);
}

static Range part_of(const Transport *t, Range bucket, int r) {
    if (!t->whole) return transport_part(bucket, r, t->comm->ranks);
    return transport_whole_part(t->whole, model_bucket_at(t->whole, bucket.begin), r, t->comm->ranks);
}

// Appends to the transfers in flight, with the bucket's parts.
static int pending_add(Transport *t, Range bucket, Pending **out, Error *e) {
    int ranks = t->comm->ranks, *counts;
    if (t->pending_count == t->pending_capacity) {
        int capacity = t->pending_capacity ? 2 * t->pending_capacity : 16;
        Pending *more;
        TRY(memory_alloc_zero((void **)&more, sizeof(Pending) * (size_t)capacity, "transport", e));
        if (t->pending) memcpy(more, t->pending, sizeof(Pending) * (size_t)t->pending_count);
        memory_free(t->pending);
        t->pending = more;
        t->pending_capacity = capacity;
    }
    TRY(memory_alloc((void **)&counts, sizeof(int) * 2 * (size_t)ranks, "transport", e));
    *out = &t->pending[t->pending_count++];
    **out = (Pending){.request = MPI_REQUEST_NULL, .counts = counts, .places = counts + ranks};
    for (int r = 0; r < ranks; r++) {
        Range part = part_of(t, bucket, r);
        counts[r] = (int)range_length(part);
        counts[ranks + r] = (int)(part.begin - bucket.begin);
    }
    return 0;
}

static int reduce_scatter(Transport *t, float *values, Range bucket, Error *e) {
    Range part = part_of(t, bucket, t->comm->rank);
    size_t all = range_length(bucket);
    Pending *p;
    watchdog_begin(t->comm->watchdog, TRANSPORT_WORK);
    TRY(pending_add(t, bucket, &p, e));
    p->own = values + (part.begin - bucket.begin);
    p->count = range_length(part);
    if (t->wire == WIRE_FP32) {
        TRY(memory_alloc(&p->received, sizeof(float) * p->count, "sums of gradients", e));
        MPI_TRY(MPI_Ireduce_scatter(values, p->received, p->counts, MPI_FLOAT, MPI_SUM, t->mpi, &p->request), e);
        return 0;
    }
    TRY(memory_alloc(&p->sent, sizeof(uint16_t) * all, "gradients in bf16", e));
    TRY(memory_alloc(&p->received, sizeof(uint16_t) * p->count, "sums of gradients", e));
    for (size_t i = 0; i < all; i++) ((uint16_t *)p->sent)[i] = f32_to_bf16(values[i]);
    MPI_TRY(MPI_Ireduce_scatter(p->sent, p->received, p->counts, MPI_UINT16_T, t->add_bf16, t->mpi, &p->request), e);
    return 0;
}

static int all_gather(Transport *t, const void *own, void *values, size_t element_bytes, Range bucket, Error *e) {
    size_t begin = part_of(t, bucket, t->comm->rank).begin - bucket.begin;
    bool in_place = own == (const char *)values + begin * element_bytes;
    MPI_Datatype type = element_bytes == sizeof(uint16_t) ? MPI_UINT16_T : MPI_FLOAT; // of the same size: only copied
    Pending *p;
    watchdog_begin(t->comm->watchdog, TRANSPORT_WORK);
    TRY(pending_add(t, bucket, &p, e));
    const void *from = in_place ? MPI_IN_PLACE : own;
    int count = p->counts[t->comm->rank];
    MPI_TRY(MPI_Iallgatherv(from, count, type, values, p->counts, p->places, type, t->mpi, &p->request), e);
    return 0;
}

static int sum(Transport *t, double *values, int count, Error *e) { return comm_sum(t->comm, values, count, e); }

static void put_in_place(const Transport *t, const Pending *p) {
    if (!p->own) return;
    if (t->wire == WIRE_FP32) memcpy(p->own, p->received, sizeof(float) * p->count);
    else
        for (size_t i = 0; i < p->count; i++) p->own[i] = bf16_to_f32(((const uint16_t *)p->received)[i]);
}

static int64_t started(const Transport *t) { return t->ended + t->pending_count; }

static int wait_for(Transport *t, int64_t transfers, Error *e) {
    watchdog_wait(t->comm->watchdog, TRANSPORT_WORK);
    for (; t->pending_done < t->pending_count && t->ended + t->pending_done < transfers; t->pending_done++) {
        Pending *p = &t->pending[t->pending_done];
        MPI_TRY(MPI_Wait(&p->request, MPI_STATUS_IGNORE), e);
        put_in_place(t, p);
        pending_free(p);
    }
    if (t->pending_done < t->pending_count) return 0;
    t->ended += t->pending_count;
    t->pending_done = t->pending_count = 0;
    return 0;
}

static int finish(Transport *t, Error *e) { return wait_for(t, started(t), e); }

// MPI_Finalize frees the communicator. No transfer is in flight (parallel_drain): MPI would write into freed memory.
static void destroy(Transport *t) {
    if (t->add_bf16 != MPI_OP_NULL) MPI_Op_free(&t->add_bf16);
    memory_free(t->pending);
    memory_free(t);
}

const TransportApi mpi_transport = {
    .create = create,
    .destroy = destroy,
    .reduce_scatter = reduce_scatter,
    .all_gather = all_gather,
    .sum = sum,
    .started = started,
    .wait_for = wait_for,
    .finish = finish,
};
