// ramp: the batch, in rows, of the next optimizer step, and its learning rate.
//
//   fixed        batch_ref throughout
//   linear       from batch_min to batch_max, linearly in tokens over the horizon
//   seesaw       batch_min x lr0 / schedule(tokens) (Meterez et al. 2025, arXiv 2510.14717), lr0 the schedule's peak;
//                in the warm-up batch_min. Where the schedule would divide the rate by a, the batch is multiplied by a
//                and the rate is divided only by sqrt(a). For normalised SGD this is the same path in fewer steps. The
//                paper cuts in stages; this is the limit of fine stages. lr_power = 0.5 gives the sqrt: if batch_ref =
//                batch_min, the rate is schedule x sqrt(B / batch_min) = sqrt(lr0 x schedule). At batch_max the rate
//                falls with the schedule again
//   steps:LIST   LIST is TOKENS:ROWS,TOKENS:ROWS,...: ROWS rows from TOKENS tokens on. It begins with 0 tokens
//   replay:FILE  the `batch` of each step in an earlier run's metrics.jsonl. If the horizon cuts a step short, the run
//                cannot resume towards a later horizon (ramp_settle)
//   gns          follows the noise scale N = c GNS_ln up and down, within [batch_min, batch_max]. If every step
//                measures the whole model, N = GNS_total. The batch costs the fewest seconds within a stated waste:
//
//                    target = min(sqrt(x k N), waste k N)
//
//                k N is the critical batch: for the same progress a batch of B rows needs 1 + B / (k N) times the
//                fewest tokens (McCandlish et al. 2018, appendix D). A step of B rows lasts b (x + B) seconds, so
//                progress costs J(B) = b (x + B) (1 / B + 1 / (k N)), least at B = sqrt(x k N). If x is huge, rows
//                cost nothing, and the waste of tokens bounds the batch. The batch moves towards the target less one
//                standard error (with the error of c), by at most a factor of 2 per half-life of the average
//
// A batch is rounded to whole rows. Only x depends on the machine and the number of ranks; it is measured once and
// stored, or given. Rank 0 decides and broadcasts one integer.
#pragma once

#include "base/common.h"
#include "gns/gns.h"
#include "math/schedule.h"

typedef enum { RAMP_FIXED, RAMP_LINEAR, RAMP_SEESAW, RAMP_STEPS, RAMP_REPLAY, RAMP_GNS, RAMP_MODES } RampMode;

// Measured (dev/docs/gns-study.md). The rate grows with batch^power, and the power falls with the schedule. A high
// power at the peak makes more progress in fewer steps; the noise that it adds disappears as the rate decays. The
// square root at the end leaves as little noise as a constant batch.
#define RAMP_LR_POWER     0.8 // at the schedule's peak, for gns and replay
#define RAMP_LR_POWER_END 0.5 // where the schedule is 0, unless lr_power is lower

typedef struct {
    RampMode mode;
    int64_t batch_min, batch_max; // fewest and most rows of a step; the horizon may cut the last step to fewer
    int64_t batch_ref;            // the batch for which the learning rate was chosen; in fixed mode all three are equal
    int64_t seq_len;              // tokens per row
    double kappa;                 // k: the critical batch, in noise scales
    double waste;                 // largest batch, in critical batches: the share of extra tokens that the run accepts
    double step_rows;             // x: a step's fixed cost, in rows; 0: not known yet
    double lr_power;              // p of lr x (B / batch_ref)^p at the schedule's peak
    Schedule schedule;            // its train_tokens is the horizon
} RampConfig;

// The target of gns mode, in rows. NaN: unknown; infinite: the noise hides the gradient.
typedef struct {
    double target; // the best batch
    double aim;    // the target less one standard error: the batch moves towards it
    double lower;  // lower bound of the target, with at least 95% confidence
    double waste;  // extra tokens of the present batch for the same progress: 0.1 is 10% above the fewest
    double extra;  // extra seconds of the present batch: 0.1 is 10% above the batch sqrt(x k N)
} RampTarget;

typedef struct {
    RampConfig config;
    double rows;     // gns: the next batch, not rounded, so that small changes add up. Checkpoints store any mode's
    int64_t *replay; // (replay_steps) rows of each step; NULL unless RAMP_REPLAY
    int64_t replay_steps;
    const char *argument; // LIST of steps or FILE of replay, owned by the caller
} Ramp;

// Reads "fixed", "linear", "seesaw", "gns", "steps:LIST" or "replay:FILE". *argument = LIST or FILE in text, or NULL.
int ramp_parse(const char *text, RampMode *mode, const char **argument, Error *e);

// Sets the fewest and the most rows of a LIST. ERR_USAGE unless its TOKENS begin at 0 and rise.
int ramp_check_list(const char *list, int64_t *fewest, int64_t *most, Error *e);

// argument: LIST or FILE, kept. A FILE sets batch_min and batch_max. ERR_INPUT unless it covers the whole horizon.
int ramp_create(Ramp *r, const RampConfig *config, const char *argument, Error *e);
void ramp_destroy(Ramp *r);

// Limits the batch to the range of the present options. Call it after loading r->rows from a checkpoint of `step`
// steps and `tokens` tokens. ERR_INPUT if a replay's file has another number of tokens by that step.
int ramp_settle(Ramp *r, int64_t step, int64_t tokens, Error *e);

// Returns the rows of the next step, after `step` steps and `tokens` tokens.
int64_t ramp_batch(const Ramp *r, int64_t step, double tokens);

// Returns ramp_batch, cut short at the horizon; 0 at the horizon.
int64_t ramp_next(const Ramp *r, int64_t step, int64_t tokens);

// Returns the target for a noise scale that is c times the tracker's.
RampTarget ramp_target(const Ramp *r, const GnsTracker *tracker, GnsFactor c);

// Fits seconds = a + b rows to `count` measurements, by least squares of relative errors; infinite seconds do not
// count. Returns x = a / b, rounded to two digits and limited to [RAMP_LEAST_STEP_ROWS, RAMP_MOST_STEP_ROWS]. The
// largest x means that rows cost nothing.
#define RAMP_LEAST_STEP_ROWS 0.1
#define RAMP_MOST_STEP_ROWS  1e9
double ramp_step_rows(const int64_t *rows, const double *seconds, int count);

// Moves the batch towards `aim` after a step of step_tokens tokens. half_life: of the noise scale's average, in tokens.
// No-op if aim is NaN, or outside gns mode.
void ramp_observe(Ramp *r, double step_tokens, double half_life, double aim);

// Returns schedule_lr x (batch / batch_ref)^p, in every mode. p falls linearly with schedule_lr, from lr_power at its
// peak to RAMP_LR_POWER_END at 0. In fixed mode batch is batch_ref, except in a last step that the horizon cuts short.
double ramp_lr(const Ramp *r, double schedule_lr, int64_t batch);
