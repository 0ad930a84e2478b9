#define _POSIX_C_SOURCE 200809L
#include "cpu/calibrate.h"

#include "base/common.h"
#include "cpu/vector_math.h"

#include <omp.h>

float calibrate_chains(size_t steps) {
    Vec v[CALIBRATE_CHAINS], scale = vec_set(0.999f), shift = vec_set(0.002f), sum = {0};
    for (int i = 0; i < CALIBRATE_CHAINS; i++) v[i] = vec_set((float)i * 0.1f); // a fixed point would be folded away
    for (size_t s = 0; s < steps; s++)
#pragma GCC unroll 12
        for (int i = 0; i < CALIBRATE_CHAINS; i++) v[i] = v[i] * scale + shift;
    for (int i = 0; i < CALIBRATE_CHAINS; i++) sum += v[i];
    return sum[0];
}

double calibrate_flops(int threads, double seconds) {
    const size_t steps = 100000; // half a millisecond or so
    double best = 0, end = clock_seconds() + seconds;
    volatile float used;
    do {
        double start = clock_seconds();
        float total = 0;
#pragma omp parallel num_threads(threads) reduction(+ : total)
        total += calibrate_chains(steps);
        used = total;
        double rate = 2.0 * VEC * CALIBRATE_CHAINS * (double)steps * threads / (clock_seconds() - start);
        if (rate > best) best = rate;
    } while (clock_seconds() < end);
    (void)used;
    return best;
}

double calibrate_copy(int threads, double seconds) {
    const size_t each = (size_t)64 << 20, part = each / (size_t)threads / 64 * 64; // bytes
    char *from, *to;
    Error e;
    double best = 0, end;
    if (memory_alloc_zero((void **)&from, 2 * each, "calibration", &e)) return 0;
    to = from + each;
    memset(from, 1, 2 * each); // so that every page is there
    end = clock_seconds() + seconds;
    do {
        double start = clock_seconds();
#pragma omp parallel num_threads(threads)
        {
            size_t at = (size_t)omp_get_thread_num() * part;
            memcpy(to + at, from + at, part);
        }
        double rate = 2.0 * (double)part * threads / (clock_seconds() - start);
        if (rate > best) best = rate;
    } while (clock_seconds() < end);
    memory_free(from);
    return best;
}
