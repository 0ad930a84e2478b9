// train: THE training loop. One for every engine: the program is this loop, linked with one implementation of engine.h.
#ifndef GNS_TRAIN_H
#define GNS_TRAIN_H

#ifdef __cplusplus
extern "C" {
#endif

// All of main: parses the command line, trains, samples or reports, and returns the exit code (llmc/common.h).
int train_main(int argc, char **argv);

#ifdef __cplusplus
}
#endif
#endif
