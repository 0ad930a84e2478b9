// The default of --gns: exact where every rank's device measures it within the weight gradients, else ln. A run keeps
// its mode. The test gives the CPU engine a device that does or does not.
#include "model/engine.h"
#include "../trainer.h"

#include <cjson/cJSON.h>

static bool fuses; // under mpirun by trainer_word

static void fake_device(const EngineConfig *config, bool measure, EngineDevice *device) {
    cpu_engine.device(config, measure, device);
    device->exact_is_fused = fuses;
}

// ---- Files ----------------------------------------------------------------------------------------------------------

// "gns" and the resolved interval among the options of a JSON file: "exact 1".
static const char *mode_in(const char *path) {
    static char text[4][40];
    static int next;
    char *out = text[next++ % 4];
    size_t bytes;
    char *file = read_text(path, &bytes);
    cJSON *json = cJSON_Parse(file);
    const cJSON *options = cJSON_GetObjectItemCaseSensitive(json, "options");
    const char *mode = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(options, "gns"));
    const cJSON *resolved = cJSON_GetObjectItemCaseSensitive(options, "resolved");
    double interval = cJSON_GetNumberValue(cJSON_GetObjectItemCaseSensitive(resolved, "gns_exact_interval"));
    snprintf(out, sizeof text[0], "%s %g", mode ? mode : "(none)", interval);
    cJSON_Delete(json);
    memory_free(file);
    return out;
}

static long lines_with(const char *path, const char *word) {
    size_t bytes;
    long lines = 0;
    char *text = read_text(path, &bytes);
    for (char *at = text; at && (at = strstr(at, word)); at += strlen(word)) lines++;
    memory_free(text);
    return lines;
}

// Checks run.json, the newest checkpoint, and how many of the run's steps measured every tensor.
static void check_mode(const char *run, const char *mode, long exact_steps) {
    const char *now = mode_in(path_of("%s/run.json", run));
    const char *saved = mode_in(path_of("%s/step_%08ld/training/state.json", run, newest_step(run)));
    CHECK(strcmp(now, mode) == 0 && strcmp(saved, mode) == 0, "%s: run.json %s, state.json %s, want %s", run, now,
          saved, mode);
    long steps = lines_with(path_of("%s/metrics.jsonl", run), "\"gns_total\": ");
    CHECK(steps == exact_steps, "%s: %ld exact steps, want %ld", run, steps, exact_steps);
}

#define RUN_OF                                                                                                         \
    "train_gpt2 --train train.bin --vocab-size 64 --model d1 --layers 1 --heads 1 --channels 16 "                      \
    "--seq-len 8 --threads 1 --micro-batch 4 "
#define RAMP "--ramp gns --batch-min 2 --batch-max 16 --train-tokens 320 --ramp-step-rows 1e9 "

// ---- Tests ----------------------------------------------------------------------------------------------------------

static void run_on(bool device_fuses, const char *options, int code) {
    fuses = device_fuses;
    int got = trainer_run(RUN_OF "%s", options);
    CHECK(got == code, "%s: exit code %d, want %d: %s", options, got, code, log_tail());
}

static void test_default(void) {
    run_on(true, "--steps 3 --out fused", 0);
    check_mode("fused", "exact 1", 3);
    run_on(false, "--steps 3 --out plain", 0);
    check_mode("plain", "ln 0", 0);
    run_on(true, "--steps 3 --gns-exact-every 2 --out sampled", 0);
    check_mode("sampled", "exact 2", 2);
    run_on(true, RAMP "--gns-ratio 2 --out ratio", 0);
    check_mode("ratio", "exact 1", newest_step("ratio"));
    run_on(true, RAMP "--out ramp", 0);
    check_mode("ramp", "exact 1", newest_step("ramp"));
    run_on(false, RAMP "--out ramp_ln", 0);
    check_mode("ramp_ln", "ln 0", (newest_step("ramp_ln") + 1) / 2); // each step is longer than half of a half-life
}

static void test_given(void) {
    run_on(true, "--steps 3 --gns ln --out ln", 0);
    check_mode("ln", "ln 0", 0);
    run_on(true, "--steps 3 --gns off --out off", 0);
    check_mode("off", "off 0", 0);
    run_on(false, "--steps 3 --gns exact --out exact", 0);
    check_mode("exact", "exact 1", 3);
}

// On another device as well; and with the same bits as without the break.
static void test_kept_on_resume(void) {
    run_on(true, "--steps 6 --checkpoint-every 3 --keep 0 --out whole", 0);
    for (int now = 0; now < 2; now++) {
        remove_tree("part");
        copy_tree("whole/step_00000003", "part/step_00000003");
        copy_file("whole/metrics.jsonl", "part/metrics.jsonl");
        run_on(now, "--steps 6 --out part", 0);
        CHECK(log_mentions("resuming from part/step_00000003") && !log_mentions("--gns"), "%s", log_tail());
        check_mode("part", "exact 1", 6);
        check_same_end("whole", "part", now ? "the same device" : "another device");
    }
    run_on(true, "--steps 5 --out plain", 0); // begun on a device without
    check_mode("plain", "ln 0", 0);
    run_on(true, "--steps 5 --out off", 0);
    check_mode("off", "off 0", 0);
    run_on(true, "--steps 8 --gns-half-life 500 --out off", ERR_USAGE);
    CHECK(log_mentions("--gns-half-life has no effect without --gns ln or exact"), "%s", log_tail());
    run_on(true, "--steps 8 --gns ln --out part", 0);
    CHECK(log_mentions("--gns \"exact\" is now \"ln\""), "%s", log_tail());
    check_mode("part", "ln 0", 6);
    run_on(false, "--steps 3 --out whole --fresh", 0);
    check_mode("whole", "ln 0", 0);
}

static void test_plan(void) {
    run_on(true, "--steps 3 --dry-run", 0);
    CHECK(log_mentions("  exact norms "), "%s", log_tail());
    run_on(false, "--steps 3 --dry-run", 0);
    CHECK(!log_mentions("  exact norms "), "%s", log_tail());
}

static void test_ranks(void) {
#ifndef GNS_MPI
    SKIP("a build without MPI");
#endif
    if (system("command -v mpirun > /dev/null 2>&1") != 0) SKIP("no mpirun here");
    trainer_two_ranks("fuses", "fuses");
    CHECK_RUN(trainer_run(RUN_OF "--steps 2 --out both"), 0);
    check_mode("both", "exact 1", 2);
    trainer_two_ranks("fuses", "");
    CHECK_RUN(trainer_run(RUN_OF "--steps 2 --out one"), 0);
    check_mode("one", "ln 0", 0);
    trainer.ranks = 1;
}

int main(int argc, char **argv) {
    trainer.engine = cpu_engine;
    trainer.engine.device = fake_device;
    if (argc > 1) { // one of the ranks
        fuses = strcmp(trainer_word(), "fuses") == 0;
        return trainer_rank(argc, argv);
    }
    trainer_setup();
    RUN(test_default);
    RUN(test_given);
    RUN(test_kept_on_resume);
    RUN(test_plan);
    RUN(test_ranks);
    return trainer_end();
}
