// program: what main runs, for either engine.
#pragma once

#include "model/engine.h"
#include "ranks/transport.h"

// Parses the command line, trains, samples, evaluates, plans or checks, and returns the exit code (base/common.h).
// transport: NULL in a build for one process.
int program_main(int argc, char **argv, const EngineApi *engine, const TransportApi *transport);

// Call first in main. GCC's OpenMP threads spin for milliseconds at every barrier. On a busy machine spinning threads
// occupy cores that the awaited threads need. A short spin costs nothing on idle cores. OpenMP reads GOMP_SPINCOUNT
// when the program is loaded, so program_begin sets GOMP_SPINCOUNT and executes the program again.
void program_begin(char **argv);
