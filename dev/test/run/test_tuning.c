// --tune: the tuning is saved, resumed on every rank, and reported where it does not fit the machine. The CPU engine
// gets three fake functions: a machine, and a tuning for that machine alone. GPU tests cover the matrix products. Also
// what an engine without an optional function refuses.
#include "model/engine.h"
#include "../trainer.h"

#include <cjson/cJSON.h>

// ---------------------------------------------------------------------------------------------------------------------
// The fake. Under mpirun its machine is called trainer_word.

static const char *machine; // NULL: the CPU engine itself
static char tuning[TUNING_BYTES];

static int fake_tune(Engine *engine, Error *e) {
    if (!machine) return cpu_engine.tune(engine, e);
    if (!*tuning) {
        snprintf(tuning, sizeof tuning, "%s: 8,8,8,0000,0,0,16=1f.0.%d", machine, (int)getpid());
        printf("timed %s\n", tuning);
    }
    return 0;
}

static const char *fake_tuning(const Engine *engine) { return machine ? tuning : cpu_engine.tuning(engine); }

static int fake_set_tuning(Engine *engine, const char *text, Error *e) {
    if (!machine) return cpu_engine.set_tuning(engine, text, e);
    bool fits = !*text || (strncmp(text, machine, strlen(machine)) == 0 && text[strlen(machine)] == ':');
    snprintf(tuning, sizeof tuning, "%s", fits ? text : "");
    printf("%s of %s took [%s]\n", fits ? "engine" : "wrong engine", machine, tuning);
    return fits ? 0 : FAIL(e, ERR_INPUT, NULL, "tuned for another than %s", machine);
}

// ---- Files ----------------------------------------------------------------------------------------------------------

// "tuning" of a JSON file, or "(none)".
static const char *recorded(const char *path) {
    static char text[4][TUNING_BYTES];
    static int next;
    char *out = text[next++ % 4];
    size_t bytes;
    char *file = read_text(path, &bytes);
    cJSON *json = cJSON_Parse(file);
    const char *value = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(json, "tuning"));
    snprintf(out, TUNING_BYTES, "%s", value ? value : "(none)");
    cJSON_Delete(json);
    memory_free(file);
    return out;
}

// The tuning in run.json and the newest checkpoint, which must agree.
static const char *recorded_by(const char *run) {
    const char *text = recorded(path_of("%s/run.json", run));
    const char *state = recorded(path_of("%s/step_%08ld/training/state.json", run, newest_step(run)));
    CHECK(strcmp(text, state) == 0, "run.json: '%s', state.json: '%s'", text, state);
    return text;
}

static bool begins(const char *text, const char *with) { return strncmp(text, with, strlen(with)) == 0; }

#define RUN_OF                                                                                                         \
    "train_gpt2 --train train.bin --vocab-size 64 --model d1 --layers 1 --heads 1 --channels 16 "                      \
    "--seq-len 8 --threads 1 --micro-batch 4 "

// ---- Tests ----------------------------------------------------------------------------------------------------------

static void test_not_asked_for(void) {
    machine = "Fake 1";
    CHECK_RUN(trainer_run(RUN_OF "--steps 2 --out plain"), 0, "!timed", "!tuned ");
    CHECK(strcmp(recorded_by("plain"), "") == 0, "'%s'", recorded_by("plain"));
}

// Later parts use the tuning of the first, with --tune or without.
static void test_kept_on_resume(void) {
    char first[TUNING_BYTES];
    machine = "Fake 1";
    CHECK_RUN(trainer_run(RUN_OF "--steps 2 --out kept --tune"), 0);
    snprintf(first, sizeof first, "%s", recorded_by("kept"));
    CHECK(log_mentions("timed Fake 1: ") && begins(first, "Fake 1: 8,8,8"), "'%s': %s", first, log_tail());
    for (int steps = 4; steps <= 6; steps += 2) {
        CHECK_RUN(trainer_run(RUN_OF "--steps %d --out kept%s", steps, steps == 6 ? " --tune" : ""), 0, "!timed",
                  path_of("engine of Fake 1 took [%s]", first));
        CHECK(strcmp(recorded_by("kept"), first) == 0, "'%s', want '%s'", recorded_by("kept"), first);
        CHECK(!log_mentions("note:") && log_mentions("tuned   1 matrix product"), "%s", log_tail());
    }
    CHECK_RUN(trainer_run(RUN_OF "--steps 2 --out kept --tune --fresh"), 0);
    CHECK(log_mentions("timed Fake 1: ") && strcmp(recorded_by("kept"), first) != 0, "%s", log_tail());
}

// On another machine the run resumes with a note, and tunes again only with --tune.
static void test_another_machine(void) {
    machine = "Fake 1";
    CHECK_RUN(trainer_run(RUN_OF "--steps 2 --out moved --tune"), 0);
    machine = "Fake 12"; // whose name begins like the other's
    CHECK_RUN(trainer_run(RUN_OF "--steps 4 --out moved --tune"), 0,
              "note: moved/step_00000002: tuned for another than Fake 12");
    CHECK(begins(recorded_by("moved"), "Fake 12: "), "'%s'", recorded_by("moved"));
    machine = "Fake 1";
    CHECK_RUN(trainer_run(RUN_OF "--steps 6 --out moved"), 0,
              "note: moved/step_00000004: tuned for another than Fake 1");
    CHECK(strcmp(recorded_by("moved"), "") == 0, "'%s'", recorded_by("moved"));
}

// The CPU engine has nothing to tune, and resumes a GPU's run.
static void test_cpu(void) {
    machine = NULL;
    CHECK_RUN(trainer_run(RUN_OF "--steps 2 --out cpu --tune"), ERR_USAGE);
    CHECK(log_mentions("--tune is for GPUs") && !directory_exists("cpu"), "%s", log_tail());
    machine = "Fake 1";
    CHECK_RUN(trainer_run(RUN_OF "--steps 2 --out cpu --tune"), 0);
    machine = NULL;
    CHECK_RUN(trainer_run(RUN_OF "--steps 4 --out cpu"), 0, "tuned for Fake 1, and this is the CPU");
    CHECK(strcmp(recorded_by("cpu"), "") == 0, "'%s'", recorded_by("cpu"));
}

static void test_ranks(void) {
#ifndef GNS_MPI
    SKIP("a build without MPI");
#endif
    if (system("command -v mpirun > /dev/null 2>&1") != 0) SKIP("no mpirun here");
    trainer_two_ranks("Fake 1", "Fake 1");
    CHECK_RUN(trainer_run(RUN_OF "--steps 2 --out ranks --tune"), 0);
    const char *text = recorded_by("ranks");
    CHECK(begins(text, "Fake 1: "), "'%s'", text);
    CHECK(log_mentions(path_of("engine of Fake 1 took [%s]", text)), "rank 1 took another: %s", log_tail());
    trainer_two_ranks("Fake 1", "Fake 2");
    CHECK_RUN(trainer_run(RUN_OF "--steps 2 --out mixed --tune"), 0, "note: the ranks have different GPUs",
              "engine of Fake 1 took []"); // rank 0 keeps nothing that rank 1 has not
    CHECK(strcmp(recorded_by("mixed"), "") == 0, "'%s'", recorded_by("mixed"));
    trainer.ranks = 1;
}

int main(int argc, char **argv) {
    trainer.engine = cpu_engine;
    trainer.engine.tune = fake_tune;
    trainer.engine.tuning = fake_tuning;
    trainer.engine.set_tuning = fake_set_tuning;
    if (argc > 1) { // one of the ranks
        machine = trainer_word();
        return trainer_rank(argc, argv);
    }
    trainer_setup();
    RUN(test_not_asked_for);
    RUN(test_kept_on_resume);
    RUN(test_another_machine);
    RUN(test_cpu);
    RUN(test_ranks);
    return trainer_end();
}
