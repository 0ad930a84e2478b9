// transport: transfers of gradients and weights between ranks, in the engine's own memory: transport_mpi.c (nonblocking
// MPI) for the CPU engine, transport_nccl.cu (NCCL on a separate stream) for the CUDA engine.
//
//   1. Calls start a transfer and return. A transfer begins after all work that the engine queued before the call.
//   2. wait_for makes the engine's later work wait for transfers 1 to `work`; work 0: for no transfer.
//   3. All ranks start the same transfers in the same order.
//   4. Sums have a fixed order, so every run gets the same bits.
#pragma once

#include "model/model.h"
#include "model/modes.h"
#include "ranks/comm.h"

typedef struct Transport Transport; // each transport defines its own

#define TRANSPORT_WORK "exchange of gradients and weights" // in the watchdog's report
#define TRANSPORT_ROWS "exchange of activations"

enum { PART_UNIT = 64 }; // parts, like tensors, begin at multiples of 64 elements, for aligned vector loads

// Who owns what. A bucket is cut into parts, one for each rank that shares it, in the order of the ranks. All ranks
// share bucket 0, which begins at element 0; the ranks of equal t (--tensor) share the other buckets. Parts are equal,
// except that the last includes the remainder. With --shard machine `ranks` counts the ranks of this rank's machine.
// Muon needs whole matrices: rank l mod `ranks` owns all of block l.
typedef struct {
    int rank, ranks, tensor; // tensor: K; 1 without --tensor
    const Model *uncut;      // the model if blocks are not cut (Muon); NULL: blocks are cut
} Division;

// Return how many ranks share a bucket, and this rank's number among them.
static inline int division_ranks(const Division *d, Range bucket) {
    return bucket.begin == 0 ? d->ranks : d->ranks / d->tensor;
}
static inline int division_rank(const Division *d, Range bucket) {
    return bucket.begin == 0 ? d->rank : d->rank / d->tensor;
}

// Returns part r of a bucket.
static inline Range division_part(const Division *d, Range bucket, int r) {
    const int ranks = division_ranks(d, bucket);
    if (d->uncut && bucket.begin > 0) {
        const int owner = (model_bucket_at(d->uncut, bucket.begin) - 1) % ranks;
        return (Range){r > owner ? bucket.end : bucket.begin, r < owner ? bucket.begin : bucket.end};
    }
    const size_t each = range_length(bucket) / (size_t)ranks / PART_UNIT * PART_UNIT;
    const size_t begin = bucket.begin + (size_t)r * each;
    return (Range){begin, r + 1 < ranks ? begin + each : bucket.end};
}

// TRANSPORT_NCCL_BYTES: device memory that NCCL allocates, in part at the first transfer (measured: plan/memory.c).
// With NVLink multicast, NCCL's default, it may need more. transport_buffer_bytes: the buffer for rounded gradients.
#define TRANSPORT_NCCL_BYTES ((size_t)860 << 20)
static inline size_t transport_buffer_bytes(WireType wire, size_t largest) {
    return wire == WIRE_BF16 ? largest * sizeof(uint16_t) : 0;
}

// Elements per piece of a bucket that MPI ranks exchange. At most two pieces are in transfer. Received values take at
// most 4 bytes per element.
#define TRANSPORT_MPI_PIECE ((size_t)4 << 20)
static inline size_t transport_mpi_bytes(size_t largest) {
    return 2 * sizeof(float) * (largest < TRANSPORT_MPI_PIECE ? largest : TRANSPORT_MPI_PIECE);
}

typedef struct {
    // Chooses this rank's device by the rank's number on its machine, before engine_create. All ranks call it together;
    // errors are settled. ERR_UNAVAILABLE: a rank has no usable GPU, or two ranks share one. NULL: nothing to choose.
    int (*device)(Comm *comm, Error *e);

    // All ranks call it together. largest: elements of the largest bucket, for buffers. stream: from engine_stream.
    int (*create)(Transport **out, Comm *comm, const Division *division, WireType wire, size_t largest, void *stream,
                  Error *e);
    void (*destroy)(Transport *t);

    // values: the bucket's gradients. This rank's part becomes a sum over ranks; other parts become undefined. *work =
    // the transfer's number.
    int (*reduce_scatter)(Transport *t, float *values, Range bucket, int64_t *work, Error *e);

    // own: this rank's part, at its place in `values` or elsewhere. values: becomes the whole bucket.
    int (*all_gather)(Transport *t, const void *own, void *values, size_t element_bytes, Range bucket, int64_t *work,
                      Error *e);

    // values[i] = sum over ranks, with the same bits on all ranks. values: in device memory if the engine has a device.
    int (*sum)(Transport *t, double *values, int count, Error *e);

    // Exchange rows of activations within this rank's group (TensorRanks), in the order of the engine's work. wait_for
    // does not count these exchanges.
    int (*gather_rows)(Transport *t, void *values, int rows, size_t width, Dtype type, Error *e);
    int (*reduce_rows)(Transport *t, void *own, const void *partial, int rows, size_t width, Dtype type, Error *e);

    int (*wait_for)(Transport *t, int64_t work, Error *e); // rule 2 above

    // Returns the seconds that the engine waited in wait_for and sum since the last call of `waited`; without a device
    // also in gather_rows and reduce_rows. Does not count waits that the device has not finished.
    double (*waited)(Transport *t);

    // Returns when every transfer is done on this rank; all ranks must have started the same transfers.
    int (*finish)(Transport *t, Error *e);
} TransportApi;

extern const TransportApi mpi_transport, nccl_transport;

#ifdef GNS_MPI
#    define TRANSPORT_OR_NULL(transport) &transport
#else
#    define TRANSPORT_OR_NULL(transport) NULL // a build for one process
#endif
