// Two requests take turns: the caller holds the rows of one while the thread reads the other, request[ahead].
//
// 1. The thread reads between a post of `start` and its own post of `done`. The caller sets `busy` for that time.
// 2. While busy, request[ahead] is the thread's; otherwise everything is the caller's.
#include "text/loader.h"

#include "base/thread.h"

#include <assert.h>
#include <semaphore.h>

typedef struct {
    uint64_t first;
    int n;
    uint16_t *rows; // (max_rows, T + 1)
    int code;       // of reading them
    Error error;
} RowsRequest;

struct Loader {
    const Dataset *data;
    int max_rows;
    RowsRequest request[2];
    int ahead;
    bool busy, quit, has_thread;
    pthread_t thread;
    sem_t start, done;
};

static void await_post(sem_t *semaphore) {
    while (sem_wait(semaphore) != 0) continue; // a signal came
}

static void request_read(const Loader *loader, RowsRequest *r) {
    r->code = dataset_rows(loader->data, r->first, r->n, r->rows, &r->error);
}

static void *read_ahead(void *argument) {
    Loader *loader = argument;
    for (await_post(&loader->start); !loader->quit; await_post(&loader->start)) {
        request_read(loader, &loader->request[loader->ahead]);
        sem_post(&loader->done);
    }
    return NULL;
}

static void wait_idle(Loader *loader) {
    if (loader->busy) await_post(&loader->done);
    loader->busy = false;
}

int loader_create(Loader **out, const Dataset *data, int max_rows, int seq_len, Error *e) {
    int code = 0;
    size_t bytes = (size_t)max_rows * ((size_t)seq_len + 1) * sizeof(uint16_t);
    TRY(memory_alloc_zero((void **)out, sizeof(Loader), "the data loader", e));
    Loader *loader = *out;
    loader->data = data;
    loader->max_rows = max_rows;
    sem_init(&loader->start, 0, 0);
    sem_init(&loader->done, 0, 0);
    for (int i = 0; i < 2 && !code; i++) code = memory_alloc((void **)&loader->request[i].rows, bytes, "token rows", e);
    if (!code) code = thread_start(&loader->thread, read_ahead, loader, "the data loader", e);
    loader->has_thread = !code;
    if (!code) return 0;
    loader_destroy(loader);
    *out = NULL;
    return code;
}

void loader_destroy(Loader *loader) {
    if (!loader) return;
    if (loader->has_thread) {
        wait_idle(loader);
        loader->quit = true;
        sem_post(&loader->start);
        pthread_join(loader->thread, NULL);
    }
    sem_destroy(&loader->start);
    sem_destroy(&loader->done);
    for (int i = 0; i < 2; i++) memory_free(loader->request[i].rows);
    memory_free(loader);
}

int loader_rows(Loader *loader, uint64_t first, int n, const uint16_t **rows, Error *e) {
    assert(n > 0 && n <= loader->max_rows);
    wait_idle(loader);
    RowsRequest *r = &loader->request[loader->ahead];
    if (r->first != first || r->n < n || r->code) { // more rows than n are fine: the last step of a run is cut short
        r->first = first;
        r->n = n;
        request_read(loader, r);
    }
    loader->ahead = 1 - loader->ahead;
    loader->request[loader->ahead].n = 0;
    *rows = r->rows;
    if (r->code) *e = r->error;
    return r->code;
}

void loader_expect(Loader *loader, uint64_t first, int n) {
    assert(n >= 0 && n <= loader->max_rows);
    wait_idle(loader);
    if (n == 0) return;
    loader->request[loader->ahead].first = first;
    loader->request[loader->ahead].n = n;
    loader->busy = true;
    sem_post(&loader->start);
}
