#include "cpu/calibrate.h"

#include "base/common.h"
#include "cpu/vector_math.h"

#include <omp.h>

enum { STEPS = 100000 };                           // half a millisecond or so
static const size_t copy_bytes = (size_t)64 << 20; // more than the caches hold

float calibrate_chains(size_t steps) {
    Vec v[CALIBRATE_CHAINS], scale = vec_set(0.999f), shift = vec_set(0.002f), sum = {0};
    for (int i = 0; i < CALIBRATE_CHAINS; i++) v[i] = vec_set((float)i * 0.1f); // a fixed point would be folded away
    for (size_t s = 0; s < steps; s++)
#pragma GCC unroll 12
        for (int i = 0; i < CALIBRATE_CHAINS; i++) v[i] = v[i] * scale + shift;
    for (int i = 0; i < CALIBRATE_CHAINS; i++) sum += v[i];
    return sum[0];
}

// One thread's share of a round: multiply-adds, or, with memory (2, copy_bytes), a copy of its first half to its second.
static float work(char *memory, size_t thread, size_t threads) {
    size_t part = copy_bytes / threads;
    if (!memory) return calibrate_chains(STEPS);
    memcpy(memory + copy_bytes + thread * part, memory + thread * part, part);
    return 0;
}

// Seconds of the fastest round, of those that begin within 50 ms.
static double fastest(char *memory, int threads) {
    double best = 1e9, now = clock_seconds(), end = now + 0.05;
    volatile float used; // or the compiler drops the work
    while (now < end) {
        double start = now;
        float total = 0;
#pragma omp parallel num_threads(threads) reduction(+ : total)
        total += work(memory, (size_t)omp_get_thread_num(), (size_t)threads);
        used = total;
        now = clock_seconds();
        if (now - start < best) best = now - start;
    }
    (void)used;
    return best;
}

double calibrate_flops(int threads) { return 2.0 * VEC * CALIBRATE_CHAINS * STEPS * threads / fastest(NULL, threads); }

double calibrate_copy(int threads) {
    char *memory;
    Error e;
    if (memory_alloc((void **)&memory, 2 * copy_bytes, "calibration", &e)) return 0;
    memset(memory, 1, 2 * copy_bytes); // so that every page is there
    double seconds = fastest(memory, threads);
    memory_free(memory);
    return 2.0 * (double)copy_bytes / seconds;
}
