// metrics.jsonl has every number under its own name; numbers may be unknown or infinite; steps may be skipped.
#include "base/files.h"
#include "run/metrics.h"
#include "gns/noise.h"
#include "../scratch.h"

#include <sys/stat.h>

static char text[1 << 16]; // the text of metrics.jsonl
static Error e;            // set by the last call that failed
static Noise noise;
static Model model;

static void check_number(const char *name, double want) {
    const char *key = path_of("\"%s\": ", name), *at = strstr(text, key);
    CHECK(at && strtod(at + strlen(key), NULL) == want, "%s is %.10s, want %.17g", name, at ? at + strlen(key) : "?",
          want);
}

static void check_estimate(const char *name, const GnsTracker *t) {
    static const char *const ends[] = {"", "_se", "_lower", "_g2", "_s"};
    GnsEstimate g = gns_estimate(t);
    const double want[] = {g.scale, g.scale_se, g.lower, g.g2, g.s};
    CHECK(isfinite(g.scale), "%s", name);
    for (int i = 0; i < 5; i++) check_number(path_of("%s%s", name, ends[i]), want[i]);
}

// Gives each tracker a different scale.
static int trackers;
static void learn(GnsTracker *t) {
    trackers++;
    for (int i = 0; i < 50; i++) gns_update(t, 8, 10 + trackers + i % 3, 4 + i % 2, 100, 1e4);
}

static void make_noise(double fixed_ratio) {
    noise_destroy(&noise);
    trackers = 0;
    CHECK_OK(noise_create(&noise, &model, 1e4, fixed_ratio, 0, &e), &e);
    learn(&noise.ln), learn(&noise.total), learn(&noise.calibration.total);
    for (int i = 0; i < GROUP_COUNT; i++) learn(&noise.type[i]);
    for (int i = 0; i < 3; i++) learn(&noise.layer[i]);
    noise.calibration.ratio.value = 1.75;
}

static void read_log(void) {
    FILE *f = fopen("metrics.jsonl", "r");
    CHECK(f != NULL, "no metrics.jsonl");
    text[fread(text, 1, sizeof text - 1, f)] = 0;
    fclose(f);
}

// Sets `text` to the metrics.jsonl of a run of one step.
static void log_step(const StepMetrics *s) {
    Metrics *m;
    CHECK_OK(metrics_open(&m, IN_PATH, ".", &(bool){0}, &e), &e);
    CHECK_OK(metrics_begin(m, 0, 0, false, &e), &e);
    CHECK_OK(metrics_step(m, s, &noise, &e), &e);
    CHECK_OK(metrics_test(m, 1, 2, "val_loss", 10.5, NAN, &e), &e);
    CHECK_OK(metrics_test(m, 1, 2, "hellaswag", 3.0 / 8, 5.0 / 8, &e), &e);
    CHECK_OK(metrics_close(m, &e), &e);
    read_log();
}

static void test_names(void) {
    static const struct {
        const char *name;
        double want;
    } numbers[] = {{"step", 1},
                   {"tokens", 2},
                   {"examples", 3},
                   {"batch", 4},
                   {"loss", 5.5},
                   {"loss_nll", 4.5},
                   {"lr", 6.5},
                   {"grad_norm", 7.5},
                   {"tok_per_s", 8.5},
                   {"mfu", 9.5},
                   {"val_loss", 10.5},
                   {"hellaswag", 3.0 / 8},
                   {"hellaswag_norm", 5.0 / 8},
                   {"gns_ratio", 1.75},
                   {"ramp_target", 11.5},
                   {"ramp_aim", 12.5},
                   {"ramp_target_lower", 1e308},
                   {"ramp_extra_tokens", 13.5},
                   {"ramp_extra_seconds", 14.5}};
    make_noise(0);
    log_step(&(StepMetrics){.step = 1,
                            .tokens = 2,
                            .examples = 3,
                            .batch = 4,
                            .loss = 5.5,
                            .lr = 6.5,
                            .grad_norm = 7.5,
                            .tok_per_s = 8.5,
                            .mfu = 9.5,
                            .nll = 4.5,
                            .mode = GNS_EXACT,
                            .clipped = true,
                            .has_target = true,
                            .target = {11.5, 12.5, INFINITY, 13.5, 14.5}});
    CHECK(strstr(text, "\"clipped\": true"), "%s", text);
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++) check_number(numbers[i].name, numbers[i].want);
    check_estimate("gns_ln", &noise.ln);
    check_estimate("gns_total", &noise.calibration.total);
    for (int i = 0; i < GROUP_COUNT; i++)
        check_number(path_of("gns_type_%s", group_names[i]), gns_estimate(&noise.type[i]).scale);
    const char *layers = path_of("\"gns_layer\": [%.17g, %.17g, %.17g]", gns_estimate(&noise.layer[0]).scale,
                                 gns_estimate(&noise.layer[1]).scale, gns_estimate(&noise.layer[2]).scale);
    CHECK(strstr(text, layers), "%s", layers);
}

// Unknown numbers are null. If G2 is far below 0, no finite scale explains it: the bound is infinite.
static void test_unknown_and_infinite(void) {
    make_noise(0);
    noise.ln = (GnsTracker){0};
    for (int i = 0; i < 50; i++) gns_update(&noise.ln, 8, 10 + 0.01 * (i % 2), 0.5, 100, 1e4);
    CHECK(gns_estimate(&noise.ln).lower == INFINITY, "a bound of %g", gns_estimate(&noise.ln).lower);
    log_step(&(StepMetrics){.step = 1, .tokens = 2, .nll = NAN, .mfu = NAN, .mode = GNS_LN});
    check_number("gns_ln_lower", 1e308);
    CHECK(strstr(text, "\"clipped\": false") && !strstr(text, "ramp_") && !strstr(text, "loss_nll"), "%s", text);
    CHECK(strstr(text, "\"gns_ln\": null") && strstr(text, "\"mfu\": null"), "unknown is not null: %s", text);
}

// Lines of exact, unskipped steps have the sampled numbers, gns_ratio among them. If --gns-ratio is given, every line
// with gns_ln has the given gns_ratio. gns_total is noise.total if a ramp follows noise.total.
static void test_sampled_numbers(void) {
    static const char *const sampled[] = {"gns_total", "gns_total_lower", "gns_type_mlp", "gns_layer"};
    for (int bits = 0; bits < 24; bits++) {
        const bool skipped = bits & 1, fixed = bits & 2, followed = bits & 4;
        const GnsMode mode = (GnsMode)(bits / 8);
        const bool exact = mode == GNS_EXACT && !skipped, ratio = exact || (fixed && mode != GNS_OFF);
        make_noise(fixed ? 3 : 0);
        noise.follows_total = followed;
        log_step(&(StepMetrics){.step = 1, .skipped = skipped, .mode = mode});
        for (int i = 0; i < 4; i++)
            CHECK((strstr(text, path_of("\"%s\": ", sampled[i])) != NULL) == exact, "case %d: %s", bits, text);
        if (exact) check_estimate("gns_total", followed ? &noise.total : &noise.calibration.total);
        if (ratio) check_number("gns_ratio", fixed ? 3 : 1.75);
        else CHECK(!strstr(text, "gns_ratio"), "case %d: %s", bits, text);
        CHECK((strstr(text, "\"skipped\": true") != NULL) == skipped, "case %d: %s", bits, text);
        if (mode != GNS_OFF) check_number("gns_ln", gns_estimate(&noise.ln).scale);
    }
}

// A rollback moves lines to metrics.rolled_back.jsonl. Lines that cannot be written wait.
static void test_undone_lines_wait(void) {
    Metrics *m;
    char *moved = NULL;
    size_t bytes;
    FILE *f = fopen("metrics.jsonl", "w");
    fprintf(f, "{\"step\": 1}\n{\"step\": 2}\n{\"step\": 3}\n");
    fclose(f);
    CHECK(!unlink("metrics.rolled_back.jsonl") && !mkdir("metrics.rolled_back.jsonl", 0777), "a directory");
    CHECK_OK(metrics_open(&m, IN_PATH, ".", &(bool){0}, &e), &e);
    CHECK_OK(metrics_begin(m, 1, 12, true, &e), &e);
    CHECK_ERROR(metrics_flush(m, &e), &e, ERR_WRITE, "metrics.rolled_back.jsonl");
    CHECK(metrics_waiting(m) == strlen("{\"step\": 2}\n{\"step\": 3}\n"), "%zu bytes wait", metrics_waiting(m));
    CHECK_OK(metrics_begin(m, 1, 12, true, &e), &e); // another rollback
    read_log();
    CHECK(strcmp(text, "{\"step\": 1}\n") == 0, "kept: %s", text);
    CHECK(rmdir("metrics.rolled_back.jsonl") == 0, "the directory goes");
    CHECK_OK(metrics_test(m, 2, 2, "val_loss", 10.5, NAN, &e), &e);
    CHECK_OK(file_read(IN_PATH, "metrics.rolled_back.jsonl", 1 << 16, &moved, &bytes, &e), &e);
    CHECK(moved && strcmp(moved, "{\"step\": 2}\n{\"step\": 3}\n") == 0, "moved: %s", moved);
    CHECK_OK(metrics_sample(m, 2, 2, "", "a", &e), &e);
    CHECK_OK(metrics_begin(m, 0, 0, true, &e), &e); // to the checkpoint of step 0
    CHECK(system("[ ! -s samples.jsonl ]") == 0, "a sample of an undone step stays");
    CHECK_OK(metrics_close(m, &e), &e);
    memory_free(moved);
}

int main(void) {
    const ModelConfig config = {3, 1, 8, 16, 8};
    scratch_begin();
    CHECK_OK(model_create(&model, &config, &e), &e);
    RUN(test_names, test_unknown_and_infinite, test_sampled_numbers, test_undone_lines_wait);
    noise_destroy(&noise);
    model_destroy(&model);
    return scratch_end();
}
