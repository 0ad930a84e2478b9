#include "base/common.h"

#ifndef GNS_COMMIT // the Makefile sets it
#    define GNS_COMMIT ""
#endif

const char *version_text(void) { return "gns.c 0.2" GNS_COMMIT; }
