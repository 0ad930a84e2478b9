#include "cpu/calibrate.h"

#include "base/common.h"
#include "cpu/matmul_kernel.h"
#include "cpu/vector_math.h"

#include <math.h>
#include <omp.h>

enum { STEPS = 100000, COPY_BYTES = 64 << 20 }; // STEPS take 0.5 ms; a copy reads and writes COPY_BYTES
static const double rounds_seconds = 0.05;      // the fastest round within this time counts

// Runs one thread's multiply-adds. Returns the number of floating-point operations.
static double multiply(const MatmulKernel *kernel, size_t steps) {
    enum { CHAINS = 12, PAIRS = 256 };  // CHAINS: vectors at once, to hide latency; PAIRS: pairs of k in a panel
    __asm__ volatile("" : "+r"(steps)); // keeps the compiler from moving the work past a clock reading
    if (kernel->type == DTYPE_BF16) {
        static const uint16_t panels[2][BF16_AMX_ROWS * 2 * PAIRS] __attribute__((aligned(64))); // zeros
        MatmulTiles tiles = {.last_rows = 0};
        size_t tile = kernel->rows * kernel->columns * PAIRS, products = steps * CHAINS * VEC / tile;
        for (size_t i = 0; i < products; i++) kernel->multiply(&tiles, panels[0], panels[1], PAIRS, kernel->rows);
        return 4.0 * (double)(products * tile);
    }
    Vec v[CHAINS], scale = vec_set(0.999f), shift = vec_set(0.002f);
    for (int i = 0; i < CHAINS; i++)
        v[i] = vec_set((float)i * 0.1f); // not the fixed point 2, for which the compiler could fold the loop
    for (size_t s = 0; s < steps; s++)
#pragma GCC unroll 12
        for (int i = 0; i < CHAINS; i++) v[i] = v[i] * scale + shift;
    __asm__ volatile("" ::"m"(v)); // keeps the compiler from dropping the work
    return 2.0 * VEC * CHAINS * (double)steps;
}

double calibrate_flops(int threads, Dtype type) {
    const MatmulKernel *kernel = matmul_kernel(type);
    double best = 0, now = clock_seconds(), end = now + rounds_seconds;
    while (kernel && now < end) {
        double start = now, work = 0;
#pragma omp parallel num_threads(threads) reduction(+ : work)
        work += multiply(kernel, STEPS);
        now = clock_seconds();
        best = fmax(best, work / (now - start));
    }
    return best;
}

double calibrate_copy(int threads) {
    const size_t part = COPY_BYTES / (size_t)threads;
    double best = 0, now, end;
    char *memory; // a round copies its first half to its second half
    Error e;
    if (memory_alloc((void **)&memory, 2 * (size_t)COPY_BYTES, "calibration", &e)) return 0;
    memset(memory, 1, 2 * (size_t)COPY_BYTES); // maps every page
    for (now = clock_seconds(), end = now + rounds_seconds; now < end;) {
        double start = now;
#pragma omp parallel num_threads(threads)
        {
            char *from = memory + (size_t)omp_get_thread_num() * part;
            memcpy(from + COPY_BYTES, from, part);
        }
        now = clock_seconds();
        best = fmax(best, 2.0 * COPY_BYTES / (now - start));
    }
    memory_free(memory);
    return best;
}
