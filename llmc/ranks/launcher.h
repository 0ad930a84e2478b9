// launcher: watches the programs that started this process: scripts/launch.sh, mpirun.sh and mpirun. SIGKILL ends them
// without notice. A run that lost one of them saves and ends, as if asked to stop (base/signals.h).
//
//     GNS_LAUNCHERS   set by the scripts: entries " NAME:PROCESS@PLACE". PLACE is BOOT_ID/pid:[NAMESPACE]: entries of
//                     other machines and containers, where process numbers differ, are ignored
//
// mpirun, like Slurm's launcher, is the parent of its ranks. mpirun.sh names mpirun too: a rank that starts while mpirun
// ends may already have another parent.
#pragma once

#include "base/common.h"

GNS_C_BEGIN

enum { LAUNCHERS_MAX = 5, LAUNCHER_NAME = 64 };

typedef struct {
    int count;
    struct Launcher {
        int process;              // a pidfd; -1: it ended before this process began
        char gone[LAUNCHER_NAME]; // "mpirun.sh (process 7) is gone"
        bool reports_exits;       // it tells a rank when another one ends
    } one[LAUNCHERS_MAX];
} Launchers;

// has_parent: watches the parent too. *l outlives every use of signals_requested.
void launchers_watch(Launchers *l, bool has_parent);

// Requests a stop (base/signals.h) if a launcher is gone. Call it before signals_requested.
void launchers_check(const Launchers *l);

// True if the launcher that tells this rank when another one ends is gone.
bool launchers_reporter_gone(const Launchers *l);

GNS_C_END
