// Checkpoints under attack: processes killed at any call, disks that are full or fail, flipped bits, signals. The
// previous checkpoint or the new one is always whole. A run that resumes from it ends with the bits of an undisturbed
// run. GNS_LONG=1 (make test-crash): every call instead of some, hundreds of signals.
#define COMMAND "--train-tokens 900 --checkpoint-every 3 "
#define ENDLESS "--train-tokens 3000000 --checkpoint-every 3 " // runs longer than any test waits
#define UNSAVED "--train-tokens 3000000 --checkpoint-every 0 "
#include "base/signals.h"
#include "model/engine.h"
#include "crash.h"
#include "run/metrics.h"

#include <sys/file.h>

static void test_undisturbed(void) {
    run_undisturbed(50, 15);
    CHECK(calls_of_run[CALL_FSYNC] > 50, "%ld fsyncs", calls_of_run[CALL_FSYNC]);
}

// ---- Killed ---------------------------------------------------------------------------------------------------------

static void test_killed_at_every_call(void) {
    killed_at_every_call(0, calls_of_run[CALLS], calls_of_run[CALLS] / 12, 1000 + SIGKILL);
}

// ---- Calls that fail ------------------------------------------------------------------------------------------------

static void test_calls_that_fail(void) {
    static const int errors[] = {ENOSPC, EIO};
    for (int call = 0; call < CALLS; call++) {
        Some some = some_calls(calls_of_run[call] / 3 + 1);
        for (long n = some.first, k = 0; n <= calls_of_run[call]; n += some.stride, k++) {
            check_failure(FAULT_ONCE, 0, (Call)call, n, call == CALL_ALLOC ? ENOMEM : errors[k % 2]);
            check_failure(FAULT_ON, 0, (Call)call, n, call == CALL_ALLOC ? ENOMEM : errors[(k + 1) % 2]);
        }
    }
}

// A disk without room for two checkpoints is refused at the start. If the disk fills up later, training continues, and
// a stop names the lost step and the newest checkpoint.
static void test_no_room(void) {
    begin_part();
    faults->free_kb = 64;
    CHECK_RUN(trainer_run(COMMAND "--out part"), ERR_WRITE, "error: --out part: a save needs room for 2 checkpoints",
              " bytes, and the disk has 65536 bytes left", "!--keep"); // a smaller --keep would not help
    CHECK(newest_step("part") == -1, "something was written");
    no_faults();
    pid_t child = trainer_begin(ENDLESS "--out part");
    wait_for("part/metrics.jsonl", "{\"step\": 9,");
    faults->free_kb = 1;
    wait_for("log", " was not saved: part: a checkpoint takes");
    kill(child, SIGINT);
    CHECK_RUN(trainer_wait(child), ERR_WRITE, "the disk has 0.0 MiB left", "error: step ",
              " is not saved, and the newest checkpoint is part/step_");
    CHECK(count_good("part") > 0, "none is left");
    CHECK_RUN(trainer_run(ENDLESS "--keep 0 --out part"), ERR_WRITE, "needs room for 1 checkpoint of ");
    remove_part();
    check_resumes("no room");
}

// Returns the size in KiB of a disk for `checkpoints` + 0.5 checkpoints, counting the one being written.
static long disk_of(double checkpoints) {
    long one = disk_used_kb("whole") / 2;                  // "whole" keeps two checkpoints
    return (long)((checkpoints + 0.5) * (double)one) + 64; // 64: the trainer's allowance for state.json
}

static void begin_on_disk_of(double checkpoints) { begin_part(), faults->disk_kb = disk_of(checkpoints); }

// If the disk is too small for --keep, older checkpoints are removed sooner; the run ends the same.
static void test_little_room(void) {
    begin_on_disk_of(2);
    CHECK_RUN(trainer_run(COMMAND "--out part"), 0, "!was not saved",
              "note: removed part/step_00000003 to make room on the disk\n");
    CHECK(count_good("part") == 2, "%d good ones", count_good("part"));
    check_same_end("whole", "part", "little room");

    no_faults(); // no checkpoint is removed if removals would not make enough room
    faults->free_kb = 1;
    CHECK_RUN(trainer_run("--train-tokens 1300 --checkpoint-every 3 --out part"), ERR_WRITE);
    CHECK(count_good("part") == 2, "%d good ones", count_good("part"));

    begin_on_disk_of(2); // --keep 0 promises that no checkpoint is removed
    CHECK_RUN(trainer_run(COMMAND "--out part --keep 0"), ERR_WRITE, "--keep",
              "is not saved, and the newest checkpoint is part/step_00000006: part: a checkpoint takes");
    CHECK(count_good("part") == 2, "%d good ones", count_good("part"));
    check_resumes("two of all");

    begin_on_disk_of(3); // the newest checkpoint, the one for a rollback, and the one being written
    CHECK_RUN(trainer_run(COMMAND "--out part --on-spike rollback --spike-steps 4"), 0, "!was not saved");
    begin_on_disk_of(2); // a checkpoint for a rollback is removed only for the last save
    CHECK_RUN(trainer_run(COMMAND "--out part --on-spike rollback"), 0, "step 6 was not saved: ",
              "note: removed part/step_00000000 to make room on the disk\nsaved   part/step_00000012 ",
              "saved   part/step_00000037 ");
    check_same_files("whole/step_00000037", "part/step_00000037", "little room for a rollback");
}

// The newest good checkpoint is never removed, even if the run is killed or a newer checkpoint is damaged. With
// --keep 2 older ones are removed for room; with --keep 1 there is room, and the older one is removed last.
static void test_little_room_under_attack(void) {
    long calls = calls_of_run[CALLS] - 10, keep = 2; // these runs may make a few calls fewer
    Some some = some_calls(calls / 11);
    for (long n = some.first; n <= calls; n += some.stride, keep = 3 - keep) {
        const char *what = path_of("little room, --keep %ld, killed at call %ld", keep, n);
        remove_part();
        faults_plan(FAULT_KILL, -1, n, 0);
        faults->disk_kb = disk_of(2);
        CHECK(trainer_run(COMMAND "--keep %ld --out part", keep) == 1000 + SIGKILL, "%s: %s", what, log_tail());
        check_nothing_lost(what);
        no_faults();
        faults->disk_kb = disk_of(2); // removing the killed save's files makes room
        CHECK(trainer_run(COMMAND "--keep %ld --out part", keep) == 0, "%s: resumed: %s", what, log_tail());
        CHECK(count_checkpoints("part") == keep, "%s: %d are kept", what, count_checkpoints("part"));
        check_same_end("whole", "part", what);
    }
}

// A checkpoint is read back before older ones are removed: two good checkpoints remain, as --keep 2 promises.
static void test_disk_that_lies(void) {
    long last = newest_step("whole");
    begin_part();
    faults->flip_step = 9;
    CHECK_RUN(trainer_run(COMMAND "--out part --keep 2"), 0, "step 9 was not saved", "XXH3");
    CHECK(faults->struck == 1, "%ld calls failed", (long)faults->struck);
    check_same_end("whole", "part", "a checkpoint that was not as written");
    begin_part();
    faults->flip_step = last;
    CHECK_RUN(trainer_run(COMMAND "--out part --keep 2"), ERR_WRITE, "does not give back");
    CHECK(faults->struck == 1, "%ld calls failed", (long)faults->struck);
    CHECK(newest_step("part") == (last - 1) / 3 * 3 && count_good("part") == 2, "%d good ones are left",
          count_good("part"));
    check_resumes("the last checkpoint was not as written");
}

// Begins "part" as a copy of the undisturbed run.
static void begin_with_whole(void) {
    begin_part();
    copy_tree("whole", "part");
}

// ---- Nothing good is lost -------------------------------------------------------------------------------------------

// Other files fill the disk: older checkpoints are removed to make room for a save and for the log's waiting lines.
// Training continues.
static void test_log_waits_for_room(void) {
    begin_part();
    CHECK_RUN(trainer_run(COMMAND "--keep 0 --out kept"), 0);
    for (int step = 3; step <= 9; step += 3)
        copy_tree(path_of("kept/step_%08d", step), path_of("part/step_%08d", step));
    copy_file("kept/metrics.jsonl", "part/metrics.jsonl");
    no_faults();
    faults->disk_kb = disk_used_kb("part") + 16;
    faults->log_needs_kb = 20;
    CHECK_RUN(trainer_run(COMMAND "--keep 4 --out part"), 0, "note: removed part/step_00000006 to make room",
              "warning: part/metrics.jsonl: cannot write: No space left on device: the log waits in memory");
    CHECK(faults->struck > 0, "%ld lines", (long)faults->struck);
    check_same_end("whole", "part", "a full disk");

    begin_with_whole(); // lines that a resume cuts wait for the room that the cut makes
    remove_tree(path_of("part/step_%08ld", newest_step("part")));
    faults_plan(FAULT_ONCE, CALL_WRITE, 2, ENOSPC); // the first write is run.json's
    CHECK_RUN(trainer_run(COMMAND "--out part"), 0);
    CHECK(file_mentions("part/metrics.rolled_back.jsonl", "{\"step\": 37,"), "they are lost");
}

static void test_saves_before_unreadable_data(void) {
    check_unreadable_data(0, "/train.bin", 50, "--train-tokens 900 --checkpoint-every 0");
    CHECK(same_metrics("whole/metrics.jsonl", "part/metrics.jsonl"), "other metrics");
    check_unreadable_data(0, "/val.bin", 50, "--train-tokens 900 --checkpoint-every 0");
}

// A thread reads each row once, before its use. The main thread opens the data and reads the first micro-step's 4 rows.
static void test_reads_ahead(void) {
    const long opening = 3, rows = 10 * 8;
    remove_part();
    faults_plan(FAULT_NONE, -1, 0, EIO);
    strcpy(faults->unreadable, "/train.bin");
    faults->readable = LONG_MAX;
    CHECK_RUN(trainer_run("train_gpt2 --train train.bin --model d1 --vocab-size 64 --heads 1 --channels 16 --seq-len 8 "
                          "--threads 1 --micro-batch 4 --batch-tokens 64 --steps 10 --out part"),
              0);
    CHECK(faults->reads == opening + rows + 4, "%ld reads", (long)faults->reads);
    CHECK(faults->main_reads == opening + 4, "%ld reads by the main thread", (long)faults->main_reads);
}

// The run directory is moved or removed, or another run gets its name. The run writes nothing under that name. It saves
// in its moved directory, and says so at its end.
static void test_the_name_leads_elsewhere(void) {
    for (int how = 0; how < 3; how++) {
        begin_part();
        remove_tree("moved");
        pid_t child = trainer_begin(ENDLESS "--out part");
        wait_for("part/metrics.jsonl", "{\"step\": 9,");
        kill(child, SIGSTOP);
        waitpid(child, NULL, WUNTRACED); // until the run has stopped: it may be saving
        if (how == 2) remove_tree("part");
        else CHECK(rename("part", "moved") == 0, "rename");
        kill(child, SIGCONT);
        CHECK(rename("log", "first.log") == 0, "rename");
        if (how == 1) CHECK_RUN(trainer_run(COMMAND "--out part"), 0);
        kill(child, SIGTERM);
        CHECK(trainer_wait(child) == ERR_WRITE, "%d: it did not fail", how);
        CHECK(file_mentions("first.log", how == 2 ? " is not saved, and "
                                                  : " is saved in this run's directory: part no "
                                                    "longer leads to this run's directory, which is now "),
              "%d", how);
        if (how < 2) CHECK_RUN(trainer_run("train_gpt2 --check moved"), 0);
        if (how == 1) check_same_end("whole", "part", "another run's place");
        else CHECK(!file_exists("part"), "it is made again");
    }
}

// An unreadable file is not damaged, and a directory whose listing fails once has checkpoints: the run ends and changes
// none of its files.
static void test_unreadable_is_not_damaged(void) {
    static const int errors[] = {EACCES, ESTALE, EIO};
    static const char *const files[] = {"MANIFEST.json", "training/state.json", "training/optimizer.safetensors",
                                        "run.json", ": cannot list"};
    long newest = newest_step("whole");
    for (int i = 0; i < 5; i++) {
        const char *said = i < 3 ? path_of("part/step_%08ld/%s", newest, files[i]) : files[i];
        begin_with_whole();
        faults_plan(FAULT_NONE, -1, 0, errors[i % 3]);
        if (i < 4) strcpy(faults->unreadable, said);
        faults->unlisted = i == 4;
        CHECK_RUN(trainer_run("--train-tokens 1300 --checkpoint-every 3 --out part"), ERR_INPUT,
                  strerror(errors[i % 3]), said, "!Skipped", "!--fresh");
        CHECK(i > 2 || log_mentions("nothing was changed: make it readable and start again"), "%s", log_tail());
        CHECK(newest_step("part") == newest && same_file("whole/metrics.jsonl", "part/metrics.jsonl") &&
                  same_file("whole/run.json", "part/run.json"),
              "%s: the run changed", files[i]);
        check_resumes(files[i]);
    }
}

// ---- Damage ---------------------------------------------------------------------------------------------------------

static void flip_bit(const char *path, uint64_t bit) {
    size_t bytes;
    char *text = read_text(path, &bytes);
    Error e;
    if (text) text[bit / 8] ^= (char)(1 << bit % 8);
    CHECK(text && file_replace(IN_PATH, path, text, bytes, &e) == 0, "%s", path);
    memory_free(text);
}

static uint64_t bits_of(const char *path) {
    struct stat st;
    return stat(path, &st) == 0 ? 8 * (uint64_t)st.st_size : 0;
}

// A run skips a damaged checkpoint, says so, and still ends right. --model refuses a damaged checkpoint, unless only
// the optimizer's file is damaged.
static void test_falls_back(void) {
    static const char *const files[] = {
        "model.safetensors", "MANIFEST.json", "training/state.json", "config.json", "training/optimizer.safetensors",
        "vocab.json", "merges.txt", "tokenizer_config.json", "generation_config.json"};
    for (size_t i = 0; i < sizeof files / sizeof *files; i++) {
        begin_with_whole();
        long newest = newest_step("part");
        char path[80];
        snprintf(path, sizeof path, "part/step_%08ld/%s", newest, files[i]);
        flip_bit(path, draw((uint32_t)bits_of(path)));
        CHECK_RUN(trainer_run(COMMAND "--out part"), 0, path, "Skipped");
        CHECK(access(path_of("part/step_%08ld.damaged/%s", newest, files[i]), F_OK) == 0,
              "the damaged one was removed");
        check_same_end("whole", "part", files[i]);
        const char *damaged = path_of("part/step_%08ld.damaged", newest);
        bool of_moments = strcmp(files[i], "training/optimizer.safetensors") == 0;
        CHECK_RUN(trainer_run("train_gpt2 --sample-only --threads 1 --sample-tokens 2 --model %s", damaged),
                  of_moments ? 0 : ERR_INPUT, of_moments ? "" : damaged);
        CHECK_RUN(trainer_run("train_gpt2 --check %s", damaged), ERR_INPUT, files[i]);
        if (i > 0) continue;
        flip_bit(path, 77); // a second damaged checkpoint does not overwrite the first
        CHECK_RUN(trainer_run(COMMAND "--out part"), 0,
                  path_of("part/step_%08ld is now part/step_%08ld.damaged.2\n", newest, newest));
    }
    CHECK_RUN(trainer_run("train_gpt2 --check part"), 0, ": undamaged\n");
    for (long step = newest_step("part"); step >= 0; step--) // if all are damaged, the run must not start over
        if (access(path_of("part/step_%08ld", step), F_OK) == 0)
            unlink(path_of("part/step_%08ld/training/state.json", step));
    CHECK_RUN(trainer_run(COMMAND "--out part"), ERR_INPUT, "all of its 2 checkpoints");
}

// Runs --check on parts of a checkpoint, and on one without its manifest.
static void test_check_of_a_file(void) {
    remove_part();
    copy_tree(path_of("whole/step_%08ld", newest_step("whole")), "part/step_00000001");
    CHECK_RUN(trainer_run("train_gpt2 --check part/step_00000001/model.safetensors"), ERR_INPUT, "name its directory");
    CHECK_RUN(trainer_run("train_gpt2 --check part/step_00000001/training"), ERR_INPUT, "name the checkpoint");
    rename("part/step_00000001/MANIFEST.json", "aside");
    CHECK_RUN(trainer_run("train_gpt2 --check part/step_00000001"), ERR_INPUT, "an incomplete checkpoint");
}

// ---- Signals --------------------------------------------------------------------------------------------------------

static pid_t start_and_wait_for_steps(const char *command) {
    pid_t child = trainer_begin("%s", command);
    wait_for("log", "engine ");
    return child;
}

static void test_signals(void) {
    static const int signals[] = {SIGUSR1, SIGTERM, SIGINT, SIGHUP, SIGXCPU};
    static const char *const names[] = {"SIGUSR1", "SIGTERM", "SIGINT", "SIGHUP", "SIGXCPU"};
    int rounds = trainer.thorough ? 200 : 10, stopped = 0;
    remove_part();
    for (int i = 0; i < rounds || (!stopped && i < 100); i++) {
        no_faults();
        pid_t child = start_and_wait_for_steps(COMMAND "--out part");
        usleep(draw(4000));
        kill(child, signals[i % 5]);
        if (signals[i % 5] == SIGXCPU) usleep(100), kill(child, SIGXCPU); // as the kernel does every second
        int code = trainer_wait(child);
        CHECK(code == 0 || code == ERR_STOPPED, "exit code %d: %s", code, log_tail());
        if (code == ERR_STOPPED) {
            stopped++;
            const char *saved = path_of("saved in part/step_%08ld", newest_step("part"));
            CHECK(log_mentions(names[i % 5]) && log_mentions(saved), "no '%s' in: %s", saved, log_tail());
            continue;
        }
        check_same_end("whole", "part", "after signals");
        remove_part();
    }
    CHECK(stopped > 0, "no signal came in time");
    check_resumes("after signals");
}

static void test_second_signal_ends_at_once(void) {
    begin_part();
    pid_t child = start_and_wait_for_steps(UNSAVED "--out part");
    faults->slow_us = 30000000; // so slow that the second signal comes during the save
    kill(child, SIGTERM);
    kill(child, SIGTERM); // again, as `timeout` may send it
    for (int i = 0; i < 60000 && !faults->slowed; i++) usleep(1000);
    CHECK(faults->slowed, "no save began");
    usleep(1000000 * SIGNALS_TOGETHER);
    double before = clock_seconds();
    kill(child, SIGTERM);
    CHECK_RUN(trainer_wait(child), 1000 + SIGTERM);
    CHECK(clock_seconds() - before < 20, "took %.2f s", clock_seconds() - before);
    remove_part();
    check_resumes("two signals");
}

// A closed terminal sends SIGHUP to the shell and its job, and to the job again when the shell ends. Under nohup the
// run ignores SIGHUP.
static void test_hangups(void) {
    begin_part();
    faults->slow_us = 100000;
    signal(SIGHUP, SIG_DFL); // these tests may run under nohup
    pid_t child = start_and_wait_for_steps(ENDLESS "--out part");
    for (int i = 0; i < 3; i++) kill(child, SIGHUP), usleep(20000);
    CHECK_RUN(trainer_wait(child), ERR_STOPPED, "stopped: SIGHUP after step",
              path_of("saved in part/step_%08ld", newest_step("part")));
    begin_part();
    signal(SIGHUP, SIG_IGN);
    child = start_and_wait_for_steps(COMMAND "--out part");
    signal(SIGHUP, SIG_DFL);
    kill(child, SIGHUP);
    CHECK_RUN(trainer_wait(child), 0);
    check_same_end("whole", "part", "nohup");
}

// A second run is refused before it reads checkpoints: it must not set aside what the first run is saving.
static void test_one_run_at_a_time(void) {
    begin_with_whole();
    faults->slow_us = 200000;
    pid_t child = start_and_wait_for_steps(ENDLESS "--out part");
    CHECK_RUN(trainer_run(COMMAND "--deadline 1 --out part"), ERR_USAGE, "another run is writing to it",
              "!this run is complete", path_of(" process %ld on ", (long)child));
    kill(child, SIGKILL);
    trainer_wait(child);
    remove_part();
    check_resumes("one at a time");
}

// Starts a process that holds the lock of "part" until it is killed. run.json names its host as `host`.
static pid_t lock_part(const char *host) {
    int fd = open("part/metrics.jsonl", O_WRONLY | O_APPEND);
    CHECK(fd >= 0 && flock(fd, LOCK_EX | LOCK_NB) == 0, "cannot lock part");
    pid_t child = fork();
    if (!child) pause(), _exit(0);
    close(fd);
    const char *json = path_of("{\"parts\": [{}, {\"host\": \"%s\", \"process\": %ld}]}", host, (long)child);
    CHECK_OK(file_replace(IN_PATH, "part/run.json", json, strlen(json), &(Error){0}), &(Error){0});
    return child;
}

static void release(pid_t holder) {
    kill(holder, SIGKILL);
    waitpid(holder, NULL, 0);
}

// A run waits for the lock of a process that is ending, or of a crashed machine. It says at once that it waits, stops
// on a signal, and waits no longer than --deadline.
static void test_waits_for_a_lock(void) {
    char here[256] = "";
    gethostname(here, sizeof here - 1);
    begin_with_whole();
    pid_t lock = lock_part(here), child = trainer_begin(COMMAND "--out part");
    wait_for("log", "Waiting up to 5 s");
    CHECK(log_mentions(path_of("another run is writing to it; the last known one is process %ld on ", (long)lock)),
          "%s", log_tail());
    release(lock);
    CHECK_RUN(trainer_wait(child), 0, "this run is complete");
    lock = lock_part("elsewhere");
    child = trainer_begin(COMMAND "--out part");
    wait_for("log", "Waiting up to 120 s");
    kill(child, SIGTERM);
    CHECK_RUN(trainer_wait(child), ERR_STOPPED, "stopped: SIGTERM while part was locked");
    CHECK_RUN(trainer_run(COMMAND "--deadline 1 --out part"), ERR_USAGE, "up to 1 s");
    release(lock);
}

// ---- Checkpoints without a run --------------------------------------------------------------------------------------

// With any --keep and any damage the newest good checkpoint stays; --keep counts only complete checkpoints.
static void test_retention(void) {
    int rounds = trainer.thorough ? 1000 : 60;
    Error e = {0};
    for (int round = 0; round < rounds; round++) {
        int64_t keep = draw(5) + 1, newest = 0;
        int whole = 0, good = 0;
        remove_tree("kept");
        CHECK_OK(directory_create("kept", &e), &e);
        for (int step = 1; step <= 6; step++) {
            make_checkpoint("kept", step, "made by a test", &step, sizeof step);
            if (draw(3) == 0) unlink(path_of("kept/step_%08d/state.json", step));
            else newest = step, whole++;
            Archive archive = archive_at("kept");
            CHECK_OK(archive_thin(&archive, &(Spare){.keep = keep, .back = INT64_MAX}, stderr, &e), &e);
            archive_close(&archive);
            CHECK(!newest || newest_whole_step("kept", &e) == newest, "step %ld is lost", (long)newest);
        }
        for (int step = 1; step <= 6; step++) good += file_exists(path_of("kept/step_%08d/state.json", step));
        CHECK(good == (whole < keep ? whole : keep), "%d of %d kept with --keep %ld", good, whole, (long)keep);
        CHECK(count_checkpoints("kept") <= keep + 6 - whole, "%d are left", count_checkpoints("kept"));
    }
}

int main(void) {
    trainer_setup();
    faults_setup();
    random_begin();
    RUN(test_undisturbed, test_killed_at_every_call, test_calls_that_fail, test_no_room, test_little_room,
        test_little_room_under_attack, test_disk_that_lies, test_log_waits_for_room, test_saves_before_unreadable_data,
        test_reads_ahead, test_the_name_leads_elsewhere, test_unreadable_is_not_damaged, test_falls_back,
        test_check_of_a_file, test_signals, test_second_signal_ends_at_once, test_hangups, test_one_run_at_a_time,
        test_waits_for_a_lock, test_retention);
    return trainer_end();
}
