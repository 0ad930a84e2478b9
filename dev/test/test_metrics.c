// Every number of a step stands under its own name in metrics.jsonl.
#define _POSIX_C_SOURCE 200809L
#include "../../llmc/files.h"
#include "../../llmc/hellaswag.h"
#include "../../llmc/metrics.h"
#include "../../llmc/noise.h"
#include "test.h"

#include <limits.h>
#include <unistd.h>

static char *text;

static void check_number(const char *name, double want) {
    char key[80];
    snprintf(key, sizeof key, "\"%s\": ", name);
    const char *at = strstr(text, key);
    CHECK(at && strtod(at + strlen(key), NULL) == want, "%s is %.10s, want %.17g", name, at ? at + strlen(key) : "?",
          want);
}

// A tracker whose scale is none of the others'.
static void learn(GnsTracker *t) {
    static int trackers;
    trackers++;
    for (int i = 0; i < 50; i++) gns_update(t, 8, 10 + trackers + i % 3, 4 + i % 2, 100);
}

static void check_estimate(const char *name, const GnsTracker *t) {
    GnsEstimate g = gns_estimate(t);
    const struct {
        const char *end;
        double want;
    } field[] = {{"", g.scale}, {"_se", g.scale_se}, {"_lower", g.lower}, {"_g2", g.g2}, {"_s", g.s}};
    CHECK(g.valid && isfinite(g.scale), "%s", name);
    for (int i = 0; i < 5; i++) {
        char key[64];
        snprintf(key, sizeof key, "%s%s", name, field[i].end);
        check_number(key, field[i].want);
    }
}

static void test_names(void) {
    const ModelConfig config = {3, 1, 8, 16, 8};
    Model model;
    Noise n;
    Metrics *m;
    Error e = {0};
    size_t bytes;
    char layers[200];
    CHECK_OK(model_create(&model, &config, &e), &e);
    CHECK_OK(noise_create(&n, &model, 1e4, 0, &e), &e);
    learn(&n.ln), learn(&n.ranks), learn(&n.calibration.total), learn(&n.calibration.ln);
    for (int i = 0; i < GROUP_COUNT; i++) learn(&n.type[i]);
    for (int i = 0; i < 3; i++) learn(&n.layer[i]);
    n.calibration.ratio = 1.75;
    const StepMetrics s = {.step = 1,
                           .tokens = 2,
                           .examples = 3,
                           .batch = 4,
                           .loss = 5.5,
                           .lr = 6.5,
                           .grad_norm = 7.5,
                           .tok_per_s = 8.5,
                           .mfu = 9.5,
                           .ranks_measured = true};
    const HellaSwagScore score = {.questions = 8, .correct = 3, .correct_norm = 5};
    CHECK_OK(metrics_open(&m, ".", &(bool){0}, &e), &e);
    CHECK_OK(metrics_begin(m, 0, 0, &e), &e);
    CHECK_OK(metrics_step(m, &s, &n, GNS_EXACT, &e), &e);
    CHECK_OK(metrics_val(m, 1, 2, 10.5, &e), &e);
    CHECK_OK(metrics_hellaswag(m, 1, 2, &score, &e), &e);
    CHECK_OK(metrics_end_step(m, &e), &e);
    CHECK_OK(metrics_close(m, &e), &e);
    CHECK_OK(file_read("metrics.jsonl", 1 << 16, &text, &bytes, &e), &e);
    static const char *const names[] = {"step",      "tokens",         "examples",  "batch", "loss",
                                        "lr",        "grad_norm",      "tok_per_s", "mfu",   "val_loss",
                                        "hellaswag", "hellaswag_norm", "gns_ratio"};
    static const double want[] = {1, 2, 3, 4, 5.5, 6.5, 7.5, 8.5, 9.5, 10.5, 3.0 / 8, 5.0 / 8, 1.75};
    for (int i = 0; i < 13; i++) check_number(names[i], want[i]);
    check_estimate("gns_ln", &n.ln);
    check_estimate("gns_ranks", &n.ranks);
    check_estimate("gns_total", &n.calibration.total);
    for (int i = 0; i < GROUP_COUNT; i++) {
        char key[64];
        snprintf(key, sizeof key, "gns_type_%s", group_names[i]);
        check_number(key, gns_estimate(&n.type[i]).scale);
    }
    snprintf(layers, sizeof layers, "\"gns_layer\": [%.17g, %.17g, %.17g]", gns_estimate(&n.layer[0]).scale,
             gns_estimate(&n.layer[1]).scale, gns_estimate(&n.layer[2]).scale);
    CHECK(strstr(text, layers), "%s", layers);
    memory_free(text);
    noise_destroy(&n);
    model_destroy(&model);
}

int main(void) {
    const char *tmp = getenv("TMPDIR");
    char scratch[PATH_MAX];
    Error e = {0};
    snprintf(scratch, sizeof scratch, "%s/gns_metrics_XXXXXX", tmp ? tmp : "/tmp");
    if (!mkdtemp(scratch) || chdir(scratch) != 0) return ERR_INTERNAL;
    RUN(test_names);
    if (chdir("/") == 0) directory_remove(scratch, &e);
    return test_summary();
}
