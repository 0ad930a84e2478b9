// watchdog: no run of several ranks hangs. A thread of each rank watches the clock. When the main thread makes no
// progress for longer than the phase's deadline, the watchdog names the rank that hangs, as far as it can tell, and
// ends the job with ERR_RANK.
//
// The ranks of one machine share a board, one line per rank: process, heartbeat, number of collectives begun.
//   1. All ranks begin the same collectives in the same order. The other ranks wait for the rank that has begun fewest.
//      A wait for a transfer that was begun earlier counts as a collective of its own (parallel.c).
//   2. A rank without a heartbeat for most of the wait is stopped or gone. Such a rank, or one that has not started, is
//      blamed before any other rank.
//   3. All watchdogs of a machine read the same board. One watchdog claims the report; the others stay silent.
//   4. A board shows one machine. If all its ranks run and there are other machines, the verdict is unsure. The
//      watchdog first leaves other machines time to end the job. Then its report says what the board shows and blames
//      no rank.
#pragma once

#include "base/common.h"

GNS_C_BEGIN

typedef enum { PHASE_SETUP, PHASE_STEP, PHASE_CHECKPOINT, PHASE_COUNT } WatchdogPhase;

typedef struct WatchdogEntry WatchdogEntry; // one rank's line on the board
size_t watchdog_board_bytes(int count);     // bytes of a board of `count` lines, zeros at first

typedef struct Watchdog Watchdog;

typedef struct {
    int rank, ranks;       // according to the launcher; watchdog_join corrects them
    int here;              // ranks on this machine, according to the launcher; 0: unknown
    const char *host;      // this machine's name, or "" if there is one machine. Outlives the watchdog
    WatchdogEntry *board;  // (ranks); each rank of this machine writes its own line; may be NULL
    double deadline;       // seconds in PHASE_STEP; a piece of a save has three times as long, set-up six times
    void (*end)(int code); // ends the whole job; does not return
    int launcher;          // the parent process; set-up ends soon after it is gone. 0: none
} WatchdogConfig;

int watchdog_create(Watchdog **out, const WatchdogConfig *config, Error *e);
void watchdog_destroy(Watchdog *w); // no-op for NULL, like the functions below

// Call when all ranks have joined, with rank and ranks from MPI. Ranks missing on the board are on other machines.
void watchdog_join(Watchdog *w, int rank, int ranks);

// These four restart the clock.
void watchdog_phase(Watchdog *w, WatchdogPhase phase, int64_t step);
void watchdog_progress(Watchdog *w);
void watchdog_begin(Watchdog *w, const char *collective); // counts a collective (1); keeps the pointer
void watchdog_wait(Watchdog *w, const char *what);        // does not count: perhaps only some ranks wait

// Call (true) before the device's communication gets work, (false) after. Between the two an abort waits, 1 s at most.
void watchdog_handing(Watchdog *w, bool handing);

// A device's communication. The watchdog's thread calls `check` now and then, and ends the job on its error. It calls
// `abort` before it ends the job.
typedef struct {
    int (*check)(void *context, Error *e);
    void (*abort)(void *context);
    void *context;
} WatchdogDevice;
void watchdog_device(Watchdog *w, const WatchdogDevice *device); // device NULL: checks none from now on

GNS_C_END
