// loader: reads training rows ahead on a thread, so that the device does not wait for the disk.
#pragma once

#include "text/shards.h"

typedef struct Loader Loader;

// For up to max_rows rows at a time of T = seq_len tokens. `data` outlives the loader.
int loader_create(Loader **out, const Dataset *data, int max_rows, int seq_len, Error *e);
void loader_destroy(Loader *loader); // NULL is fine

// Examples [first, first + n) of the shuffled sequence: *rows (n, T + 1), valid until the next call. Returns at once if
// loader_expect announced them and they are read. Reports the error of the thread that read them.
int loader_rows(Loader *loader, uint64_t first, int n, const uint16_t **rows, Error *e);

// Starts to read the next rows. A wrong guess costs time, nothing else. n = 0 only waits until nothing is being read.
void loader_expect(Loader *loader, uint64_t first, int n);
