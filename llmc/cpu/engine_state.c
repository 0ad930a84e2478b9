// The CPU engine's state as flat arrays: parameters, gradients and moments, of which a rank may keep its share only.
// What comes from outside and goes there, norms of gradients, and the update.
#include "math/adamw.h"
#include "base/hash.h"
#include "model/shard.h"
#include "cpu/engine.h"
#include "cpu/layers.h"

#include <assert.h>
#include <math.h>
#include <string.h>

static float *state_array(Engine *engine, StateKind kind) {
    float *const arrays[] = {engine->param, engine->grad_sum, engine->moment1, engine->moment2};
    return arrays[kind];
}

static bool is_whole(const Engine *engine, StateKind kind) {
    return kind == STATE_PARAM || (kind == STATE_GRAD && !engine->config.shard_grads);
}

int cpu_load(Engine *engine, StateKind kind, Range range, const float *values, Error *e) {
    (void)e;
    assert(range.begin <= range.end && range.end <= engine->config.model->flat_count);
    float *array = state_array(engine, kind);
    Piece p;
    engine->seen_count = 0;
    for (int next = 0; shard_next(&engine->config, is_whole(engine, kind), range, &next, &p);)
        memcpy(array + p.place, values + (p.range.begin - range.begin), range_float_bytes(p.range));
    return 0;
}

void cpu_watch_weights(Engine *engine, const WeightsWatch *watch) {
    engine->weights_watch = watch ? *watch : (WeightsWatch){NULL, NULL, NULL};
}

int cpu_store(Engine *engine, StateKind kind, Range range, float *values, Error *e) {
    assert(range.begin <= range.end && range.end <= engine->config.model->flat_count);
    const float *array = state_array(engine, kind);
    Piece p;
    if (kind == STATE_PARAM) TRY(watch_await(&engine->weights_watch, range, e));
    for (int next = 0; shard_next(&engine->config, is_whole(engine, kind), range, &next, &p);)
        memcpy(values + (p.range.begin - range.begin), array + p.place, range_float_bytes(p.range));
    return 0;
}

void cpu_pin(Engine *engine, void *memory, size_t bytes) { (void)engine, (void)memory, (void)bytes; }
void cpu_unpin(Engine *engine, void *memory) { (void)engine, (void)memory; }

// ---------------------------------------------------------------------------------------------------------------------
// Gradients

int cpu_clear(Engine *engine, Range range, Error *e) {
    (void)e;
    float *grad = engine->grad + shard_grad_place(&engine->config, range.begin);
    size_t n = range_length(range);
#pragma omp parallel for simd schedule(static) if (n > 8192)
    for (size_t i = 0; i < n; i++) grad[i] = 0;
    return 0;
}

int cpu_collect(Engine *engine, Range range, bool first, Error *e) {
    (void)e;
    float *sum = engine->grad_sum + shard_place(&engine->config, range);
    const float *x = engine->grad + shard_grad_place(&engine->config, range.begin);
    size_t n = range_length(range);
    assert(engine->config.shard_grads);
    if (first) memcpy(sum, x, range_float_bytes(range));
    else
#pragma omp parallel for simd schedule(static) if (n > 8192)
        for (size_t i = 0; i < n; i++) sum[i] += x[i];
    return 0;
}

// The part of a tensor that lies in a range, as a range.
static Range tensor_in_range(const Tensor *t, Range range) { return range_overlap(tensor_range(t), range); }

// grad: of the range's first element and those behind it.
static void norms(const Model *model, const float *grad, Range range, double *sq, bool add) {
    for (int i = 0; i < model->tensor_count; i++) {
        Range part = tensor_in_range(&model->tensors[i], range);
        if (part.begin == part.end) continue;
        sq[i] = (add ? sq[i] : 0) + sum_squares(grad + (part.begin - range.begin), range_length(part));
    }
}

int cpu_norms(Engine *engine, Range range, Error *e) {
    (void)e;
    const float *sum = engine->grad_sum + shard_grad_sum_place(&engine->config, range);
    norms(engine->config.model, sum, range, engine->grad_sq, false);
    return 0;
}

int cpu_rank_norms(Engine *engine, Range range, Error *e) {
    (void)e;
    const float *own = engine->grad + shard_grad_place(&engine->config, range.begin);
    norms(engine->config.model, own, range, engine->rank_sq, true);
    return 0;
}

// ---------------------------------------------------------------------------------------------------------------------
// The update

// The part's elements of every array.
typedef struct {
    float *param, *moment1, *moment2;
    const float *grad;
} UpdateArrays;

static void adamw_range(UpdateArrays a, size_t n, const AdamWStep *step, bool decay) {
    float *p = a.param, *m = a.moment1, *v = a.moment2;
#pragma omp parallel for simd schedule(static) if (n > 8192)
    for (size_t i = 0; i < n; i++) p[i] = adamw_update(p[i], a.grad[i], &m[i], &v[i], step, decay);
}

static void update_piece(Engine *engine, Piece p, const AdamWStep *step) {
    const Model *model = engine->config.model;
    const float *grad = engine->grad_sum + shard_grad_sum_place(&engine->config, p.range);
    for (int i = 0; i < model->tensor_count; i++) {
        Range part = tensor_in_range(&model->tensors[i], p.range);
        size_t n = range_length(part), at = part.begin - p.range.begin;
        UpdateArrays a = {engine->param + part.begin, engine->moment1 + p.place + at, engine->moment2 + p.place + at,
                          grad + at};
        if (n) adamw_range(a, n, step, model->tensors[i].dimensions > 1);
    }
}

int cpu_update(Engine *engine, Range range, const UpdateConfig *u, Error *e) {
    (void)e;
    double sq = 0;
    for (int i = 0; i < engine->config.model->tensor_count; i++) sq += engine->grad_sq[i];
    double norm = sqrt(sq) / (double)u->batch;
    engine->seen_count = 0;
    if (!isfinite(norm)) return 0;
    AdamWStep step = adamw_step(u->lr, u->beta1, u->beta2, u->eps, u->weight_decay, u->step,
                                adamw_clip(norm, u->grad_clip) / (double)u->batch);
    Piece p;
    for (int next = 0; shard_next(&engine->config, false, range, &next, &p);) update_piece(engine, p, &step);
    return 0;
}

// ---------------------------------------------------------------------------------------------------------------------
// Between ranks

void *cpu_buffer(Engine *engine, EngineBuffer buffer, size_t element) {
    switch (buffer) {
    case BUFFER_GRAD: return engine->grad + shard_grad_place(&engine->config, element);
    case BUFFER_WEIGHT: return engine->param + element;
    case BUFFER_NORMS: return engine->grad_sq + element;
    }
    assert(0);
    return NULL;
}

size_t cpu_weight_bytes(const Engine *engine) {
    (void)engine;
    return sizeof(float);
}

void *cpu_stream(Engine *engine) {
    (void)engine;
    return NULL;
}

int cpu_hash(Engine *engine, Range range, uint64_t *hash, Error *e) {
    uint64_t sum = 0;
    TRY(watch_await(&engine->weights_watch, range, e));
#pragma omp parallel for simd schedule(static) reduction(+ : sum)
    for (size_t i = range.begin; i < range.end; i++) {
        uint32_t bits;
        memcpy(&bits, &engine->param[i], sizeof bits);
        sum += hash_element(i, bits);
    }
    *hash = sum;
    return 0;
}
