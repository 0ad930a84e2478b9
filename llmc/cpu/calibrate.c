#include "cpu/calibrate.h"

#include "base/common.h"
#include "cpu/matmul_kernel.h"
#include "cpu/vector_math.h"

#include <omp.h>

enum { STEPS = 100000 };                           // take about half a millisecond
static const size_t copy_bytes = (size_t)64 << 20; // more than the caches hold

float calibrate_chains(size_t steps) {
    Vec v[CALIBRATE_CHAINS], scale = vec_set(0.999f), shift = vec_set(0.002f), sum = {0};
    for (int i = 0; i < CALIBRATE_CHAINS; i++)
        v[i] = vec_set((float)i * 0.1f); // not 2, the fixed point: the compiler could fold the loop there
    for (size_t s = 0; s < steps; s++)
#pragma GCC unroll 12
        for (int i = 0; i < CALIBRATE_CHAINS; i++) v[i] = v[i] * scale + shift;
    for (int i = 0; i < CALIBRATE_CHAINS; i++) sum += v[i];
    return sum[0];
}

enum { PAIRS = 256 }; // pairs of k in a panel

// Multiplies the same two panels of bf16 `products` times.
static float calibrate_bf16(const MatmulKernel *kernel, size_t products) {
    static const uint16_t panels[2][BF16_AMX_ROWS * 2 * PAIRS] __attribute__((aligned(64))); // zeros
    float c[BF16_AMX_ROWS * BF16_COLUMNS] __attribute__((aligned(64))), sum = 0;
    for (size_t i = 0; i < products; i++) {
        kernel->bf16_tile(c, panels[0], panels[1], PAIRS, kernel->rows, &(Ahead){0});
        sum += c[0];
    }
    return sum;
}

typedef struct {
    const MatmulKernel *kernel;
    char *memory; // (2, copy_bytes): a round copies the first half to the second; NULL: a round multiplies
    size_t threads, steps;
} Round;

static size_t products_of(const Round *r) {
    return r->steps * CALIBRATE_CHAINS * VEC / (r->kernel->rows * r->kernel->columns * PAIRS);
}

// Floating-point operations of one thread in a round of products.
static double work_of(const Round *r) {
    double bf16 = 2.0 * PAIRS * (double)(products_of(r) * r->kernel->rows * r->kernel->columns);
    return 2 * (r->kernel->type == DTYPE_BF16 ? bf16 : (double)VEC * CALIBRATE_CHAINS * (double)r->steps);
}

// Does one thread's share of a round.
static float run_share(const Round *r, size_t thread) {
    size_t part = copy_bytes / r->threads;
    if (r->memory) memcpy(r->memory + copy_bytes + thread * part, r->memory + thread * part, part);
    else if (r->kernel->type == DTYPE_BF16) return calibrate_bf16(r->kernel, products_of(r));
    else {
        size_t steps = r->steps;
        __asm__ volatile("" : "+r"(steps)); // hidden from the compiler: the work stays between the two clock readings
        return calibrate_chains(steps);
    }
    return 0;
}

// Seconds of the fastest round that begins within 50 ms.
static double fastest(const Round *r) {
    double best = 1e9, now = clock_seconds(), end = now + 0.05;
    volatile float used; // keeps the compiler from dropping the work
    while (now < end) {
        double start = now;
        float total = 0;
#pragma omp parallel num_threads((int)r->threads) reduction(+ : total)
        total += run_share(r, (size_t)omp_get_thread_num());
        used = total;
        now = clock_seconds();
        if (now - start < best) best = now - start;
    }
    (void)used;
    return best;
}

double calibrate_flops(int threads, Dtype type) {
    const Round r = {matmul_kernel(type), NULL, (size_t)threads, STEPS};
    if (!r.kernel) return 0;
    return work_of(&r) * threads / fastest(&r);
}

double calibrate_probe(int threads, Dtype type) {
    const Round r = {matmul_kernel(type), NULL, (size_t)threads, type == DTYPE_BF16 ? STEPS : STEPS / 10};
    double rate = 0;
#pragma omp parallel num_threads(threads) reduction(+ : rate)
    {
        double start = clock_seconds();
        float result = run_share(&r, (size_t)omp_get_thread_num());
        __asm__ volatile("" ::"m"(result)); // keeps the compiler from dropping the work
        rate += work_of(&r) / (clock_seconds() - start);
    }
    return rate;
}

double calibrate_copy(int threads) {
    Round r = {.threads = (size_t)threads};
    Error e;
    if (memory_alloc((void **)&r.memory, 2 * copy_bytes, "calibration", &e)) return 0;
    memset(r.memory, 1, 2 * copy_bytes); // maps every page
    double seconds = fastest(&r);
    memory_free(r.memory);
    return 2.0 * (double)copy_bytes / seconds;
}
