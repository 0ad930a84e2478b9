// calibrate: measures what this machine's cores and memory can do: for plans (plan.h) and as the benchmark's yardstick.
#pragma once

#include "model/modes.h"

#include <stddef.h>

// Multiply-adds in registers, in CALIBRATE_CHAINS independent vectors, enough to hide their latency: two operations a
// float, `steps` times. The result means nothing, but must be used, or the compiler drops the work.
enum { CALIBRATE_CHAINS = 12 };
float calibrate_chains(size_t steps);

// Floating-point operations a second of all threads, the best of 50 ms: of multiply-adds, or in bf16 of the kernel's
// products of panels in the first-level cache. 0: no such kernel.
double calibrate_flops(int threads, Dtype type);

// The same, from one round of about 50 microseconds, each thread by its own clock: the cores' speed at this moment.
double calibrate_probe(int threads, Dtype type);

// Bytes a second, read and written together, of a copy that exceeds the caches, the best of 50 ms. 0: no memory for it.
double calibrate_copy(int threads);
