// bench_save: checkpoints of a whole training state through the saver, on whichever engine it is linked with, against
// what the disk can do: dd conv=fsync of as many bytes. Saves and dd take turns; figures are medians, with the range.
//
//     bench_save [directory ($TMPDIR) [model (gpt2-124M) [rounds (7) [micro-batch (4) [seq-len (64)]]]]]
//
// "save" is from the snapshot to the rename of the finished, synced directory, with nothing else going on. "stall" is
// how long training stands still for another save, beside a step of one micro-step of the size given: the host, that
// is, before the update, until the snapshot is taken. A device may have work left meanwhile, so it is also said by how
// much that step is longer than steps alone. (Afterwards every save is read back and verified, behind training too.)
#define _DEFAULT_SOURCE // mkdtemp
#include "../../llmc/saver.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { ROUNDS_MAX = 100 };

typedef struct {
    char out[ARCHIVE_PATH / 2];
    Model model;
    Comm comm;
    Parallel parallel;
    Engine *engine;
    Saver *saver;
    int micro_batch, seq_len;
    uint16_t *tokens;     // (micro_batch, seq_len + 1)
    StepResult result;    // of a step
    int64_t steps, saves; // so far
    Metrics *metrics;
    double save[ROUNDS_MAX], stall[ROUNDS_MAX], dd[ROUNDS_MAX], ratio[ROUNDS_MAX], share[ROUNDS_MAX];
    double snapshot[ROUNDS_MAX], longer[ROUNDS_MAX], longer_share[ROUNDS_MAX];
} Bench;

static int by_value(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static int setup(Bench *b, const char *directory, const char *name, Error *e) {
    const ParallelConfig alone = {.zero = ZERO_0};
    ModelConfig shape = {.vocab = 50257, .context = 1024};
    if (!model_preset(&shape, name)) return FAIL(e, ERR_USAGE, model_preset_help, "no model is called %s", name);
    snprintf(b->out, sizeof b->out, "%s/bench_save_XXXXXX", directory);
    if (!mkdtemp(b->out)) return FAIL(e, ERR_WRITE, "name another directory", "%s: cannot create", b->out);
    TRY(metrics_open(&b->metrics, b->out, e));
    TRY(metrics_begin(b->metrics, 0, 0, e));
    TRY(model_create(&b->model, &shape, e));
    EngineConfig config = {.model = &b->model, .micro_batch = b->micro_batch, .seq_len = b->seq_len};
    TRY(memory_alloc_zero((void **)&b->tokens, sizeof *b->tokens * (size_t)(b->micro_batch * (b->seq_len + 1)),
                          "tokens", e));
    size_t tensors = (size_t)b->model.tensor_count;
    TRY(memory_alloc((void **)&b->result.grad_sq, sizeof(double) * tensors, "results", e));
    TRY(memory_alloc((void **)&b->result.example_sq, sizeof(double) * tensors, "results", e));
    b->comm = (Comm){.ranks = 1, .local_ranks = 1};
    TRY(parallel_create(&b->parallel, &b->comm, &b->model, &alone, e));
    TRY(engine_create(&b->engine, &config, e));
    TRY(parallel_start(&b->parallel, b->engine, WIRE_FP32, e));
    SaverConfig saver = {.out = b->out, .engine = b->engine, .model = &b->model, .keep = 1, .metrics = b->metrics};
    TRY(saver_create(&b->saver, &saver, e));
    return saver_prepare(b->saver, e);
}

static void destroy(Bench *b) {
    Error ignored;
    saver_destroy(b->saver);
    parallel_destroy(&b->parallel);
    engine_destroy(b->engine);
    model_destroy(&b->model);
    memory_free(b->tokens);
    memory_free(b->result.grad_sq);
    memory_free(b->result.example_sq);
    metrics_close(b->metrics, &ignored);
    directory_remove(b->out, &ignored);
}

// A training step as step.c has it. *seconds: how long it took.
static int train_step(Bench *b, double *seconds, Error *e) {
    UpdateConfig update = {.lr = 1e-4,
                           .beta1 = 0.9,
                           .beta2 = 0.95,
                           .eps = 1e-8,
                           .weight_decay = 0.1,
                           .grad_clip = 1,
                           .step = ++b->steps,
                           .batch = b->micro_batch};
    double start = clock_seconds();
    TRY(parallel_begin_step(&b->parallel, false, e));
    TRY(parallel_micro_step(&b->parallel, b->tokens, b->micro_batch, GNS_OFF, true, e));
    TRY(parallel_norms(&b->parallel, e));
    saver_settle(b->saver);
    TRY(parallel_update(&b->parallel, &update, e));
    TRY(engine_result(b->engine, &b->result, e));
    *seconds = clock_seconds() - start;
    return 0;
}

static int start_save(Bench *b, Error *e) {
    char *state = strdup("{}\n");
    return saver_start(b->saver, &b->parallel, ++b->saves, state, strlen(state), e);
}

static int end_save(Bench *b, SaveReport *report, Error *e) {
    saver_collect(b->saver, true, report);
    return report->error.code ? (*e = report->error, e->code) : 0;
}

static int save_alone(Bench *b, SaveReport *report, Error *e) {
    TRY(start_save(b, e));
    return end_save(b, report, e);
}

// *longer: seconds that the step beside the snapshot takes more than one alone.
static int save_beside_step(Bench *b, SaveReport *report, double *longer, Error *e) {
    enum { ALONE = 3 };
    double alone[ALONE], start, beside;
    for (int i = 0; i < ALONE; i++) TRY(train_step(b, &alone[i], e));
    start = clock_seconds();
    TRY(start_save(b, e));
    TRY(train_step(b, &beside, e));
    beside = clock_seconds() - start;
    qsort(alone, ALONE, sizeof *alone, by_value);
    *longer = beside - alone[ALONE / 2];
    return end_save(b, report, e);
}

static int dd_once(Bench *b, int round, Error *e) {
    char command[ARCHIVE_PATH + 200], path[ARCHIVE_PATH];
    uint64_t bytes = (b->model.parameters + 2 * b->model.flat_count) * sizeof(float);
    TRY(path_join(path, sizeof path, b->out, "dd", e));
    snprintf(command, sizeof command,
             "dd if=/dev/zero of='%s' bs=1M iflag=count_bytes count=%llu conv=fsync 2> /dev/null", path,
             (unsigned long long)bytes);
    double start = clock_seconds();
    if (system(command) != 0) return FAIL(e, ERR_WRITE, "is there room?", "%s: dd failed", path);
    b->dd[round] = clock_seconds() - start;
    unlink(path);
    return 0;
}

static void print_figure(const char *what, double *values, int n, double scale, const char *unit) {
    qsort(values, (size_t)n, sizeof *values, by_value);
    printf("%-28s %8.3f %s (%.3f to %.3f)\n", what, scale * values[n / 2], unit, scale * values[0],
           scale * values[n - 1]);
}

static int bench(Bench *b, int rounds, Error *e) {
    char line[256];
    SaveReport report;
    engine_describe(b->engine, line, sizeof line);
    printf("%s: %.2f GB a checkpoint, in %s\n", line, 1e-9 * (double)saver_copy_bytes(&b->model), b->out);
    // The first ones wait for fresh memory: the copy's, and the system's for as many files as are there at once.
    for (int i = 0; i < 2; i++) TRY(save_beside_step(b, &report, &b->longer[0], e));
    TRY(dd_once(b, 0, e));
    for (int r = 0; r < rounds; r++) {
        if (r % 2) TRY(dd_once(b, r, e));
        TRY(save_alone(b, &report, e));
        if (r % 2 == 0) TRY(dd_once(b, r, e));
        b->save[r] = report.seconds;
        b->ratio[r] = b->save[r] / b->dd[r];
        TRY(save_beside_step(b, &report, &b->longer[r], e));
        b->snapshot[r] = report.snapshot_seconds;
        b->stall[r] = report.stall_seconds;
        b->share[r] = b->stall[r] / report.seconds;
        b->longer_share[r] = b->longer[r] / report.seconds;
        printf("  save %.2f s, dd %.2f s: %.2f; beside a step: save %.2f s, snapshot %.4f s, stall %.4f s, step longer "
               "by %.4f s\n",
               b->save[r], b->dd[r], b->ratio[r], report.seconds, b->snapshot[r], b->stall[r], b->longer[r]);
        fflush(stdout);
    }
    print_figure("save", b->save, rounds, 1, "s");
    print_figure("dd conv=fsync", b->dd, rounds, 1, "s");
    print_figure("save / dd, pair by pair", b->ratio, rounds, 1, " ");
    print_figure("snapshot beside a step", b->snapshot, rounds, 1e3, "ms");
    print_figure("stall", b->stall, rounds, 1e3, "ms");
    print_figure("stall, share of the save", b->share, rounds, 100, "%");
    print_figure("that step longer by", b->longer, rounds, 1e3, "ms");
    print_figure("that, share of the save", b->longer_share, rounds, 100, "%");
    return 0;
}

int main(int argc, char **argv) {
    static Bench b;
    Error e = {0};
    const char *base = getenv("TMPDIR") ? getenv("TMPDIR") : "/tmp";
    int rounds = argc > 3 ? atoi(argv[3]) : 7;
    b.micro_batch = argc > 4 ? atoi(argv[4]) : 4;
    b.seq_len = argc > 5 ? atoi(argv[5]) : 64;
    if (b.micro_batch < 1 || b.seq_len < 1 || b.seq_len > 1024) FAIL(&e, ERR_USAGE, "1 to 1024", "no such micro-batch");
    if (rounds < 1 || rounds > ROUNDS_MAX) FAIL(&e, ERR_USAGE, "1 to 100", "%d rounds", rounds);
    int code = e.code ? e.code : setup(&b, argc > 1 ? argv[1] : base, argc > 2 ? argv[2] : "gpt2-124M", &e);
    if (!code) code = bench(&b, rounds, &e);
    destroy(&b);
    if (code) error_print(&e, 0, 1);
    return code;
}
