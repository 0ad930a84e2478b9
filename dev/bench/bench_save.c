// bench_save: checkpoints of a whole training state through the saver, on whichever engine it is linked with, against
// what the disk can do: dd conv=fsync of as many bytes. Saves and dd take turns; figures are medians, with the range.
//
//     bench_save [directory ($TMPDIR) [model (gpt2-124M) [rounds (7) [micro-batch (4) [seq-len (64)]]]]]
//
// "save" is from the snapshot to the rename of the finished, synced directory, with nothing else going on. "stall" is how
// long training stands still for another save, beside a micro-step of the size given, whose update waits for the
// snapshot. (Afterwards every save is read back and verified, behind training too.)
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
    uint16_t *tokens; // (micro_batch, seq_len + 1)
    int64_t saves;    // so far
    Metrics *metrics;
    double save[ROUNDS_MAX], stall[ROUNDS_MAX], dd[ROUNDS_MAX], ratio[ROUNDS_MAX], share[ROUNDS_MAX];
} Bench;

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
    metrics_close(b->metrics, &ignored);
    directory_remove(b->out, &ignored);
}

// beside: a micro-step goes on meanwhile, whose update would wait for the snapshot.
static int save_once(Bench *b, bool beside, SaveReport *report, Error *e) {
    char *state = strdup("{}\n");
    TRY(saver_start(b->saver, &b->parallel, ++b->saves, state, strlen(state), e));
    if (beside) {
        TRY(engine_begin_step(b->engine, e));
        TRY(engine_micro_step(b->engine, b->tokens, b->micro_batch, GNS_OFF, e));
        saver_settle(b->saver);
    }
    saver_collect(b->saver, true, report);
    if (report->error.code) return *e = report->error, e->code;
    return 0;
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

static int by_value(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
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
    for (int i = 0; i < 2; i++) TRY(save_once(b, true, &report, e));
    TRY(dd_once(b, 0, e));
    for (int r = 0; r < rounds; r++) {
        if (r % 2) TRY(dd_once(b, r, e));
        TRY(save_once(b, false, &report, e));
        if (r % 2 == 0) TRY(dd_once(b, r, e));
        b->save[r] = report.seconds;
        b->ratio[r] = b->save[r] / b->dd[r];
        TRY(save_once(b, true, &report, e));
        b->stall[r] = report.stall_seconds;
        b->share[r] = b->stall[r] / report.seconds;
        printf("  save %.2f s, dd %.2f s: %.2f; beside a step: save %.2f s, stall %.4f s, %.2f%%\n", b->save[r],
               b->dd[r], b->ratio[r], report.seconds, b->stall[r], 100 * b->share[r]);
        fflush(stdout);
    }
    print_figure("save", b->save, rounds, 1, "s");
    print_figure("dd conv=fsync", b->dd, rounds, 1, "s");
    print_figure("save / dd, pair by pair", b->ratio, rounds, 1, " ");
    print_figure("stall", b->stall, rounds, 1e3, "ms");
    print_figure("stall, share of the save", b->share, rounds, 100, "%");
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
