// Whom a watchdog blames, by boards of a few ranks. That a run tells its watchdogs what they need is test_faults.sh's.
#include "ranks/watchdog.h"
#include "../test.h"

#include <stdatomic.h>
#include <sys/wait.h>
#include <unistd.h>

enum { MOST_RANKS = 4, ABSENT = -1, SAID = 1000 };

// Ranks of one machine, by how many collectives each has begun; ABSENT ones never started. Rank 0 reports.
typedef struct {
    int ranks, here; // in all; on this machine, by the launcher's word
    int begun[MOST_RANKS];
    int stopped; // rank without a heartbeat; 0: none
    bool joined;
    bool orphaned;
    bool hands; // rank 0 is handing its device work when its deadline passes
} Board;

static void end(int code) { _exit(code); }

static bool is_orphan(const void *board) { return ((const Board *)board)->orphaned; }

static Watchdog *watchdog_of(const Board *board, WatchdogEntry *entries, int rank, double deadline) {
    Watchdog *w = NULL;
    Error e;
    WatchdogConfig config = {.rank = rank,
                             .ranks = board->ranks,
                             .here = board->here,
                             .host = "",
                             .board = entries,
                             .deadline = deadline,
                             .end = end,
                             .orphaned = is_orphan,
                             .launchers = board};
    if (watchdog_create(&w, &config, &e)) _exit(1);
    if (board->joined) {
        watchdog_join(w, rank, board->ranks);
        watchdog_phase(w, PHASE_STEP, 7);
    }
    for (int i = 0; i < board->begun[rank]; i++) watchdog_begin(w, "a sum");
    return w;
}

// A device that must not be aborted while it is handed work: the process then ends with another code.
static atomic_bool handed;
static void abort_device(void *) {
    if (!atomic_load(&handed)) _exit(3);
}

// The others start first, so that rank 0 finds them on the board, and with longer deadlines, so that rank 0 reports.
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

// Rank 0's report.
static const char *said(const Board *board) {
    static char text[SAID];
    int ends[2], status = 0;
    size_t used = 0;
    fflush(stdout);
    memset(text, 0, sizeof text);
    if (pipe(ends) != 0) return "no pipe";
    pid_t child = fork();
    if (!child) {
        dup2(ends[1], 2);
        close(ends[0]), close(ends[1]);
        wait_too_long(board);
    }
    close(ends[1]);
    for (ssize_t n; used < SAID - 1 && (n = read(ends[0], text + used, SAID - 1 - used)) > 0;) used += (size_t)n;
    close(ends[0]);
    waitpid(child, &status, 0);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == ERR_RANK, "status %x: %s", status, text);
    CHECK(strncmp(text, "error (rank 0): ", 16) == 0 && strchr(text, '\n') == strrchr(text, '\n'), "%s", text);
    return text;
}

// True if the text names the rank and says this of it.
static bool says_of(const char *text, int rank, const char *what) {
    char name[32];
    snprintf(name, sizeof name, "; rank %d (process ", rank);
    const char *at = strstr(text, name), *close = at ? strchr(at, ')') : NULL;
    return close && strncmp(close + 1, what, strlen(what)) == 0;
}
static bool names(const char *text, int rank) { return says_of(text, rank, ""); }

// Of several late ranks only the one at the earliest collective is to blame: the others wait for it.
static void test_earliest(void) {
    const char *text = said(&(Board){.ranks = 4, .here = 4, .begun = {6, 5, 4, 6}, .joined = true});
    CHECK(strstr(text, "step 7: no progress for 0.5 s (--deadline); last collective: a sum;"), "%s", text);
    CHECK(says_of(text, 2, " keeps the others waiting") && !names(text, 1) && !names(text, 3), "%s", text);
}

// The rank that keeps the others waiting may report itself: the verdict is the same.
static void test_reports_itself(void) {
    const char *text = said(&(Board){.ranks = 3, .here = 3, .begun = {4, 6, 6}, .joined = true});
    CHECK(says_of(text, 0, " keeps the others waiting") && !names(text, 1) && !names(text, 2), "%s", text);
}

static void test_two_earliest(void) {
    const char *text = said(&(Board){.ranks = 4, .here = 4, .begun = {6, 4, 5, 4}, .joined = true});
    CHECK(says_of(text, 1, " keeps the others waiting") && says_of(text, 3, " keeps the others waiting"), "%s", text);
    CHECK(!names(text, 2), "%s", text);
}

static void test_all_level(void) {
    const char *text = said(&(Board){.ranks = 3, .here = 3, .begun = {4, 4, 4}, .joined = true});
    CHECK(!names(text, 1) && !names(text, 2) && strstr(text, "last collective: a sum."), "%s", text);
}

// A rank without a heartbeat is to blame, whatever collective the others are at.
static void test_stopped(void) {
    const char *text = said(&(Board){.ranks = 3, .here = 3, .begun = {6, 4, 5}, .stopped = 2, .joined = true});
    CHECK(says_of(text, 2, " is stopped or gone") && !names(text, 1), "%s", text);
}

// Whose launcher is gone: the set-up ends long before its deadline.
static void test_orphaned(void) {
    const char *text = said(&(Board){.ranks = 2, .here = 2, .begun = {1, ABSENT}, .orphaned = true});
    CHECK(strstr(text, "set-up: no progress for 5 s (the launcher is gone)"), "%s", text);
}

static void test_never_started(void) {
    const char *text = said(&(Board){.ranks = 3, .here = 3, .begun = {1, 1, ABSENT}});
    CHECK(strstr(text, "set-up: ") && strstr(text, "; rank 2 has not started") && !names(text, 1), "%s", text);
}

// The earliest of this machine may wait for a rank of another machine: named, not accused.
static void test_other_machines(void) {
    const char *text = said(&(Board){.ranks = 4, .here = 3, .begun = {6, 5, 4, ABSENT}, .joined = true});
    CHECK(strstr(text, "this machine's 3 ranks run; rank 2 (process"), "%s", text);
    CHECK(strstr(text, " is at the earliest collective, collective number 4: look at the other machines too") && !strstr(text, "rank 1"), "%s", text);
}

static void test_abort_waits(void) {
    said(&(Board){.ranks = 2, .here = 2, .begun = {1, 1}, .joined = true, .hands = true});
}

int main(void) {
    RUN(test_earliest);
    RUN(test_reports_itself);
    RUN(test_two_earliest);
    RUN(test_all_level);
    RUN(test_stopped);
    RUN(test_never_started);
    RUN(test_orphaned);
    RUN(test_abort_waits);
    RUN(test_other_machines);
    return test_summary();
}
