// ramp: the batch, in rows, of the next optimizer step, and its learning rate.
//
//   fixed        batch_ref throughout
//   linear       from batch_min to batch_max, linearly in tokens over the horizon
//   seesaw       batch_min x lr0 / schedule(tokens) (Meterez et al. 2025, arXiv 2510.14717): where the schedule would
//                divide the rate by a, the batch is multiplied by a and the rate divided by sqrt(a) only, which for
//                normalised SGD walks the same path in fewer steps. The paper cuts in stages; this is the limit of fine
//                stages. lr_power = 0.5 gives the sqrt: the rate is schedule x sqrt(B / batch_min) = sqrt(lr0 x
//                schedule), when batch_ref = batch_min. lr0 is the schedule's peak; the batch is batch_min during
//                warm-up. Once batch_max is reached the rate falls with the schedule again.
//   replay:FILE  the `batch` of each step in an earlier run's metrics.jsonl. If an earlier horizon has cut a step of this
//                run, a last step after the file's last takes the missing tokens
//   gns          follows the noise scale N = c x GNS_ln up and down, within [batch_min, batch_max]; where every step measures
//                the whole model's scale, N = GNS_total. The batch costs the fewest seconds within a stated waste:
//
//                    target = min(sqrt(x k N), waste k N)
//
//                k N is the critical batch: B rows a step need 1 + B / (k N) times the fewest tokens for the same progress
//                (McCandlish et al. 2018, appendix D). A step of B rows takes b (x + B) seconds, so progress costs
//                J(B) = b (x + B) (1 / B + 1 / (k N)), least at B = sqrt(x k N). If x is huge, only steps cost, and the
//                waste of tokens bounds the batch. The batch moves to the target's lower bound with one standard error,
//                that of c included, by at most a factor of 2 in a half-life of the average
//
// A batch is rounded to whole rows. It depends on the number of ranks and on time through x alone, which is measured once
// and stored, or given. Rank 0 decides and broadcasts one integer.
#pragma once

#include "base/common.h"
#include "gns/gns.h"
#include "math/schedule.h"

typedef enum { RAMP_FIXED, RAMP_LINEAR, RAMP_SEESAW, RAMP_REPLAY, RAMP_GNS, RAMP_MODES } RampMode;

extern const char *const ramp_mode_names[RAMP_MODES];

// Measured (dev/docs/gns-study.md). The rate grows with batch^power, and the power falls with the schedule. A high power at the
// peak makes more progress in fewer steps, and the noise that it adds disappears as the rate decays. The square root at
// the end leaves as little noise as the constant batch has.
#define RAMP_LR_POWER     0.8 // at the schedule's peak: of gns, and of a replay
#define RAMP_LR_POWER_END 0.5 // where the schedule is 0, unless the one at the peak is lower

typedef struct {
    RampMode mode;
    int64_t batch_min, batch_max; // rows
    int64_t batch_ref;            // rows: the batch for which the learning rate was chosen
    int64_t seq_len;              // tokens a row
    double kappa;                 // k: the critical batch, in noise scales
    double waste;                 // most rows, in critical batches: the extra tokens that the run accepts
    double step_rows;             // x: what a step costs beyond its rows, in rows; 0: not known yet
    double lr_power;              // p of lr x (B / batch_ref)^p at the schedule's peak
    double half_life_tokens;      // of the noise scale's average
    double train_tokens;          // the horizon
    Schedule schedule;
} RampConfig;

// The state in a checkpoint; used in gns mode only.
typedef struct {
    double rows; // of the next step in gns mode, before it is rounded: many small changes add up
} RampState;

// What gns mode follows, in rows. NaN: unknown; infinite: the noise hides the gradient.
typedef struct {
    double target; // the best batch
    double aim;    // the target's lower bound with one standard error: the batch moves towards it
    double lower;  // the target lies above this with 95% confidence or more
    double waste;  // extra tokens that the present batch costs, as a fraction of the fewest
    double extra;  // seconds that it takes for the same progress, over those of the batch sqrt(x k N), less 1
} RampTarget;

typedef struct {
    RampConfig config;
    RampState state;
    int64_t *replay; // (replay_steps) rows of each step; NULL in the other modes
    int64_t replay_steps;
    const char *replay_path; // the caller's
} Ramp;

// Reads "fixed", "linear", "seesaw", "gns" or "replay:FILE"; *replay_path points into text, or is NULL.
int ramp_parse(const char *text, RampMode *mode, const char **replay_path, Error *e);

// replay_path is read in replay mode only, and kept; the file must cover the whole horizon.
int ramp_create(Ramp *r, const RampConfig *config, const char *replay_path, Error *e);
void ramp_destroy(Ramp *r);

// After r->state was loaded from a checkpoint of `step` steps and `tokens` tokens: brings the batch into the range of
// today's options. ERR_INPUT if the file of a replay has another number of tokens by that step (see ramp_check_replay).
int ramp_settle(Ramp *r, int64_t step, int64_t tokens, Error *e);

// Rows of the next step, after `step` steps and `tokens` tokens.
int64_t ramp_batch(const Ramp *r, int64_t step, double tokens);

// The same, cut short where it would overrun the horizon; 0 at the horizon.
int64_t ramp_next(const Ramp *r, int64_t step, int64_t tokens);

// The most rows of any step; the fewest, except a last step that the horizon cuts short.
int64_t ramp_largest(const Ramp *r);
int64_t ramp_smallest(const Ramp *r);

// The target for a noise scale that is c times the tracker's.
RampTarget ramp_target(const Ramp *r, const GnsTracker *tracker, GnsFactor c);

// a / b of seconds = a + b rows, the line with the least sum of squared relative errors through `count` measurements;
// infinite seconds do not count. In two digits, from RAMP_LEAST_STEP_ROWS to RAMP_MOST_STEP_ROWS (rows cost nothing).
#define RAMP_LEAST_STEP_ROWS 0.1
#define RAMP_MOST_STEP_ROWS  1e9
double ramp_step_rows(const int64_t *rows, const double *seconds, int count);

// After a step of this many tokens: moves the batch towards `aim`. NaN: it stays. Only gns mode uses it.
void ramp_observe(Ramp *r, double step_tokens, double aim);

// Why the batch is what it is, after ramp_observe: ", up: aim 61", ", least: aim 14". Empty outside gns mode.
enum { RAMP_WHY_BYTES = 40 };
void ramp_why(const Ramp *r, double aim, char out[RAMP_WHY_BYTES]);

// schedule_lr x (batch / batch_ref)^p, in every mode; in fixed mode that is schedule_lr, except in a last step that the
// horizon cuts short. p falls linearly with schedule_lr, from lr_power at its peak to RAMP_LR_POWER_END at 0.
double ramp_lr(const Ramp *r, double schedule_lr, int64_t batch);
