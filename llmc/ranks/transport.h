// transport: how gradients and weights travel between ranks, in the engine's own memory. Two implementations, one a
// trainer: cpu/transport_mpi.c (nonblocking MPI), cuda/transport_nccl.cu (NCCL on a stream of its own).
//
// A bucket is a range of the flat arrays, cut into one part a rank (transport_part). Calls start the work and return;
// what is started is ordered behind the engine's work so far, and transport_wait orders the engine's later work behind
// what was started, or the first of it. All ranks start the same work in the same order, and the sums' order is fixed:
// same bits, run after run.
#ifndef GNS_TRANSPORT_H
#define GNS_TRANSPORT_H

#include "ranks/comm.h"
#include "model/model.h"
#include "model/modes.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct Transport Transport;

#define TRANSPORT_WORK "exchange of gradients and weights" // what the watchdog calls it

enum { PART_UNIT = 64 }; // elements: parts begin where vector loads and stores like it, as tensors do

// Part r of a bucket cut for `ranks`. All parts are equal but the last, which takes the remainder too.
static inline Range transport_part(Range bucket, int r, int ranks) {
    size_t each = range_length(bucket) / (size_t)ranks / PART_UNIT * PART_UNIT;
    size_t begin = bucket.begin + (size_t)r * each;
    return (Range){begin, r + 1 < ranks ? begin + each : bucket.end};
}

// Chooses this rank's device, by its number on this machine, before the engine is created. All ranks together; an error
// is settled. ERR_NO_GPU where a rank has none that it can use, or two have the same.
int transport_device(Comm *comm, Error *e);

// largest: elements of the largest bucket, for which there is memory from here on. stream: engine_stream's. All ranks
// together.
int transport_create(Transport **out, Comm *comm, WireType wire, size_t largest, void *stream, Error *e);

// Device memory, bytes: what NCCL takes for itself, some of it with the first work only (plan_memory.c says how that was
// measured: with NCCL_NVLS_ENABLE=0. With NVLink multicast, NCCL's default, it may be more), and what this takes for the
// gradients in transfer.
#define TRANSPORT_NCCL_BYTES ((size_t)860 << 20)
static inline size_t transport_buffer_bytes(WireType wire, size_t largest) {
    return wire == WIRE_BF16 ? largest * sizeof(uint16_t) : 0;
}

void transport_destroy(Transport *t); // NULL is fine

// values: the bucket's gradients on this rank, left alone but for what follows. The sum over ranks of this rank's part
// goes to its place among them.
int transport_reduce_scatter(Transport *t, float *values, Range bucket, Error *e);

// values: the bucket's elements of which this rank's part is right; after it, all of them.
int transport_all_gather(Transport *t, void *values, size_t element_bytes, Range bucket, Error *e);

// values[i] = sum over ranks, the same bits everywhere. Where the engine has a device: device memory.
int transport_sum(Transport *t, double *values, int count, Error *e);

// The number of transfers started so far; and waiting for the first so many.
int64_t transport_started(const Transport *t);
int transport_wait_for(Transport *t, int64_t transfers, Error *e);

static inline int transport_wait(Transport *t, Error *e) { return transport_wait_for(t, transport_started(t), e); }

// Returns when all that was started has been done, on this rank; all ranks must have started the same.
int transport_finish(Transport *t, Error *e);

#ifdef __cplusplus
}
#endif
#endif
