// metrics: metrics.jsonl, one JSON object an optimizer step, and one a validation. Numbers are printed so that reading
// them back gives the same bits; what is not known is null.
#ifndef GNS_METRICS_H
#define GNS_METRICS_H

#include "noise.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
    int64_t step, tokens, examples; // done, this step included
    int64_t batch;                  // rows of this step
    double loss;                    // nats a token, mean over the batch, before the update
    double lr;
    double grad_norm; // of the mean gradient, before clipping
    double tok_per_s; // of this step alone
    double mfu;       // share of the peak FLOP/s of all ranks' devices; NaN: peak unknown
    bool skipped;     // an outlier: no update was made
} StepMetrics;

typedef struct Metrics Metrics;

// Opens DIRECTORY/metrics.jsonl, or creates it, to append to; ERR_USAGE where another process has it open.
int metrics_open(Metrics **out, const char *directory, Error *e);

// Cuts the file back to its first `bytes`; one that is shorter stays as it is.
int metrics_cut(Metrics *m, int64_t bytes, Error *e);

int64_t metrics_bytes(const Metrics *m); // of the file
int metrics_descriptor(const Metrics *m);

// mode: what this step measured. Estimates are null while B was below 2 in all steps so far or EMA(G2) <= 0.
int metrics_step(Metrics *m, const StepMetrics *step, const Noise *noise, GnsMode mode, Error *e);
int metrics_val(Metrics *m, int64_t step, int64_t tokens, double val_loss, Error *e);

// NULL is fine.
int metrics_close(Metrics *m, Error *e);

#ifdef __cplusplus
}
#endif
#endif
