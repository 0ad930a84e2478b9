// Two buffers alternate: the caller reads one buffer while the worker fills the other, rows[ahead]. While the worker
// reads, it owns rows[ahead] and `n`. The caller owns everything else.
#include "text/loader.h"

#include "base/thread.h"

#include <assert.h>

struct Loader {
    const Dataset *data;
    int max_rows;
    uint16_t *rows[2]; // each (max_rows, T + 1)
    int ahead;
    uint64_t first; // rows[ahead] holds examples [first, first + n)
    int n;
    Worker worker;
};

static void *read_rows(void *loader) {
    Loader *l = loader;
    if (dataset_rows(l->data, l->first, l->n, l->rows[l->ahead], &(Error){0})) l->n = 0; // loader_rows reads again
    return NULL;
}

int loader_create(Loader **out, const Dataset *data, int max_rows, int seq_len, Error *e) {
    size_t tokens = (size_t)max_rows * ((size_t)seq_len + 1);
    TRY(memory_alloc((void **)out, sizeof(Loader) + 2 * tokens * sizeof(uint16_t), "the data loader", e));
    uint16_t *rows = (uint16_t *)(*out + 1);
    **out = (Loader){.data = data, .max_rows = max_rows, .rows = {rows, rows + tokens}};
    return 0;
}

void loader_destroy(Loader *loader) {
    if (loader) worker_join(&loader->worker);
    memory_free(loader);
}

int loader_rows(Loader *l, uint64_t first, int n, const uint16_t **rows, Error *e) {
    assert(n > 0 && n <= l->max_rows);
    worker_join(&l->worker);
    bool there = l->first == first && l->n >= n; // l->n > n in the run's last step
    l->n = 0;
    if (!there) TRY(dataset_rows(l->data, first, n, l->rows[l->ahead], e));
    *rows = l->rows[l->ahead];
    l->ahead = 1 - l->ahead;
    return 0;
}

void loader_expect(Loader *l, uint64_t first, int n) {
    assert(n >= 0 && n <= l->max_rows);
    worker_join(&l->worker);
    if (n == 0) return;
    l->first = first;
    l->n = n;
    if (worker_start(&l->worker, read_rows, l, "the data loader", &(Error){0})) l->n = 0; // loader_rows reads instead
}
