// watchdog: no run of several ranks hangs. A thread of each rank watches the clock. When the main thread makes no
// progress for longer than the phase's deadline, the watchdog names the rank that hangs, as far as it can tell, and ends
// the job with ERR_RANK. Without its launcher a rank is not told when others end: the deadline of set-up, in which there is
// nothing to save, is then WATCHDOG_ORPHAN_SECONDS.
//
// The ranks of one machine share a board, a line a rank: its process, its heartbeat, the collectives that it has begun.
//   1. All ranks begin the same collectives in the same order. So a rank at the earliest one keeps the others waiting.
//   2. A rank without a heartbeat for most of the wait is stopped or gone, and is blamed before any other. So is one that
//      has not started, until all ranks have joined (watchdog_join).
//   3. All watchdogs of a machine judge by the same board. One claims the report; the others stay silent.
//   4. A board shows one machine. If all its ranks run and there are other machines, the hang may be on one of those: the
//      report says what the board shows, blames no rank, and first leaves time for other machines to end the job.
#pragma once

#include "base/common.h"

GNS_C_BEGIN

typedef enum { PHASE_SETUP, PHASE_STEP, PHASE_CHECKPOINT, PHASE_COUNT } WatchdogPhase;

typedef struct WatchdogEntry WatchdogEntry; // one rank's line on the board
size_t watchdog_board_bytes(int count);     // of `count` lines, zeros at first

typedef struct Watchdog Watchdog;

enum { WATCHDOG_ORPHAN_SECONDS = 5 };

typedef struct {
    int rank, ranks;       // as the launcher says; watchdog_join tells better
    int here;              // ranks on this machine, by the launcher; 0: unknown
    const char *host;      // this machine's name, if there are several; else "". Outlives the watchdog
    WatchdogEntry *board;  // (ranks); each rank of this machine writes its own line; may be NULL
    double deadline;       // seconds in PHASE_STEP; three times as long for a checkpoint, six times for set-up
    void (*end)(int code); // ends the whole job; does not return
    bool (*orphaned)(const void *launchers); // true: the launcher is gone. May be NULL
    const void *launchers;                   // outlives the watchdog
} WatchdogConfig;

int watchdog_create(Watchdog **out, const WatchdogConfig *config, Error *e);
void watchdog_destroy(Watchdog *w); // NULL is fine, here and below

// All ranks have joined: rank and ranks as MPI says. Ranks that are not on the board are on other machines.
void watchdog_join(Watchdog *w, int rank, int ranks);

void watchdog_phase(Watchdog *w, WatchdogPhase phase, int64_t step); // restarts the clock, as do the next three
void watchdog_progress(Watchdog *w);
void watchdog_begin(Watchdog *w, const char *collective); // counts it (invariant 1). The string is kept
void watchdog_wait(Watchdog *w, const char *what);        // the same for what only some ranks do: not counted

// Around a call that hands the device's communication work: an abort awaits its end, for a second at most.
void watchdog_handing(Watchdog *w, bool handing);

// A device's communication. The watchdog's thread calls `check` now and then: an error ends the job. It calls `abort`
// before it ends the job.
typedef struct {
    int (*check)(void *context, Error *e);
    void (*abort)(void *context);
    void *context;
} WatchdogDevice;
void watchdog_device(Watchdog *w, const WatchdogDevice *device); // NULL: none from here on

GNS_C_END
