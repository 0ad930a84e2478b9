// watchdog: no run of several ranks hangs. A thread of each rank looks at the clock: when nothing has got on for longer
// than the phase's deadline, it says which rank, step and collective, and which other rank is to blame as far as can be
// told, and ends the job with ERR_RANK.
//
// Ranks of one machine see each other on a board in shared memory: who has come, how many collectives each has begun
// (all begin the same ones in the same order, so the one that is behind has not come to it), and when its watchdog last
// stirred (a stopped process has none). Of another machine's ranks they see nothing: one that is behind may wait for one
// of those, like everybody. So a rank whom its board does not tell for certain who is to blame accuses nobody, and lets
// those of other machines speak first.
#ifndef GNS_WATCHDOG_H
#define GNS_WATCHDOG_H

#include "base/common.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum { PHASE_SETUP, PHASE_STEP, PHASE_CHECKPOINT, PHASE_COUNT } WatchdogPhase;

typedef struct WatchdogEntry WatchdogEntry; // one rank's line on the board
size_t watchdog_board_bytes(int count);     // of `count` lines; they start out as zeros

typedef struct Watchdog Watchdog;

typedef struct {
    int rank, ranks;      // as far as is known
    int here;             // ranks on this machine, by the launcher's word; 0: it does not say
    const char *host;     // this machine's name where there are several; "": there is one. Outlives the watchdog
    WatchdogEntry *board; // (ranks), in which those of this machine fill in their own; may be NULL
    double deadline[PHASE_COUNT]; // seconds
    void (*end)(int code);        // ends the whole job; does not return
} WatchdogConfig;

int watchdog_create(Watchdog **out, const WatchdogConfig *config, Error *e);
void watchdog_destroy(Watchdog *w); // NULL is fine, here and below

// All ranks have met: who this one is, for certain. Those that are not on the board are on other machines.
void watchdog_join(Watchdog *w, int rank, int ranks);

void watchdog_phase(Watchdog *w, WatchdogPhase phase, int64_t step); // restarts the clock, as do the next two
void watchdog_progress(Watchdog *w);

// A collective that all ranks begin alike: counted, so that the rank that is behind can be told. A string that stays.
void watchdog_begin(Watchdog *w, const char *collective);
// What only some do, or not all equally often: a rank waits for it, no more.
void watchdog_wait(Watchdog *w, const char *what);

// A device's communication: `check` is asked, every now and then and from the watchdog's thread, whether it has failed;
// `abort` is called before the job is ended.
typedef struct {
    int (*check)(void *context, Error *e);
    void (*abort)(void *context);
    void *context;
} WatchdogDevice;
void watchdog_device(Watchdog *w, const WatchdogDevice *device); // NULL: no more

#ifdef __cplusplus
}
#endif

#endif
