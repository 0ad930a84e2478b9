// signals: requests to stop. A request asks the run to finish its step, save and end. Requests are SIGUSR1 (sent by
// batch systems before a time limit), SIGTERM, SIGINT, SIGHUP (a closed terminal, except under nohup) and SIGXCPU (the
// soft limit on CPU time). A second SIGUSR1, SIGTERM or SIGINT ends the program at once, unless it comes within
// SIGNALS_TOGETHER of the first: `timeout` and batch systems signal a process and its group, so one request arrives
// twice. A second SIGHUP or SIGXCPU is always ignored. SIGPIPE and SIGXFSZ are ignored: the write fails with an error.
#pragma once

#include "base/common.h"

enum { SIGNALS_TOGETHER = 2 }; // seconds

void signals_install(void);

// Requests a stop because the process that started this one is gone. why: a string constant, for messages.
void signals_orphaned(const char *why);
bool signals_is_orphan(void);

// Returns why to stop: the name of a signal, such as "SIGTERM", or the `why` of signals_orphaned. NULL: no request.
const char *signals_requested(void);
