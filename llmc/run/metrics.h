// metrics: the logs of a run, in its directory:
//
//     metrics.jsonl    one JSON object for every optimizer step, validation and test. Numbers read back as the same
//                      bits. null: unknown. 1e308: infinity (a noise scale's bound is infinite if G2 is far below 0)
//     samples.jsonl    one JSON object for every sample: step, tokens, prompt, text. The text begins with the prompt
//
// A step's line has the fields of StepMetrics, and these of the noise scale:
//     gns_ln                              after a skipped step the previous value
//     gns_total, gns_type_*, gns_layer    only in lines of exact steps that were not skipped
//     gns_source_N, gns_cosine_M_N        only if --train has weights
//     gns_ratio                           with --gns-ratio in every line; else in the lines that have gns_total
// gns_ln and gns_total have _se, _lower, _g2 and _s beside them. Lines of other kinds have step, tokens and val_loss, or
// hellaswag and hellaswag_norm (shares of right answers).
//
// dev/docs/gns.md explains the fields of the noise scale and the ramp; gns.h defines the lengths of the averages.
//
// A resume or a rollback (run/train.c) truncates both files to its checkpoint, so they hold every step once.
//
// Lines that cannot be written (a full disk) wait in memory. Each new line and metrics_flush try again to write them. A
// save makes room for them: it may remove older checkpoints.
#pragma once

#include "base/common.h"
#include "gns/ramp.h"
#include "model/modes.h"

typedef struct {
    int64_t step, tokens, examples; // totals of the run so far, this step included
    int64_t batch;                  // rows of this step
    double loss;                    // nats per token, mean over the batch, before the update
    double nll;                     // field loss_nll: loss without label smoothing; NaN: --label-smoothing is 0
    double lr;
    double grad_norm;  // norm of the mean gradient, before clipping; null if not finite
    double tok_per_s;  // over the time until the step's result arrives; a GPU's update is timed with the next step
    int slowest_rank;  // StepSums.slowest; -1: one rank
    double wait_share; // StepSums.lost, as a fraction of the step's seconds
    double mfu;        // fraction of the peak FLOP/s of all ranks' devices; NaN: peak unknown
    GnsMode mode;      // what this step measured
    bool skipped;      // no update was made: an outlier, or an overflow
    bool clipped;      // the gradient's norm was above --grad-clip
    bool has_target;   // --ramp gns: `target` is set
    RampTarget target;
    double loss_scale; // fp16: scale of this step; 0: none
    int64_t overflows; // so far: steps skipped (fp16), and repeats of steps because e4m3 saturated (fp8)
} StepMetrics;

// One program at a time writes to a run directory: it holds a lock (flock) on metrics.jsonl until the file is closed,
// however the program ends. run.json's last part names the latest holder: host and process. On NFS the lock is kept
// by the server; if the holder's machine crashes, the lock remains until its lease ends (NFSv4: 90 s).

typedef struct Metrics Metrics;
typedef struct Noise Noise; // noise.h

// Opens or creates DIRECTORY/metrics.jsonl to append to. dir: the directory's descriptor, or IN_PATH for ".". Locks the
// file without waiting. ERR_USAGE if another process holds the lock; *here: true if it is of this machine.
int metrics_open(Metrics **out, int dir, const char *directory, bool *here, Error *e);

// Truncates metrics.jsonl and samples.jsonl to `step` steps, moves what it cuts to metrics.rolled_back.jsonl, and warns
// unless metrics.jsonl then has `bytes` bytes, as at the checkpoint. keeps true (a rollback): first writes the waiting
// lines; cut lines that cannot be moved wait. keeps false (a resume): no line may be waiting; ERR_WRITE, and a log is
// not cut, if its lines cannot be moved, but on a full disk they wait.
int metrics_begin(Metrics *m, int64_t step, int64_t bytes, bool keeps, Error *e);

int64_t metrics_bytes(const Metrics *m); // bytes of metrics.jsonl, including the lines that wait

// Syncs metrics.jsonl to the disk. Other threads may write lines during the call.
int metrics_sync(const Metrics *m, Error *e);

size_t metrics_waiting(const Metrics *m); // bytes of lines that wait; 0 for NULL
int metrics_flush(Metrics *m, Error *e);  // writes the waiting lines; ERR_WRITE if that still fails

// These three fail with ERR_MEMORY only, since lines that cannot be written wait. Estimates are null until a step has
// had two rows; a scale and its _se also while EMA(G2) <= 0. metrics_test writes x as field NAME, and norm as
// NAME_norm unless norm is NaN.
int metrics_step(Metrics *m, const StepMetrics *step, const Noise *noise, Error *e);
int metrics_test(Metrics *m, int64_t step, int64_t tokens, const char *name, double x, double norm, Error *e);
int metrics_sample(Metrics *m, int64_t step, int64_t tokens, const char *prompt, const char *text, Error *e);

// Flushes, and frees m in any case. ERR_WRITE also if metrics.jsonl was removed during the run. m may be NULL.
int metrics_close(Metrics *m, Error *e);
