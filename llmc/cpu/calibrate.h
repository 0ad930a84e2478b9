// calibrate: measures what this machine's cores and memory can do: for plans (plan.h) and as the benchmark's yardstick.
#pragma once

#include <stddef.h>

// Multiply-adds in registers, in CALIBRATE_CHAINS independent vectors, enough to hide their latency: two operations a
// float, `steps` times. The result means nothing, but must be used, or the compiler drops the work.
enum { CALIBRATE_CHAINS = 12 };
float calibrate_chains(size_t steps);

// Floating-point operations a second of all threads, the best of 50 ms.
double calibrate_flops(int threads);

// Bytes a second, read and written together, of a copy that exceeds the caches, the best of 50 ms. 0: no memory for it.
double calibrate_copy(int threads);
