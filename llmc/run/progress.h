// progress: what a person sees of a run. One line that updates itself on a terminal, plain lines elsewhere; and at the
// end the loss curve, drawn in characters.
#pragma once

#include "model/engine.h"
#include "run/metrics.h"

typedef struct {
    FILE *out;
    bool terminal;        // redraw one line
    const Engine *engine; // whose memory the line tells
    int64_t horizon;      // tokens of the whole run
    double started;       // seconds of the clock
    double last_shown;
    int64_t first_tokens; // done when the clock started
    double val_loss;      // the latest; NaN before the first
    struct {
        double tokens, loss;
    } * point; // the curve: at most `capacity` points, thinned as they come
    int count, capacity, stride, skipped;
    double sum; // of the losses since the last point
} Progress;

// done_tokens: by an earlier part of the run.
int progress_create(Progress *p, FILE *out, const Engine *engine, int64_t done_tokens, int64_t horizon_tokens,
                    Error *e);
void progress_destroy(Progress *p);

// A step of an earlier part of the run, for the curve; all of them, in order, before the first progress_step.
void progress_past(void *p, double tokens, double loss);

// After each step. Shows a line if it is time, or if `force`.
void progress_step(Progress *p, const StepMetrics *step, const Noise *noise, GnsMode mode, bool force);
void progress_val(Progress *p, const StepMetrics *step, double val_loss);
void progress_hellaswag(Progress *p, const StepMetrics *step, const HellaSwagScore *score);

// Before anything else is printed: leaves the updating line.
void progress_break(Progress *p);

// The training loss against tokens.
void progress_curve(const Progress *p);
