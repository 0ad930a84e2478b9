// bf16_tile_neon against sums in double, against integers that fp32 holds exactly, and against bfdot. On Arm with bf16; make
// test-arm runs it under qemu.
#include "../test.h"

#include "base/float16.h"
#include "cpu/bf16_kernels.h"
#include "math/rng.h"

#ifdef __aarch64__

#    include <arm_neon.h>

enum { ROWS = 12, COLUMNS = 32, PAIRS = 208, GUARD = 64 };

static uint16_t a[PAIRS * ROWS * 2], b[PAIRS * COLUMNS * 2];
static float c[ROWS * COLUMNS + GUARD];

// Elements of a and b: normal deviates, or integers from -8 to 8.
static void fill(uint16_t *x, size_t n, uint64_t stream, bool integers) {
    for (size_t i = 0; i < n; i++)
        x[i] = f32_to_bf16(integers ? (float)((int)(rng_u32(1, stream, i) % 17) - 8) : (float)rng_normal(1, stream, i));
}

static void multiply(size_t pairs) {
    for (size_t i = 0; i < ROWS * COLUMNS + GUARD; i++) c[i] = NAN;
    bf16_tile_neon(c, a, b, pairs);
    for (size_t i = 0; i < GUARD; i++) CHECK(isnan(c[ROWS * COLUMNS + i]), "written %zu floats after c", i);
}

// Element (i, j) in double, and the sum of the products' magnitudes.
static double exact(size_t pairs, int i, int j, double *magnitude) {
    double sum = 0;
    *magnitude = 0;
    for (size_t k = 0; k < 2 * pairs; k++) {
        double x = bf16_to_f32(a[k / 2 * ROWS * 2 + (size_t)i * 2 + k % 2]),
               y = bf16_to_f32(b[k / 2 * COLUMNS * 2 + (size_t)j * 2 + k % 2]);
        sum += x * y;
        *magnitude += fabs(x * y);
    }
    return sum;
}

static void check_products(bool integers) {
    static const size_t lengths[] = {0, 16, 32, 48, PAIRS};
    fill(a, sizeof a / sizeof *a, 10, integers);
    fill(b, sizeof b / sizeof *b, 11, integers);
    for (size_t n = 0; n < sizeof lengths / sizeof *lengths; n++) {
        multiply(lengths[n]);
        for (int i = 0; i < ROWS; i++)
            for (int j = 0; j < COLUMNS; j++) {
                double magnitude, want = exact(lengths[n], i, j, &magnitude), got = c[i * COLUMNS + j];
                double most = integers ? 0 : 0x1p-23 * sqrt((double)lengths[n]) * magnitude; // roundings to odd
                CHECK(fabs(got - want) <= most, "%zu pairs, (%d, %d): %.9g, want %.9g", lengths[n], i, j, got, want);
            }
    }
}

static void test_products(void) {
    if (!bf16_neon_is_here()) SKIP("a core without bf16");
    check_products(false);
}

static void test_integers(void) {
    if (!bf16_neon_is_here()) SKIP("a core without bf16");
    check_products(true);
}

// Column j of row i, pair by pair.
__attribute__((target("arch=armv8.2-a+bf16"))) static float by_bfdot(int i, int j) {
    float32x2_t sum = vdup_n_f32(0);
    for (size_t pair = 0; pair < PAIRS; pair++) {
        uint16_t x[4] = {0}, y[4] = {0};
        memcpy(x, a + (pair * ROWS + (size_t)i) * 2, 4);
        memcpy(y, b + (pair * COLUMNS + (size_t)j) * 2, 4);
        sum = vbfdot_f32(sum, vreinterpret_bf16_u16(vld1_u16(x)), vreinterpret_bf16_u16(vld1_u16(y)));
    }
    return vget_lane_f32(sum, 0);
}

static void test_bits_of_bfdot(void) {
    if (!bf16_neon_is_here()) SKIP("a core without bf16");
    fill(a, sizeof a / sizeof *a, 12, false);
    fill(b, sizeof b / sizeof *b, 13, false);
    multiply(PAIRS);
    for (int i = 0; i < ROWS; i++)
        for (int j = 0; j < COLUMNS; j++) {
            float want = by_bfdot(i, j), got = c[i * COLUMNS + j];
            CHECK(f32_bits(want) == f32_bits(got), "(%d, %d): %.9g, want %.9g", i, j, (double)got, (double)want);
        }
}

int main(void) {
    RUN(test_products);
    RUN(test_integers);
    RUN(test_bits_of_bfdot);
    return test_summary();
}

#else

static void test_products(void) { SKIP("not an Arm machine"); }

int main(void) {
    RUN(test_products);
    return test_summary();
}

#endif
