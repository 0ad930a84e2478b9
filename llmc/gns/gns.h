// gns: the gradient noise scale tr(Sigma) / |G|^2, in examples, from norms that training computes anyway.
//
// For one step, one group of parameters, and B examples with gradients g_b (of the example's mean loss, before
// clipping):
//   n = mean_b |g_b|^2        q = |mean_b g_b|^2
//   E n = |G|^2 + tr(Sigma)   E q = |G|^2 + tr(Sigma) / B
// Solved for the two unknowns (McCandlish et al. 2018, arXiv 1812.06162, appendix A.1, with a small batch of 1):
//   G2 = (B q - n) / (B - 1)      unbiased for |G|^2; may be negative, since clamping it would bias every average
//   S  = (n - q) B / (B - 1)      unbiased for tr(Sigma)
// G2 and S are noisy, so both are averaged over steps. The scale is the ratio of averages. (An average of ratios would
// have no expectation.) Averages decay in tokens, by 2^(-tokens / half_life).
//
// The error. With averaged values x_t and normalised weights w_t, SE^2 = var(x) sum w_t^2. var(x) comes from successive
// differences, var = E(x_t - x_{t-1})^2 / 2 (von Neumann 1941), since the mean drifts during training, and drift is not
// noise. For the scale R = S / G2 the delta method gives dR = (dS - R dG2) / G2, so SE_R^2 = (SE_S^2 - 2 R Cov + R^2
// SE_G2^2) / G2^2. The covariance matters: a large q raises G2 and lowers S.
//
// If G2 is insignificant, the scale lies far above B, and only a lower bound is known. gns_lower is Fieller's bound
// (1954, "Some problems in interval estimation"): the smallest R with S - R G2 <= k SE(S - R G2), k = 2 (1 + 5 / m).
// m = 1 / sum w_t^2 is the effective number of steps. In simulation the true scale lies above the bound in 95% of runs
// or more, from half-lives of 0.7 steps up, even if one direction carries 90% of the noise.
#pragma once

#include "base/common.h"
#include <math.h>

GNS_HD static inline double gns_g2(double B, double n, double q) { return (B * q - n) / (B - 1); }
GNS_HD static inline double gns_s(double B, double n, double q) { return (n - q) * B / (B - 1); }

// Running averages of one group. Checkpoints store it field by field, as doubles. A step enters the sums with weight
// 1 - d, d = 2^(-tokens / half_life). Each later step multiplies the sums by its d. Estimates divide by `weight`.
typedef struct {
    double steps;             // updates so far
    double weight, weight_sq; // sum of the weights, sum of their squares
    double g2, s;             // weighted sums of G2 and S
    double last_g2, last_s;   // G2 and S of the last step
    double diff_weight;       // sum of the weights of differences between successive steps
    double diff_gg, diff_ss;  // weighted sums of squared differences of G2, of S
    double diff_gs;           // weighted sum of products: difference of G2 times difference of S
} GnsTracker;

// NaN before the first update.
typedef struct {
    double g2, s;     // averages
    double g2_se;     // standard error of g2; NaN before the second update
    double s_se;      // standard error of s
    double scale;     // s / g2 in examples; NaN where g2 <= 0
    double scale_se;  // standard error of scale, by the delta method; valid only if `significant`
    double lower;     // lower bound of the scale, with at least 95% confidence; may be infinite. 0: nothing known
    bool significant; // g2 >= 3 g2_se
} GnsEstimate;

// Adds one step's G2 and S. half_life: tokens. diff_sq: a difference's weight is the square of its step's weight (see
// GnsCalibration).
static inline void gns_add(GnsTracker *t, double g2, double s, double tokens_of_step, double half_life, bool diff_sq) {
    double decay = exp2(-tokens_of_step / half_life), fresh = 1.0 - decay;
    t->weight = decay * t->weight + fresh;
    t->weight_sq = decay * decay * t->weight_sq + fresh * fresh;
    t->g2 = decay * t->g2 + fresh * g2;
    t->s = decay * t->s + fresh * s;
    if (diff_sq) decay *= decay, fresh *= fresh;
    if (t->steps > 0) {
        double dg = g2 - t->last_g2, ds = s - t->last_s;
        t->diff_weight = decay * t->diff_weight + fresh;
        t->diff_gg = decay * t->diff_gg + fresh * dg * dg;
        t->diff_ss = decay * t->diff_ss + fresh * ds * ds;
        t->diff_gs = decay * t->diff_gs + fresh * dg * ds;
    }
    t->last_g2 = g2;
    t->last_s = s;
    t->steps += 1;
}

// Adds one step's norms. No-op for B = 1, which gives no estimate.
static inline void gns_update(GnsTracker *t, double B, double n, double q, double tokens_of_step, double half_life) {
    if (B >= 2) gns_add(t, gns_g2(B, n, q), gns_s(B, n, q), tokens_of_step, half_life, false);
}

// The bound lies GNS_LOWER_SES + GNS_FEW_SES / m standard errors below the estimate; m: effective number of steps.
#define GNS_LOWER_SES 2.0
#define GNS_FEW_SES   10.0

// Returns sum w_t^2 = 1 / m.
static inline double gns_sum_w2(const GnsTracker *t) { return t->weight_sq / (t->weight * t->weight); }

// Variances and covariance of the averages.
typedef struct {
    double g2, s, g2_s;
} GnsCovariance;

// Solves S - R G2 = k sqrt(var(S) - 2 R cov + R^2 var(G2)), a quadratic a R^2 - 2 b R + c = 0, for R >= 0. Returns 0 if
// S <= k sqrt(var(S)); INFINITY if G2 <= -k sqrt(var(G2)), which no finite scale explains.
static inline double gns_lower(double g2, double s, GnsCovariance var, double k) {
    double a = g2 * g2 - k * k * var.g2, b = s * g2 - k * k * var.g2_s, c = s * s - k * k * var.s;
    if (s <= 0 || c <= 0) return 0;
    if (g2 + k * sqrt(var.g2) <= 0) return INFINITY;
    return c / (b + sqrt(fmax(b * b - a * c, 0))); // smaller positive root, without cancellation
}

// Covariances of the averages: half the mean product of differences, times sum w^2. NaN before the second update.
static inline GnsCovariance gns_covariance(const GnsTracker *t) {
    double per_diff = 0.5 * gns_sum_w2(t) / t->diff_weight;
    return (GnsCovariance){per_diff * t->diff_gg, per_diff * t->diff_ss, per_diff * t->diff_gs};
}

static inline GnsEstimate gns_estimate(const GnsTracker *t) {
    GnsEstimate e = {NAN, NAN, NAN, NAN, NAN, NAN, NAN, false};
    if (t->steps < 1) return e;
    e.lower = 0;
    e.g2 = t->g2 / t->weight;
    e.s = t->s / t->weight;
    if (e.g2 > 0) e.scale = e.s / e.g2;
    if (t->steps < 2) return e;
    GnsCovariance var = gns_covariance(t);
    e.g2_se = sqrt(var.g2), e.s_se = sqrt(var.s);
    e.significant = e.g2 > 0 && e.g2 >= 3 * e.g2_se;
    double R = e.scale;
    if (e.g2 > 0) e.scale_se = sqrt(fmax(var.s - 2 * R * var.g2_s + R * R * var.g2, 0)) / e.g2;
    e.lower = gns_lower(e.g2, e.s, var, GNS_LOWER_SES + GNS_FEW_SES * gns_sum_w2(t));
    return e;
}

// A measured factor c, by which a scale is multiplied.
typedef struct {
    double value;
    double var;    // square of its relative standard error
    double sum_w2; // sum w_t^2 of the averages that it was measured from
} GnsFactor;

// Returns the lower bound of c x scale, by ses + few_ses / m standard errors: gns_lower with c S in place of S. The
// error of c S includes the error of c.
static inline double gns_scaled_lower(const GnsTracker *t, GnsFactor c, double ses, double few_ses) {
    if (t->steps < 2) return NAN;
    double g2 = t->g2 / t->weight, s = t->s / t->weight;
    GnsCovariance var = gns_covariance(t);
    var.s = c.value * c.value * (var.s + s * s * c.var);
    var.g2_s *= c.value;
    return gns_lower(g2, c.value * s, var, ses + few_ses * fmax(gns_sum_w2(t), c.sum_w2));
}

// Calibration: the ratio c of the whole model's scale to the LayerNorms' scale, both averaged over the same sampled
// steps. Samples are few and c moves slowly, so its half-life is five times Noise.ln's (noise.h). But it is at most a
// tenth of the tokens done, as a run's first steps have gradients thousands of times larger. Samples are spaced in
// tokens, and averages decay in tokens, so c rests on the same number of samples at any batch.
//
// Over such a long average |G|^2 falls by orders of magnitude, and the variance of a step with it. So each step has its
// own variance, half the square of its difference: SE^2 = sum w_t^2 (x_t - x_{t-1})^2 / 2 (White 1980, "A
// heteroskedasticity-consistent covariance matrix estimator"). w_t^2 decays twice as fast as w_t, so SE rests on half
// as many steps as the average. To compensate, both G2 must exceed 0 by GNS_CALIBRATION_SES + 10 / m standard errors.
// Noise.ln uses the mean square of differences: with White's error its bound held in only 93% of runs.
//
// To first order, the relative error of c is the error of log((S_t / G2_t) (G2_l / S_l)), t: total, l: ln. It includes
// all covariances: a step's two estimates of |G|^2 share most of their noise, which cancels in c.
#define GNS_CALIBRATION_HALF_LIVES 5.0
#define GNS_CALIBRATION_SHARE      0.1  // longest half-life, as a share of the tokens done
#define GNS_CALIBRATION_SAMPLES    25.0 // sampled steps per half-life
#define GNS_CALIBRATION_SES        5.0  // standard errors by which both G2 must exceed 0, for a ratio known to 30%

typedef struct {
    GnsTracker total, ln;
    double cross[2][2]; // weighted sums of products of differences: (G2, S) of total by (G2, S) of ln
    GnsFactor ratio;    // 1 at first, then the latest significant ratio; every run so far ended with a ratio above 1
} GnsCalibration;

// The calibration's half-life after `done` tokens. half_life: Noise.ln's.
static inline double gns_calibration_half_life(double half_life, double done) {
    return fmin(GNS_CALIBRATION_HALF_LIVES * half_life, GNS_CALIBRATION_SHARE * done);
}

static inline bool gns_calibration_significant(const GnsTracker *t, GnsEstimate e) {
    return e.s > 0 && e.g2 > 0 && e.g2 >= (GNS_CALIBRATION_SES + GNS_FEW_SES * gns_sum_w2(t)) * e.g2_se;
}

// Adds a sampled step. tokens: tokens since the last sampled step; half_life: see gns_calibration_half_life. While
// either scale is insignificant, the ratio does not change.
static inline void gns_calibration_update(GnsCalibration *c, double B, double n_total, double q_total, double n_ln,
                                          double q_ln, double tokens, double half_life) {
    if (B < 2) return;
    const double decay = exp2(-tokens / half_life), keep = decay * decay, fresh = (1 - decay) * (1 - decay);
    const double total_g2 = gns_g2(B, n_total, q_total), total_s = gns_s(B, n_total, q_total);
    const double ln_g2 = gns_g2(B, n_ln, q_ln), ln_s = gns_s(B, n_ln, q_ln);
    const double a[] = {total_g2 - c->total.last_g2, total_s - c->total.last_s};
    const double b[] = {ln_g2 - c->ln.last_g2, ln_s - c->ln.last_s};
    for (int i = 0; i < 2 && c->total.steps > 0; i++)
        for (int j = 0; j < 2; j++) c->cross[i][j] = keep * c->cross[i][j] + fresh * a[i] * b[j];
    gns_add(&c->total, total_g2, total_s, tokens, half_life, true);
    gns_add(&c->ln, ln_g2, ln_s, tokens, half_life, true);
    GnsEstimate total = gns_estimate(&c->total), ln = gns_estimate(&c->ln);
    if (!gns_calibration_significant(&c->total, total) || !gns_calibration_significant(&c->ln, ln)) return;
    c->ratio.value = total.scale / ln.scale;
    c->ratio.sum_w2 = gns_sum_w2(&c->total);

    // Relative variance of the ratio: the sum of the two scales' relative variances, less twice their covariance.
    const double da[2] = {-1 / total.g2, 1 / total.s}, db[2] = {-1 / ln.g2, 1 / ln.s};
    double common = 0, per_diff = 0.5 * gns_sum_w2(&c->total) / c->total.diff_weight;
    double of_total = total.scale_se / total.scale, of_ln = ln.scale_se / ln.scale;
    for (int i = 0; i < 2; i++)
        for (int j = 0; j < 2; j++) common += da[i] * db[j] * per_diff * c->cross[i][j];
    c->ratio.var = fmax(of_total * of_total + of_ln * of_ln - 2 * common, 0);
}
