// calibrate: measures the peak of this machine's cores and memory, for plans (plan.h) and for the benchmark.
#pragma once

#include "model/modes.h"

// Returns FLOP/s of all threads: the fastest of the rounds within 50 ms. fp32: multiply-adds in registers. bf16: the
// kernel's product of two panels, 44 KiB together (AMX: 64 KiB). 0: no kernel of this type.
double calibrate_flops(int threads, Dtype type);

// Returns B/s, read and written together, of a copy of 64 MiB: the fastest of the copies within 50 ms. 0: no memory for
// the copy. A third-level cache above 128 MiB holds source and copy, and may raise the figure.
double calibrate_copy(int threads);
