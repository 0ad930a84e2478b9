// metrics: the logs of a run, in its directory:
//
//     metrics.jsonl    one JSON object for every optimizer step, validation and test. Numbers read back as the same
//                      bits; an unknown one is null, an infinite lower bound (G2 below 0 by more than its error) 1e308
//     samples.jsonl    one JSON object for every sample: step, tokens, prompt, text. The text begins with the prompt;
//                      where that is @FILE, the text is what follows the file's
//
// gns_ln is an average; a skipped step repeats it. gns_total, gns_type_* and gns_layer are there where all tensors'
// norms were measured and the averages have learnt from them. gns_ratio is what the ramp multiplies gns_ln by: the ratio
// measured so far, in those lines, or --gns-ratio, in every line (the measured one is then gns_total / gns_type_ln).
//
// A resume cuts both back to its checkpoint, so that every step is there once.
#pragma once

#include "base/common.h"
#include "model/modes.h"

typedef struct {
    int64_t step, tokens, examples; // done, this step included
    int64_t batch;                  // rows of this step
    double loss;                    // nats a token, mean over the batch, before the update
    double lr;
    double grad_norm;    // of the mean gradient, before clipping
    double tok_per_s;    // of this step alone, until its numbers are there: a GPU's update counts with the next step
    double mfu;          // share of the peak FLOP/s of all ranks' devices; NaN: peak unknown
    bool skipped;        // an outlier: no update was made
    bool ranks_measured; // noise->ranks has learnt from this step
} StepMetrics;

typedef struct Metrics Metrics;
typedef struct Noise Noise;                   // noise.h
typedef struct HellaSwagScore HellaSwagScore; // hellaswag.h

// Opens DIRECTORY/metrics.jsonl, or creates it, to append to; ERR_USAGE where another process has it open, and *may_go
// says whether that may pass by itself (run_lock.h).
int metrics_open(Metrics **out, const char *directory, bool *may_go, Error *e);

// Cuts both logs back to `step` steps, which are the first `bytes` of metrics.jsonl (a shorter one is kept as it is).
// Called before anything is written; from here on the run is known to be this program's.
int metrics_begin(Metrics *m, int64_t step, int64_t bytes, Error *e);

// Calls `each` with the training loss of every step in metrics.jsonl.
int metrics_losses(const Metrics *m, void (*each)(void *context, double tokens, double loss), void *context, Error *e);

int64_t metrics_bytes(const Metrics *m); // of metrics.jsonl

// Waits until metrics.jsonl is on the disk. May be called while another thread writes to it.
int metrics_sync(const Metrics *m, Error *e);

// mode: what this step measured. Estimates are null while B was below 2 in all steps so far or EMA(G2) <= 0.
int metrics_step(Metrics *m, const StepMetrics *step, const Noise *noise, GnsMode mode, Error *e);
int metrics_val(Metrics *m, int64_t step, int64_t tokens, double val_loss, Error *e);
int metrics_hellaswag(Metrics *m, int64_t step, int64_t tokens, const HellaSwagScore *score, Error *e);
int metrics_sample(Metrics *m, int64_t step, int64_t tokens, const char *prompt, const char *text, Error *e);

// NULL is fine.
int metrics_close(Metrics *m, Error *e);
