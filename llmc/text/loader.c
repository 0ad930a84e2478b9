#define _POSIX_C_SOURCE 200809L
#include "text/loader.h"

#include <assert.h>
#include <pthread.h>
#include <signal.h>
#include <string.h>

// A request for rows and what came of it. One is with the caller, the other with the thread.
typedef struct {
    uint64_t first;
    int n;
    uint16_t *rows; // (max_rows, T + 1)
    int code;
    Error error;
} Request;

struct Loader {
    const Dataset *data;
    int max_rows;
    Request request[2];
    int ahead; // index of the one that the thread reads
    bool busy, quit;
    bool has_thread;
    pthread_t thread;
    pthread_mutex_t mutex; // guards busy and quit; whoever finds busy false may touch request[ahead]
    pthread_cond_t changed;
};

static void request_run(const Loader *loader, Request *r) {
    r->code = dataset_rows(loader->data, r->first, r->n, r->rows, &r->error);
}

static void *read_ahead(void *argument) {
    Loader *loader = argument;
    pthread_mutex_lock(&loader->mutex);
    while (!loader->quit) {
        if (!loader->busy) {
            pthread_cond_wait(&loader->changed, &loader->mutex);
            continue;
        }
        pthread_mutex_unlock(&loader->mutex);
        request_run(loader, &loader->request[loader->ahead]);
        pthread_mutex_lock(&loader->mutex);
        loader->busy = false;
        pthread_cond_signal(&loader->changed);
    }
    pthread_mutex_unlock(&loader->mutex);
    return NULL;
}

// Signals are for the thread that trains.
static int thread_start(Loader *loader, Error *e) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int failure = pthread_create(&loader->thread, NULL, read_ahead, loader);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (failure)
        return FAIL(e, ERR_MEMORY, "raise the limit on threads", "cannot start a thread: %s", strerror(failure));
    loader->has_thread = true;
    return 0;
}

int loader_create(Loader **out, const Dataset *data, int max_rows, int seq_len, Error *e) {
    int code = 0;
    size_t bytes = (size_t)max_rows * ((size_t)seq_len + 1) * sizeof(uint16_t);
    TRY(memory_alloc_zero((void **)out, sizeof(Loader), "the data loader", e));
    Loader *loader = *out;
    loader->data = data;
    loader->max_rows = max_rows;
    pthread_mutex_init(&loader->mutex, NULL);
    pthread_cond_init(&loader->changed, NULL);
    for (int i = 0; i < 2 && !code; i++) code = memory_alloc((void **)&loader->request[i].rows, bytes, "token rows", e);
    if (!code) code = thread_start(loader, e);
    if (code) {
        loader_destroy(loader);
        *out = NULL;
    }
    return code;
}

void loader_destroy(Loader *loader) {
    if (!loader) return;
    if (loader->has_thread) {
        pthread_mutex_lock(&loader->mutex);
        loader->quit = true;
        pthread_cond_signal(&loader->changed);
        pthread_mutex_unlock(&loader->mutex);
        pthread_join(loader->thread, NULL);
    }
    pthread_cond_destroy(&loader->changed);
    pthread_mutex_destroy(&loader->mutex);
    for (int i = 0; i < 2; i++) memory_free(loader->request[i].rows);
    memory_free(loader);
}

static void wait_idle(Loader *loader) {
    pthread_mutex_lock(&loader->mutex);
    while (loader->busy) pthread_cond_wait(&loader->changed, &loader->mutex);
    pthread_mutex_unlock(&loader->mutex);
}

int loader_rows(Loader *loader, uint64_t first, int n, const uint16_t **rows, Error *e) {
    assert(n > 0 && n <= loader->max_rows);
    wait_idle(loader);
    Request *r = &loader->request[loader->ahead];
    // More may have been read than is wanted now: the last step of a run is cut short.
    if (r->n < n || r->first != first || r->code) {
        r->first = first;
        r->n = n;
        request_run(loader, r);
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
    Request *r = &loader->request[loader->ahead];
    r->first = first;
    r->n = n;
    pthread_mutex_lock(&loader->mutex);
    loader->busy = true;
    pthread_cond_signal(&loader->changed);
    pthread_mutex_unlock(&loader->mutex);
}
