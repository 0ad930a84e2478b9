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

// The working weights, rounded on the way: the device has no room for the master weights of other ranks.
static int load_rounded(Engine *engine, Range range, const float *values, Error *e) {
    const size_t chunk = 1 << 20; // elements
    real *rounded;
    cudaError_t status = cudaSuccess;
    TRY(memory_alloc((void **)&rounded, chunk * sizeof *rounded, "rounded weights", e));
    for (size_t at = range.begin; at < range.end && status == cudaSuccess; at += chunk) {
        size_t n = size_min(chunk, range.end - at);
        for (size_t i = 0; i < n; i++) rounded[i] = (real)values[at - range.begin + i]; // to nearest even
        status =
            cudaMemcpyAsync(engine->weight + at, rounded, n * sizeof *rounded, cudaMemcpyHostToDevice, engine->stream);
        if (status == cudaSuccess) status = cudaStreamSynchronize(engine->stream);
    }
    memory_free(rounded);
    CUDA_TRY(status, e);
    return 0;
}

int engine_load(Engine *engine, StateKind kind, Range range, const float *values, Error *e) {
    assert(range.begin <= range.end && range.end <= engine->config.model->flat_count);
    float *array = state_array(engine, kind);
    Piece p;
    for (int next = 0; array && shard_next(&engine->config, is_whole(engine, kind), range, &next, &p);)
        CUDA_TRY(cudaMemcpyAsync(array + p.place, values + (p.range.begin - range.begin), float_bytes(p.range),
                                 cudaMemcpyHostToDevice, engine->stream),
                 e);
    if (kind == STATE_PARAM && weights_rounded()) TRY(load_rounded(engine, range, values, e));
    CUDA_TRY(cudaStreamSynchronize(engine->stream), e); // the caller may reuse `values`
    return 0;
}

void engine_await_weights(Engine *engine, WeightsAwait await, void *context) {
    engine->await = await;
    engine->await_context = context;
}

int engine_await(Engine *engine, Range range, Error *e) {
    return engine->await ? engine->await(engine->await_context, range, e) : 0;
}

// Weights on their way are waited for whatever is stored: who has stored everything may end the program.
int engine_store(Engine *engine, StateKind kind, Range range, float *values, Error *e) {
    assert(range.begin <= range.end && range.end <= engine->config.model->flat_count);
    const float *array = state_array(engine, kind);
    Piece p;
    CUDA_TRY(cudaSetDevice(engine->device.ordinal), e); // the calling thread's
    TRY(engine_await(engine, range, e));
    CUDA_TRY(cudaEventRecord(engine->store_after, engine->stream), e);
    CUDA_TRY(cudaStreamWaitEvent(engine->store_stream, engine->store_after), e);
    for (int next = 0; array && shard_next(&engine->config, is_whole(engine, kind), range, &next, &p);)
        CUDA_TRY(cudaMemcpyAsync(values + (p.range.begin - range.begin), array + p.place, float_bytes(p.range),
                                 cudaMemcpyDeviceToHost, engine->store_stream),
                 e);
    CUDA_TRY(cudaStreamSynchronize(engine->store_stream), e);
    return 0;
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
