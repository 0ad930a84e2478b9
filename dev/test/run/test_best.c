// --keep-best keeps the checkpoint with the lowest validation loss of metrics.jsonl: with any intervals of validation
// and checkpoints, across stops and failures, with any --keep, on a full disk.
#include "run/state.h"
#include "faults.h"
#include "../trainer.h"

#include <math.h>

static Error e; // set by the last call that failed

#define SMALL                                                                                                          \
    "--train train.bin --vocab-size 256 --model d1 --layers 1 --heads 1 --channels 16 --seq-len 8 --threads 1 "        \
    "--micro-batch 2 --val-tokens 128 --gns off --lr-schedule constant --out part "
#define SMALL_COMMAND "train_gpt2 --val val.bin " SMALL

// At this learning rate, much too high, the loss goes up and down.
#define RUN_COMMAND SMALL_COMMAND "--lr 0.3 --seed %d "
#define EVALUATE    "train_gpt2 --eval-only --val val.bin --val-tokens 128 --threads 1 --model "
#define COMMAND     RUN_COMMAND "--train-tokens %d --checkpoint-every 5 --keep 2 "
enum { TOKENS = 880, PARTS = 5 }; // 55 steps of 2 rows of 8 tokens

// Gives a run whose lowest validation loss is neither its first nor its last, and whose second lowest comes before it.
static int seed;

typedef struct {
    long step, last;     // step with the lowest validation loss; last step
    double loss, before; // the lowest validation loss; the lowest before that step
    long end[4];         // step of the first validation that completes k without a new lowest loss; 0: none
} Lowest;

static Lowest lowest_after(long step, const char *metrics) {
    Lowest lowest = {.loss = INFINITY};
    size_t bytes;
    int stale = 0;
    char *text = read_text(metrics, &bytes), *save = NULL;
    for (char *line = text ? strtok_r(text, "\n", &save) : NULL; line; line = strtok_r(NULL, "\n", &save)) {
        char *val = strstr(line, "\"val_loss\": ");
        lowest.last = atol(strstr(line, "\"step\": ") + 8);
        if (!val || lowest.last <= step) continue;
        stale = atof(val + 12) < lowest.loss ? 0 : stale + 1;
        if (stale < 4 && !lowest.end[stale]) lowest.end[stale] = lowest.last;
        if (stale > 0) continue;
        lowest.before = lowest.loss;
        lowest.loss = atof(val + 12);
        lowest.step = lowest.last;
    }
    memory_free(text);
    return lowest;
}

static Lowest lowest_of(const char *metrics) { return lowest_after(0, metrics); }

static bool is_in_the_middle(const Lowest *lowest) { return lowest->step > 7 && lowest->step + 10 <= lowest->last; }

static void test_an_example_is_found(void) {
    bool found = false;
    while (!found && seed++ < 50) {
        CHECK_RUN(trainer_run(COMMAND "--val-every 7", seed, TOKENS), 0);
        const Lowest lowest = lowest_of("part/metrics.jsonl");
        found = is_in_the_middle(&lowest) && lowest_after(lowest.step, "part/metrics.jsonl").loss > lowest.before;
        remove_tree("part");
    }
    CHECK(found, "none in %d", seed);
}

static void check_best(const char *what, int kept) {
    Lowest lowest = lowest_of("part/metrics.jsonl");
    CHECK(is_in_the_middle(&lowest), "%s: step %ld of %ld: a bad example", what, lowest.step, lowest.last);
    CHECK_OK(verify(path_of("part/step_%08ld", lowest.step), &e), &e);
    CHECK(count_checkpoints("part") == kept + 1, "%s: %d are kept", what, count_checkpoints("part"));
}

static void test_the_best_stays(void) {
    CHECK_RUN(trainer_run(COMMAND "--val-every 7 --keep-best", seed, TOKENS), 0);
    Lowest lowest = lowest_of("part/metrics.jsonl");
    check_best("a run", 2);
    const char *said = path_of("lowest validation loss %.4f after step %ld", lowest.loss, lowest.step);
    CHECK_RUN(0, 0, path_of("%s, in part/step_%08ld", said, lowest.step));
    CHECK_RUN(trainer_run("train_gpt2 --check part"), 0, said);

    const char *best = path_of("part/step_%08ld, the lowest validation loss: %.4f\n", lowest.step, lowest.loss);
    CHECK_RUN(trainer_run(EVALUATE "part"), 0, path_of("note: --model part is %s", best));
    CHECK_RUN(trainer_run(EVALUATE "part:best"), 0, path_of("note: --model part:best is %s", best));
    CHECK_RUN(
        trainer_run("train_gpt2 --sample-only --tokenizer bytes --vocab-size 256 --sample-tokens 2 --model part:best"),
        0, path_of("note: --model part:best is %s", best));
    CHECK_RUN(trainer_run(EVALUATE "part:%ld", newest_step("part")), 0,
              path_of("is part/step_%08ld\n", newest_step("part")));
    CHECK_RUN(trainer_run(EVALUATE "part:1"), 65, "part/step_00000001: no such checkpoint. name another step");
    CHECK_RUN(trainer_run(EVALUATE "part:worst"), 64, "--model part:worst: neither a preset, nor a directory");

    CHECK_RUN(trainer_run(COMMAND "--val-every 7 --fresh", seed, TOKENS), 0);
    CHECK_RUN(trainer_run(EVALUATE "part:best"), 65, "--model part:best: the run has no --keep-best. name a step");
    CHECK_RUN(trainer_run(EVALUATE "part"), 0, path_of("note: --model part is part/step_%08ld\n", newest_step("part")));
    CHECK(count_checkpoints("part") == 2, "not asked for, and %d are kept", count_checkpoints("part"));
    CHECK(same_metrics("part/metrics.jsonl", "part.1/metrics.jsonl"), "it changes the numbers");
    remove_tree("part.1");
    remove_tree("part");
}

// A run in five parts: each part reads the best loss from the checkpoint that it resumes.
static void test_across_stops(void) {
    for (int part = 1; part <= PARTS; part++)
        CHECK_RUN(trainer_run(COMMAND "--val-every 7 --keep-best", seed, TOKENS / PARTS * part), 0);
    check_best("in parts", 2);

    // A best checkpoint that the user removed is forgotten. Without --keep-best the best one is removed like others.
    Lowest lowest = lowest_of("part/metrics.jsonl");
    remove_tree(path_of("part/step_%08ld", lowest.step));
    CHECK_RUN(trainer_run(EVALUATE "part"), 0, path_of("note: --model part is part/step_%08ld\n", newest_step("part")));
    CHECK_RUN(trainer_run(EVALUATE "part:best"), 65, path_of("part/step_%08ld: no such checkpoint", lowest.step));
    CHECK_RUN(trainer_run("train_gpt2 --val other.bin " SMALL "--keep-best --seed %d --train-tokens %d", seed, TOKENS),
              0, "this run is complete", "!compare with a loss");
    CHECK_RUN(trainer_run(COMMAND "--keep-best --val-every 0", seed, 1000), 64, "--val-every above 0");
    CHECK(trainer_run(COMMAND "--val-every 7", seed, 1000) == 0 && count_checkpoints("part") == 2, "%d are kept: %s",
          count_checkpoints("part"), log_tail());
    long begun = newest_step("part");
    CHECK_RUN(trainer_run(COMMAND "--val-every 7 --keep-best", seed, 1500), 0);
    lowest = lowest_after(begun, "part/metrics.jsonl");
    CHECK(lowest.step > begun, "no validation after step %ld", begun);
    CHECK_OK(verify(path_of("part/step_%08ld", lowest.step), &e), &e);
    CHECK_RUN(trainer_run("train_gpt2 --val other.bin " SMALL "--keep-best --seed %d --train-tokens 1600", seed), 0,
              path_of("compare with a loss of the earlier --val: %.4f\n", lowest.loss));
    remove_tree("part");
}

// With --checkpoint-every 0 the best checkpoint is still written.
static void test_alone(void) {
    CHECK_RUN(trainer_run(RUN_COMMAND "--val-every 7 --train-tokens 900 --checkpoint-every 0 --keep-best", seed), 0);
    Lowest lowest = lowest_of("part/metrics.jsonl");
    CHECK_OK(verify(path_of("part/step_%08ld", lowest.step), &e), &e);
    remove_tree("part");
}

// ---- --patience -----------------------------------------------------------------------------------------------------

#define PATIENT RUN_COMMAND "--train-tokens %d --checkpoint-every 2 --keep 0 --val-every 3 --keep-best "

// A run ends after --patience validations without a new lowest loss. A resume also counts validations before it.
static void test_patience(void) {
    CHECK_RUN(trainer_run(PATIENT, seed, TOKENS), 0);
    Lowest whole = lowest_of("part/metrics.jsonl");
    long first = whole.end[2], second = whole.end[3];
    CHECK(first > 0 && (second == 0 || second > first) && first < TOKENS / 16, "ends at %ld and %ld: a bad example",
          first, second);
    CHECK(trainer_run(PATIENT "--fresh --patience 1000", seed, TOKENS) == 0 &&
              same_metrics("part/metrics.jsonl", "part.1/metrics.jsonl"),
          "it changes the numbers: %s", log_tail());
    remove_tree("part.1");

    CHECK_RUN(trainer_run(PATIENT "--fresh --patience 2", seed, TOKENS), 0);
    CHECK(newest_step("part") == first, "%ld, not %ld", newest_step("part"), first);
    CHECK_RUN(0, 0, path_of("ended early, after step %ld: 2 validations", first), "lowest validation loss");
    CHECK_RUN(trainer_run(PATIENT "--patience 2", seed, TOKENS), 0, "a larger --patience resumes");
    CHECK(newest_step("part") == first, "it trains on");
    remove_tree(path_of("part/step_%08ld", first));
    CHECK_RUN(trainer_run(PATIENT "--patience 2", seed, TOKENS), 0, "ended early");
    CHECK(newest_step("part") == first, "%ld: it forgets what it counted", newest_step("part"));
    CHECK_RUN(trainer_run(PATIENT "--patience 3", seed, TOKENS), 0);
    CHECK(newest_step("part") == (second ? second : TOKENS / 16), "%ld with more patience, want %ld",
          newest_step("part"), second);
    CHECK(trainer_run(PATIENT, seed, TOKENS) == 0 && newest_step("part") == whole.last &&
              same_metrics("part/metrics.jsonl", "part.1/metrics.jsonl"),
          "without it to the end: %s", log_tail());
    remove_tree("part");
    remove_tree("part.1");
}

// ---- --stop-at-loss -------------------------------------------------------------------------------------------------

// A run ends at the first validation that is low enough. Given again, the same command does nothing. A lower
// --stop-at-loss resumes the run.
static void test_stop_at_loss(void) {
    const char *early = RUN_COMMAND "--train-tokens %d --checkpoint-every 2 --val-every 7 --stop-at-loss %.17g";
    CHECK_RUN(trainer_run(COMMAND "--val-every 7", seed, TOKENS), 0);
    Lowest lowest = lowest_of("part/metrics.jsonl");
    CHECK_RUN(trainer_run(path_of("%s --fresh", early), seed, TOKENS, lowest.loss), 0);
    CHECK(newest_step("part") == lowest.step && lowest.step < lowest.last, "%ld, not %ld", newest_step("part"),
          lowest.step);
    CHECK_RUN(0, 0,
              path_of("validation loss %.4f, at most --stop-at-loss %g, after %ld steps, %ld tokens, ", lowest.loss,
                      lowest.loss, lowest.step, lowest.step * 16));
    CHECK_RUN(trainer_run(early, seed, TOKENS, lowest.loss), 0, "this run is complete", "A lower --stop-at-loss or ");
    CHECK_RUN(trainer_run(early, seed, TOKENS, 1e-3), 0);
    CHECK(same_metrics("part/metrics.jsonl", "part.1/metrics.jsonl"), "it changes the numbers");
    CHECK_RUN(trainer_run(RUN_COMMAND "--train-tokens 96 --val-every 0 --stop-at-loss 1", seed), 64, "--val-every");
    remove_tree("part");
    remove_tree("part.1");
}

// ---- On a disk that is too small for --keep -------------------------------------------------------------------------

// Every validation of FALLING is the best so far. The previous best is then the oldest checkpoint.
#define FALLING SMALL_COMMAND "--lr 0.003 --train-tokens 208 --checkpoint-every 1 --val-every 4 --keep 2 --keep-best "
enum { FALLING_STEPS = 13 };
static long one_kb; // size of one checkpoint of FALLING, in KiB

static long best_of(long step) {
    RunSummary summary = {0};
    return run_state_summary(&summary, path_of("part/step_%08ld", step), &e) ? 0 : (long)summary.at.best.step;
}

// Checks that the best checkpoint that each one names is undamaged, and that the one named in the output exists.
static void check_best_is_there(const char *what) {
    long newest = newest_step("part"), named = 0;
    CHECK(newest < 0 || newest_whole_step("part", &e) >= 0, "%s: %s", what, e.what);
    for (long step = newest, best; step > 0; step--)
        if ((best = best_of(step)))
            CHECK(verify(path_of("part/step_%08ld", best), &e) == 0, "%s, step %ld: %s", what, step, e.what);
    size_t bytes;
    char *log = read_text("log", &bytes), *lowest = log ? strstr(log, "lowest validation loss") : NULL;
    if (lowest) named = atol(strstr(lowest, "after step ") + 11);
    CHECK(named == 0 || file_exists(path_of("part/step_%08ld", named)), "%s: %s", what, log_tail());
    memory_free(log);
}

// Plans a disk for three and a half checkpoints, counting the one being written.
static void plan_little_room(Fault fault, long at) {
    faults_plan(fault, CALL_RENAME, at, EIO);
    faults->disk_kb = 7 * one_kb / 2 + 64; // 64: the trainer's allowance for state.json
}

static int run_with_little_room(Fault fault, long at) {
    remove_tree("part");
    plan_little_room(fault, at);
    return trainer_run(FALLING);
}

// Kills the run at each rename, of a new checkpoint or of a removed one, or makes this rename fail.
static void test_little_room(void) {
    faults_plan(FAULT_NONE, -1, 0, 0);
    CHECK_RUN(trainer_run(FALLING), 0);
    CHECK(lowest_of("part/metrics.jsonl").step == FALLING_STEPS, "a bad example");
    one_kb = disk_used_kb("part") / 2; // "part" has two checkpoints; the last is also the best
    CHECK_RUN(run_with_little_room(FAULT_NONE, -1), 0, "note: removed part/step_00000006 to make room on the disk\n");
    long renames = faults->of[0].count[CALL_RENAME];
    check_best_is_there("little room");
    for (long n = 1; n <= renames; n++) {
        CHECK(run_with_little_room(FAULT_KILL, n) == 1000 + SIGKILL, "%s", log_tail());
        check_best_is_there(path_of("killed at rename %ld", n));
        run_with_little_room(FAULT_ONCE, n);
        check_best_is_there(path_of("rename %ld fails", n));
    }
    remove_tree("part");
}

// The disk damages a new best checkpoint: the previous best is kept, and the end of the output names it.
static void test_the_best_is_not_saved(void) {
    const char *command = RUN_COMMAND "--train-tokens %ld --val-every 7 --checkpoint-every 1 --keep 2 --keep-best";
    faults_plan(FAULT_NONE, -1, 0, 0);
    CHECK_RUN(trainer_run(command, seed, (long)TOKENS), 0);
    long best = lowest_of("part/metrics.jsonl").step;
    remove_tree("part");
    plan_little_room(FAULT_NONE, -1);
    faults->flip_step = best;
    CHECK_RUN(trainer_run(command, seed, (best + 7) * 16), 0, // the previous best stays the best
              path_of("step %ld was not saved", best), "lowest validation loss");
    CHECK(faults->struck == 1, "%ld calls failed", (long)faults->struck);
    check_best_is_there("the best is not saved");
    remove_tree("part");
}

// ---- With --on-spike ------------------------------------------------------------------------------------------------

#define SPIKY                                                                                                          \
    SMALL_COMMAND "--train-tokens 640 --checkpoint-every 2 --val-every 7 --keep %d --keep-best --on-spike rollback "   \
                  "--spike-steps 2 "

static int spiky_steps; // steps of this process so far

// The second of two spikes comes in the first step after a rollback.
static int spiky_result(Engine *engine, StepResult *result, Error *e) {
    TRY(cpu_engine.result(engine, result, e));
    if (++spiky_steps == 24 || spiky_steps == 25) result->loss_sum = NAN;
    return 0;
}

// The validation loss falls until the first spike, then stays high.
static int spiky_eval(Engine *engine, const uint16_t *tokens, int n, int T, float *loss, Error *e) {
    for (int i = 0; i < n * T; i++) loss[i] = (float)(spiky_steps < 24 ? 30 - spiky_steps : 30);
    return 0;
}

// No rollback or resume forgets the best checkpoint, wherever the run was killed.
static void test_rollbacks(void) {
    trainer.engine.result = spiky_result, trainer.engine.eval = spiky_eval;
    for (int keep = 1; keep <= 6; keep += 5)
        for (long n = 0, renames = 1; n <= renames; n += trainer.thorough ? 1 : 11) {
            remove_tree("part");
            faults_plan(n ? FAULT_KILL : FAULT_NONE, CALL_RENAME, n, 0);
            CHECK_RUN(trainer_run(SPIKY, keep), n ? 1000 + SIGKILL : 0);
            check_best_is_there(path_of("keep %d, killed at rename %ld", keep, n));
            if (n == 0) CHECK_RUN(0, 0, "step 24, ", "step 21, ", ": back to part/step_00000020");
            if (n == 0) renames = faults->of[0].count[CALL_RENAME];
            faults_plan(FAULT_NONE, -1, 0, 0);
            CHECK_RUN(trainer_run(SPIKY, keep), 0);
            const long best = best_of(newest_step("part")), lowest = lowest_of("part/metrics.jsonl").step;
            CHECK(best == lowest, "keep %d, killed at rename %ld: %ld, not %ld", keep, n, best, lowest);
        }
}

int main(void) {
    trainer_setup();
    faults_setup();
    RUN(test_an_example_is_found, test_the_best_stays, test_across_stops, test_alone, test_patience, test_stop_at_loss,
        test_little_room, test_the_best_is_not_saved, test_rollbacks);
    return trainer_end();
}
