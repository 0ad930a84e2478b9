// The CPU engine's memory: the plan shows what --recompute saves. The program makes the smaller engine for --recompute,
// --sample-only and --eval-only. test_program and test_ranks compare plans with resident memory.
#include "cpu/engine_cpu.h"
#include "cpu/layers.h"
#include "../trainer.h"

static Error e;

// Shapes: odd and even; with one block; with one row; with a head in chunks of 256 rows (64 MiB at 65536 logits a row).
static const struct {
    ModelConfig model; // L, NH, C, V, context
    int rows, seq_len;
} shapes[] = {{{3, 2, 24, 101, 19}, 3, 19},
              {{4, 4, 64, 256, 32}, 5, 32},
              {{1, 1, 16, 256, 8}, 1, 7},
              {{3, 2, 20, 100, 9}, 1, 9},
              {{2, 1, 8, 65536, 150}, 2, 150}};
enum { SHAPES = sizeof shapes / sizeof *shapes };

static EngineConfig config_of(int shape, const Model *model) {
    return (EngineConfig){
        .model = model, .micro_batch = shapes[shape].rows, .seq_len = shapes[shape].seq_len, .threads = 2};
}

// Returns the bytes of the plan's line `what`, or 0 without such a line; NULL: all lines. Checks that the lines add up.
static size_t planned(const EngineConfig *config, const char *what) {
    MemoryPlan plan;
    size_t bytes = 0, sum = 0;
    cpu_engine.plan_memory(config, &plan);
    for (int i = 0; i < plan.count; i++) {
        sum += plan.item[i].bytes;
        if (!what || strcmp(plan.item[i].what, what) == 0) bytes += plan.item[i].bytes;
    }
    CHECK(sum == plan.total, "the lines make %zu, the sum is %zu", sum, plan.total);
    return bytes;
}

// Returns the bytes of n floats in the engine's memory, in which arrays begin at multiples of 64 bytes.
static size_t of_floats(size_t n) { return round_up(4 * n, 64); }

// Blocks share the memory of recomputed values: GELU's output, or all but the block's input (11 C values per token,
// and statistics). Without training an engine needs the weights and one block's memory, in every mode.
static void test_plans(void) {
    for (int i = 0; i < SHAPES; i++) {
        Model model;
        CHECK_OK(model_create(&model, &shapes[i].model, &e), &e);
        EngineConfig c = config_of(i, &model);
        size_t N = (size_t)c.micro_batch * (size_t)c.seq_len, C = (size_t)model.config.channels;
        size_t others = (size_t)model.config.layers - 1, flat = of_floats(model.flat_count), all[3], inference[2];
        for (int way = 0; way < 3; way++) {
            c.recompute = (Recompute)way;
            all[way] = planned(&c, NULL);
        }
        CHECK(all[0] - all[1] == others * of_floats(N * 4 * C), "shape %d: gelu saves %zu", i, all[0] - all[1]);
        CHECK(all[1] - all[2] >= others * of_floats(N * 11 * C), "shape %d: block saves %zu", i, all[1] - all[2]);
        CHECK(planned(&c, "parameters") == flat && planned(&c, "gradients") == flat, "shape %d", i);
        CHECK(planned(&c, "AdamW moments") == 2 * flat, "shape %d: moments", i);
        for (int way = 0; way < 2; way++) {
            c = config_of(i, &model);
            c.inference = true;
            if (way) c.recompute = RECOMPUTE_BLOCK, c.gns = GNS_EXACT;
            inference[way] = planned(&c, NULL);
        }
        CHECK(inference[0] == inference[1] && inference[0] < all[2] - 3 * flat, "shape %d: inference %zu, %zu", i,
              inference[0], inference[1]);
        model_destroy(&model);
    }
}

// ---- The program's engines print their configuration ----------------------------------------------------------------

static int create_and_tell(Engine **out, const EngineConfig *config, Error *e) {
    printf("an engine of %zu bytes\n", planned(config, NULL));
    return cpu_engine.create(out, config, e);
}

#define SHAPE                                                                                                          \
    "train_gpt2 --model d1 --layers 3 --heads 2 --channels 32 --vocab-size 256 --seq-len 16 --threads 2 "              \
    "--train train.bin --micro-batch 4 --steps 1 --lr 1e-3 --fresh "

static void check_asked(const EngineConfig *config, int rows, const char *what) {
    EngineConfig c = *config;
    c.micro_batch = rows;
    CHECK(log_mentions(path_of("an engine of %zu bytes\n", planned(&c, NULL))), "%s: not the engine of %zu bytes: %s",
          what, planned(&c, NULL), log_tail());
}

static void test_asked_for(void) {
    const ModelConfig shape = {3, 2, 32, 256, 16};
    Model model;
    CHECK_OK(model_create(&model, &shape, &e), &e);
    EngineConfig c = {.model = &model, .seq_len = 16, .threads = 2, .gns = GNS_LN};
    for (int recompute = RECOMPUTE_NONE; recompute <= RECOMPUTE_BLOCK; recompute++) {
        const char *option = path_of("--recompute %s", recompute_names[recompute]);
        c.recompute = (Recompute)recompute;
        CHECK(trainer_run(SHAPE "--out run %s", option) == 0, "%s", log_tail());
        check_asked(&c, 4, option);
    }
    CHECK(trainer_run(SHAPE "--out exact --gns-exact-every 2") == 0, "%s", log_tail());
    c.recompute = RECOMPUTE_NONE, c.gns = GNS_EXACT;
    check_asked(&c, 4, "--gns-exact-every");
    c.inference = true;
#define LOOK "train_gpt2 --model run/step_00000001 --threads 2 "
    CHECK(trainer_run(LOOK "--sample-only --sample-tokens 3") == 0, "%s", log_tail());
    check_asked(&c, 1, "--sample-only");
    CHECK(trainer_run(LOOK "--eval-only --val val.bin --micro-batch 3") == 0, "%s", log_tail());
    check_asked(&c, 3, "--eval-only");
    model_destroy(&model);
}

int main(void) {
    trainer_setup();
    trainer.engine.create = create_and_tell;
    RUN(test_plans, test_asked_for);
    return trainer_end();
}
