// program: all of main but for the engine. Either trainer is this, linked with one implementation of engine.h.
#ifndef GNS_PROGRAM_H
#define GNS_PROGRAM_H

#ifdef __cplusplus
extern "C" {
#endif

// Parses the command line, trains, samples, evaluates, plans or checks, and returns the exit code (llmc/base/common.h).
int program_main(int argc, char **argv);

// For main alone, and first of all. GCC's OpenMP threads spin for milliseconds at every barrier. On a machine with other
// work that costs many times the work itself: the thread that is waited for does not get the core. A short spin loses
// nothing where cores are idle. The library reads its setting when the program is loaded, so this sets it and loads the
// program again.
void program_spin_briefly(char **argv);

#ifdef __cplusplus
}
#endif
#endif
