// run_lock: a run directory is one program's at a time; two would undo each other's work. The lock is flock's, on one of
// the run's files: it goes when that file is closed, however the program ends. Who writes to the run, or did last, stands
// beside it, in the file "written_by": host, process, when that started (clock ticks since boot), and the host's boot id.
//
// On NFS the lock is the server's, and outlives a machine that crashed until its lease has run out (NFSv4: 90 s or so). A
// lock whose holder is seen to live on this machine does not go by itself; any other may.
#pragma once

#include "base/common.h"

#define RUN_LOCK_HOLDER "written_by"

// Locks the open file `path` of a directory, at once or not at all: ERR_USAGE where another process has it locked, and
// *may_go says whether that may pass by itself.
int run_lock_take(int fd, const char *path, const char *directory, bool *may_go, Error *e);

// Writes who this is. The lock is taken before anything may be written, so it is without for a while.
int run_lock_sign(const char *directory, Error *e);
