// rollback: --on-spike rollback. A run that spikes goes back to a checkpoint before the spike, and goes on without the
// spike's rows.
//
// A step is a spike if its loss or the norm of its gradient is more than --spike-z standard deviations above the mean
// of the last 128 steps that were no spikes (math/outliers.h). A spike lasts if K = --spike-steps of the last 2 K steps
// are spikes, or if a loss or gradient is not finite. These 2 K steps are the window.
//
//   1. All ranks decide the same: they have the same sums.
//   2. Training ends as on an error; run_training (program.c) then resumes from the newest checkpoint before the window
//      and excludes the window's rows. Soon after another rollback there may be none: then from the oldest checkpoint.
//   3. The next checkpoint stores the excluded rows. A run killed before that repeats the spike and the rollback.
//   4. setup_output cuts metrics.jsonl, as on every resume, and keeps the cut lines in metrics.rolled_back.jsonl. After
//      a kill that file may hold a step twice. Abandoned checkpoints become step_N.rolled_back.
//   5. A checkpoint to go back to always exists: one of step 0 begins the run, and --keep spares the newest one before
//      a window that may still spike (archive_thin).
//   6. The run directory stays open and locked throughout.
#pragma once

#include "run/metrics.h"
#include "run/state.h"

// The last rollback of this process. spikes.rollbacks 0: none.
typedef struct {
    Spikes spikes;
    int64_t latest; // the last step before the window
    double begun;   // Position.begun: the time of undone steps counts
    Error why;
} Rollback;

// Returns the last step before the window that ends with `step`.
static inline int64_t rollback_target(const Options *o, int64_t step) {
    return step > 2 * o->spike_steps ? step - 2 * o->spike_steps : 0;
}

// Call these in a step, in this order. rollback_check returns ERR_NONFINITE if the spike lasts.
void rollback_watch(Run *r);           // the step begins
void rollback_judge(Run *r, double z); // z: the step's distance from the last steps; called only if it is judged
int rollback_check(Run *r, const StepMetrics *m, Error *e);

// Plans a rollback over the window that ends with `step`. end: one past the window's last example. e: the reason, which
// gets a prefix after ROLLBACKS_MAX rollbacks. Returns e->code.
int rollback_plan(Run *r, int64_t step, int64_t end, Error *e);

// For a resume.
static inline bool rollback_under_way(const Rollback *back) { return back->spikes.rollbacks > 0; }
int rollback_skip(Run *r, Error *e); // excludes the rows of all rollbacks; prints the one that is under way
