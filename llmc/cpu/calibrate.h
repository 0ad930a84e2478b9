// calibrate: what this machine's cores and memory can do, measured: for plans (plan.h) and as the benchmark's yardstick.
#ifndef GNS_CPU_CALIBRATE_H
#define GNS_CPU_CALIBRATE_H

#include <stddef.h>

// Multiply-adds on registers: enough chains of them side by side to hide their latency. CALIBRATE_CHAINS vectors, two
// operations a float, `steps` times. The result is of no account, but must be used, or the work is optimised away.
enum { CALIBRATE_CHAINS = 12 };
float calibrate_chains(size_t steps);

// Floating-point operations a second of so many threads: the best of a few rounds, `seconds` in all.
double calibrate_flops(int threads, double seconds);

// Bytes a second of a copy too large for the caches, read and written together: likewise. 0: no memory for it.
double calibrate_copy(int threads, double seconds);

#endif
