// Two requests alternate: the caller holds the rows of one while the worker reads the other, request[ahead]. The worker
// owns request[ahead] while it reads. The caller owns everything else.
#include "text/loader.h"

#include "base/thread.h"

#include <assert.h>

typedef struct {
    const Dataset *data;
    uint64_t first;
    int n;
    uint16_t *rows; // (max_rows, T + 1)
    int code;       // the error code of reading them
    Error error;
} RowsRequest;

struct Loader {
    int max_rows;
    RowsRequest request[2];
    int ahead;
    Worker worker;
};

static void *read_rows(void *request) {
    RowsRequest *r = request;
    r->code = dataset_rows(r->data, r->first, r->n, r->rows, &r->error);
    return NULL;
}

int loader_create(Loader **out, const Dataset *data, int max_rows, int seq_len, Error *e) {
    int code = 0;
    size_t bytes = (size_t)max_rows * ((size_t)seq_len + 1) * sizeof(uint16_t);
    TRY(memory_alloc_zero((void **)out, sizeof(Loader), "the data loader", e));
    (*out)->max_rows = max_rows;
    for (int i = 0; i < 2 && !code; i++) {
        (*out)->request[i].data = data;
        code = memory_alloc((void **)&(*out)->request[i].rows, bytes, "token rows", e);
    }
    if (!code) return 0;
    loader_destroy(*out);
    *out = NULL;
    return code;
}

void loader_destroy(Loader *loader) {
    if (!loader) return;
    worker_join(&loader->worker);
    for (int i = 0; i < 2; i++) memory_free(loader->request[i].rows);
    memory_free(loader);
}

int loader_rows(Loader *loader, uint64_t first, int n, const uint16_t **rows, Error *e) {
    assert(n > 0 && n <= loader->max_rows);
    worker_join(&loader->worker);
    RowsRequest *r = &loader->request[loader->ahead];
    if (r->first != first || r->n < n || r->code) { // r->n > n is fine: the last step of a run is cut short
        r->first = first;
        r->n = n;
        read_rows(r);
    }
    loader->ahead = 1 - loader->ahead;
    loader->request[loader->ahead].n = 0;
    *rows = r->rows;
    if (r->code) *e = r->error;
    return r->code;
}

void loader_expect(Loader *loader, uint64_t first, int n) {
    assert(n >= 0 && n <= loader->max_rows);
    worker_join(&loader->worker);
    if (n == 0) return;
    RowsRequest *r = &loader->request[loader->ahead];
    r->first = first;
    r->n = n;
    if (worker_start(&loader->worker, read_rows, r, "the data loader", &(Error){0})) r->n = 0; // loader_rows reads
}
