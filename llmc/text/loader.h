// loader: training rows, read ahead by a thread, so that a device never waits for a disk.
#ifndef GNS_LOADER_H
#define GNS_LOADER_H

#include "text/shards.h"

typedef struct Loader Loader;

// For at most max_rows rows at a time of T = seq_len tokens. `data` outlives the loader.
int loader_create(Loader **out, const Dataset *data, int max_rows, int seq_len, Error *e);
void loader_destroy(Loader *loader); // NULL is fine

// Examples [first, first + n) of the shuffled sequence: *rows (n, T + 1), good until the next call. Comes at once where
// loader_expect announced it. An error of the thread that read ahead shows here.
int loader_rows(Loader *loader, uint64_t first, int n, const uint16_t **rows, Error *e);

// Begins to read what will be asked for next. A wrong guess costs time, nothing else. n = 0: nothing is expected.
void loader_expect(Loader *loader, uint64_t first, int n);
#endif
