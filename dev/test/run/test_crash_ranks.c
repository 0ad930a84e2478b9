// Checkpoints of several ranks under attack: kills and failures at any call of any rank, signals at random moments, a
// flipped bit in a rank's weights. GNS_LONG=1 (make test-crash): every call, hundreds of signals. mpirun starts this
// program itself:
//
//     test_crash_ranks rank train_gpt2 ...     one rank
#define COMMAND "--train-tokens 640 --checkpoint-every 3 --deadline 60 "
#define FAR     "--train-tokens 20000 --checkpoint-every 0 --deadline 60 "
#define TIMED   /* measures a step's cost */                                                                           \
    "train_gpt2 --train train.bin --vocab-size 256 --model d2 --heads 1 --channels 16 --seq-len 8 --threads 1 "        \
    "--micro-batch 4 --ramp gns --batch-min 4 --batch-max 16 --train-tokens 640 --deadline 60 "
#include "model/engine.h"
#include "crash.h"

enum { RANKS = FAULT_RANKS };

static int disturbed_step(Engine *engine, Error *e) {
    long step = ++faults->of[faults_rank].steps;
    if (faults->slow_step_us) usleep((useconds_t)faults->slow_step_us);
    if (faults->stray_rank == faults_rank && faults->stray_step == step && !faults->stray_late)
        *(uint32_t *)engine_buffer(engine, BUFFER_WEIGHT, faults->stray_element) ^=
            1 << 12; // a larger change than an update's rounding
    return cpu_engine.begin_step(engine, e);
}

// Flips a bit after the step's weights were gathered (stray_late).
static int disturbed_hash(Engine *engine, Range range, uint64_t *hash, Error *e) {
    static bool done;
    bool strays = faults->stray_late && faults->stray_rank == faults_rank && !done;
    TRY(cpu_engine.hash(engine, range, hash, e));
    if (!strays || faults->of[faults_rank].steps < faults->stray_step) return 0;
    done = true;
    *(uint32_t *)engine_buffer(engine, BUFFER_WEIGHT, faults->stray_element) ^= 1;
    return cpu_engine.hash(engine, range, hash, e);
}

static int failing_store(Engine *engine, StateKind kind, Range range, float *values, Error *e) {
    if (faults->stray_rank == faults_rank && !faults->stray_step) return FAIL(e, ERR_INTERNAL, NULL, "a planted fault");
    return cpu_engine.store(engine, kind, range, values, e);
}

static int failing_logits(Engine *engine, const uint16_t *tokens, int n, float *logits, Error *e) {
    if (faults->no_logits && faults->rank == faults_rank) return FAIL(e, ERR_INTERNAL, NULL, "a planted fault");
    for (int v = 0; v < 256; v++) logits[v] = NAN; // with --tensor they stay on all ranks but the first of a group
    return cpu_engine.logits(engine, tokens, n, logits, e);
}

static int disturbed_result(Engine *engine, StepResult *result, Error *e) {
    TRY(cpu_engine.result(engine, result, e));
    if (faults->not_finite) result->loss_sum = NAN;
    return 0;
}

int __real_gethostname(char *name, size_t bytes);
int __wrap_gethostname(char *name, size_t bytes) {
    if (!faults || !faults->apart) return __real_gethostname(name, bytes);
    snprintf(name, bytes, "node%d", faults_rank);
    return 0;
}

static int draw_zero(void) {
    static const int stages[] = {0, 1, 3};
    return stages[draw(3)];
}

static long calls_of_others[CALLS + 1]; // calls that the last rank makes

static void test_undisturbed(void) {
    run_undisturbed(40, 9);
    for (int r = 1; r < RANKS; r++) {
        CHECK(faults->of[r].steps == faults->of[0].steps, "rank %d: %ld steps", r, faults->of[r].steps);
        for (int call = CALL_RENAME; call <= CALL_MKDIR; call++)
            CHECK(faults->of[r].count[call] == 0, "rank %d also calls %s", r, call_names[call]);
        CHECK(faults->of[r].count[CALL_FSYNC] > 5 && faults->of[r].count[CALL_WRITE] > 10, "rank %d writes nothing", r);
        for (int i = 0; i <= CALLS; i++) calls_of_others[i] = faults->of[r].count[i];
    }
}

// ---- Killed ---------------------------------------------------------------------------------------------------------

static void test_killed_at_every_call(void) {
    for (int rank = 0; rank < RANKS; rank += RANKS - 1) {
        long calls = rank ? calls_of_others[CALLS] : calls_of_run[CALLS];
        killed_at_every_call(rank, calls, calls / 3, 128 + SIGKILL);
    }
}

static bool all_in_step(long step) {
    for (int r = 0; r < RANKS; r++)
        if (faults->of[r].steps < step) return false;
    return true;
}

// Starts a run and returns at a random moment, mostly during a step, since its 20 steps take longer than the wait.
static pid_t start_and_wait(void) {
    no_faults();
    faults->slow_step_us = 20000;
    pid_t child = trainer_begin(COMMAND "--out part");
    for (int i = 0; i < 60000 && !all_in_step(1); i++) usleep(1000);
    usleep(draw(300000));
    return child;
}

// ---- Calls that fail ------------------------------------------------------------------------------------------------

static void test_calls_that_fail(void) {
    static const int errors[] = {ENOSPC, EIO};
    long k = 0;
    for (int call = 0; call < CALL_ALLOC; call++) {
        Some some = some_calls(calls_of_run[call]);
        for (long n = some.first; n <= calls_of_run[call]; n += some.stride, k++)
            check_failure(k % 2 ? FAULT_ON : FAULT_ONCE, 0, (Call)call, n, errors[k / 2 % 2]);
        const long half = calls_of_others[call] / 2; // strike the later half
        some = some_calls(half);
        for (long n = some.first; n <= half; n += some.stride)
            check_failure(FAULT_ONCE, RANKS - 1, (Call)call, half + n, EIO);
    }
}

static void test_allocations_that_fail(void) {
    long most = calls_of_run[CALL_ALLOC], k = draw(RANKS);
    Some some = some_calls(most / 2 + 1);
    for (long n = some.first; n <= most; n += some.stride, k++)
        check_failure(k % 2 ? FAULT_ON : FAULT_ONCE, (int)(k % RANKS), CALL_ALLOC, n, ENOMEM);
}

// ---- Nothing good is lost -------------------------------------------------------------------------------------------

static void test_saves_before_unreadable_data(void) {
    char command[80];
    for (int i = 0; i < 2; i++) {
        snprintf(command, sizeof command, "--train-tokens 640 --checkpoint-every 0 --zero %d", draw_zero());
        check_unreadable_data((int)draw(RANKS), i ? "/val.bin" : "/train.bin", i ? 5 : 20, command);
    }
    begin_part();
    faults_plan(FAULT_ONCE, CALL_RENAME, 2, EIO); // of run.json, once the length is decided
    CHECK_RUN(trainer_run("--train-hours 0.001 --checkpoint-every 0 --out part"), ERR_WRITE, "part/run.json: ");
    CHECK(newest_step("part") > 0, "nothing was saved: %s", log_tail());
}

// A rank lacks memory for its copy, and its disk needs longer than a step's deadline: all ranks wait while it makes
// progress.
static void test_no_memory_for_a_copy(void) {
    begin_part();
    faults->rank = RANKS - 1;
    faults->refused = 3 * (64 << 10); // bytes of the copy
    faults->slow_us = 3000000;
    CHECK_RUN(trainer_run("--train-tokens 160 --checkpoint-every 3 --deadline 2 --out part"), 0, "!was not saved");
    CHECK(faults->struck == 1 && faults->slowed == 4, "%ld copies, %ld files", faults->struck, faults->slowed);
}

// A rank has no memory before the engines exist: all end with its error.
static void test_no_memory_at_the_start(void) {
    begin_part();
    faults->rank = RANKS - 1;
    faults->refused = 2 * 4 * (8 + 1) * sizeof(uint16_t); // bytes of "token rows": twice 4 rows of --seq-len + 1 tokens
    CHECK_RUN(trainer_run(COMMAND "--shard machine --out part"), ERR_MEMORY, "token rows needs ", "!MPI_");
    CHECK(faults->struck == 1, "%ld", (long)faults->struck);
}

// A rank has no memory to draw a sample: no rank waits for its tokens. The finished model is saved.
static void test_no_memory_for_a_sample(void) {
    begin_part();
    faults->rank = 1; // the broadcast of a token reaches rank 3 through it
    faults->refused = 256 * (sizeof(double) + sizeof(float)) + (1 + 1 + 5) * sizeof(uint16_t);
    CHECK_RUN(trainer_run("--train-tokens 160 --checkpoint-every 0 --deadline 5 --tokenizer bytes --sample-every 1000 "
                          "--prompt a --sample-tokens 5 --out part"),
              ERR_MEMORY, "a sample needs ", "!MPI_");
    CHECK(faults->struck == 1 && newest_step("part") > 0, "%ld", (long)faults->struck);
}

// A rank's engine fails in a sample. With --zero 3 other ranks wait for it in that pass: its error ends the job at
// once. Otherwise all ranks end with its error, and the finished model is saved.
static void test_no_logits(void) {
    for (int i = 0; i < 3; i++) {
        begin_part();
        faults->rank = 1;
        faults->no_logits = true;
        CHECK_RUN(trainer_run("train_gpt2 --train train.bin --vocab-size 256 --model d3 --heads 1 --channels 16 "
                              "--seq-len 8 --threads 1 --batch-tokens 128 --steps 5 --checkpoint-every 0 --deadline 5 "
                              "--sample-every %d --sample-tokens 5 --zero %d --out part",
                              i < 2 ? 1000 : 1, i ? 3 : 0),
                  ERR_INTERNAL, "error (rank 1): a planted fault");
        CHECK((newest_step("part") > 0) == (i == 0), "case %d: %ld", i, newest_step("part"));
    }
}

// While steps are timed, all ranks find a loss that is not finite. Weights are then in transfer.
static void test_not_finite_before_the_first_step(void) {
    begin_part();
    faults->not_finite = true;
    CHECK_RUN(trainer_run(TIMED "--zero %d --out part", 1 + 2 * (int)draw(2)), ERR_NONFINITE, "step 1, ", "loss nan",
              "!Assertion");
}

// Rank 0 reports another rank's internal error, whose source position is an address in that rank's process.
static void test_another_ranks_error(void) {
    begin_part();
    faults->stray_rank = RANKS - 1;
    CHECK_RUN(trainer_run("--train-tokens 160 --checkpoint-every 0 --zero 1 --deadline 60 --out part"), ERR_INTERNAL,
              path_of("rank %d: a planted fault", RANKS - 1));
}

// ---- Signals --------------------------------------------------------------------------------------------------------

// Sends a signal to one rank, or to all ranks at different moments. All ranks must save and stop after the same step.
// True if the signal came before the run's end.
static bool check_signal(int signal_number, bool to_all) {
    pid_t child = start_and_wait();
    for (int k = 0, first = (int)draw(RANKS); k < (to_all ? RANKS : 1); k++) {
        const pid_t rank = faults->of[(first + k) % RANKS].process;
        if (rank > 0) kill(rank, signal_number); // 0: the rank has not started in a minute
        usleep(draw(3000));
    }
    int code = trainer_wait(child);
    CHECK(code == 0 || code == ERR_STOPPED, "signal %d: exit code %d: %s", signal_number, code, log_tail());
    for (int r = 1; r < RANKS; r++)
        CHECK(faults->of[r].steps == faults->of[0].steps, "signal %d: rank %d made %ld steps, rank 0 %ld",
              signal_number, r, faults->of[r].steps, faults->of[0].steps);
    if (code == 0) {
        check_same_end("whole", "part", "after signals");
        remove_part();
        return false;
    }
    CHECK_RUN(code, ERR_STOPPED, path_of("saved in part/step_%08ld", newest_step("part")), "stopped (rank 0): ");
    return true;
}

static void test_signals(void) {
    static const int signals[] = {SIGUSR1, SIGTERM, SIGINT};
    int rounds = trainer.thorough ? 200 : 3, stopped = 0;
    remove_part();
    for (int i = 0; i < rounds || (!stopped && i < 30); i++) stopped += check_signal(signals[i % 3], i % 2);
    CHECK(stopped > 0, "no signal came in time");
    check_resumes("after signals");
}

// ---- What is read at a start ----------------------------------------------------------------------------------------

// Rank 0 finds the newest good checkpoint; all ranks resume from it.
static void test_rank_0_finds_the_checkpoint(void) {
    begin_part();
    CHECK_RUN(trainer_run(COMMAND "--out kept --keep 0"), 0);
    copy_tree("kept/step_00000003", "part/step_00000003");
    copy_tree("kept/step_00000006", "part/step_00000006");
    copy_file("kept/metrics.jsonl", "part/metrics.jsonl");
    CHECK(truncate("part/step_00000006/training/state.json", 5) == 0, "truncate");
    CHECK_RUN(trainer_run(COMMAND "--out part"), 0, "resuming from part/step_00000003", "Skipped");
    CHECK(access("part/step_00000006.damaged", F_OK) == 0, "the damaged one was removed");
    check_same_end("whole", "part", "past a damaged one");
    CHECK_RUN(trainer_run("train_gpt2 --eval-only --val val.bin --threads 1 --model part"), 0); // evaluates a run
    remove_tree(path_of("part/step_%08ld", newest_step("part")));
    trainer.ranks = 2;
    CHECK_RUN(trainer_run(COMMAND "--out part"), 0, "ranks: 4 then, 2 now\n");
    CHECK(newest_step("part") == newest_step("whole"), "%ld steps", newest_step("part"));
    trainer.ranks = RANKS;
}

// ---- Weights that differ between ranks ------------------------------------------------------------------------------

// One bit of a rank's weights flips before step 5. The run ends at the next comparison: at step 6's checkpoint, or at
// step 100 without checkpoints. It names the rank that differs and saves no more. A resume uses the last checkpoint.
static void check_stray(const Model *model, int ranks, bool apart, const char *who, bool saves, int zero) {
    const Tensor *t = &model->tensors[draw((uint32_t)model->tensor_count)];
    trainer.ranks = ranks;
    begin_part();
    faults->apart = apart;
    faults->stray_rank = 1;
    faults->stray_step = 5;
    faults->stray_element = t->offset + draw((uint32_t)t->count);
    faults->stray_late = zero > 0;
    CHECK_RUN(trainer_run("%s--out part --zero %d", saves ? COMMAND : FAR, zero), ERR_RANK,
              path_of("(rank %s): step %d: this rank has other weights than rank 0", who, saves ? 6 : 100));
    CHECK(newest_step("part") == (saves ? 3 : -1), "the newest checkpoint is %ld", newest_step("part"));
    check_nothing_lost("a stray bit");
    if (ranks == RANKS && saves) check_resumes("a stray bit");
    trainer.ranks = RANKS;
}

static void test_stray_weights(void) {
    const ModelConfig config = {.layers = 1, .heads = 1, .channels = 16, .vocab = 256, .context = 8}; // of trainer_run
    Model model;
    Error e;
    CHECK_OK(model_create(&model, &config, &e), &e);
    check_stray(&model, 4, false, "1", false, 3);
    check_stray(&model, 4, true, "1 on node1", true, 0);
    check_stray(&model, 2, false, "1", false, 0);
    check_stray(&model, 2, true, "1 on node1", true, 3);
    model_destroy(&model);
}

// ---- A model cut over ranks (--tensor) ------------------------------------------------------------------------------

#define CUT                                                                                                            \
    "train_gpt2 --train train.bin --vocab-size 256 --model d1 --layers 1 --heads 2 --channels 16 --seq-len 8 "         \
    "--threads 1 --micro-batch 4 --batch-tokens 128 --steps 9 --deadline 60 --zero 0 --tensor 2 "

// A bit of a rank's weights flips before step 2. Ranks with equal parts compare all weights; ranks of a group compare
// the weights that both hold.
static void check_cut_stray(int ranks, int stray, TensorKind kind, const char *who) {
    const ModelConfig config = {.layers = 1, .heads = 2, .channels = 16, .vocab = 256, .context = 8};
    Model model;
    Error e;
    CHECK_OK(model_create_local(&model, &config, stray % 2, 2, &e), &e);
    begin_part();
    faults->stray_rank = stray;
    faults->stray_step = 2;
    faults->stray_element = model_tensor(&model, kind, 0)->offset + 3;
    const char *line = path_of("step 3: this rank has other weights than rank %s", who);
    trainer.ranks = ranks;
    CHECK_RUN(trainer_run(CUT "--checkpoint-every 3 --out part"), ERR_RANK, line);
    trainer.ranks = RANKS;
    model_destroy(&model);
}

// A run that saves only at its end needs room for a single checkpoint.
static void check_cut_room(void) {
    struct stat model = {0}, state = {0};
    no_faults();
    CHECK_RUN(trainer_run(CUT "--checkpoint-every 0 --out cut"), 0);
    CHECK(stat("cut/step_00000009/model.safetensors", &model) == 0 &&
              stat("cut/step_00000009/training/optimizer.safetensors", &state) == 0,
          "no checkpoint");
    begin_part();
    faults->free_kb = (long)(model.st_size + state.st_size + (64 << 10)) * 3 / 2 / 1024; // 64 KiB for other files
    CHECK_RUN(trainer_run(CUT "--checkpoint-every 0 --out part"), 0);
    CHECK_RUN(trainer_run(CUT "--checkpoint-every 3 --fresh --out part"), ERR_WRITE, "needs room for 2 checkpoints");
    no_faults();
}

static void test_a_cut_model(void) {
    check_cut_room();
    check_cut_stray(4, 1, QKV_W, "1");
    check_cut_stray(2, 1, PROJ_B, "0");

    begin_part();
    CHECK_RUN(trainer_run("train_gpt2 --train train.bin --vocab-size 256 --model d2 --heads 2 --channels 16 --seq-len 8 "
                          "--threads 1 --batch-tokens 128 --steps 2 --checkpoint-every 0 --sample-every 1 "
                          "--sample-tokens 5 --tensor 2 --out part"),
              0, "sample after step 2:");
}

int main(int argc, char **argv) {
    if (argc > 2 && strcmp(argv[1], "rank") == 0) {
        faults_join();
        if (faults->apart) setenv("OMPI_COMM_WORLD_LOCAL_SIZE", "1", 1);
        EngineApi engine = cpu_engine;
        engine.begin_step = disturbed_step;
        engine.hash = disturbed_hash;
        engine.store = failing_store;
        engine.result = disturbed_result;
        engine.logits = failing_logits;
        return program_main(argc - 2, argv + 2, &engine, TRANSPORT_OR_NULL(mpi_transport));
    }
    trainer_setup();
    faults_setup();
    random_begin();
    trainer.ranks = trainer.batch_min = RANKS;
    if (system("command -v mpirun > /dev/null") != 0 ||
        (trainer_run("train_gpt2 --version") != 0 && log_mentions("built without MPI"))) {
        printf("SKIP test_crash_ranks: no Open MPI here, or a build without it\n");
        return trainer_end();
    }
    RUN(test_undisturbed, test_killed_at_every_call, test_calls_that_fail, test_allocations_that_fail,
        test_saves_before_unreadable_data, test_no_memory_for_a_copy, test_no_memory_at_the_start,
        test_no_memory_for_a_sample, test_no_logits, test_not_finite_before_the_first_step, test_another_ranks_error,
        test_signals, test_rank_0_finds_the_checkpoint, test_stray_weights, test_a_cut_model);
    return trainer_end();
}
