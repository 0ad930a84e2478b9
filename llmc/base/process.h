// process: how each program begins and ends.
#pragma once

#include "base/common.h"

// The first call of main. Opens standard streams that the parent process has closed, for reading only: no file that is
// written later gets their numbers. ERR_MEMORY, printed, where the stack is too small to go on.
int process_begin(void);

// Flushes standard output. ERR_WRITE if something that was printed is lost.
int process_end(Error *e);
