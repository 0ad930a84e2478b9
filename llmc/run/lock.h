// lock: one program at a time writes to a run directory. The lock is flock's on metrics.jsonl, and ends when that file
// is closed, however the program ends. The file "written_by" names the latest holder: host, process, its start (clock
// ticks since boot), and the host's boot id.
//
// On NFS the server holds the lock. If the holder's machine crashes, it remains until its lease ends (NFSv4: 90 s).
#pragma once

#include "base/common.h"

#define RUN_LOCK_HOLDER "written_by"

// The holder of a lock that could not be taken.
typedef enum {
    LOCK_FREE,
    LOCK_ALIVE, // a process that is known to live, on this machine; it may be ending
    LOCK_UNKNOWN
} LockHolder;

// Locks the open file `path` of a directory without waiting: ERR_USAGE where another process has it locked.
int run_lock_take(int fd, const char *path, const char *directory, LockHolder *holder, Error *e);

// Writes this process into written_by. Until then the holder of the lock is unknown.
int run_lock_sign(const char *directory, Error *e);
bool run_lock_is_ours(const char *directory); // true: written_by names this process
