// process: how each program begins and ends.
#pragma once

#include "base/common.h"

// The first call of main. Opens standard streams that the parent process closed, read-only, so that no file opened
// later gets their numbers.
void process_begin(void);

// Flushes standard output. ERR_WRITE if any of it could not be written.
int process_end(Error *e);
