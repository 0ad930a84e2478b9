// The CUDA engine's state from outside: parameters, gradients and moments, of which a rank may keep its share only.
#include "../shard.h"
#include "engine.cuh"

#include <assert.h>

static bool weights_rounded() { return sizeof(real) < sizeof(float); }

// Is the array there as a whole, or for the owned ranges alone?
static bool is_whole(const Engine *engine, StateKind kind) {
    if (kind == STATE_PARAM) return !weights_rounded();
    return kind == STATE_GRAD && !engine->config.shard_grads;
}

// NULL: this engine has none.
static float *state_array(Engine *engine, StateKind kind) {
    float *const arrays[] = {engine->param, engine->grad_sum, engine->moment1, engine->moment2};
    return arrays[kind];
}

static size_t float_bytes(Range range) { return (range.end - range.begin) * sizeof(float); }

int engine_state_clear(Engine *engine, Error *e) {
    size_t all = engine->config.model->flat_count, owned = shard_elements(&engine->config);
    for (StateKind kind : {STATE_PARAM, STATE_GRAD, STATE_MOMENT1, STATE_MOMENT2}) {
        float *array = state_array(engine, kind);
        size_t n = is_whole(engine, kind) ? all : owned;
        if (array) CUDA_TRY(cudaMemsetAsync(array, 0, n * sizeof(float), engine->stream), e);
    }
    CUDA_TRY(cudaMemsetAsync(engine->weight, 0, all * sizeof(real), engine->stream), e);
    return 0;
}

int engine_state_ready(Engine *engine, Error *e) {
    CUDA_TRY(cudaEventRecord(engine->state_ready, engine->stream), e);
    return 0;
}

// Ends a call that has queued copies from or to its caller's memory: that is the caller's again, whatever `code` says
// became of the call.
static int copies_end(cudaStream_t stream, int code, Error *e) {
    cudaError_t status = cudaStreamSynchronize(stream);
    if (code) return code;
    CUDA_TRY(status, e);
    return 0;
}

static int copy_in(Engine *engine, void *to, const void *from, size_t bytes, Error *e) {
    CUDA_TRY(cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, engine->stream), e);
    return 0;
}

// The working weights, rounded on the way: the device has no room for the master weights of other ranks.
static int load_rounded(Engine *engine, Range range, const float *values, Error *e) {
    const size_t chunk = 1 << 20; // elements
    real *rounded;
    int code = 0;
    TRY(memory_alloc((void **)&rounded, chunk * sizeof *rounded, "rounded weights", e));
    for (size_t at = range.begin; at < range.end && !code; at += chunk) {
        size_t n = size_min(chunk, range.end - at);
        for (size_t i = 0; i < n; i++) rounded[i] = (real)values[at - range.begin + i]; // to nearest even
        code = copy_in(engine, engine->weight + at, rounded, n * sizeof *rounded, e);
        code = copies_end(engine->stream, code, e);
    }
    memory_free(rounded);
    return code;
}

static int load_pieces(Engine *engine, StateKind kind, Range range, const float *values, Error *e) {
    float *array = state_array(engine, kind);
    Piece p;
    for (int next = 0; array && shard_next(&engine->config, is_whole(engine, kind), range, &next, &p);)
        TRY(copy_in(engine, array + p.place, values + (p.range.begin - range.begin), float_bytes(p.range), e));
    return kind == STATE_PARAM && weights_rounded() ? load_rounded(engine, range, values, e) : 0;
}

int engine_load(Engine *engine, StateKind kind, Range range, const float *values, Error *e) {
    assert(range.begin <= range.end && range.end <= engine->config.model->flat_count);
    return copies_end(engine->stream, load_pieces(engine, kind, range, values, e), e);
}

void engine_await_weights(Engine *engine, WeightsAwait await, void *context) {
    engine->await = await;
    engine->await_context = context;
}

int engine_await(Engine *engine, Range range, Error *e) {
    return engine->await ? engine->await(engine->await_context, range, e) : 0;
}

// Orders the store stream behind what is to be stored, and behind nothing that needs not be waited for. Weights and
// moments are those that engine_update left behind when it recorded `state_ready`, however much of the next step has been
// queued since: that only reads them, and the update that would change them waits for the copy (engine.h). What
// engine_create and engine_load put there was there when they returned.
// Two things come from elsewhere, so the mark is set anew, behind all that is queued: gradients, and weights on their way
// from other ranks. These are waited for whatever is stored: who has stored everything may end the program.
static int order_store(Engine *engine, StateKind kind, Range range, Error *e) {
    TRY(engine_await(engine, range, e));
    if (kind == STATE_GRAD || engine->await) TRY(engine_state_ready(engine, e));
    CUDA_TRY(cudaStreamWaitEvent(engine->store_stream, engine->state_ready), e);
    return 0;
}

static int store_pieces(Engine *engine, StateKind kind, Range range, float *values, Error *e) {
    const float *array = state_array(engine, kind);
    Piece p;
    for (int next = 0; array && shard_next(&engine->config, is_whole(engine, kind), range, &next, &p);)
        CUDA_TRY(cudaMemcpyAsync(values + (p.range.begin - range.begin), array + p.place, float_bytes(p.range),
                                 cudaMemcpyDeviceToHost, engine->store_stream),
                 e);
    return 0;
}

int engine_store(Engine *engine, StateKind kind, Range range, float *values, Error *e) {
    assert(range.begin <= range.end && range.end <= engine->config.model->flat_count);
    CUDA_TRY(cudaSetDevice(engine->device.ordinal), e); // the calling thread's
    TRY(order_store(engine, kind, range, e));
    return copies_end(engine->store_stream, store_pieces(engine, kind, range, values, e), e);
}

void engine_pin(Engine *engine, void *memory, size_t bytes) {
    if (cudaSetDevice(engine->device.ordinal) != cudaSuccess || // the calling thread's
        cudaHostRegister(memory, bytes, cudaHostRegisterPortable) != cudaSuccess)
        (void)cudaGetLastError(); // copies are slower then
}

void engine_unpin(Engine *engine, void *memory) {
    (void)engine;
    if (cudaHostUnregister(memory) != cudaSuccess) (void)cudaGetLastError(); // it was not pinned
}
