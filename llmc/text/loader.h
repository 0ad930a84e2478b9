// loader: reads training rows ahead on a thread, so that the device does not wait for the disk.
#pragma once

#include "text/shards.h"

typedef struct Loader Loader;

// Serves up to max_rows rows of T = seq_len tokens at a time. `data` must outlive the loader.
int loader_create(Loader **out, const Dataset *data, int max_rows, int seq_len, Error *e);
void loader_destroy(Loader *loader); // NULL is fine

// Sets *rows (n, T + 1) to examples [first, first + n) of the shuffled sequence, valid until the next call. Waits for
// the thread that reads them. If the thread read other rows, or failed, this call reads the rows.
int loader_rows(Loader *loader, uint64_t first, int n, const uint16_t **rows, Error *e);

// Starts to read examples [first, first + n). If loader_rows asks for others, only time is lost. n = 0: only waits for
// the thread.
void loader_expect(Loader *loader, uint64_t first, int n);
