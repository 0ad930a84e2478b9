#include "parallel.h"

#include <assert.h>
#include <string.h>

Share parallel_share(int64_t rows, int rank, int ranks) {
    int64_t each = rows / ranks, longer = rows % ranks; // the first `longer` ranks take one row more
    return (Share){rank * each + (rank < longer ? rank : longer), each + (rank < longer)};
}

// ---------------------------------------------------------------------------------------------------------------------
// Buckets

static void cut_buckets(Parallel *p) {
    const Model *model = p->model;
    size_t end = model->flat_count;
    for (int l = model->config.layers - 1; l >= 0; l--) {
        size_t begin = model_tensor(model, LN1_W, l)->offset; // a layer's first tensor
        p->bucket[p->buckets++] = (Range){begin, end};
        end = begin;
    }
    p->bucket[p->buckets++] = (Range){0, end};
}

int parallel_create(Parallel *p, Comm *comm, const Model *model, ZeroStage zero, Error *e) {
    size_t most = (size_t)model->config.layers + 1;
    *p = (Parallel){.comm = comm, .model = model, .zero = zero};
    if (comm->ranks == 1) return 0;
    TRY(transport_device(comm, e));
    TRY(memory_alloc((void **)&p->bucket, sizeof(Range) * most, "buckets", e));
    TRY(memory_alloc((void **)&p->owned, sizeof(Range) * most, "buckets", e));
    cut_buckets(p);
    for (int i = 0; i < p->buckets; i++)
        p->owned[p->buckets - 1 - i] = transport_part(p->bucket[i], comm->rank, comm->ranks);
    return 0;
}

void parallel_destroy(Parallel *p) {
    transport_destroy(p->transport);
    memory_free(p->owned);
    memory_free(p->bucket);
    *p = (Parallel){0};
}

void parallel_shard(const Parallel *p, EngineConfig *config) {
    if (p->zero == ZERO_0 || !p->buckets) return;
    config->owned = p->owned;
    config->owned_count = p->buckets;
}

int parallel_start(Parallel *p, Engine *engine, WireType wire, Error *e) {
    p->engine = engine;
    return p->buckets ? transport_create(&p->transport, p->comm, wire, engine_stream(engine), e) : 0;
}

// ---------------------------------------------------------------------------------------------------------------------
// Gradients

static int start_bucket(Parallel *p, Error *e) {
    Range bucket = p->bucket[p->started++];
    if (p->rank_norms) TRY(engine_rank_norms(p->engine, bucket, e));
    return transport_reduce_scatter(p->transport, engine_buffer(p->engine, BUFFER_GRAD, bucket.begin), bucket, e);
}

// From the engine: this range is final, as is all behind it.
static int range_final(void *context, Range range, Error *e) {
    Parallel *p = context;
    while (p->started < p->buckets && p->bucket[p->started].begin >= range.begin) TRY(start_bucket(p, e));
    return 0;
}

int parallel_begin_step(Parallel *p, bool rank_norms, Error *e) {
    p->started = 0;
    p->rank_norms = rank_norms;
    return engine_begin_step(p->engine, e);
}

void parallel_last(Parallel *p) {
    if (p->buckets) engine_call_when_final(p->engine, range_final, p);
}

// ---------------------------------------------------------------------------------------------------------------------
// Norms and update

static int gather_gradients(Parallel *p, Error *e) {
    if (!p->buckets) return 0;
    for (int i = 0; i < p->buckets; i++)
        TRY(transport_all_gather(p->transport, engine_buffer(p->engine, BUFFER_GRAD, p->bucket[i].begin), sizeof(float),
                                 p->bucket[i], e));
    return transport_wait(p->transport, e);
}

// The weights that the next forward pass reads first go first.
static int update_owned(Parallel *p, const UpdateConfig *update, Error *e) {
    size_t weight_bytes = engine_weight_bytes(p->engine);
    for (int i = p->buckets - 1; i >= 0; i--) {
        Range bucket = p->bucket[i];
        TRY(engine_update(p->engine, transport_part(bucket, p->comm->rank, p->comm->ranks), update, e));
        TRY(transport_all_gather(p->transport, engine_buffer(p->engine, BUFFER_WEIGHT, bucket.begin), weight_bytes,
                                 bucket, e));
    }
    return transport_wait(p->transport, e);
}

int parallel_norms(Parallel *p, Error *e) {
    if (!p->buckets) return engine_norms(p->engine, (Range){0, p->model->flat_count}, e);
    while (p->started < p->buckets) TRY(start_bucket(p, e)); // a rank without rows has had no micro-step
    TRY(transport_wait(p->transport, e));
    for (int i = 0; i < p->buckets; i++) TRY(engine_norms(p->engine, p->owned[i], e));
    return transport_sum(p->transport, engine_buffer(p->engine, BUFFER_NORMS, 0), p->model->tensor_count, e);
}

int parallel_update(Parallel *p, const UpdateConfig *update, Error *e) {
    if (p->zero != ZERO_0 && p->buckets) return update_owned(p, update, e);
    TRY(gather_gradients(p, e));
    return engine_update(p->engine, (Range){0, p->model->flat_count}, update, e);
}

// One message for all: loss, stop, |s_r|^2, and the examples' norms by tensor.
int parallel_sums(Parallel *p, StepSums *sums, Error *e) {
    enum { LOSS, STOP, RANK_SQ, EXAMPLE_SQ };
    StepResult *result = sums->result;
    int tensors = p->model->tensor_count, count = EXAMPLE_SQ + tensors;
    double *values;
    TRY(memory_alloc((void **)&values, sizeof(double) * (size_t)count, "the step's sums", e));
    values[LOSS] = result->loss_sum;
    values[STOP] = sums->stop;
    values[RANK_SQ] = 0;
    for (int i = 0; i < tensors; i++) {
        values[RANK_SQ] += result->rank_sq[i];
        values[EXAMPLE_SQ + i] = result->example_sq[i];
    }
    int code = comm_sum(p->comm, values, count, e);
    result->loss_sum = values[LOSS];
    sums->stop = values[STOP] > 0;
    sums->rank_sq = values[RANK_SQ];
    memcpy(result->example_sq, values + EXAMPLE_SQ, sizeof(double) * (size_t)tensors);
    memory_free(values);
    return code;
}

// ---------------------------------------------------------------------------------------------------------------------
// Replicas

static int gather_hashes(Parallel *p, Range range, uint64_t *hashes, Error *e) {
    uint64_t mine;
    TRY(engine_hash(p->engine, range, &mine, e));
    return comm_gather(p->comm, &mine, hashes, sizeof mine, e);
}

static int count_of(const uint64_t *hashes, int ranks, uint64_t hash) {
    int count = 0;
    for (int r = 0; r < ranks; r++) count += hashes[r] == hash;
    return count;
}

static bool all_same(const uint64_t *hashes, int ranks) { return count_of(hashes, ranks, hashes[0]) == ranks; }

// The ranks that are not with the majority, "1, 2"; all of them where there is none.
static void name_strays(const uint64_t *hashes, int ranks, char *out, size_t bytes) {
    int with = 0; // whom most are with
    while (with < ranks && 2 * count_of(hashes, ranks, hashes[with]) <= ranks) with++;
    size_t used = 0;
    for (int r = 0; r < ranks && used < bytes; r++)
        if (with == ranks || hashes[r] != hashes[with])
            used += (size_t)snprintf(out + used, bytes - used, "%s%d", used ? ", " : "", r);
}

// The hashes of all weights differ: where?
static int fail_strays(Parallel *p, uint64_t *hashes, Error *e) {
    const Model *model = p->model;
    char strays[256];
    const Tensor *t = NULL;
    int ranks = p->comm->ranks;
    name_strays(hashes, ranks, strays, sizeof strays);
    for (int i = 0; i < model->tensor_count; i++) {
        t = &model->tensors[i];
        TRY(gather_hashes(p, (Range){t->offset, t->offset + t->count}, hashes, e));
        if (!all_same(hashes, ranks)) break;
    }
    comm_settle(p->comm); // all ranks say the same
    return FAIL(e, ERR_RANK,
                "is the memory of their machine sound? The same command goes on from the newest checkpoint",
                "ranks %s: weights that must be the same everywhere differ, first in %s", strays, t->name);
}

int parallel_compare(Parallel *p, Error *e) {
    uint64_t *hashes; // (ranks)
    if (!p->buckets) return 0;
    TRY(memory_alloc((void **)&hashes, sizeof *hashes * (size_t)p->comm->ranks, "the ranks' hashes", e));
    int code = gather_hashes(p, (Range){0, p->model->flat_count}, hashes, e);
    if (!code && !all_same(hashes, p->comm->ranks)) code = fail_strays(p, hashes, e);
    memory_free(hashes);
    return code;
}

// ---------------------------------------------------------------------------------------------------------------------
// The state as a whole

// What rank 0 asks the others for. kind < 0: nothing more.
typedef struct {
    int64_t kind;
    Range range;
} Request;

// Is each rank's memory of this array only a share of it? Weights are everywhere; where only their rounded copy is (as
// it may be on a device), the master weights, STATE_PARAM, are kept like the moments.
static bool is_shared_out(const Parallel *p, StateKind kind) {
    return p->zero != ZERO_0 && p->buckets && kind != STATE_GRAD;
}

static Range overlap(Range a, Range b) {
    Range both = {size_max(a.begin, b.begin), size_min(a.end, b.end)};
    if (both.begin > both.end) both.end = both.begin;
    return both;
}

// Rank 0 takes the parts of the others, which send them in the same order.
static int take_parts(Parallel *p, const Request *q, float *values, Error *e) {
    for (int i = 0; i < p->buckets; i++)
        for (int r = 1; r < p->comm->ranks; r++) {
            Range part = overlap(q->range, transport_part(p->bucket[i], r, p->comm->ranks));
            if (part.begin < part.end)
                TRY(comm_receive(p->comm, r, values + (part.begin - q->range.begin),
                                 sizeof(float) * (part.end - part.begin), e));
        }
    return 0;
}

static int send_parts(Parallel *p, const Request *q, Error *e) {
    for (int i = 0; i < p->buckets; i++) {
        Range part = overlap(q->range, transport_part(p->bucket[i], p->comm->rank, p->comm->ranks));
        if (part.begin == part.end) continue;
        float *values;
        size_t bytes = sizeof(float) * (part.end - part.begin);
        TRY(memory_alloc((void **)&values, bytes, "state for rank 0", e));
        int code = engine_store(p->engine, (StateKind)q->kind, part, values, e);
        if (!code) code = comm_send(p->comm, 0, values, bytes, e);
        memory_free(values);
        TRY(code);
    }
    return 0;
}

int parallel_store(Parallel *p, StateKind kind, Range range, float *values, Error *e) {
    TRY(engine_store(p->engine, kind, range, values, e));
    if (!is_shared_out(p, kind)) return 0;
    Request q = {kind, range};
    TRY(comm_broadcast(p->comm, &q, sizeof q, e));
    return take_parts(p, &q, values, e);
}

int parallel_served(Parallel *p, Error *e) {
    Request q = {.kind = -1};
    TRY(comm_broadcast(p->comm, &q, sizeof q, e));
    return comm_barrier(p->comm, e);
}

int parallel_serve(Parallel *p, Error *e) {
    for (;;) {
        Request q;
        TRY(comm_broadcast(p->comm, &q, sizeof q, e));
        if (q.kind < 0) return comm_barrier(p->comm, e);
        TRY(send_parts(p, &q, e));
    }
}
