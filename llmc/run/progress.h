// progress: what a person sees of a run: one line that updates itself on a terminal, plain lines elsewhere, and at the
// end the loss curve, drawn in characters.
#pragma once

#include "model/engine.h"
#include "run/metrics.h"

enum { CURVE_WIDTH = 72, CURVE_HEIGHT = 12 }; // characters

typedef struct {
    FILE *out;
    bool terminal;        // redraw one line
    const Engine *engine; // whose memory the line shows
    int64_t horizon;      // tokens of the whole run
    double started;       // seconds of the clock
    double last_shown;    // likewise; 0: no line to redraw
    int64_t first_tokens; // done when the clock started
    double val_loss;      // the latest; NaN before the first
    double curve_tokens;  // after the last step of the curve
    struct {
        double loss; // sum over `steps`
        int64_t steps;
    } column[CURVE_WIDTH]; // of the curve
} Progress;

// done_tokens: by an earlier part of the run.
void progress_create(Progress *p, FILE *out, const Engine *engine, int64_t done_tokens, int64_t horizon_tokens);

// Adds a step of an earlier part of the run to the curve.
void progress_past(void *p, double tokens, double loss);

// Adds a step. Shows a line every 2 seconds (0.2 on a terminal), or if `force`.
void progress_step(Progress *p, const StepMetrics *step, const Noise *noise, bool force);
void progress_val(Progress *p, const StepMetrics *step, double val_loss);
void progress_hellaswag(Progress *p, const StepMetrics *step, const HellaSwagScore *score);

// Ends the updating line, before other output.
void progress_break(Progress *p);

// Draws the training loss against tokens.
void progress_curve(const Progress *p);
