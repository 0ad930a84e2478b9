// Resume: an interrupted and resumed run has the bits of an uninterrupted run; some options may change in between,
// others may not. GNS_LONG=1: resumes from every step, not from some.
#include "math/outliers.h"
#include "base/manifest.h"
#include "../trainer.h"

static Error e; // set by the last call that failed

// The command of a small run; tests append options.
#define HERE                                                                                                           \
    "train_gpt2 --threads 1 --heads 1 --model d1 --layers 1 --channels 16 --vocab-size 64 --seq-len 8 "                \
    "--train train.bin "

// Makes `part` a copy of `run` with a single checkpoint and all lines of metrics.jsonl.
static void make_part(const char *run, long step) {
    remove_tree("part");
    copy_tree(path_of("%s/step_%08ld", run, step), path_of("part/step_%08ld", step));
    copy_file(path_of("%s/metrics.jsonl", run), "part/metrics.jsonl");
}

// Checks that `command` resumes from a step of `run`, and ends with the same bits.
static void check_from(const char *run, long step, const char *command) {
    make_part(run, step);
    CHECK_RUN(trainer_run(path_of("%s --out part --checkpoint-every 0", command)), 0,
              path_of("resuming from part/step_%08ld", step));
    check_same_end(run, "part", path_of("%s, step %ld", run, step));
}

// Resumes from every step of a run with a growing batch.
static void test_from_every_step(void) {
    const char *command = trainer.thorough ? "--train-tokens 24000" : "--train-tokens 5000";
    CHECK_RUN(trainer_run("%s --out whole --checkpoint-every 1 --keep 0", command), 0);
    long steps = newest_step("whole");
    CHECK(steps > (trainer.thorough ? 200 : 60), "%ld steps", steps);
    for (long step = 1; step < steps; step += trainer.thorough ? 1 : 7) check_from("whole", step, command);
}

// A complete run does nothing; with a longer --train-tokens it resumes.
static void test_complete(void) {
    CHECK_RUN(trainer_run("--train-tokens 600 --out done"), 0);
    long step = newest_step("done");
    copy_file("done/metrics.jsonl", "before.jsonl");
    CHECK_RUN(trainer_run("--train-tokens 600 --out done"), 0, "this run is complete");
    CHECK(newest_step("done") == step && same_file("done/metrics.jsonl", "before.jsonl"), "the run changed");
    CHECK_RUN(trainer_run("--train-tokens 900 --out done"), 0, "--train-tokens 600 is now 900");
    CHECK(newest_step("done") > step, "the longer run did not resume");
    CHECK_RUN(trainer_run("--train-tokens 900 --warmup-tokens 901 --out done --fresh"), 0,
              "note: the warm-up is longer than the run", "done held an earlier run: moved to /", "/done.1");
    CHECK(newest_step("done.1") > step && newest_step("done") > step, "--fresh lost a run");
}

// Lines that a resume cuts from another log than the checkpoint's stay in metrics.rolled_back.jsonl, and a damaged
// run.json, or another program's, stays, too.
static void test_another_log(void) {
    const char *log = "alien/metrics.jsonl", *cut = "alien/metrics.rolled_back.jsonl";
    const char *text = "{\"step\": 9999}\nnotes", *warning = "warning: alien/metrics.jsonl is not as it was ";
    CHECK_RUN(trainer_run("--train-tokens 600 --out alien"), 0);
    CHECK_RUN(trainer_run("--train-tokens 900 --out alien"), 0, "!warning");
    CHECK(!file_exists(cut), "its own log was cut");
    CHECK_OK(file_replace(IN_PATH, log, text, strlen(text), &e), &e);
    CHECK_OK(directory_create(cut, &e), &e); // in its place
    CHECK_RUN(trainer_run("--train-tokens 1200 --out alien"), ERR_WRITE, "!are lost", "metrics.rolled_back.jsonl: ");
    CHECK(file_mentions(log, text) && rmdir(cut) == 0, "lines that have no other place are cut");
    CHECK_RUN(trainer_run("--train-tokens 900 --out alien"), 0, warning, "this run is complete");
    CHECK(file_mentions(cut, path_of("%s\n", text)) && !file_mentions(log, text), "lines are lost");
    CHECK(unlink(log) == 0 && unlink(cut) == 0 && truncate("alien/run.json", 900) == 0, "damage");
    CHECK_RUN(trainer_run("--train-tokens 1500 --out alien"), 0, warning, "alien/run.json: damaged, or not a run's");
    CHECK(!file_exists(cut) && file_exists("alien/run.json.damaged"), "no line was cut, and the text is kept");
    CHECK_OK(directory_create("others", &e), &e);
    CHECK_OK(file_replace(IN_PATH, "others/run.json", "{\"a\": 1}", 8, &e), &e);
    CHECK_RUN(trainer_run("--train-tokens 600 --out others"), 0, "warning: others/run.json: damaged, or not a run's");
    CHECK(file_mentions("others/run.json.damaged", "{\"a\": 1}"), "another program's file is lost");
}

static void without_blanks(char *text) {
    char *to = text;
    for (; text && *text; text++)
        if (*text != ' ') *to++ = *text;
    if (to) *to = 0;
}

// Also checks run.json's parts: the first part lists all given options, the second the changed ones.
static void test_what_may_change(void) {
    CHECK_RUN(trainer_run(HERE "--out own --steps 10 --lr 1e-3 --micro-batch 4 --batch-tokens 32"), 0,
              "note: no warm-up: ", "gradients clipped (--grad-clip 1) in ");
    CHECK_RUN(trainer_run(HERE "--out own --steps 20 --lr 2e-3 --micro-batch 2 --batch-tokens 64 --beta2 0.99 "
                               "--val val.bin --val-every 4"),
              0, "resuming from own/step_00000010: 10 steps, 320 tokens done", "--steps 10 is now 20",
              "--lr 0.001 is now 0.002", "the learning rate rises from 0.0002 to 0.00174 in one step", "of 15 steps\n",
              "--micro-batch 4 is now 2", "--beta2 0.95 is now 0.99", "--val \"\" is now \"val.bin\"", "!build: ");
    char kept[2][500] = {
        "\"options\": {\"train\": \"train.bin\", \"out\": \"own\", \"model\": \"d1\", \"layers\": 1, \"heads\": 1, "
        "\"channels\": 16, \"vocab_size\": 64, \"micro_batch\": 4, \"seq_len\": 8, \"batch_tokens\": 32, "
        "\"steps\": 10, \"lr\": 0.001, \"threads\": 1},",
        "\"options\": {\"val\": \"val.bin\", \"micro_batch\": 2, \"batch_tokens\": 64, \"steps\": 20, \"lr\": 0.002, "
        "\"beta2\": 0.99, \"val_every\": 4},"};
    size_t bytes;
    char *text = read_text("own/run.json", &bytes);
    without_blanks(text);
    for (int i = 0; i < 2; i++) {
        without_blanks(kept[i]);
        CHECK(text && strstr(text, kept[i]), "part %d: no %s in %.2000s", i + 1, kept[i], text);
    }
    memory_free(text);
}

// Without --batch-tokens the micro-batch is the batch, and may not change.
static void test_another_micro_batch(void) {
#define CONSTANT HERE "--lr-schedule constant --out mb "
    CHECK_RUN(trainer_run(CONSTANT "--micro-batch 4 --steps 10"), 0);
    CHECK_RUN(trainer_run(CONSTANT "--micro-batch 2 --steps 20"), ERR_USAGE, "--micro-batch was 4 and is 2",
              "add --batch-tokens 32 ");
    CHECK_RUN(trainer_run(CONSTANT "--micro-batch 2 --batch-tokens 32 --steps 20"), 0,
              "run     10 more steps of 4 rows");
}

// Replaces state.json and its hash in the manifest.
static void put_state(const char *checkpoint, const char *text) {
    Manifest manifest, changed = {.dir = open(checkpoint, O_RDONLY)};
    CHECK_OK(file_replace(IN_PATH, path_of("%s/training/state.json", checkpoint), text, strlen(text), &e), &e);
    CHECK_OK(manifest_read(&manifest, IN_PATH, checkpoint, &e), &e);
    for (int i = 0; i < manifest.count; i++) {
        const ManifestFile *file = &manifest.file[i];
        const FileDigest it = digest_of(text, strlen(text));
        bool state = strcmp(file->name, "training/state.json") == 0;
        CHECK_OK(manifest_add(&changed, file->name, state ? &it : file->piece, state ? 1 : file->pieces, &e), &e);
    }
    CHECK_OK(manifest_write(&changed, &e), &e); // without a run id, as older builds write it
    close(changed.dir);
    manifest_free(&manifest);
    manifest_free(&changed);
}

// --out ignores a trailing slash. If --out is a link, runs are moved aside in the directory of its target.
static void test_places(void) {
    CHECK_OK(directory_create("far/run", &e), &e);
    CHECK(symlink("far/run", "near") == 0, "a link");
    CHECK_RUN(trainer_run(HERE "--steps 3 --out near/"), 0);
    CHECK_RUN(trainer_run(HERE "--steps 4 --out near/ --fresh"), 0);
    long first = newest_step("far/run.1"), second = newest_step("far/run");
    CHECK(first == 3 && second == 4, "steps %ld and %ld", first, second);
#define TUNE "train_gpt2 --threads 1 --seq-len 8 --train train.bin --out tuned "
    CHECK_RUN(trainer_run(TUNE "--steps 2 --model near/step_00000004"), 0);
    CHECK_RUN(trainer_run(TUNE "--steps 4 --model near/step_00000004/"), 0, "resuming from tuned/step_00000002");
}

static void test_what_may_not_change(void) {
    static const struct {
        const char *options, *said;
    } cases[] = {
        {"--heads 1 --layers 2 --channels 16 --vocab-size 64 --seq-len 8 --train train.bin", "model.layers = 1 (--mo"},
        {"--heads 1 --layers 1 --channels 32 --vocab-size 64 --seq-len 8 --train train.bin", "model.channels = 16"},
        {"--heads 1 --layers 1 --channels 16 --vocab-size 65 --seq-len 8 --train train.bin", "model.vocab = 64 "},
        {"--heads 1 --layers 1 --channels 16 --vocab-size 64 --seq-len 16 --train train.bin", "(--model, --seq-len)"},
        {"--heads 2 --layers 1 --channels 16 --vocab-size 64 --seq-len 8 --train train.bin", "model.heads = 1 "},
        {"--heads 1 --layers 1 --channels 16 --vocab-size 64 --seq-len 8 --train train.bin --seed 6",
         "seed = \"1337\""},
        {"--heads 1 --layers 1 --channels 16 --vocab-size 64 --seq-len 8 --train same.bin", "\"train.bin\" (--train)"},
        {"--heads 1 --layers 1 --channels 16 --vocab-size 64 --seq-len 8 --train *e*.bin", "train_data of 1 shards"},
        {"--heads 1 --layers 1 --channels 16 --vocab-size 64 --seq-len 8 --train far/train.bin",
         "(--train: train.bin)"},
    };
    copy_file("own/metrics.jsonl", "before.jsonl");
    copy_file("train.bin", "same.bin");      // another name, the same text
    copy_file("other.bin", "far/train.bin"); // another text; name and length are the same
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        CHECK_RUN(trainer_run("train_gpt2 --threads 1 --model d1 --out own --steps 30 %s", cases[i].options),
                  i < 6 ? ERR_USAGE : ERR_INPUT, cases[i].said, i < 6 ? "give the run's own value" : "--model own --with");
    unlink("same.bin");
    CHECK(same_file("own/metrics.jsonl", "before.jsonl"), "a refused run changed metrics.jsonl");
}

// Renames fields of a checkpoint's state.json ("noise.ratio": a field of an object) to names that no build knows.
static void hide_fields(const char *checkpoint, const char *const *fields) {
    size_t bytes;
    char *text = read_text(path_of("%s/training/state.json", checkpoint), &bytes);
    for (; *fields; fields++) {
        char *at = text;
        for (const char *name = *fields; name; name = strchr(name, '.') ? strchr(name, '.') + 1 : NULL)
            at = at ? strstr(at, path_of("\"%.*s\":", (int)strcspn(name, "."), name)) : NULL;
        CHECK(at != NULL, "state.json has no %s", *fields);
        if (at) at[1] = '_';
    }
    put_state(checkpoint, text);
    memory_free(text);
}

static int run_part(void) {
    return trainer_run("--train-tokens %d --out part --checkpoint-every 0", trainer.thorough ? 24000 : 5000);
}

static int run_without(const char *const *fields) {
    make_part("whole", 10);
    hide_fields("part/step_00000010", fields);
    return run_part();
}

// Options marked of_run may not change. An option that the file lacks had its default. The resumed run has the same
// bits: dropout's masks depend on the examples' numbers.
static void test_options_of_a_run(void) {
    static const struct {
        const char *given, *other, *field, *said;
    } cases[] = {
        {"--dropout 0.2 --eps 1.0000000000000002e-08", "--dropout 0.1", "options.dropout", "this run has --dropout 0.2, the command has 0.1"},
        {"--label-smoothing 0.1", "", "options.label_smoothing",
         "this run has --label-smoothing 0.1, the command has 0"},
        {"--optimizer lamb", "--optimizer muon", "options.optimizer",
         "this run has --optimizer \"lamb\", the command has \"muon\""},
        {"--optimizer muon --momentum 0.9", "", "options.optimizer",
         "this run has --optimizer \"muon\", the command has \"adamw\""}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const char *given = cases[i].given;
        remove_tree("ofrun");
        CHECK_RUN(trainer_run(HERE "--steps 12 --out ofrun --checkpoint-every 5 --keep 0 %s", given), 0);
        make_part("ofrun", 5);
        CHECK_RUN(trainer_run(HERE "--steps 12 --out part %s", cases[i].other), ERR_USAGE, cases[i].said);
        check_from("ofrun", 5, path_of(HERE "--steps 12 %s", given));
        if (i == 0)
            CHECK(file_mentions("part/step_00000012/config.json",
                                "\"resid_pdrop\": 0.2,\n  \"embd_pdrop\": 0.2,\n  \"attn_pdrop\": 0.2,"),
                  "another config.json");
        if (i == 0)
            CHECK(file_mentions("part/step_00000012/training/state.json", "1.0000000000000002e-08"), "rounded options");
        hide_fields("ofrun/step_00000012", (const char *[]){cases[i].field, NULL});
        CHECK_RUN(trainer_run(HERE "--steps 13 --out ofrun %s", given), ERR_USAGE);
        CHECK_RUN(trainer_run(HERE "--steps 13 --out ofrun"), 0); // the defaults
    }
}

// ---- fp8 ------------------------------------------------------------------------------------------------------------

// Replaces the exponents of a checkpoint.
static void put_exponents(const char *checkpoint, const char *list) {
    char *text = read_text(path_of("%s/training/state.json", checkpoint), &(size_t){0});
    char *at = text ? strstr(text, "\"fp8_exponents\":\t[") : NULL, *begin = at ? strchr(at, '[') + 1 : NULL;
    CHECK(at != NULL, "no exponents");
    if (!at) return;
    const size_t room = strcspn(begin, "]");
    CHECK(strlen(list) <= room, "%zu bytes", room);
    memset(begin, ' ', room);
    memcpy(begin, list, strlen(list));
    put_state(checkpoint, text);
    memory_free(text);
}

// Writes the exponents of one checkpoint into another.
// At this high rate factors saturate in step 2, which is then computed again. A resumed run has the same bits, also from
// checkpoints before and after that step.
static void test_fp8(void) {
#define FP8 HERE "--micro-batch 4 --steps 12 --warmup-tokens 0 --lr 0.4 --grad-clip 0 "
    CHECK_RUN(trainer_run(FP8 "--dtype fp8 --fp8-head --out fp8 --checkpoint-every 1 --keep 0"), 0, "fp8 emulated in fp32",
              "step 2: fp8 overflows at exponent ", ": computed again with ", "!step 3: fp8", "  1 overflows");
    char *log = read_text("fp8/metrics.jsonl", &(size_t){0});
    int line = 0;
    for (char *at = log ? strtok(log, "\n") : NULL; at; at = strtok(NULL, "\n"), line++) {
        CHECK(!strstr(at, "\"skipped\": true"), "%s", at);
        CHECK((strstr(at, "\"overflows\": 1") != NULL) == (line >= 1), "%s", at);
    }
    CHECK(line == 12, "%d steps", line);
    memory_free(log);
    for (int step = 1; step <= 10; step += step < 3 ? 1 : 7) check_from("fp8", step, FP8 "--dtype fp8 --fp8-head");
    make_part("fp8", 1); // exponents that are set adapt in the warm-up, too
    CHECK_RUN(trainer_run(HERE "--micro-batch 4 --steps 2 --warmup-tokens 9999 --dtype fp8 --fp8-head --out part"), 0,
              "step 2: fp8 overflows at exponent ");
    make_part("fp8", 3);
    put_exponents("part/step_00000003", "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11");
    CHECK_RUN(trainer_run(FP8 "--dtype fp8 --fp8-head --out part"), ERR_INPUT,
              "state.json: field \"fp8_exponents[11]\" is missing");
    for (int k = -FP8_EXPONENT_MAX - 1; k <= FP8_EXPONENT_MAX + 1; k += 2 * FP8_EXPONENT_MAX + 2) {
        put_exponents("part/step_00000003", path_of("1,2,3,4,5,6,7,8,9,10,11,%d", k));
        CHECK_RUN(trainer_run(FP8 "--dtype fp8 --fp8-head --out part"), ERR_INPUT,
                  "state.json: field \"fp8_exponents[11]\" is not an exponent");
    }
    CHECK_RUN(trainer_run(FP8 "--dtype fp32 --out part"), 0, "--dtype \"fp8\" is now \"fp32\"", // ignores the exponents
              "!overflows");
    CHECK(!file_mentions("part/step_00000012/training/state.json", "fp8_exponents"), "exponents of fp32");
    make_part("fp8", 3);
    char *text = read_text("part/step_00000003/training/state.json", &(size_t){0});
    char *channels = text ? strstr(text, "\"fp8_channels\":\t[\"") : NULL;
    if (channels) strchr(channels, '[')[2] = 'q', put_state("part/step_00000003", text);
    memory_free(text);
    CHECK_RUN(trainer_run(FP8 "--dtype fp8 --fp8-head --out part"), ERR_INPUT,
              "state.json: field \"fp8_channels[0]\" is not a character per group");
    make_part("fp8", 3);
    put_exponents("part/step_00000003", "-63,-63,-63,-63,-63,-63,-63,-63,-63,-63,-63,-63,-63,-63,-63,-63,-63,-63,-63,-63,-63,-63,63,0");
    CHECK_RUN(trainer_run(FP8 "--dtype fp8 --fp8-head --out part --checkpoint-every 0"), 0,
              "step 4: fp8 overflows at exponent 63 of the head's wte: computed again with ");
    make_part("fp8", 3);
    hide_fields("part/step_00000003", (const char *[]){"fp8_channels", NULL}); // an older version's, also without the head's exponents
    put_exponents("part/step_00000003", "1,2,3,4,5,6,7,8,9,10,11,12");
    CHECK_RUN(trainer_run(FP8 "--dtype fp8 --fp8-head --out part"), 0);
}

static void read_step(const char *run, int step, double *loss, double *norm) {
    char *log = read_text(path_of("%s/metrics.jsonl", run), &(size_t){0});
    const char *line = log ? strstr(log, path_of("{\"step\": %d,", step)) : NULL;
    *loss = number_in(line, "loss"), *norm = number_in(line, "grad_norm");
    memory_free(log);
}

// A run in fp8 continues with its exponents and channels in fp8-dw, or the reverse: the first step has the same loss,
// but other gradients. If a run changes from fp32 to fp8, the first step of fp8 has the bits of fp32; the second
// differs.
static void test_dtype_changes(void) {
    double loss[2], norm[2];
    CHECK_RUN(trainer_run(FP8 "--dtype fp8-dw --fp8-head --out fp8-dw --checkpoint-every 3 --keep 0"), 0,
              "fp8-dw emulated in fp32");
    for (int i = 0; i < 2; i++) {
        const char *types[] = {i ? "fp8" : "fp8-dw", i ? "fp8-dw" : "fp8"};
        make_part(types[0], 3);
        CHECK_RUN(trainer_run(path_of(FP8 "--dtype %s --fp8-head --out part", types[1])), 0,
                  path_of("--dtype \"%s\" is now \"%s\"", types[0], types[1]));
        for (int k = 0; k < 2; k++) read_step(k ? "part" : types[0], 4, &loss[k], &norm[k]);
        CHECK(loss[0] == loss[1] && norm[0] != norm[1], "%s: loss %.9g and %.9g, norm %.9g and %.9g", types[1], loss[0],
              loss[1], norm[0], norm[1]);
    }
    CHECK_RUN(trainer_run(HERE "--micro-batch 4 --steps 6 --out fp32 --checkpoint-every 3 --keep 0"), 0);
    make_part("fp32", 3);
    CHECK_RUN(trainer_run(HERE "--micro-batch 4 --steps 6 --out part --dtype fp8"), 0);
    for (int step = 4; step <= 5; step++) {
        for (int i = 0; i < 2; i++) read_step(i ? "part" : "fp32", step, &loss[i], &norm[i]);
        CHECK((loss[0] == loss[1]) == (step == 4), "step %d: %.9g and %.9g", step, loss[0], loss[1]);
        CHECK(step != 4 || norm[0] == norm[1], "norm %.9g and %.9g", norm[0], norm[1]);
    }
}

// An option that the file lacks was unknown to its build and has its default. An error names any other missing field.
static void test_missing_fields(void) {
    static const char *const optional[] = {"build", "options.tune", "options.top_p", "options.document_mask", NULL};
    static const char *const needed[] = {"tokens", "ramp", "noise.ln", "tuning", "seed", "model", "train_data"};
    CHECK_RUN(run_without(optional), 0, "resuming from part/step_00000010", "!--tune", "!--top-p",
              "build: an unknown build then, gns.c ");
    check_same_end("whole", "part", "optional fields");
    for (size_t i = 0; i < sizeof needed / sizeof *needed; i++)
        CHECK_RUN(run_without((const char *[]){needed[i], NULL}), ERR_INPUT,
                  path_of("state.json: field \"%s", needed[i]), " is missing; it was written by gns.c ",
                  "or the program that wrote it");
}

// An older build's checkpoint has no trackers of sources. (test_sources.sh resumes with them.)
static void test_noise_of_sources(void) {
#define SOURCES                                                                                                        \
    "train_gpt2 --config mixed.conf --vocab-size 64 --model d1 --layers 1 --heads 1 --channels 16 --seq-len 8 "        \
    "--threads 1 --micro-batch 4 "
    CHECK(system("echo train = train.bin:0.8 other.bin:0.2 > mixed.conf") == 0, "a shell");
    CHECK_RUN(trainer_run(SOURCES "--steps 4 --out sources"), 0);
    make_part("sources", 4);
    hide_fields("part/step_00000004", (const char *[]){"noise.source", NULL});
    CHECK_RUN(trainer_run(SOURCES "--steps 6 --out part"), 0, "resuming from part/step_00000004");
}

// A ramp that follows the whole model's noise scale resumes with the same bits.
static void test_ramp_of_the_whole_model(void) {
#define TOTAL                                                                                                          \
    HERE "--micro-batch 4 --ramp gns --batch-min 2 --batch-max 16 --gns exact --gns-half-life 60 --ramp-kappa 1000 "   \
         "--ramp-waste 1 --ramp-step-rows 1e9 --lr 1e-2 --train-tokens 2000 "
    CHECK_RUN(trainer_run(TOTAL "--out total --checkpoint-every 1 --keep 0"), 0);
    CHECK(file_mentions("total/step_00000010/training/state.json", "\"total\""), "no state of it");
    for (long step = 3; step < newest_step("total"); step += 25) check_from("total", step, TOTAL);
}

// A checkpoint of format 1, written by version 0.1 (a129221), resumes, and --check finds its files.
static void test_format_1(void) {
    const char *build = strstr(trainer.program, "/build/");
    remove_tree("part");
    copy_tree(path_of("%.*s/dev/test/run/format1", (int)(build - trainer.program), trainer.program), "part");
    CHECK_RUN(trainer_run("train_gpt2 --check part"), 0, "part/step_00000004: undamaged");
    CHECK_RUN(trainer_run("train_gpt2 --train train.bin --vocab-size 64 --model d1 --layers 1 --heads 1 --channels 8 "
                          "--seq-len 8 --threads 1 --micro-batch 2 --gns off --lr 1e-2 --steps 6 --keep 2 --out part"),
              0, "resuming from part/step_00000004: 4 steps", "!warning", "!older");
    CHECK(file_exists("part/step_00000004/state.json") && file_exists("part/step_00000006/training/state.json"),
          "files");
    size_t bytes;
    char *log = read_text("part/metrics.jsonl", &bytes);
    double loss = log ? number_in(strstr(log, "{\"step\": 6,"), "loss") : NAN;
    CHECK(fabs(loss - 4.1702) < 1e-3, "loss %g", loss); // the old build's loss
    memory_free(log);
}

// Returns a file's text with the first `from` changed to `to`, of the same length; free it with memory_free.
static char *changed(const char *path, const char *from, const char *to) {
    size_t bytes;
    char *text = read_text(path, &bytes), *at = text ? strstr(text, from) : NULL;
    CHECK(at != NULL, "%s: no %s", path, from);
    if (at) memcpy(at, to, strlen(to));
    return text;
}

static void put_format(const char *checkpoint, const char *format) {
    const char *path = path_of("%s/MANIFEST.json", checkpoint);
    char *text = changed(path, "\"format\": 2,", path_of("\"format\": %s,", format)),
         *end = strstr(text, "  \"xxh3_128_above");
    const FileDigest above = digest_of(text, (size_t)(end - text)); // the manifest's own hash
    snprintf(end, strlen(end) + 1, "  \"xxh3_128_above\": \"%s\"\n}\n", above.hash);
    CHECK_OK(file_replace(IN_PATH, path, text, strlen(text), &e), &e);
    memory_free(text);
}

// A manifest of a newer format is refused: it does not count as damaged, so the run does not fall back to an older
// checkpoint. Formats of older checkpoints do not matter.
static void test_manifest_of_another_format(void) {
#define REFUSED(code)                                                                                                  \
    CHECK_RUN(code, ERR_INPUT, "part/step_00000010/MANIFEST.json: \"format\" is not 1 to 2",                           \
              " to 2. was it written by a newer version?", "!Skipped")
    make_part("whole", 10);
    copy_tree("whole/step_00000009", "part/step_00000009");
    put_format("part/step_00000009", "3");
    CHECK_RUN(run_part(), 0, "resuming from part/step_00000010");
    put_format("part/step_00000010", "3");
    remove_tree(path_of("part/step_%08ld", newest_step("part")));
    REFUSED(run_part());
    REFUSED(trainer_run("train_gpt2 --check part/step_00000010"));
    REFUSED(trainer_run("train_gpt2 --sample-only --threads 1 --model part"));
}

static void test_state_of_another_format(void) {
    make_part("whole", 10);
    char *text = changed("part/step_00000010/training/state.json", "\"format\":\t1,", "\"format\":\t2,");
    put_state("part/step_00000010", text);
    CHECK_RUN(run_part(), ERR_INPUT, "part/step_00000010/training/state.json: format 2, only 1 is known",
              "; it was written by gns.c ");
    memory_free(text);
}

// ---- Outliers -------------------------------------------------------------------------------------------------------

// Returns (value[n] - mean) / deviation, with mean and deviation of the 128 values before it; NaN if there are fewer.
static double deviations(const double *value, long n) {
    double sum = 0, squares = 0;
    for (long i = n - 128; n >= 128 && i < n; i++) sum += value[i], squares += value[i] * value[i];
    double mean = sum / 128;
    return n < 128 ? NAN : (value[n] - mean) / sqrt(squares / 128 - mean * mean);
}

// An outlier makes no update, enters no noise average, and is marked in metrics.jsonl. Checkpoints hold the window: the
// run resumes with the same bits from before and after its first skipped step.
static void test_outliers_are_skipped(void) {
#define OUTLIERS HERE "--steps 200 --batch-tokens 16 --lr 3e-3 --skip-loss-z 0.5 --skip-grad-z 2.2 "
    enum { STEPS = 200 };
    static double loss[STEPS], norm[STEPS];
    long by_loss = 0, by_norm = 0;
    double last_ln_s = NAN;
    CHECK_RUN(trainer_run(OUTLIERS "--out outliers --checkpoint-every 1 --keep 0"), 0, "is an outlier (loss ");
    size_t bytes;
    char *text = read_text("outliers/metrics.jsonl", &bytes);
    long skipped = 0, first = 0, step = 0;
    for (char *line = text ? strtok(text, "\n") : NULL; line && step < STEPS; line = strtok(NULL, "\n")) {
        bool said = strstr(line, "\"skipped\": true") != NULL;
        loss[step] = number_in(line, "loss"), norm[step] = number_in(line, "grad_norm");
        double loss_z = deviations(loss, step), norm_z = deviations(norm, step), ln_s = number_in(line, "gns_ln_s");
        step++;
        CHECK(said == (loss_z > 0.5 || norm_z > 2.2), "step %ld: z %.3g and %.3g", step, loss_z, norm_z);
        by_loss += loss_z > 0.5 && !(norm_z > 2.2), by_norm += norm_z > 2.2 && !(loss_z > 0.5);
        skipped += said;
        CHECK(step < 3 || (ln_s == last_ln_s) == said, "step %ld: noise %.17g after %.17g", step, ln_s, last_ln_s);
        last_ln_s = ln_s;
        if (said && !first) first = step;
        bool same = same_file(path_of("outliers/step_%08ld/model.safetensors", step),
                              path_of("outliers/step_%08ld/model.safetensors", step - 1));
        CHECK(step == 1 || same == said, "step %ld %s, and its weights %s", step, said ? "skipped" : "not skipped",
              same ? "are the same" : "differ");
    }
    memory_free(text);
    CHECK(first > 128 && skipped < 30, "%ld skipped, the first at step %ld", skipped, first);
    CHECK(by_loss > 0 && by_norm > 0, "%ld by the loss alone, %ld by the gradient's norm alone", by_loss, by_norm);
    for (step = first - 1; step <= first; step++) check_from("outliers", step, OUTLIERS);
}

// The horizon cuts the last step, here to one row of 16. Such a step is no outlier and enters no window.
static void test_cut_step_is_no_outlier(void) {
    enum { STEPS = 140, ROWS = 16 };
    static double norm[STEPS + 1];
    int steps = 0;
    size_t bytes;
    CHECK_RUN(trainer_run(HERE "--train-tokens %d --batch-tokens %d --lr 3e-3 --skip-grad-z 6 --out cut",
                          (STEPS * ROWS + 1) * 8, ROWS * 8),
              0);
    CHECK(!file_mentions("cut/metrics.jsonl", "\"skipped\""), "skipped");
    char *text = read_text("cut/metrics.jsonl", &bytes);
    for (char *line = text ? strtok(text, "\n") : NULL; line && steps <= STEPS; line = strtok(NULL, "\n"))
        norm[steps++] = number_in(line, "grad_norm");
    memory_free(text);
    CHECK(steps == STEPS + 1 && deviations(norm, STEPS) > 6, "%d steps, z %g", steps, deviations(norm, STEPS));
    char *state = read_text(path_of("cut/step_%08d/training/state.json", STEPS + 1), &bytes);
    char *window = state ? strstr(state, "\"grad_window\"") : NULL;
    CHECK(number_in(window, "count") == STEPS, "%.60s", window);
    memory_free(state);
}

int main(void) {
    trainer_setup();
    RUN(test_from_every_step, test_complete, test_another_log, test_what_may_change, test_another_micro_batch,
        test_places, test_what_may_not_change, test_options_of_a_run, test_missing_fields, test_noise_of_sources,
        test_ramp_of_the_whole_model, test_format_1, test_manifest_of_another_format, test_state_of_another_format,
        test_fp8, test_dtype_changes, test_outliers_are_skipped, test_cut_step_is_no_outlier);
    return trainer_end();
}
