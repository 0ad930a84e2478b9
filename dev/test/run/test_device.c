// Two settings depend on the device and survive a resume: the default of --gns (exact if every rank's device fuses
// exact norms into the weight gradients, else ln), and the algorithms of --tune. The tests give the CPU engine a device
// name and a tuning. GPU tests cover the matrix products.
#include "model/engine.h"
#include "../trainer.h"

#include <cjson/cJSON.h>

// The device's name; NULL: the CPU, without a tuning. Under mpirun each rank has its own name. A device whose name
// begins with "Fused" measures exact norms for free.
static const char *machine;
static char tuning[TUNING_BYTES];
static bool gpu; // the device is a GPU

static void fake_device(const EngineConfig *config, bool measure, EngineDevice *device) {
    cpu_engine.device(config, measure, device);
    device->exact_is_fused = machine && strncmp(machine, "Fused", 5) == 0;
    if (!gpu) return;
    device->is_cpu = false, device->value_bytes = 2;
    snprintf(device->name, sizeof device->name, "%s", machine);
}

static int built_for_fp32(Dtype dtype, Error *e) {
    return dtype == DTYPE_FP32 ? 0 : FAIL(e, ERR_USAGE, NULL, "this program was built for fp32");
}

static int fake_tune(Engine *engine, Error *e) {
    if (!*tuning) {
        snprintf(tuning, sizeof tuning, "%s: 8,8,8,0000,0,0,16=1f.0.%d", machine, (int)getpid());
        printf("timed %s\n", tuning);
    }
    return 0;
}

static const char *fake_tuning(const Engine *engine) { return (void)engine, tuning; }

static int fake_set_tuning(Engine *engine, const char *text, Error *e) {
    bool fits = !*text || (strncmp(text, machine, strlen(machine)) == 0 && text[strlen(machine)] == ':');
    snprintf(tuning, sizeof tuning, "%s", fits ? text : "");
    printf("%s of %s took [%s]\n", fits ? "engine" : "wrong engine", machine, tuning);
    return fits ? 0 : FAIL(e, ERR_INPUT, NULL, "tuned for another than %s", machine);
}

// ---- Files ----------------------------------------------------------------------------------------------------------

// Returns the value of a field ("options.gns") of a JSON file.
static const char *value_in(const char *path, const char *field) {
    size_t bytes;
    char *file = read_text(path, &bytes), words[80];
    cJSON *json = cJSON_Parse(file), *at = json;
    snprintf(words, sizeof words, "%s", field);
    for (char *name = strtok(words, "."); name; name = strtok(NULL, ".")) at = cJSON_GetObjectItem(at, name);
    char *text = cJSON_PrintUnformatted(at);
    const char *value = path_of("%s", text);
    cJSON_free(text);
    cJSON_Delete(json);
    memory_free(file);
    return value;
}

// Returns a field's value in run.json; checks that the newest checkpoint has the same value.
static const char *recorded(const char *run, const char *field) {
    const char *now = value_in(path_of("%s/run.json", run), field);
    const char *saved = value_in(path_of("%s/step_%08ld/training/state.json", run, newest_step(run)), field);
    CHECK(strcmp(now, saved) == 0, "%s: run.json %s, state.json %s", run, now, saved);
    return now;
}

#define HERE                                                                                                           \
    "train_gpt2 --train train.bin --vocab-size 64 --model d1 --layers 1 --heads 1 --channels 16 "                      \
    "--seq-len 8 --threads 1 --micro-batch 4 "

// ---- The mode of --gns ----------------------------------------------------------------------------------------------

// Checks the recorded mode and the number of steps that measured every tensor.
static void check_mode(const char *run, const char *mode, const char *interval, long exact_steps) {
    size_t bytes;
    char *log = read_text(path_of("%s/metrics.jsonl", run), &bytes);
    for (char *at = log; at && (at = strstr(at, "\"gns_total\": ")); at++) exact_steps--;
    memory_free(log);
    CHECK(exact_steps == 0, "%s: %ld exact steps are missing", run, exact_steps);
    const char *got = recorded(run, "options.gns"), *every = recorded(run, "options.resolved.gns_exact_interval");
    CHECK(strcmp(got, mode) == 0 && strcmp(every, interval) == 0, "%s: %s every %s", run, got, every);
}

static void test_mode(void) {
#define RAMP "--ramp gns --batch-min 2 --batch-max 16 --train-tokens 320 --ramp-step-rows 1e9 "
    static const struct {
        const char *machine, *run, *options, *mode, *interval;
        int exact_steps; // -1: all steps
    } cases[] = {{"Fused", "fused", "--steps 3", "\"exact\"", "1", 3},
                 {"Fake", "plain", "--steps 3", "\"ln\"", "0", 0},
                 {"Fused", "sampled", "--steps 3 --gns-exact-every 2", "\"exact\"", "2", 2},
                 {"Fused", "ramp", RAMP, "\"exact\"", "1", -1},
                 {"Fused", "ratio", RAMP "--gns-ratio 2", "\"exact\"", "1", -1},
                 {"Fused", "ln", "--steps 3 --gns ln", "\"ln\"", "0", 0},
                 {"Fused", "off", "--steps 3 --gns off", "\"off\"", "0", 0},
                 {"Fake", "exact", "--steps 3 --gns exact", "\"exact\"", "1", 3},
                 // A resume keeps the run's mode, on any device.
                 {"Fake", "fused", "--steps 5", "\"exact\"", "1", 5},
                 {"Fused", "plain", "--steps 5", "\"ln\"", "0", 0},
                 {"Fused", "off", "--steps 5", "\"off\"", "0", 0},
                 {"Fused", "fused", "--steps 8 --gns ln", "\"ln\"", "0", 5}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        machine = cases[i].machine;
        CHECK_RUN(trainer_run(HERE "%s --out %s", cases[i].options, cases[i].run), 0);
        check_mode(cases[i].run, cases[i].mode, cases[i].interval,
                   cases[i].exact_steps < 0 ? newest_step(cases[i].run) : cases[i].exact_steps);
    }
    CHECK_RUN(0, 0, "--gns \"exact\" is now \"ln\"");
    CHECK_RUN(trainer_run(HERE "--steps 8 --gns-half-life 500 --out off"), ERR_USAGE,
              "--gns-half-life has no effect without --gns ln or exact");
    CHECK_RUN(trainer_run(HERE "--steps 3 --dry-run"), 0, "  exact norms ");
    machine = NULL;
    CHECK_RUN(trainer_run(HERE "--steps 3 --dry-run"), 0, "!  exact norms ");
}

// --dry-run --dtype fp8: the device reports whether it is a Hopper, even if the table lacks its name.
static void test_fp8(void) {
#define PLAN "train_gpt2 --dry-run --dtype fp8 --model d1 --channels 64 --vocab-size 64 --seq-len 8 "
    gpu = true, machine = "Fused H20";
    CHECK_RUN(trainer_run(PLAN), 0, "Fused H20");
    machine = "Fake 1";
    CHECK_RUN(trainer_run(PLAN), ERR_USAGE, "--dtype fp8 needs a Hopper GPU (H100, H200), not Fake 1");
    CHECK_RUN(trainer_run(PLAN "--device H100"), 0, "H100");
    trainer.engine.check_dtype = built_for_fp32;
    CHECK_RUN(trainer_run(PLAN "--device H100"), ERR_USAGE, "built for fp32");
    trainer.engine.check_dtype = cpu_engine.check_dtype;
    gpu = false, machine = NULL;
}

// ---- --tune ---------------------------------------------------------------------------------------------------------

// Resumed parts use the first part's tuning, with or without --tune. On another machine the run resumes with a note,
// and tunes again only with --tune.
static void test_tuning(void) {
    machine = "Fake 1";
    CHECK_RUN(trainer_run(HERE "--steps 2 --out untuned"), 0, "!timed", "!tuned ");
    CHECK(strcmp(recorded("untuned", "tuning"), "\"\"") == 0, "%s", recorded("untuned", "tuning"));
    CHECK_RUN(trainer_run(HERE "--steps 2 --out tuned --tune"), 0, "timed Fake 1: ");
    const char *first = recorded("tuned", "tuning");
    for (int steps = 4; steps <= 6; steps += 2) {
        CHECK_RUN(trainer_run(HERE "--steps %d --out tuned%s", steps, steps == 6 ? " --tune" : ""), 0, "!timed",
                  path_of("engine of Fake 1 took [%.*s]", (int)strlen(first) - 2, first + 1),
                  "!note:", "tuned   1 matrix product");
        CHECK(strcmp(recorded("tuned", "tuning"), first) == 0, "%s, want %s", recorded("tuned", "tuning"), first);
    }
    machine = "Fake 12"; // "Fake 1" is a prefix
    CHECK_RUN(trainer_run(HERE "--steps 8 --out tuned --tune"), 0,
              "note: tuned/step_00000006: tuned for another than Fake 12", "timed Fake 12: ");
    trainer.engine = cpu_engine; // an engine without tuning resumes a GPU's run
    CHECK_RUN(trainer_run(HERE "--steps 10 --out tuned"), 0, "tuned for Fake 12, and this is the CPU");
    CHECK(strcmp(recorded("tuned", "tuning"), "\"\"") == 0, "%s", recorded("tuned", "tuning"));
    CHECK_RUN(trainer_run(HERE "--steps 2 --out cpu --tune"), ERR_USAGE, "--tune is for GPUs");
    CHECK(!directory_exists("cpu"), "a refused run has a directory");
}

static void two_ranks(const char *machine_0, const char *machine_1) {
    setenv("GNS_TEST_MACHINE_0", machine_0, 1);
    setenv("GNS_TEST_MACHINE_1", machine_1, 1);
    trainer.ranks = 2;
}

static void test_ranks(void) {
#ifndef GNS_MPI
    SKIP("a build without MPI");
#endif
    if (system("command -v mpirun > /dev/null 2>&1") != 0) SKIP("no mpirun here");
    two_ranks("Fused 1", "Fused 1");
    CHECK_RUN(trainer_run(HERE "--steps 2 --out same --tune"), 0);
    check_mode("same", "\"exact\"", "1", 2);
    const char *text = recorded("same", "tuning");
    CHECK_RUN(0, 0, path_of("engine of Fused 1 took [%.*s]", (int)strlen(text) - 2, text + 1)); // rank 1 logs it
    CHECK(strncmp(text, "\"Fused 1: ", 10) == 0, "%s", text);
    two_ranks("Fused 1", "Fake 2"); // the tuning does not fit rank 1: no rank uses it
    CHECK_RUN(trainer_run(HERE "--steps 2 --out mixed --tune"), 0, "note: the ranks have different GPUs",
              "engine of Fused 1 took []");
    check_mode("mixed", "\"ln\"", "0", 0);
    CHECK(strcmp(recorded("mixed", "tuning"), "\"\"") == 0, "%s", recorded("mixed", "tuning"));
    trainer.ranks = 1;
}

int main(int argc, char **argv) {
    trainer.engine = cpu_engine;
    trainer.engine.device = fake_device;
    trainer.engine.tune = fake_tune;
    trainer.engine.tuning = fake_tuning;
    trainer.engine.set_tuning = fake_set_tuning;
    if (argc > 1) { // a rank
        machine = getenv(path_of("GNS_TEST_MACHINE_%s", getenv("OMPI_COMM_WORLD_RANK")));
        return trainer_rank(argc, argv);
    }
    trainer_setup();
    RUN(test_mode, test_fp8, test_tuning, test_ranks);
    return trainer_end();
}
