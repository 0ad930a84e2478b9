// --on-spike rollback: a run recovers from a spike with the same bits each time, even if it is killed; or it gives up.
#include "model/engine.h"
#include "run/state.h"
#include "../trainer.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/file.h>
#include <unistd.h>

static Error e; // set by the last call that failed

enum { T = 8, V = 64, B = 16, WINDOWS = 3200, SEED = 5, FIRST = 171, LAST = 182, STEPS = 260 };

#define HERE                                                                                                           \
    "train_gpt2 --threads 1 --heads 1 --model d1 --layers 1 --channels 16 --vocab-size 64 --seq-len 8 --seed 5 "       \
    "--lr 1e-2 --lr-schedule constant --val val.bin --val-every 20 --val-tokens 512 "
#define RUNS     HERE "--micro-batch 16 --steps 260 "
#define ROLLBACK "--on-spike rollback --spike-z 8 --keep 0 --checkpoint-every 10 "
#define SHORT    HERE "--on-spike rollback --train clean.bin --micro-batch 16 --steps 50 --checkpoint-every 6 "

// Makes "clean.bin", and "planted.bin" with random tokens in the rows of steps FIRST to LAST.
static void make_shards(void) {
    const size_t count = WINDOWS * T + 1;
    Dataset *data;
    uint16_t *tokens = malloc(count * sizeof *tokens);
    uint64_t ignored;
    trainer_make_shard("clean.bin", 9, count);
    CHECK_OK(dataset_open(&data, "clean.bin", T, V, SEED, &e), &e);
    for (int i = 0; i < WINDOWS; i++) dataset_window(data, (uint64_t)i, 0, tokens + i * T, &e);
    for (uint64_t k = (FIRST - 1) * B; k < LAST * B; k++)
        for (uint64_t i = 0, at = dataset_window_at(data, k, &ignored) * T; i < T; i++)
            tokens[at + i] = (uint16_t)(rng_u32(3, k, i) % V);
    CHECK_OK(shard_write("planted.bin", tokens, count, &e), &e);
    dataset_close(data);
    free(tokens);
}

// ---- An engine that kills, or whose loss is not a number -----------------------------------------------------------

static struct {
    int step, create;           // calls so far
    int kill_step, kill_create; // the call that kills the process; 0: none
    int nan_from, nan_to;       // steps whose loss is not a number
    const char *command;        // shell command run at each of these steps, after the first save
    const char *locked;         // run directory that must be locked; NULL: not checked
    bool records;               // appends the rows of every step to the file "rows"
} disturbed;

static int disturbed_create(Engine **engine, const EngineConfig *config, Error *e) {
    if (++disturbed.create == disturbed.kill_create) raise(SIGKILL);
    return cpu_engine.create(engine, config, e);
}

// Ends the process unless the run directory is still locked at the end of a training.
static void disturbed_destroy(Engine *engine) {
    int fd = open(path_of("%s/metrics.jsonl", disturbed.locked), O_RDWR);
    if (disturbed.locked && (fd < 0 || flock(fd, LOCK_EX | LOCK_NB) == 0)) abort();
    if (fd >= 0) close(fd);
    cpu_engine.destroy(engine);
}

static int disturbed_begin(Engine *engine, Error *e) {
    if (++disturbed.step == disturbed.kill_step) raise(SIGKILL);
    return cpu_engine.begin_step(engine, e);
}

// On a rank: removes the log of the run "gone" before step 50.
static int removing_begin(Engine *engine, Error *e) {
    if (++disturbed.step == 50) unlink("gone/metrics.jsonl");
    return cpu_engine.begin_step(engine, e);
}

static int disturbed_micro_step(Engine *engine, const uint16_t *rows, int n, GnsMode mode, Error *e) {
    FILE *f = disturbed.records ? fopen("rows", "ab") : NULL;
    if (f) fwrite(rows, (T + 1) * sizeof *rows, (size_t)n, f), fclose(f);
    return cpu_engine.micro_step(engine, rows, n, mode, e);
}

static int disturbed_result(Engine *engine, StepResult *result, Error *e) {
    TRY(cpu_engine.result(engine, result, e));
    if (disturbed.step < disturbed.nan_from || disturbed.step >= disturbed.nan_to) return 0;
    if (disturbed.command && !log_mentions("saved   ")) return 0;
    if (disturbed.command && system(disturbed.command) != 0) abort();
    result->loss_sum = NAN;
    return 0;
}

// ---- A run's files --------------------------------------------------------------------------------------------------

// Checks that metrics.jsonl has a line per step. Returns the last validation loss.
static double check_lines(const char *run, int steps) {
    size_t bytes;
    double val = NAN;
    int last = 0;
    char *text = read_text(path_of("%s/metrics.jsonl", run), &bytes);
    for (char *line = text ? strtok(text, "\n") : NULL; line; line = strtok(NULL, "\n")) {
        if (strstr(line, "\"val_loss\"")) val = number_in(line, "val_loss");
        else CHECK(number_in(line, "step") == ++last, "%s: %.40s after step %d", run, line, last - 1);
    }
    memory_free(text);
    CHECK(last == steps, "%s: %d steps", run, last);
    return val;
}

// Returns the number of ranges of examples that a run's newest checkpoint excludes, and the ranges.
static int skipped_of(const char *run, int64_t first[ROLLBACKS_MAX], int64_t rows[ROLLBACKS_MAX]) {
    size_t bytes;
    int n = 0;
    char *text = read_text(path_of("%s/step_%08ld/training/state.json", run, newest_step(run)), &bytes);
    const char *at = text ? strstr(text, "\"skipped\"") : NULL;
    for (; at && (at = strstr(at, "\"first\"")) && n < ROLLBACKS_MAX; n++, at++)
        first[n] = (int64_t)number_in(at, "first"), rows[n] = (int64_t)number_in(at, "rows");
    memory_free(text);
    return n;
}

// Checks that no excluded row is computed again, in this epoch or the next. Compares only rows of planted tokens: other
// rows may occur more than once.
static void check_rows(int64_t first, int64_t rows) {
    size_t bytes, row = (T + 1) * sizeof(uint16_t), again = 0;
    Dataset *data;
    uint16_t *gone = malloc((size_t)rows * row);
    CHECK_OK(dataset_open(&data, "planted.bin", T, V, SEED, &e), &e);
    CHECK_OK(dataset_rows(data, (uint64_t)first, (int)rows, gone, &e), &e);
    char *seen = read_text("rows", &bytes);
    const size_t until = (size_t)(first + rows) * row; // rows before the rollback
    CHECK(seen && bytes > until && memcmp(seen + (size_t)first * row, gone, (size_t)rows * row) == 0, "other rows");
    for (size_t at = until; seen && at < bytes; at += row)
        for (int64_t i = (FIRST - 1) * B - first; i < rows; i++)
            again += memcmp(seen + at, (char *)gone + (size_t)i * row, row) == 0;
    CHECK(again == 0, "%zu rows are seen again", again);
    memory_free(seen);
    free(gone);
    dataset_close(data);
}

// A spike in steps 171 to 175 excludes the rows of steps 166 to 175. The other random rows cause a second spike.
static void test_heals(void) {
    int64_t first[ROLLBACKS_MAX], rows[ROLLBACKS_MAX];
    CHECK_RUN(trainer_run(RUNS "--train clean.bin --out clean"), 0);
    disturbed.records = true;
    CHECK_RUN(trainer_run(RUNS ROLLBACK "--train planted.bin --out healed --outliers 20"), 0,
              "saved   healed/step_00000000 ", "step 175: 5 of the last 10 steps are spikes (loss ",
              "; strange planted.bin:", ": back to healed/step_00000160, without examples 2640 to 2799\n",
              "step 180: 5 of the last 10 steps are spikes (loss ",
              ": back to healed/step_00000170, without examples 2720 to 2879\n",
              "healed/step_00000170 is now healed/step_00000170.rolled_back\n", "!is damaged");
    disturbed.records = false;
    const double clean = check_lines("clean", STEPS), healed = check_lines("healed", STEPS);
    CHECK(fabs(healed - clean) < 0.02, "%.4f, without the fault %.4f", healed, clean);
    CHECK(skipped_of("healed", first, rows) == 2 && first[0] == 165 * B && rows[0] == 10 * B && first[1] == 170 * B,
          "%ld, %ld", (long)first[0], (long)first[1]);
    check_rows(first[0], rows[0]);
    CHECK_RUN(trainer_run("train_gpt2 --eval-only --threads 1 --val val.bin --val-tokens 512 --model healed:0"), 0,
              "note: --model healed:0 is healed/step_00000000\n");
    CHECK(file_mentions("healed/metrics.rolled_back.jsonl", "{\"step\": 175,"), "the lines of the first");
    CHECK(file_mentions("healed/metrics.rolled_back.jsonl", "{\"step\": 180,"), "the lines of the second");
    CHECK_OK(verify("healed/step_00000170.rolled_back", &(Error){0}), &(Error){0});
}

// Kills one run in its first rollback, before the logs are cut; two runs in steps after it; one in its second rollback.
static void test_killed(void) {
    const int creates[] = {2, 0, 0, 3}, steps[] = {0, 176, 190, 0};
    for (int i = 0; i < 4; i++) {
        disturbed.kill_create = creates[i], disturbed.kill_step = steps[i];
        CHECK_RUN(trainer_run(RUNS ROLLBACK "--train planted.bin --out killed%d --outliers 20", i), 1000 + SIGKILL);
        disturbed.kill_create = disturbed.kill_step = 0;
        CHECK_RUN(trainer_run(RUNS ROLLBACK "--train planted.bin --out killed%d --outliers 20", i), 0,
                  "resuming from ");
        check_same_end("healed", path_of("killed%d", i), path_of("killed, %d", i));
        CHECK(same_file("healed/outliers.jsonl", path_of("killed%d/outliers.jsonl", i)), "outliers.jsonl, %d", i);
    }
}

// Without a spike the option changes no bit.
static void test_off_and_idle(void) {
    CHECK_RUN(trainer_run(RUNS ROLLBACK "--train clean.bin --out idle"), 0, "!back to");
    check_same_end("clean", "idle", "no spike");
}

// A loss that is not a number, before a full window exists and later. --keep 1 keeps the checkpoint before the window.
static void test_not_finite(void) {
    const char *where[] = {": back to nan9/step_00000000, without examples 0 to 143\n",
                           ": back to nan39/step_00000024, without examples 464 to 623\n"};
    for (int i = 0, step = 9; i < 2; i++, step += 30) {
        disturbed.nan_from = step, disturbed.nan_to = step + 1;
        CHECK_RUN(trainer_run(SHORT "--keep 1 --out nan%d", step), 0,
                  path_of("step %d, examples %d to %d: loss nan", step, (step - 1) * B, step * B - 1), where[i]);
        check_lines(path_of("nan%d", step), 50);
    }
    CHECK(count_checkpoints("nan39") == 4 && file_exists("nan39/step_00000036") &&
              file_exists("nan39/step_00000030.rolled_back") && file_exists("nan39/step_00000036.rolled_back"),
          "kept: 50, back to 36, before step 41, and the abandoned ones");
    disturbed.nan_from = disturbed.nan_to = 0;
}

// A second spike comes right after the first rollback, so both rollbacks go back to the same checkpoint.
static void test_again_at_once(void) {
    disturbed.nan_from = 39, disturbed.nan_to = 41, disturbed.locked = "soon1";
    CHECK_RUN(trainer_run(SHORT "--keep 1 --out soon1"), 0, "step 39, ", ": back to soon1/step_00000024, without",
              "step 25, examples 384 to 399: loss nan", ": back to soon1/step_00000024, without examples 240 to 399\n");
    disturbed.locked = NULL;
    check_lines("soon1", 50);
    CHECK(!file_exists("soon1/step_00000036.rolled_back"), "the second rollback removes what the first set aside");
    CHECK_RUN(trainer_run(SHORT "--keep 2 --out soon2"), 0, ": back to soon2/step_00000024, without examples 240 to");
    check_same_end("soon1", "soon2", "another --keep");
    disturbed.nan_from = disturbed.nan_to = 0;
}

static void test_another_runs_checkpoint(void) {
    CHECK_RUN(trainer_run(HERE "--train clean.bin --micro-batch 16 --steps 25 --out other"), 0);
    disturbed.nan_from = 39, disturbed.nan_to = 40;
    disturbed.command =
        "sleep 1 && cp -r other/step_00000025 mine && printf '{\"step\": 7}\\n' > mine/metrics.rolled_back.jsonl";
    CHECK_RUN(trainer_run(SHORT "--out mine"), 0, ": back to mine/step_00000024, without");
    disturbed.command =
        "rm -rf mine2/step_0000000* mine2/step_0000001* mine2/step_00000024 && cp -r other/step_00000025 mine2 && "
        "mkdir mine2/metrics.rolled_back.jsonl";
    CHECK_RUN(trainer_run(SHORT "--out mine2"), ERR_WRITE, ": back to mine2/step_00000030, without",
              "warning: mine2/metrics.rolled_back.jsonl: ", ": the log waits in memory\n",
              "error: mine2/metrics.rolled_back.jsonl: ");
    CHECK(newest_step("mine2") == 50, "the run was finished");
    disturbed.nan_from = disturbed.nan_to = 0, disturbed.command = NULL;
    CHECK(file_exists("mine/step_00000025"), "another run's");
    CHECK(file_mentions("mine/metrics.rolled_back.jsonl", "{\"step\": 7}\n{\"step\": 25,"), "lines are appended");
    size_t bytes;
    char *state = read_text("mine/step_00000050/training/state.json", &bytes);
    CHECK(state && number_in(state, "seconds") > 1, "the time of undone steps counts (--train-hours)");
    memory_free(state);
}

static void roll_back(const Archive *archive, int64_t step, FILE *notes) {
    CHECK_OK(archive_tidy(archive, true, notes, &e), &e);
    CHECK_OK(archive_set_aside_after(archive, step, "rolled_back", notes, &e), &e);
}

// A second rollback, or a full disk, removes what the first rollback set aside.
static void test_abandoned(void) {
    FILE *notes = fopen("/dev/null", "w");
    Archive archive = {0};
    remove_tree("left");
    CHECK_OK(directory_create("left", &e), &e);
    for (int step = 1; step <= 5; step++) make_checkpoint("left", step, "made by a test", "x", 1);
    archive = archive_at("left");
    CHECK(rename("left/step_00000005", "elsewhere") == 0 && symlink("../elsewhere", "left/step_00000005") == 0, "link");
    roll_back(&archive, 4, notes);
    CHECK(file_exists("left/step_00000005.rolled_back") && !file_exists("left/step_00000005"), "a link moves");
    CHECK(unlink("left/step_00000005.rolled_back") == 0 && rename("elsewhere", "left/step_00000005") == 0, "back");
    make_checkpoint("left", 6, "made by a test", "x", 1);
    CHECK(truncate("left/step_00000004/MANIFEST.json", 9) == 0 && unlink("left/step_00000006/MANIFEST.json") == 0,
          "damaged");
    roll_back(&archive, 3, notes);
    CHECK(file_exists("left/step_00000005.rolled_back") && file_exists("left/step_00000004.rolled_back"),
          "all of them");
    CHECK(system("rm -r left/*4.rolled_back left/*6*") == 0, "damaged ones moved");
    roll_back(&archive, 2, notes);
    CHECK(file_exists("left/step_00000003.rolled_back") && !file_exists("left/step_00000005.rolled_back"),
          "of the second");
    make_checkpoint("left", 3, "made by a test", "x", 1);
    roll_back(&archive, 2, notes);
    CHECK(file_exists("left/step_00000003.rolled_back") && !file_exists("left/step_00000003.rolled_back.2"),
          "the older one of the same step goes");
    CHECK(archive_make_room(&archive, UINT64_MAX / 2, (Spare){.keep = 0}, 2, notes, NULL, &e) == ERR_WRITE, "room");
    CHECK(file_exists("left/step_00000003.rolled_back"), "--keep 0 keeps all");
    CHECK(archive_make_room(&archive, UINT64_MAX / 2, (Spare){.keep = 2}, 2, notes, NULL, &e) == ERR_WRITE, "room");
    CHECK(count_checkpoints("left") == 2 && !file_exists("left/step_00000003.rolled_back"), "only the abandoned one");
    archive_close(&archive);
    fclose(notes);
}

// Two runs with a ramp, Muon, skipped outliers and a loss scale are equal.
static void test_everything_else(void) {
    trainer.engine.needs_loss_scale = true;
    trainer.engine.scale_loss = cpu_engine.scale_loss;
    for (int i = 0; i < 2; i++)
        CHECK_RUN(
            trainer_run(HERE ROLLBACK
                        "--train planted.bin --out all%d --ramp gns --ramp-step-rows 1e9 --batch-min 4 --batch-max 16 "
                        "--micro-batch 8 --batch-tokens 64 --train-tokens 33280 --optimizer muon "
                        "--skip-grad-z 5 --spike-steps 4 --gns exact",
                        i),
            0, "4 of the last 8 steps are spikes", ": back to ");
    check_same_end("all0", "all1", "a repeat");
    trainer.engine.needs_loss_scale = false;
}

static void test_gives_up(void) {
    disturbed.nan_from = 1, disturbed.nan_to = 1000;
    CHECK_RUN(trainer_run(RUNS ROLLBACK "--train clean.bin --out hopeless"), ERR_NONFINITE,
              "error: after 20 rollbacks: step 1, examples 0 to 15: loss nan");
    CHECK(system("[ $(grep -c ': back to hopeless/step_00000000, without examples 0 to 15$' log) = 20 ]") == 0, "20");
    disturbed.nan_from = 30, disturbed.nan_to = INT_MAX, disturbed.command = "rm -rf bare/step_00000000";
    CHECK_RUN(
        trainer_run(HERE "--on-spike rollback --train clean.bin --out bare --steps 1000000 --checkpoint-every 1000000"),
        ERR_NONFINITE, "loss nan", "no checkpoint of this run is left to go back to", "!: back to");
    CHECK(file_mentions("bare/metrics.jsonl", "{\"step\": 29,"), "the lines stay");
    disturbed.nan_from = 3, disturbed.nan_to = 4, disturbed.command = NULL;
    CHECK_RUN(trainer_run(RUNS "--train clean.bin --out off"), ERR_NONFINITE, "error: step 3, ", "!rollback");
    disturbed.nan_from = disturbed.nan_to = 0;
}

// Two ranks decide as one process does, although their sums of gradients have another order.
static void test_ranks(void) {
    int64_t first[2][ROLLBACKS_MAX], rows[2][ROLLBACKS_MAX];
    if (getenv("GNS_RUNNER") || system("command -v mpirun > /dev/null") != 0) SKIP("no Open MPI for this program");
    trainer.ranks = 2;
    for (int i = 0; i < 2; i++)
        CHECK_RUN(trainer_run(RUNS ROLLBACK "--train planted.bin --out ranks%d --zero %d --outliers 20", i, 3 * i), 0,
                  ": back to ");
    check_same_end("ranks0", "ranks1", "--zero 3");
    CHECK_RUN(trainer_run(RUNS ROLLBACK "--train planted.bin --out gone --deadline 5"), ERR_WRITE, ": back to ",
              "gone/metrics.jsonl was removed or replaced, and its lines are lost");
    trainer.ranks = 1;
    const int n = skipped_of("healed", first[0], rows[0]), m = skipped_of("ranks0", first[1], rows[1]);
    CHECK(n == m && memcmp(first[0], first[1], (size_t)n * sizeof **first) == 0, "%d and %d rollbacks", n, m);
}

int main(int argc, char **argv) {
    trainer.engine = cpu_engine;
    trainer.engine.begin_step = removing_begin;
    if (argc > 2 && strcmp(argv[1], "rank") == 0) return trainer_rank(argc, argv);
    trainer.engine.create = disturbed_create;
    trainer.engine.destroy = disturbed_destroy;
    trainer.engine.begin_step = disturbed_begin;
    trainer.engine.micro_step = disturbed_micro_step;
    trainer.engine.result = disturbed_result;
    trainer_setup();
    make_shards();
    RUN(test_heals, test_killed, test_off_and_idle, test_not_finite, test_again_at_once, test_another_runs_checkpoint,
        test_abandoned, test_everything_else, test_gives_up, test_ranks);
    return trainer_end();
}
