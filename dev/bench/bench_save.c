// bench_save: compares a save of a whole training state with dd conv=fsync of as many bytes. The engine is the one that
// the program is linked with. Also measures dd without the page cache (oflag=direct), and the shortest C code, which
// writes one buffer again and again, then calls fsync. All contestants run in every round, forwards in one, backwards
// in the next. Each round begins with another contestant, because the page cache's cost depends on when its memory was
// last used. A save removes the previous checkpoint; the others remove their files at once. Figures are medians, with
// quartiles.
//
//     bench_save [directory ($TMPDIR) [model (gpt2-124M) [rounds (15) [micro-batch (4) [seq-len (64)]]]]]
//
// "save" lasts until the checkpoint has its name and was read back, and the previous one is removed; no training runs
// meanwhile. The parts of a save are times in system calls, taken through the linker's --wrap. "pause" is the time in
// which the host waits for the copy of a background save; a GPU computes then. Also prints how much longer a step is.
#include "bench.h"
#include "run/run.h"
#include "../test/tree.h"

#include <fcntl.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

// ---- The parts of a save: seconds in its calls ----------------------------------------------------------------------

enum { IN_WRITE, IN_FSYNC, IN_READ, CALLS };
static double within[CALLS]; // of the thread that saves

static ssize_t timed(int call, double start, ssize_t result) {
    within[call] += clock_seconds() - start;
    return result;
}

ssize_t __real_pwrite(int fd, const void *data, size_t bytes, off_t at);
ssize_t __wrap_pwrite(int fd, const void *data, size_t bytes, off_t at);
ssize_t __wrap_pwrite(int fd, const void *data, size_t bytes, off_t at) {
    double start = clock_seconds();
    return timed(IN_WRITE, start, __real_pwrite(fd, data, bytes, at));
}

int __real_fsync(int fd);
int __wrap_fsync(int fd);
int __wrap_fsync(int fd) {
    double start = clock_seconds();
    return (int)timed(IN_FSYNC, start, __real_fsync(fd));
}

ssize_t __real_pread(int fd, void *data, size_t bytes, off_t offset);
ssize_t __wrap_pread(int fd, void *data, size_t bytes, off_t offset);
ssize_t __wrap_pread(int fd, void *data, size_t bytes, off_t offset) {
    double start = clock_seconds();
    return timed(IN_READ, start, __real_pread(fd, data, bytes, offset));
}

// ---------------------------------------------------------------------------------------------------------------------

// The figures of a round.
typedef enum {
    SAVE,
    SAVE_RATIO, // SAVE / DD
    SAVE_WRITE,
    SAVE_FSYNC,
    SAVE_READ,
    SAVE_REST,
    DD,
    DD_DIRECT,
    PLAIN,
    PAUSE,
    PAUSE_SHARE,
    LONGER,
    LONGER_SHARE,
    FIGURES
} Figure;

enum { ROUNDS_MAX = 100 };

typedef struct {
    char out[PATH_MAX / 2];
    Run run;
    Comm comm;
    int micro_batch, seq_len;
    uint16_t *tokens; // (micro_batch, seq_len + 1)
    double waited;    // seconds for which the last step waited for a save's copy
    double figure[FIGURES][ROUNDS_MAX];
} Bench;

// Replaces the text of state.json by an empty object.
int __wrap_run_state_write(Run *r, char **text, size_t *bytes, Error *e);
int __wrap_run_state_write(Run *r, char **text, size_t *bytes, Error *e) {
    *text = strdup("{}\n");
    return *bytes = strlen(*text), 0;
}

static int setup(Bench *b, const char *directory, const char *name, Error *e) {
    const ParallelConfig alone = {.zero = ZERO_0, .tensor = 1};
    Run *r = &b->run;
    Archive *archive = &r->archive;
    ModelConfig shape = {.vocab = 50257, .context = 1024};
    if (!model_preset(&shape, name)) return FAIL(e, ERR_USAGE, MODEL_PRESET_HELP, "no model is called %s", name);
    snprintf(b->out, sizeof b->out, "%s/bench_save_XXXXXX", directory);
    if (!mkdtemp(b->out)) return FAIL(e, ERR_WRITE, "name another directory", "%s: cannot create", b->out);
    TRY(archive_open(archive, b->out, e));
    strcpy(archive->id, "a benchmark");
    TRY(metrics_open(&r->metrics, archive->dir, b->out, &(bool){0}, e));
    TRY(metrics_begin(r->metrics, 0, 0, false, e));
    TRY(model_create(&r->model, &shape, e));
    r->shape = (EngineConfig){.model = &r->model, .micro_batch = b->micro_batch, .seq_len = b->seq_len};
    TRY(memory_alloc_zero((void **)&b->tokens, sizeof *b->tokens * (size_t)(b->micro_batch * (b->seq_len + 1)),
                          "tokens", e));
    TRY(bench_results(&r->position.result, &r->model, e));
    b->comm = (Comm){.ranks = 1, .local_ranks = 1};
    r->comm = &b->comm;
    r->options.keep = 1;
    strcpy(r->options.model, name);
    TRY(parallel_create(&r->parallel, r->comm, &alone, &r->shape, e));
    TRY(engine_create(&GNS_ENGINE, &r->engine, &r->shape, e));
    TRY(parallel_start(&r->parallel, r->engine, WIRE_FP32, e));
    TRY(saver_create(&r->saving.saver, r, e));
    return saver_prepare(r->saving.saver, e);
}

static void destroy(Bench *b) {
    Run *r = &b->run;
    saver_destroy(r->saving.saver);
    parallel_destroy(&r->parallel);
    engine_destroy(r->engine);
    model_destroy(&r->model);
    memory_free(b->tokens);
    memory_free(r->position.result.grad_sq);
    memory_free(r->position.result.example_sq);
    metrics_close(r->metrics, &(Error){0});
    archive_close(&r->archive);
    remove_tree(b->out);
}

// Runs a training step as run/step.c does. *seconds = its time.
static int bench_step(Bench *b, double *seconds, Error *e) {
    UpdateConfig update = {.lr = 1e-4,
                           .beta1 = 0.9,
                           .beta2 = 0.95,
                           .eps = 1e-8,
                           .weight_decay = 0.1,
                           .grad_clip = 1,
                           .step = ++b->run.at.step,
                           .batch = b->micro_batch};
    Parallel *parallel = &b->run.parallel;
    double start = clock_seconds();
    TRY(parallel_begin_step(parallel, e));
    TRY(parallel_micro_step(parallel, b->tokens, b->micro_batch, GNS_OFF, true, e));
    TRY(parallel_norms(parallel, e));
    b->waited = -clock_seconds();
    await_copy(&b->run);
    b->waited += clock_seconds();
    TRY(parallel_update(parallel, &update, e));
    TRY(engine_result(b->run.engine, &b->run.position.result, e));
    *seconds = clock_seconds() - start;
    return 0;
}

// ---- The contestants: each stores its seconds -----------------------------------------------------------------------

static uint64_t bytes_of_save(const Bench *b) {
    const Model *model = &b->run.model;
    return (model->parameters + 2 * model->flat_count) * sizeof(float);
}

static int measure_save(Bench *b, int round, Error *e) {
    b->run.at.step++;
    memset(within, 0, sizeof within);
    double start = clock_seconds();
    TRY(save_and_wait(&b->run, e));
    double all = clock_seconds() - start;
    b->figure[SAVE][round] = all;
    b->figure[SAVE_WRITE][round] = within[IN_WRITE];
    b->figure[SAVE_FSYNC][round] = within[IN_FSYNC];
    b->figure[SAVE_READ][round] = within[IN_READ];
    b->figure[SAVE_REST][round] = all - within[IN_WRITE] - within[IN_FSYNC] - within[IN_READ];
    return 0;
}

static int measure_save_beside_step(Bench *b, int round, Error *e) {
    enum { ALONE = 3 };
    double alone[ALONE], beside;
    for (int i = 0; i < ALONE; i++) TRY(bench_step(b, &alone[i], e));
    qsort(alone, ALONE, sizeof *alone, bench_by_value);
    const int64_t step = b->run.at.step;
    double start = clock_seconds();
    TRY(save_in_background(&b->run, e));
    double pause = clock_seconds() - start;
    TRY(bench_step(b, &beside, e));
    save_at_error(&b->run, 0, e);
    double all = clock_seconds() - start, longer = beside - alone[ALONE / 2];
    if (b->run.saving.saved_step != step) return FAIL(e, ERR_WRITE, "see the warning above", "a save failed");
    b->figure[PAUSE][round] = pause + b->waited;
    b->figure[PAUSE_SHARE][round] = (pause + b->waited) / all;
    b->figure[LONGER][round] = longer;
    b->figure[LONGER_SHARE][round] = longer / all;
    return 0;
}

static int run_dd(Bench *b, const char *how, double *seconds, Error *e) {
    char command[PATH_MAX + 200], path[PATH_MAX];
    TRY(path_join(path, sizeof path, b->out, "dd", e));
    snprintf(command, sizeof command, "dd if=/dev/zero of='%s' iflag=count_bytes count=%llu conv=fsync %s 2> /dev/null",
             path, (unsigned long long)bytes_of_save(b), how);
    double start = clock_seconds();
    if (system(command) != 0) return FAIL(e, ERR_WRITE, "is there room?", "%s: dd failed", path);
    *seconds = clock_seconds() - start;
    unlink(path);
    return 0;
}

static int measure_dd(Bench *b, int round, Error *e) { return run_dd(b, "bs=1M", &b->figure[DD][round], e); }

static int measure_dd_direct(Bench *b, int round, Error *e) {
    return run_dd(b, "bs=4M oflag=direct", &b->figure[DD_DIRECT][round], e);
}

static int measure_plain(Bench *b, int round, Error *e) {
    enum { PIECE = 1 << 20 };
    static unsigned char piece[PIECE];
    char path[PATH_MAX];
    int code = 0;
    TRY(path_join(path, sizeof path, b->out, "plain", e));
    double start = clock_seconds();
    int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC, 0666);
    if (fd < 0) return FAIL(e, ERR_WRITE, "name another directory", "%s: cannot create", path);
    for (uint64_t left = bytes_of_save(b), n; !code && left; left -= n) {
        n = left < PIECE ? left : PIECE;
        code = write(fd, piece, n) == (ssize_t)n ? 0 : FAIL(e, ERR_WRITE, NULL, "%s: cannot write", path);
    }
    if (!code) code = descriptor_sync(fd, path, e);
    close(fd);
    b->figure[PLAIN][round] = clock_seconds() - start;
    unlink(path);
    return code;
}

// ---------------------------------------------------------------------------------------------------------------------

static void print_figure(const char *what, double *values, int n, double scale, const char *unit) {
    qsort(values, (size_t)n, sizeof *values, bench_by_value);
    printf("%-36s %8.3f %-2s (quartiles %.3f to %.3f, all %.3f to %.3f)\n", what, scale * values[n / 2], unit,
           scale * values[n / 4], scale * values[n - 1 - n / 4], scale * values[0], scale * values[n - 1]);
}

static int bench(Bench *b, int rounds, Error *e) {
    static int (*const contestants[])(Bench *, int, Error *) = {measure_save, measure_dd, measure_dd_direct,
                                                                measure_plain, measure_save_beside_step};
    const int count = sizeof contestants / sizeof *contestants;
    char line[256];
    engine_describe(b->run.engine, line, sizeof line);
    printf("%s: %.2f GB a checkpoint, in %s\n", line, 1e-9 * (double)bytes_of_save(b), b->out);
    // Warm up: the first saves wait for fresh memory for the copy and the page cache.
    for (int i = 0; i < count; i++) TRY(contestants[i](b, 0, e));
    for (int r = 0; r < rounds; r++) {
        for (int i = 0; i < count; i++) TRY(contestants[(r + (r % 2 ? count - i : i)) % count](b, r, e));
        b->figure[SAVE_RATIO][r] = b->figure[SAVE][r] / b->figure[DD][r];
        printf("  save %.2f s, dd %.2f s: %.2f; dd past the cache %.2f s; write and fsync %.2f s; pause %.4f s\n",
               b->figure[SAVE][r], b->figure[DD][r], b->figure[SAVE_RATIO][r], b->figure[DD_DIRECT][r],
               b->figure[PLAIN][r], b->figure[PAUSE][r]);
        fflush(stdout);
    }
    static const struct {
        const char *what;
        double scale;
        const char *unit;
    } names[FIGURES] = {
        [SAVE] = {"save", 1, "s"},
        [SAVE_RATIO] = {"save / dd conv=fsync, round by round", 1, ""},
        [SAVE_WRITE] = {"  of the save: write", 1, "s"},
        [SAVE_FSYNC] = {"  fsync", 1, "s"},
        [SAVE_READ] = {"  reading back", 1, "s"},
        [SAVE_REST] = {"  hashing, copying, the rest", 1, "s"},
        [DD] = {"dd conv=fsync", 1, "s"},
        [DD_DIRECT] = {"dd conv=fsync oflag=direct", 1, "s"},
        [PLAIN] = {"write and fsync, nothing else", 1, "s"},
        [PAUSE] = {"pause", 1e3, "ms"},
        [PAUSE_SHARE] = {"pause, share of the save", 100, "%"},
        [LONGER] = {"a step beside the save longer by", 1e3, "ms"},
        [LONGER_SHARE] = {"that, share of the save", 100, "%"},
    };
    for (int f = 0; f < FIGURES; f++) print_figure(names[f].what, b->figure[f], rounds, names[f].scale, names[f].unit);
    return 0;
}

int main(int argc, char **argv) {
    static Bench b;
    Error e = {0};
    const char *base = getenv("TMPDIR") ? getenv("TMPDIR") : "/tmp";
    int rounds = argc > 3 ? atoi(argv[3]) : 15;
    b.micro_batch = argc > 4 ? atoi(argv[4]) : 4;
    b.seq_len = argc > 5 ? atoi(argv[5]) : 64;
    if (b.micro_batch < 1 || b.seq_len < 1 || b.seq_len > 1024) FAIL(&e, ERR_USAGE, "1 to 1024", "no such micro-batch");
    if (rounds < 1 || rounds > ROUNDS_MAX) FAIL(&e, ERR_USAGE, "1 to 100", "%d rounds", rounds);
    int code = e.code ? e.code : setup(&b, argc > 1 ? argv[1] : base, argc > 2 ? argv[2] : "gpt2-124M", &e);
    if (!code) code = bench(&b, rounds, &e);
    destroy(&b);
    if (code) error_print(&e);
    return code;
}
