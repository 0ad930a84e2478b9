// signals: requests to stop. SIGUSR1 (sent by batch systems before a time limit), SIGTERM, SIGINT, SIGHUP (a closed
// terminal, except under nohup) and SIGXCPU (the soft limit on CPU time) ask the run to finish its step, save and end. A
// second SIGUSR1, SIGTERM or SIGINT ends the program at once. SIGPIPE and SIGXFSZ are ignored: the write fails.
#pragma once

#include "base/common.h"

void signals_install(void);

// The name of the signal that asked, such as "SIGTERM"; NULL until one has.
const char *signals_requested(void);
