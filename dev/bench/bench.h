// bench: what the benchmarks of whole engines share: sorted figures and a model's initial values.
#pragma once

#include "model/engine.h"

#include <stdlib.h>

static inline int bench_by_value(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

// Sorts the values and returns their median.
static inline double bench_median(double *values, int n) {
    qsort(values, (size_t)n, sizeof *values, bench_by_value);
    return n % 2 ? values[n / 2] : 0.5 * (values[n / 2 - 1] + values[n / 2]);
}

// Loads initial values. To save time, every block gets the first block's values.
static inline int bench_load_initial(Engine *engine, const Model *model, Error *e) {
    float *values;
    int code = 0;
    TRY(memory_alloc((void **)&values, model_tensor_largest(model) * sizeof *values, "a tensor", e));
    for (int k = 0; k < model->tensor_count && !code; k++) {
        const Tensor *first = &model->tensors[k];
        if (first->layer > 0) continue;
        model_init_values(model, first, 1, 0, first->count, values);
        for (int i = k; i < model->tensor_count && !code; i++) {
            const Tensor *t = &model->tensors[i];
            if (t->kind != first->kind) continue;
            code = engine_load(engine, STATE_PARAM, (Range){t->offset, t->offset + t->count}, values, e);
        }
    }
    memory_free(values);
    return code;
}

static inline int bench_results(StepResult *result, const Model *model, Error *e) {
    size_t bytes = (size_t)model->tensor_count * sizeof(double);
    TRY(memory_alloc((void **)&result->grad_sq, bytes, "results", e));
    return memory_alloc((void **)&result->example_sq, bytes, "results", e);
}
