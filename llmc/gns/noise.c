#include "gns/noise.h"

#include "model/engine.h"

#include <string.h>

int noise_create(Noise *noise, const Model *model, double half_life, double ratio, int sources, Error *e) {
    memset(noise, 0, sizeof *noise);
    noise->layers = model->config.layers, noise->sources = sources;
    noise->source_trackers = 2 * sources + 3 * sources * (sources - 1) / 2;
    const size_t trackers = (size_t)(noise->layers + noise->source_trackers);
    TRY(memory_alloc_zero((void **)&noise->layer, sizeof(GnsTracker) * trackers, "noise trackers", e));
    noise->source = noise->layer + noise->layers;
    noise->calibration.ratio.value = 1; // rather low than high: see GnsCalibration
    noise->half_life = half_life, noise->fixed_ratio = ratio;
    return 0;
}

void noise_destroy(Noise *noise) {
    memory_free(noise->layer);
    noise->layer = NULL;
}

// A group's n = mean_b |g_b|^2 and q = |mean_b g_b|^2.
typedef struct {
    double n, q;
} Norms;

static void norms_add(Norms *norms, const StepResult *result, int tensor, double B) {
    norms->n += result->example_sq[tensor] / B;
    norms->q += result->grad_sq[tensor] / (B * B);
}

bool noise_sample_due(const Noise *noise, double done) {
    return noise->tokens_since_sample >= gns_calibration_half_life(noise->half_life, done) / GNS_CALIBRATION_SAMPLES;
}

void noise_observe(Noise *noise, const Model *model, const StepResult *result, int64_t batch, double step_tokens,
                   double done, GnsMode mode) {
    double B = (double)batch;
    noise->tokens_since_sample += step_tokens;
    if (mode == GNS_OFF) return;
    Norms type[GROUP_COUNT] = {{0, 0}}, total = {0, 0};
    for (int i = 0; i < model->tensor_count; i++) norms_add(&type[model->tensors[i].group], result, i, B);
    gns_update(&noise->ln, B, type[GROUP_LN].n, type[GROUP_LN].q, step_tokens, noise->half_life);
    if (mode != GNS_EXACT) return;
    const double tokens = noise->tokens_since_sample, half_life = GNS_CALIBRATION_HALF_LIVES * noise->half_life;
    for (int i = 0; i < GROUP_COUNT; i++) {
        gns_update(&noise->type[i], B, type[i].n, type[i].q, tokens, half_life);
        total.n += type[i].n;
        total.q += type[i].q;
    }
    for (int l = 0; l < noise->layers; l++) {
        Norms layer = {0, 0};
        for (int i = 0; i < model->tensor_count; i++)
            if (model->tensors[i].layer == l) norms_add(&layer, result, i, B);
        gns_update(&noise->layer[l], B, layer.n, layer.q, tokens, half_life);
    }
    if (noise->follows_total || noise->total.steps > 0)
        gns_update(&noise->total, B, total.n, total.q, tokens, noise->half_life);
    gns_calibration_update(&noise->calibration, B, total.n, total.q, type[GROUP_LN].n, type[GROUP_LN].q, tokens,
                           gns_calibration_half_life(noise->half_life, done));
    noise->tokens_since_sample = 0;
}

void noise_observe_sources(Noise *noise, double B, double pairs, const double *share, const double *sq, double *gram,
                           double step_tokens) {
    const int n = noise->sources;
    const double half_life = noise->half_life;
    GnsTracker *of_pair = noise->source + 2 * n;
    double all = 0;
    for (int s = 0; s < n; s++) all += sq[s];
    for (int t = 0; t < n; t++) {
        gns_add(&noise->source[t], all / B, sq[t] / B, step_tokens, half_life, false);
        if (pairs == 0) continue;
        gram[t * n + t] -= sq[t];
        for (int s = 0; s <= t; s++) gram[s * n + t] /= share[s] * share[t] * pairs;
        const double g2 = gram[t * n + t];
        gns_add(&noise->source[n + t], g2, sq[t] / (share[t] * B) - g2, step_tokens, half_life, false);
        for (int s = 0; s < t; s++, of_pair += 3) {
            gns_add(&of_pair[0], gram[s * n + s], gram[s * n + t], step_tokens, half_life, false);
            gns_add(&of_pair[1], g2, gram[s * n + t], step_tokens, half_life, false);
            gns_add(&of_pair[2], gram[s * n + s], g2, step_tokens, half_life, false);
        }
    }
}

// With a = |G_s|^2, b = |G_t|^2 and c = <G_s, G_t> the cosine is R = c / sqrt(a b), and by the delta method
// dR = dc / sqrt(a b) - R da / (2 a) - R db / (2 b).
double noise_cosine(const Noise *noise, int s, int t, double *se) {
    const GnsTracker *x = noise->source + 2 * noise->sources + 3 * (t * (t - 1) / 2 + s);
    const double a = x[0].g2 / x[0].weight, b = x[1].g2 / x[0].weight, c = x[0].s / x[0].weight;
    const GnsCovariance ac = gns_covariance(&x[0]), bc = gns_covariance(&x[1]), ab = gns_covariance(&x[2]);
    if (!(a >= 3 * sqrt(ac.g2) && b >= 3 * sqrt(bc.g2))) return *se = NAN;
    const double by_c = 1 / sqrt(a * b), by_a = -c * by_c / (2 * a), by_b = -c * by_c / (2 * b);
    const double var = by_c * by_c * ac.s + by_a * by_a * ac.g2 + by_b * by_b * bc.g2 +
                       2 * (by_c * by_a * ac.g2_s + by_c * by_b * bc.g2_s + by_a * by_b * ab.g2_s);
    *se = sqrt(fmax(var, 0));
    return c * by_c;
}

const GnsTracker *noise_signal(const Noise *noise, GnsFactor *c) {
    *c = noise->calibration.ratio;
    if (noise->follows_total) *c = (GnsFactor){1, 0, 0};
    else if (noise->fixed_ratio > 0) *c = (GnsFactor){noise->fixed_ratio, 0, 0};
    return noise->follows_total ? &noise->total : &noise->ln;
}
