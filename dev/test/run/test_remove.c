// A run removes only its own checkpoints, and does not write through links, devices or FIFOs. All files at risk are in
// the scratch directory.
#include "../scratch.h"
#include "../trainer.h"

#include <sys/stat.h>

static Error e; // set by the last call that failed

#define SHORT "--checkpoint-every 3 --out out --train-tokens "

static const char *const partial = "out/.step_00000001.partial", *const first = "out/step_00000001";

static void begin(void) {
    for (int i = 0; i < 4; i++) remove_tree(path_of(i ? "out.%d" : "out", i));
    remove_tree("victim");
    CHECK_OK(directory_create("out", &e), &e);
    CHECK_OK(directory_create("victim", &e), &e);
    write_text("victim/state.json", "precious");
}

static void check_victim(const char *what) {
    CHECK(file_mentions("victim/state.json", "precious"), "%s: the victim is lost", what);
}

// Thins the run to `keep` checkpoints, tidies up, and compares the notes.
static void check_thin(int64_t keep, const char *said) {
    Text notes;
    Archive archive = archive_at("out");
    CHECK_OK(text_begin(&notes, &e), &e);
    CHECK_OK(archive_thin(&archive, &(Spare){.keep = keep, .back = INT64_MAX}, notes.f, &e), &e);
    CHECK_OK(archive_tidy(&archive, false, notes.f, &e), &e);
    archive_close(&archive);
    CHECK_OK(text_end(&notes, &e), &e);
    CHECK(strcmp(notes.text, said) == 0, "'%s', not '%s'", notes.text, said);
    text_free(&notes);
}

static void test_only_own_checkpoints_go(void) {
    static const char *const ids[] = {"made by a test", "another run", "",
                                      "made by a test", "another run", "made by a test"};
    begin();
    for (int i = 0; i < 6; i++) make_checkpoint("out", i + 1, ids[i], "x", 1);
    check_thin(2, ""); // this run has checkpoints 1, 4 and 6: removes the oldest
    CHECK(count_checkpoints("out") == 5 && !file_exists(first), "%d are left", count_checkpoints("out"));
    CHECK(rename("out/step_00000004", "victim/4") == 0 && symlink("../victim/4", "out/step_00000004") == 0, "no link");
    check_thin(1, ""); // removes neither the link nor checkpoints of an older build or another run
    CHECK(count_checkpoints("out") == 5 && file_exists("victim/4/odd.bin"), "%d are left", count_checkpoints("out"));
}

static void test_a_protected_checkpoint_stays(void) {
    begin();
    for (int step = 1; step <= 2; step++) make_checkpoint("out", step, "made by a test", "x", 1);
    CHECK(chmod(first, 0555) == 0, "chmod");
    check_thin(1, "");
    CHECK(file_exists(first) && chmod(first, 0777) == 0, "%s is gone", first);
}

static void test_other_files_stay(void) {
    for (int again = 0; again < 2; again++) {
        const char *kept = again ? "out/step_00000001.kept.2" : "out/step_00000001.kept";
        if (!again) begin();
        for (int step = 1; step <= 2; step++)
            if (step == 1 || !again) make_checkpoint("out", step, "made by a test", "x", 1);
        write_text(path_of("%s/a note", first), "mine");
        check_thin(1,
                   path_of("note: %s keeps files of the removed checkpoint that this program did not write\n", kept));
        CHECK(file_mentions(path_of("%s/a note", kept), "mine") && !file_exists(path_of("%s/odd.bin", kept)), "%s",
              kept);
        check_thin(1, "");
    }
}

static void test_links_are_not_entered(void) {
    begin();
    CHECK(symlink("../victim", partial) == 0, "no link");
    check_thin(1, "");
    unlink(partial);
    CHECK(mkdir(partial, 0777) == 0 && symlink("../../victim/state.json", path_of("%s/state.json", partial)) == 0,
          "link");
    check_thin(1, "");
    CHECK(!file_exists(partial), "the partial is left");
    check_victim("links");
}

// Removing a partial checkpoint removes all files that a run writes.
static void test_nothing_of_ours_is_left(void) {
    begin();
    CHECK(trainer_run(SHORT "600") == 0 && !log_mentions(".kept"), "%s", log_tail());
    CHECK(rename(path_of("out/step_%08ld", newest_step("out")), partial) == 0, "rename");
    CHECK(unlink(path_of("%s/MANIFEST.json", partial)) == 0, "no manifest");
    check_thin(1, "");
    CHECK(!file_exists(partial), "the partial is left");
}

// Files of a killed save are removed, even from a complete run.
static void test_a_complete_run_is_tidied(void) {
    begin();
    CHECK(trainer_run(SHORT "600") == 0 && mkdir(partial, 0777) == 0, "%s", log_tail());
    write_text(path_of("%s/config.json", partial), "{}");
    CHECK_RUN(trainer_run(SHORT "600"), 0, "this run is complete");
    CHECK(!file_exists(partial), "the partial is left");
}

// --check finds no damage in a run that is removing older checkpoints.
static void test_check_of_a_running_run(void) {
    begin();
    CHECK(rename("out", "victim/out") == 0, "rename");
    pid_t child = trainer_begin("--checkpoint-every 1 --keep 1 --train-tokens 3000000 --out out");
    for (double begun = clock_seconds(); newest_step("out") < 3 && clock_seconds() - begun < 60;) usleep(1000);
    for (int i = 0; i < 10; i++) {
        rename("log", "run.log");
        CHECK(trainer_run("train_gpt2 --check out") == 0 && !log_mentions("damaged:"), "%s", log_tail());
    }
    kill(child, SIGTERM);
    CHECK(trainer_wait(child) == ERR_STOPPED, "it did not stop");
}

// A log that is a link, a FIFO or a hard link is refused; other output becomes a new file in the link's place.
static void test_no_output_through_a_link(void) {
    static const char *const names[] = {"metrics.jsonl", "samples.jsonl", "run.json.partial", "run.json"};
    for (int i = 0; i < 4; i++)
        for (int kind = 0; kind < 3; kind++) {
            const char *path = path_of("out/%s", names[i]);
            begin();
            CHECK((kind == 0   ? symlink("../victim/state.json", path)
                   : kind == 1 ? mkfifo(path, 0600)
                               : link("victim/state.json", path)) == 0,
                  "%s", path);
            int code = trainer_run(SHORT "300 --sample-every 5");
            bool refused = code == ERR_WRITE || code == ERR_INPUT;
            CHECK(i < 2 ? refused && log_mentions(path_of("error: %s: ", path)) : code == 0, "%s, %d: exit code %d: %s",
                  path, kind, code, log_tail());
            check_victim(path);
        }
}

int main(void) {
    trainer_setup();
    RUN(test_only_own_checkpoints_go, test_a_protected_checkpoint_stays, test_other_files_stay,
        test_links_are_not_entered, test_nothing_of_ours_is_left, test_a_complete_run_is_tidied,
        test_check_of_a_running_run, test_no_output_through_a_link);
    return trainer_end();
}
