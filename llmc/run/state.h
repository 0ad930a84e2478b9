// run_state: state.json, all that a run is besides its flat arrays, and what it must find again to go on from there.
#pragma once

#include "gns/ramp.h"
#include "text/shards.h"
#include "model/engine.h"
#include "base/files.h"
#include "math/outliers.h"
#include "gns/noise.h"
#include "options/options.h"

#define STATE_NAME "state.json"

// A set of token shards, as far as it can be told from another: base names, sizes and hashes (of a sample where a
// shard is large: file_digest). Where the files lie does not matter.
typedef struct {
    struct {
        char *name;
        FileDigest digest;
    } * shard;
    int count;
} ShardList;

int shard_list_create(ShardList *list, const Dataset *data, Error *e);
void shard_list_destroy(ShardList *list);

// The lowest validation loss of those after which a checkpoint was written (--keep-best).
typedef struct {
    int64_t step; // 0: none yet
    double loss;  // INFINITY: none yet
} BestPoint;

// Where a run stands: its own, saved and taken up again as one.
typedef struct {
    int64_t step, tokens, examples; // done
    int64_t batch;                  // rows of the last step
    int64_t metrics_bytes;          // of metrics.jsonl, up to and including this step, when it was saved
    double val_loss;                // the latest; NaN before the first
    BestPoint best;
    Outliers loss_window, grad_window;
    char tuning[TUNING_BYTES]; // the engine's: the same algorithms give the same bits
} RunPoint;

typedef struct {
    // what may not change within a run
    ModelConfig model;
    const char *start; // "scratch", or the name of the --model that the first weights came from
    int64_t seq_len;
    uint64_t seed;
    const ShardList *train;

    // where it stands
    RunPoint *at;
    RampState *ramp;
    Noise *noise;

    // for the record
    const char *build; // program, engine and machine
    int ranks;
    const Options *options;
} RunState;

// The text of state.json; *text is freed with free().
int run_state_write(const RunState *state, char **text, size_t *bytes, Error *e);

// Reads DIRECTORY/state.json into where *state says that the run stands. What may not change must be as *state says it
// is now: ERR_INPUT names the field that is not. The text of what did change, build,
// ranks and options, one a line, goes to *changes (from malloc; "" for none); which options did, to `changed`.
int run_state_read(const RunState *state, const char *directory, char **changes, bool changed[OPTION_COUNT], Error *e);

// The step, and whether the file is well formed so far: for --check.
typedef struct {
    int64_t step, tokens, examples, batch;
    BestPoint best;
    char build[256];
    char start[256], model[OPTION_TEXT]; // RunState's, and --model; "": not said
} RunSummary;
int run_state_summary(RunSummary *summary, const char *directory, Error *e);
