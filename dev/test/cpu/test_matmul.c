// Compares every product with plain loops in double: random shapes, edges, NaN, guards, threads. Compares
// vector_math.h's exp and GELU with libm in double.
#include "arrays.h"
#include "cpu/layers.h"
#include "cpu/matmul_kernel.h"
#include "cpu/value.h"

#include <float.h>

static size_t random_below(size_t n) { return random_next() % n; }

// Returns random numbers between guards: the contents of C before a product accumulates.
static float *guarded_random(size_t n) {
    float *x = guarded_array(n);
    for (size_t i = 0; i < n; i++) x[i] = random_float();
    return x;
}

enum { ROWS_MOST = 1200 }; // most rows of C

static Matmul matmul_create(const MatmulKernel *kernel, int threads, size_t a_block) {
    size_t bytes = round_up(matmul_scratch(kernel->type, ROWS_MOST), 64);
    return (Matmul){threads, kernel, a_block, aligned_alloc(64, bytes)};
}

// The kernels that this machine can run, fp32 first.
static const MatmulKernel *kernels[8] = {&matmul_fp32};
static int kernel_count = 1;

static void find_kernels(void) {
    for (const MatmulKernel *kernel = matmul_bf16; kernel->name; kernel++)
        if (kernel->available()) kernels[kernel_count++] = kernel;
}

// Returns x as values of the type; also rounds x itself.
static void *values_of(float *x, size_t n, Dtype type) {
    void *values = malloc(n * value_bytes(type) + 1);
    for (size_t i = 0; i < n; i++) value_set(values, i, x[i], type), x[i] = value_get(values, i, type);
    return values;
}

// Returns the largest error as a fraction of the error that rounding may cause in a sum of K products of numbers up to
// 1, rounded to the type. A NaN counts as a huge error.
static double worst_error(const void *got, Dtype type, const float *want, size_t n, size_t K) {
    double worst = 0, unit = 6e-8 * (8 + sqrt((double)K)) * (1 + sqrt((double)K));
    double rounding = type == DTYPE_BF16 ? 0x1.01p-8 : 0;
    for (size_t i = 0; i < n; i++) {
        double error = fabs((double)value_get(got, i, type) - want[i]) / (unit + rounding * fabs((double)want[i]));
        if (!(error <= worst)) worst = isnan(error) ? 1e9 : error;
    }
    return worst;
}

enum { NN, NT, TN, PRODUCTS };
static const char *const product_names[PRODUCTS] = {"nn", "nt", "tn"};

// C (M,N) sums over K.
typedef struct {
    int product;
    size_t M, N, K;
    bool accumulate, vector; // vector: nn's bias, tn's column sums
} Case;

static void run_product(Matmul mm, const Case *t, void *c, float *sums, const void *a, const void *b,
                        const void *bias) {
    switch (t->product) {
    case NN: matmul_nn(mm, c, a, b, t->vector ? bias : NULL, t->M, t->N, t->K); break;
    case NT: matmul_nt(mm, c, a, b, t->M, t->N, t->K); break;
    case TN: matmul_tn(mm, c, t->vector ? sums : NULL, a, b, t->M, t->N, t->K, t->accumulate); break;
    }
}

// Computes the formulas of matmul.h in plain loops.
static void expect_product(const Case *t, float *c, float *sums, const float *a, const float *b, const float *bias) {
    size_t M = t->M, N = t->N, K = t->K;
    for (size_t i = 0; i < M; i++)
        for (size_t j = 0; j < N; j++) {
            double sum = (t->accumulate ? c[i * N + j] : 0) + (t->product == NN && t->vector ? bias[j] : 0);
            for (size_t k = 0; k < K; k++)
                sum +=
                    (double)a[t->product == TN ? k * M + i : i * K + k] * b[t->product == NT ? j * K + k : k * N + j];
            c[i * N + j] = (float)sum;
        }
    for (size_t j = 0; j < N && t->product == TN; j++) {
        double sum = t->accumulate ? sums[j] : 0;
        for (size_t k = 0; k < K; k++) sum += b[k * N + j];
        sums[j] = (float)sum;
    }
}

static void check_case(Matmul one, Matmul many, Case t) {
    Dtype type = one.kernel->type, c_type = t.product == TN ? DTYPE_FP32 : type;
    size_t n = t.M * t.N, bytes = n * value_bytes(c_type);
    float *a = random_array(t.M * t.K, 1), *b = random_array(t.K * t.N, 1), *bias = random_array(t.N, 1);
    void *a_values = values_of(a, t.M * t.K, type), *b_values = values_of(b, t.K * t.N, type),
         *bias_values = values_of(bias, t.N, type);
    float *c[3], *sums[3]; // [0] expected; [1] by one thread; [2] by several. c[1] and c[2] hold values of c_type
    for (int i = 0; i < 3; i++) {
        c[i] = t.accumulate ? guarded_random(n) : guarded_array(n);
        sums[i] = t.accumulate ? guarded_random(t.N) : guarded_array(t.N);
        if (i > 0) memcpy(c[i], c[0], n * sizeof(float)), memcpy(sums[i], sums[0], t.N * sizeof(float));
    }
    expect_product(&t, c[0], sums[0], a, b, bias);
    run_product(one, &t, c[1], sums[1], a_values, b_values, bias_values);
    run_product(many, &t, c[2], sums[2], a_values, b_values, bias_values);
    char name[200];
    snprintf(name, sizeof name, "%s %s M %zu N %zu K %zu accumulate %d", one.kernel->name, product_names[t.product],
             t.M, t.N, t.K, t.accumulate);
    double error = worst_error(c[1], c_type, c[0], n, t.K);
    CHECK(error < 1, "%s: error %g", name, error);
    CHECK(!memcmp(c[1], c[2], bytes), "%s: threads differ", name);
    CHECK(guards_intact(c[1], n) && guards_intact(c[2], n), "%s wrote beyond C", name);
    const uint32_t *after = (uint32_t *)((char *)c[1] + round_up(bytes, 4)), *end = (uint32_t *)(c[1] + n);
    for (; after < end; after++) CHECK(*after == guard_bits, "%s wrote beyond C", name); // bf16 fills half
    if (t.product == TN && t.vector) {
        error = worst_error(sums[1], DTYPE_FP32, sums[0], t.N, t.K);
        CHECK(error < 1, "%s, column sums: error %g", name, error);
        CHECK(!memcmp(sums[1], sums[2], t.N * sizeof(float)), "%s, column sums: threads differ", name);
        CHECK(guards_intact(sums[1], t.N), "%s, column sums: wrote beyond", name);
    }
    for (int i = 0; i < 3; i++) guarded_free(c[i]), guarded_free(sums[i]);
    free(a), free(b), free(bias), free(a_values), free(b_values), free(bias_values);
}

static void check_shapes(const size_t (*shapes)[3], size_t count) {
    for (int k = 0; k < kernel_count; k++) {
        Matmul one = matmul_create(kernels[k], 1, matmul_a_block()); // `two` and `five` use small blocks of A
        Matmul two = matmul_create(kernels[k], 2, 40 << 10), five = matmul_create(kernels[k], 5, 1);
        for (size_t i = 0; i < count; i++)
            for (int variant = 0; variant < 4 * PRODUCTS; variant++) {
                Case t = {variant / 4, shapes[i][0], shapes[i][1], shapes[i][2], variant & 1, variant & 2};
                if (!t.accumulate || t.product == TN) check_case(one, i % 2 ? two : five, t);
            }
        free(one.scratch), free(two.scratch), free(five.scratch);
    }
}

static void test_small_shapes(void) { // each of M, N and K from 1 to past a tile
    size_t shapes[80][3];
    for (size_t i = 0; i < 80; i++)
        for (int j = 0; j < 3; j++) shapes[i][j] = 1 + (i < 40 ? (i * (size_t)(j * 2 + 1)) % 40 : random_below(80));
    check_shapes((const size_t(*)[3])shapes, 80);
}

static void test_blocked_shapes(void) { // beyond one block of K or N, with and without a remainder
    const size_t shapes[][3] = {{1, 1, 1000},    {1, 1100, 1},   {1100, 1, 1},    {13, 33, 769}, {37, 513, 385},
                                {24, 1024, 384}, {70, 384, 128}, {64, 1537, 9},   {1025, 47, 5}, {12, 32, 1153},
                                {769, 33, 13},   {385, 513, 37}, {1024, 24, 384}, {690, 3, 801}, {3, 3100, 801},
                                {601, 464, 9}}; // large enough for tn to write past the caches
    check_shapes(shapes, sizeof shapes / sizeof *shapes);
}

// A row's result does not depend on the other rows; NaN and infinity stay in their rows.
static void check_rows(const MatmulKernel *kernel) {
    enum { M = 29, K = 801, N = 83 };
    Matmul mm = matmul_create(kernel, 2, matmul_a_block());
    Dtype type = kernel->type;
    float *x = random_array(M * K, 1), *w = random_array(K * N, 1);
    x[3 * K + 7] = NAN, x[9 * K + 2] = INFINITY;
    void *xv = values_of(x, M * K, type), *wv = values_of(w, K * N, type), *y = malloc(M * N * 4), *row = malloc(N * 4);
    matmul_nn(mm, y, xv, wv, NULL, M, N, K);
    for (size_t i = 0; i < M; i++) {
        const bool bad = i == 3 || i == 9;
        matmul_nn(mm, row, value_at(xv, i * K, type), wv, NULL, 1, N, K);
        CHECK(bad || !memcmp(row, value_at(y, i * N, type), N * value_bytes(type)), "%s: row %zu differs", kernel->name,
              i);
        for (size_t j = 0; j < N; j++) {
            float got = value_get(y, i * N + j, type);
            CHECK(!isfinite(got) == bad, "%s: row %zu column %zu: %g", kernel->name, i, j, got);
        }
    }
    free(x), free(w), free(xv), free(wv), free(y), free(row), free(mm.scratch);
}
static void test_rows(void) {
    for (int i = 0; i < kernel_count; i++) check_rows(kernels[i]);
}

static void test_exp(void) {
    double worst = 0;
    for (int i = 0; i < 400000; i++) {
        float x = random_float() * 87.3f;
        double want = exp((double)x), ulps = fabs(vec_exp(vec_set(x))[VEC - 1] - want) / ldexp(1, ilogb(want) - 23);
        worst = worse(worst, ulps);
    }
    CHECK(worst < 1.1, "%g ulp", worst);
    const float exact[][2] = {
        {0, 1},        {-0.0f, 1},           {-INFINITY, 0}, {-1000, 0},        {-1e13f, 0},
        {-FLT_MAX, 0}, {INFINITY, INFINITY}, {89, INFINITY}, {1e13f, INFINITY}, {FLT_MAX, INFINITY}};
    for (size_t i = 0; i < sizeof exact / sizeof *exact; i++) {
        volatile float x = exact[i][0]; // volatile: computed at run time, where sanitizers check it
        float got = vec_exp(vec_set(x))[0];
        CHECK(got == exact[i][1], "exp(%g) = %g", exact[i][0], got);
    }
    CHECK(isnan(vec_exp(vec_set(NAN))[0]), "exp(NaN) is not NaN");
    CHECK(isfinite(vec_exp(vec_set(88.72f))[0]), "exp(88.72) overflowed");
}

// Returns GELU by its formula with tanh, in double.
static double gelu_reference(double x) {
    return 0.5 * x * (1 + tanh(sqrt(2 / 3.14159265358979323846) * (x + 0.044715 * x * x * x)));
}

static void test_gelu(void) {
    enum { FLOATS = 70001 }; // enough for several threads, and odd
    float *y = guarded_array(FLOATS), *dx = guarded_array(FLOATS);
    float *x = random_array(FLOATS, 1), *dy = random_array(FLOATS, 1);
    for (size_t i = 0; i < FLOATS; i++) x[i] *= i % 2 ? 8 : 1;
    gelu_forward(y, x, FLOATS, DTYPE_FP32);
    gelu_backward(dx, dy, x, FLOATS, DTYPE_FP32);
    for (size_t i = 0; i < FLOATS; i++) {
        CHECK_CLOSE(y[i], gelu_reference(x[i]), 1e-6, 0.02);
        double h = 1e-5, slope = (gelu_reference(x[i] + h) - gelu_reference(x[i] - h)) / (2 * h);
        CHECK_CLOSE(dx[i], dy[i] * slope, 1e-6, 0.1 + fabs(dy[i]));
    }
    CHECK(guards_intact(y, FLOATS) && guards_intact(dx, FLOATS), "wrote beyond");
    for (size_t n = 0; n < 70; n++) { // short arrays, in place, give the same bits as the long array
        memcpy(dx, x, n * 4);
        gelu_forward(dx, dx, n, DTYPE_FP32);
        CHECK(!memcmp(dx, y, n * 4), "n %zu differs", n);
    }
    float large[2] = {50, -50}, result[2];
    gelu_forward(result, large, 2, DTYPE_FP32);
    CHECK(result[0] == 50 && result[1] == 0, "gelu(+-50) = %g, %g", result[0], result[1]);
    guarded_free(y), guarded_free(dx), free(x), free(dy);
}

int main(void) {
    find_kernels();
    RUN(test_small_shapes, test_blocked_shapes, test_rows, test_exp, test_gelu);
    return test_summary();
}
