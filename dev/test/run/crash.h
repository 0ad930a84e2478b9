// crash: helpers for test_crash.c (one process) and test_crash_ranks.c, which attack checkpoints. Both define COMMAND,
// options of runs. The run "whole" is undisturbed. The run "part" is attacked and must end with the same checkpoint.
#pragma once

#include "checkpoint/archive.h"
#include "faults.h"
#include "../scratch.h"
#include "../trainer.h"

// The calls that a test strikes: first, first + stride, ..., with a random `first`. GNS_LONG=1: all calls.
typedef struct {
    long first, stride;
} Some;
static inline Some some_calls(long stride) {
    if (trainer.thorough) return (Some){1, 1};
    return (Some){1 + (stride > 0 ? (long)draw((uint32_t)stride) : 0), stride};
}

// Waits until a running program has written `text`; after a minute, long enough for a busy machine, fails.
static inline void wait_for(const char *path, const char *text) {
    for (double begun = clock_seconds(); !file_mentions(path, text) && clock_seconds() - begun < 60;) usleep(1000);
    CHECK(file_mentions(path, text), "%s has no '%s' after a minute", path, text);
}

// Number of calls of each kind that rank 0 makes in the run "whole".
static long calls_of_run[CALLS + 1];

// Checks that each checkpoint was on the disk before it got its name.
static inline void check_synced(const char *what) {
    CHECK(faults->unsynced == 0, "%s: %ld files had not been synced", what, (long)faults->unsynced);
}

// Checks that the newest whole checkpoint is no older than the last checkpoint that got its name.
static inline void check_nothing_lost(const char *what) {
    Error e = {0};
    long committed = faults->committed;
    check_synced(what);
    long step = access("part", F_OK) == 0 ? (long)newest_whole_step("part", &e) : -1;
    CHECK(committed == 0 || step >= committed, "%s: step %ld was saved, the newest is now %ld", what, committed, step);
}

static inline void no_faults(void) { faults_plan(FAULT_NONE, -1, 0, 0); }

// Makes the run "whole". Checks that it makes more than `writes` writes and `steps` steps and syncs everything.
static inline void run_undisturbed(long writes, long steps) {
    no_faults();
    CHECK_RUN(trainer_run(COMMAND "--out whole"), 0);
    for (int i = 0; i <= CALLS; i++) calls_of_run[i] = faults->of[0].count[i];
    CHECK(calls_of_run[CALL_WRITE] > writes && calls_of_run[CALL_RENAME] > 5, "%ld writes", calls_of_run[CALL_WRITE]);
    CHECK(newest_step("whole") > steps, "%ld steps", newest_step("whole"));
    check_synced("undisturbed");
    CHECK(faults->unnamed == 0, "a name that is not on the disk");
}

static inline void check_resumes(const char *what) {
    no_faults();
    int code = trainer_run(COMMAND "--out part");
    CHECK(code == 0, "%s: resumed: exit code %d: %s", what, code, log_tail());
    check_same_end("whole", "part", what);
}

static inline void remove_part(void) {
    remove_tree("part");
    for (int i = 1; i < 4; i++) remove_tree(path_of("part.%d", i));
}

// Removes the attacked run and all planned faults.
static inline void begin_part(void) {
    remove_part();
    no_faults();
}

static inline int count_good(const char *out) {
    int good = 0;
    for (long step = newest_step(out); step > 0; step--)
        good += verify(path_of("%s/step_%08ld", out, step), &(Error){0}) == 0;
    return good;
}

// Kills runs of "part" at some_calls(stride). Checks that every named checkpoint is whole, also after a kill during a
// removal, which renames a checkpoint before it removes the first file. killed: the exit code of a killed run.
static inline void killed_at_every_call(int rank, long calls, long stride, int killed) {
    Some some = some_calls(stride);
    for (long n = some.first; n <= calls; n += some.stride) {
        const char *what = path_of("rank %d killed at call %ld", rank, n);
        remove_part();
        faults_plan(FAULT_KILL, -1, n, 0);
        faults->rank = rank;
        int code = trainer_run(COMMAND "--out part");
        CHECK(code == killed, "%s: exit code %d: %s", what, code, log_tail());
        check_nothing_lost(what);
        int count = access("part", F_OK) == 0 ? count_checkpoints("part") : 0, good = count_good("part");
        CHECK(good == count, "%s: %d of %d checkpoints are whole", what, good, count);
        check_resumes(what);
    }
}

// Checks a run whose data a rank can no longer read: the run saves finished steps, names the file, and resumes later.
static inline void check_unreadable_data(int rank, const char *data, long readable, const char *command) {
    const char *who = trainer.ranks > 1 ? path_of("error (rank %d): ", rank) : "error: ";
    remove_part();
    faults_plan(FAULT_NONE, -1, 0, EIO);
    faults->rank = rank;
    strcpy(faults->unreadable, data);
    faults->readable = readable;
    int code = trainer_run("%s --out part", command);
    long step = newest_step("part");
    CHECK(step > 0, "%ld steps", step);
    CHECK_RUN(code, ERR_INPUT, path_of("%s%s: read failed", who, data + 1), "Input/output error",
              path_of("the same command resumes from part/step_%08ld", step));
    no_faults();
    CHECK_RUN(trainer_run(COMMAND "--out part"), 0);
    check_same_files(path_of("whole/step_%08ld", newest_step("whole")), path_of("part/step_%08ld", newest_step("part")),
                     data);
}

// Lets call n of a kind fail on a rank (FAULT_ON: and all later ones). Checks that training reaches the right end, or
// all ranks stop with one fitting message. No checkpoint may be lost, and the same command must resume.
static inline void check_failure(Fault fault, int rank, Call call, long n, int error) {
    const char *what = path_of("rank %d: %s %ld %s with %s", rank, call_names[call], n,
                               fault == FAULT_ON ? "and on fail" : "fails", strerror(error));
    remove_part();
    faults_plan(fault, call, n, error);
    faults->rank = rank;
    int code = trainer_run(COMMAND "--out part");
    bool fits = call == CALL_ALLOC ? code == ERR_MEMORY : code == ERR_WRITE || code == ERR_INPUT;
    CHECK(code == 0 || fits, "%s: exit code %d: %s", what, code, log_tail());
    // quiet: the run may continue without a message after a failed allocation, after a single failed write (the log
    // tries again), and after a failed open of the watchdogs' board (comm.c).
    bool quiet = call == CALL_ALLOC || (call == CALL_WRITE && fault == FAULT_ONCE) || (call == CALL_OPEN && n == 1);
    bool said = code ? log_mentions("error: ") || log_mentions("error (rank ") : quiet || log_mentions("warning: ");
    CHECK(said, "%s: exit code %d without a word: %s", what, code, log_tail());
    // Call n may not happen: ranks make a varying number of calls while they wait for a save, and rank 0 makes most.
    CHECK(faults->struck > 0 || faults->of[rank].count[call] < n, "%s: no call failed", what);
    check_nothing_lost(what);
    if (code == 0) check_same_end("whole", "part", what);
    else check_resumes(what);
}
