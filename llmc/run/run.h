// run: the state of a run, and its functions. A rollback resets the fields from `data` to `saving`.
#pragma once

#include "checkpoint/archive.h"
#include "gns/ramp.h"
#include "ranks/comm.h"
#include "model/engine.h"
#include "text/hellaswag.h"
#include "text/shards.h"
#include "gns/noise.h"
#include "options/options.h"
#include "ranks/whole.h"
#include "run/progress.h"
#include "run/row_outliers.h"
#include "run/state.h"
#include "run/save.h"
#include "text/tokenizer.h"

#include <math.h>
#include <string.h>

typedef struct {
    Dataset *train, *val; // val may be NULL
    HellaSwag *hellaswag; // NULL: none
    uint16_t *rows;       // (micro_batch, T + 1): a micro-step's rows; zeros if this rank cannot read its rows
    float *losses;        // (micro_batch, T)
    Worker reader;        // reads training rows into `ahead`; until joined it also owns `first` and `count`
    uint16_t *ahead;      // (micro_batch, T + 1): examples [first, first + count); after `rows` in one array
    int64_t first, count;
} RunData;

// What the next step depends on, beside RunPoint.
typedef struct {
    Ramp ramp;
    Noise noise;
    RowOutliers outliers; // --outliers
    StepResult result;    // statistics of this step; source_gram, `pairs` (noise.h) and `rows` are one array
    double grad_norm;     // norm of this step's mean gradient
    bool overflowed;      // this step's gradient is not finite, but another scale may help (step_result)
    RowResult *rows;      // (largest batch) this step's rows, of all ranks, if EngineConfig.step_rows
    bool stop;            // the run stops (same on all ranks); stop_cause (save.h) says why
    double val_bytes;     // bytes of text per token in the last validation; 0: unknown
    int64_t clipped;      // number of steps since the start whose gradient was clipped
} Position;

typedef struct {
    Saver *saver;                  // NULL before training
    double writing;                // saver_writes summed over all ranks, at the latest step
    char saved[PATH_MAX];          // the newest checkpoint; "" before the first save
    int64_t saved_step;            // step of `saved`; -1 before the first save
    int64_t first_step;            // first step after this start of the run
    double limit;                  // end of --max-hours, in seconds of the clock
    double longest_save;           // seconds; 0 before the first save
    double longest_step;           // seconds, including the work after the step
    double step_began;             // when the step began, in seconds of the clock; 0 before the first step
    double timed_tokens;           // tokens of the timed steps (--train-hours)
    double timed_seconds;          // seconds of the timed steps
    bool out_of_time;              // --max-hours stops the run
    bool log_waits;                // a warning was printed that lines of the log wait
    bool is_best;                  // the validation loss after this step is the lowest so far (--keep-best)
    BestPoint best_before;         // value of `best` before the running save
    uint8_t changed[OPTION_COUNT]; // in a resumed run: 1 for options that differ from the checkpoint's
    Newest own;                    // this run's newest checkpoint when it started; all ranks have it after setup_resume
    struct {
        char directory[PATH_MAX];
        bool own; // a checkpoint of this run
    } candidate;  // the checkpoint that all ranks verify (resume.c)
} Saving;

typedef struct Run {
    // Set by command line, build and machine. Training changes only engine, parallel, comm and the options it measures.
    int argc; // the command line
    char **argv;
    Options options;
    const EngineApi *engine_api;
    const TransportApi *transport_api; // NULL: a build for one process
    Comm *comm;
    Model model;
    Model local;           // with --tensor: this rank's local model, to which shape.model points
    char model_name[256];  // the last part of --model as given
    char source[PATH_MAX]; // where the model is read from; "": a preset
    EngineConfig shape;
    Parallel parallel;
    Whole whole; // with --tensor; else {0}
    Engine *engine;
    double peak_flops;    // FLOP/s of one rank's device; 0: unknown
    Tokenizer *tokenizer; // NULL: none is known for this vocabulary
    double started;       // when the program began, in seconds of the clock

    RunData data;
    RunPoint at; // where the run stands; saved in every checkpoint
    Position position;
    Saving saving;
    Rollback back;     // --on-spike
    double begun;      // clock time of this start, less the seconds of earlier parts of the run
    Archive archive;   // the run directory; open on rank 0 and on ranks that write there
    Metrics *metrics;  // NULL on ranks other than 0
    Progress progress; // {0} on ranks other than 0
} Run;

// True if --patience ends the run (same on all ranks).
static inline bool out_of_patience(const Run *r) {
    return r->options.patience > 0 && r->at.best.stale >= r->options.patience;
}

// reached_loss: --stop-at-loss ends the run. ends_early: --stop-at-loss or --patience ends it. Same on all ranks.
static inline bool reached_loss(const Run *r) { return r->at.val_loss <= r->options.stop_at_loss; }
static inline bool ends_early(const Run *r) { return reached_loss(r) || out_of_patience(r); }

// Seconds of training and set-up, the parts before a resume included.
static inline double run_seconds(const Run *r) { return clock_seconds() - r->begun; }

static inline bool is_rank0(const Run *r) { return r->comm->rank == 0; }

// ---------------------------------------------------------------------------------------------------------------------
// Set-up (setup.c, resume.c, output.c), in this order: each function uses results of earlier ones. A run that does not
// train skips some functions. run_destroy undoes set-up, however far it went. run_end_training frees what training
// made, so that training can begin again; the run directory stays open and locked. (all): all ranks must call it.

int setup_source(Run *r, Error *e);   // (all) finds the files of --model: r->source
int setup_shape(Run *r, Error *e);    // sets shape, model and tokenizer
int setup_data(Run *r, Error *e);     // opens training data, validation data, HellaSwag; sets the horizon of --epochs
int setup_schedule(Run *r, Error *e); // sets learning rate, ramp and noise scale of a new run

// --with-optimizer: checks that the checkpoint has this optimizer's moments, and reads how many updates made them.
int setup_moments(Run *r, Error *e);

// --train-hours: sets the run's length in tokens, and what depends on it.
int run_set_horizon(Run *r, int64_t tokens, Error *e);

// (all) ERR_INPUT if the ranks have different models or data.
int setup_same_data(const Run *r, Error *e);
#define SAME_FILES_HINT                                                                                                \
    "every machine must hold the same files: copy those of rank 0, or use a file system that all share"

// (all) Reads the run's newest checkpoint, if there is one, into r->at and r->position (resume.c).
int setup_resume(Run *r, Error *e);

int setup_rows(Run *r, Error *e);    // allocates the buffers of RunData
int setup_buffers(Run *r, Error *e); // setup_rows, then the other buffers of training

// Sets r->parallel and r->shape for rank comm->rank of comm->ranks at the ramp's largest batch.
int setup_shards(Run *r, Comm *comm, Error *e);

int setup_room(const Run *r, Error *e);   // ERR_WRITE if the disk has no room for a save
int setup_device(const Run *r, Error *e); // (all) chooses this rank's device
int setup_gns(Run *r, Error *e);          // (all) sets the mode of --gns, unless given
int setup_engine(Run *r, Error *e);       // setup_shards, then creates the engine and loads its weights
int setup_tuning(Run *r, Error *e);       // (all) sets algorithms of matrix products: r->at.tuning
int setup_output(Run *r, Error *e);       // (all) rank 0 makes the run directory; nothing is written before
void run_end_training(Run *r);
int run_destroy(Run *r, Error *e); // ends threads, then frees. Fails if the log's last lines are lost

void print_setup(const Run *r); // prints what the run is (summary.c)

// Writes run.json. The first call chooses the run's id (output.c).
int write_run_json(Run *r, Error *e);

// True if saves need a copy of the state: saves before the run's end, and with --tensor every save.
bool saves_in_background(const Run *r);

// --dry-run (dry_run.c): plans the run and prints the plan.
int run_dry(Run *r, Error *e);

// --check (inspect.c): verifies and prints a checkpoint, a run directory, a model (its directory or llm.c's .bin), or
// token shards (a file or a pattern). ERR_INPUT if anything is damaged.
int inspect(const char *path, Error *e);

// ---------------------------------------------------------------------------------------------------------------------
// Evaluation (evaluate.c): all ranks call these together and share the work. They change only the progress display.

typedef struct {
    int64_t rows, tokens;
    double loss;  // nats per token
    double bytes; // bytes of the tokens' text; 0 without a tokenizer
} Evaluation;

// Computes the loss on at most `most_tokens` tokens of the validation set, rounded up to whole rows. The rows are the
// same in every call. They are spread over the whole set, whose beginning may be a single document.
int evaluate_loss(Run *r, int64_t most_tokens, Evaluation *out, Error *e);
int evaluate_hellaswag(Run *r, HellaSwagScore *score, Error *e);

int evaluate_model(Run *r, Error *e); // --eval-only

// ---- Samples (sample.c) ---------------------------------------------------------------------------------------------

// Returns the token at quantile u in [0, 1) of softmax(logits / --temperature), restricted to the --top-k likeliest and
// then to their nucleus of --top-p (Holtzman et al. 2020, arXiv 1904.09751, section 3.1). Sets the logits (V) of other
// tokens to -INFINITY; overwrites scratch (V). Equal logits rank by token number, so equal arguments draw equal tokens.
int sample_token(float *logits, double *scratch, int V, const Options *o, double u);

// Draws a text after the prompt; prompt "": from the beginning of a document. Writes prompt and text to `out` and
// `copy`. stream: a number, different for each sample of a run. When the context is full, drops the oldest tokens.
int sample_text(Run *r, const char *prompt, uint64_t stream, FILE *out, FILE *copy, Error *e);

// Prints the samples that the options ask for; in a run, also writes them to samples.jsonl.
int print_samples(Run *r, Error *e);
int print_answers(Run *r, Error *e); // --interactive

// ---- Training -------------------------------------------------------------------------------------------------------

// Trains from where the run stands to its horizon, with validation, samples and checkpoints (train.c). All ranks call
// it after set-up. ERR_STOPPED after a signal.
int train_run(Run *r, Error *e);

// Makes the next optimizer step and writes its line of metrics.jsonl (step.c).
int train_step(Run *r, StepMetrics *metrics, Error *e);

// Call before the first step with --ramp gns. Sets --ramp-step-rows, if 0, to a step's fixed cost in rows (step.c).
int measure_step_rows(Run *r, Error *e);
