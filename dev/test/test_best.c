// --keep-best: the checkpoint with the lowest validation loss stays, whatever the rhythm of validation and checkpoints,
// across stops, and whatever --keep says; against what metrics.jsonl says of every validation.
#define _DEFAULT_SOURCE
#include "trainer.h"

#include <math.h>

// With a learning rate that is much too high the loss goes up and down.
#define RUN_COMMAND                                                                                                    \
    "train_gpt2 --train train.bin --val val.bin --vocab-size 256 --model d1 --layers 1 --heads 1 --channels 16 "       \
    "--seq-len 8 --threads 1 --micro-batch 2 --val-tokens 128 --gns off --lr-schedule constant --lr 0.3 --out part "   \
    "--seed %d "
#define COMMAND RUN_COMMAND "--train-tokens %d --checkpoint-every 5 --keep 2 "
enum { TOKENS = 880, PARTS = 5 }; // 55 steps of 2 rows of 8 tokens

static int seed; // of a run whose lowest loss is neither at its beginning nor at its end

typedef struct {
    long step, last; // of the lowest validation loss; of the last step
    double loss;
} Lowest;

static Lowest lowest_after(long step, const char *metrics) {
    Lowest lowest = {.loss = INFINITY};
    size_t bytes;
    char *text = read_text(metrics, &bytes), *save = NULL;
    for (char *line = text ? strtok_r(text, "\n", &save) : NULL; line; line = strtok_r(NULL, "\n", &save)) {
        char *val = strstr(line, "\"val_loss\": ");
        lowest.last = atol(strstr(line, "\"step\": ") + 8);
        if (!val || lowest.last <= step || !(atof(val + 12) < lowest.loss)) continue;
        lowest.loss = atof(val + 12);
        lowest.step = lowest.last;
    }
    memory_free(text);
    return lowest;
}

static Lowest lowest_of(const char *metrics) { return lowest_after(0, metrics); }

static bool is_in_the_middle(const Lowest *lowest) { return lowest->step > 7 && lowest->step + 10 <= lowest->last; }

static void test_an_example_is_found(void) {
    Lowest lowest = {0};
    while (!is_in_the_middle(&lowest) && seed++ < 50) {
        CHECK(trainer_run(COMMAND "--val-every 7", seed, TOKENS) == 0, "%s", log_tail());
        lowest = lowest_of("part/metrics.jsonl");
        remove_tree("part");
    }
    CHECK(is_in_the_middle(&lowest), "none in %d", seed);
}

static int count_checkpoints(void) {
    int count = -1;
    Error e = {0};
    CHECK_OK(archive_count("part", &count, &e), &e);
    return count;
}

static void check_best(const char *what, int kept) {
    Error e = {0};
    Lowest lowest = lowest_of("part/metrics.jsonl");
    CHECK(is_in_the_middle(&lowest), "%s: step %ld of %ld: a bad example", what, lowest.step, lowest.last);
    CHECK_OK(archive_verify(path_of("part/step_%08ld", lowest.step), NULL, &e), &e);
    CHECK(count_checkpoints() == kept + 1, "%s: %d are kept", what, count_checkpoints());
}

static void test_the_best_stays(void) {
    CHECK(trainer_run(COMMAND "--val-every 7 --keep-best", seed, TOKENS) == 0, "%s", log_tail());
    Lowest lowest = lowest_of("part/metrics.jsonl");
    check_best("a run", 2);
    CHECK(log_mentions(path_of("lowest validation loss %.4f after step %ld, in part/step_%08ld", lowest.loss,
                               lowest.step, lowest.step)),
          "%s", log_tail());
    int code = trainer_run("train_gpt2 --check part");
    CHECK(code == 0 && log_mentions(path_of("lowest validation loss %.4f after step %ld", lowest.loss, lowest.step)),
          "%s", log_tail());

    CHECK(trainer_run(COMMAND "--val-every 7 --fresh", seed, TOKENS) == 0, "%s", log_tail());
    CHECK(count_checkpoints() == 2, "not asked for, and %d are kept", count_checkpoints());
    CHECK(same_metrics("part/metrics.jsonl", "part.1/metrics.jsonl"), "it changes the numbers");
    remove_tree("part.1");
    remove_tree("part");
}

// In five parts, where what is the best is told from the checkpoint.
static void test_across_stops(void) {
    for (int part = 1; part <= PARTS; part++)
        CHECK(trainer_run(COMMAND "--val-every 7 --keep-best", seed, TOKENS / PARTS * part) == 0, "%s", log_tail());
    check_best("in parts", 2);

    // one that somebody has taken away is forgotten; and without the option the best goes like the others
    Lowest lowest = lowest_of("part/metrics.jsonl");
    remove_tree(path_of("part/step_%08ld", lowest.step));
    CHECK(trainer_run(COMMAND "--keep-best --val-every 0", seed, 1000) == 64 && log_mentions("--val-every above 0"),
          "%s", log_tail());
    CHECK(trainer_run(COMMAND "--val-every 7", seed, 1000) == 0 && count_checkpoints() == 2, "%d are kept: %s",
          count_checkpoints(), log_tail());
    long begun = newest_step("part");
    Error e = {0};
    CHECK(trainer_run(COMMAND "--val-every 7 --keep-best", seed, 1500) == 0, "%s", log_tail());
    lowest = lowest_after(begun, "part/metrics.jsonl");
    CHECK(lowest.step > begun, "no validation after step %ld", begun);
    CHECK_OK(archive_verify(path_of("part/step_%08ld", lowest.step), NULL, &e), &e);
    remove_tree("part");
}

// Between checkpoints, and where there are no others.
static void test_alone(void) {
    CHECK(trainer_run(RUN_COMMAND "--val-every 7 --train-tokens 900 --checkpoint-every 0 --keep-best", seed) == 0, "%s",
          log_tail());
    Lowest lowest = lowest_of("part/metrics.jsonl");
    Error e = {0};
    CHECK_OK(archive_verify(path_of("part/step_%08ld", lowest.step), NULL, &e), &e);
    remove_tree("part");
}

int main(void) {
    trainer_setup();
    RUN(test_an_example_is_found);
    RUN(test_the_best_stays);
    RUN(test_across_stops);
    RUN(test_alone);
    return trainer_end();
}
