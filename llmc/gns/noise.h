// noise: gradient noise scales of a model's groups of tensors. Every step measures all LayerNorm parameters, at no
// cost. Sampled steps also measure the whole model, every type and every layer. gns.h has the mathematics.
#pragma once

#include "gns/gns.h"
#include "model/model.h"
#include "model/modes.h"

typedef struct StepResult StepResult; // engine.h

typedef struct Noise {
    GnsTracker ln;                // every step: the LayerNorms
    GnsTracker total;             // the whole model, every step; no updates before follows_total is set
    GnsCalibration calibration;   // sampled steps: the whole model and the LayerNorms
    GnsTracker type[GROUP_COUNT]; // sampled steps: embedding, attention, MLP, LN
    GnsTracker *layer;            // (L), sampled steps
    GnsTracker *source;           // (source_trackers) every step, LayerNorms: see noise_observe_sources
    int layers, sources;          // sources: number of sources of a weighted --train; 0 if fewer than 2
    int source_trackers;
    // In tokens, of `ln`, `total`, `source`. Sampled steps are few, so the other half-lives are
    // GNS_CALIBRATION_HALF_LIVES times as long. `calibration` begins with shorter ones.
    double half_life;
    double tokens_since_sample; // since the last exact step
    double fixed_ratio;         // --gns-ratio; 0: measured
    bool follows_total;         // a ramp follows `total`: every step is exact
} Noise;

// half_life: tokens. ratio: total / ln (--gns-ratio); 0: measure it.
int noise_create(Noise *noise, const Model *model, double half_life, double ratio, int sources, Error *e);
void noise_destroy(Noise *noise);

// True if the next step must measure every tensor, for the ratio c. done: tokens before the next step.
bool noise_sample_due(const Noise *noise, double done);

// Adds a step of B examples and step_tokens tokens, measured in `mode`. done: tokens of the run, this step included.
void noise_observe(Noise *noise, const Model *model, const StepResult *result, int64_t B, double step_tokens,
                   double done, GnsMode mode);

// Adds a step of B examples to the estimates by source; dev/docs/gns-study.md derives them. A tracker averages a pair
// of values, its fields g2 and s. Source s of n has the mean gradient G_s; S_s is the noise of its examples:
//   source[s]          mean |g_b|^2 of all examples; source s's share of this mean
//   source[n + s]      |G_s|^2; S_s (this and the next row: no-op if pairs is 0)
//   source[2 n + ...]  for s < t (|G_s|^2, <G_s, G_t>), (|G_t|^2, <G_s, G_t>), (|G_s|^2, |G_t|^2): noise_cosine
// share (n): each source's fraction of the examples. sq (n): each source's sum of |g_b|^2. gram (n, n) =
// sum_r <v_rs, v_rt>, overwritten; v_rs: the sum of g_b over the examples of source s on rank r. pairs =
// sum_r m_r (m_r - 1); m_r: the number of examples on rank r.
void noise_observe_sources(Noise *noise, double B, double pairs, const double *share, const double *sq, double *gram,
                           double step_tokens);

// Returns the cosine between the mean gradients of sources s < t; *se: its standard error. NaN unless |G_s|^2 and
// |G_t|^2 are at least 3 standard errors above 0. With noise the result may exceed 1.
double noise_cosine(const Noise *noise, int s, int t, double *se);

// Returns the tracker that a batch ramp follows. The whole model's noise scale is c times the tracker's.
const GnsTracker *noise_signal(const Noise *noise, GnsFactor *c);
