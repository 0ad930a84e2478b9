// train: THE training loop. One for every engine: the program is this loop, linked with one implementation of engine.h.
#ifndef GNS_TRAIN_H
#define GNS_TRAIN_H

#ifdef __cplusplus
extern "C" {
#endif

// All of main: parses the command line, trains, samples or reports, and returns the exit code (llmc/common.h).
int train_main(int argc, char **argv);

// For main alone, and first of all. GCC's OpenMP threads spin for milliseconds at every barrier. On a machine with other
// work that costs many times the work itself: the thread that is waited for does not get the core. A short spin loses
// nothing where cores are idle. The library reads its setting when the program is loaded, so this sets it and loads the
// program again.
void train_spin_briefly(char **argv);

#ifdef __cplusplus
}
#endif
#endif
