// metrics.jsonl: every number under its own name; unknown and infinite numbers; skipped steps.
#include "base/files.h"
#include "text/hellaswag.h"
#include "run/metrics.h"
#include "gns/noise.h"
#include "../test.h"
#include "../tree.h"

#include <cjson/cJSON.h>
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

static void noise_make(Noise *n, Model *model, double fixed_ratio) {
    const ModelConfig config = {3, 1, 8, 16, 8};
    Error e = {0};
    CHECK_OK(model_create(model, &config, &e), &e);
    CHECK_OK(noise_create(n, model, 1e4, fixed_ratio, &e), &e);
    learn(&n->ln), learn(&n->calibration.total);
    for (int i = 0; i < GROUP_COUNT; i++) learn(&n->type[i]);
    for (int i = 0; i < 3; i++) learn(&n->layer[i]);
    n->calibration.ratio = 1.75;
}

static void test_names(void) {
    Model model;
    Noise n;
    Metrics *m;
    Error e = {0};
    size_t bytes;
    char layers[200];
    noise_make(&n, &model, 0);
    learn(&n.ranks), learn(&n.calibration.ln);
    const StepMetrics s = {.step = 1,
                           .tokens = 2,
                           .examples = 3,
                           .batch = 4,
                           .loss = 5.5,
                           .lr = 6.5,
                           .grad_norm = 7.5,
                           .tok_per_s = 8.5,
                           .mfu = 9.5,
                           .nll = 4.5,
                           .smoothed = true,
                           .mode = GNS_EXACT,
                           .clipped = true,
                           .has_target = true,
                           .target = {11.5, 12.5, INFINITY, 13.5, 14.5},
                           .ranks_measured = true};
    const HellaSwagScore score = {.questions = 8, .correct = 3, .correct_norm = 5};
    CHECK_OK(metrics_open(&m, IN_PATH, ".", &(LockHolder){0}, &e), &e);
    CHECK_OK(metrics_begin(m, 0, 0, &e), &e);
    CHECK_OK(metrics_step(m, &s, &n, &e), &e);
    CHECK_OK(metrics_val(m, 1, 2, 10.5, &e), &e);
    CHECK_OK(metrics_hellaswag(m, 1, 2, &score, &e), &e);
    CHECK_OK(metrics_close(m, &e), &e);
    CHECK_OK(file_read("metrics.jsonl", 1 << 16, &text, &bytes, &e), &e);
    static const char *const names[] = {"step",      "tokens",           "examples",  "batch",    "loss",
                                        "lr",        "grad_norm",        "tok_per_s", "mfu",      "val_loss",
                                        "hellaswag", "hellaswag_norm",   "gns_ratio", "loss_nll", "ramp_target",
                                        "ramp_aim",  "ramp_target_lower", "ramp_extra_tokens", "ramp_extra_seconds"};
    static const double want[] = {1,    2,       3,       4,    5.5, 6.5,  7.5,  8.5,  9.5,
                                  10.5, 3.0 / 8, 5.0 / 8, 1.75, 4.5, 11.5, 12.5, 1e308, 13.5, 14.5};
    CHECK(strstr(text, "\"clipped\": true"), "%s", text);
    for (int i = 0; i < 19; i++) check_number(names[i], want[i]);
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

// Sets `text` to the metrics.jsonl of a run of one step.
static void log_step(const StepMetrics *s, const Noise *noise) {
    Metrics *m;
    Error e = {0};
    size_t bytes;
    CHECK_OK(metrics_open(&m, IN_PATH, ".", &(LockHolder){0}, &e), &e);
    CHECK_OK(metrics_begin(m, 0, 0, &e), &e);
    CHECK_OK(metrics_step(m, s, noise, &e), &e);
    CHECK_OK(metrics_close(m, &e), &e);
    CHECK_OK(file_read("metrics.jsonl", 1 << 16, &text, &bytes, &e), &e);
}

// G2 far below 0: no finite scale explains that. The bound is then known, other than the scale itself.
static void test_infinite_bound(void) {
    Noise n;
    Model model;
    noise_make(&n, &model, 0);
    gns_init(&n.ln, 1e4);
    for (int i = 0; i < 50; i++) gns_update(&n.ln, 8, 10 + 0.01 * (i % 2), 0.5, 100);
    CHECK(gns_estimate(&n.ln).lower == INFINITY, "a bound of %g", gns_estimate(&n.ln).lower);
    log_step(&(StepMetrics){.step = 1, .tokens = 2, .mfu = NAN, .mode = GNS_LN}, &n);
    check_number("gns_ln_lower", 1e308);
    CHECK(strstr(text, "\"clipped\": false") && !strstr(text, "ramp_"), "%s", text);
    CHECK(strstr(text, "\"gns_ln\": null") && strstr(text, "\"mfu\": null"), "unknown is not null: %s", text);
    CHECK(!strstr(text, "loss_nll"), "a second loss: %s", text);
    memory_free(text);
    noise_destroy(&n);
    model_destroy(&model);
}

// The averages do not learn from a skipped step: its line has no sampled numbers.
static void test_skipped_step(void) {
    Noise n;
    Model model;
    noise_make(&n, &model, 0);
    for (int skipped = 0; skipped < 2; skipped++) {
        log_step(&(StepMetrics){.step = 1, .skipped = skipped, .mode = GNS_EXACT}, &n);
        static const char *const sampled[] = {"gns_total", "gns_total_lower", "gns_ratio", "gns_type_mlp", "gns_layer"};
        for (int i = 0; i < 5; i++) {
            char key[64];
            snprintf(key, sizeof key, "\"%s\": ", sampled[i]);
            CHECK((strstr(text, key) != NULL) != skipped, "skipped %d: %s", skipped, text);
        }
        CHECK((strstr(text, "\"skipped\": true") != NULL) == skipped, "skipped %d: %s", skipped, text);
        check_number("gns_ln", gns_estimate(&n.ln).scale);
        memory_free(text);
    }
    noise_destroy(&n);
    model_destroy(&model);
}

// What a ramp follows is in the log.
static void test_followed_total(void) {
    Noise n;
    Model model;
    noise_make(&n, &model, 0);
    gns_init(&n.total, 1e3);
    gns_init(&n.calibration.total, 5e3);
    for (int i = 0; i < 50; i++) {
        gns_update(&n.total, 8, 10 + i % 3, 4 + i % 2, 100);
        gns_update(&n.calibration.total, 8, 10 + i % 3, 4 + i % 2, 100);
    }
    for (int followed = 0; followed < 2; followed++) {
        n.follows_total = followed;
        log_step(&(StepMetrics){.step = 1, .mode = GNS_EXACT}, &n);
        check_estimate("gns_total", followed ? &n.total : &n.calibration.total);
        check_number("gns_ratio", 1.75);
        memory_free(text);
    }
    noise_destroy(&n);
    model_destroy(&model);
}

// gns_ratio is what a ramp multiplies by: --gns-ratio at every step, or the measured one at the steps that measure.
static void test_ratio(void) {
    for (int fixed = 0; fixed < 2; fixed++) {
        Noise n;
        Model model;
        noise_make(&n, &model, fixed ? 3 : 0);
        for (GnsMode mode = GNS_OFF; mode <= GNS_EXACT; mode++) {
            log_step(&(StepMetrics){.step = 1, .mode = mode}, &n);
            if (mode == GNS_EXACT || (fixed && mode == GNS_LN)) check_number("gns_ratio", fixed ? 3 : 1.75);
            else CHECK(!strstr(text, "gns_ratio"), "mode %d: %s", mode, text);
            memory_free(text);
        }
        noise_destroy(&n);
        model_destroy(&model);
    }
}

// The lines after the checkpoint go: by its bytes, which part the lines of its step, or by step where no line ends there.
static void test_resumed(void) {
    static const char one[] = "{\"step\": 1, \"loss\": 2}\n", two[] = "{\"step\": 2, \"loss\": 2}\n",
                      val[] = "{\"step\": 2, \"val_loss\": 2}\n", three[] = "{\"step\": 3, \"loss\": 2}\n";
    const int64_t saved = sizeof one + sizeof two - 2;
    const struct {
        int64_t bytes;
        const char *kept[3];
    } cases[] = {
        {saved, {one, two, ""}}, {saved - 3, {one, two, val}}, {saved + 999, {one, two, val}}, {0, {"", "", ""}}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        Metrics *m;
        Error e;
        char want[200];
        FILE *f = fopen("metrics.jsonl", "w");
        fprintf(f, "%s%s%s%s", one, two, val, three);
        fclose(f);
        CHECK_OK(metrics_open(&m, IN_PATH, ".", &(LockHolder){0}, &e), &e);
        CHECK_OK(metrics_begin(m, 2, cases[i].bytes, &e), &e);
        CHECK_OK(metrics_close(m, &e), &e);
        size_t bytes;
        CHECK_OK(file_read("metrics.jsonl", 1000, &text, &bytes, &e), &e);
        snprintf(want, sizeof want, "%s%s%s", cases[i].kept[0], cases[i].kept[1], cases[i].kept[2]);
        CHECK(strcmp(text, want) == 0, "%lld bytes: %s", (long long)cases[i].bytes, text);
        memory_free(text);
    }
}

int main(void) {
    const char *tmp = getenv("TMPDIR");
    char scratch[PATH_MAX];
    snprintf(scratch, sizeof scratch, "%s/gns_metrics_XXXXXX", tmp ? tmp : "/tmp");
    if (!mkdtemp(scratch) || chdir(scratch) != 0) return ERR_INTERNAL;
    RUN(test_names);
    RUN(test_infinite_bound);
    RUN(test_skipped_step);
    RUN(test_followed_total);
    RUN(test_ratio);
    RUN(test_resumed);
    if (chdir("/") == 0) remove_tree(scratch);
    return test_summary();
}
