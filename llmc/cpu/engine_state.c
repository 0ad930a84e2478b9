// Load, store, norms and update of the CPU engine's flat arrays: parameters, gradients and moments. A rank may keep
// only the ranges that it owns.
#include "base/hash.h"
#include "cpu/engine_cpu.h"
#include "cpu/layers.h"
#include "math/adamw.h"
#include "math/muon.h"

#include <assert.h>
#include <math.h>
#include <string.h>

static float *state_array(Engine *engine, StateKind kind) {
    float *const arrays[] = {engine->param, engine->grad_sum, engine->moment1, engine->moment2};
    return arrays[kind];
}

// Sets the kernels' weights of a range. The range must be contiguous in their array.
static void set_weights(Engine *engine, Range range, const float *values) {
    void *weight = weight_at(engine, range.begin);
    size_t n = range_length(range);
    if (engine->config.dtype == DTYPE_FP32) memcpy(weight, values, range_float_bytes(range));
    else
#pragma omp parallel for simd schedule(static) if (n > PARALLEL_FLOATS)
        for (size_t i = 0; i < n; i++) ((uint16_t *)weight)[i] = f32_to_bf16(values[i]);
}

int cpu_load(Engine *engine, StateKind kind, Range range, const float *values, Error *e) {
    assert(range.begin <= range.end && range.end <= engine->config.model->flat_count);
    float *array = state_array(engine, kind);
    Piece p;
    engine->seen_count = 0;
    if (kind == STATE_PARAM && shard_masters_apart(&engine->config)) {
        const Model *model = engine->config.model;
        Range all = {0, engine->config.shard_weights ? model_bucket(model, 0).end : model->flat_count};
        Range kept = range_overlap(range, all);
        set_weights(engine, kept, values + (kept.begin - range.begin));
    }
    for (int next = 0; array && shard_next(&engine->config, kind, range, &next, &p);)
        memcpy(array + p.place, values + (p.range.begin - range.begin), range_float_bytes(p.range));
    return 0;
}

int cpu_store(Engine *engine, StateKind kind, Range range, float *values, Error *e) {
    assert(range.begin <= range.end && range.end <= engine->config.model->flat_count);
    const float *array = state_array(engine, kind);
    Piece p;
    for (int next = 0; shard_next(&engine->config, kind, range, &next, &p);)
        memcpy(values + (p.range.begin - range.begin), array + p.place, range_float_bytes(p.range));
    return 0;
}

// ---- Gradients ------------------------------------------------------------------------------------------------------

const void *cpu_own_weights(Engine *engine, Range range) {
    const float *masters = engine->param + shard_place(&engine->config, range);
    assert(engine->config.shard_weights);
    if (engine->config.dtype == DTYPE_FP32) return masters;
    set_weights(engine, range, masters);
    return weight_at(engine, range.begin);
}

int cpu_clear(Engine *engine, Range range, Error *e) {
    memset(engine->grad + shard_grad_place(&engine->config, range.begin), 0, range_float_bytes(range));
    return 0;
}

int cpu_collect(Engine *engine, Range range, bool first, Error *e) {
    float *sum = engine->grad_sum + shard_place(&engine->config, range);
    const float *x = engine->grad + shard_grad_place(&engine->config, range.begin);
    size_t n = range_length(range);
    assert(engine->config.shard_grads);
    if (first) memcpy(sum, x, range_float_bytes(range));
    else
#pragma omp parallel for simd schedule(static) if (n > PARALLEL_FLOATS)
        for (size_t i = 0; i < n; i++) sum[i] += x[i];
    return 0;
}

// Does not change grad_sq of tensors outside the range.
int cpu_norms(Engine *engine, Range range, Error *e) {
    const Model *model = engine->config.model;
    const float *sum = engine->grad_sum + shard_grad_sum_place(&engine->config, range);
    for (int i = 0; i < model->tensor_count; i++) {
        const Range part = range_overlap(tensor_range(&model->tensors[i]), range);
        if (!range_length(part)) continue;
        engine->grad_sq[i] = sum_squares(sum + (part.begin - range.begin), range_length(part));
    }
    for (int i = 0; engine->fp8 && i < fp8_exponents(engine->config.model->config.layers); i++) {
        const int at = fp8_exponent_at(i);
        if (fp8_saturates(engine->exponents[at], engine->amax[at]))
            engine->grad_sq[0] = INFINITY; // prevents the update
    }
    return 0;
}

// ---- The update -----------------------------------------------------------------------------------------------------

// An owned part of a tensor. rounded: the kernels' bf16 weights; NULL if the kernels read param (fp32), or if
// cpu_own_weights rounds it (shard_weights).
typedef struct {
    const Tensor *tensor;
    size_t n; // elements
    float *param, *moment1, *moment2;
    uint16_t *rounded;
    const float *grad;
} TensorPart;

// Finds the next owned part of tensor i within the range, as shard_next does.
static bool next_part(Engine *engine, Range range, int i, int *next, TensorPart *part) {
    const Tensor *tensor = &engine->config.model->tensors[i];
    Piece p;
    if (!shard_next(&engine->config, STATE_MOMENT1, range_overlap(tensor_range(tensor), range), next, &p)) return false;
    bool rounds = engine->config.dtype != DTYPE_FP32 && !engine->config.shard_weights;
    *part = (TensorPart){.tensor = tensor,
                         .n = range_length(p.range),
                         .param = engine->param + (shard_masters_apart(&engine->config) ? p.place : p.range.begin),
                         .moment1 = engine->moment1 + p.place,
                         .moment2 = engine->moment2 + p.place,
                         .rounded = rounds ? (uint16_t *)engine->weight + p.range.begin : NULL,
                         .grad = engine->grad_sum + shard_grad_sum_place(&engine->config, p.range)};
    return true;
}

static bool decays(const Tensor *tensor) { return tensor->dimensions > 1; }

// Computes NewtonSchulz(x) of x (rows, columns) (math/muon.h). Overwrites x and y; returns the one that holds the
// result. gram, poly: scratch (side, side), side = min(rows, columns). Applies the polynomial p to the smaller of x x^T
// and x^T x, since p(x x^T) x = x p(x^T x).
static const float *newton_schulz(Matmul mm, float *x, float *y, float *gram, float *poly, size_t rows,
                                  size_t columns) {
    const size_t count = rows * columns, side = size_min(rows, columns);
    const bool wide = rows <= columns;
    const float scale = (float)(1.0 / (sqrt(sum_squares(x, count)) + MUON_EPS));
#pragma omp parallel for simd schedule(static) if (count > PARALLEL_FLOATS)
    for (size_t i = 0; i < count; i++) x[i] *= scale;
    for (int step = 0; step < MUON_STEPS; step++) {
        if (wide) matmul_nt(mm, gram, x, x, rows, rows, columns);
        else matmul_tn(mm, gram, NULL, x, x, columns, columns, rows, false);
        matmul_nn(mm, poly, gram, gram, NULL, side, side, side); // next lines: poly = a I + b gram + c gram^2
#pragma omp parallel for simd schedule(static) if (side * side > PARALLEL_FLOATS)
        for (size_t i = 0; i < side * side; i++) poly[i] = MUON_B * gram[i] + MUON_C * poly[i];
        for (size_t i = 0; i < side; i++) poly[i * side + i] += MUON_A;
        if (wide) matmul_nn(mm, y, poly, x, NULL, rows, columns, rows);
        else matmul_nn(mm, y, x, poly, NULL, rows, columns, columns);
        float *next = y;
        y = x;
        x = next;
    }
    return x;
}

// Applies Muon's update to matrix k of a tensor that holds `count` matrices side by side.
static void update_matrix(Engine *engine, const TensorPart *t, const UpdateConfig *u, float grad_scale, size_t count,
                          size_t k) {
    const size_t rows = t->tensor->rows, stride = t->tensor->columns, columns = stride / count;
    const float mu = (float)u->momentum, lr = (float)u->muon_lr, decay = (float)u->weight_decay;
    const float scale = (float)muon_scale(rows, columns);
    float *x = engine->matrix;
#pragma omp parallel for schedule(static) if (rows * columns > PARALLEL_FLOATS)
    for (size_t r = 0; r < rows; r++) {
        size_t at = r * stride + k * columns;
        for (size_t c = 0; c < columns; c++)
            x[r * columns + c] = muon_momentum(t->grad[at + c] * grad_scale, &t->moment1[at + c], mu);
    }
    Matmul fp32 = engine->matmul;
    fp32.kernel = matmul_kernel(DTYPE_FP32);
    const float *o = newton_schulz(fp32, x, engine->matrix_next, engine->gram, engine->poly, rows, columns);
#pragma omp parallel for schedule(static) if (rows * columns > PARALLEL_FLOATS)
    for (size_t r = 0; r < rows; r++)
        for (size_t c = 0; c < columns; c++) {
            size_t i = r * stride + k * columns + c;
            t->param[i] = muon_update(t->param[i], o[r * columns + c], lr, scale, decay);
            if (t->rounded) t->rounded[i] = f32_to_bf16(t->param[i]);
        }
}

// Returns AdamW's factors for a step. grad_scale turns the summed gradient into the clipped mean; NaN: no update.
static AdamWStep step_of_update(const Engine *engine, const UpdateConfig *u) {
    double sq = 0;
    for (int i = 0; i < engine->config.model->tensor_count; i++) sq += engine->grad_sq[i];
    double scale = adamw_grad_scale(sq, (double)u->batch * engine->loss_scale, u->grad_clip);
    return adamw_step(u->lr, u->beta1, u->beta2, u->eps, u->weight_decay, u->step, scale);
}

int cpu_update(Engine *engine, Range range, const UpdateConfig *u, Error *e) {
    AdamWStep step = step_of_update(engine, u);
    engine->seen_count = 0;
    if (isnan(step.grad_scale)) return 0;
    TensorPart t;
    for (int i = 0; i < engine->config.model->tensor_count; i++)
        for (int next = 0; next_part(engine, range, i, &next, &t);) {
            size_t matrices = engine->config.optimizer == OPTIMIZER_MUON ? tensor_muon_matrices(t.tensor) : 0;
            if (engine->trust_sq)
                step.lr = (float)(u->lr * lamb_ratio(engine->trust_sq[2 * i], engine->trust_sq[2 * i + 1]));
            assert(!matrices || t.n == t.tensor->count);
            for (size_t k = 0; k < matrices; k++) update_matrix(engine, &t, u, step.grad_scale, matrices, k);
            if (!matrices) adamw(t.param, t.rounded, t.grad, t.moment1, t.moment2, t.n, &step, decays(t.tensor));
        }
    return 0;
}

// Returns |direction|^2 of the coming step. The order of the sum depends on n alone.
static double direction_squares(const TensorPart *t, const AdamWStep *step) {
    enum { BLOCK = 1 << 12, PARTS = 256 };
    double partial[PARTS] = {0}, sum = 0;
    const size_t blocks = (t->n + BLOCK - 1) / BLOCK, each = (blocks + PARTS - 1) / PARTS;
    const bool decay = decays(t->tensor);
#pragma omp parallel for schedule(static) if (t->n > PARALLEL_FLOATS)
    for (size_t k = 0; k < PARTS; k++)
        for (size_t b = k * each; b < size_min((k + 1) * each, blocks); b++) {
            float direction[BLOCK];
            size_t first = b * BLOCK, n = size_min(BLOCK, t->n - first);
            for (size_t i = 0; i < n; i++) {
                size_t at = first + i;
                float moment1 = t->moment1[at], moment2 = t->moment2[at]; // copies, which adamw_direction changes
                direction[i] = adamw_direction(t->param[at], t->grad[at], &moment1, &moment2, step, decay);
            }
            partial[k] += sum_squares(direction, n);
        }
    for (size_t k = 0; k < PARTS; k++) sum += partial[k];
    return sum;
}

int cpu_trust(Engine *engine, Range range, const UpdateConfig *u, Error *e) {
    const AdamWStep step = step_of_update(engine, u);
    if (isnan(step.grad_scale)) return 0;
    TensorPart t;
    for (int i = 0; i < engine->config.model->tensor_count; i++)
        for (int next = 0; next_part(engine, range, i, &next, &t);) {
            engine->trust_sq[2 * i] = sum_squares(t.param, t.n);
            engine->trust_sq[2 * i + 1] = direction_squares(&t, &step);
        }
    return 0;
}

// ---- Between ranks --------------------------------------------------------------------------------------------------

void *cpu_buffer(Engine *engine, EngineBuffer buffer, size_t element) {
    switch (buffer) {
    case BUFFER_GRAD: return engine->grad + shard_grad_place(&engine->config, element);
    case BUFFER_WEIGHT: return weight_at(engine, element);
    case BUFFER_MASTER: return engine->param + element;
    case BUFFER_MOMENT1: return engine->moment1 + element;
    case BUFFER_MOMENT2: return engine->moment2 + element;
    case BUFFER_NORMS: return engine->grad_sq + element;
    case BUFFER_TRUST: break;
    }
    return engine->trust_sq + element;
}

// Sums hash_element over n values, 32 bits each (bf16: 16). first: x[0]'s place in the hash.
static uint64_t hash_values(const void *x, Dtype type, size_t n, uint64_t first) {
    uint64_t sum = 0;
#pragma omp parallel for simd schedule(static) reduction(+ : sum)
    for (size_t i = 0; i < n; i++) {
        uint32_t bits;
        if (type == DTYPE_BF16) bits = ((const uint16_t *)x)[i];
        else memcpy(&bits, (const float *)x + i, sizeof bits);
        sum += hash_element(first + i, bits);
    }
    return sum;
}

int cpu_hash(Engine *engine, Range range, uint64_t *hash, Error *e) {
    const Model *model = engine->config.model;
    *hash = 0;
    // Hash bucket by bucket, since with shard_weights only a few buckets are in memory.
    for (int i = 0; i < model_bucket_count(model); i++) {
        Range part = range_overlap(range, model_bucket(model, i));
        if (!range_length(part)) continue;
        TRY(watch_call(&engine->weights_watch, await, part, e));
        *hash += hash_values(weight_at(engine, part.begin), engine->config.dtype, range_length(part), part.begin);
    }
    bool whole = !engine->config.shard_weights && engine->config.owned_count == 0;
    if (whole && shard_masters_apart(&engine->config) && engine->param)
        *hash += hash_values(engine->param + range.begin, DTYPE_FP32, range_length(range), HASH_SECOND + range.begin);
    return 0;
}
