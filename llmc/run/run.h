// run: one run of the program. The program (program.c) makes it, the training loop (train.c) and the step (step.c) work on
// it. It has five parts; a function takes the one or two parts that it needs, or the run where it needs more.
#pragma once

#include "checkpoint/archive.h"
#include "gns/ramp.h"
#include "ranks/comm.h"
#include "text/shards.h"
#include "model/engine.h"
#include "math/outliers.h"
#include "text/hellaswag.h"
#include "text/loader.h"
#include "run/metrics.h"
#include "gns/noise.h"
#include "options/options.h"
#include "ranks/parallel.h"
#include "run/progress.h"
#include "run/state.h"
#include "run/saver.h"
#include "math/schedule.h"
#include "text/tokenizer.h"

#include <math.h>
#include <string.h>

// A run's newest checkpoint that is as it was written.
typedef struct {
    bool found;
    int64_t step;
    char directory[ARCHIVE_PATH];
} Newest;

// What the command line, the build and the machine settle: fixed once training begins, but for the engine's own state.
typedef struct {
    int argc; // the command line
    char **argv;
    Options options;
    const EngineApi *engine_api;
    const TransportApi *transport_api; // NULL: a build for one process
    Comm *comm;
    Model model;
    char model_name[256];      // the last part of --model as it was given, where that is no preset
    char source[ARCHIVE_PATH]; // the files that the model is read from; "": a preset
    EngineConfig shape;
    Parallel parallel;
    Engine *engine;
    double peak_flops;    // of one rank's device, FLOP/s; 0: unknown
    Tokenizer *tokenizer; // NULL: none known for this vocabulary
    char *prompt_file;    // text of the file that --prompt names; NULL: it is the prompt itself
} Setup;

typedef struct {
    Dataset *train, *val; // val may be NULL
    ShardList shards;     // of `train`
    HellaSwag *hellaswag; // NULL: not asked for
    Loader *loader;       // of `train`
    uint16_t *rows;       // (micro_batch, T + 1), for evaluation
    float *losses;        // (micro_batch, T)
    struct {
        uint64_t model, train, val, questions, replay; // 0: none
    } hash;                                            // of what several ranks must find alike
} RunData;

// Where the run stands, and what decides the next step.
typedef struct {
    RunPoint at; // saved in every checkpoint
    Schedule schedule;
    Ramp ramp;
    Noise noise;
    StepResult result;     // of the step under way
    bool stop;             // a signal asked some rank to stop; all ranks know
    bool uneven;           // the shares of some step differed, and the user was told
    int64_t compared_step; // after which the ranks' weights were compared last; -1: not yet
} Position;

typedef struct {
    Saver *saver;               // NULL but on rank 0
    char saved[ARCHIVE_PATH];   // the newest checkpoint; "" before the first
    int64_t saved_step;         // its step; -1 before the first
    bool is_best;               // the validation loss after this step is the lowest so far (--keep-best)
    BestPoint best_before;      // what was the best before the save under way
    bool changed[OPTION_COUNT]; // of a resumed run: which options differ from the part before
    struct {
        bool looked; // for a checkpoint to resume from
        Newest newest;
    } own; // rank 0's
} Saving;

// What the run shows and writes down step by step: on rank 0 alone.
typedef struct {
    Metrics *metrics; // NULL on other ranks
    Progress progress;
} Output;

typedef struct {
    Setup setup;
    RunData data;
    Position position;
    Saving saving;
    Output output;
} Run;

static inline bool is_first(const Setup *setup) { return setup->comm->rank == 0; }

// ---------------------------------------------------------------------------------------------------------------------
// Set-up (setup.c, resume.c, output.c), in this order: a function may use what those before it have made. What does not
// train leaves some out. All is undone by run_destroy, however far it came.

int setup_source(Run *r, Error *e);         // a part of the next: r->source. All ranks must call this
int setup_model(Run *r, Error *e);          // shape, tokenizer. All ranks must call this
int setup_sampling(Setup *setup, Error *e); // where samples are wanted: the prompt; ERR_USAGE without a tokenizer
int setup_schedule(const Setup *setup, Position *position,
                   Error *e);     // learning rate, ramp and noise scale, as a new run has them
int setup_data(Run *r, Error *e); // what there is to train and to evaluate on

// Have all ranks found the same model and data? All of them must call this.
int setup_same_data(const Setup *setup, const RunData *data, Error *e);
#define SAME_FILES_HINT                                                                                                \
    "every machine must hold the same files: copy those of rank 0, or use a file system that all share"

// Where an earlier part of this run stopped, if there is one: into r->at, the ramp and the noise scale. The shards of
// `train` must be those of then. Rank 0 finds it; all must call this.
int setup_resume(Run *r, Error *e);

int setup_rows(const Setup *setup, const RunData *data, Error *e); // for evaluation
int setup_buffers(Run *r, Error *e); // these, and what training needs: the loader of `train`

// What rank comm->rank of comm->ranks keeps, as far as the ramp's largest batch allows: into r->shape.
int setup_shards(Setup *setup, const Position *position, Comm *comm, Error *e);

int setup_device(const Setup *setup, Error *e); // chooses this rank's device. All ranks must call this

// This, then the engine, on that device, with the weights of r->saved if there is one.
int setup_engine(Run *r, Error *e);

int setup_tuning(Run *r, Error *e); // which algorithms its matrix products take: r->at.tuning. All ranks must call this
int setup_output(Run *r, Error *e); // the run directory, on rank 0: nothing was written before
void run_destroy(Run *r);

void say_setup(const Run *r); // all of that in some lines for the user (run_say.c)

int write_run_json(const Run *r, Error *e); // run_json.c

// May a checkpoint be taken before the run's end, of a copy?
bool may_save_aside(const Setup *setup, const Position *position);

// The program and the machine in one line, and what state.json says of this run, with that line in it.
void describe_build(const Setup *setup, char *out, size_t bytes);
RunState run_state(Run *r, const char *build);

// --dry-run (dry_run.c): prints what the run would take.
int run_dry(Run *r, Error *e);

// ---------------------------------------------------------------------------------------------------------------------
// Evaluation (evaluate.c): all ranks call these and share the work. Nothing that training goes on from is touched.

typedef struct {
    int64_t rows, tokens;
    double loss;  // nats a token
    double bytes; // of the text that the tokens stand for; 0 where no tokenizer is known
} Evaluation;

// On so many tokens of the validation set, in whole rows: the same ones every time, spread over the whole set, because
// its beginning may be a single document.
int evaluate_loss(const Setup *setup, const RunData *data, int64_t most_tokens, Evaluation *out, Error *e);

int evaluate_hellaswag(const Setup *setup, const RunData *data, HellaSwagScore *score, Error *e); // of r->hellaswag

int evaluate_model(Run *r, Error *e); // --eval-only

// ---------------------------------------------------------------------------------------------------------------------
// Training (train.c): all ranks, once set up. From where the run stands to its horizon, with validation, samples and
// checkpoints; ERR_STOPPED where a signal asked for an earlier end.
int train_run(Run *r, Error *e);

// Prints samples of the model, as the options want them. In a run they go to samples.jsonl too.
int print_samples(Run *r, Error *e);

// ---------------------------------------------------------------------------------------------------------------------
// One optimizer step (step.c)

// Takes the next step and writes its line of metrics.jsonl. *mode: what it measured.
int train_step(Run *r, StepMetrics *metrics, GnsMode *mode, Error *e);
