// The CPU engine's memory: compares its plan with a count by hand, tensor by tensor, and its allocations with the plan.
// --recompute, --sample-only and --eval-only must get the smaller engine. The Makefile wraps engine_create and
// posix_memalign, the source of all memory.
#include "cpu/engine_cpu.h"
#include "cpu/layers.h"
#include "../trainer.h"

// Shapes odd and even, one of a single block, one of a single row, and one whose head goes in chunks of 256 rows: 64
// MiB over 65536 logits.
static const struct {
    ModelConfig model; // L, NH, C, V, context
    int rows, seq_len;
    size_t head_rows; // whose logits are there at a time
} shapes[] = {
    {{3, 2, 24, 101, 19}, 3, 19, 57}, {{4, 4, 64, 256, 32}, 5, 32, 160},    {{1, 1, 16, 256, 8}, 1, 7, 7},
    {{3, 2, 20, 100, 9}, 1, 9, 9},    {{2, 1, 8, 65536, 150}, 2, 150, 256},
};
enum { SHAPES = sizeof shapes / sizeof *shapes };

static EngineConfig config_of(int shape, const Model *model) {
    return (EngineConfig){
        .model = model, .micro_batch = shapes[shape].rows, .seq_len = shapes[shape].seq_len, .threads = 2};
}

static void make_model(int shape, Model *model) {
    Error e = {0};
    CHECK_OK(model_create(model, &shapes[shape].model, &e), &e);
}

// ---- By hand. Every array begins at a multiple of 64 bytes. ---------------------------------------------------------

static size_t whole(size_t bytes) { return (bytes + 63) / 64 * 64; }
static size_t of_floats(size_t n) { return whole(4 * n); }
static size_t of_doubles(size_t n) { return whole(8 * n); }

typedef struct {
    size_t N, C, L, x, gelu; // x, gelu: bytes of a block's
    size_t inside;           // of what else a block has
} Count;

static Count count_of(int shape) {
    const ModelConfig *m = &shapes[shape].model;
    size_t N = (size_t)shapes[shape].rows * (size_t)shapes[shape].seq_len, C = (size_t)m->channels;
    size_t statistics = 4 * of_floats(N) + of_floats(N * (size_t)m->heads);            // two LayerNorms', attention's
    size_t narrow = 4 * of_floats(N * C);                                              // ln1, attention, x_mid, ln2
    size_t inside = statistics + narrow + of_floats(N * 3 * C) + of_floats(N * 4 * C); // qkv, fc
    return (Count){N, C, (size_t)m->layers, of_floats(N * C), of_floats(N * 4 * C), inside};
}

// Behind the blocks: x_final, lnf, its mean and deviation, logits, losses, targets, a text's tokens. And the table of
// the blocks.
static size_t around_blocks(int shape) {
    Count n = count_of(shape);
    size_t vocab_padded = ((size_t)shapes[shape].model.vocab + 127) / 128 * 128;
    return 2 * of_floats(n.N * n.C) + 3 * of_floats(n.N) + of_floats(shapes[shape].head_rows * vocab_padded) +
           whole(2 * n.N) + whole(2 * (size_t)shapes[shape].seq_len) + whole(n.L * sizeof(Block));
}

// The backward pass's own: dx, dy, dwide; LayerNorm's scratch and squares; three norms a tensor.
static size_t of_backward(int shape, const Model *model) {
    Count n = count_of(shape);
    int B = shapes[shape].rows, T = shapes[shape].seq_len;
    return 2 * of_floats(n.N * n.C) + of_floats(n.N * 4 * n.C) + of_floats(layernorm_scratch(B, T, (int)n.C)) +
           of_doubles(2 * (size_t)B) + 3 * of_doubles((size_t)model->tensor_count);
}

// Bytes of a line of the plan, 0 where it has none of that name. The lines must make the sum.
static size_t planned(const EngineConfig *config, const char *what) {
    MemoryPlan plan;
    size_t bytes = 0, sum = 0;
    cpu_engine.plan_memory(config, &plan);
    for (int i = 0; i < plan.count; i++) {
        sum += plan.item[i].bytes;
        if (strcmp(plan.item[i].what, what) == 0) bytes += plan.item[i].bytes;
    }
    CHECK(sum == plan.total, "the lines make %zu, the sum is %zu", sum, plan.total);
    return bytes;
}

static size_t planned_in_all(const EngineConfig *config) {
    MemoryPlan plan;
    cpu_engine.plan_memory(config, &plan);
    return plan.total;
}

#define CHECK_BYTES(got, want)                                                                                         \
    do {                                                                                                               \
        size_t got_ = (got), want_ = (want);                                                                           \
        CHECK(got_ == want_, "shape %d, --recompute %s: %zu bytes, by hand %zu", i, recompute_names[c.recompute],      \
              got_, want_);                                                                                            \
    } while (0)

// What is recomputed is kept of one block alone; what every block keeps is its input. Exact norms take the largest
// gradient and rows of the head's; document masks positions; dropout's masks are not kept; smoothing keeps losses
// without it too. Without training: the weights, and of all blocks one's memory, whatever would be recomputed or
// measured; but for one row each block's own qkv.
static void test_plans(void) {
    for (int i = 0; i < SHAPES; i++) {
        Model model;
        make_model(i, &model);
        EngineConfig c = config_of(i, &model);
        Count n = count_of(i);
        size_t always = around_blocks(i) + of_backward(i, &model) + n.L * n.x, flat = of_floats(model.flat_count);
        size_t exact = of_floats(model_tensor_largest(&model)) + of_floats(4 * n.C) + of_floats(n.N * n.C);
        size_t own = shapes[i].rows == 1 ? (n.L - 1) * of_floats(n.N * 3 * n.C) : 0;
        const size_t kept[][2] = {{n.L, n.L}, {n.L, 1}, {1, 1}}; // blocks' insides, GELU outputs
        size_t workspaces = planned(&c, "kernel workspaces");
        CHECK(workspaces > 0, "no workspaces");
        for (int mode = 0; mode < 6; mode++) {
            c = config_of(i, &model);
            c.recompute = (Recompute)(mode % 3), c.gns = mode < 3 ? GNS_OFF : GNS_EXACT;
            size_t activations = always + kept[mode % 3][0] * n.inside + kept[mode % 3][1] * n.gelu;
            size_t all = activations + 4 * flat + workspaces + (mode < 3 ? 0 : exact);
            CHECK_BYTES(planned(&c, "activations"), activations);
            CHECK_BYTES(planned(&c, "parameters"), flat);
            CHECK_BYTES(planned(&c, "gradients"), flat);
            CHECK_BYTES(planned(&c, "AdamW moments"), 2 * flat);
            CHECK_BYTES(planned(&c, "exact per-example norms"), mode < 3 ? 0 : exact);
            CHECK_BYTES(planned_in_all(&c), all);
            c.document_mask = true, c.dropout.below = 1;
            CHECK_BYTES(planned_in_all(&c), all + whole(2 * n.N));
            c.document_mask = false, c.dropout.below = 0, c.label_smoothing = 0.1f;
            CHECK_BYTES(planned(&c, "activations"), activations + of_floats(n.N));
            c.label_smoothing = 0, c.inference = true;
            activations = around_blocks(i) + n.x + n.inside + n.gelu + own;
            CHECK_BYTES(planned(&c, "activations"), activations);
            CHECK_BYTES(planned(&c, "parameters"), flat);
            CHECK_BYTES(planned_in_all(&c), activations + flat + workspaces);
        }
        model_destroy(&model);
    }
}

// ---- What is taken --------------------------------------------------------------------------------------------------

enum { PIECES = 32 };
static struct {
    bool on;
    int count;
    size_t bytes[PIECES];
} taken;

int __real_posix_memalign(void **out, size_t alignment, size_t bytes);
int __wrap_posix_memalign(void **out, size_t alignment, size_t bytes);
int __wrap_posix_memalign(void **out, size_t alignment, size_t bytes) {
    if (taken.on && taken.count < PIECES) taken.bytes[taken.count++] = round_up(bytes, 64);
    return __real_posix_memalign(out, alignment, bytes);
}

// The plan in one piece, and the engine itself in another.
static void check_taken(const EngineConfig *config, const char *what) {
    Engine *engine = NULL;
    MemoryPlan plan;
    Error e = {0};
    size_t sum = 0;
    taken.on = true, taken.count = 0;
    CHECK_OK(engine_create(&cpu_engine, &engine, config, &e), &e);
    taken.on = false;
    cpu_engine.plan_memory(config, &plan);
    for (int i = 0; i < plan.count; i++) sum += plan.item[i].bytes;
    CHECK(sum == plan.total, "%s: items of %zu bytes, %zu in all", what, sum, plan.total);
    CHECK(taken.count == 2 && taken.bytes[0] == whole(sizeof(Engine)) && taken.bytes[1] == plan.total,
          "%s: %d pieces, the last of %zu bytes, the plan says %zu", what, taken.count,
          taken.bytes[taken.count > 0 ? taken.count - 1 : 0], plan.total);
    engine_destroy(engine);
}

static void test_taken_as_planned(void) {
    for (int i = 0; i < SHAPES; i++) {
        Model model;
        make_model(i, &model);
        for (int mode = 0; mode < 12; mode++) {
            EngineConfig c = config_of(i, &model);
            c.recompute = (Recompute)(mode % 3), c.gns = mode / 3 % 2 ? GNS_EXACT : GNS_LN, c.inference = mode >= 6;
            check_taken(&c, path_of("shape %d, mode %d", i, mode));
        }
        model_destroy(&model);
    }
}

// ---- What the program asks for. Its engines say so in the log. ------------------------------------------------------

static int create_and_tell(Engine **out, const EngineConfig *config, Error *e) {
    printf("an engine of %zu bytes\n", planned_in_all(config));
    return cpu_engine.create(out, config, e);
}

#define SHAPE                                                                                                          \
    "train_gpt2 --model d1 --layers 3 --heads 2 --channels 32 --vocab-size 256 --seq-len 16 --threads 2 "              \
    "--train train.bin --micro-batch 4 --steps 1 --lr 1e-3 --fresh "

static void check_asked(const EngineConfig *config, int rows, const char *what) {
    EngineConfig c = *config;
    c.micro_batch = rows;
    CHECK(log_mentions(path_of("an engine of %zu bytes\n", planned_in_all(&c))), "%s: not the engine of %zu bytes: %s",
          what, planned_in_all(&c), log_tail());
}

static void test_asked_for(void) {
    const ModelConfig shape = {3, 2, 32, 256, 16};
    Model model;
    Error e = {0};
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
    RUN(test_plans, test_taken_as_planned, test_asked_for);
    return trainer_end();
}
