// metrics: the logs of a run, in its directory:
//
//     metrics.jsonl    one JSON object for every optimizer step, validation and test. Numbers read back as the same
//                      bits; an unknown one is null, an infinite lower bound (G2 below 0 by more than its error) 1e308
//     samples.jsonl    one JSON object for every sample: step, tokens, prompt, text. The text begins with the prompt,
//                      except that of --prompt @FILE
//
// In fp16 loss_scale is that of the step, overflows the number of steps so far that were skipped because their gradient
// overflowed; the norm of such a step is unknown.
//
// loss is what is optimised; with label smoothing loss_nll, without it, follows.
//
// gns_ln is an average; a skipped step repeats it. gns_total, gns_type_* and gns_layer are written after steps that
// measured the norms of all tensors and were not skipped; averages over such steps, five times longer than gns_ln's,
// gns_total's shorter while less than 50 half-lives are done (a tenth of the tokens so far). But where the ramp follows gns_total (every step exact), that is an average as long as gns_ln's. gns_ratio is the ramp's
// factor for gns_ln: in those lines the ratio measured so far (unused where the ramp follows gns_total), or in every line
// --gns-ratio (the measured one is then gns_total / gns_type_ln, once the two are equally long).
//
// Under --ramp gns ramp_target is what the batch follows, in rows: kappa x the noise scale; ramp_aim lies one standard error
// below it, and is where the batch goes; ramp_target_lower is its 95% bound. All three count the error of the ratio.
// `clipped`: the step's gradient was scaled down to --grad-clip.
//
// A resume truncates both files to its checkpoint, so that every step is there once.
//
// A line that cannot be written (a full disk) waits in memory, and all lines after it: the next line tries again, and so
// does metrics_flush. Training decides when that ends the run (train.c).
#pragma once

#include "base/common.h"
#include "gns/ramp.h"
#include "model/modes.h"
#include "run/lock.h"

typedef struct {
    int64_t step, tokens, examples; // done, this step included
    int64_t batch;                  // rows of this step
    double loss;                    // nats a token, mean over the batch, before the update
    double nll;                     // the same without label smoothing
    double lr;
    double grad_norm; // of the mean gradient, before clipping
    double tok_per_s; // of this step, until its numbers are known: a GPU's update counts with the next step
    double mfu;       // share of the peak FLOP/s of all ranks' devices; NaN: peak unknown
    GnsMode mode;     // what this step measured
    bool smoothed;    // with label smoothing: loss and nll differ
    bool skipped;     // an outlier, or an overflow: no update was made
    bool clipped;     // the gradient was longer than --grad-clip
    bool has_target;  // --ramp gns: `target` holds
    RampTarget target;
    char why[RAMP_WHY_BYTES]; // ramp_why
    double loss_scale;        // of this step; 0: none
    int64_t overflows;        // so far
    bool ranks_measured;      // noise->ranks was updated
} StepMetrics;

typedef struct Metrics Metrics;
typedef struct Noise Noise;                   // noise.h
typedef struct HellaSwagScore HellaSwagScore; // hellaswag.h

// Opens or creates DIRECTORY/metrics.jsonl to append to. ERR_USAGE where another process has it open, *holder (lock.h).
int metrics_open(Metrics **out, const char *directory, LockHolder *holder, Error *e);

// Truncates both logs to `step` steps, the first `bytes` of metrics.jsonl (a shorter file is kept). Called before anything
// is written to them.
int metrics_begin(Metrics *m, int64_t step, int64_t bytes, Error *e);

// Calls `each` with the training loss of every step in metrics.jsonl.
int metrics_losses(const Metrics *m, void (*each)(void *context, double tokens, double loss), void *context, Error *e);

int64_t metrics_bytes(const Metrics *m); // of metrics.jsonl, with the lines that wait

// Syncs metrics.jsonl to the disk. Another thread may write to it meanwhile.
int metrics_sync(const Metrics *m, Error *e);

// Bytes of lines that wait; 0 for NULL. And writes them: ERR_WRITE where that still fails.
size_t metrics_waiting(const Metrics *m);
int metrics_flush(Metrics *m, Error *e);

// Makes sure that DIRECTORY/metrics.jsonl is the locked log. Where that file or its directory was removed or moved it is
// made again, from all that was written: *again is true then. Another file that took its place is appended to. ERR_WRITE
// where another run has that one open.
int metrics_restore(Metrics *m, bool *again, Error *e);

// The following return ERR_MEMORY alone: lines that cannot be written wait. Estimates are null while B was below 2 in all steps so far, or while EMA(G2) <= 0.
int metrics_step(Metrics *m, const StepMetrics *step, const Noise *noise, Error *e);
int metrics_val(Metrics *m, int64_t step, int64_t tokens, double val_loss, Error *e);
int metrics_hellaswag(Metrics *m, int64_t step, int64_t tokens, const HellaSwagScore *score, Error *e);
int metrics_sample(Metrics *m, int64_t step, int64_t tokens, const char *prompt, const char *text, Error *e);

// Flushes, and frees m in any case. NULL is fine.
int metrics_close(Metrics *m, Error *e);
