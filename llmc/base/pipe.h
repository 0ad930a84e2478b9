// pipe: reads a small text from a file or a pipe that the user names ("-": standard input).
#pragma once

#include "base/common.h"

const char *pipe_name(const char *path); // for messages: "-" becomes "standard input"

// True if the path is neither a regular file nor a directory.
bool pipe_is(const char *path);

// Reads a whole file or pipe of at most max_bytes and adds a NUL; *out from memory_alloc. Waits for its end.
int pipe_read(const char *path, size_t max_bytes, char **out, size_t *out_bytes, Error *e);
