// lock: one program at a time writes to a run directory. The lock is a flock of metrics.jsonl. It ends when the file is
// closed, however the program ends. The file "written_by" names the latest holder: host and process.
//
// On NFS the server holds the lock. If the holder's machine crashes, it remains until its lease ends (NFSv4: 90 s).
#pragma once

#include "base/common.h"

// The holder of a lock that could not be taken.
typedef enum {
    LOCK_FREE,
    LOCK_HERE, // a process of this machine; it may be ending
    LOCK_ELSEWHERE
} LockHolder;

// Locks metrics.jsonl, open as `fd`, without waiting: ERR_USAGE where another process has it locked. dir: the run
// directory's descriptor, or IN_PATH (files.h).
int run_lock_take(int fd, int dir, const char *directory, LockHolder *holder, Error *e);

// Writes this process into written_by. Until then the holder of the lock is unknown.
int run_lock_sign(int dir, const char *directory, Error *e);
