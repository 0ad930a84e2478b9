// program: all of main but the choice of the engine.
#pragma once

#include "model/engine.h"
#include "ranks/transport.h"

// Parses the command line, trains, samples, evaluates, plans or checks, and returns the exit code (base/common.h).
// transport: NULL in a build for one process.
int program_main(int argc, char **argv, const EngineApi *engine, const TransportApi *transport);

// For main alone, first of all. GCC's OpenMP threads spin for milliseconds at every barrier. On a machine with other work
// that costs many times the work itself: the thread that the others wait for does not get the core. A short spin loses
// nothing on idle cores. OpenMP reads its setting when the program is loaded, so this sets it and loads the program again.
void program_spin_briefly(char **argv);
