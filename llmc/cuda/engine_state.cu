// engine_state: load, store, norms and update of parameters, gradients and moments: flat arrays or their owned ranges.
//
// Order of stores, which may run in another thread during steps:
// 1. cuda_update records state_ready after the last kernel that writes weights or moments.
// 2. A store waits on store_stream for state_ready, not for work queued later. Later work only reads weights and
//    moments, because no caller updates before the store is done (engine.h). Before the first update no write is
//    queued, because cuda_create and cuda_load drain their stream.
// 3. Weight transfers read owned ranges and write all others. Meanwhile callers store owned ranges only (engine.h).
// 4. Load and store drain their stream even on failure: on return no copy uses the caller's memory.
#include "base/hash.h"
#include "math/adamw.h"
#include "model/shard.h"
#include "cuda/engine.cuh"
#include "cuda/fp8.cuh"
#include "cuda/muon.cuh"

#include <assert.h>

// Returns the array of a kind; NULL if this engine has none.
static float *state_array(Engine *engine, StateKind kind) {
    float *const arrays[] = {engine->param, engine->grad_sum, engine->moment1, engine->moment2};
    return arrays[kind];
}

int engine_state_clear(Engine *engine, Error *e) {
    size_t all = engine->config.model->flat_count, owned = shard_elements(&engine->config);
    for (StateKind kind : {STATE_PARAM, STATE_GRAD, STATE_MOMENT1, STATE_MOMENT2}) {
        float *array = state_array(engine, kind);
        size_t n = shard_is_whole(&engine->config, kind) ? all : owned;
        if (array) CUDA_TRY(cudaMemsetAsync(array, 0, n * sizeof(float), engine->stream), e);
    }
    if (engine->own_weight) CUDA_TRY(cudaMemsetAsync(engine->own_weight, 0, owned * sizeof(real), engine->stream), e);
    size_t kept = shard_slotted_elements(engine->config.model, engine->config.shard_weights);
    return CUDA_CALL(cudaMemsetAsync(engine->weight, 0, kept * sizeof(real), engine->stream), e);
}

// Drains a stream that uses a caller's memory (rule 4). Returns `code` unless it is 0, else the drain's error.
static int copies_end(cudaStream_t stream, int code, Error *e) {
    cudaError_t status = cudaStreamSynchronize(stream);
    if (code) return code;
    return CUDA_CALL(status, e);
}

// Loads working weights through matmul_scratch, because the device has no room for master weights of other ranks.
static int load_working(Engine *engine, Range range, const float *values, Error *e) {
    const size_t chunk = MATMUL_WORKSPACE_BYTES / sizeof *values;
    for (size_t at = range.begin; at < range.end; at += chunk) {
        const size_t n = size_min(chunk, range.end - at);
        TRY(copy_in(engine, engine->matmul_scratch, values + (at - range.begin), n * sizeof *values, e));
        TRY(convert(engine->weight + at, (const float *)engine->matmul_scratch, n, engine->stream, e));
    }
    return 0;
}

static int load_pieces(Engine *engine, StateKind kind, Range range, const float *values, Error *e) {
    float *array = state_array(engine, kind);
    const Model *model = engine->config.model;
    Piece p;
    for (int next = 0; array && shard_next(&engine->config, kind, range, &next, &p);) {
        TRY(copy_in(engine, array + p.place, values + (p.range.begin - range.begin), range_float_bytes(p.range), e));
        if (kind == STATE_PARAM && engine->own_weight)
            TRY(convert(engine->own_weight + p.place, array + p.place, range_length(p.range), engine->stream, e));
    }
    if (kind != STATE_PARAM || !shard_masters_apart(&engine->config)) return 0;
    Range all = {0, engine->config.shard_weights ? model_bucket(model, 0).end : model->flat_count};
    return load_working(engine, range_overlap(range, all), values, e);
}

int cuda_load(Engine *engine, StateKind kind, Range range, const float *values, Error *e) {
    assert(range.begin <= range.end && range.end <= engine->config.model->flat_count);
    engine->seen_count = 0;
    return copies_end(engine->stream, load_pieces(engine, kind, range, values, e), e);
}

static int store_pieces(Engine *engine, StateKind kind, Range range, float *values, Error *e) {
    const float *array = state_array(engine, kind);
    Piece p;
    for (int next = 0; array && shard_next(&engine->config, kind, range, &next, &p);)
        CUDA_TRY(cudaMemcpyAsync(values + (p.range.begin - range.begin), array + p.place, range_float_bytes(p.range),
                                 cudaMemcpyDeviceToHost, engine->store_stream),
                 e);
    return 0;
}

int cuda_store(Engine *engine, StateKind kind, Range range, float *values, Error *e) {
    assert(range.begin <= range.end && range.end <= engine->config.model->flat_count);
    CUDA_TRY(cudaSetDevice(engine->device.ordinal), e); // a new thread has another current device
    if (kind == STATE_GRAD)
        CUDA_TRY(cudaEventRecord(engine->state_ready, engine->stream), e); // micro-steps do not record state_ready
    CUDA_TRY(cudaStreamWaitEvent(engine->store_stream, engine->state_ready), e);
    return copies_end(engine->store_stream, store_pieces(engine, kind, range, values, e), e);
}

void cuda_pin(Engine *engine, void *memory, size_t bytes) {
    if (cudaSetDevice(engine->device.ordinal) != cudaSuccess || // a new thread has another current device
        cudaHostRegister(memory, bytes, cudaHostRegisterPortable) != cudaSuccess)
        (void)cudaGetLastError(); // if pinning fails, copies are only slower
}

void cuda_unpin(Engine *, void *memory) {
    if (cudaHostUnregister(memory) != cudaSuccess) (void)cudaGetLastError(); // memory was not pinned
}

// ---- Gradients and the update ---------------------------------------------------------------------------------------

int cuda_clear(Engine *engine, Range range, Error *e) {
    float *grad = engine->grad + shard_grad_place(&engine->config, range.begin);
    return CUDA_CALL(cudaMemsetAsync(grad, 0, range_float_bytes(range), engine->stream), e);
}

int cuda_collect(Engine *engine, Range range, bool first, Error *e) {
    const EngineConfig *c = &engine->config;
    assert(c->shard_grads);
    return reduce_add(engine->grad_sum + shard_place(c, range), engine->grad + shard_grad_place(c, range.begin),
                      range_length(range), first, engine->stream, e);
}

int cuda_norms(Engine *engine, Range range, Error *e) {
    const EngineConfig *c = &engine->config;
    const float *sum = engine->grad_sum + shard_grad_sum_place(c, range);
    double *squares = stats_row(engine->stats, c->model, STATS_GRAD_SQ);
    engine->stats_sent = engine->scaled = false;
    TRY(reduce_squares(squares, sum, range, engine->segment, c->model->tensor_count, engine->scratch, engine->stream,
                       e));
    if (!engine->measures) return 0;
    const float *amax = stats_amax(engine->stats, c);
    return fp8_veto(squares, engine->exponent_there, amax, fp8_exponents(c->model->config.layers), engine->stream, e);
}

int engine_send_stats(Engine *engine, Error *e) {
    const EngineConfig *c = &engine->config;
    if (engine->stats_sent) return 0;
    if (engine->source_sum)
        TRY(reduce_products(engine->stats + stats_of_sources(c), engine->source_sum, c->sources, c->sources,
                            c->model->ln_parameters, engine->stream, e));
    TRY(copy_out(engine, engine->stats_host, engine->stats, stats_count(c) * sizeof(double), e));
    CUDA_TRY(cudaEventRecord(engine->stats_there, engine->stream), e);
    engine->stats_sent = true;
    return 0;
}

// Arrays of the optimizer for a piece of an owned range.
static OptimizerArrays arrays_of(Engine *engine, Piece p, const UpdateConfig *u) {
    const size_t begin = p.range.begin;
    assert(begin % DECAY_GRANULE == 0);
    real *weight = REAL_DTYPE != DTYPE_FP32 ? engine->weight + begin : NULL;
    if (engine->config.shard_weights) weight = engine->own_weight ? engine->own_weight + p.place : NULL;
    return {.param = engine->param + (shard_masters_apart(&engine->config) ? p.place : begin),
            .weight = weight,
            .moment1 = engine->moment1 + p.place,
            .moment2 = engine->moment2 + p.place,
            .grad = engine->grad_sum + shard_grad_sum_place(&engine->config, p.range),
            .rule = engine->rule + begin / DECAY_GRANULE,
            .tensor = engine->tensor ? engine->tensor + begin / DECAY_GRANULE : NULL,
            .trust = engine->trust,
            .tensors = engine->config.model->tensor_count,
            .lr = u->lr};
}

static AdamWStep update_step(const UpdateConfig *u) { // kernels replace grad_scale, 1.0 here
    return adamw_step(u->lr, u->beta1, u->beta2, u->eps, u->weight_decay, u->step, 1.0);
}

static int scale_gradient(Engine *engine, const UpdateConfig *u, Error *e) {
    if (engine->scaled) return 0;
    engine->scaled = true; // one factor for all ranges
    return optimizer_scale(engine->grad_scale, stats_row(engine->stats, engine->config.model, STATS_GRAD_SQ),
                           engine->config.model->tensor_count, (double)u->batch * engine->loss_scale, u->grad_clip,
                           engine->stream, e);
}

int cuda_trust(Engine *engine, Range range, const UpdateConfig *u, Error *e) {
    TRY(scale_gradient(engine, u, e));
    Piece p;
    for (int next = 0; shard_next(&engine->config, STATE_MOMENT1, range, &next, &p);) {
        const OptimizerArrays arrays = arrays_of(engine, p, u);
        TRY(optimizer_trust(engine->trust, &arrays, p.range, engine->segment, engine->config.model->tensor_count,
                            update_step(u), engine->grad_scale, engine->scratch, engine->stream, e));
    }
    return 0;
}

// Updates Muon's matrices with this sign of columns - rows (aspect), as many at a time as fit into engine->muon.
static int update_matrices(Engine *engine, const OptimizerArrays *a, Range range, const UpdateConfig *u, int aspect,
                           Error *e) {
    const Model *model = engine->config.model;
    const MuonStep step = {(float)u->momentum, (float)u->muon_lr, (float)u->weight_decay};
    MuonMatrices batch = {};
    for (const Tensor *t = model->tensors, *end = t + model->tensor_count; t < end; t++) {
        const size_t matrices = tensor_muon_matrices(t), columns = matrices ? t->columns / matrices : 0;
        const size_t shared = range_length(range_overlap(tensor_range(t), range));
        if (!matrices || !shared || (columns > t->rows) - (columns < t->rows) != aspect) continue;
        assert(shared == t->count); // the range holds whole matrices
        batch.rows = (int)t->rows, batch.columns = (int)columns;
        for (size_t k = 0; k < matrices; k++) {
            const size_t at = t->offset - range.begin + k * columns;
            batch.matrix[batch.count++] = {a->param + at, a->moment1 + at, a->weight ? a->weight + at : NULL,
                                           a->grad + at, t->columns};
            if (batch.count < muon_capacity(engine_muon_bytes(&engine->config), batch.rows, batch.columns)) continue;
            TRY(muon_run(engine->matmul, &batch, step, engine->grad_scale, engine->muon, engine->stream, e));
            batch.count = 0;
        }
    }
    return muon_run(engine->matmul, &batch, step, engine->grad_scale, engine->muon, engine->stream, e);
}

int cuda_update(Engine *engine, Range range, const UpdateConfig *u, Error *e) {
    const EngineConfig *c = &engine->config;
    engine->seen_count = 0;
    TRY(engine_send_stats(engine, e)); // before the update, so that the host need not await it
    TRY(scale_gradient(engine, u, e));
    Piece p;
    for (int next = 0; shard_next(c, STATE_MOMENT1, range, &next, &p);) {
        const OptimizerArrays arrays = arrays_of(engine, p, u);
        TRY(optimizer_update(&arrays, range_length(p.range), update_step(u), engine->grad_scale, engine->stream, e));
        for (int aspect = -1; aspect <= 1 && c->optimizer == OPTIMIZER_MUON; aspect++)
            TRY(update_matrices(engine, &arrays, p.range, u, aspect, e));
    }
    return CUDA_CALL(cudaEventRecord(engine->state_ready, engine->stream), e); // rule 1
}

// ---- Between ranks --------------------------------------------------------------------------------------------------

void *cuda_buffer(Engine *engine, EngineBuffer buffer, size_t element) {
    if (buffer == BUFFER_GRAD) return engine->grad + shard_grad_place(&engine->config, element);
    if (buffer == BUFFER_WEIGHT) return engine->weight + shard_weight_place(&engine->config, element);
    if (buffer == BUFFER_MASTER) return engine->param + element;
    if (buffer == BUFFER_MOMENT1) return engine->moment1 + element;
    if (buffer == BUFFER_MOMENT2) return engine->moment2 + element;
    if (buffer == BUFFER_TRUST) return engine->trust + element;
    engine->stats_sent = engine->scaled = false; // BUFFER_NORMS: the caller changes stats
    return stats_row(engine->stats, engine->config.model, STATS_GRAD_SQ) + element;
}

const void *cuda_own_weights(Engine *engine, Range range) {
    size_t place = shard_place(&engine->config, range);
    if (engine->own_weight) return engine->own_weight + place;
    return engine->param + place;
}

int cuda_hash(Engine *engine, Range range, uint64_t *hash, Error *e) {
    uint64_t *sum = (uint64_t *)engine->scratch,
             *answer = (uint64_t *)(engine->stats_host + stats_count(&engine->config));
    const Model *model = engine->config.model;
    bool masters = engine->param && shard_masters_apart(&engine->config) && engine->config.owned_count == 0;
    CUDA_TRY(cudaMemsetAsync(sum, 0, sizeof *sum, engine->stream), e);
    for (int i = 0; i < model_bucket_count(model); i++) {
        Range part = range_overlap(range, model_bucket(model, i));
        size_t n = range_length(part), at = part.begin;
        if (n == 0) continue;
        TRY(watch_call(&engine->weights_watch, await, part, e));
        const real *weight = engine->weight + shard_weight_place(&engine->config, at);
        TRY(reduce_hash(sum, weight, sizeof(real), n, at, engine->stream, e));
        if (!masters) continue;
        TRY(reduce_hash(sum, engine->param + at, sizeof(float), n, HASH_SECOND + at, engine->stream, e));
    }
    TRY(copy_out(engine, answer, sum, sizeof *sum, e));
    CUDA_TRY(cudaStreamSynchronize(engine->stream), e);
    *hash = *answer;
    return 0;
}
