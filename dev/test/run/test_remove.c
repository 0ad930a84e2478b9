// What a run removes and what it writes over: nothing outside its directory, nothing that it did not write, and nothing
// through a link, a device or a FIFO. All files at risk are in the scratch directory; root becomes an ordinary user.
#define _GNU_SOURCE
#include "../trainer.h"

#include <errno.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>

#define LONG  "--checkpoint-every 3 --out out --train-tokens "
#define SHORT LONG "600 "

// ---------------------------------------------------------------------------------------------------------------------
// A rival, who takes a name while the call before is looked at: the linker sends these calls here

static struct {
    void (*act)(void);
    long at, count; // before the at-th call
} rival;

static void rival_begin(long at, void (*act)(void)) {
    rival.act = act;
    rival.at = at;
    rival.count = 0;
}

static bool rival_end(void) { // has it acted?
    bool acted = rival.count >= rival.at;
    rival.act = NULL;
    return acted;
}

static void before_call(void) {
    void (*act)(void) = rival.act;
    if (!act || ++rival.count != rival.at) return;
    rival.act = NULL;
    act();
    rival.act = act;
}

int __real_lstat(const char *path, struct stat *st);
int __wrap_lstat(const char *path, struct stat *st);
int __wrap_lstat(const char *path, struct stat *st) {
    before_call();
    return __real_lstat(path, st);
}

int __real_unlink(const char *path);
int __wrap_unlink(const char *path);
int __wrap_unlink(const char *path) {
    before_call();
    return __real_unlink(path);
}

int __real_open(const char *path, int flags, ...);
int __wrap_open(const char *path, int flags, ...);
int __wrap_open(const char *path, int flags, ...) {
    va_list args;
    va_start(args, flags);
    mode_t mode = flags & O_CREAT ? va_arg(args, mode_t) : 0;
    va_end(args);
    before_call();
    return __real_open(path, flags, mode);
}

int __real_openat(int directory, const char *name, int flags, ...);
int __wrap_openat(int directory, const char *name, int flags, ...);
int __wrap_openat(int directory, const char *name, int flags, ...) {
    va_list args;
    va_start(args, flags);
    mode_t mode = flags & O_CREAT ? va_arg(args, mode_t) : 0;
    va_end(args);
    before_call();
    return __real_openat(directory, name, flags, mode);
}

int __real_fstatat(int directory, const char *name, struct stat *st, int flags);
int __wrap_fstatat(int directory, const char *name, struct stat *st, int flags);
int __wrap_fstatat(int directory, const char *name, struct stat *st, int flags) {
    before_call();
    return __real_fstatat(directory, name, st, flags);
}

int __real_rename(const char *from, const char *to);
int __wrap_rename(const char *from, const char *to);
int __wrap_rename(const char *from, const char *to) {
    before_call();
    return __real_rename(from, to);
}

int __real_unlinkat(int directory, const char *name, int flags);
int __wrap_unlinkat(int directory, const char *name, int flags);
int __wrap_unlinkat(int directory, const char *name, int flags) {
    before_call();
    return __real_unlinkat(directory, name, flags);
}

// ---- Victims and checkpoints ----------------------------------------------------------------------------------------

// One file of the user's own, one called like a checkpoint's, one in a directory.
static const char *const victim_files[] = {"notes.txt", "state.json", "inner/state.json"};

static void write_text(const char *path, const char *text) {
    Error e = {0};
    CHECK_OK(file_save(path, text, strlen(text), &e), &e);
}

static void make_victim(const char *directory) {
    Error e = {0};
    CHECK_OK(directory_create(path_of("%s/inner", directory), &e), &e);
    for (int i = 0; i < 3; i++) write_text(path_of("%s/%s", directory, victim_files[i]), victim_files[i]);
}

static void check_victim(const char *directory, const char *what) {
    for (int i = 0; i < 3; i++)
        CHECK(file_mentions(path_of("%s/%s", directory, victim_files[i]), victim_files[i]), "%s: %s/%s is lost", what,
              directory, victim_files[i]);
}

static const char *const partial = "out/.step_00000001.partial", *const first = "out/step_00000001";

static void make_checkpoint(int64_t step) {
    char directory[ARCHIVE_PATH], final[ARCHIVE_PATH];
    static const char *const names[] = {"state.json", "config.json", "odd.bin"}; // one that only the manifest knows
    Manifest manifest = {.count = 0};
    FileDigest digest;
    Error e = {0};
    CHECK_OK(archive_begin("out", step, directory, &manifest, stderr, &e), &e);
    for (int i = 0; i < 3; i++) {
        CHECK_OK(file_save_in(IN_PATH, path_of("%s/%s", directory, names[i]), "x", 1, &digest, &e), &e);
        manifest_add(&manifest, names[i], digest);
    }
    CHECK_OK(archive_commit("out", step, &manifest, final, &e), &e);
}

static void begin(void) {
    Error e = {0};
    remove_tree("out");
    remove_tree("victim");
    remove_tree("moved");
    CHECK_OK(directory_create("out", &e), &e);
    make_victim("victim");
}

// What a function of the archive says in its notes, from memory_alloc.
static char *notes_of(int (*call)(FILE *notes, Error *e)) {
    size_t bytes;
    Error e = {0};
    FILE *notes = fopen("notes", "w");
    CHECK_OK(call(notes, &e), &e);
    fclose(notes);
    return read_text("notes", &bytes);
}

static int tidy(FILE *notes, Error *e) { return archive_tidy("out", notes, e); }
static int thin(FILE *notes, Error *e) { return archive_thin("out", 1, -1, notes, e); }
static int begin_again(FILE *notes, Error *e) {
    char directory[ARCHIVE_PATH];
    Manifest manifest = {.count = 0};
    int code = archive_begin("out", 1, directory, &manifest, notes, e);
    manifest_release(&manifest);
    return code;
}

static int count_in(const char *directory) {
    Names names;
    Error e = {0};
    if (directory_list(directory, &names, &e) != 0) return -1;
    int count = names.count;
    names_free(&names);
    return count;
}

// ---- Links ----------------------------------------------------------------------------------------------------------

static void test_a_link_for_an_unfinished_checkpoint(void) {
    const char *const targets[] = {"../victim", path_of("%s/victim", trainer.scratch), "victim", "../nowhere"};
    for (int i = 0; i < 4; i++)
        for (int tidies = 0; tidies < 2; tidies++) {
            begin();
            make_victim("out/victim");
            CHECK(symlink(targets[i], partial) == 0, "no link");
            char *said = notes_of(tidies ? tidy : begin_again);
            CHECK(said && !*said, "%s: '%s'", targets[i], said);
            CHECK(tidies ? !file_exists(partial) : count_in(partial) == 0, "%s: the link is left", targets[i]);
            check_victim("victim", targets[i]);
            check_victim("out/victim", targets[i]);
            memory_free(said);
        }
}

static void test_links_in_an_unfinished_checkpoint(void) {
    Error e = {0};
    begin();
    CHECK_OK(directory_create(partial, &e), &e);
    CHECK(symlink("../../victim/state.json", path_of("%s/state.json", partial)) == 0, "no link");
    CHECK(symlink("../../victim", path_of("%s/config.json", partial)) == 0, "no link");
    CHECK(symlink("../../victim", path_of("%s/mine", partial)) == 0, "no link");
    char *said = notes_of(tidy);
    CHECK(said && strstr(said, "out/step_00000001.kept") && strstr(said, ": mine\n"), "'%s'", said);
    CHECK(!file_exists(partial) && count_in("out/step_00000001.kept") == 1, "files of the checkpoint are left");
    check_victim("victim", "links inside");
    memory_free(said);
}

// A checkpoint that was moved to another disk and linked back.
static void test_a_link_for_an_old_checkpoint(void) {
    for (int absolute = 0; absolute < 2; absolute++) {
        Error e = {0};
        begin();
        for (int step = 1; step <= 3; step++) make_checkpoint(step);
        CHECK(rename(first, "moved") == 0, "rename");
        CHECK(symlink(absolute ? path_of("%s/moved", trainer.scratch) : "../moved", first) == 0, "no link");
        CHECK_OK(archive_verify(first, NULL, &e), &e); // reading through it works
        char *said = notes_of(thin);
        CHECK(said && !*said && count_in("out") == 1, "'%s', and %d are left", said, count_in("out"));
        CHECK_OK(archive_verify("moved", NULL, &e), &e);
        memory_free(said);
    }
}

// ---- Files of others ------------------------------------------------------------------------------------------------

static void test_other_files_stay_and_are_named_once(void) {
    static const char *const kept[] = {"out/step_00000001.kept", "out/step_00000001.kept.2"};
    for (int again = 0; again < 2; again++) {
        int count;
        Error e = {0};
        if (!again) begin();
        else remove_tree("out/step_00000002");
        for (int step = 1; step <= 2; step++) make_checkpoint(step);
        make_victim(path_of("%s/plots", first));
        write_text(path_of("%s/a note", first), "mine");
        char *said = notes_of(thin);
        CHECK(said && strstr(said, kept[again]) && strstr(said, ": a note, plots\n") &&
                  strchr(said, '\n') == said + strlen(said) - 1,
              "'%s'", said);
        memory_free(said);
        check_victim(path_of("%s/plots", kept[again]), "a directory in a checkpoint");
        CHECK(file_mentions(path_of("%s/a note", kept[again]), "mine") && count_in(kept[again]) == 2, "not just these");
        CHECK_OK(archive_count("out", &count, &e), &e);
        CHECK(count == 1, "%d checkpoints", count);
        said = notes_of(thin);
        CHECK(said && !*said, "said again: '%s'", said);
        memory_free(said);
        said = notes_of(tidy);
        CHECK(said && !*said && file_exists(kept[again]), "tidied up: '%s'", said);
        memory_free(said);
    }
}

static void test_what_is_no_checkpoint_stays(void) {
    begin();
    make_victim(partial); // a name of ours, and a directory with a name of ours, in what may be ours
    remove_tree(path_of("%s/inner", partial));
    make_victim(path_of("%s/config.json", partial));
    make_victim("out/.step_mine.partial");
    write_text("out/.step_00000002.partial", "a file");
    char *said = notes_of(tidy);
    CHECK(said && strstr(said, ": config.json, notes.txt\n") && strstr(said, "out/step_00000002.kept "), "'%s'", said);
    check_victim("out/.step_mine.partial", "another name");
    check_victim("out/step_00000001.kept/config.json", "a directory with the name of a file");
    CHECK(file_mentions("out/step_00000002.kept", "a file"), "a file is lost");
    memory_free(said);
}

// All that a run writes is removed, with the manifest or without.
static void test_nothing_of_ours_is_left(void) {
    begin();
    CHECK(trainer_run(SHORT) == 0 && !log_mentions(".kept"), "%s", log_tail());
    CHECK(rename(path_of("out/step_%08ld", newest_step("out")), partial) == 0, "rename");
    CHECK(unlink(path_of("%s/MANIFEST.json", partial)) == 0 && count_in(partial) > 3, "too few files");
    char *said = notes_of(tidy);
    CHECK(said && !*said && !file_exists(partial), "'%s'", said);
    memory_free(said);
}

// ---- A directory that becomes a link, or a file that becomes one, at any call ---------------------------------------

static void swap_for_link(void) {
    if (rename(partial, "moved") == 0) CHECK(symlink("../victim", partial) == 0, "no link");
}

static void test_a_directory_replaced_by_a_link(void) {
    bool acted = true;
    long n = 0;
    while (acted && !test_state.failures) {
        Error e = {0};
        begin();
        make_checkpoint(1);
        CHECK(rename(first, partial) == 0, "rename");
        rival_begin(++n, swap_for_link);
        archive_tidy("out", stderr, &e); // may fail
        acted = rival_end();
        check_victim("victim", path_of("call %ld", n));
    }
    CHECK(n > 8, "%ld calls", n);
}

// Files of a checkpoint land in the directory that was made for it, or nowhere.
static int write_checkpoint(Error *e) {
    static const char *const names[] = {"state.json", "notes.txt", "config.json"};
    char directory[ARCHIVE_PATH], final[ARCHIVE_PATH];
    Manifest manifest = {.count = 0};
    TRY(archive_begin("out", 1, directory, &manifest, stderr, e));
    int code = 0;
    for (int i = 0; i < 3 && !code; i++) code = manifest_save(&manifest, directory, names[i], "x", 1, e);
    if (!code) code = archive_commit("out", 1, &manifest, final, e);
    if (code) archive_abandon("out", 1, &manifest, stderr);
    return code;
}

static void test_a_new_checkpoint_replaced_by_a_link(void) {
    bool acted = true;
    long n = 0, failed = 0;
    while (acted && !test_state.failures) {
        Error e = {0};
        begin();
        rival_begin(++n, swap_for_link);
        failed += write_checkpoint(&e) != 0;
        acted = rival_end();
        check_victim("victim", path_of("call %ld", n));
        CHECK(count_in("victim") == 3, "call %ld: it wrote into the victim", n);
    }
    CHECK(n > 12 && failed > 8, "%ld calls, %ld failures", n, failed);
}

static void swap_for_file_link(void) {
    unlink("out/file");
    CHECK(symlink("../victim/notes.txt", "out/file") == 0, "no link");
}

static void swap_for_hard_link(void) {
    unlink("out/file");
    CHECK(link("victim/notes.txt", "out/file") == 0, "no link");
}

static void swap_for_fifo(void) {
    unlink("out/file");
    CHECK(mkfifo("out/file", 0600) == 0, "no FIFO");
}

static void test_a_file_replaced_by_a_link_or_a_fifo(void) {
    static void (*const swaps[])(void) = {swap_for_file_link, swap_for_hard_link, swap_for_fifo};
    for (int kind = 0; kind < 3; kind++)
        for (long n = 1; n <= 3; n++) {
            OutFile *file;
            Error e = {0};
            begin();
            write_text("out/file", "old");
            rival_begin(n, swaps[kind]);
            int code = outfile_create(&file, IN_PATH, "out/file", &e);
            CHECK(rival_end(), "no call %ld", n);
            if (code == 0) CHECK_OK(outfile_finish(file, NULL, &e), &e);
            CHECK(code == (n == 2 || (kind == 1 && n == 1) ? 0 : ERR_WRITE), "call %ld: %d: %s", n, code, e.what);
            check_victim("victim", "a file that became a link");
        }
}

// ---- Hard links -----------------------------------------------------------------------------------------------------

static void test_no_output_through_a_hard_link(void) {
    static const char *const names[] = {"metrics.jsonl", "samples.jsonl", "run.json.partial", "run.json", "written_by"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        begin();
        CHECK(link("victim/notes.txt", path_of("out/%s", names[i])) == 0, "no link");
        CHECK(trainer_run(SHORT "--sample-every 5") == 0, "%s: %s", names[i], log_tail());
        check_victim("victim", names[i]);
        remove_tree("out.1");
    }
}

// A snapshot of hard links (cp -al) stays as it is while the run continues.
static void test_a_snapshot_keeps_its_logs(void) {
    static const char *const logs[] = {"metrics.jsonl", "samples.jsonl"};
    begin();
    CHECK(trainer_run(SHORT "--sample-every 5") == 0, "%s", log_tail());
    for (int i = 0; i < 2; i++) {
        CHECK(link(path_of("out/%s", logs[i]), path_of("victim/%s", logs[i])) == 0, "no link");
        copy_file(path_of("out/%s", logs[i]), path_of("before.%s", logs[i]));
    }
    CHECK(trainer_run(LONG "1300 --sample-every 5") == 0, "%s", log_tail());
    for (int i = 0; i < 2; i++) {
        CHECK(same_file(path_of("victim/%s", logs[i]), path_of("before.%s", logs[i])), "%s changed", logs[i]);
        CHECK(!same_file(path_of("out/%s", logs[i]), path_of("before.%s", logs[i])), "%s did not grow", logs[i]);
    }
    CHECK(!file_exists("out/metrics.jsonl.partial"), "a copy is left");
}

// ---- Outputs --------------------------------------------------------------------------------------------------------

static bool have_device; // "device", for whom root made it

// In the way of an output: 0: a link to a file, 1: to none, 2: a FIFO, 3: a device.
static bool put_in_the_way(int kind, const char *path) {
    if (kind == 0) return symlink("../victim/notes.txt", path) == 0;
    if (kind == 1) return symlink("../victim/new.txt", path) == 0;
    return kind == 2 ? mkfifo(path, 0600) == 0 : link("device", path) == 0;
}

static void test_no_output_through_a_link(void) {
    static const char *const names[] = {"metrics.jsonl", "samples.jsonl", "run.json.partial", "run.json", "written_by"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        for (int kind = 0; kind < 3 + have_device; kind++) {
            size_t bytes;
            const char *path = path_of("out/%s", names[i]);
            begin();
            CHECK(put_in_the_way(kind, path), "%s: %s", path, strerror(errno));
            int code = trainer_run(SHORT);
            char *said = read_text("log", &bytes);
            CHECK(code == ERR_WRITE, "%s, kind %d: exit code %d: %s", names[i], kind, code, said);
            CHECK(said && strstr(said, path_of("error: %s: ", path)) && strstr(said, "move it away"), "%s", said);
            check_victim("victim", names[i]);
            CHECK(!file_exists("victim/new.txt") && file_exists(path), "%s, kind %d", names[i], kind);
            memory_free(said);
        }
}

// A run that resumes cuts its samples back to its checkpoint.
static void test_nothing_is_cut_back_through_a_link(void) {
    begin();
    CHECK(trainer_run(SHORT "--keep 0") == 0, "%s", log_tail());
    remove_tree(path_of("out/step_%08ld", newest_step("out")));
    CHECK(symlink("../victim/notes.txt", "out/samples.jsonl") == 0, "no link");
    int code = trainer_run(SHORT "--keep 0");
    CHECK(code == ERR_WRITE && log_mentions("samples.jsonl: "), "%d: %s", code, log_tail());
    check_victim("victim", "samples");
}

// ---- The whole program, as it was found -----------------------------------------------------------------------------

static void test_a_run_enters_no_link(void) {
    begin();
    CHECK(symlink("../victim", "out/.step_00000006.partial") == 0, "no link");
    CHECK(symlink("../victim", "out/.step_00000777.partial") == 0, "no link");
    CHECK(trainer_run(SHORT) == 0, "%s", log_tail());
    CHECK(!file_exists("out/.step_00000006.partial") && !file_exists("out/.step_00000777.partial"), "links are left");
    check_victim("victim", "two links");

    long last = newest_step("out"); // moved to another disk, and then pruned
    CHECK(rename(path_of("out/step_%08ld", last), "moved") == 0, "rename");
    CHECK(symlink("../moved", path_of("out/step_%08ld", last)) == 0, "no link");
    int held = count_in("moved");
    CHECK(trainer_run(LONG "1300 --keep 2") == 0, "%s", log_tail());
    CHECK(newest_step("out") > last && !file_exists(path_of("out/step_%08ld", last)), "not pruned: %s", log_tail());
    CHECK(count_in("moved") == held && held > 3, "%d of %d files are left of it", count_in("moved"), held);
}

// Removed during the run and named once; the next start and --fresh do not mention it.
static void test_a_run_keeps_other_files(void) {
    begin();
    CHECK(trainer_run(SHORT) == 0, "%s", log_tail());
    long last = newest_step("out");
    const char *kept = path_of("out/step_%08ld.kept", last);
    write_text(path_of("out/step_%08ld/a note", last), "mine");
    CHECK(trainer_run(LONG "1300 --keep 2") == 0, "%s", log_tail());
    size_t bytes;
    char *said = read_text("log", &bytes), *note = said ? strstr(said, kept) : NULL;
    CHECK(note && strstr(note, ": a note\n") && !strstr(note + 1, kept), "named once? %s", log_tail());
    memory_free(said);
    CHECK(file_mentions(path_of("%s/a note", kept), "mine") && count_in(kept) == 1, "not just that");
    CHECK(trainer_run(LONG "2000 --keep 2") == 0 && !log_mentions(".kept"), "%s", log_tail());
    remove_tree("out.1");
    CHECK(trainer_run(SHORT "--fresh") == 0 && !log_mentions(".kept"), "%s", log_tail());
    CHECK(file_mentions(path_of("out.1/step_%08ld.kept/a note", last), "mine"), "--fresh lost it");
}

static void become_ordinary_user(void) {
    const uid_t nobody = 65534;
    if (geteuid() != 0) return;
    have_device = mknod("device", S_IFCHR | 0666, makedev(1, 7)) == 0; // one that is always full
    if ((have_device && chown("device", nobody, nobody) != 0) || chown(".", nobody, nobody) != 0) exit(1);
    if (setgid(nobody) != 0 || setuid(nobody) != 0) printf("  still root\n");
}

int main(void) {
    trainer_setup();
    become_ordinary_user();
    RUN(test_a_link_for_an_unfinished_checkpoint);
    RUN(test_links_in_an_unfinished_checkpoint);
    RUN(test_a_link_for_an_old_checkpoint);
    RUN(test_other_files_stay_and_are_named_once);
    RUN(test_what_is_no_checkpoint_stays);
    RUN(test_nothing_of_ours_is_left);
    RUN(test_a_directory_replaced_by_a_link);
    RUN(test_a_new_checkpoint_replaced_by_a_link);
    RUN(test_a_file_replaced_by_a_link_or_a_fifo);
    RUN(test_no_output_through_a_hard_link);
    RUN(test_a_snapshot_keeps_its_logs);
    RUN(test_no_output_through_a_link);
    RUN(test_nothing_is_cut_back_through_a_link);
    RUN(test_a_run_enters_no_link);
    RUN(test_a_run_keeps_other_files);
    return trainer_end();
}
