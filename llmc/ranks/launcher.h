// launcher: what started this process: scripts/launch.sh and mpirun.sh, and mpirun. SIGKILL ends them without a word. A run
// that has lost one of them ends as if it were asked to stop (base/signals.h): it saves.
//
//     GNS_LAUNCHERS   set by the scripts: entries " NAME:PROCESS@PLACE". PLACE, BOOT_ID/pid:[NAMESPACE], tells where
//                     process numbers mean the same: entries of other machines and containers are left out
//
// mpirun, and Slurm's launcher, is the parent of its ranks; mpirun.sh names mpirun as well, since a rank that starts as
// mpirun ends has another parent by then.
#pragma once

#include "base/common.h"

GNS_C_BEGIN

enum { LAUNCHERS_MAX = 5, LAUNCHER_NAME = 64 };

typedef struct {
    int count;
    struct Launcher {
        int process;              // a pidfd; -1: it was gone before this process began
        char gone[LAUNCHER_NAME]; // "mpirun.sh (process 7) is gone"
        bool tells;               // a rank when another one ends
    } one[LAUNCHERS_MAX];
} Launchers;

// has_parent: watches the parent too. *l outlives every use of signals_requested.
void launchers_watch(Launchers *l, bool has_parent);

// To be called before signals_requested.
void launchers_look(const Launchers *l);

// Is the process gone that tells this rank when another one ends?
bool launchers_silent(const Launchers *l);

GNS_C_END
