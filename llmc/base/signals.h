// signals: a request to stop. SIGUSR1 (what batch systems send ahead of a time limit), SIGTERM, SIGINT and SIGHUP (a
// terminal that is gone; not under nohup) ask the run to finish its step, save and end; a second one of the first three
// ends the program at once, as if there were no handler. Output that nobody reads any more is no reason to end.
#ifndef GNS_SIGNALS_H
#define GNS_SIGNALS_H

#include "base/common.h"

void signals_install(void);

// The name of the signal that asked, "SIGTERM" for example; NULL while none has.
const char *signals_requested(void);
#endif
