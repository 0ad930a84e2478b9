// pipe: small texts that a user names, from a file or from a pipe ("-": standard input).
#pragma once

#include "base/common.h"

// Says once on stderr what is waited for, 2 s after `since` (clock_seconds). have: bytes that have arrived.
typedef struct {
    double since;
    bool said;
} Wait;
void wait_note(Wait *wait, int fd, const char *name, size_t have);

const char *pipe_name(const char *path); // for messages: "-" becomes "standard input"

// Is the path anything else than a regular file or a directory?
bool pipe_is(const char *path);

// Opens a file, a pipe, a terminal or a device. Waits for no writer.
int pipe_open(const char *path, int *fd, Error *e);

// Reads all of it, at most max_bytes, and adds a NUL; *out from memory_alloc. Says after 2 s what it waits for.
// ERR_STOPPED once signals_requested.
int pipe_read(const char *path, size_t max_bytes, char **out, size_t *out_bytes, Error *e);
