// Compares the gradient noise scale with synthetic per-example gradients of known |G|^2 and tr(Sigma).
#include "../test.h"

#include "model/engine.h"
#include "gns/gns.h"
#include "gns/noise.h"
#include "math/rng.h"

// Gradients are g = G + Gaussian noise in D dimensions: |G|^2 = g2, tr(Sigma) = trace, all directions alike.
enum { D = 20, MAX_B = 32 };

typedef struct {
    double mean, deviation; // statistics of one example's gradient, in each direction
    uint64_t stream, drawn;
} Source;

typedef struct {
    double n, q;
} Norms;

static Source source_make(double g2, double trace, uint64_t stream) {
    return (Source){sqrt(g2 / D), sqrt(trace / D), stream, 0};
}

static void source_draw(Source *s, int B, double g[MAX_B][D]) {
    for (int b = 0; b < B; b++)
        for (int d = 0; d < D; d++) g[b][d] = s->mean + s->deviation * rng_normal(77, s->stream, s->drawn++);
}

static Norms norms_of(int B, double g[MAX_B][D]) {
    Norms r = {0, 0};
    for (int d = 0; d < D; d++) {
        double sum = 0;
        for (int b = 0; b < B; b++) {
            sum += g[b][d];
            r.n += g[b][d] * g[b][d] / B;
        }
        r.q += sum * sum / B / B;
    }
    return r;
}

static Norms source_norms(Source *s, int B) {
    double g[MAX_B][D];
    source_draw(s, B, g);
    return norms_of(B, g);
}

// Returns averages after `steps` steps of B examples. half_life: steps.
static GnsTracker tracked(Source *source, int B, double half_life, double steps) {
    GnsTracker t = {0};
    for (int step = 0; step < steps; step++) {
        Norms r = source_norms(source, B);
        gns_update(&t, B, r.n, r.q, 1, half_life);
    }
    return t;
}

// ---- the estimators -------------------------------------------------------------------------------------------------

// S is the trace of the sample covariance (divided by B - 1). G2 is the mean product of the gradients of two different
// examples. Both are therefore unbiased.
static void test_identities(void) {
    enum { B = 8 };
    Source source = source_make(1, 20, 101);
    for (int trial = 0; trial < 200; trial++) {
        double g[MAX_B][D], trace = 0, products = 0;
        source_draw(&source, B, g);
        for (int d = 0; d < D; d++) {
            double mean = 0;
            for (int b = 0; b < B; b++) mean += g[b][d] / B;
            for (int b = 0; b < B; b++) {
                trace += (g[b][d] - mean) * (g[b][d] - mean) / (B - 1);
                for (int a = 0; a < B; a++) products += a == b ? 0 : g[a][d] * g[b][d] / (B * (B - 1));
            }
        }
        Norms once = norms_of(B, g);
        CHECK_CLOSE(gns_s(B, once.n, once.q), trace, 1e-12, 0);
        CHECK_CLOSE(gns_g2(B, once.n, once.q), products, 1e-12, once.n);
    }
}

// ---- the averages ---------------------------------------------------------------------------------------------------

// Compares averages, squared weights and errors with sums over the whole history. Step sizes vary. Steps of one example
// change nothing. diff_sq: see gns_add.
static void check_tracker(bool diff_sq) {
    enum { STEPS = 60 };
    const double half_life = 700;
    double g2[STEPS], s[STEPS], tokens[STEPS];
    Source source = source_make(1, 10, 102);
    GnsTracker t = {0};
    CHECK(isnan(gns_estimate(&t).lower) && isnan(gns_estimate(&t).scale), "an estimate from nothing");
    for (int last = 0; last < STEPS; last++) {
        int B = 2 + last % 5;
        Norms r = source_norms(&source, B);
        g2[last] = (B * r.q - r.n) / (B - 1);
        s[last] = (r.n - r.q) / (1 - 1.0 / B);
        tokens[last] = 64 * B;
        gns_add(&t, g2[last], s[last], tokens[last], half_life, diff_sq);
        GnsTracker before = t;
        gns_update(&t, 1, 123, 456, 64, half_life);
        CHECK(memcmp(&t, &before, sizeof t) == 0, "one example changed the averages");

        double w[STEPS], v[STEPS], total = 0, mean_g = 0, mean_s = 0, sum_w2 = 0, since = 0;
        for (int i = last; i >= 0; i--) {
            w[i] = (1 - pow(2, -tokens[i] / half_life)) * pow(2, -since / half_life);
            v[i] = diff_sq ? w[i] * w[i] : w[i];
            total += w[i];
            since += tokens[i];
        }
        double diffs = 0, gg = 0, ss = 0, gs = 0;
        for (int i = 0; i <= last; i++) {
            mean_g += w[i] / total * g2[i];
            mean_s += w[i] / total * s[i];
            sum_w2 += w[i] / total * w[i] / total;
            if (i == 0) continue;
            double dg = g2[i] - g2[i - 1], ds = s[i] - s[i - 1];
            diffs += v[i], gg += v[i] * dg * dg, ss += v[i] * ds * ds, gs += v[i] * dg * ds;
        }
        GnsEstimate e = gns_estimate(&t);
        CHECK(!isnan(e.g2), "no estimate after %d steps", last + 1);
        CHECK_CLOSE(e.g2, mean_g, 1e-12, 1);
        CHECK_CLOSE(e.s, mean_s, 1e-12, 1);
        CHECK_CLOSE(t.weight_sq / t.weight / t.weight, sum_w2, 1e-12, 0);
        CHECK(mean_g > 0 ? fabs(e.scale - mean_s / mean_g) < 1e-9 * mean_s / mean_g : isnan(e.scale), "scale %g",
              e.scale);
        if (last == 0) {
            CHECK(isnan(e.g2_se) && e.lower == 0 && !e.significant, "an error from one step");
            continue;
        }
        CHECK_CLOSE(e.g2_se, sqrt(gg / diffs / 2 * sum_w2), 1e-12, 0);
        CHECK_CLOSE(sqrt(gns_covariance(&t).s), sqrt(ss / diffs / 2 * sum_w2), 1e-12, 0);
        CHECK(e.significant == (mean_g >= 3 * e.g2_se), "significant %d", e.significant);
        if (mean_g <= 0) continue;
        // rr: mean over the steps of dR^2, dR = (dS - R dG2) / G2
        double R = mean_s / mean_g, rr = 0;
        for (int i = 1; i <= last; i++)
            rr += v[i] / diffs * pow((s[i] - s[i - 1] - R * (g2[i] - g2[i - 1])) / mean_g, 2);
        CHECK_CLOSE(e.scale_se, sqrt(rr / 2 * sum_w2), 1e-9, 0);
    }
}

static void test_tracker(void) {
    check_tracker(false);
    check_tracker(true);
}

// gns_lower solves its equation. If S is exact, the bound is S / (G2 + k SE), also for G2 <= 0.
static void test_lower_formula(void) {
    for (int i = -3; i <= 20; i++) {
        double g2 = 0.1 * i;
        CHECK_CLOSE(gns_lower(g2, 5, (GnsCovariance){0.04, 0, 0}, 2), 5 / (g2 + 0.4), 1e-12, 0);
    }
    CHECK(gns_lower(-0.5, 5, (GnsCovariance){0.04, 0, 0}, 2) == INFINITY, "a finite bound where G2 is below -2 SE");
    CHECK(gns_lower(1, 0, (GnsCovariance){0.04, 0, 0}, 2) == 0, "no noise, yet a bound");
    CHECK(gns_lower(1, -5, (GnsCovariance){0.04, 0, 0}, 2) == 0, "less than no noise, yet a bound");
    CHECK(!gns_calibration_significant(&(GnsTracker){.weight = 1}, (GnsEstimate){.g2 = 1, .s = -1}), "a scale below 0");
    CHECK(gns_lower(1, 1, (GnsCovariance){0.04, 0.5, 0}, 2) == 0, "S lost in its error, yet a bound");
    CHECK_CLOSE(gns_lower(0.5, 7, (GnsCovariance){0, 0, 0}, 2), 14, 1e-12, 0);
    for (uint64_t i = 0; i < 2000; i++) {
        double g2 = rng_normal(8, 1, i), s = 3 + rng_uniform(8, 2, i), k = 2 + 3 * rng_uniform(8, 3, i);
        double sg = 0.3 * rng_uniform(8, 4, i), sd = 0.5 * rng_uniform(8, 5, i), rho = 2 * rng_uniform(8, 6, i) - 1;
        double R = gns_lower(g2, s, (GnsCovariance){sg * sg, sd * sd, rho * sg * sd}, k);
        if (R == INFINITY || R == 0) {
            CHECK(R == 0 ? s <= k * sd : g2 <= -k * sg, "bound %g for %g +- %g, %g +- %g", R, s, sd, g2, sg);
            continue;
        }
        double error = sqrt(sd * sd - 2 * R * rho * sg * sd + R * R * sg * sg);
        CHECK(R > 0 && fabs(s - R * g2 - k * error) < 1e-9 * (s + R * fabs(g2)), "R = %g: %g against %g", R, s - R * g2,
              k * error);
    }
}

// The bound is below the true scale in at least 95% of runs, at any half-life.
static void test_lower_covers(void) {
    enum { RUNS = 600, B = 16, SCALE = 80 };
    const double half_lives[] = {0.7, 3};
    for (int h = 0; h < 2; h++) {
        int covered = 0;
        for (uint64_t run = 0; run < RUNS; run++) {
            Source source = source_make(1, SCALE, 1600 + 2 * run + (uint64_t)h);
            const GnsTracker t = tracked(&source, B, half_lives[h], 2 + 8 * half_lives[h]);
            covered += gns_estimate(&t).lower <= SCALE;
        }
        CHECK(covered >= 0.95 * RUNS, "half-life %g: %d of %d runs", half_lives[h], covered, RUNS);
    }
}

// ---- calibration ----------------------------------------------------------------------------------------------------

// Draws and adds a step of both sources.
static void calibration_observe(GnsCalibration *c, Source *total, Source *ln, int B, double half_life) {
    Norms a = source_norms(total, B), b = source_norms(ln, B);
    gns_calibration_update(c, B, a.n, a.q, b.n, b.q, 1, half_life);
}

// total has 2.5 times the scale of ln. The ratio is 1 until both scales are significant, then 2.5, also after noise
// hides the scales again.
static void test_calibration(void) {
    GnsCalibration c = {.ratio = {.value = 1}};
    Source total = source_make(1, 10, 500), ln = source_make(0.1, 0.4, 501);
    for (int i = 0; i < 400; i++) calibration_observe(&c, &total, &ln, 16, 100);
    CHECK_CLOSE(c.ratio.value, 2.5, 0.1, 0);
    total = source_make(1e-5, 10, 502), ln = source_make(1e-6, 0.4, 503); // G vanishes in noise
    for (int i = 0; i < 3000; i++) {
        calibration_observe(&c, &total, &ln, 16, 100);
        GnsEstimate t = gns_estimate(&c.total), l = gns_estimate(&c.ln);
        if (t.g2 > 6 * t.g2_se && l.g2 > 6 * l.g2_se) CHECK_CLOSE(c.ratio.value, t.scale / l.scale, 1e-12, 0);
    }
    CHECK(!gns_estimate(&c.total).significant, "a significant G2 of nothing");
    CHECK(c.ratio.value > 1 && c.ratio.value < 6, "ratio %g, was about 2.5 when last seen", c.ratio.value);
}

// Draws two estimates. common: weight of the noise that both share, from 0 to 1.
static void draw_pair(double common, uint64_t stream, uint64_t step, double g2[2], double s[2]) {
    double shared[2] = {rng_normal(stream, step, 0), rng_normal(stream, step, 1)}, rest = sqrt(1 - common * common);
    for (uint64_t i = 0; i < 2; i++) {
        g2[i] = 1 + 0.5 * (common * shared[0] + rest * rng_normal(stream, step, 2 + i));
        s[i] = 10 + 1.0 * (common * shared[1] + rest * rng_normal(stream, step, 4 + i));
    }
}

// The reported error of c equals the spread of c over many runs, whether or not the two scales share their noise.
static void test_calibration_error(void) {
    enum { RUNS = 300, STEPS = 200, B = 8 };
    static const double common[] = {0, 0.95, 1};
    for (int k = 0; k < 3; k++) {
        double mean = 0, square = 0, claimed = 0;
        for (uint64_t run = 0; run < RUNS; run++) {
            GnsCalibration c = {.ratio = {.value = 1}};
            for (uint64_t i = 0; i < STEPS; i++) {
                double g2[2], s[2]; // converted to n and q below
                draw_pair(common[k], 520 + run, i, g2, s);
                gns_calibration_update(&c, B, g2[0] + s[0], g2[0] + s[0] / B, g2[1] + s[1], g2[1] + s[1] / B, 1, 20);
            }
            CHECK(c.ratio.sum_w2 > 0 && c.ratio.sum_w2 < 0.03, "1 / m is %g", c.ratio.sum_w2);
            mean += log(c.ratio.value) / RUNS, square += pow(log(c.ratio.value), 2) / RUNS,
                claimed += c.ratio.var / RUNS;
        }
        double spread = sqrt(fmax(0, square - mean * mean));
        CHECK_CLOSE(sqrt(claimed), spread, 0.2, 1e-6);
        CHECK(common[k] == 1 ? spread < 1e-9 : spread > 0.02, "common %g: spread %g", common[k], spread);
    }
}

// gns_scaled_lower solves gns_lower's equation for c S. Errors of c and of S lower the bound.
static void test_scaled_lower(void) {
    Source source = source_make(1, 10, 521);
    GnsTracker nothing = tracked(&source, 16, 20, 0), t = tracked(&source, 16, 20, 60);
    CHECK(isnan(gns_scaled_lower(&nothing, (GnsFactor){2, 0, 0}, 1, 0)), "a bound from nothing");
    GnsEstimate e = gns_estimate(&t);
    CHECK_CLOSE(gns_scaled_lower(&t, (GnsFactor){1, 0, 0}, 2, 10), e.lower, 1e-12, 0);
    CHECK_CLOSE(gns_scaled_lower(&t, (GnsFactor){3, 0, 0}, 2, 10), 3 * e.lower, 1e-12, 0);
    const double c = 2.5, c_se = 0.1, k = 2 + 10 * 0.3;
    GnsCovariance v = gns_covariance(&t);
    double R = gns_scaled_lower(&t, (GnsFactor){c, c_se * c_se, 0.3}, 2, 10);
    double error = sqrt(c * c * v.s + pow(c * e.s * c_se, 2) - 2 * R * c * v.g2_s + R * R * v.g2);
    CHECK_CLOSE(c * e.s - R * e.g2, k * error, 1e-9, 0);
    CHECK(R < 0.7 * gns_scaled_lower(&t, (GnsFactor){c, 0, 0}, 2, 10), "bound %g", R);
}

// A half-life holds as many samples with 8 rows per step as with 256. Early in a run samples are closer together.
static void test_samples_are_spaced_in_tokens(void) {
    const double half_life = 4e5, row = 512;
    Noise noise = {.half_life = half_life};
    CHECK(noise_sample_due(&noise, 0), "the first step is no sample");
    for (double rows = 8; rows <= 256; rows *= 2)
        for (int early = 0; early < 2; early++) {
            double begun = early ? 1e6 : 1e8, span = early ? 1e5 : 5 * half_life, samples = 0;
            noise.tokens_since_sample = 0;
            for (double done = begun; done < begun + span; done += rows * row) {
                bool due = noise_sample_due(&noise, done);
                samples += due;
                noise.tokens_since_sample = (due ? 0 : noise.tokens_since_sample) + rows * row;
            }
            double want = fmin(GNS_CALIBRATION_SAMPLES, span / (rows * row)),
                   least = want / 2; // at least every second step
            CHECK(samples >= least - 1 && samples <= want + 1, "%g rows, early %d: %g samples, want %g", rows, early,
                  samples, want);
        }
}

// If noise hides G2, a few samples in a half-life must not look like a known ratio by chance. (The LayerNorms' scale is
// 32 rows, the model's 80.)
static void test_calibration_is_wary(void) {
    enum { RUNS = 400, B = 16 };
    const double half_lives[] = {1.5, 4}; // in samples
    for (int h = 0; h < 2; h++) {
        int wrong = 0;
        for (uint64_t run = 0; run < RUNS; run++) {
            uint64_t stream = 700 + 2 * (run + RUNS * (uint64_t)h);
            Source total = source_make(1, 80, stream), ln = source_make(0.01, 0.32, stream + 1);
            GnsCalibration c = {.ratio = {.value = 1}};
            bool off = false;
            for (int i = 0; i < 8 * half_lives[h]; i++) {
                calibration_observe(&c, &total, &ln, B, half_lives[h]);
                off |= c.ratio.value != 1 && fabs(log(c.ratio.value / 2.5)) > log(1.5);
            }
            wrong += off;
        }
        CHECK(wrong <= 0.04 * RUNS, "half-life of %g samples: %d of %d runs took a wrong ratio", half_lives[h], wrong,
              RUNS);
    }
}

// A given ratio overrides the measured one, even below 1.
static void test_ratio(void) {
    for (int i = 0; i < 4; i++) {
        bool total = i & 1, given = i & 2, measured = i == 0;
        Noise noise = {.calibration = {.ratio = {3, 0.04, 0.1}}, .follows_total = total};
        noise.fixed_ratio = given ? 0.5 : 0;
        GnsFactor c;
        const GnsTracker *tracker = noise_signal(&noise, &c);
        CHECK(tracker == (total ? &noise.total : &noise.ln), "case %d: another tracker", i);
        CHECK(c.value == (measured ? 3 : total ? 1 : 0.5), "case %d: c %g", i, c.value);
        CHECK(c.var == (measured ? 0.04 : 0) && c.sum_w2 == (measured ? 0.1 : 0), "case %d: error %g", i, c.var);
    }
}

// ---- sources --------------------------------------------------------------------------------------------------------

// Steps have B rows of three sources with known G and tr(Sigma), on RANKS ranks. The gradients of the last two sources
// point away from each other.
enum { SOURCES = 3, RANKS = 3 };
static const double shares[SOURCES] = {0.6, 0.3, 0.1}, noises[SOURCES] = {10, 6, 4};
static double true_gradient(int s, int d) {
    return (s == 0 || s == d % 2 + 1 ? 1 : -0.5) / sqrt(D) * (s == 1 ? 0.7 : 1);
}

static void observe_draw(Noise *noise, int B, uint64_t stream, uint64_t *drawn) {
    double sq[SOURCES] = {0}, gram[SOURCES * SOURCES] = {0}, pairs = 0;
    for (int r = 0; r < RANKS; r++) {
        double v[SOURCES][D] = {{0}};
        for (int b = 0; b < B / RANKS; b++) {
            double u = rng_uniform(78, stream, (*drawn)++);
            int s = u < shares[0] ? 0 : u < shares[0] + shares[1] ? 1 : 2;
            for (int d = 0; d < D; d++) {
                double g = true_gradient(s, d) + sqrt(noises[s] / D) * rng_normal(77, stream, (*drawn)++);
                v[s][d] += g;
                sq[s] += g * g;
            }
        }
        for (int i = 0; i < SOURCES * SOURCES; i++)
            for (int d = 0; d < D; d++) gram[i] += v[i / SOURCES][d] * v[i % SOURCES][d];
        pairs += (double)(B / RANKS) * (B / RANKS - 1);
    }
    noise_observe_sources(noise, B, pairs, shares, sq, gram, 1);
}

static double product(int s, int t) {
    double sum = 0;
    for (int d = 0; d < D; d++) sum += true_gradient(s, d) * true_gradient(t, d);
    return sum;
}

// Over many runs |G_s|^2, S_s and the cosines are right on average, and their reported errors equal the spread over the
// runs. (dev/oracle compares the estimates of one rank with float64.)
static void test_sources(void) {
    enum { RUNS = 150, STEPS = 200, B = 24, PAIRS = SOURCES * (SOURCES - 1) / 2, NUMBERS = 2 * SOURCES + PAIRS };
    double mean[NUMBERS] = {0}, square[NUMBERS] = {0}, claimed[NUMBERS] = {0}, want[NUMBERS];
    Model model = {0};
    Error e;
    for (uint64_t run = 0; run < RUNS; run++) {
        Noise noise;
        double got[NUMBERS], se[NUMBERS];
        uint64_t drawn = 0;
        int k = 0;
        CHECK_OK(noise_create(&noise, &model, 1e9, 0, SOURCES, &e), &e);
        for (int i = 0; i < STEPS; i++) observe_draw(&noise, B, 800 + run, &drawn);
        for (int s = 0; s < SOURCES; s++) {
            const GnsEstimate x = gns_estimate(&noise.source[SOURCES + s]);
            got[k] = x.g2, se[k] = x.g2_se, want[k++] = product(s, s);
            got[k] = x.s, se[k] = x.s_se, want[k++] = noises[s];
            for (int t = 0; t < s; t++) {
                got[k] = noise_cosine(&noise, t, s, &se[k]);
                want[k++] = product(s, t) / sqrt(product(s, s) * product(t, t));
            }
        }
        for (k = 0; k < NUMBERS; k++)
            mean[k] += got[k] / RUNS, square[k] += got[k] * got[k] / RUNS, claimed[k] += se[k] * se[k] / RUNS;
        noise_destroy(&noise);
    }
    for (int k = 0; k < NUMBERS; k++) {
        double spread = sqrt(square[k] - mean[k] * mean[k]);
        CHECK(fabs(mean[k] - want[k]) < 4 * spread / sqrt(RUNS), "number %d: %g, want %g, spread %g", k, mean[k],
              want[k], spread);
        CHECK_CLOSE(sqrt(claimed[k]), spread, 0.2, 0);
    }
}

// ---- A model's groups -----------------------------------------------------------------------------------------------

// Averages computed by definition; half_life: tokens.
typedef struct {
    double g2, s, half_life;
} Average;

static void average_add(Average *a, double B, Norms norms, double tokens) {
    double keep = exp2(-tokens / a->half_life);
    a->g2 = keep * a->g2 + (1 - keep) * (B * norms.q - norms.n) / (B - 1);
    a->s = keep * a->s + (1 - keep) * (norms.n - norms.q) * B / (B - 1);
}

// Returns the norms of all tensors with `part` in their names.
static Norms group_norms(const Model *model, const StepResult *result, double B, const char *part) {
    Norms norms = {0, 0};
    for (int i = 0; i < model->tensor_count; i++)
        if (strstr(model->tensors[i].name, part)) {
            norms.n += result->example_sq[i] / B;
            norms.q += result->grad_sq[i] / (B * B);
        }
    return norms;
}

static void check_average(const char *what, int step, const GnsTracker *t, const Average *a) {
    double got = gns_estimate(t).scale, want = a->s / a->g2;
    CHECK(fabs(got - want) <= 1e-9 * fabs(want), "%s after step %d: %g, want %g", what, step, got, want);
}

// Every step updates the LayerNorms' average. The other groups have five times the LayerNorms' half-life; a measurement
// counts for all tokens since the previous one. The calibration's half-life is at most a tenth of the tokens done.
// `total` has the LayerNorms' half-life and begins at the first step in which a ramp follows it.
static void test_groups(void) {
    enum { HALF_LIFE = 900, STEPS = 60, FOLLOWED_FROM = 9, FOLLOWED_TO = 30 };
    enum { LN, SAMPLED_LN, TOTAL, TYPE, LAYER = TYPE + 4, FOLLOWED = LAYER + 2, AVERAGES };
    static const char *const parts[AVERAGES] = {
        [LN] = "ln_",       [SAMPLED_LN] = "ln_", [TOTAL] = "",     [TYPE] = "e.weight",  [TYPE + 1] = "attn",
        [TYPE + 2] = "mlp", [TYPE + 3] = "ln_",   [LAYER] = "h.0.", [LAYER + 1] = "h.1.", [FOLLOWED] = ""};
    const ModelConfig config = {.layers = 2, .heads = 1, .channels = 16, .vocab = 256, .context = 8};
    double example_sq[64], grad_sq[64], tokens_since = 0, done = 0;
    const StepResult result = {.example_sq = example_sq, .grad_sq = grad_sq};
    Average want[AVERAGES];
    Model model;
    Noise noise;
    Error e = {0};
    CHECK_OK(model_create(&model, &config, &e), &e);
    CHECK_OK(noise_create(&noise, &model, HALF_LIFE, 0, 0, &e), &e);
    CHECK(noise.calibration.ratio.value == 1, "a ratio of 1 before it is measured");
    for (int k = 0; k < AVERAGES; k++) want[k] = (Average){0, 0, k == LN || k == FOLLOWED ? HALF_LIFE : 5 * HALF_LIFE};
    for (int step = 0; step < STEPS; step++) {
        double B = 2 + rng_u32(700, 0, (uint64_t)step) % 30, tokens = 8 * B;
        for (int i = 0; i < model.tensor_count; i++) { // |sum g|^2 lies between sum |g|^2 and B sum |g|^2
            example_sq[i] = 1 + rng_u32(700, 1 + (uint64_t)step, (uint64_t)i) % 1000;
            grad_sq[i] = example_sq[i] * (1 + (B - 1) * (rng_u32(701, (uint64_t)step, (uint64_t)i) % 1000) / 1000.0);
        }
        bool exact = step % 4 == 2 || step < 2;
        noise.follows_total = step >= FOLLOWED_FROM && step < FOLLOWED_TO;
        done += tokens;
        noise_observe(&noise, &model, &result, (int64_t)B, tokens, done, exact ? GNS_EXACT : GNS_LN);
        tokens_since += tokens;
        want[SAMPLED_LN].half_life = want[TOTAL].half_life = fmin(5 * HALF_LIFE, done / 10);
        average_add(&want[LN], B, group_norms(&model, &result, B, parts[LN]), tokens);
        for (int k = SAMPLED_LN; k < AVERAGES && exact; k++)
            if (k != FOLLOWED || step >= FOLLOWED_FROM)
                average_add(&want[k], B, group_norms(&model, &result, B, parts[k]), tokens_since);
        if (exact) tokens_since = 0;
        check_average("ln", step, &noise.ln, &want[LN]);
        check_average("ln of samples", step, &noise.calibration.ln, &want[SAMPLED_LN]);
        check_average("total", step, &noise.calibration.total, &want[TOTAL]);
        if (noise.total.steps > 0) check_average("followed", step, &noise.total, &want[FOLLOWED]);
        CHECK((noise.total.steps > 0) == (step > FOLLOWED_FROM), "step %d: followed for %g steps", step,
              noise.total.steps);
        for (int g = 0; g < GROUP_COUNT; g++) check_average(group_names[g], step, &noise.type[g], &want[TYPE + g]);
        for (int l = 0; l < 2; l++) check_average("a layer", step, &noise.layer[l], &want[LAYER + l]);
    }
    Noise before = noise;
    noise_observe(&noise, &model, &result, 8, 64, done, GNS_OFF);
    CHECK(memcmp(&before.ln, &noise.ln, sizeof before.ln) == 0, "a step that measured nothing changed the estimate");
    noise_destroy(&noise);
    model_destroy(&model);
}

int main(void) {
    RUN(test_identities, test_tracker, test_lower_formula, test_lower_covers, test_calibration, test_calibration_error,
        test_scaled_lower, test_samples_are_spaced_in_tokens, test_calibration_is_wary, test_ratio, test_sources,
        test_groups);
    return test_summary();
}
