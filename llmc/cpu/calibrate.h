// calibrate: measures what this machine's cores and memory can do: for plans (plan.h) and as the benchmark's yardstick.
#pragma once

#include "model/modes.h"

#include <stddef.h>

// Multiply-adds in registers: two operations per float of CALIBRATE_CHAINS independent vectors, which hide the latency,
// `steps` times. The result means nothing; use it, or the compiler drops the work.
enum { CALIBRATE_CHAINS = 12 };
float calibrate_chains(size_t steps);

// Floating-point operations a second of all threads, the best of 50 ms: of multiply-adds, or in bf16 of the kernel's
// products of panels in the first-level cache. 0: no such kernel.
double calibrate_flops(int threads, Dtype type);

// calibrate_flops from one round of about 50 microseconds, each thread by its own clock: the speed at this moment.
double calibrate_probe(int threads, Dtype type);

// Bytes a second, read and written together, of a copy that exceeds the caches, the best of 50 ms. 0: no memory for it.
double calibrate_copy(int threads);
