// rollback: --on-spike rollback. A run that spikes returns to a checkpoint before the spike and continues without the
// spike's rows.
//
// A step is a spike if its loss or the norm of its gradient is more than --spike-z standard deviations above the mean
// of the last 128 steps that were no spikes (math/outliers.h). A spike lasts if K = --spike-steps of the last 2 K steps
// are spikes, or if a loss or gradient is not finite. These 2 K steps are the window.
//
//   1. All ranks have the same sums, so all ranks decide alike.
//   2. Training ends as on an error, but the run directory stays open and locked. `train` (program.c) resumes, without
//      the window's rows, from the newest checkpoint before the window, or from the oldest if there is none.
//   3. The next checkpoint stores the excluded rows. A run killed before that repeats the spike and the rollback.
//   4. setup_output cuts the log, as on every resume. Cut lines move to metrics.rolled_back.jsonl; after a kill that
//      file may hold them twice. Abandoned checkpoints become step_N.rolled_back.
//   5. A checkpoint to go back to always exists. The run begins with one of step 0, and archive_thin spares the newest
//      one before the last 2 K steps.
#pragma once

#include "base/common.h"

// PaLM's largest run needed about as many (Chowdhery et al. 2022, arXiv 2204.02311, section 5.1).
enum { ROLLBACKS_MAX = 20 };

typedef struct {
    int64_t made;                                      // number of rollbacks so far
    int64_t first[ROLLBACKS_MAX], rows[ROLLBACKS_MAX]; // examples that each of them excluded from the data's order
    int64_t latest;                                    // last step before the window of this process's last rollback
    Error why; // reason of this process's last rollback. If its code is set, a set-up belongs to a rollback
} Rollback;
