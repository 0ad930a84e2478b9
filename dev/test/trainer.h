// trainer: runs the whole training program as a child process, with model and data small enough for thousands of runs,
// and compares the files that runs leave. For tests of checkpoints and resuming.
#pragma once

#include "checkpoint/archive.h"
#include "text/shards.h"
#include "base/files.h"
#include "math/rng.h"
#include "run/program.h"
#include "text/shard_file.h"
#include "preload/yield.c"
#include "test.h"
#include "tree.h"

#include <limits.h>
#include <stdarg.h>
#include <sys/wait.h>
#include <unistd.h>

enum { TRAINER_ARGUMENTS = 128 };

static struct {
    char scratch[PATH_MAX]; // the working directory of the tests
    bool thorough;          // GNS_LONG=1: the tests' long forms (make test-crash)
    int batch_min;          // the value of --batch-min, at least the number of ranks
    int ranks;              // if more than one, mpirun starts `program rank train_gpt2 ...`
    char program[PATH_MAX]; // this test program
    EngineApi engine;       // default: the CPU engine; a test may replace functions
} trainer;

// Writes a shard of tokens. Three of four tokens follow from the previous token, so that a model can learn them.
static inline void trainer_make_shard(const char *path, uint64_t seed, size_t count) {
    Error e = {0};
    uint16_t *tokens = malloc(count * sizeof *tokens);
    for (size_t i = 0; i < count; i++) {
        uint32_t random = rng_u32(seed, 77, i);
        tokens[i] = (uint16_t)(i && random % 4 ? (tokens[i - 1] * 5u + 3) % 64 : random / 4 % 64);
    }
    CHECK_OK(shard_write(path, tokens, count, &e), &e);
    free(tokens);
}

static void trainer_setup(void) {
    const char *base = getenv("TMPDIR") ? getenv("TMPDIR") : "/tmp", *thorough = getenv("GNS_LONG");
    trainer.thorough = thorough && strcmp(thorough, "1") == 0;
    snprintf(trainer.scratch, sizeof trainer.scratch, "%s/gns_test_XXXXXX", base);
    trainer.ranks = 1;
    if (!trainer.engine.create) trainer.engine = cpu_engine;
    trainer.batch_min = 2;
    if (readlink("/proc/self/exe", trainer.program, sizeof trainer.program - 1) < 0) exit(1);
    if (!mkdtemp(trainer.scratch) || chdir(trainer.scratch) != 0) exit(1);
    trainer_make_shard("train.bin", 1, 6000);
    trainer_make_shard("other.bin", 2, 6000);
    trainer_make_shard("val.bin", 3, 600);
}

static int trainer_end(void) {
    if (chdir("/") == 0) remove_tree(trainer.scratch);
    return test_summary();
}

// Options of a run of about 70 steps whose batch grows from 2 to 16 rows. The run's checkpoints hold every kind of
// state: noise averages, calibration, an unfinished ramp, outlier windows.
static const char *const trainer_command =
    "train_gpt2 --train train.bin --val val.bin --vocab-size 256 --model d1 --layers 1 --heads 1 --channels 16 "
    "--seq-len 8 --threads 1 --micro-batch 4 --ramp gns --batch-max 16 --gns exact --gns-exact-every 3 "
    "--gns-half-life 600 --ramp-kappa 1000 --ramp-waste 1 --ramp-step-rows 1e9 --lr 1e-2 --val-every 7 --val-tokens "
    "128 --skip-loss-z 3 ";

// Replaces this process by mpirun, under `timeout`, which kills a run that hangs.
static void trainer_exec_ranks(int argc, char **argv) {
    static char *all[TRAINER_ARGUMENTS + 20] = {
        "timeout",   "-s",   "KILL",          "120", "mpirun", "-np", NULL, "--oversubscribe", "--allow-run-as-root",
        "--bind-to", "none", trainer.program, "rank"};
    char ranks[12];
    int n = 13;
    snprintf(ranks, sizeof ranks, "%d", trainer.ranks);
    all[6] = ranks;
    for (int i = 0; i < argc; i++) all[n++] = argv[i];
    setenv("OMPI_MCA_mpi_yield_when_idle", "1", 1); // many ranks share few cores
    setenv("OMPI_MCA_pml", "ob1", 1);               // skips the search for networks
    setenv("OMPI_MCA_btl", "self,vader", 1);
    setenv("ASAN_OPTIONS", "detect_leaks=0", 1); // Open MPI leaks
    execvp(all[0], all);
    _exit(127);
}

// Starts the program with trainer_command and more options, or with `format` alone if `format` begins with
// "train_gpt2". Output goes to the file "log".
__attribute__((format(printf, 1, 2))) static inline pid_t trainer_begin(const char *format, ...) {
    va_list args;
    char line[4096], *argv[TRAINER_ARGUMENTS + 1] = {0};
    int argc = 0;
    bool whole = strncmp(format, "train_gpt2", 10) == 0;
    size_t used = 0;
    if (!whole) used = (size_t)snprintf(line, sizeof line, "%s --batch-min %d ", trainer_command, trainer.batch_min);
    va_start(args, format);
    vsnprintf(line + used, sizeof line - used, format, args);
    va_end(args);
    for (char *word = strtok(line, " "); word && argc < TRAINER_ARGUMENTS; word = strtok(NULL, " "))
        argv[argc++] = word;
    fflush(stdout);
    unlink("log");
    pid_t child = fork();
    if (child) return child;
    if (!freopen("log", "w", stdout)) _exit(1);
    dup2(1, 2);
    if (trainer.ranks > 1) trainer_exec_ranks(argc, argv);
    int code = program_main(argc, argv, &trainer.engine, TRANSPORT_OR_NULL(mpi_transport));
    fflush(stdout);
    _exit(code);
}

// Returns the exit code, or 1000 + the signal that ended the process.
static int trainer_wait(pid_t child) {
    int status = 0;
    waitpid(child, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status);
}

#define trainer_run(...) trainer_wait(trainer_begin(__VA_ARGS__))

static inline int trainer_rank(int argc, char **argv) { // PROGRAM rank COMMAND...
    return program_main(argc - 2, argv + 2, &trainer.engine, TRANSPORT_OR_NULL(mpi_transport));
}

// ---- Files ----------------------------------------------------------------------------------------------------------

static inline char *read_text(const char *path, size_t *bytes) {
    Error e;
    char *text;
    if (file_read(IN_PATH, path, 1u << 30, &text, bytes, &e) == 0) return text;
    *bytes = 0;
    return NULL;
}

static inline bool file_mentions(const char *path, const char *text) {
    size_t bytes;
    char *content = read_text(path, &bytes);
    bool found = content && strstr(content, text);
    memory_free(content);
    return found;
}

static inline bool log_mentions(const char *text) { return file_mentions("log", text); }

// Returns the number after `"name":` in a text, such as a line of metrics.jsonl; NaN if there is none.
static inline double number_in(const char *text, const char *name) {
    const char *field = path_of("\"%s\":", name), *at = text ? strstr(text, field) : NULL;
    return at ? strtod(at + strlen(field), NULL) : NAN;
}

// Returns the end of the log, for messages.
static inline const char *log_tail(void) {
    static char tail[400];
    size_t bytes;
    char *log = read_text("log", &bytes);
    snprintf(tail, sizeof tail, "%s", log ? log + (bytes > 300 ? bytes - 300 : 0) : "(none)");
    memory_free(log);
    return tail;
}

// Checks a run's exit code, and that its log contains each text, or lacks it if the text begins with '!'.
#define CHECK_RUN(code, want, ...)                                                                                     \
    do {                                                                                                               \
        int code_ = (code), want_ = (want);                                                                            \
        const char *texts_[] = {NULL, ##__VA_ARGS__};                                                                  \
        CHECK(code_ == want_, "exit code %d, want %d: %s", code_, want_, log_tail());                                  \
        for (size_t i_ = 1; i_ < sizeof texts_ / sizeof *texts_; i_++) {                                               \
            bool not_ = *texts_[i_] == '!';                                                                            \
            CHECK(log_mentions(texts_[i_] + not_) != not_, "'%s': %s", texts_[i_], log_tail());                        \
        }                                                                                                              \
    } while (0)

static inline void copy_file(const char *from, const char *to) {
    Error e = {0};
    size_t bytes;
    char *text = read_text(from, &bytes);
    CHECK(text != NULL, "%s cannot be read", from);
    if (text) CHECK_OK(file_replace(IN_PATH, to, text, bytes, &e), &e);
    memory_free(text);
}

static inline void copy_tree(const char *from, const char *to) {
    CHECK(system(path_of("mkdir -p '%s' && cp -r '%s/.' '%s'", to, from, to)) == 0, "%s cannot be copied", from);
}

static inline bool same_file(const char *a, const char *b) {
    size_t a_bytes, b_bytes;
    char *a_text = read_text(a, &a_bytes), *b_text = read_text(b, &b_bytes);
    bool same = a_text && b_text && a_bytes == b_bytes && memcmp(a_text, b_text, a_bytes) == 0;
    memory_free(a_text);
    memory_free(b_text);
    return same;
}

// Removes the fields that depend on a clock from the text of metrics.jsonl, in place.
static void drop_timing(char *text) {
    char *from;
    while ((from = strstr(text, ", \"tok_per_s\": "))) {
        char *to = strstr(from, ", \"mfu\": ");
        memmove(from, to, strlen(to) + 1);
        text = from;
    }
}

static inline bool same_metrics(const char *a, const char *b) {
    size_t bytes;
    char *a_text = read_text(a, &bytes), *b_text = read_text(b, &bytes);
    if (a_text) drop_timing(a_text);
    if (b_text) drop_timing(b_text);
    bool same = a_text && b_text && strcmp(a_text, b_text) == 0;
    memory_free(a_text);
    memory_free(b_text);
    return same;
}

// Returns the step of a run directory's newest checkpoint; -1: none.
static inline long newest_step(const char *run) {
    Names names;
    Error e;
    long newest = -1;
    if (directory_list(IN_PATH, run, &names, &e)) return -1;
    for (int i = 0; i < names.count; i++)
        if (archive_step_of(names.entry[i]->d_name) > newest) newest = (long)archive_step_of(names.entry[i]->d_name);
    names_free(&names);
    return newest;
}

// Opens a run directory, with "made by a test" as the run's id; release with archive_close.
static inline Archive archive_at(const char *run) {
    Archive archive = {0};
    Error e = {0};
    CHECK_OK(archive_open(&archive, run, &e), &e);
    strcpy(archive.id, "made by a test");
    return archive;
}

// Makes a checkpoint of the run `id`, with a small state.json and a file odd.bin that only the manifest names. id "": a
// checkpoint of an older build, without run ids.
static inline void make_checkpoint(const char *run, int64_t step, const char *id, const void *data, size_t bytes) {
    Manifest manifest = {.count = 0};
    Error e = {0};
    Archive archive = archive_at(run);
    strcpy(archive.id, id);
    CHECK_OK(archive_begin(&archive, step, &manifest, stderr, &e), &e);
    CHECK_OK(manifest_save(&manifest, "state.json", data, bytes, &e), &e);
    CHECK_OK(manifest_save(&manifest, "odd.bin", "x", 1, &e), &e);
    CHECK_OK(archive_commit(&archive, step, &manifest, &e), &e);
    manifest_free(&manifest);
    archive_close(&archive);
}

static inline int count_checkpoints(const char *run) {
    int count = -1;
    Error e = {0};
    Archive archive = archive_at(run);
    CHECK_OK(archive_count(&archive, &count, &e), &e);
    archive_close(&archive);
    return count;
}

// Reads all bytes of a checkpoint and compares them with its manifest.
static inline int verify(const char *checkpoint, Error *e) {
    Manifest manifest;
    int code = manifest_read(&manifest, IN_PATH, checkpoint, e);
    if (!code) code = manifest_verify(&manifest, NULL, VERIFY_DISK, e);
    manifest_free(&manifest);
    return code;
}

static inline int verify_one(void *context, const char *checkpoint, Error *e) {
    return verify(checkpoint, e);
}

// Returns the step of the checkpoint that archive_newest finds; -1: none.
static inline int64_t newest_whole_step(const char *run, Error *e) {
    Newest newest;
    FILE *notes = fopen("/dev/null", "w");
    Archive archive = archive_at(run);
    archive.id[0] = 0; // accepts checkpoints of any run
    int code = archive_newest(&archive, INT64_MAX, notes, verify_one, NULL, &newest, e);
    CHECK_OK(code, e);
    archive_close(&archive);
    fclose(notes);
    return newest.found && !code ? newest.step : -1;
}

// Checks that the files of two checkpoints are equal, except files that describe the run rather than its position.
static inline void check_same_files(const char *a, const char *b, const char *what) {
    Names names;
    Error e = {0};
    CHECK_OK(directory_list(IN_PATH, a, &names, &e), &e);
    for (int i = 0; i < names.count; i++)
        if (*names.entry[i]->d_name != '.' && strcmp(names.entry[i]->d_name, "training") != 0 &&
            strcmp(names.entry[i]->d_name, "MANIFEST.json") != 0)
            CHECK(same_file(path_of("%s/%s", a, names.entry[i]->d_name), path_of("%s/%s", b, names.entry[i]->d_name)),
                  "%s: %s differs", what, names.entry[i]->d_name);
    CHECK(same_file(path_of("%s/training/optimizer.safetensors", a), path_of("%s/training/optimizer.safetensors", b)),
          "%s: optimizer.safetensors differs", what);
    CHECK(names.count > 5, "%s: %d files", a, names.count - 2);
    names_free(&names);
}

// Checks that two runs ended at the same step with the same bits of weights, moments and metrics.
static inline void check_same_end(const char *a, const char *b, const char *what) {
    long step = newest_step(a);
    CHECK(step > 0 && newest_step(b) == step, "%s: ends at step %ld, not %ld", what, newest_step(b), step);
    check_same_files(path_of("%s/step_%08ld", a, step), path_of("%s/step_%08ld", b, step), what);
    CHECK(same_metrics(path_of("%s/metrics.jsonl", a), path_of("%s/metrics.jsonl", b)), "%s: metrics differ", what);
}
