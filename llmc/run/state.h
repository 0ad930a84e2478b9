// state: state.json, which a checkpoint has beside weights and moments: what the run is, and where it stands.
#pragma once

#include "math/loss_scale.h"
#include "math/outliers.h"
#include "model/engine.h"
#include "options/options.h"

#define STATE_NAME "state.json"

// ROLLBACKS_MAX: as many as PaLM's largest run needed (Chowdhery et al. 2022, arXiv 2204.02311, section 5.1).
enum { ROLLBACKS_MAX = 20 };

// The saved checkpoint with the lowest validation loss (--keep-best).
typedef struct {
    int64_t step;  // 0: none yet
    double loss;   // INFINITY: none yet
    int64_t stale; // validations since, under --patience
} BestPoint;

// What --on-spike keeps (rollback.h).
typedef struct {
    Outliers z;                     // of the last steps: the loss's or the gradient norm's, the larger; NaN: not judged
    int64_t first[OUTLIERS_WINDOW]; // number of each of these steps' first example
    int64_t rollbacks;              // made so far
    struct {                        // examples that each rollback excluded from the order of the data
        int64_t first, rows;
    } skipped[ROLLBACKS_MAX];
} Spikes;

// Where a run stands, except for the ramp and the noise scale.
typedef struct {
    int64_t step, tokens, examples; // done
    int64_t batch;                  // rows of the last step
    int64_t metrics_bytes;          // bytes of metrics.jsonl after this step
    int64_t moment_steps;           // updates of the moments before the run (--with-optimizer)
    int64_t horizon;                // tokens that --train-hours means; 0: not decided
    double seconds;                 // seconds of the run, up to the save
    double val_loss;                // the latest; NaN before the first
    BestPoint best;
    Outliers loss_window, grad_window;
    Spikes spikes;
    LossScale loss_scale;
    int8_t exponents[MODEL_LAYERS_MAX * FP8_SITES]; // --dtype fp8: of the next step (math/fp8.h)
    char tuning[TUNING_BYTES];                      // the engine's algorithms: the same ones give the same bits
} RunPoint;

typedef struct Run Run; // run.h

// Writes the text of state.json to *text; free it with free(). NULL on failure.
int run_state_write(const Run *r, char **text, size_t *bytes, Error *e);

// Reads DIRECTORY/state.json: where the run stands into r->position, its mode of --gns, and what changed since then.
// ERR_INPUT or ERR_USAGE names the first field that changed and may not. Changed options: r->saving.changed. *changes:
// all that changed, one line each; text_free it in any case.
int run_state_read(Run *r, const char *directory, Text *changes, Error *e);

// Reads the fields that need no set-up of a run: for --check, and to find a run's --model.
typedef struct {
    RunPoint at;
    char build[256];
    char start[256];         // the last part of --model at the run's start, or "scratch"; "": missing
    char model[OPTION_TEXT]; // --model; "": missing
    char optimizer[16];      // --optimizer
} RunSummary;
int run_state_summary(RunSummary *summary, const char *directory, Error *e);
