// Checks which rank a watchdog blames on boards of a few ranks. test_faults.sh tests that runs feed their watchdogs.
#include "ranks/watchdog.h"
#include "../test.h"

#include <stdatomic.h>
#include <sys/wait.h>
#include <unistd.h>

enum { MOST_RANKS = 4, ABSENT = -1, SAID = 1000 };

// A machine's board. Rank 0 reports.
typedef struct {
    const char *name;
    int ranks, here;       // number of all ranks, of ranks on this machine
    int begun[MOST_RANKS]; // collectives that each rank has begun; ABSENT: the rank never started
    int stopped;           // the rank without a heartbeat; 0: none
    bool set_up;           // some rank has not joined
    bool orphaned;
    bool hands;          // rank 0 hands work to its device when its deadline passes
    const char *says[4]; // parts of the report, with process numbers 0
    int silent;          // bits: ranks that the report must not name
} Board;

static const Board boards[] = {
    // Blame only the rank that has begun fewest collectives: the others wait for it.
    {"earliest", 4, 4, {6, 5, 4, 6}, .silent = 1 << 1 | 1 << 3,
     .says = {"step 7: no progress for 0.5 s (--deadline); last collective: a sum;",
              "; rank 2 (process 0) keeps the others waiting"}},
    {"two_earliest", 4, 4, {6, 4, 5, 4}, .silent = 1 << 2,
     .says = {"; rank 1 (process 0) keeps the others waiting; rank 3 (process 0) keeps the others waiting"}},
    {"all_level", 3, 3, {4, 4, 4}, .silent = 1 << 1 | 1 << 2, .says = {"last collective: a sum."}},
    // Blame a rank without a heartbeat, whatever collectives the others have begun.
    {"stopped", 3, 3, {6, 4, 5}, .stopped = 2, .silent = 1 << 1, .says = {"; rank 2 (process 0) is stopped or gone"}},
    {"never_started", 3, 3, {1, 1, ABSENT}, .set_up = true, .silent = 1 << 1, .says = {"set-up: ", "; rank 2 has not started"}},
    {"never_started_elsewhere", 4, 3, {1, 1, ABSENT, ABSENT}, .set_up = true, .silent = 1 << 1 | 1 << 2,
     .says = {"; 1 of this machine's 3 ranks have not started"}},
    // Without a launcher the set-up ends long before its deadline.
    {"orphaned", 2, 2, {1, ABSENT}, .set_up = true, .orphaned = true,
     .says = {"set-up: no progress for 5 s (the launcher is gone)"}},
    {"abort_waits", 2, 2, {1, 1}, .hands = true},
    // The rank that has begun fewest collectives here may wait for another machine: name the rank, blame nobody.
    {"other_machines", 4, 3, {6, 5, 4, ABSENT}, .silent = 1 << 1,
     .says = {"this machine's 3 ranks run; rank 2 (process 0) is at the earliest collective, collective number 4: look at "
              "the other machines too"}},
};

static void end(int code) { _exit(code); }

static Watchdog *watchdog_of(const Board *board, WatchdogEntry *entries, int rank, double deadline) {
    Watchdog *w = NULL;
    Error e;
    WatchdogConfig config = {.rank = rank, .ranks = board->ranks, .here = board->here, .host = "", .board = entries,
                             .deadline = deadline, .end = end, .launcher = board->orphaned ? -1 : 0};
    if (watchdog_create(&w, &config, &e)) _exit(1);
    if (!board->set_up) {
        watchdog_join(w, rank, board->ranks);
        watchdog_phase(w, PHASE_STEP, 7);
    }
    for (int i = 0; i < board->begun[rank]; i++) watchdog_begin(w, "a sum");
    return w;
}

// Ends the process with another code if the device is aborted while rank 0 hands it work.
static atomic_bool handed;
static void abort_device(void *) {
    if (!atomic_load(&handed)) _exit(3);
}

// Other ranks start first, so that rank 0 finds them on the board. Their deadlines are longer, so that rank 0 reports.
static void wait_too_long(const Board *board) {
    WatchdogEntry *entries = calloc(1, watchdog_board_bytes(board->ranks));
    for (int rank = 1; rank < board->ranks; rank++) {
        if (board->begun[rank] == ABSENT) continue;
        Watchdog *w = watchdog_of(board, entries, rank, 60);
        if (rank == board->stopped) watchdog_destroy(w);
    }
    Watchdog *own = watchdog_of(board, entries, 0, board->orphaned ? 60 : board->stopped ? 2.5 : 0.5);
    if (board->hands) {
        watchdog_device(own, &(WatchdogDevice){.abort = abort_device});
        watchdog_handing(own, true);
        usleep(900000);
        atomic_store(&handed, true);
        watchdog_handing(own, false);
    }
    sleep(30);
    _exit(2);
}

enum { BOARDS = sizeof boards / sizeof *boards };
typedef struct {
    pid_t process;
    int output;
} Child;

static Child start(const Board *board) {
    int ends[2];
    fflush(stdout);
    if (pipe(ends) != 0) abort();
    Child child = {fork(), ends[0]};
    if (!child.process) {
        dup2(ends[1], 2);
        close(ends[0]), close(ends[1]);
        wait_too_long(board);
    }
    close(ends[1]);
    return child;
}

// Reads the child's report; replaces process numbers by 0.
static void report_of(Child child, char text[SAID]) {
    int status = 0;
    size_t used = 0;
    memset(text, 0, SAID);
    for (ssize_t n; used < SAID - 1 && (n = read(child.output, text + used, SAID - 1 - used)) > 0;) used += (size_t)n;
    close(child.output);
    waitpid(child.process, &status, 0);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == ERR_RANK, "status %x: %s", status, text);
    CHECK(strncmp(text, "error (rank 0): ", 16) == 0 && strchr(text, '\n') == strrchr(text, '\n'), "%s", text);
    for (char *at = text; (at = strstr(at, "(process "));) {
        at += strlen("(process ");
        size_t digits = strspn(at, "0123456789");
        memmove(at + 1, at + digits, strlen(at + digits) + 1);
        *at = '0';
    }
}

static void test_boards(void) { // all boards at once
    char text[SAID], name[32];
    Child children[BOARDS];
    for (int b = 0; b < BOARDS; b++) children[b] = start(&boards[b]);
    for (int b = 0; b < BOARDS; b++) {
        const Board *board = &boards[b];
        report_of(children[b], text);
        for (int i = 0; i < 4 && board->says[i]; i++)
            CHECK(strstr(text, board->says[i]), "%s: '%s' is not in: %s", board->name, board->says[i], text);
        for (int rank = 0; rank < board->ranks; rank++) {
            snprintf(name, sizeof name, "; rank %d ", rank);
            CHECK(!(board->silent & 1 << rank) || !strstr(text, name), "%s: names rank %d: %s", board->name, rank, text);
        }
    }
}

int main(void) {
    RUN(test_boards);
    return test_summary();
}
