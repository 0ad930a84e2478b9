// Resume: an interrupted and resumed run has the same bits as an uninterrupted one; which options may change in
// between, and which may not. GNS_LONG=1: resumes from every step, not only from some.
#include "math/outliers.h"
#include "base/manifest.h"
#include "../trainer.h"

// From every step of a run with a growing batch. Only that checkpoint exists, but all lines of metrics.jsonl.
static void test_from_every_step(void) {
    long tokens = trainer.thorough ? 24000 : 5000, stride = trainer.thorough ? 1 : 7;
    CHECK(trainer_run("--train-tokens %ld --out whole --checkpoint-every 1 --keep 0", tokens) == 0, "%s", log_tail());
    long steps = newest_step("whole");
    CHECK(steps > (trainer.thorough ? 200 : 60), "%ld steps", steps);
    for (long step = 1; step < steps; step += stride) {
        remove_tree("part");
        copy_tree(path_of("whole/step_%08ld", step), path_of("part/step_%08ld", step));
        copy_file("whole/metrics.jsonl", "part/metrics.jsonl");
        int code = trainer_run("--train-tokens %ld --out part --checkpoint-every 0", tokens);
        CHECK(code == 0, "step %ld: exit code %d: %s", step, code, log_tail());
        check_same_end("whole", "part", path_of("step %ld", step));
    }
}

// metrics.jsonl has every step once, in order, and a validation after its step.
static void test_every_step_once(void) {
    size_t bytes;
    char *text = read_text("part/metrics.jsonl", &bytes);
    long last = 0, lines = 0;
    CHECK(text != NULL && bytes > 0 && text[bytes - 1] == '\n', "no metrics, or no end");
    for (char *line = text ? strtok(text, "\n") : NULL; line; line = strtok(NULL, "\n"), lines++) {
        long step = atol(line + strlen("{\"step\": "));
        if (strstr(line, "\"val_loss\"")) CHECK(step == last, "validation of step %ld after step %ld", step, last);
        else CHECK(step == ++last, "step %ld, want %ld", step, last);
    }
    CHECK(last == newest_step("part") && lines > last, "%ld steps, %ld lines", last, lines);
    memory_free(text);
}

// A complete run does nothing; with a longer --train-tokens it resumes.
static void test_complete(void) {
    CHECK(trainer_run("--train-tokens 600 --out done") == 0, "%s", log_tail());
    long step = newest_step("done");
    copy_file("done/metrics.jsonl", "before.jsonl");
    CHECK(trainer_run("--train-tokens 600 --out done") == 0, "%s", log_tail());
    CHECK(log_mentions("this run is complete"), "%s", log_tail());
    CHECK(newest_step("done") == step && same_file("done/metrics.jsonl", "before.jsonl"), "the run changed");
    CHECK(trainer_run("--train-tokens 900 --out done") == 0, "%s", log_tail());
    CHECK(log_mentions("--train-tokens 600 is now 900"), "%s", log_tail());
    CHECK(newest_step("done") > step, "the longer run did not resume");
    CHECK(trainer_run("--train-tokens 900 --out done --fresh") == 0, "%s", log_tail());
    CHECK(log_mentions("done held an earlier run: moved to done.1"), "%s", log_tail());
    CHECK(newest_step("done.1") > step && newest_step("done") > step, "--fresh lost a run");
}

static double value_in(const char *line, const char *name) {
    const char *at = line ? strstr(line, name) : NULL;
    return at ? strtod(at + strlen(name), NULL) : NAN;
}

// A run whose every fixed option is given, so that each can be changed.
#define OWN "train_gpt2 --threads 1 --heads 1 --model d1 --out own --checkpoint-every 5 "

static void without_blanks(char *text) {
    char *to = text;
    for (; text && *text; text++)
        if (*text != ' ') *to++ = *text;
    if (to) *to = 0;
}

static void test_what_may_change(void) {
    CHECK(trainer_run(OWN "--layers 1 --channels 16 --vocab-size 64 --seq-len 8 --seed 5 --train train.bin --steps 10 "
                          "--lr 1e-3 --micro-batch 4 --batch-tokens 32") == 0,
          "%s", log_tail());
    CHECK(log_mentions("note: no warm-up: ") && log_mentions("gradients clipped (--grad-clip 1) in "), "%s",
          log_tail());
    CHECK(trainer_run(OWN "--layers 1 --channels 16 --vocab-size 64 --seq-len 8 --seed 5 --train train.bin --steps 20 "
                          "--lr 2e-3 --micro-batch 2 --batch-tokens 64 --beta2 0.99 --val val.bin --val-every 4") == 0,
          "%s", log_tail());
    static const char *const said[] = {"resuming from own/step_00000010: 10 steps, 320 tokens done",
                                       "--steps 10 is now 20",
                                       "--lr 0.001 is now 0.002",
                                       "the learning rate rises from 0.0002 to 0.00174 in one step",
                                       "--micro-batch 4 is now 2",
                                       "--beta2 0.95 is now 0.99",
                                       "--val \"\" is now \"val.bin\""};
    for (size_t i = 0; i < sizeof said / sizeof *said; i++)
        CHECK(log_mentions(said[i]), "no '%s' in:\n%s", said[i], log_tail());
    CHECK(!log_mentions("build: "), "it is the same build: %s", log_tail());

    // Of the first part all that was given; of the second what changed.
    static const char *const kept[] = {
        "\"options\": {\"train\": \"train.bin\", \"out\": \"own\", \"seed\": 5, \"model\": \"d1\", \"layers\": 1, "
        "\"heads\": 1, \"channels\": 16, \"vocab_size\": 64, \"micro_batch\": 4, \"seq_len\": 8, \"batch_tokens\": 32, "
        "\"steps\": 10, \"lr\": 0.001, \"checkpoint_every\": 5, \"threads\": 1},",
        "\"options\": {\"val\": \"val.bin\", \"micro_batch\": 2, \"batch_tokens\": 64, \"steps\": 20, \"lr\": 0.002, "
        "\"beta2\": 0.99, \"val_every\": 4},"};
    size_t bytes;
    char *text = read_text("own/run.json", &bytes);
    without_blanks(text);
    for (int i = 0; i < 2; i++) {
        char want[500];
        snprintf(want, sizeof want, "%s", kept[i]);
        without_blanks(want);
        CHECK(text && strstr(text, want), "part %d: no %s in %.2000s", i + 1, want, text);
    }
    memory_free(text);
}

// For tests in which only names and places matter.
#define SMALL                                                                                                          \
    "train_gpt2 --threads 1 --heads 1 --model d1 --layers 1 --channels 16 --vocab-size 64 --seq-len 8 "                \
    "--train train.bin "

// Without --batch-tokens the micro-batch is the batch, and may not change.
static void test_another_micro_batch(void) {
#define CONSTANT SMALL "--lr-schedule constant "
    CHECK(trainer_run(CONSTANT "--micro-batch 4 --steps 20 --out mb") == 0, "%s", log_tail());
    CHECK(trainer_run(CONSTANT "--micro-batch 4 --steps 10 --out mb2") == 0, "%s", log_tail());
    int code = trainer_run(CONSTANT "--micro-batch 2 --steps 20 --out mb2");
    CHECK(code == ERR_USAGE && log_mentions("--micro-batch was 4 and is 2") && log_mentions("add --batch-tokens 32 "),
          "exit code %d: %s", code, log_tail());
    code = trainer_run(CONSTANT "--micro-batch 2 --batch-tokens 32 --steps 20 --out mb2");
    CHECK(code == 0, "exit code %d: %s", code, log_tail());
    double want = NAN, got = NAN;
    size_t bytes;
    char *a = read_text("mb/metrics.jsonl", &bytes), *b = read_text("mb2/metrics.jsonl", &bytes);
    if (a) want = value_in(strstr(a, "{\"step\": 20,"), "\"loss\": ");
    if (b) got = value_in(strstr(b, "{\"step\": 20,"), "\"loss\": ");
    CHECK(fabs(got / want - 1) < 1e-5, "loss %.9g after the change, %.9g without", got, want);
    memory_free(a), memory_free(b);
}

// Replaces state.json, and its hash in the manifest.
static void put_state(const char *checkpoint, const char *text) {
    Manifest manifest, changed = {.dir = open(checkpoint, O_RDONLY)};
    Error e = {0};
    CHECK_OK(file_save(path_of("%s/training/state.json", checkpoint), text, strlen(text), &e), &e);
    CHECK_OK(manifest_read(&manifest, IN_PATH, checkpoint, &e), &e);
    for (int i = 0; i < manifest.count; i++) {
        const ManifestFile *file = &manifest.file[i];
        const FileDigest it = digest_of(text, strlen(text));
        bool state = strcmp(file->name, "training/state.json") == 0;
        CHECK_OK(manifest_add(&changed, file->name, state ? &it : file->piece, state ? 1 : file->pieces, &e), &e);
    }
    CHECK_OK(manifest_write(&changed, checkpoint, &e), &e); // without an id, as older builds write it
    close(changed.dir);
    manifest_free(&manifest);
    manifest_free(&changed);
}

// A trailing slash means nothing. Where --out is a link, runs are moved aside where it leads.
static void test_places(void) {
    Error e;
    CHECK_OK(directory_create("far/run", &e), &e);
    CHECK(symlink("far/run", "near") == 0, "a link");
    CHECK(trainer_run(SMALL "--steps 3 --out near/") == 0, "%s", log_tail());
    CHECK(trainer_run(SMALL "--steps 4 --out near/ --fresh") == 0, "%s", log_tail());
    long first = newest_step("far/run.1"), second = newest_step("far/run");
    CHECK(first == 3 && second == 4, "steps %ld and %ld", first, second);
#define TUNE "train_gpt2 --threads 1 --seq-len 8 --train train.bin --out tuned "
    CHECK(trainer_run(TUNE "--steps 2 --model near/step_00000004") == 0, "%s", log_tail());
    CHECK(trainer_run(TUNE "--steps 4 --model near/step_00000004/") == 0, "%s", log_tail());
    CHECK(log_mentions("resuming from tuned/step_00000002"), "%s", log_tail());
}

static void test_what_may_not_change(void) {
    static const struct {
        const char *options, *field;
    } cases[] = {
        {"--layers 2 --channels 16 --vocab-size 64 --seq-len 8 --seed 5 --train train.bin", "model.layers"},
        {"--layers 1 --channels 32 --vocab-size 64 --seq-len 8 --seed 5 --train train.bin", "model.channels"},
        {"--layers 1 --channels 16 --vocab-size 65 --seq-len 8 --seed 5 --train train.bin", "model.vocab"},
        {"--layers 1 --channels 16 --vocab-size 64 --seq-len 16 --seed 5 --train train.bin", "--seq-len"},
        {"--layers 1 --channels 16 --vocab-size 64 --seq-len 8 --seed 6 --train train.bin", "seed = 5"},
        {"--layers 1 --channels 16 --vocab-size 64 --seq-len 8 --seed 5 --train other.bin", "train_data"},
        {"--layers 1 --channels 16 --vocab-size 64 --seq-len 8 --seed 5 --train *e*.bin", "train_data"},
    };
    copy_file("own/metrics.jsonl", "before.jsonl");
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        int code = trainer_run(OWN "%s --steps 30 --batch-tokens 32", cases[i].options);
        CHECK(code == ERR_INPUT, "%s: exit code %d: %s", cases[i].field, code, log_tail());
        CHECK(log_mentions(cases[i].field), "no '%s' in: %s", cases[i].field, log_tail());
    }
    rename("train.bin", "same.bin"); // a shard of another name is another shard
    int code =
        trainer_run(OWN "--layers 1 --channels 16 --vocab-size 64 --seq-len 8 --seed 5 --train same.bin --steps 30");
    CHECK(code == ERR_INPUT && log_mentions("train_data"), "%d: %s", code, log_tail());
    copy_file("other.bin", "train.bin"); // as is other text of the same length and name
    code =
        trainer_run(OWN "--layers 1 --channels 16 --vocab-size 64 --seq-len 8 --seed 5 --train train.bin --steps 30");
    CHECK(code == ERR_INPUT && log_mentions("train_data") && log_mentions("(--train: train.bin)"), "%d: %s", code,
          log_tail());
    rename("same.bin", "train.bin");
    code = trainer_run("train_gpt2 --threads 1 --heads 2 --model d1 --out own --layers 1 --channels 16 --vocab-size 64 "
                       "--seq-len 8 --seed 5 --train train.bin --steps 30");
    CHECK(code == ERR_INPUT && log_mentions("model.heads"), "%d: %s", code, log_tail());
    CHECK(same_file("own/metrics.jsonl", "before.jsonl"), "a refused run changed metrics.jsonl");
}

// Masks follow the examples' numbers: a resumed run drops what it would have dropped. Another probability is refused.
static void test_dropout(void) {
    static const char *const others[] = {"", "--dropout 0", "--dropout 0.1"};
    CHECK(trainer_run("--train-tokens 900 --out drop --checkpoint-every 10 --keep 0 --dropout 0.2") == 0, "%s",
          log_tail());
    CHECK(file_mentions("drop/step_00000010/config.json", "\"resid_pdrop\": 0.2,\n  \"embd_pdrop\": 0.2,\n  "
                                                          "\"attn_pdrop\": 0.2,"),
          "another config.json");
    copy_tree("drop/step_00000010", "dropped/step_00000010");
    copy_file("drop/metrics.jsonl", "dropped/metrics.jsonl");
    for (int i = 0; i < 3; i++) {
        int code = trainer_run("--train-tokens 900 --out dropped %s", others[i]);
        CHECK(code == ERR_USAGE && log_mentions("this run has --dropout 0.2, the command has 0"),
              "'%s': exit code %d: %s", others[i], code, log_tail());
    }
    int code = trainer_run("--train-tokens 900 --out dropped --checkpoint-every 0 --dropout 0.2");
    CHECK(code == 0, "exit code %d: %s", code, log_tail());
    check_same_end("drop", "dropped", "dropout");
    code = trainer_run("--train-tokens 9000 --out whole --dropout 0.2");
    CHECK(code == ERR_USAGE && log_mentions("this run has --dropout 0, the command has 0.2"), "exit code %d: %s", code,
          log_tail());
    CHECK(!same_file("drop/step_00000010/model.safetensors", "whole/step_00000010/model.safetensors"), "nothing drops");
}

// The first number of that name in a file; NaN: none.
static double number_of(const char *path, const char *name) {
    size_t bytes;
    char *text = read_text(path, &bytes);
    double x = value_in(text, path_of("\"%s\": ", name));
    memory_free(text);
    return x;
}

// Without a learning rate: loss_nll and the validation are those of the run without smoothing.
static void test_label_smoothing(void) {
#define TWO SMALL "--lr 0 --steps 2 --val val.bin --val-every 1 --micro-batch 4 --out "
    CHECK(trainer_run(TWO "plain") == 0, "%s", log_tail());
    CHECK(trainer_run(TWO "smooth --label-smoothing 0.25") == 0, "%s", log_tail());
    CHECK(log_mentions("note: the loss has --label-smoothing 0.25") && log_mentions("  nll "), "%s", log_tail());
    double loss = number_of("plain/metrics.jsonl", "loss"), val = number_of("plain/metrics.jsonl", "val_loss");
    CHECK(number_of("smooth/metrics.jsonl", "loss_nll") == loss, "loss_nll is not %g", loss);
    CHECK(number_of("smooth/metrics.jsonl", "val_loss") == val, "val_loss is not %g", val);
    CHECK(fabs(number_of("smooth/metrics.jsonl", "loss") - loss) > 1e-4, "the loss is not smoothed");
    CHECK(isnan(number_of("plain/metrics.jsonl", "loss_nll")) &&
              file_mentions("smooth/run.json", "\"label_smoothing\": 0.25"),
          "the logs");
    CHECK(trainer_run("train_gpt2 --dry-run --model d1 --device H200 --label-smoothing 0.25") == 0, "%s", log_tail());
}

// Renames fields of a checkpoint's state.json ("noise.ranks": a field of an object) to names that no build knows.
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

// The first test's run at step 10, with all lines of metrics.jsonl.
static void copy_part(void) {
    remove_tree("part");
    copy_tree("whole/step_00000010", "part/step_00000010");
    copy_file("whole/metrics.jsonl", "part/metrics.jsonl");
}

static int run_part(void) {
    return trainer_run("--train-tokens %d --out part --checkpoint-every 0", trainer.thorough ? 24000 : 5000);
}

static int run_without(const char *const *fields) {
    copy_part();
    hide_fields("part/step_00000010", fields);
    return run_part();
}

// Options that make a run may not change. In a file that lacks one it had its default.
static void check_option_of_run(const char *given, const char *other, const char *field, const char *said) {
    remove_tree("ofrun");
    CHECK(trainer_run(SMALL "--steps 12 --out ofrun --checkpoint-every 5 --keep 0 %s", given) == 0, "%s", log_tail());
    remove_tree("part");
    copy_tree("ofrun/step_00000005", "part/step_00000005");
    copy_file("ofrun/metrics.jsonl", "part/metrics.jsonl");
    int code = trainer_run(SMALL "--steps 12 --out part %s", other);
    CHECK(code == ERR_USAGE && log_mentions(said), "%s: exit code %d: %s", other, code, log_tail());
    CHECK(trainer_run(SMALL "--steps 12 --out part --checkpoint-every 5 %s", given) == 0, "%s", log_tail());
    check_same_end("ofrun", "part", given);
    hide_fields("ofrun/step_00000012", (const char *[]){field, NULL});
    code = trainer_run(SMALL "--steps 13 --out ofrun %s", given);
    CHECK(code == ERR_USAGE, "without %s: exit code %d: %s", field, code, log_tail());
    code = trainer_run(SMALL "--steps 13 --out ofrun"); // as by default
    CHECK(code == 0, "without %s: exit code %d: %s", field, code, log_tail());
}

static void test_options_of_a_run(void) {
    check_option_of_run("--label-smoothing 0.1", "", "options.label_smoothing",
                        "this run has --label-smoothing 0.1, the command has 0");
    check_option_of_run("--optimizer lamb", "--optimizer muon", "options.optimizer",
                        "this run has --optimizer \"lamb\", the command has \"muon\"");
    check_option_of_run("--optimizer muon --momentum 0.9", "", "options.optimizer",
                        "this run has --optimizer \"muon\", the command has \"adamw\"");
}

// An option that the file lacks was unknown to the build that wrote it. A missing field of the state is named.
static void test_missing_fields(void) {
    static const char *const optional[] = {"build",           "options.tune",          "options.top_p",
                                           "options.dropout", "options.document_mask", NULL};
    static const char *const needed[] = {"tokens", "best_step", "ramp",  "noise.ln",   "noise.ranks",
                                         "tuning", "seed",      "model", "train_data", NULL};
    int code = run_without(optional);
    CHECK(code == 0, "exit code %d: %s", code, log_tail());
    CHECK(log_mentions("resuming from part/step_00000010") && !log_mentions("--tune") &&
              !log_mentions("--top-p") && log_mentions("build: an unknown build then, gns.c "),
          "%s", log_tail());
    check_same_end("whole", "part", "optional fields");
    for (int i = 0; needed[i]; i++) {
        code = run_without((const char *[]){needed[i], NULL});
        CHECK(code == ERR_INPUT, "%s: exit code %d: %s", needed[i], code, log_tail());
        CHECK(log_mentions(path_of("state.json: no field \"%s\"", needed[i])) &&
                  log_mentions("it was written by gns.c ") && log_mentions("resume with the program that wrote it"),
              "%s: %s", needed[i], log_tail());
    }
}

// A ramp that follows the whole model's noise scale, to the bit.
static void test_ramp_of_the_whole_model(void) {
#define TOTAL                                                                                                          \
    "train_gpt2 --train train.bin --vocab-size 64 --model d1 --layers 1 --heads 1 --channels 16 --seq-len 8 "          \
    "--threads 1 --micro-batch 4 --ramp gns --batch-min 2 --batch-max 16 --gns exact --gns-half-life 60 "              \
    "--ramp-kappa 1000 --ramp-waste 1 --ramp-step-rows 1e9 --lr 1e-2 --train-tokens 2000 "
    CHECK(trainer_run(TOTAL "--out total --checkpoint-every 1 --keep 0") == 0, "%s", log_tail());
    long steps = newest_step("total");
    CHECK(file_mentions(path_of("total/step_%08ld/training/state.json", steps), "\"sampled_total\"") && steps > 20,
          "%ld", steps);
    for (long step = 3; step < steps; step += 25) {
        remove_tree("part");
        copy_tree(path_of("total/step_%08ld", step), path_of("part/step_%08ld", step));
        copy_file("total/metrics.jsonl", "part/metrics.jsonl");
        CHECK(trainer_run(TOTAL "--out part --checkpoint-every 0") == 0, "%s", log_tail());
        CHECK(log_mentions(path_of("resuming from part/step_%08ld", step)), "%s", log_tail());
        check_same_end("total", "part", path_of("step %ld", step));
    }
}

#define TINY                                                                                                           \
    "train_gpt2 --train train.bin --vocab-size 64 --model d1 --layers 1 --heads 1 --channels 8 --seq-len 8 "           \
    "--threads 1 --micro-batch 2 --gns off --lr 1e-2 --steps 6 --keep 2 --out "

static double last_loss(const char *run) {
    size_t bytes;
    char *text = read_text(path_of("%s/metrics.jsonl", run), &bytes),
         *last = text ? strstr(text, "{\"step\": 6,") : NULL;
    double loss = last ? atof(strstr(last, "\"loss\": ") + 8) : NAN;
    memory_free(text);
    return loss;
}

// A checkpoint of format 1, written by version 0.1 (a129221): its run resumes, and --check knows its files.
static void test_format_1(void) {
    const char *build = strstr(trainer.program, "/build/");
    remove_tree("part");
    copy_tree(path_of("%.*s/dev/test/run/format1", (int)(build - trainer.program), trainer.program), "part");
    CHECK_RUN(trainer_run("train_gpt2 --check part"), 0, "part/step_00000004: undamaged");
    CHECK_RUN(trainer_run(TINY "part"), 0, "resuming from part/step_00000004: 4 steps", "!warning", "!older");
    CHECK(file_exists("part/step_00000004/state.json") && file_exists("part/step_00000006/training/state.json"),
          "files");
    CHECK(fabs(last_loss("part") - 4.1702) < 1e-3, "loss %g", last_loss("part")); // as the old build went on
    remove_tree("part");
}

// Writes another format into a checkpoint's manifest, and the manifest's own hash.
static void put_format(const char *checkpoint, const char *format) {
    char other[1 << 12], path[80], name[] = "\"format\": ";
    size_t bytes;
    Error e = {0};
    snprintf(path, sizeof path, "%s/MANIFEST.json", checkpoint);
    char *text = read_text(path, &bytes);
    const char *above = text ? strstr(text, "\"format\": 2,") : NULL,
               *end = text ? strstr(text, "  \"xxh3_128_above") : NULL;
    CHECK(above && end, "the manifest has no format: %s", text);
    if (above && end) {
        int at = (int)(above - text), rest = at + (int)strlen(name) + 1;
        int n = snprintf(other, sizeof other, "%.*s%s%s%.*s", at, text, name, format, (int)(end - text) - rest,
                         text + rest);
        snprintf(other + n, sizeof other - (size_t)n, "  \"xxh3_128_above\": \"%s\"\n}\n",
                 digest_of(other, (size_t)n).hash);
        CHECK_OK(file_save(path, other, strlen(other), &e), &e);
    }
    memory_free(text);
}

static void check_refused_format(int code, const char *format) {
    CHECK(code == ERR_INPUT && log_mentions("part/step_00000010/MANIFEST.json: \"format\" is not 1 to 2") &&
              log_mentions(" to 2. was it written by a newer version?") && !log_mentions("Skipped"),
          "%s: exit code %d: %s", format, code, log_tail());
}

// A manifest of another format is refused. It does not count as damaged: the run would fall back to an older
// checkpoint.
static void test_manifest_of_another_format(void) {
    static const char *const formats[] = {"3", "0", "1.5", "\"1\"", "null"};
    for (size_t i = 0; i < sizeof formats / sizeof *formats; i++) {
        copy_part();
        copy_tree("whole/step_00000009", "part/step_00000009");
        put_format("part/step_00000010", formats[i]);
        check_refused_format(run_part(), formats[i]);
        CHECK(directory_exists("part/step_00000010") && same_file("whole/metrics.jsonl", "part/metrics.jsonl"),
              "%s: the run changed", formats[i]);
        check_refused_format(trainer_run("train_gpt2 --check part"), formats[i]);
        check_refused_format(trainer_run("train_gpt2 --check part/step_00000010"), formats[i]);
        check_refused_format(trainer_run("train_gpt2 --sample-only --threads 1 --model part"), formats[i]);
        check_refused_format(trainer_run("train_gpt2 --sample-only --threads 1 --model part/step_00000010"),
                             formats[i]);
    }
    copy_part(); // an older checkpoint's format does not matter
    copy_tree("whole/step_00000009", "part/step_00000009");
    put_format("part/step_00000009", "3");
    int code = run_part();
    CHECK(code == 0 && log_mentions("resuming from part/step_00000010"), "exit code %d: %s", code, log_tail());
}

static void test_state_of_another_format(void) {
    size_t bytes;
    char *text = read_text("whole/step_00000010/training/state.json", &bytes),
         *format = text ? strstr(text, "\"format\":") : NULL;
    CHECK(format != NULL, "state.json has no format");
    if (!format) return;
    format[strcspn(format, "0123456789")] = '2';
    copy_part();
    put_state("part/step_00000010", text);
    int code = run_part();
    CHECK(code == ERR_INPUT && log_mentions("part/step_00000010/training/state.json: format 2, only") &&
              log_mentions("only 1 is known; it was written by gns.c "),
          "exit code %d: %s", code, log_tail());
    memory_free(text);
}

// Counts that no run could have written, in a file whose JSON is sound.
static void test_impossible_counts(void) {
    static const char *const fields[] = {"tokens", "step"};
    size_t bytes;
    char *text = read_text("whole/step_00000010/training/state.json", &bytes), other[1 << 16];
    for (int i = 0; i < 2; i++) {
        char *at = text ? strstr(text, path_of("\"%s\":", fields[i])) : NULL;
        CHECK(at && bytes + 1 < sizeof other, "state.json has no %s", fields[i]);
        if (!at) continue;
        at += strcspn(at, "0123456789");
        snprintf(other, sizeof other, "%.*s9%s", (int)(at - text), text, at); // 10 becomes 910
        copy_part();
        put_state("part/step_00000010", other);
        int code = run_part();
        CHECK(code == ERR_INPUT && log_mentions(path_of("state.json: field \"%s\" is not ", fields[i])),
              "%s: exit code %d: %s", fields[i], code, log_tail());
    }
    memory_free(text);
}

// The first 128 values are no outliers; the next one can be.
static void test_window(void) {
    Outliers o = {.count = 0};
    for (int i = 0; i < 128; i++) CHECK(isnan(outliers_z(&o, i % 2)), "value %d has a z", i);
    CHECK_CLOSE(outliers_z(&o, 2), (2 - 0.5) / 0.5, 1e-12, 0);
}

// An outlier makes no update, does not count in the noise averages, and is marked in metrics.jsonl. Checkpoints hold
// the window: the run resumes to the bit from before and after its first skipped step.
#define OUTLIERS                                                                                                       \
    "train_gpt2 --threads 1 --heads 1 --model d1 --layers 1 --channels 16 --vocab-size 64 --seq-len 8 "                \
    "--train train.bin --steps 200 --batch-tokens 16 --lr 3e-3 --skip-loss-z 0.5 --skip-grad-z 2.2 "

// How many standard deviations value[n] lies above the mean of the 128 before it; NaN where there are fewer.
static double deviations(const double *value, long n) {
    double sum = 0, squares = 0;
    for (long i = n - 128; n >= 128 && i < n; i++) sum += value[i], squares += value[i] * value[i];
    double mean = sum / 128;
    return n < 128 ? NAN : (value[n] - mean) / sqrt(squares / 128 - mean * mean);
}

static void test_outliers_are_skipped(void) {
    enum { STEPS = 200 };
    static double loss[STEPS], norm[STEPS];
    long by_loss = 0, by_norm = 0;
    double last_ln_s = NAN;
    CHECK(trainer_run(OUTLIERS "--out outliers --checkpoint-every 1 --keep 0") == 0, "%s", log_tail());
    CHECK(log_mentions("is an outlier (loss "), "nothing was skipped: %s", log_tail());
    size_t bytes;
    char *text = read_text("outliers/metrics.jsonl", &bytes);
    long skipped = 0, first = 0;
    for (char *line = text ? strtok(text, "\n") : NULL; line; line = strtok(NULL, "\n")) {
        long step = atol(line + strlen("{\"step\": "));
        bool said = strstr(line, "\"skipped\": true") != NULL;
        if (step < 1 || step > STEPS) break;
        loss[step - 1] = value_in(line, "\"loss\": "), norm[step - 1] = value_in(line, "\"grad_norm\": ");
        double loss_z = deviations(loss, step - 1), norm_z = deviations(norm, step - 1);
        CHECK(said == (loss_z > 0.5 || norm_z > 2.2), "step %ld: z %.3g and %.3g", step, loss_z, norm_z);
        by_loss += loss_z > 0.5 && !(norm_z > 2.2), by_norm += norm_z > 2.2 && !(loss_z > 0.5);
        skipped += said;
        double ln_s = value_in(line, "\"gns_ln_s\": ");
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
    for (long step = first - 1; step <= first; step++) {
        remove_tree("part");
        copy_tree(path_of("outliers/step_%08ld", step), path_of("part/step_%08ld", step));
        copy_file("outliers/metrics.jsonl", "part/metrics.jsonl");
        CHECK(trainer_run(OUTLIERS "--out part") == 0, "%s", log_tail());
        check_same_end("outliers", "part", path_of("outliers, from step %ld", step));
    }
}

// The horizon cuts the last step, here to one row of 16. Such a step is no outlier, and does not enter the windows.
static void test_cut_step_is_no_outlier(void) {
    enum { STEPS = 140, ROWS = 16 };
    static double norm[STEPS + 1];
    int steps = 0;
    size_t bytes;
    CHECK(
        trainer_run("train_gpt2 --threads 1 --heads 1 --model d1 --layers 1 --channels 16 --vocab-size 64 --seq-len 8 "
                    "--train train.bin --train-tokens %d --batch-tokens %d --lr 3e-3 --skip-grad-z 6 --out cut",
                    (STEPS * ROWS + 1) * 8, ROWS * 8) == 0,
        "%s", log_tail());
    char *text = read_text("cut/metrics.jsonl", &bytes);
    for (char *line = text ? strtok(text, "\n") : NULL; line && steps <= STEPS; line = strtok(NULL, "\n")) {
        norm[steps++] = value_in(line, "\"grad_norm\": ");
        CHECK(!strstr(line, "\"skipped\""), "skipped: %s", line);
    }
    memory_free(text);
    CHECK(steps == STEPS + 1 && deviations(norm, STEPS) > 6, "%d steps, z %g", steps, deviations(norm, STEPS));
    char *state = read_text(path_of("cut/step_%08d/training/state.json", STEPS + 1), &bytes);
    char *window = state ? strstr(state, "\"grad_window\"") : NULL;
    CHECK(window && value_in(window, "\"count\":") == STEPS, "%.60s", window);
    memory_free(state);
}

int main(void) {
    trainer_setup();
    RUN(test_from_every_step);
    RUN(test_every_step_once);
    RUN(test_complete);
    RUN(test_what_may_change);
    RUN(test_another_micro_batch);
    RUN(test_places);
    RUN(test_what_may_not_change);
    RUN(test_dropout);
    RUN(test_label_smoothing);
    RUN(test_options_of_a_run);
    RUN(test_missing_fields);
    RUN(test_ramp_of_the_whole_model);
    RUN(test_format_1);
    RUN(test_manifest_of_another_format);
    RUN(test_state_of_another_format);
    RUN(test_impossible_counts);
    RUN(test_window);
    RUN(test_outliers_are_skipped);
    RUN(test_cut_step_is_no_outlier);
    return trainer_end();
}
