#include "ranks/parallel.h"

#include <assert.h>
#include <stdio.h>
#include <string.h>

// ---- Set-up ---------------------------------------------------------------------------------------------------------

int64_t parallel_micro_steps(const Parallel *p, int64_t rows) {
    const int64_t most = rows_of_rank(rows, 0, p->groups).count; // most rows of any group
    return (most + p->shape->micro_batch - 1) / p->shape->micro_batch;
}

// TensorRanks.gather_rows
static int gather_rows(void *context, void *values, int rows, size_t width, Dtype type, Error *e) {
    Parallel *p = context;
    return p->api->gather_rows(p->transport, values, rows, width, type, e);
}

// TensorRanks.reduce_rows
static int reduce_rows(void *context, void *own, const void *partial, int rows, size_t width, Dtype type, Error *e) {
    Parallel *p = context;
    return p->api->reduce_rows(p->transport, own, partial, rows, width, type, e);
}

int parallel_create(Parallel *p, Comm *comm, const ParallelConfig *config, EngineConfig *shape, Error *e) {
    const Model *model = shape->model;
    size_t buckets = (size_t)model_bucket_count(model);
    const int K = config->tensor, shared = config->shared ? config->shared : comm->ranks;
    *p = (Parallel){.comm = comm, .model = model, .config = *config, .shape = shape, .api = config->transport};
    p->group = comm->rank / K, p->groups = comm->ranks / K;
    shape->tensor = (TensorRanks){comm->rank % K, K, gather_rows, reduce_rows, p};
    if (comm->ranks == 1) return 0;
    p->division = (Division){comm->rank % shared, shared, K, shape->optimizer == OPTIMIZER_MUON ? model : NULL};
    TRY(memory_alloc((void **)&p->owned, sizeof(Range) * buckets, "buckets", e));
    TRY(memory_alloc_zero((void **)&p->work, 2 * sizeof(int64_t) * buckets, "buckets", e));
    p->gathered = p->work + buckets;
    p->buckets = (int)buckets;
    for (int i = 0; i < p->buckets; i++) {
        const Range bucket = model_bucket(model, i);
        p->owned[i] = division_part(&p->division, bucket, division_rank(&p->division, bucket));
    }
    if (config->zero == ZERO_0) return 0;
    const bool one_micro_step = parallel_micro_steps(p, config->batch_max) <= 1;
    p->kept = config->zero == ZERO_3 ? 1 : p->buckets;
    shape->owned = p->owned;
    shape->owned_count = p->buckets;
    shape->shard_grads = config->zero >= ZERO_2 && (one_micro_step || config->reduce == REDUCE_MICRO_STEP);
    shape->shard_weights = config->zero == ZERO_3;
    return 0;
}

void parallel_destroy(Parallel *p) {
    if (p->transport) p->api->destroy(p->transport);
    memory_free(p->work);
    memory_free(p->owned);
    *p = (Parallel){0};
}

// Every rank awaits the same transfers in the same order, and the watchdog counts these calls. Without them a rank that
// hangs in compute after it began a transfer would show as many collectives as the ranks that await the transfer.
static int await_transfer(Parallel *p, int64_t work, Error *e) {
    watchdog_begin(p->comm->watchdog, TRANSPORT_WORK);
    return p->api->wait_for(p->transport, work, e);
}

// ---- Weights --------------------------------------------------------------------------------------------------------

// Starts to gather bucket i of an array.
static int gather(Parallel *p, EngineBuffer array, int i, int64_t *work, Error *e) {
    Range bucket = model_bucket(p->model, i), part = p->owned[i];
    size_t bytes = array == BUFFER_WEIGHT ? engine_weight_bytes(p->engine) : sizeof(float);
    void *values = engine_buffer(p->engine, array, bucket.begin);
    const void *own = (const char *)values + (part.begin - bucket.begin) * bytes;
    if (p->shape->shard_weights) own = engine_own_weights(p->engine, part);
    return p->api->all_gather(p->transport, own, values, bytes, bucket, work, e);
}

// Starts to gather the weights of bucket i, if not yet started. A block in a slot replaces the slot's other blocks.
static int send_bucket(Parallel *p, int i, Error *e) {
    if (p->gathered[i]) return 0;
    for (int k = p->kept; i >= p->kept && k < p->buckets; k++)
        if (k % SHARD_SLOTS == i % SHARD_SLOTS) p->gathered[k] = 0;
    return gather(p, BUFFER_WEIGHT, i, &p->gathered[i], e);
}

int parallel_send_weights(Parallel *p, Error *e) {
    for (int i = 0; i < p->kept; i++) TRY(send_bucket(p, i, e));
    return 0;
}

// WeightsWatch.soon
static int send_weights(void *context, Range range, Error *e) {
    Parallel *p = context;
    if (range.begin == range.end) return 0;
    int last = model_bucket_at(p->model, range.end - 1);
    for (int i = last < p->kept ? 0 : last; i <= last; i++) TRY(send_bucket(p, i, e));
    return 0;
}

// WeightsWatch.await
static int await_weights(void *context, Range range, Error *e) {
    Parallel *p = context;
    if (range.begin == range.end) return 0;
    int last = model_bucket_at(p->model, range.end - 1);
    if (last < p->arrived) return 0;
    TRY(send_weights(p, range, e));
    if (last < p->kept) p->arrived = last + 1;
    return await_transfer(p, p->gathered[last], e);
}

// Awaits bucket i as a pass does (train_gpt2.c), and starts to gather `after`, the bucket that the pass reads next.
static int await_bucket(Parallel *p, int i, int after, Error *e) {
    TRY(await_weights(p, model_bucket(p->model, i), e));
    return after > 0 && after < p->buckets ? send_bucket(p, after, e) : 0;
}

int parallel_start(Parallel *p, Engine *engine, WireType wire, Error *e) {
    p->engine = engine;
    if (!p->buckets) return 0;
    // Each group is on one machine exactly if each rank's number on its machine is congruent to its rank modulo K.
    double apart = p->comm->local_rank % p->config.tensor != p->comm->rank % p->config.tensor;
    TRY(comm_sum(p->comm, &apart, 1, e));
    if (apart > 0 && p->comm->rank == 0)
        fprintf(stderr,
                "warning: --tensor %d: ranks on two machines hold one model, so every block waits for their network. "
                "use a --tensor that divides a machine's ranks, in order (mpirun --map-by slot)\n",
                p->config.tensor);
    TRY(p->api->create(&p->transport, p->comm, &p->division, wire, model_bucket_largest(p->model),
                       engine_stream(engine), e));
    if (p->config.zero > ZERO_0) {
        engine_watch_weights(engine, &(WeightsWatch){send_weights, await_weights, p});
        return 0;
    }
    static const EngineBuffer arrays[] = {BUFFER_WEIGHT, BUFFER_MASTER, BUFFER_MOMENT1, BUFFER_MOMENT2};
    int64_t work = 0; // each rank has loaded what it owns: gather whole arrays
    for (int i = 0; i < 4 * p->buckets; i++) TRY(gather(p, arrays[i % 4], i / 4, &work, e));
    return await_transfer(p, work, e);
}

// ---- Gradients ------------------------------------------------------------------------------------------------------

// Collects the sums of buckets [i, uncollected), before other gradients overwrite their memory.
static int collect_from(Parallel *p, int i, Error *e) {
    while (p->shape->shard_grads && p->uncollected > i) {
        int last = --p->uncollected;
        TRY(await_transfer(p, p->work[last], e));
        TRY(engine_collect(p->engine, p->owned[last], p->first, e));
    }
    return 0;
}

// GradientWatch.begins. A block's bucket i overwrites the memory of bucket i + 2. Bucket 0 begins first in a
// micro-step, and overwrites its own memory.
static int bucket_begins(void *context, Range range, Error *e) {
    Parallel *p = context;
    int i = model_bucket_at(p->model, range.begin);
    if (i > 0) return collect_from(p, i + 2, e);
    if (p->unreduced == 0) { // an earlier micro-step of this step was reduced
        TRY(collect_from(p, 0, e));
        p->first = false;
    }
    p->unreduced = p->uncollected = p->buckets;
    return 0;
}

// GradientWatch.final. All later buckets are already final.
static int bucket_final(void *context, Range range, Error *e) {
    Parallel *p = context;
    int i = --p->unreduced;
    assert(i == model_bucket_at(p->model, range.begin));
    return p->api->reduce_scatter(p->transport, engine_buffer(p->engine, BUFFER_GRAD, range.begin), range, &p->work[i],
                                  e);
}

int parallel_begin_step(Parallel *p, Error *e) {
    if (p->transport) p->api->waited(p->transport); // forget waits outside a step
    p->waited = 0;
    p->first = true;
    p->has_gradients = false;
    p->own = 0;
    p->unreduced = p->uncollected = p->buckets;
    return engine_begin_step(p->engine, e);
}

// Reduces bucket i on a rank whose group has no rows left. It contributes its earlier gradients, or 0.
static int bucket_without_rows(Parallel *p, int i, Error *e) {
    Range bucket = model_bucket(p->model, i);
    if (p->shape->shard_grads || !p->has_gradients) TRY(engine_clear(p->engine, bucket, e));
    return bucket_final(p, bucket, e);
}

// Starts the transfers of the other ranks' forward and backward pass (invariant 4).
static int micro_step_without_rows(Parallel *p, bool reduces, Error *e) {
    TRY(parallel_send_weights(p, e));
    for (int i = tensor_exchanges(p->shape, true); i > 0; i--) // count only: invariant 7
        watchdog_begin(p->comm->watchdog, TRANSPORT_ROWS);
    for (int i = 0; i < p->buckets && p->config.zero > ZERO_0; i++) TRY(await_bucket(p, i, i + 1, e));
    if (reduces) TRY(bucket_begins(p, model_bucket(p->model, 0), e));
    for (int i = p->buckets - 1; i > 0; i--) {
        if (reduces) TRY(bucket_begins(p, model_bucket(p->model, i), e));
        if (p->shape->shard_weights) TRY(await_bucket(p, i, i - 1, e));
        if (reduces) TRY(bucket_without_rows(p, i, e));
    }
    return reduces ? bucket_without_rows(p, 0, e) : 0;
}

int parallel_micro_step(Parallel *p, const uint16_t *tokens, int n, GnsMode mode, bool last, Error *e) {
    GradientWatch watch = {bucket_begins, bucket_final, p};
    bool reduces = p->buckets && (last || p->config.reduce == REDUCE_MICRO_STEP);
    p->own += rows_of_rank(n, p->comm->rank % p->config.tensor, p->config.tensor).count;
    if (n == 0) return micro_step_without_rows(p, reduces, e);
    p->has_gradients = true;
    if (reduces) engine_watch(p->engine, &watch);
    return engine_micro_step(p->engine, tokens, n, mode, e);
}

int parallel_norms(Parallel *p, Error *e) {
    if (!p->buckets) return engine_norms(p->engine, (Range){0, p->model->flat_count}, e);
    assert(p->unreduced == 0);
    for (int i = p->buckets - 1; i >= 0; i--) { // while buckets [0, i) are in transfer
        TRY(collect_from(p, i, e));
        TRY(await_transfer(p, p->work[i], e));
        // Only machine 0's replica counts (invariant 8). Other machines call engine_norms to report fp8's saturation.
        Range counted = p->owned[i];
        if (p->comm->rank >= p->division.ranks) counted.end = counted.begin;
        TRY(engine_norms(p->engine, counted, e));
    }
    return p->api->sum(p->transport, engine_buffer(p->engine, BUFFER_NORMS, 0), p->model->tensor_count, e);
}

// ---- Update ---------------------------------------------------------------------------------------------------------

int parallel_drain(Parallel *p, Error *e) {
    if (!p->transport) return 0;
    double nothing = 0;
    TRY(p->api->finish(p->transport, e));
    return comm_sum(p->comm, &nothing, 1, e); // waits for every rank
}

int parallel_update(Parallel *p, const UpdateConfig *update, Error *e) {
    const Range all = {0, p->model->flat_count};
    bool lamb = p->shape->optimizer == OPTIMIZER_LAMB; // needs norms of whole tensors
    if (!p->buckets && lamb) TRY(engine_trust(p->engine, all, update, e));
    if (!p->buckets) return engine_update(p->engine, all, update, e);
    if (lamb) {
        for (int i = 0; i < p->buckets; i++) TRY(engine_trust(p->engine, p->owned[i], update, e));
        TRY(p->api->sum(p->transport, engine_buffer(p->engine, BUFFER_TRUST, 0), 2 * p->model->tensor_count, e));
    }
    if (p->config.zero == ZERO_0) { // update each bucket while the sums of later buckets are in transfer
        for (int i = 0; i < p->buckets; i++) TRY(gather(p, BUFFER_GRAD, i, &p->work[i], e));
        for (int i = 0; i < p->buckets; i++) {
            TRY(await_transfer(p, p->work[i], e));
            TRY(engine_update(p->engine, model_bucket(p->model, i), update, e));
        }
        return 0;
    }
    // Update the owned parts, and start to gather buckets 0 and 1 meanwhile: the next forward pass reads them first.
    p->arrived = 0;
    memset(p->gathered, 0, (size_t)p->buckets * sizeof *p->gathered);
    for (int i = 0; i < p->buckets; i++) {
        TRY(engine_update(p->engine, p->owned[i], update, e));
        if (i < 2) TRY(send_weights(p, model_bucket(p->model, i), e));
    }
    return 0;
}

// Sends one message with seconds waited, losses, stop, `more`, the examples' squared norms by tensor, and the values to
// maximise (amax).
int parallel_sums(Parallel *p, StepSums *sums, Error *e) {
    CommLeast least = {0};
    StepResult *result = sums->result;
    if (p->transport) p->waited += p->api->waited(p->transport);
    double waited = p->waited, stop = sums->stop;
    double *const single[] = {&waited, &result->loss_sum, &result->nll_sum, &stop, &sums->more};
    const int singles = sizeof single / sizeof *single, tensors = p->model->tensor_count, count = singles + tensors;
    int sites = result->amax ? fp8_exponents(p->model->config.layers) : 0;
    double *values;
    TRY(memory_alloc((void **)&values, sizeof(double) * (size_t)(count + sites), "the step's sums", e));
    for (int i = 0; i < singles; i++) values[i] = *single[i];
    memcpy(values + singles, result->example_sq, sizeof(double) * (size_t)tensors);
    for (int i = 0; i < sites; i++) values[count + i] = result->amax[fp8_exponent_at(i)];
    int code = comm_reduce(p->comm, values, count, sites, &least, e);
    for (int i = 0; i < singles; i++) *single[i] = values[i];
    memcpy(result->example_sq, values + singles, sizeof(double) * (size_t)tensors);
    for (int i = 0; i < sites; i++) result->amax[fp8_exponent_at(i)] = (float)values[count + i];
    sums->stop = stop > 0;
    sums->slowest = least.rank;
    sums->lost = waited / p->comm->ranks - least.value;
    memory_free(values);
    return code;
}

// ---- Replicas -------------------------------------------------------------------------------------------------------

int parallel_compare(Parallel *p, Error *e) {
    uint64_t hash;
    if (!p->buckets) return 0;
    const char *const hint = "suspect faulty memory or a faulty GPU, of this rank or of the other. The same command "
                             "resumes from the newest checkpoint";
    const int K = p->config.tensor;
    TRY(engine_hash(p->engine, (Range){0, p->model->flat_count}, &hash, e));
    TRY(comm_same(p->comm, hash, K, ERR_RANK, "other weights", hint, e));
    if (K == 1) return 0;
    TRY(engine_hash(p->engine, model_bucket(p->model, 0), &hash, e)); // all ranks hold bucket 0
    return comm_same(p->comm, hash, 1, ERR_RANK, "other weights", hint, e);
}
