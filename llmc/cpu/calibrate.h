// calibrate: measures the peak of this machine's cores and memory, for plans (plan.h) and for the benchmark.
#pragma once

#include "model/modes.h"

// FLOP/s of all threads: the fastest of the rounds run in 50 ms. fp32: multiply-adds in registers. bf16: the kernel's
// products of panels in the first-level cache. 0: no such kernel.
double calibrate_flops(int threads, Dtype type);

// B/s, read and written together, of a copy larger than the caches: the fastest of the copies made in 50 ms. 0: no
// memory for it.
double calibrate_copy(int threads);
