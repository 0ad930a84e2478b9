// state: reads and writes a checkpoint's state.json, which says what the run is and where it stands.
#pragma once

#include "math/loss_scale.h"
#include "math/outliers.h"
#include "model/engine.h"
#include "options/options.h"

#define STATE_NAME "state.json"

// The saved checkpoint with the lowest validation loss (--keep-best).
typedef struct {
    int64_t step;  // 0: none yet
    double loss;   // INFINITY: none yet
    int64_t stale; // --patience: validations since `step`
} BestPoint;

// Where a run stands, except for the ramp and the noise scale.
typedef struct {
    int64_t step, tokens, examples; // totals of the run so far
    int64_t batch;                  // rows of the last step
    int64_t metrics_bytes;          // bytes of metrics.jsonl after this step
    int64_t moment_steps;           // added to AdamW's step: updates before the run (--with-optimizer), repeats by fp8
    int64_t horizon;                // tokens of the run with --train-hours; 0: not decided
    double seconds;                 // seconds of the run, up to the save
    double val_loss;                // latest validation loss; NaN before the first validation
    BestPoint best;
    Outliers loss_window, grad_window;
    Outliers spikes;                // --on-spike: max(z of loss, z of norm) of the last steps; NaN: not judged
    int64_t first[OUTLIERS_WINDOW]; // first example of each step in `spikes`
    LossScale loss_scale;
    int8_t exponents[(MODEL_LAYERS_MAX + 1) * FP8_ENTRIES]; // --dtype fp8: of the next step (math/fp8.h)
    char tuning[TUNING_BYTES]; // the engine's algorithms, on which the bits of a run depend
} RunPoint;

// PaLM's largest run needed about as many (Chowdhery et al. 2022, arXiv 2204.02311, section 5.1).
enum { ROLLBACKS_MAX = 20 };

typedef struct {
    int64_t made;                                      // number of rollbacks so far
    int64_t first[ROLLBACKS_MAX], rows[ROLLBACKS_MAX]; // rollback i excluded rows[i] examples from first[i] on
    int64_t latest;                                    // last step before the window of this process's last rollback
    Error why; // of this process's last rollback; code 0: none yet. Once set, every set-up is a rollback's
} Rollback;

typedef struct Run Run; // run.h

// Sets r->at.seconds, and writes the text of state.json to *text; free it with free(). NULL on failure.
int run_state_write(Run *r, char **text, size_t *bytes, Error *e);

// Reads DIRECTORY/state.json. Sets r->at, r->position, r->back and the options of keep_values. Unless `changes` is
// NULL, also compares the options, sets r->saving.changed, and writes to `changes` where the run stands and a line per
// change. ERR_INPUT or ERR_USAGE names the first field that may not change but did.
int run_state_read(Run *r, const char *directory, FILE *changes, Error *e);

// Reads the fields that need no set-up of the run: for --check, for --with-optimizer, and to find a run's --model.
typedef struct {
    RunPoint at;
    char build[256];
    char start[256];         // the last part of --model at the run's start, or "scratch"; "": missing
    char model[OPTION_TEXT]; // --model; "": missing
    char optimizer[16];      // --optimizer
    bool document_mask;      // --document-mask
} RunSummary;
int run_state_summary(RunSummary *summary, const char *directory, Error *e);
