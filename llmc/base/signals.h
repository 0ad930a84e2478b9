// signals: requests to stop. SIGUSR1 (sent by batch systems before a time limit), SIGTERM, SIGINT, SIGHUP (a closed
// terminal, except under nohup) and SIGXCPU (the soft limit on CPU time) ask the run to finish its step, save and end. A
// second SIGUSR1, SIGTERM or SIGINT ends the program at once, but not within SIGNALS_TOGETHER of the first: `timeout` and
// batch systems signal a process and its group, so one request comes twice. SIGPIPE and SIGXFSZ are ignored: the write fails.
#pragma once

#include "base/common.h"

enum { SIGNALS_TOGETHER = 2 }; // seconds

void signals_install(void);

// For a program that has no handler, and asks for SIGINT and SIGTERM at places of its own. Ignores SIGXFSZ as well.
void signals_block(void);
bool signals_pending(void); // one of the two has come

// Asks as well: what started this process is gone. why: a sentence, which lives on.
void signals_orphaned(const char *why);

// Who asked: the name of a signal, such as "SIGTERM", or why this process is an orphan. NULL: nobody.
const char *signals_requested(void);
